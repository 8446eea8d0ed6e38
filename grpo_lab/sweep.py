"""Run a lesson once for each combination of some parameters' values.

    python -m grpo_lab.runner sweep lite/03_grid_search.ipynb \\
        -p PROFILE pocket --vary SEED 1 2 3 --vary MAX_STEPS 8 16

    runs/03_grid_search-sweep-001/
      sweep.json                the lesson, the values, the state of each run
      sweep.csv                 the table that is printed at the end
      sweep.lock                held by the sweep that is at work here
      SEED=1_MAX_STEPS=8/       a run: what the runner writes for a lesson
      SEED=1_MAX_STEPS=8.log    what its process has printed

Whatever can be refused is refused before anything starts. Each combination
is a process `python -m grpo_lab.runner LESSON` of its own, so one that fails
stops no other. After a kill or a power cut the same line with --resume runs
what is not done, from where it stopped, and never again what is. Ctrl-C,
SIGTERM and a closed terminal end all runs, and then the sweep.

Exit codes: 0 all is done, 1 a run failed, 2 the input is wrong, 130 Ctrl-C,
143 SIGTERM, 129 the terminal was closed.
"""

import argparse
import collections
import contextlib
import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import filelock
import psutil

from grpo_lab import runner
from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json, write_whole
from grpo_lab.parameters import convert, resolve

RECORD = "sweep.json"
TABLE = "sweep.csv"
LOCK = "sweep.lock"

OWN_DIRECTORY = "OUTPUT_DIR"
"""The parameter that is no choice: each run has a directory of its own."""

NAME_LENGTH = 100
"""Characters of a run's name, so that every file system takes it."""

REASON_LENGTH = 500
"""Characters of the reason for a failure."""

GRACE = 10
"""Seconds for a run to end its kernel before it is killed."""

POLL = 0.1
"""Seconds between two looks at the processes."""

MARK = "GRPO_LAB_SWEEP"
"""In the environment of every process of a run: the run's directory."""

SIGNALS = {
    signal.SIGINT,
    signal.SIGTERM,
    getattr(signal, "SIGHUP", signal.SIGTERM),  # Windows has none
}

# The last line of what the runner says, after the reason.
POINTER = "The notebook as far as it got is"


@dataclass
class Combination:
    """One combination of values, and how its run went.

    Attributes:
        name: of its directory below the sweep's, and of its log.
        parameters: all that its run is given, as text that was typed.
        state: "waiting", "running", "done" or "failed". Done is what ended
            with 0; what says "running" where no sweep is was killed.
        seconds: what its processes have taken, those of a killed sweep not
            counted.
        exit_code: of its last process; None before that has ended.
        reason: the last line of its log if it failed; else "".
    """

    name: str
    parameters: dict[str, str]
    state: str = "waiting"
    seconds: float = 0
    exit_code: int | None = None
    reason: str = ""


@dataclass
class Sweep:
    """What sweep.json says, and where it lies.

    Attributes:
        folder: the sweep's directory.
        lesson: the full path of the notebook.
        values: every parameter that is set, with its values as the lesson
            reads them: one, or several if it is varied.
        combinations: the runs, the last parameter varied fastest.
    """

    folder: Path
    lesson: str
    values: dict[str, list]
    combinations: list[Combination]

    def place(self, one: Combination) -> Path:
        """The directory of a run."""
        return self.folder / one.name

    def log(self, one: Combination) -> Path:
        """What a run printed; beside its directory, which begins empty."""
        return self.folder / f"{one.name}.log"

    def save(self) -> None:
        """Write sweep.json whole."""
        record = asdict(self)
        del record["folder"]
        write_json(self.folder / RECORD, record)

    def rows(self) -> list[dict]:
        """A row for each run: parameters, state, seconds, its best result.

        `best_run` and `accuracy`, on held-out questions, are None unless
        the run's results.json has a leaderboard.
        """
        rows = []
        for one in self.combinations:
            best, accuracy = _best(self.place(one) / "run" / "results.json")
            told = {"state": one.state, "seconds": one.seconds}
            told |= {"best_run": best, "accuracy": accuracy}
            rows.append({**one.parameters, **told})
        return rows


