"""Questions with their answers, from the Hub, from files or a generator.

Whatever the source, every row has the columns `prompt` (the messages that
the policy sees), `question` and `answer` (the reference answer, as text).
What can't be trained on, or would make the held-out accuracy a lie, is
refused here, before any model is loaded.
"""

import hashlib
import json
import math
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from grpo_lab.errors import LabError, first_line, nearest
from grpo_lab.pocket import problems
from grpo_lab.prompts import REASONING_PROMPT, THINK_PROMPT, messages
from rewards import Outcome, gold_answer, gold_number
from rewards.numbers import boxes
from rewards.symbolic import grade, unusable_golds

Row = dict[str, str]


@dataclass(frozen=True)
class Source:
    """Where questions come from.

    Attributes:
        hub_id: "owner/name" on the Hub, or "" for the generator.
        config, revision: which configuration is loaded, at which commit.
        latex: whether a reference answer is LaTeX in a `\\boxed{}`, at the
            end of a solution; else it is a number.
    """

    hub_id: str = ""
    config: str = ""
    revision: str = ""
    latex: bool = False

    @property
    def mapping(self) -> dict[str, str]:
        """The column of each text of a row."""
        if self.latex:
            return {"question": "problem", "answer": "solution"}
        return {"question": "question", "answer": "answer"}

    def usable(self, row: Row) -> bool:
        """Whether something is asked, and a reward can read the answer."""
        answer = row["answer"]
        read = boxes(answer) if self.latex else gold_number(answer) is not None
        return bool(row["question"].strip() and read)


SOURCES = {
    "gsm8k": Source(
        "openai/gsm8k", "main", "740312add88f781978c0658806c59bc2815b9866"
    ),
    "numina_math_tir": Source(
        "AI-MO/NuminaMath-TIR",
        "default",
        "77a91d7b7a1a98ac4b1beb7d86c09d156b935dcd",
        latex=True,
    ),
    "pocket": Source(),
    "pocket_latex": Source(latex=True),
}
"""The sources that the lessons know, by name."""


@dataclass(frozen=True)
class Splits:
    """What to train on, and what to hold out.

    Attributes:
        train, eval: rows with `prompt`, `question` and `answer`; no question
            is in both.
        source: where they come from, in words.
        fingerprint: sha256 over the rows of both, the same on any machine.
    """

    train: datasets.Dataset
    eval: datasets.Dataset
    source: str
    fingerprint: str


def load_splits(
    source: str,
    path: str = "",
    train_rows: int = 500,
    eval_rows: int = 100,
    seed: int = 42,
    system_prompt: str = "",
) -> Splits:
    """Load, check and shuffle the questions of a run.

    Args:
        source: a key of `SOURCES`.
        path: a local folder to read instead of the Hub, with the columns of
            the source in `train` and `test`, each .jsonl, .parquet or .csv,
            or in parquet files named as on the Hub. Without a test file, rows
            of the train file are held out.
        train_rows, eval_rows: how many different questions, at least 1.
        seed: decides which rows are taken and in which order.
        system_prompt: the reader's own; "" takes the source's.

    Returns:
        Exactly as many rows as asked for. Questions that occur more than
        once in a split count once.

    Raises:
        LabError: the source is unknown, can't be read, or can't be used.
    """
    if source not in SOURCES:
        near = nearest(source, SOURCES) or "gsm8k"
        raise LabError(
            f"There is no data source {source!r}; the sources are "
            f"{', '.join(SOURCES)}. Type {near!r}, and set DATA_PATH as well "
            "to read your own files in that form."
        )
    chosen = SOURCES[source]
    if path:
        train, held_out = _read_folder(path, chosen)
        described = f"{source} from the folder {path}"
    elif chosen.hub_id:
        train, held_out = _read_published(chosen)
        described = f"{chosen.hub_id} at revision {chosen.revision}"
    else:
        train = _generate(chosen, train_rows, False, seed)
        held_out = _generate(chosen, eval_rows, True, seed)
        described = f"{source}, generated from seed {seed}"
    train, clashes = _different(train)
    held_out, others = _different(held_out)
    if clashes + others:
        if path:
            raise _two_answers([*clashes, *others])
        count = len(clashes + others)
        described += f", {count} questions left out that have two answers"
    random.Random(seed).shuffle(train)
    random.Random(seed).shuffle(held_out)
    if path and not held_out:
        described += f", {eval_rows} rows of its train file held out"
        train, held_out = train[eval_rows:], train[:eval_rows]
    _check_overlap(train, held_out)
    if chosen.latex:
        train, unusable = _comparable(train, train_rows)
        held_out, more = _comparable(held_out, eval_rows)
        if unusable + more:
            described += (
                f", {unusable + more} rows left out whose gold no answer "
                "could be compared with"
            )
    default = THINK_PROMPT if chosen.latex else REASONING_PROMPT
    prompt = system_prompt or default
    splits = (
        _dataset(_take(train, train_rows, "TRAIN_ROWS"), prompt),
        _dataset(_take(held_out, eval_rows, "EVAL_ROWS"), prompt),
    )
    return Splits(*splits, described, fingerprint(*splits))


