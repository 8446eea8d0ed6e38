"""Data sets of the arena: read, mapped to a category, checked, kept.

A category says which texts a row must have. A column mapping says in which
columns of the source they stand. Rows that can't be used are left out and
counted, so that whoever registers a data set knows what a training will see
of it.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import datasets
import huggingface_hub

from grpo_lab import data
from grpo_lab.data import SOURCES, Source, Splits
from grpo_lab.errors import LabError, nearest
from grpo_lab.files import write_whole
from grpo_lab.rows import (
    HUB_ERRORS,
    as_text,
    listed,
    one_line,
    read_hub,
    read_jsonl,
    read_rows,
    short,
)
from rewards import gold_number

CATEGORIES = {
    "reasoning": ("question", "answer"),
    "preference": ("prompt", "chosen", "rejected"),
    "sft": ("prompt", "target"),
}
"""The texts of a row, for each category."""

FILE_NAME = "train.jsonl"
"""Where the usable rows of a data set stand, in a folder of its own."""

HUB_RESULTS = 20
SHOWN_ROWS = 2

Row = dict[str, str]


@dataclass(frozen=True)
class Registered:
    """What is known of a data set once it was read.

    Attributes:
        category: a key of `CATEGORIES`.
        column_mapping: for each text of the category, the source's column.
        source: the name of the file, or the Hub's id with its revision.
        rows: how many rows can be used.
        nulls: rows left out because a mapped column was empty.
        unreadable: rows left out because a value was no text or, for
            reasoning, because no reward could read the gold.
        repeated: rows left out because they came before: for reasoning the
            same question, for the others the same row.
        fingerprint: sha256 over the usable rows, the same on any machine.
        description: the reader's own words.
    """

    category: str
    column_mapping: dict[str, str]
    source: str
    rows: int
    nulls: int
    unreadable: int
    repeated: int
    fingerprint: str
    description: str = ""

    def to_dict(self) -> dict:
        """Plain values for JSON; `from_dict` is the way back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "Registered":
        """What `to_dict` gave; other keys are passed over."""
        return cls(**{f.name: values[f.name] for f in fields(cls)})


def same_names(category: str) -> dict[str, str]:
    """The mapping for columns that are named as the category's keys.

    For a category that there is not it is empty, and `read` refuses it.
    """
    return {key: key for key in CATEGORIES.get(category, ())}


def read(
    category: str,
    column_mapping: Mapping[str, str] | str,
    *,
    file: str | Path | None = None,
    hf_dataset_name: str | None = None,
    hf_config: str | None = None,
    hf_split: str | None = None,
    description: str = "",
) -> tuple[list[Row], Registered]:
    """Read a data set, and leave out what can't be used.

    Args:
        category: a key of `CATEGORIES`.
        column_mapping: for each text of the category, the column that holds
            it, as a dict or as JSON. Other columns are not read.
        file: a file that ends in .csv, .parquet, .jsonl or .json; the last
            two hold one JSON object per line.
        hf_dataset_name: "owner/name" on the Hub, instead of a file. What
            `grpo_lab.data` pins is loaded at that revision.
        hf_config, hf_split: which part of the Hub's data set; the split is
            "train" if none is named.
        description: the reader's own words.

    Returns:
        The usable rows under the category's own names, in the order of the
        source, and what is known of them. Numbers become text: 72.0 is "72".

    Raises:
        LabError: something is named that isn't there, the source can't be
            read, or no row of it can be used.
    """
    mapping = _mapping(category, column_mapping)
    if bool(file) == bool(hf_dataset_name) or (
        file and (hf_config or hf_split)
    ):
        raise LabError(
            "A data set comes from one place: type file = 'rows.csv' for a "
            "file of your own, or hf_dataset_name = 'openai/gsm8k', with "
            "hf_config and hf_split if you like, for one from the Hub."
        )
    columns = list(mapping.values())
    if file:
        raw_rows, source = read_rows(Path(file), columns), Path(file).name
    else:
        split = hf_split or "train"
        raw_rows, source = _read_hub(
            hf_dataset_name, hf_config, split, columns
        )
    rows, left_out, examples = _sift(raw_rows, category, mapping)
    if not rows:
        shown = " and ".join(short(example, 200) for example in examples)
        raise LabError(
            f"No row of {source} can be used: {left_out['nulls']} have "
            f"nothing in a mapped column, {left_out['unreadable']} have what "
            f"can't be read. The first in the mapped columns: {shown}. They "
            "must hold text, and the answer of a question a number or a text "
            "that ends in '#### 72'. Mend the rows, or type another "
            "column_mapping."
        )
    return rows, Registered(
        category=category,
        column_mapping=mapping,
        source=source,
        rows=len(rows),
        nulls=left_out["nulls"],
        unreadable=left_out["unreadable"],
        repeated=left_out["repeated"],
        fingerprint=data.fingerprint(rows),
        description=description,
    )