def plan(
    lesson: Path,
    given: Sequence[Sequence[str]],
    varied: Sequence[Sequence[str]],
    output: Path | None = None,
    resume: bool = False,
) -> Sweep:
    """Check everything, and start and write nothing.

    Args:
        lesson: the notebook.
        given: a name and a text for each parameter that all runs share.
        varied: a name and one or more texts for each that is varied.
        output: a directory; by default the next number below runs/.
        resume: by default, the latest below runs/.

    Returns:
        The sweep, with every combination waiting.

    Raises:
        LabError: there is no such lesson or parameter, a name or a value
            comes twice, a value doesn't convert, or the directory is none
            to be chosen.
    """
    declared = runner.declared_in(runner.read(lesson))
    lesson = lesson.resolve()
    _refuse_names([name for name, *_ in (*given, *varied)])
    shared = dict(given)
    choices = {name: words for name, *words in varied}
    _refuse_no_value(choices)
    chosen = [
        dict(zip(choices, words, strict=True))
        for words in itertools.product(*choices.values())
    ]
    for one in chosen:
        resolve(declared, {**one, **shared})
    texts = {**choices, **{name: [text] for name, text in shared.items()}}
    values = {
        name: [convert(declared[name], word) for word in words]
        for name, words in texts.items()
    }
    _refuse_equal_values(values, texts)
    combinations = [
        Combination(name, {**one, **shared})
        for name, one in zip(_names(chosen), chosen, strict=True)
    ]
    folder = output or runner.numbered(f"{lesson.stem}-sweep", resume)
    return Sweep(folder, str(lesson), values, combinations)


def settle(planned: Sweep, resume: bool) -> Sweep:
    """What is to be run: a plan, or what its directory holds of it.

    Raises:
        LabError: the directory holds something else, an earlier sweep that
            is not to be resumed, or one of another lesson or other values.
    """
    found = _load(planned.folder)
    if found is None:
        _refuse_strange(planned.folder)
        return planned
    if not resume:
        raise LabError(
            f"{planned.folder} holds an earlier sweep. Add --resume to run "
            "what is not done of it, or give --output a new directory."
        )
    _refuse_other(planned, found)
    for one in found.combinations:
        if one.state != "done":
            one.state = "waiting"
    return found


def _refuse_names(names: list[str]) -> None:
    if OWN_DIRECTORY in names:
        raise LabError(
            f"{OWN_DIRECTORY} can't be set in a sweep: each run has a "
            "directory of its own below the sweep's, or they would write "
            f"over each other. Leave {OWN_DIRECTORY} out, and choose the "
            "sweep's directory with --output."
        )
    twice = [name for name, n in collections.Counter(names).items() if n > 1]
    if twice:
        raise LabError(
            f"{', '.join(twice)} is set more than once, and only one can "
            "count. Name each parameter once: after -p if all runs share "
            "its value, or after one --vary with all its values."
        )


def _refuse_no_value(choices: dict[str, list[str]]) -> None:
    for name, words in choices.items():
        if not words:
            raise LabError(
                f"--vary {name} names no value, so there is nothing to run. "
                f"Type the values behind it, as in --vary {name} 1 2 3."
            )


def _refuse_equal_values(
    values: dict[str, list], texts: dict[str, list[str]]
) -> None:
    for name, converted in values.items():
        for at, value in enumerate(converted):
            if value in converted[:at]:
                first = texts[name][converted.index(value)]
                raise LabError(
                    f"--vary {name} names {first!r} and {texts[name][at]!r}, "
                    "which are one value, and a run would be made twice. "
                    "Name each value once; for runs that differ by chance "
                    "alone, vary SEED."
                )


def _refuse_strange(folder: Path) -> None:
    """A directory for a new sweep is missing, empty, or only locked."""
    if folder.exists() and not folder.is_dir():
        raise LabError(f"{folder} is a file: give --output a directory.")
    try:
        there = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise _not_usable(folder, error) from error
    # A kill may have left a lock, or a record half written.
    others = [name for name in there if not name.startswith((LOCK, RECORD))]
    if others:
        raise LabError(
            f"{folder} holds files that are not of a sweep "
            f"({', '.join(others[:3])}), and nothing is written among them. "
            "Give --output an empty directory or a new one."
        )


