"""A reward file: one function of a learner's, run away from the trainer.

A reward file is a Python file with one function that scores one completion::

    def reward(question, answer, completion):
        return 1.0 if completion.strip() == answer else 0.0

It is called by keyword; `answer` is the reference answer as it stands in the
data. `load_reward` makes a reward function for TRL's trainers of it. The
file's code never runs in the trainer's process: whatever it does, be it a
loop without an end, `os._exit`, 50 GB or a crash in C, costs that completion
its score and nothing else.

Its working directory is an empty temporary one of its own, which is removed
at the end; `tempfile` makes its files there. This contains accidents, not
attacks: the code runs with your rights.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import tempfile
import traceback
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewards.batch import (
    RewardError,
    completion_texts,
    content_text,
    gold_column,
)
from rewards.health import Log, Outcome, report
from rewards.workers import Reply, Workers

CALL = ("question", "answer", "completion")
IMPORT_SECONDS = 60.0  # torch takes half of it on a slow disk
MEMORY_MIB = 4096
MAX_REASON_CHARS = 200
BESIDE = (
    "A reward file runs in an empty directory: read what lies beside it "
    "from Path(__file__).parent"
)


@dataclass(frozen=True)
class Score:
    """What a reward gave for one completion.

    Attributes:
        value: a finite number, or None: no score.
        failure: "", or why there is no score: "timeout", "memory", "crash",
            "error", "no number", "not finite", "no gold".
        reason: the failure in words.
    """

    value: float | None = None
    failure: str = ""
    reason: str = ""


def load_reward(
    path: str | os.PathLike[str], *, seconds: float = 5.0
) -> FileReward:
    """Return the reward function of a reward file, for TRL's trainers.

    The result is called with a batch, as TRL does: `completions` is a list of
    strings or of message lists, the columns of the dataset follow by name.
    The question of a row is in the column `question` or `problem`, else it is
    the last user message of `prompts`; the reference answer is in `answer`,
    `solution` or `ground_truth`. For each completion it returns a finite
    number, or None, which TRL leaves out of the sum, where the file's
    function raised, ran out of time or memory, or returned no number.

    `seconds` is what one call may take: so much CPU time, and twice as much
    on the clock, for what sleeps. The text of the file is read once, here: a
    later change of the file doesn't change a running training.

    Raises RewardError when the file is missing, is no Python, can't be
    imported, or has no function that can be called in this way.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "bare.py"
    >>> _ = path.write_text('''
    ... def reward(question, answer, completion):
    ...     return completion == answer
    ... ''')
    >>> bare = load_reward(path)
    >>> bare.__name__
    'bare'
    >>> bare(["18", "17"], question=["9 + 9?"] * 2, answer=["18"] * 2)
    [1.0, 0.0]
    >>> bare.close()

    Source: AgileRL's Arena tutorial (a reward.py per environment).
    """
    if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
        raise RewardError(
            f"One call of a reward file can't take {seconds!r} seconds at "
            "most. Give a number above 0, for example seconds=5."
        )
    path = Path(path).expanduser().resolve()
    source = _read(path)
    _refuse_unusable(path, source)
    return FileReward(path, source, float(seconds))


class FileReward:
    """The reward function of a reward file; `load_reward` makes it.

    What became of each call is reported as `rewards.health.report` says, by
    the outcomes scored, timeout, no_gold and error, with the reason of a
    missing score in the column ``NAME/reason``.

    Each of its processes works in an empty directory of its own. `close`,
    the last reference gone and the end of the program remove them. A copy,
    pickled or in a forked process, has processes and directories of its own.

    Attributes:
        path, source: the file, and its text as it was when it was loaded.
        seconds: what one call may take.
        __name__: the file's name, under which the trainer logs it.
    """

    def __init__(self, path: Path, source: str, seconds: float) -> None:
        self.path = path
        self.source = source
        self.seconds = seconds
        self.__name__ = re.sub(r"\W", "_", path.stem)
        self._workers: _FileWorkers | None = None

    def __call__(
        self,
        completions: Sequence[Any],
        prompts: Any = None,
        *,
        log_metric: Log | None = None,
        log_extra: Log | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score a batch; see `load_reward`."""
        scores = self.scores(completions, prompts, **columns)
        report(
            self.__name__,
            [_outcome(score) for score in scores],
            {"reason": [score.reason for score in scores]},
            log_metric=log_metric,
            log_extra=log_extra,
        )
        return [score.value for score in scores]

    def scores(
        self, completions: Sequence[Any], prompts: Any = None, **columns: Any
    ) -> list[Score]:
        """Score a batch and say why a score is missing: a Score for each."""
        calls = calls_of(completions, prompts, columns)
        asked = [[call] for call in calls if call is not None]
        replies = iter(self._opened().ask(asked))
        return [
            Score(None, "no gold", "the row has no reference answer")
            if call is None
            else _score_of(next(replies)[0])
            for call in calls
        ]

    def close(self) -> None:
        """End the processes and remove what they wrote.

        The next call would start new ones.
        """
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _opened(self) -> _FileWorkers:
        if self._workers is None or self._workers.owner != os.getpid():
            self._workers = _FileWorkers(
                "handler_of",
                self.path,
                self.source,
                cpu_seconds=self.seconds,
                wall_seconds=2 * self.seconds,
            )
        return self._workers

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_workers": None}

    def __repr__(self) -> str:
        return f"load_reward({str(self.path)!r}, seconds={self.seconds:g})"


