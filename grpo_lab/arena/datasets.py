"""Data sets of the arena: read, mapped to a category, checked, kept.

A category says which texts a row must have. A column mapping says in which
columns of the source they stand. Rows that can't be used are left out and
counted, so that whoever registers a data set knows what a training will see
of it.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub

from grpo_lab import data
from grpo_lab.data import SOURCES, Row, Source, Splits
from grpo_lab.errors import LabError, first_line, nearest
from grpo_lab.files import write_whole

CATEGORIES = {
    "reasoning": ("question", "answer"),
    "preference": ("prompt", "chosen", "rejected"),
    "sft": ("prompt", "target"),
}
"""The texts of a row, for each category."""

FILE_NAME = "train.jsonl"
"""Where the usable rows of a data set stand, in a folder of its own."""


def read(
    category: str,
    column_mapping: Mapping[str, str] | str | None,
    *,
    file: str | Path | None = None,
    hf_dataset_name: str | None = None,
    hf_config: str | None = None,
    hf_split: str | None = None,
    description: str = "",
) -> tuple[list[Row], dict[str, Any]]:
    """Read a data set, and leave out what can't be used.

    Args:
        category: a key of `CATEGORIES`.
        column_mapping: for each text of the category, the column that holds
            it, as a dict or as JSON; None where they have the same names.
        file: of one of `data.ENDINGS`.
        hf_dataset_name: "owner/name" on the Hub, instead of a file. What
            `grpo_lab.data` pins is loaded at that revision.
        hf_config, hf_split: which part of it; "train" if no split is named.
        description: the reader's own words.

    Returns:
        The usable rows under the category's own names; and a record of plain
        values, with the number of `rows`, of those left out (`nulls`: a
        mapped column held no text; `unreadable`: no reward could read the
        answer; `repeated`: the same question, or for other categories the
        same row, came before; `conflicting`: the question has another answer
        elsewhere), and the `fingerprint` of the rows.

    Raises:
        LabError: something is named that isn't there, the source can't be
            read, or no row of it can be used.
    """
    mapping = _mapping(category, column_mapping)
    if file and not (hf_dataset_name or hf_config or hf_split):
        path = Path(file).expanduser()
        data.refuse_missing_part([path])
        all_rows, source = data.read_file(path, mapping), path.name
    elif hf_dataset_name and not file:
        split = hf_split or "train"
        all_rows, source = _read_hub(
            hf_dataset_name, hf_config, split, mapping
        )
    else:
        raise LabError(
            "A data set comes from one place: type file = 'rows.csv' for a "
            "file of your own, or hf_dataset_name = 'openai/gsm8k', with "
            "hf_config and hf_split if you like, for one from the Hub."
        )
    rows, left_out, examples = _sift(all_rows, category)
    if not rows:
        shown = " and ".join(f"{row!r:.200}" for row in examples)
        raise LabError(
            f"No row of {source} can be used: {left_out['nulls']} have "
            f"nothing in a mapped column, {left_out['unreadable']} have an "
            f"answer that can't be read. The first: {shown}. An answer must "
            "be a number or a text that ends in '#### 72'. Mend the rows, or "
            "type another column_mapping."
        )
    return rows, {
        "category": category,
        "column_mapping": mapping,
        "source": source,
        "rows": len(rows),
        **left_out,
        "fingerprint": data.fingerprint(rows),
        "description": description,
    }


def write(rows: Sequence[Row], folder: Path) -> None:
    """Keep usable rows in a folder of their own, whole or not at all."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_whole(Path(folder) / FILE_NAME, "".join(lines))


def load_rows(folder: Path) -> list[Row]:
    """The rows that `write` kept, in their order."""
    file = Path(folder) / FILE_NAME
    if not file.is_file():
        raise LabError(
            f"The rows of this data set are gone from {file}. Put them back, "
            "or create the data set again under another name."
        )
    return list(data.read_jsonl(file))


def splits(
    folder: Path,
    record: Mapping[str, Any],
    fitness_rows: int,
    test_rows: int,
    seed: int,
    system_prompt: str,
) -> tuple[Splits, datasets.Dataset]:
    """Divide a registered data set for an evolution.

    Args:
        folder, record: what `write` was given, and what `read` gave.
        fitness_rows: questions that members are ranked by, at least 1.
        test_rows: questions that nothing is selected by, at least 0.
        seed: decides which questions are which, and their order.
        system_prompt: "" takes GSM8K's.

    Returns:
        Splits whose `eval` are the fitness rows and whose `train` is all
        that is left, and the test rows. No question is in two of the three.

    Raises:
        LabError: the category is not reasoning, there are too few rows, or
            they are not the rows that were registered.
    """
    check_trainable(record)
    rows, held_out = record["rows"], fitness_rows + test_rows
    if fitness_rows < 1 or test_rows < 0 or rows <= held_out:
        fits = rows // 4
        raise LabError(
            f"fitness_rows is {fitness_rows} and test_rows is {test_rows}, "
            "but at least 1 question must rank the members, and at least 1 "
            f"of the {rows} usable rows must be left to train on. Add rows, "
            f"or type for example fitness_rows = {fits} and test_rows = "
            f"{fits}."
        )
    if data.fingerprint(load_rows(folder)) != record["fingerprint"]:
        raise LabError(
            f"The rows in {Path(folder) / FILE_NAME} are not those that were "
            "registered: the file was changed since. Delete the data set, "
            "and create it again from its source."
        )
    loaded = data.load_splits(
        "gsm8k",
        path=str(folder),
        train_rows=rows - held_out,
        eval_rows=held_out,
        seed=seed,
        system_prompt=system_prompt,
    )
    fitness = loaded.eval.select(range(fitness_rows))
    # A list, because an empty range may not begin at the end.
    test = loaded.eval.select(list(range(fitness_rows, held_out)))
    divided = replace(
        loaded,
        eval=fitness,
        source=f"{record['source']}: {fitness_rows} rows for the fitness, "
        f"{test_rows} for the test",
        fingerprint=data.fingerprint(loaded.train, fitness),
    )
    return divided, test


