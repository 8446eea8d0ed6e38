"""Questions with their answers, from the Hub, a local folder or a generator.

Whatever the source, every row has the columns `prompt` (the messages that
the policy sees), `question` and `answer` (the gold text that the rewards
read). What can't be trained on, or would make the held-out accuracy a lie,
is refused here, before any model is loaded.
"""

import difflib
import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
from huggingface_hub.errors import HTTPError

from grpo_lab.errors import LabError
from grpo_lab.pocket import problems
from grpo_lab.prompts import REASONING_PROMPT, THINK_PROMPT, messages
from rewards import gold_number
from rewards.numbers import last_box
from rewards.symbolic import unusable_golds


@dataclass(frozen=True)
class Source:
    """Where questions come from, and what their columns are called.

    Attributes:
        name: what a learner types.
        hub_id: "owner/name" on the Hub, or "" for the generator.
        config: the configuration of that data set.
        revision: the commit that is loaded.
        question, answer: names of the columns.
        train_split, eval_split: names of the splits, and of local files.
        system_prompt: what the policy is told by default.
        latex: whether a gold is LaTeX in a `\\boxed{}`, else a number.
    """

    name: str
    hub_id: str = ""
    config: str = ""
    revision: str = ""
    question: str = "question"
    answer: str = "answer"
    train_split: str = "train"
    eval_split: str = "test"
    system_prompt: str = REASONING_PROMPT
    latex: bool = False

    def has_gold(self, answer: str) -> bool:
        """Whether a reward can read the gold of this answer text."""
        if self.latex:
            return last_box(answer) is not None
        return gold_number(answer) is not None


