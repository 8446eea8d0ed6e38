"""Rows of a file or of the Hub, each value as it was typed.

`datasets.load_dataset` isn't used for files of one's own: it infers one type
for each column of a CSV file, so that a gold `016` becomes 16, and it copies
what it reads into a cache. Here each value of a CSV file stays a text.
"""

import json
import math
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow
import pyarrow.csv
import pyarrow.parquet
from huggingface_hub.errors import HTTPError

from grpo_lab.errors import LabError, nearest

HUB_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,  # the data set is a program, which is never run
    datasets.exceptions.DatasetsError,
    HTTPError,
)
"""What `datasets` raises when it can't reach, find or read a data set."""

SHOWN_COLUMNS = 20


def read_rows(file: Path, columns: Sequence[str]) -> list[dict]:
    """The rows of a file, with these columns only.

    Args:
        file: its ending is a key of `READERS`. The JSON forms hold one
            object per line; a blank line is no row, nor is a byte order mark.
        columns: of JSON lines, a column is there if any line has its key.

    Returns:
        At least one row; None stands for a value that JSON or parquet lacks.

    Raises:
        LabError: there is no such file, it is broken, a column isn't there,
            or there are no rows; names the line where there are lines.
    """
    file = _existing(file)
    try:
        rows = READERS[file.suffix.lower()](file, columns)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        kind = file.suffix.lower().removeprefix(".")
        raise LabError(
            f"{file} can't be read as {kind}: {one_line(error)}. Mend that "
            "place, or write the file again: text as UTF-8, the values of CSV "
            'with commas between, and with " marks around a value that has a '
            "comma or a new line in it."
        ) from error
    if not rows:
        raise LabError(
            f"{file} has no rows. Put the columns {listed(columns)} into it, "
            "or type the path of another file."
        )
    return rows


def _existing(file: Path) -> Path:
    """The file, if it is one that can be read."""
    try:
        file = Path(file).expanduser()
        there, hint = file.is_file(), ""
        if file.is_dir():
            hint = ", but a folder"
        elif not there:
            names = [one.name for one in file.parent.iterdir()]
            near = nearest(file.name, names)
            hint = f"; the nearest name there is {near!r}" if near else ""
    except (OSError, ValueError, RuntimeError):  # no file can have that name
        there, hint = False, ""
    if not there:
        raise LabError(
            f"There is no file {file}{hint}. Type the path of a file from "
            "where you are now, or from / on."
        )
    if file.suffix.lower() not in READERS:
        raise LabError(
            f"{file} has the ending {file.suffix!r}, and those that can be "
            f"read are {listed(READERS)}. Save it in one of these forms."
        )
    return file


def _read_csv(file: Path, columns: Sequence[str]) -> list[dict]:
    table = pyarrow.csv.read_csv(
        file,
        # Else an error doesn't name its row.
        pyarrow.csv.ReadOptions(use_threads=False),
        pyarrow.csv.ParseOptions(newlines_in_values=True),
        pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pyarrow.string()),
            strings_can_be_null=False,
        ),
    )
    check_columns(columns, table.column_names, file)
    return table.select(list(columns)).to_pylist()


def _read_parquet(file: Path, columns: Sequence[str]) -> list[dict]:
    with pyarrow.parquet.ParquetFile(file) as table:
        check_columns(columns, table.schema_arrow.names, file)
        return table_rows(table.read(list(columns)))


def table_rows(table: pyarrow.Table) -> list[dict]:
    """Rows of plain values, in which a 32-bit 0.1 is 0.1 too.

    Python would widen it to 0.10000000149011612, and no answer would equal
    that gold.
    """
    for index, field in enumerate(table.schema):
        if field.type == pyarrow.float32():
            short = table.column(index).cast(pyarrow.string())
            exact = short.cast(pyarrow.float64())
            table = table.set_column(index, field.name, exact)
    return table.to_pylist()


def _read_jsonl(file: Path, columns: Sequence[str]) -> list[dict]:
    rows = list(read_jsonl(file))
    there = list(dict.fromkeys(key for row in rows for key in row))
    if rows:
        check_columns(columns, there, file)
    return [{one: row.get(one) for one in columns} for row in rows]