def _dataset(rows: list[Row], prompt: str) -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [{"prompt": messages(row["question"], prompt), **row} for row in rows]
    )


def fingerprint(*splits: Iterable) -> str:
    """sha256 over the rows of all splits, the same on any machine."""
    digest = hashlib.sha256()
    for number, split in enumerate(splits):
        for row in split:
            line = json.dumps([number, row], sort_keys=True)
            digest.update(line.encode() + b"\n")
    return digest.hexdigest()


# --- The three kinds of sources ---------------------------------------------


def _generate(
    source: Source, count: int, held_out: bool, seed: int
) -> list[Row]:
    """Seeded problems; one question in ten is never trained on by anyone."""
    kinds = problems.LATEX_KINDS if source.latex else problems.WORD_KINDS
    try:
        found = problems.sample(
            count, held_out=held_out, seed=seed, kinds=kinds
        )
    except ValueError as error:
        raise LabError(f"{error} Change TRAIN_ROWS or EVAL_ROWS.") from error
    rows = (one.latex_row() if source.latex else one.row() for one in found)
    return _texts(rows, source.mapping)


def _read_published(source: Source) -> tuple[list[Row], list[Row]]:
    """Both splits of the pinned revision, without what can't be used.

    Nobody can mend a published data set, so its few unreadable answers, and
    questions that are in both splits, are left out instead of refused.
    """
    advice = (
        "download its files train.jsonl and test.jsonl (or the parquet "
        "files) elsewhere and type DATA_PATH = 'their folder'; or type "
        "PROFILE = 'pocket', which needs no network."
    )
    where = source.hub_id, source.config, source.revision
    train, held_out = (
        [row for row in rows if source.usable(row)]
        for rows in (
            read_hub(*where, split, source.mapping, advice)
            for split in ("train", "test")
        )
    )
    taken = {normalised(row["question"]) for row in held_out}
    train = [row for row in train if normalised(row["question"]) not in taken]
    return train, held_out


def _read_folder(path: str, source: Source) -> tuple[list[Row], list[Row]]:
    """Rows of a local folder; the second list is empty without a test file."""
    folder = Path(path).expanduser()
    train, held_out = (
        [
            row
            for file in _files(folder, split)
            for row in _read_own(file, source)
        ]
        for split in ("train", "test")
    )
    if not train:
        names = sorted(file.name for file in folder.glob("*"))
        raise LabError(
            f"DATA_PATH is {path!r}, and it must be a folder with "
            "train.jsonl, .parquet or .csv in it, and with test.jsonl beside "
            f"it. It holds {', '.join(names[:5]) or 'nothing'}. Put the file "
            "there, type another DATA_PATH, or DATA_PATH = '' to load from "
            "the Hub."
        )
    return train, held_out


def _files(folder: Path, split: str) -> list[Path]:
    """The files of a split, named as on the Hub; [] if there are none."""
    for place in (folder, folder / "main"):
        for ending in (".jsonl", ".parquet", "-*-of-*.parquet", ".csv"):
            if found := sorted(place.glob(split + ending)):
                refuse_missing_part(found)
                return found
    return []


def refuse_missing_part(files: list[Path]) -> None:
    """Refuse train-00000-of-00002.parquet without train-00001-of-00002."""
    parts = [re.fullmatch(r".*-of-([0-9]+)", file.stem) for file in files]
    for file, part in zip(files, parts, strict=True):
        if part and int(part[1]) != len(files):
            raise LabError(
                f"{file} is one of {int(part[1])} parts by its name, and "
                f"{len(files)} would be read, so rows would be missing. Put "
                "all parts into the folder (for the arena, into one file), or "
                "give the file another name if it is all there is."
            )