SOURCES = {
    source.name: source
    for source in (
        Source(
            name="gsm8k",
            hub_id="openai/gsm8k",
            config="main",
            revision="740312add88f781978c0658806c59bc2815b9866",
        ),
        Source(
            name="numina_math_tir",
            hub_id="AI-MO/NuminaMath-TIR",
            config="default",
            revision="77a91d7b7a1a98ac4b1beb7d86c09d156b935dcd",
            question="problem",
            answer="solution",
            system_prompt=THINK_PROMPT,
            latex=True,
        ),
        Source(name="pocket"),
        Source(
            name="pocket_latex",
            question="problem",
            answer="solution",
            system_prompt=THINK_PROMPT,
            latex=True,
        ),
    )
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


Row = dict[str, str]


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
            the source in `train.jsonl` and `test.jsonl`, or in parquet files
            named as on the Hub. Without a test file, rows of the train file
            are held out.
        train_rows, eval_rows: how many different questions, at least 1.
        seed: decides which rows are taken and in which order.
        system_prompt: the reader's own; "" takes the source's.

    Returns:
        Exactly as many rows as asked for. Questions that occur more than
        once in a split count once.

    Raises:
        LabError: the source is unknown, can't be read, or can't be used.
    """
    chosen = _source(source)
    _check_counts(train_rows, eval_rows)
    if path:
        train, held_out = _read_folder(path, chosen)
        described = f"{chosen.name} from the folder {path}"
    elif chosen.hub_id:
        train, held_out = _read_hub(chosen)
        described = f"{chosen.hub_id} at revision {chosen.revision}"
    else:
        train, held_out = _generate(chosen, train_rows, eval_rows, seed)
        described = f"{chosen.name}, generated from seed {seed}"
    train, held_out = _different(train), _different(held_out)
    random.Random(seed).shuffle(train)
    random.Random(seed).shuffle(held_out)
    _check_golds([*train, *held_out], chosen)
    if path and not held_out:
        described += f", {eval_rows} rows of its train file held out"
        train, held_out = _hold_out(train, train_rows, eval_rows)
    _check_overlap(train, held_out)
    if chosen.latex:
        train, unusable = _comparable(train, train_rows)
        held_out, more = _comparable(held_out, eval_rows)
        if unusable + more:
            described += (
                f", {unusable + more} rows left out whose gold no answer "
                "could be compared with"
            )
    train = _take(train, train_rows, "training", "TRAIN_ROWS")
    held_out = _take(held_out, eval_rows, "evaluation", "EVAL_ROWS")
    prompt = system_prompt or chosen.system_prompt
    splits = _dataset(train, prompt), _dataset(held_out, prompt)
    return Splits(*splits, described, fingerprint(*splits))


def _source(name: str) -> Source:
    if name in SOURCES:
        return SOURCES[name]
    near = difflib.get_close_matches(name.lower(), SOURCES, n=1, cutoff=0.3)
    raise LabError(
        f"There is no data source {name!r}; the sources are "
        f"{', '.join(SOURCES)}. Type {near[0] if near else 'gsm8k'!r}, and "
        "set DATA_PATH as well to read your own files in that form."
    )


def _check_counts(train_rows: int, eval_rows: int) -> None:
    for name, rows in (("TRAIN_ROWS", train_rows), ("EVAL_ROWS", eval_rows)):
        if rows < 1:
            raise LabError(
                f"{name} is {rows}, but a run needs questions to train on "
                f"and questions to be measured on. Type {name} = 100."
            )


# --- Reading ----------------------------------------------------------------


def _generate(
    source: Source, train_rows: int, eval_rows: int, seed: int
) -> tuple[list[Row], list[Row]]:
    """Seeded problems; one question in ten is never trained on by anyone."""
    kinds = problems.LATEX_KINDS if source.latex else problems.WORD_KINDS
    try:
        sides = [
            problems.sample(count, held_out=side, seed=seed, kinds=kinds)
            for count, side in ((train_rows, False), (eval_rows, True))
        ]
    except ValueError as error:
        raise LabError(
            f"The source {source.name!r} can't make that many different "
            f"questions. {error} Lower TRAIN_ROWS or EVAL_ROWS."
        ) from error
    train, held_out = (
        [
            _row(p.latex_row() if source.latex else p.row(), source)
            for p in side
        ]
        for side in sides
    )
    return train, held_out


def _row(raw: dict, source: Source) -> Row:
    return {"question": raw[source.question], "answer": raw[source.answer]}


HUB_ERRORS = (
    OSError,
    ValueError,
    datasets.exceptions.DatasetsError,
    HTTPError,
)
"""What `datasets` raises when it can't reach, find or read a data set."""


def _read_hub(source: Source) -> tuple[list[Row], list[Row]]:
    """Both splits of the pinned revision, without what can't be used.

    Nobody can mend a published data set, so its few rows without a readable
    gold, and questions of the train split that the eval split has too, are
    left out instead of refused.
    """
    try:
        loaded = datasets.load_dataset(
            source.hub_id, source.config, revision=source.revision
        )
    except HUB_ERRORS as error:
        reason = " ".join(str(error).split())
        raise LabError(
            f"The data set {source.hub_id} can't be had from the Hub: "
            f"{reason}. Connect to the internet and try again; or download "
            f"its files {source.train_split}.jsonl and "
            f"{source.eval_split}.jsonl (or the parquet files) elsewhere and "
            "type DATA_PATH = 'their folder'; or type PROFILE = 'pocket', "
            "which needs no network."
        ) from error
    train, held_out = (
        [
            row
            for row in (_row(raw, source) for raw in loaded[split])
            if source.has_gold(row["answer"])
        ]
        for split in (source.train_split, source.eval_split)
    )
    taken = {normalised(row["question"]) for row in held_out}
    train = [row for row in train if normalised(row["question"]) not in taken]
    return train, held_out


def _read_folder(path: str, source: Source) -> tuple[list[Row], list[Row]]:
    """Rows of a local folder; the second list is empty without a test file.

    Raises:
        LabError: nothing to read there, or something unreadable.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise LabError(
            f"DATA_PATH = {path!r} {what}, but it must be a folder with "
            f"{source.train_split}.jsonl and {source.eval_split}.jsonl in "
            "it. Type the path of that folder, or DATA_PATH = '' to load "
            "from the Hub."
        )
    train_files = _files(folder, source.train_split)
    if not train_files:
        names = sorted(item.name for item in folder.iterdir())
        raise LabError(
            f"The data folder {path} has no training questions: it holds "
            f"{', '.join(names[:5]) or 'nothing'}, and "
            f"{source.train_split}.jsonl or {source.train_split}.parquet is "
            "needed. Put the file there, or type another DATA_PATH."
        )
    return tuple(
        [row for file in files for row in _read_file(file, source)]
        for files in (train_files, _files(folder, source.eval_split))
    )


def _files(folder: Path, split: str) -> list[Path]:
    """The files of a split, named as on the Hub; [] if there are none."""
    for place in (folder, folder / "main"):
        for pattern in (
            f"{split}.jsonl",
            f"{split}.parquet",
            f"{split}-*-of-*.parquet",
        ):
            if found := sorted(place.glob(pattern)):
                return found
    return []


def _read_file(file: Path, source: Source) -> list[Row]:
    read = read_jsonl if file.suffix == ".jsonl" else _read_parquet
    raw_rows = list(read(file))
    if not raw_rows:
        raise LabError(
            f"{file} has no rows. Put one question with its answer into "
            "each row, or type another DATA_PATH."
        )
    return [
        _checked_row(raw, source, f"row {number} of {file}")
        for number, raw in enumerate(raw_rows, start=1)
    ]


def read_jsonl(file: Path) -> Iterator[dict]:
    """The objects of a file with one JSON object per line, one by one.

    Blank lines are passed over, and so is a mark of the byte order.

    Raises:
        LabError: it can't be read, or a line is no object.
    """
    try:
        # utf-8-sig also reads the mark that some editors put first.
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _object(line, f"Line {number} of {file}")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(
            f"{file} can't be read as UTF-8 text: {error}. Save it again as "
            "UTF-8, one JSON object per line."
        ) from error


def _object(line: str, where: str) -> dict:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LabError(
            f"{where} is no valid JSON: {error}. Each line must be one "
            "object; mend or delete that line."
        ) from error
    if not isinstance(value, dict):
        raise LabError(
            f"{where} is {line.strip()[:40]!r}, but each line must be one "
            'JSON object such as {"question": "9 + 9?", "answer": "18"}. '
            "Mend or delete that line."
        )
    return value


def _read_parquet(file: Path) -> list[dict]:
    try:
        return pyarrow.parquet.read_table(file, partitioning=None).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise LabError(
            f"{file} can't be read as parquet: {error}. Download or write "
            "it again."
        ) from error


def _checked_row(raw: dict, source: Source, where: str) -> Row:
    """A row of the learner's own, with texts in it.

    Raises:
        LabError: a column is missing, or does not hold what it should.
    """
    missing = [c for c in (source.question, source.answer) if c not in raw]
    if missing:
        raise LabError(
            f"The columns of {where} are {', '.join(raw) or 'none'}, but "
            f"{' and '.join(missing)} must be there too: the data source "
            f"{source.name!r} reads the question from {source.question!r} "
            f"and its answer from {source.answer!r}. Rename yours, or choose "
            "the source with your names."
        )
    row = _row(raw, source)
    if isinstance(row["answer"], int | float):
        row["answer"] = str(row["answer"])
    for column, value in row.items():
        if not isinstance(value, str) or not value.strip():
            raise LabError(
                f"The {column} in {where} is {value!r:.40}, but it must be "
                "text. Mend or delete that row."
            )
    return row


# --- Checking ---------------------------------------------------------------


def normalised(question: str) -> str:
    """The question without differences that no reader would see."""
    return " ".join(question.casefold().split())


def _different(rows: list[Row]) -> list[Row]:
    """The rows without those whose question came before."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(normalised(row["question"]), row)
    return list(first.values())


def _check_golds(rows: list[Row], source: Source) -> None:
    unreadable = [
        r["answer"] for r in rows if not source.has_gold(r["answer"])
    ]
    if unreadable:
        form = (
            "a solution with its result in \\boxed{}"
            if source.latex
            else "a number, or a text that ends in '#### 72'"
        )
        shown = ", ".join(repr(gold[-40:]) for gold in unreadable[:3])
        raise LabError(
            f"{len(unreadable)} of {len(rows)} answers can't be read, so no "
            f"completion for them could be right. The first of them end in: "
            f"{shown}. An answer must be {form}. Mend or delete those rows."
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
    questions = {normalised(row["question"]) for row in train}
    both = [
        row["question"]
        for row in held_out
        if normalised(row["question"]) in questions
    ]
    if both:
        shown = "; ".join(repr(question[:60]) for question in both[:3])
        raise LabError(
            f"{len(both)} questions are in both the training and the "
            f"evaluation rows: {shown}. The held-out accuracy would measure "
            "what was seen in training. Delete them from one of the files."
        )


def _hold_out(
    rows: list[Row], train_rows: int, eval_rows: int
) -> tuple[list[Row], list[Row]]:
    """Split rows of one file into training and evaluation."""
    if len(rows) < train_rows + eval_rows:
        raise LabError(
            f"The train file has {len(rows)} different questions and there "
            f"is no test file, so TRAIN_ROWS = {train_rows} and EVAL_ROWS = "
            f"{eval_rows} together ask for too many. Lower one of them, or "
            "add a test file."
        )
    return rows[eval_rows:], rows[:eval_rows]


def _take(rows: list[Row], count: int, use: str, knob: str) -> list[Row]:
    if len(rows) < count:
        raise LabError(
            f"{knob} = {count}, but there are only {len(rows)} different "
            f"questions for {use}. Type {knob} = {len(rows)}, or add rows."
        )
    return rows[:count]


# --- The result -------------------------------------------------------------


def _dataset(rows: list[Row], system_prompt: str) -> datasets.Dataset:
    return datasets.Dataset.from_list(
        [
            {"prompt": messages(row["question"], system_prompt), **row}
            for row in rows
        ]
    )


def fingerprint(*splits: Iterable[dict]) -> str:
    """sha256 over the rows of all splits, the same on any machine."""
    digest = hashlib.sha256()
    for number, split in enumerate(splits):
        for row in split:
            line = json.dumps([number, row], sort_keys=True)
            digest.update(line.encode() + b"\n")
    return digest.hexdigest()