def write(rows: Sequence[Row], folder: Path) -> None:
    """Keep usable rows in a folder of their own, whole or not at all.

    Raises:
        LabError: the disk is full, or the folder can't be written.
    """
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_whole(Path(folder) / FILE_NAME, "".join(lines))


def load_rows(folder: Path) -> list[Row]:
    """The rows that `write` kept, in their order.

    Raises:
        LabError: they are not there any more, or can't be read.
    """
    file = Path(folder) / FILE_NAME
    if not file.is_file():
        raise LabError(
            f"The rows of this data set should be in {file}, but there is no "
            "such file. Somebody moved or deleted it. Put it back, or "
            "create the data set again under another name."
        )
    return list(read_jsonl(file))


def splits(
    folder: Path,
    registered: Registered | dict,
    fitness_rows: int,
    test_rows: int,
    seed: int,
    system_prompt: str,
) -> tuple[Splits, datasets.Dataset]:
    """Divide a registered data set for an evolution.

    Args:
        folder: what `write` was given.
        registered: what `read` gave, or its `to_dict`.
        fitness_rows: questions that members are ranked by, at least 1.
        test_rows: questions that nothing is selected by, at least 0.
        seed: decides which questions are which, and their order.
        system_prompt: the reader's own; "" takes GSM8K's.

    Returns:
        Splits whose `eval` are the fitness rows and whose `train` is all
        that is left, and the test rows. No question is in two of the three.

    Raises:
        LabError: the category is not reasoning, there are too few rows, or
            they are not the rows that were registered.
    """
    if isinstance(registered, dict):
        registered = Registered.from_dict(registered)
    check_trainable(registered)
    _check_sizes(registered, fitness_rows, test_rows)
    _check_unchanged(folder, registered)
    held_out = fitness_rows + test_rows
    loaded = data.load_splits(
        "gsm8k",
        path=str(folder),
        train_rows=registered.rows - held_out,
        eval_rows=held_out,
        seed=seed,
        system_prompt=system_prompt,
    )
    fitness = loaded.eval.select(range(fitness_rows))
    # A list, because an empty range may not begin at the end.
    test = loaded.eval.select(list(range(fitness_rows, held_out)))
    source = (
        f"{registered.source}: {fitness_rows} rows for the fitness, "
        f"{test_rows} for the test"
    )
    divided = Splits(
        loaded.train, fitness, source, data.fingerprint(loaded.train, fitness)
    )
    return divided, test


def list_hub(search: str) -> list[dict[str, object]]:
    """Data sets on the Hub whose names have these words in them.

    Returns:
        At most `HUB_RESULTS`, each with `id`, `downloads` and `likes`.

    Raises:
        LabError: the Hub can't be asked.
    """
    try:
        found = list(
            huggingface_hub.list_datasets(search=search, limit=HUB_RESULTS)
        )
    except HUB_ERRORS as error:
        raise LabError(
            f"The Hub can't be searched for {search!r}: {one_line(error)}. "
            "Connect to the internet and try again; or list the data sets "
            "that are registered here, with no search; or create one from a "
            "file of your own with file = 'its path'."
        ) from error
    return [
        {"id": one.id, "downloads": one.downloads, "likes": one.likes}
        for one in found
    ]


# --- What was asked for -----------------------------------------------------


def _mapping(category: str, given: Mapping[str, str] | str) -> dict[str, str]:
    """The column of each text, in the category's order."""
    if category not in CATEGORIES:
        near = nearest(str(category), CATEGORIES) or "reasoning"
        raise LabError(
            f"There is no category {category!r}; the categories are "
            f"{listed(CATEGORIES)}. Type category = {near!r}."
        )
    keys = CATEGORIES[category]
    found = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except (ValueError, RecursionError):
            found = None
    if (
        isinstance(found, Mapping)
        and set(found) == set(keys)
        and all(isinstance(one, str) and one for one in found.values())
        and len(set(found.values())) == len(keys)
    ):
        return {key: found[key] for key in keys}
    example = json.dumps({key: f"your column of the {key}" for key in keys})
    raise LabError(
        f"column_mapping is {short(given, 200)}, but for the category "
        f"{category!r} it must name a column for each of {listed(keys)}, all "
        f"of them different, and nothing else. Type a mapping such as "
        f"{example}."
    )