def read_jsonl(file: Path) -> Iterator[dict]:
    """The objects of a file with one JSON object per line, one by one.

    A number with a point or an exponent stays the text that was typed.

    Raises:
        LabError: a line is no object; names the line.
        OSError, UnicodeDecodeError: the file can't be read.
    """
    # utf-8-sig passes over the mark that some editors put first.
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value, fault = json.loads(line, parse_float=str), ""
            except (ValueError, RecursionError) as error:
                value, fault = None, f" ({error})"
            if not isinstance(value, dict):
                raise LabError(
                    f"Line {number} of {file} is {short(line.strip())}, but "
                    "each line must be one JSON object such as "
                    f'{{"question": "9 + 9?", "answer": "18"}}{fault}. Mend '
                    "or delete that line."
                )
            yield value


READERS = {
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
}
"""What reads a local file, for each ending."""


def read_hub(
    name: str,
    config: str,
    split: str,
    revision: str,
    columns: Sequence[str],
    advice: str,
) -> tuple[list[dict], str]:
    """The rows of a split on the Hub, and the commit that they are of.

    Args:
        name: "owner/name".
        config, revision: "" for what the Hub takes then.
        advice: what to type where it can't be had.

    Returns:
        The commit is "" where the cache doesn't tell.
    """
    try:
        loaded = datasets.load_dataset(
            name, config or None, split=split, revision=revision or None
        )
    except HUB_ERRORS as error:
        raise LabError(
            f"The data set {name} can't be had from the Hub: "
            f"{one_line(error)}. Connect to the internet and try again; or "
            f"{advice}"
        ) from error
    check_columns(columns, loaded.column_names, name)
    table = loaded.select_columns(list(columns)).with_format("arrow")[:]
    return table_rows(table), revision or _loaded_revision(loaded)


def _loaded_revision(loaded: datasets.Dataset) -> str:
    for address in loaded.download_checksums or {}:
        # hf://datasets/owner/name@commit/file
        commit = address.partition("@")[2].partition("/")[0]
        if address.startswith("hf://") and len(commit) == 40:
            return commit
    return ""


def check_columns(
    columns: Sequence[str], there: Sequence[str], where: object
) -> None:
    """Refuse a source that lacks a column, or has it twice."""
    for column in columns:
        if there.count(column) > 1:
            raise LabError(
                f"{where} has more than one column with the name "
                f"{column!r}, so nobody knows which is meant. Rename one."
            )
        if column in there:
            continue
        near = nearest(column, there)
        advice = f"The nearest is {near!r}." if near else "Rename one."
        if len(there) == 1 and any(mark in there[0] for mark in ";\t"):
            advice = "They are not separated by commas: save it again so."
        raise LabError(
            f"{where} has no column {column!r}. Its columns are "
            f"{listed(there)}. {advice}"
        )


# --- Values and words -------------------------------------------------------


def as_text(value: object) -> str | None:
    """A value as text, "" for none, None where a text can't say it.

    A number is written as people do: 72.0 is "72", and True is no number.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        # JSON can have half of a surrogate pair.
        unpaired = any("\ud800" <= sign <= "\udfff" for sign in value)
        return None if unpaired else value
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    if not math.isfinite(value):
        return None
    if value == int(value):
        return str(int(value))
    if isinstance(value, Decimal):
        return format(value.normalize(), "f")
    return repr(value)


def listed(names: Sequence[str]) -> str:
    """The first names, with commas between, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:SHOWN_COLUMNS]) or "none"
    more = len(names) - SHOWN_COLUMNS
    return f"{shown} and {more} more" if more > 0 else shown


def short(value: object, most: int = 60) -> str:
    """A value as it would be typed, cut."""
    shown = repr(value)
    return shown if len(shown) <= most else f"{shown[:most]} ..."


def one_line(error: BaseException) -> str:
    """The whole message of an error in one line."""
    return " ".join(str(error).split())