def _read_own(file: Path, source: Source) -> list[Row]:
    """The rows of a learner's own file, all of which must be usable."""
    rows = read_file(file, source.mapping)
    bad = [n for n, row in enumerate(rows, 1) if not source.usable(row)]
    if bad:
        form = (
            "a solution with its result in \\boxed{}"
            if source.latex
            else "a number, or a text that ends in '#### 72'"
        )
        shown = "; ".join(
            f"row {number} ends in {rows[number - 1]['answer'][-40:]!r}"
            for number in bad[:3]
        )
        raise LabError(
            f"{len(bad)} of {len(rows)} rows in {file} can't be used, since "
            f"no completion for them could be right: {shown}. A row must hold "
            f"a question, and an answer that is {form}. Mend or delete those "
            "rows."
        )
    return rows


# --- Checking ---------------------------------------------------------------


_SAME_MARKS = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛", "'"),
        **dict.fromkeys("“”„‟«»", '"'),
        **dict.fromkeys("‐‑‒–—−", "-"),
    }
)


def normalised(question: str) -> str:
    """The question without differences that no reader would see.

    Those are case, blanks, the form of quotes and dashes, invisible
    characters, and how Unicode composes a letter.
    """
    text = unicodedata.normalize("NFKC", question).translate(_SAME_MARKS)
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")
    return "".join(unicodedata.normalize("NFKC", text.casefold()).split())


def same_answer(one: str, other: str) -> bool:
    """Whether two reference answers say the same, in whatever spelling."""
    text = gold_answer(one)
    return text == gold_answer(other) or (
        grade([text], [other]) == [Outcome.RIGHT]
    )


