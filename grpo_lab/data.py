"""Questions with their answers, from the Hub, a local folder or a generator.

Whatever the source, every row has the columns `prompt` (the messages that
the policy sees), `question` and `answer` (the gold text that the rewards
read). What can't be trained on, or would make the held-out accuracy a lie,
is refused here, before any model is loaded.
"""

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import datasets

from grpo_lab.errors import LabError, nearest
from grpo_lab.pocket import problems
from grpo_lab.prompts import REASONING_PROMPT, THINK_PROMPT, messages
from grpo_lab.rows import as_text, read_hub, read_rows, short
from rewards import gold_number
from rewards.numbers import boxes
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

    @property
    def columns(self) -> tuple[str, str]:
        """The columns that are read."""
        return self.question, self.answer

    def has_gold(self, answer: str) -> bool:
        """Whether a reward can read the gold of this answer text."""
        if self.latex:
            return bool(boxes(answer))
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
    chosen = _source(source)
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
    train = _take(train, train_rows, "TRAIN_ROWS")
    held_out = _take(held_out, eval_rows, "EVAL_ROWS")
    prompt = system_prompt or chosen.system_prompt
    splits = _dataset(train, prompt), _dataset(held_out, prompt)
    return Splits(*splits, described, fingerprint(*splits))


def _source(name: str) -> Source:
    if name in SOURCES:
        return SOURCES[name]
    near = nearest(name, SOURCES) or "gsm8k"
    raise LabError(
        f"There is no data source {name!r}; the sources are "
        f"{', '.join(SOURCES)}. Type {near!r}, and "
        "set DATA_PATH as well to read your own files in that form."
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
            f"The source {source.name!r} has too few different questions. "
            f"{error} Change TRAIN_ROWS or EVAL_ROWS."
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


def _read_hub(source: Source) -> tuple[list[Row], list[Row]]:
    """Both splits of the pinned revision, without what can't be used.

    Nobody can mend a published data set, so its few rows without a readable
    gold, and questions of the train split that the eval split has too, are
    left out instead of refused.
    """
    advice = (
        f"download its files {source.train_split}.jsonl and "
        f"{source.eval_split}.jsonl (or the parquet files) elsewhere and "
        "type DATA_PATH = 'their folder'; or type PROFILE = 'pocket', which "
        "needs no network."
    )
    train, held_out = (
        [
            row
            for row in (_row(raw, source) for raw in raw_rows)
            if source.has_gold(row["answer"])
        ]
        for raw_rows, _ in (
            read_hub(
                source.hub_id, source.config, split, source.revision,
                source.columns, advice,
            )
            for split in (source.train_split, source.eval_split)
        )
    )  # fmt: skip
    taken = {normalised(row["question"]) for row in held_out}
    train = [row for row in train if normalised(row["question"]) not in taken]
    return train, held_out


def _read_folder(path: str, source: Source) -> tuple[list[Row], list[Row]]:
    """Rows of a local folder; the second list is empty without a test file.

    Raises:
        LabError: nothing to read there, or something unreadable.
    """
    folder = Path(path).expanduser()
    names = [item.name for item in folder.iterdir()] if folder.is_dir() else []
    train_files = _files(folder, source.train_split)
    if not train_files:
        what = "a folder" if folder.is_dir() else "a file"
        what = what if folder.exists() else "nothing that exists"
        raise LabError(
            f"DATA_PATH = {path!r} names {what}, and it must be a folder with "
            f"{source.train_split}.jsonl, .parquet or .csv in it, and with "
            f"{source.eval_split}.jsonl beside it. It holds "
            f"{', '.join(sorted(names)[:5]) or 'nothing'}. Put the file "
            "there, type another DATA_PATH, or DATA_PATH = '' to load from "
            "the Hub."
        )
    return tuple(
        [row for file in files for row in _read_file(file, source)]
        for files in (train_files, _files(folder, source.eval_split))
    )


def _files(folder: Path, split: str) -> list[Path]:
    """The files of a split, named as on the Hub; [] if there are none."""
    for place in (folder, folder / "main"):
        for ending in (".jsonl", ".parquet", "-*-of-*.parquet", ".csv"):
            if found := sorted(place.glob(split + ending)):
                return found
    return []


def _read_file(file: Path, source: Source) -> list[Row]:
    """The rows of a learner's own file, all of which must be usable."""
    rows = []
    for number, raw in enumerate(read_rows(file, source.columns), start=1):
        row = _row(raw, source)
        row["answer"] = as_text(row["answer"])
        for column in row:
            if not isinstance(row[column], str) or not row[column].strip():
                value = _row(raw, source)[column]
                raise LabError(
                    f"The {column} in row {number} of {file} is "
                    f"{short(value, 40)}, but it must be text. Mend or delete "
                    "that row."
                )
        rows.append(row)
    return rows


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


def _take(rows: list[Row], count: int, name: str) -> list[Row]:
    if not 1 <= count <= len(rows):
        raise LabError(
            f"{name} is {count}, but there are {len(rows)} different "
            f"questions for it, and at least 1 is needed. Type {name} = "
            f"{len(rows) or 1}, or add rows."
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
