"""Data sets of the arena: read, mapped to a category, checked, kept.

A category says which texts a row must have. A column mapping says in which
columns of the source they stand; it is checked against the columns that are
really there. Rows that can't be used are left out and counted, so that
whoever registers a data set knows what a training will see of it.
"""

import csv
import difflib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet

from grpo_lab import data
from grpo_lab.data import HUB_ERRORS, SOURCES, Source, Splits
from grpo_lab.errors import LabError
from grpo_lab.files import write_whole
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
SHOWN_COLUMNS = 20
SHOWN_ROWS = 2
BATCH_ROWS = 1000

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
    _check_one_source(file, hf_dataset_name, hf_config, hf_split)
    columns = list(mapping.values())
    if file:
        raw_rows, source = _read_file(Path(file), columns), Path(file).name
    else:
        raw_rows, source = _read_hub(
            hf_dataset_name, hf_config, hf_split or "train", columns
        )
    rows, left_out, examples = _sift(raw_rows, category, mapping)
    if not rows:
        raise _nothing_usable(source, category, left_out, examples)
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
    return list(data.read_jsonl(file))


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
            f"The Hub can't be searched for {search!r}: {_one_line(error)}. "
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
    """The column of each text, in the category's order.

    Raises:
        LabError: it isn't one column for each of them.
    """
    if category not in CATEGORIES:
        near = _nearest(str(category), CATEGORIES) or "reasoning"
        raise LabError(
            f"There is no category {category!r}; the categories are "
            f"{_listed(CATEGORIES)}. Type category = {near!r}."
        )
    keys = CATEGORIES[category]
    example = json.dumps({key: f"your column of the {key}" for key in keys})
    advice = f"Type a mapping such as {example}."
    given = _parsed(given, advice)
    _check_keys(given, category, advice)
    mapping = {key: given[key] for key in keys}
    _check_names(mapping, advice)
    return mapping


def _check_keys(given: Mapping, category: str, advice: str) -> None:
    keys = CATEGORIES[category]
    for key in given:
        if key not in keys:
            near = _nearest(str(key), keys)
            raise LabError(
                f"column_mapping has the key {key!r}, but the keys of the "
                f"category {category!r} are {_listed(keys)}"
                f"{f', and {near!r} is the nearest' if near else ''}. A key "
                f"is the category's name, its value your column. {advice}"
            )
    if missing := [key for key in keys if key not in given]:
        raise LabError(
            f"column_mapping lacks {_listed(missing)}, and a row of the "
            f"category {category!r} needs {_listed(keys)}. {advice}"
        )


def _parsed(given: Mapping[str, str] | str, advice: str) -> Mapping:
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise LabError(
                f"column_mapping is {_short(given)}, which is no valid "
                f"JSON: {error}. {advice}"
            ) from error
    if not isinstance(value, Mapping):
        raise LabError(
            f"column_mapping is {_short(given)}, but it must say for each "
            f"text of a row which column holds it. {advice}"
        )
    return value


def _check_names(mapping: dict[str, str], advice: str) -> None:
    for key, column in mapping.items():
        if not isinstance(column, str) or not column:
            raise LabError(
                f"column_mapping says that {key!r} is in the column "
                f"{_short(column)}, which is no name. {advice}"
            )
    column, times = Counter(mapping.values()).most_common(1)[0]
    if times > 1:
        raise LabError(
            f"column_mapping takes more than one text from the column "
            f"{column!r}; a row would then give its own answer away or "
            f"compare a text with itself. {advice}"
        )


def _check_one_source(
    file: str | Path | None,
    hf_dataset_name: str | None,
    hf_config: str | None,
    hf_split: str | None,
) -> None:
    if bool(file) == bool(hf_dataset_name):
        what = "Both file and" if file else "Neither file nor"
        raise LabError(
            f"{what} hf_dataset_name are given, but a data set comes from "
            "one place. Type file = 'rows.csv' for a file of your own, or "
            "hf_dataset_name = 'openai/gsm8k' for one from the Hub."
        )
    if file and (hf_config or hf_split):
        name = "hf_config" if hf_config else "hf_split"
        raise LabError(
            f"{name} is given for the file {file}, but only data sets of the "
            f"Hub have such parts. Leave {name} out, or type "
            "hf_dataset_name in place of file."
        )