def finite_score(value: Any) -> Score:
    """Return the Score that a returned value stands for.

    A number of any kind counts, True as 1.0, and NumPy's and torch's scalars
    too. A text or a list of one number doesn't, nor does None.

    >>> finite_score(True).value
    1.0
    >>> finite_score("1.0").reason
    "it returned '1.0' (str), which is no number"
    >>> finite_score(float("nan")).failure
    'not finite'
    """
    try:
        if isinstance(value, str | bytes | list | tuple):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception:  # float() runs code of the value's own
        shown = f"it returned {_brief(value)} ({type(value).__name__})"
        return Score(None, "no number", f"{shown}, which is no number")
    if not math.isfinite(number):
        return Score(None, "not finite", f"it returned {number}")
    return Score(number)


def last_question(prompt: Any) -> str:
    """Return the last user message of a prompt; a plain prompt as it is.

    >>> last_question([{"role": "user", "content": "9 + 9?"}])
    '9 + 9?'
    """
    if isinstance(prompt, str):
        return prompt
    users = [m["content"] for m in prompt if m["role"] == "user"]
    return content_text(users[-1]) if users else ""


def told(error: BaseException, path: str | None = None) -> str:
    """Return an exception as "line 7: ValueError: bad", in short.

    The line is the last one in the file `path` that had a part in it.

    >>> told(ValueError("bad"))
    'ValueError: bad'
    """
    try:
        text = " ".join(str(error).split())
    except Exception:  # a str() of the error's own
        text = "(its text can't be read)"
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SystemExit):
        said = "a call of sys.exit"
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == path
    ]
    where = f"line {lines[-1]}: " if lines else ""
    return (where + said)[:MAX_REASON_CHARS]


class _FileWorkers(Workers):
    """The workers of one reward file and the folder they may write in."""

    def __init__(
        self, factory: str, path: Path, source: str, **limits: Any
    ) -> None:
        self.owner = os.getpid()
        try:
            folder = tempfile.mkdtemp(prefix="reward-")
        except OSError as error:
            raise RewardError(
                "A reward file runs in a temporary directory, and none can "
                f"be made: {error}. Make room there, or set TMPDIR to a "
                "folder that you may write in and start Python again."
            ) from error
        # Also called when this object or the program comes to its end.
        self._remove = weakref.finalize(self, _remove, folder, self.owner)
        super().__init__(
            f"rewards.contract.file_worker:{factory}",
            str(path),
            source,
            folder,
            memory_mib=MEMORY_MIB,
            **limits,
        )

    def close(self) -> None:
        """End all processes and remove what they wrote."""
        super().close()
        self._remove()


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked copy
        shutil.rmtree(folder, ignore_errors=True)