def check_trainable(record: Mapping[str, Any]) -> None:
    """Refuse a data set that is no reasoning one."""
    if record["category"] != "reasoning":
        raise LabError(
            f"This data set is of the category {record['category']!r}, but "
            "GRPO takes reasoning only: it samples its own completions of a "
            "question, and a reward must be able to check each of them "
            "against an answer. Type the name of a data set that was created "
            "with category = 'reasoning' and column_mapping = "
            '{"question": "...", "answer": "..."}.'
        )


def list_hub(search: str) -> list[dict[str, object]]:
    """At most 20 data sets on the Hub with these words in their names."""
    try:
        found = list(huggingface_hub.list_datasets(search=search, limit=20))
    except Exception as error:  # the network, or the Hub
        raise LabError(
            f"The Hub can't be searched for {search!r}: "
            f"{first_line(error)} Connect to the internet and try again; "
            "or list the data sets that are registered here, with no search; "
            "or create one from a file of your own with file = 'its path'."
        ) from error
    return [
        {"id": one.id, "downloads": one.downloads, "likes": one.likes}
        for one in found
    ]


def _mapping(
    category: str, given: Mapping[str, str] | str | None
) -> dict[str, str]:
    """The column of each text, in the category's order."""
    if category not in CATEGORIES:
        near = nearest(str(category), CATEGORIES) or "reasoning"
        raise LabError(
            f"There is no category {category!r}; the categories are "
            f"{', '.join(CATEGORIES)}. Type category = {near!r}."
        )
    keys = CATEGORIES[category]
    if given is None:
        return {key: key for key in keys}
    found: object = given
    if isinstance(given, str):
        try:
            found = json.loads(given)
        except ValueError:
            found = None
    if isinstance(found, Mapping) and set(found) == set(keys):
        columns = {key: found[key] for key in keys}
        named = {one for one in columns.values() if isinstance(one, str)}
        if len(named - {""}) == len(keys):
            return columns
    example = json.dumps({key: f"your column of the {key}" for key in keys})
    raise LabError(
        f"column_mapping is {given!r:.200}, but for the category "
        f"{category!r} it must name a different column for each of "
        f"{', '.join(keys)}, and nothing else. Type a mapping such as "
        f"{example}."
    )


def _read_hub(
    name: str, config: str | None, split: str, mapping: dict[str, str]
) -> tuple[list[Row], str]:
    """The rows of a split on the Hub, and where they come from in words.

    A name without an owner is refused, since `datasets` would look for it on
    this machine: a path is read as one, "csv" reads the working directory.
    """
    owner, _, rest = name.partition("/")
    if not owner or not rest or "/" in rest or os.path.exists(name):
        known = SOURCES.get(name, SOURCES["gsm8k"])
        raise LabError(
            f"hf_dataset_name is {name!r}, but it must be an owner and a name "
            "on the Hub, and no path that exists here. Type for example "
            f"hf_dataset_name = {known.hub_id!r}, or file = 'rows.csv' for a "
            "file of your own."
        )
    pins = {source.hub_id: source for source in SOURCES.values()}
    known = pins.get(name, Source())
    rows = data.read_hub(
        name,
        config or known.config,
        known.revision,
        split,
        mapping,
        "type hf_config or hf_split = one of those that it has; or download "
        "a file of it elsewhere and type file = 'its path'.",
    )
    at = known.revision or "its newest revision"
    return rows, f"{name} at {at}, split {split}"


def _sift(
    rows: Iterable[Row], category: str
) -> tuple[list[Row], dict[str, int], list[Row]]:
    """Usable rows; how many were left out and why; the first of those.

    A prompt may well have several pairs of completions, or several targets; a
    question has one answer, and with two that differ nobody knows which.
    """
    usable: dict[object, Row] = {}
    kinds = ("nulls", "unreadable", "repeated", "conflicting")
    left_out = dict.fromkeys(kinds, 0)
    examples: list[Row] = []
    clashes: set[object] = set()
    for row in rows:
        same: object = tuple(row.values())
        if category == "reasoning":
            same = data.normalised(row["question"])
        if not all(value.strip() for value in row.values()):
            fault = "nulls"
        elif category == "reasoning" and not SOURCES["gsm8k"].usable(row):
            fault = "unreadable"
        elif same in usable:
            fault = "repeated"
            if category == "reasoning" and not data.same_answer(
                usable[same]["answer"], row["answer"]
            ):
                fault = "conflicting"
                clashes.add(same)
        else:
            usable[same] = row
            continue
        left_out[fault] += 1
        examples.append(row)
    left_out["conflicting"] += len(clashes)
    kept = [row for same, row in usable.items() if same not in clashes]
    return kept, left_out, examples[:2]