# --- Reading ----------------------------------------------------------------


def _read_file(file: Path, columns: list[str]) -> Iterator[dict]:
    """The rows of a local file, with no more than these columns.

    Raises:
        LabError: there is nothing to read, or it can't be read.
    """
    file = Path(os.path.expanduser(file))
    read_rows = READERS.get(file.suffix.lower())
    # os.path, because Path raises for names that no file can have.
    if not os.path.isfile(file):
        raise _no_file(file)
    if read_rows is None:
        raise LabError(
            f"{file} has the ending {file.suffix!r}, and those that can be "
            f"read are {_listed(READERS)}. Save it in one of these forms."
        )
    if os.path.getsize(file) == 0:
        raise LabError(
            f"{file} is empty, 0 bytes long. Write it again, or type the "
            "path of another file."
        )
    return read_rows(file, columns)


def _no_file(file: Path) -> LabError:
    if os.path.isdir(file):
        return LabError(
            f"{file} is a folder, but a data set is read from one file. Type "
            f"the path of a file in it that ends in {_listed(READERS)}."
        )
    if os.path.exists(file):
        return LabError(
            f"{file} is no ordinary file. Type the path of one that ends in "
            f"{_listed(READERS)}."
        )
    try:
        near = _nearest(file.name, os.listdir(file.parent))
    except (OSError, ValueError):
        near = ""
    return LabError(
        f"There is no file {file}"
        f"{f'; the nearest name there is {near!r}' if near else ''}. Type "
        "the path of a file from where you are now, or from / on."
    )


def _read_csv(file: Path, columns: list[str]) -> Iterator[dict]:
    """Rows of a CSV file, all values as the text that stands there."""
    try:
        # utf-8-sig passes over the mark that spreadsheets put first.
        with file.open(encoding="utf-8-sig", newline="") as lines:
            table = csv.reader(lines, strict=True)
            header = next(table, [])
            _check_separator(header, file)
            _check_columns(columns, header, file)
            places = {column: header.index(column) for column in columns}
            for cells in table:
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise _ragged(file, table.line_num, cells, header)
                yield {column: cells[i] for column, i in places.items()}
    except UnicodeDecodeError as error:
        raise LabError(
            f"{file} is no UTF-8 text: {error}. Save it again as CSV with "
            "the encoding UTF-8; spreadsheets ask for it when they save."
        ) from error
    except csv.Error as error:
        raise LabError(
            f"{file} is no well-formed CSV up to line {table.line_num}: "
            f"{error}. Often a quotation mark is missing there or before. A "
            "value with a comma, a quotation mark or a new line in it "
            'stands between " marks, and a " in it is doubled. Mend it, or '
            "save it again."
        ) from error
    except OSError as error:
        raise _unreadable(file, error) from error


def _check_separator(header: list[str], file: Path) -> None:
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise LabError(
            f"The first line of {file} is {_short(header[0])}: its columns "
            "are not separated by commas. Save it again as CSV with commas."
        )


def _ragged(
    file: Path, line: int, cells: list[str], header: list[str]
) -> LabError:
    return LabError(
        f"The row that ends in line {line} of {file} has {len(cells)} "
        f"values, but the header names {len(header)} columns, so nobody "
        "knows which value is which. Often a value with a comma in it lacks "
        'its " marks. Mend or delete that row.'
    )


def _read_parquet(file: Path, columns: list[str]) -> Iterator[dict]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            _check_columns(columns, table.schema_arrow.names, file)
            for batch in table.iter_batches(BATCH_ROWS, columns=columns):
                yield from _python_rows(pyarrow.Table.from_batches([batch]))
    # A broken file may also have texts that are no UTF-8 in it.
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise LabError(
            f"{file} can't be read as parquet: {_one_line(error)}. Download "
            "or write it again."
        ) from error