def _different(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """The first row of each question; and those whose answers differ.

    Nobody knows which of two answers is right, so such a question is in the
    second list alone.
    """
    first: dict[str, Row] = {}
    clashes: dict[str, Row] = {}
    for row in rows:
        key = normalised(row["question"])
        before = first.setdefault(key, row)
        if not same_answer(before["answer"], row["answer"]):
            clashes[key] = row
    kept = [row for key, row in first.items() if key not in clashes]
    return kept, list(clashes.values())


def _two_answers(rows: list[Row]) -> LabError:
    shown = "; ".join(repr(row["question"][:60]) for row in rows[:3])
    return LabError(
        f"{len(rows)} questions have two answers that differ: {shown}. Nobody "
        "knows which is right. Delete the wrong row of each, or both."
    )


def _comparable(rows: list[Row], count: int) -> tuple[list[Row], int]:
    """The first `count` rows whose gold can be parsed, or as many as are.

    Also how many were passed over. Only what is asked for is parsed: a data
    set may have tens of thousands of rows.
    """
    kept: list[Row] = []
    start = 0
    while len(kept) < count and start < len(rows):
        some = rows[start : start + count - len(kept)]
        unusable = set(unusable_golds([row["answer"] for row in some]))
        kept += [row for i, row in enumerate(some) if i not in unusable]
        start += len(some)
    return kept, start - len(kept)


def _check_overlap(train: list[Row], held_out: list[Row]) -> None:
    seen = {normalised(row["question"]) for row in train}
    questions = [row["question"] for row in held_out]
    both = [one for one in questions if normalised(one) in seen]
    if both:
        shown = "; ".join(repr(question[:60]) for question in both[:3])
        raise LabError(
            f"{len(both)} questions are in both the training and the "
            f"evaluation rows: {shown}. The held-out accuracy would measure "
            "what was seen in training. Delete them from one of the files."
        )


def _take(rows: list[Row], count: int, name: str) -> list[Row]:
    if not 1 <= count <= len(rows):
        raise LabError(
            f"{name} is {count}, but there are {len(rows)} different "
            f"questions for it, and at least 1 is needed. Type {name} = "
            f"{len(rows) or 1}, or add rows."
        )
    return rows[:count]


# --- Reading ----------------------------------------------------------------
#
# `datasets.load_dataset` isn't used for files: it infers one type for each
# column of a CSV file, so that a gold 016 becomes 16, and copies what it reads
# into a cache.


ENDINGS = (".csv", ".parquet", ".jsonl", ".json")


def read_file(file: Path, mapping: Mapping[str, str]) -> list[Row]:
    """The rows of a file, at least one, every value as text.

    Args:
        file: ends as one of `ENDINGS`; JSON has one object per line.
        mapping: the column of each text; other columns are left out.

    Raises:
        LabError: there is no such file, it is broken, a column isn't there,
            or there are no rows; names the line where there are lines.
    """
    kind = file.suffix.lower()
    if kind not in ENDINGS:
        raise LabError(
            f"{file} ends in {kind!r}, and it must be a file that ends in "
            f"one of {', '.join(ENDINGS)}. Save it in one of these forms."
        )
    if not file.is_file():
        near = nearest(file.name, [one.name for one in file.parent.glob("*")])
        hint = f"; the nearest name there is {near!r}" if near else ""
        raise LabError(
            f"There is no file {file}{hint}. Type the path of a file from "
            "where you are now, or from / on."
        )
    try:
        rows = _read_raw(file, mapping.values())
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise LabError(
            f"{file} can't be read as {kind[1:]}: {first_line(error)} Mend "
            "that place, or write the file again: text as UTF-8, the values "
            'of CSV with commas between, and with " marks around a value '
            "that has a comma or a new line in it."
        ) from error
    if not rows:
        raise LabError(
            f"{file} has no rows. Put the columns "
            f"{', '.join(mapping.values())} into it, or type the path of "
            "another file."
        )
    _check_columns(mapping, (key for row in rows for key in row), file)
    return _texts(rows, mapping)


def _read_raw(file: Path, columns: Iterable[str]) -> list[dict]:
    """Rows as they are; those of CSV as text."""
    if file.suffix.lower() == ".parquet":
        table = pyarrow.parquet.read_table(file)
        return _shortest(
            table.to_pylist(),
            {field.name: str(field.type) for field in table.schema},
        )
    if file.suffix.lower() != ".csv":
        return list(read_jsonl(file))
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
    return table.to_pylist()


def _shortest(rows: Iterable[dict], types: Mapping[str, str]) -> list[dict]:
    """The rows, with the numbers of 32 and 16 bit as they were written.

    As a Python number, 0.1 in 32 bit is 0.10000000149011612.
    """
    narrow = {
        "float": np.float32,
        "float32": np.float32,
        "halffloat": np.float16,
        "float16": np.float16,
    }
    columns = {n: narrow[kind] for n, kind in types.items() if kind in narrow}
    return [
        row
        | {
            name: Decimal(str(kind(row[name])))
            for name, kind in columns.items()
            if row[name] is not None and math.isfinite(row[name])
        }
        for row in rows
    ]


def read_jsonl(file: Path) -> Iterator[dict]:
    """The objects of a file with one JSON object per line, one by one.

    A number with a point or an exponent stays the text that was typed.
    """
    # utf-8-sig passes over the mark that some editors put first.
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value, fault = json.loads(line, parse_float=str), ""
            except ValueError as error:
                value, fault = None, f" ({error})"
            if not isinstance(value, dict):
                raise LabError(
                    f"Line {number} of {file} is {line.strip()!r:.60}, but "
                    "each line must be one JSON object such as "
                    f'{{"question": "9 + 9?", "answer": "18"}}{fault}. Mend '
                    "or delete that line."
                )
            yield value


def read_hub(
    name: str,
    config: str,
    revision: str,
    split: str,
    mapping: Mapping[str, str],
    advice: str,
) -> list[Row]:
    """The rows of a split of "owner/name" on the Hub.

    An empty `config` or `revision` is what the Hub takes then; `advice` says
    what to type where the data set can't be had.
    """
    try:
        loaded = datasets.load_dataset(
            name, config or None, split=split, revision=revision or None
        )
    except Exception as error:  # the network, the Hub, the data set's own
        raise LabError(
            f"The data set {name} can't be had from the Hub: "
            f"{first_line(error)} Connect to the internet and try again; or "
            f"{advice}"
        ) from error
    _check_columns(mapping, loaded.column_names, name)
    types = {
        name: getattr(kind, "dtype", "")
        for name, kind in loaded.features.items()
    }
    return _texts(_shortest(loaded, types), mapping)


def _check_columns(
    mapping: Mapping[str, str], there: Iterable[str], where: object
) -> None:
    names = list(dict.fromkeys(there))
    for column in mapping.values():
        if column not in names:
            near = nearest(column, names)
            advice = f"The nearest is {near!r}." if near else "Rename one."
            raise LabError(
                f"{where} has no column {column!r}. Its columns are "
                f"{names}. {advice}"
            )


def _texts(rows: Iterable, mapping: Mapping[str, str]) -> list[Row]:
    return [
        {key: as_text(row.get(column)) for key, column in mapping.items()}
        for row in rows
    ]


def as_text(value: object) -> str:
    """A value as text: 72.0 is "72"; what is no text and no number is ""."""
    if isinstance(value, str):
        # JSON can have half of a surrogate pair, which is no character.
        return "" if re.search("[\ud800-\udfff]", value) else value
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return ""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return ""
    return format(Decimal(str(value)).normalize(), "f")