def _refuse_other(planned: Sweep, found: Sweep) -> None:
    if found.lesson != planned.lesson:
        raise LabError(
            f"{planned.folder} holds a sweep of another lesson, "
            f"{found.lesson}. Its results are left alone. Give --output a "
            "directory of its own for this one, or name that lesson to go "
            "on with it."
        )
    ours, theirs = planned.values, found.values
    differs = sorted(
        name
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    )
    if differs:
        said = "; ".join(
            f"{name} was {_listed(theirs.get(name))}, and is "
            f"{_listed(ours.get(name))} now"
            for name in differs
        )
        raise LabError(
            f"{planned.folder} holds a sweep of other values: {said}. Its "
            "results are left alone. Set them back to go on with it, or give "
            "--output a new directory."
        )


def _listed(values: list | None) -> str:
    return ", ".join(map(str, values)) if values else "not set"


def _load(folder: Path) -> Sweep | None:
    """What sweep.json says; None if there is none."""
    try:
        record = read_json(folder / RECORD)
        if record is None:
            return None
        combinations = [Combination(**one) for one in record["combinations"]]
        return Sweep(folder, **{**record, "combinations": combinations})
    except (LabError, KeyError, TypeError) as error:
        raise LabError(
            f"{folder / RECORD} is broken ({type(error).__name__}), and "
            "without it nobody can tell which runs are done. No sweep leaves "
            "it so. Put a good copy of it back, or give --output a new "
            "directory."
        ) from error


def _not_usable(folder: Path, error: OSError) -> LabError:
    return LabError(
        f"{folder} can't be used for a sweep: {error.strerror}. Give "
        "--output a directory that you may write to."
    )


def _names(chosen: list[dict[str, str]]) -> list[str]:
    """A name for each combination that any file system can tell apart."""
    plain = [
        "_".join(_safe(f"{name}={text}") for name, text in one.items())
        for one in chosen
    ]
    taken = collections.Counter(name.casefold() for name in plain)
    return [
        name
        if len(name) <= NAME_LENGTH
        and taken[name.casefold()] == 1
        and not name.endswith(".log")  # as the log of another one is called
        else f"{name[: NAME_LENGTH - 9]}-{_hash(one)}"
        for name, one in zip(plain, chosen, strict=True)
    ]


def _safe(text: str) -> str:
    """`RATES=[1e-3, 2e-3]` as `RATES=1e-3,2e-3`; no path, no quotes."""
    return re.sub(r"[^A-Za-z0-9.,=+_-]+", "-", re.sub(r"[]['\" ]", "", text))