def _python_rows(table: pyarrow.Table) -> list[dict]:
    """Rows of plain values, in which a 32-bit 0.1 is 0.1 too.

    Python would widen it to 0.10000000149011612, and no answer would equal
    that gold.
    """
    narrow = {
        field.name for field in table.schema if field.type == pyarrow.float32()
    }
    for kind in (pyarrow.string(), pyarrow.float64()):
        columns = [
            field.with_type(kind) if field.name in narrow else field
            for field in table.schema
        ]
        table = table.cast(pyarrow.schema(columns))
    return table.to_pylist()


def _read_jsonl(file: Path, columns: list[str]) -> Iterator[dict]:
    """Rows of JSON lines; a column is there if any line has its key."""
    there: dict[str, None] = {}
    for row in data.read_jsonl(file):
        there.update(dict.fromkeys(row))
        yield {column: row.get(column) for column in columns}
    if there:
        _check_columns(columns, list(there), file)


READERS = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
}
"""What reads a local file, for each ending."""


def _unreadable(file: Path, error: OSError) -> LabError:
    return LabError(
        f"{file} can't be read: {error.strerror}. Make it readable for you, "
        "or type the path of another file."
    )


def _read_hub(
    name: str, config: str | None, split: str, columns: list[str]
) -> tuple[Iterator[dict], str]:
    """The rows of a split on the Hub, and where they come from in words."""
    _check_hub_name(name)
    known = _known(name)
    try:
        loaded = datasets.load_dataset(
            name,
            config or known.config or None,
            split=split,
            revision=known.revision or None,
        )
    # A RuntimeError says that the data set is a program, which is never run.
    except (*HUB_ERRORS, RuntimeError) as error:
        raise LabError(
            f"The data set {name} can't be had from the Hub: "
            f"{_one_line(error)}. If that names configurations or splits, "
            "type hf_config or hf_split = one of them. Else check the name, "
            "connect to the internet and try again; or download a file of "
            "it elsewhere and type file = 'its path'."
        ) from error
    revision = known.revision or _loaded_revision(loaded)
    source = f"{name} at {revision or 'its newest revision'}, split {split}"
    _check_columns(columns, loaded.column_names, source)
    tables = loaded.select_columns(columns).with_format("arrow")
    rows = (
        row for table in tables.iter(BATCH_ROWS) for row in _python_rows(table)
    )
    return rows, source


def _check_hub_name(name: str) -> None:
    """Refuse names that `datasets` would look for on this machine.

    A path is read as one, and "csv" or "text" reads the working directory.
    """
    if os.path.exists(name):
        raise LabError(
            f"{name} is a path here, but hf_dataset_name must name a data "
            f"set of the Hub. Type file = 'a file in {name}', or run this "
            "from another folder."
        )
    owner, _, rest = name.partition("/")
    if not owner or not rest or "/" in rest:
        ids = {source.name: source.hub_id for source in SOURCES.values()}
        raise LabError(
            f"hf_dataset_name is {name!r}, but data sets on the Hub have an "
            "owner and a name. Type for example hf_dataset_name = "
            f"{ids.get(name) or 'openai/gsm8k'!r}, or file = 'rows.csv' for "
            "a file of your own."
        )


def _known(name: str) -> Source:
    """The pinned source with this id, or one without a pin."""
    for source in SOURCES.values():
        if source.hub_id == name:
            return source
    return Source(name, hub_id=name)


def _loaded_revision(loaded: datasets.Dataset) -> str:
    """The commit that was downloaded, or "" if the cache doesn't tell."""
    for address in loaded.download_checksums or {}:
        # hf://datasets/owner/name@commit/file
        commit = address.partition("@")[2].partition("/")[0]
        if address.startswith("hf://") and len(commit) == 40:
            return commit
    return ""