def _read(path: Path) -> str:
    if path.suffix != ".py":
        raise RewardError(
            f"A reward file is a Python file, and {path.name!r} doesn't end "
            "with .py. Save the function reward(question, answer, "
            "completion) in a file such as reward.py and give its path."
        )
    if not path.exists():
        there = sorted(other.name for other in path.parent.glob("*.py"))
        raise RewardError(
            f"There is no reward file {path}. Python files in that folder: "
            f"{', '.join(there[:8]) or 'none'}. Give the path of the file "
            "with your function reward."
        )
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(
            f"The reward file {path} can't be read: {error}. Give the path "
            "of a text file in UTF-8 that you may read."
        ) from None


def _refuse_unusable(path: Path, source: str) -> None:
    """Raise RewardError unless the file can be imported and called."""
    workers = _FileWorkers(
        "inspector_of",
        path,
        source,
        processes=1,
        cpu_seconds=IMPORT_SECONDS,
        wall_seconds=IMPORT_SECONDS,
    )
    with contextlib.closing(workers):
        [[reply]] = workers.ask([["look"]])
    problem = {
        "": reply.value,
        "timeout": f"importing it takes more than {IMPORT_SECONDS:g} seconds. "
        "Do no work at the top of the file, only definitions",
        "memory": f"importing it takes more than {MEMORY_MIB} MiB of memory. "
        "Load less at the top of the file",
        "crash": "importing it ended the process at once. Look for os._exit "
        "or a broken extension module at the top of the file",
        "error": f"importing it failed with {reply.detail}. Mend that line",
    }[reply.failure]
    if problem:
        raise RewardError(
            f"The reward file {path.name} can't be used: {problem}, then "
            f"load {path} again."
        )


def calls_of(
    completions: Sequence[Any], prompts: Any, columns: dict[str, Any]
) -> list[dict[str, str | None] | None]:
    """Return the keywords with which each completion of a batch is scored.

    A row without a reference answer has None. Raises RewardError when the
    columns don't fit.

    >>> calls_of(["18"], None, {"question": ["9 + 9?"], "answer": [18]})
    [{'question': '9 + 9?', 'answer': '18', 'completion': '18'}]
    """
    texts = completion_texts(completions)
    golds = gold_column(completions, columns)
    rows = zip(
        _questions(prompts, len(texts), columns), golds, texts, strict=True
    )
    return [
        None
        if gold is None
        else dict(zip(CALL, (question, str(gold), text), strict=True))
        for question, gold, text in rows
    ]


def _questions(
    prompts: Any, expected: int, columns: dict[str, Any]
) -> list[str | None]:
    names = ("question", "problem")
    name = next((n for n in names if columns.get(n) is not None), "")
    asked = columns[name] if name else prompts or [""] * expected
    if len(asked) != expected:
        raise RewardError(
            f"There are {expected} completions and {len(asked)} questions in "
            f"'{name or 'prompts'}', so some completion would be scored "
            "against a wrong question. Pass one for each completion."
        )
    if name:
        return [None if q is None else str(q) for q in asked]
    return list(map(last_question, asked))


def _score_of(reply: Reply) -> Score:
    if not reply.failure:
        return Score(**reply.value)
    reasons = {
        "timeout": f"no score in time: {reply.detail}",
        "memory": f"it took more than {MEMORY_MIB} MiB of memory",
        "crash": "it ended its process",
        "error": reply.detail,
    }
    reason = reasons[reply.failure] or reply.failure
    return Score(None, reply.failure, reason[:MAX_REASON_CHARS])


def _outcome(score: Score) -> Outcome:
    if not score.failure:
        return Outcome.SCORED
    named = {"timeout": Outcome.TIMEOUT, "no gold": Outcome.NO_GOLD}
    return named.get(score.failure, Outcome.ERROR)


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a repr of the value's own
        return "something"
    return text if len(text) <= 40 else text[:37] + "..."