def _hash(one: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(one).encode()).hexdigest()[:8]


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a sweep's directory for one process at a time."""
    lock = filelock.FileLock(folder / LOCK, timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise LabError(
            f"Another sweep is at work in {folder} right now, and two would "
            "run everything twice. Wait for it, stop it, or give --output a "
            "new directory."
        ) from None
    except OSError as error:
        raise _not_usable(folder, error) from error
    try:
        yield
    finally:
        lock.release()


@dataclass
class _Job:
    """A combination that runs, its process, and when that began."""

    combination: Combination
    process: subprocess.Popen
    began: float


class _Workers:
    """Runs what a sweep has waiting, some at a time.

    Args:
        sweep: whose directory this process holds.
        jobs: runs at a time.
        time_limit: seconds for each run; None for the runner's own limit.
    """

    def __init__(self, sweep: Sweep, jobs: int, time_limit: float | None):
        self.sweep = sweep
        self.jobs = jobs
        self.time_limit = time_limit
        self.running: list[_Job] = []
        self.began = time.monotonic()

    def work(self, signals: list[int]) -> None:
        """Run all that waits, or until there is a signal; leave no process.

        Raises:
            LabError: the disk is full, or no process can be started.
        """
        _end_processes(map(self.sweep.place, self.sweep.combinations))
        self.sweep.save()
        waiting = collections.deque(
            one for one in self.sweep.combinations if one.state == "waiting"
        )
        try:
            while (waiting or self.running) and not signals:
                while waiting and len(self.running) < self.jobs:
                    self._start(waiting.popleft())
                if not self._collect():
                    time.sleep(POLL)
        finally:
            self._end()

    def _start(self, one: Combination) -> None:
        place = self.sweep.place(one)
        one.state, one.exit_code, one.reason = "running", None, ""
        self.sweep.save()
        try:
            with self.sweep.log(one).open("wb") as log:
                process = subprocess.Popen(
                    self._command(one),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {MARK: str(place.resolve())},
                    # Ctrl-C in the terminal reaches this process alone, which
                    # then ends each run once: a runner that is stopped twice
                    # may not get to end its kernel.
                    start_new_session=True,
                )
        except OSError as error:
            raise LabError(
                f"{one.name} could not be started: {error.strerror}. What "
                "was finished before is kept. Free some memory or space, "
                "then run this again with --resume."
            ) from error
        self.running.append(_Job(one, process, time.monotonic()))
        self._tell(one, "starts")

    def _command(self, one: Combination) -> list[str]:
        place = self.sweep.place(one)
        command = [sys.executable, "-m", "grpo_lab.runner", self.sweep.lesson]
        command.append(f"--output={place}")
        if place.exists():
            command.append("--resume")
        if self.time_limit is not None:
            command.append(f"--time-limit={self.time_limit}")
        for name, text in one.parameters.items():
            command += ["-p", name, text]
        return command

    def _collect(self) -> bool:
        """Note which runs have ended; whether any has."""
        ended = [job for job in self.running if job.process.poll() is not None]
        for job in ended:
            self.running.remove(job)
            one = job.combination
            # A kernel outlives a runner that was killed.
            _end_processes([self.sweep.place(one)])
            self._note(job)
            self.sweep.save()
            self._tell(one, one.state)
        return bool(ended)

    def _note(self, job: _Job) -> None:
        one, code = job.combination, job.process.returncode
        one.seconds = round(one.seconds + time.monotonic() - job.began, 1)
        one.exit_code = code
        one.state = "failed" if code else "done"
        one.reason = _last_words(self.sweep.log(one)) if code else ""

    def _end(self) -> None:
        """End what still runs; it waits for --resume then."""
        if not self.running:
            return
        for job in self.running:
            job.process.terminate()
        _say("\nEnding what runs ...", sys.stderr)
        end = time.monotonic() + GRACE
        for job in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(max(0, end - time.monotonic()))
        _end_processes(self.sweep.place(j.combination) for j in self.running)
        for job in self.running:
            job.process.kill()  # nothing, if it has ended
            job.process.wait()
            self._note(job)
            if job.combination.state == "failed":
                job.combination.state = "waiting"
                job.combination.reason = ""
        self.running.clear()
        self.sweep.save()

    def _tell(self, one: Combination, what: str) -> None:
        number = self.sweep.combinations.index(one) + 1
        _say(
            f"[{time.monotonic() - self.began:5.0f} s] {number} of "
            f"{len(self.sweep.combinations)}, {one.name}: {what}",
            sys.stdout,
        )


def _say(text: str, stream: TextIO) -> None:
    """Print, even if nobody listens any more.

    Ctrl-C ends a `| tee` as well, and a terminal may be closed: what is said
    then is lost, but no run.
    """
    try:
        print(text, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # else it fails again at the exit
        os.close(nowhere)


def _end_processes(places: Iterable[Path]) -> None:
    """Kill all processes of some runs, in any session or group.

    A killed sweep leaves runs that go on, and a killed runner its kernel.
    """
    ours = [place.resolve() for place in places]
    end = time.monotonic() + GRACE
    while time.monotonic() < end:
        found = [p for p in psutil.process_iter() if _is_of(p, ours)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):  # gone meanwhile
                process.kill()
        time.sleep(POLL)


def _is_of(process: psutil.Process, places: list[Path]) -> bool:
    """Whether it is of one of the runs, or of a sweep that such a run made."""
    try:
        mark = process.environ().get(MARK)
    except psutil.Error:  # gone meanwhile, or another user's
        return False
    return mark is not None and any(
        Path(mark).is_relative_to(place) for place in places
    )


def _last_words(log: Path) -> str:
    """The last line of a log, but for the one that says where things are."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines()]
    said = [x for x in lines if x and not x.startswith(POINTER)]
    return said[-1][-REASON_LENGTH:] if said else ""


def _best(results: Path) -> tuple[str | None, float | None]:
    """The name and held-out accuracy of a leaderboard's best run.

    Of equal ones the first: `Grid.leaderboard` is in order.
    """
    try:
        board = json.loads(results.read_text())["leaderboard"]
        ranked = [(str(row["run"]), float(row["after"])) for row in board]
    except (OSError, ValueError, LookupError, TypeError):
        return None, None  # none, or of another kind
    ranked = [row for row in ranked if math.isfinite(row[1])]
    return max(ranked, key=lambda row: row[1], default=(None, None))


def _write_csv(path: Path, rows: list[dict]) -> None:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, file.getvalue())


def _report(sweep: Sweep, rows: list[dict]) -> str:
    """The table, why runs failed, and where things are."""
    head = ("combination", "state", "seconds", "best run", "accuracy")
    cells = [head] + [
        (
            one.name,
            one.state,
            f"{one.seconds:.0f}",
            row["best_run"] or "",
            "" if row["accuracy"] is None else f"{row['accuracy']:.1%}",
        )
        for one, row in zip(sweep.combinations, rows, strict=True)
    ]
    sides = (str.ljust, str.ljust, str.rjust, str.ljust, str.rjust)
    columns = [
        [side(cell, max(map(len, column))) for cell in column]
        for side, column in zip(sides, zip(*cells, strict=True), strict=True)
    ]
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    failed = [one for one in sweep.combinations if one.state == "failed"]
    lines += [""] if failed else []
    lines += [
        f"{one.name} failed with exit code {one.exit_code}: "
        f"{one.reason or 'no word'} ({sweep.log(one)})"
        for one in failed
    ]
    if any(one.state != "done" for one in sweep.combinations):
        lines.append("The same line with --resume runs what is not done.")
    return "\n".join([*lines, "", f"Table: {sweep.folder / TABLE}"])


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect signals in place of ending at once.

    What is ignored, as in a background job or after nohup, stays so. The
    caller's handlers come back.
    """
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least one runs at a time")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = runner.parser_of(
        "python -m grpo_lab.runner sweep",
        "Run a lesson for each combination of parameter values.",
        "set a parameter of all runs",
        "run what is not done of an earlier sweep with the same values",
    )
    parser.add_argument(
        "--vary",
        dest="varied",
        nargs="+",
        action="append",
        required=True,
        metavar=("NAME", "VALUE"),
        help="run with each of these values; a list is one, as '[1, 2]'",
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        default=1,
        metavar="N",
        help="runs at a time (default: 1; two on the same cores or the same "
        "GPU fight for them, and each takes its own memory)",
    )
    parser.add_argument(
        "--time-limit",
        type=runner.positive_seconds,
        metavar="S",
        help="seconds for each run (default: a day)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command line; see the exit codes at the top."""
    arguments = _parser().parse_args(argv)
    resume = arguments.resume
    try:
        planned = plan(
            arguments.lesson,
            arguments.parameters,
            arguments.varied,
            arguments.output,
            resume,
        )
        settle(planned, resume)  # before a lock is written among other files
        with _held(planned.folder):
            # Again: another sweep may have ended meanwhile.
            sweep = settle(planned, resume)
            return _run(sweep, arguments.jobs, arguments.time_limit)
    except LabError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # nothing has been started
        print("\nInterrupted.", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(sweep: Sweep, jobs: int, time_limit: float | None) -> int:
    """Run a sweep whose directory is held, and report; the exit code."""
    try:
        with _noted_signals() as signals:
            _Workers(sweep, jobs, time_limit).work(signals)
            rows = sweep.rows()
            _write_csv(sweep.folder / TABLE, rows)
    except LabError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    _say(f"\n{_report(sweep, rows)}", sys.stdout)
    if signals:
        return 128 + signals[0]
    return int(any(one.state != "done" for one in sweep.combinations))