def _check_columns(
    columns: list[str], there: Sequence[str], where: object
) -> None:
    for column in columns:
        if there.count(column) > 1:
            raise LabError(
                f"{where} has more than one column with the name "
                f"{column!r}, so nobody knows which is meant. Rename one."
            )
        if column in there:
            continue
        near = _nearest(column, there)
        advice = f"The nearest is {near!r}." if near else "Type one of them."
        if not there:
            advice = "Put their names into its first row."
        raise LabError(
            f"column_mapping names the column {column!r}, which {where} "
            f"doesn't have. Its columns are {_listed(there)}. {advice}"
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
        row = {key: _text(raw[column]) for key, column in mapping.items()}
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


def _text(value: object) -> str | None:
    """A value as text, "" for none, None where a text can't say it."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return value if _is_unicode(value) else None
    if isinstance(value, float | Decimal):
        return _number_text(value)
    return str(value) if isinstance(value, int) else None


def _number_text(value: float | Decimal) -> str | None:
    """A number as people write it: no ".0", no zeros that say nothing."""
    if not math.isfinite(value):
        return None
    if value == int(value):
        return str(int(value))
    if isinstance(value, Decimal):
        return format(value.normalize(), "f")
    return repr(value)


def _is_unicode(text: str) -> bool:
    """Whether no half of a surrogate pair is in it, as JSON can have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def _nothing_usable(
    source: str, category: str, left_out: Counter, examples: list[dict]
) -> LabError:
    if not examples:
        return LabError(
            f"{source} has no rows. Put the texts of a "
            f"{category} data set into it: {_listed(CATEGORIES[category])}."
        )
    shown = " and ".join(_short(example, 200) for example in examples)
    needs = "The mapped columns must hold text"
    if category == "reasoning":
        needs += ", and an answer a number or a text that ends in '#### 72'"
    return LabError(
        f"No row of {source} can be used: {left_out['nulls']} have nothing "
        f"in a mapped column, {left_out['unreadable']} have what can't be "
        f"read. The first in the mapped columns: {shown}. {needs}. Mend the "
        "rows, or type another column_mapping."
    )


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
    if fitness_rows < 1 or test_rows < 0:
        raise LabError(
            f"fitness_rows is {fitness_rows} and test_rows is {test_rows}, "
            "but members are ranked by at least 1 question, and less than 0 "
            "can't be tested. Type for example fitness_rows = 100 and "
            "test_rows = 100."
        )
    held_out = fitness_rows + test_rows
    if registered.rows > held_out:
        return
    fits = registered.rows // 4
    advice = (
        f"Type for example fitness_rows = {fits} and test_rows = {fits}, "
        f"which leaves {registered.rows - 2 * fits} to train on"
        if fits
        else "Add rows"
    )
    raise LabError(
        f"The data set has {registered.rows} usable rows, but fitness_rows "
        f"= {fitness_rows} and test_rows = {test_rows} with at least 1 row "
        f"to train on need {held_out + 1}. {advice}."
    )


def _check_unchanged(folder: Path, registered: Registered) -> None:
    if data.fingerprint(load_rows(folder)) != registered.fingerprint:
        raise LabError(
            f"The rows in {Path(folder) / FILE_NAME} are not those that were "
            "registered: the file was changed since. Delete the data set, "
            "and create it again from its source."
        )


# --- Words ------------------------------------------------------------------


def _nearest(name: str, names: Iterable[str]) -> str:
    """The name that looks most like it, whatever the case; "" for none."""
    lower = {one.lower(): one for one in names}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return lower[near[0]] if near else ""


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:SHOWN_COLUMNS]) or "none"
    more = len(names) - SHOWN_COLUMNS
    return f"{shown} and {more} more" if more > 0 else shown


def _short(value: object, most: int = 60) -> str:
    shown = repr(value)
    return shown if len(shown) <= most else f"{shown[:most]} ..."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