def _read_hub(
    name: str, config: str | None, split: str, columns: list[str]
) -> tuple[list[dict], str]:
    """The rows of a split on the Hub, and where they come from in words.

    A name without an owner is refused, since `datasets` would look for it on
    this machine: a path is read as one, "csv" reads the working directory.
    """
    owner, _, rest = name.partition("/")
    if not owner or not rest or "/" in rest or os.path.exists(name):
        ids = {source.name: source.hub_id for source in SOURCES.values()}
        raise LabError(
            f"hf_dataset_name is {name!r}, but it must be an owner and a name "
            "on the Hub, and no path that exists here. Type for example "
            f"hf_dataset_name = {ids.get(name) or 'openai/gsm8k'!r}, or file "
            "= 'rows.csv' for a file of your own."
        )
    pins = {source.hub_id: source for source in SOURCES.values()}
    known = pins.get(name, Source(name))
    rows, revision = read_hub(
        name,
        config or known.config,
        split,
        known.revision,
        columns,
        "type hf_config or hf_split = one of those that it has; or download "
        "a file of it elsewhere and type file = 'its path'.",
    )
    return (
        rows,
        f"{name} at {revision or 'its newest revision'}, split {split}",
    )


# --- Checking rows ----------------------------------------------------------


def _sift(
    raw_rows: Iterable[dict], category: str, mapping: dict[str, str]
) -> tuple[list[Row], Counter, list[dict]]:
    """Usable rows; how many were left out and why; the first of those."""
    usable: dict[object, Row] = {}
    left_out: Counter = Counter()
    examples: list[dict] = []
    for raw in raw_rows:
        row = {key: as_text(raw[column]) for key, column in mapping.items()}
        fault = _fault(row, category)
        if not fault:
            same = _what_counts(row, category)
            fault = "repeated" if same in usable else ""
            usable.setdefault(same, row)
        if fault:
            left_out[fault] += 1
            if len(examples) < SHOWN_ROWS:
                examples.append(raw)
    return list(usable.values()), left_out, examples


def _fault(row: dict[str, str | None], category: str) -> str:
    """Why a row can't be used, as a name of `Registered`; "" if it can."""
    values = row.values()
    if any(value is not None and not value.strip() for value in values):
        return "nulls"
    if None in values:
        return "unreadable"
    if category == "reasoning" and gold_number(row["answer"]) is None:
        return "unreadable"
    return ""


def _what_counts(row: Row, category: str) -> object:
    """What makes a row another one.

    A prompt may well have several pairs of completions, or several targets;
    a question has one answer.
    """
    if category == "reasoning":
        return data.normalised(row["question"])
    return tuple(row.values())


# --- Dividing rows ----------------------------------------------------------


def check_trainable(registered: Registered) -> None:
    """GRPO takes reasoning data only.

    Raises:
        LabError: the category is another.
    """
    if registered.category != "reasoning":
        raise LabError(
            f"This data set is of the category {registered.category!r}, but "
            "GRPO takes reasoning only: it samples its own completions of a "
            "question, and a reward must be able to check each of them "
            "against an answer. Type the name of a data set that was created "
            "with category = 'reasoning' and column_mapping = "
            '{"question": "...", "answer": "..."}.'
        )


def _check_sizes(
    registered: Registered, fitness_rows: int, test_rows: int
) -> None:
    held_out = fitness_rows + test_rows
    if fitness_rows >= 1 and test_rows >= 0 and registered.rows > held_out:
        return
    fits = registered.rows // 4
    advice = (
        f"Type for example fitness_rows = {fits} and test_rows = {fits}, "
        f"which leaves {registered.rows - 2 * fits} to train on"
        if fits
        else "Add rows"
    )
    raise LabError(
        f"fitness_rows is {fitness_rows} and test_rows is {test_rows}, but at "
        f"least 1 question must rank the members, and at least 1 of the "
        f"{registered.rows} usable rows must be left to train on. {advice}."
    )


def _check_unchanged(folder: Path, registered: Registered) -> None:
    if data.fingerprint(load_rows(folder)) != registered.fingerprint:
        raise LabError(
            f"The rows in {Path(folder) / FILE_NAME} are not those that were "
            "registered: the file was changed since. Delete the data set, "
            "and create it again from its source."
        )
