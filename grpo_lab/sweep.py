"""Run a lesson once for each combination of some parameters' values.

    python -m grpo_lab.runner sweep lite/03_grid_search.ipynb \\
        -p PROFILE pocket --vary SEED 1 2 3 --vary MAX_STEPS 8 16

    runs/03_grid_search-sweep-001/
      sweep.json            the lesson and the values
      sweep.csv             the table that is printed at the end
      MAX_STEPS=8_SEED=1/   a run: what the runner writes, and its log.txt

Whatever can be refused is refused before anything starts. Each combination
is a process `python -m grpo_lab.runner LESSON` of its own, so one that fails
stops no other, and all of them end when the sweep does, even by `kill -9`.
A run is done when its HTML is there; the same line with --resume runs what is
not, from where it stopped.

Exit codes: 0 all is done, 1 a run failed, 2 the input is wrong, 130 Ctrl-C,
143 SIGTERM, 129 the terminal was closed.
"""

import argparse
import collections
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from grpo_lab import processes, runner
from grpo_lab.cli import aligned, emit
from grpo_lab.errors import LabError
from grpo_lab.files import (
    LOCK,
    hold,
    last_line,
    read_json,
    write_json,
    write_whole,
)
from grpo_lab.parameters import convert, resolve

RECORD = "sweep.json"
NAME_LENGTH = 100  # characters that every file system takes
POLL = 0.1  # seconds between two looks at the processes


@dataclass(frozen=True)
class Sweep:
    """What is to be run, and where.

    Attributes:
        folder: the sweep's directory.
        lesson: the full path of the notebook.
        values: every parameter that is set, with its values as the lesson
            reads them: one, or several if it is varied.
        runs: for the name of each run its parameters, as text that was
            typed; the last parameter varied fastest.
        failed: why runs have failed, by name.
    """

    folder: Path
    lesson: Path
    values: dict[str, list]
    runs: dict[str, dict[str, str]]
    failed: dict[str, str] = field(default_factory=dict)

    def is_done(self, name: str) -> bool:
        """Whether a run has ended well: the runner writes HTML only then."""
        page = self.lesson.with_suffix(".html").name
        return (self.folder / name / page).exists()


def plan(
    lesson: Path,
    given: Sequence[Sequence[str]],
    varied: Sequence[Sequence[str]],
    folder: Path,
) -> Sweep:
    """The sweep of a command line, checked; nothing is started or written.

    Args:
        lesson: the notebook.
        given: a name and a text for each parameter that all runs share.
        varied: a name and one or more texts for each that is varied.
        folder: the sweep's directory.

    Raises:
        LabError: there is no such lesson or parameter, a name or a value
            comes twice, or a value doesn't convert.
    """
    declared = runner.declared_in(lesson)
    texts = {name: words for name, *words in (*varied, *given)}
    if "OUTPUT_DIR" in texts:
        raise LabError(
            "OUTPUT_DIR can't be set in a sweep: each run has a directory of "
            "its own below the sweep's, which --output chooses."
        )
    if len(texts) < len(varied) + len(given) or not all(texts.values()):
        raise LabError(
            "Name each parameter once, with its value: after -p if all runs "
            "share it, or after --vary with all values, as in --vary SEED 1 2."
        )
    values: dict[str, list] = {name: [] for name in texts}
    for name, words in texts.items():
        for word in words:
            resolve(declared, {name: word})  # or says what is wrong
            value = convert(declared[name], word)
            if value in values[name]:
                raise LabError(
                    f"--vary {name} names {value!r} more than once. Name each "
                    "value once; for runs that differ by chance, vary SEED."
                )
            values[name].append(value)
    chosen = [
        dict(zip(texts, words, strict=True))
        for words in itertools.product(*texts.values())
    ]
    names = _names(values, sorted(name for name, *_ in varied))
    runs = dict(zip(names, chosen, strict=True))
    return Sweep(folder, lesson.resolve(), values, runs)


def _names(values: dict[str, list], varied: list[str]) -> list[str]:
    """A directory's name for each combination, made of its values.

    Not of the words that were typed, so that other words for the same sweep
    go on with it. Names that are too long or alike end in their number.
    """
    plain = []
    for combination in itertools.product(*values.values()):
        one = dict(zip(values, combination, strict=True))
        text = "_".join(f"{name}={one[name]}" for name in varied)
        bare = re.sub(r"[]['\" ]", "", text)
        plain.append(re.sub(r"[^A-Za-z0-9.,=+_-]+", "-", bare))
    times = collections.Counter(name.casefold() for name in plain)
    return [
        name
        if len(name) <= NAME_LENGTH and times[name.casefold()] == 1
        else f"{name[: NAME_LENGTH - 9]}~{number}"
        for number, name in enumerate(plain, start=1)
    ]


def refuse_other_files(folder: Path) -> None:
    """Refuse a directory that is not empty and not of a sweep."""
    names = sorted(path.name for path in folder.glob("*"))
    # A kill may have left a lock, or a record half written.
    others = [name for name in names if not name.startswith((LOCK, RECORD))]
    if others and RECORD not in names:
        raise LabError(
            f"{folder} holds files that are not of a sweep "
            f"({', '.join(others[:3])}), and nothing is written among them. "
            "Give --output an empty directory or a new one."
        )


def settle(sweep: Sweep, resume: bool) -> None:
    """Write the record of a new sweep, or compare it with that of an earlier.

    Raises:
        LabError: the directory holds a sweep that is not to be resumed, or
            one of another lesson or other values.
    """
    path = sweep.folder / RECORD
    ours = {"lesson": str(sweep.lesson), **sweep.values}
    theirs = read_json(path)
    if theirs is None:
        write_json(path, ours)
        return
    if not resume:
        raise LabError(
            f"{sweep.folder} holds an earlier sweep. Add --resume to run what "
            "is not done of it, or give --output a new directory."
        )
    differs = [
        f"{name} was {theirs.get(name, 'not set')} and is "
        f"{ours.get(name, 'not set')}"
        for name in {**theirs, **ours}
        if ours.get(name) != theirs.get(name)
    ]
    if differs:
        raise LabError(
            f"{sweep.folder} holds another sweep: {', '.join(differs)}. Its "
            "results are left alone. Set that back to go on with it, or give "
            "--output a new directory."
        )


def work(
    sweep: Sweep, jobs: int, time_limit: float, signals: list[int]
) -> None:
    """Run all that is not done, `jobs` at a time; leave no process.

    Args:
        sweep: whose directory this process holds; `failed` is filled in.
        jobs: runs at a time.
        time_limit: seconds for each run.
        signals: the work ends when there is one in it.
    """
    processes.end_marked([sweep.folder])  # what a killed sweep has left
    waiting = [name for name in sweep.runs if not sweep.is_done(name)]
    running: dict[str, subprocess.Popen] = {}
    try:
        while (waiting or running) and not signals:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                emit(f"{name}: starts")
                running[name] = _start(sweep, name, time_limit)
            for name, process in list(running.items()):
                if process.poll() is not None:
                    _finish(sweep, name, running.pop(name).returncode)
            time.sleep(POLL)
    finally:
        # Once: a runner that is stopped twice may not get to end its kernel.
        for process in running.values():
            process.terminate()
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(processes.PATIENCE)
        processes.end_marked([sweep.folder])


def _start(sweep: Sweep, name: str, time_limit: float) -> subprocess.Popen:
    place = sweep.folder / name
    command = [sys.executable, "-m", "grpo_lab.runner", str(sweep.lesson)]
    command += [f"--output={place}", "--resume", f"--time-limit={time_limit}"]
    for parameter, text in sweep.runs[name].items():
        command += ["-p", parameter, text]
    environment = {
        processes.MARK: str(place.resolve()),
        processes.PARENT: str(os.getpid()),
    }
    return processes.start(command, place / "log.txt", environment)


def _finish(sweep: Sweep, name: str, code: int) -> None:
    place = sweep.folder / name
    processes.end_marked([place])  # a kernel outlives a runner that was killed
    if code:
        log = place / "log.txt"
        why = last_line(log)[-500:]
        sweep.failed[name] = f"exit code {code}, {why} ({log})"
    emit(f"{name}: {'failed' if code else 'done'}")


def rows(sweep: Sweep) -> pd.DataFrame:
    """A row for each run: its name, its parameters, and how it went.

    `seconds`, `best_run` and its `accuracy` on held-out questions are "" where
    the run has not written them.
    """
    found = []
    for name, parameters in sweep.runs.items():
        place = sweep.folder / name
        state = "done" if sweep.is_done(name) else "waiting"
        row = {"combination": name, **parameters}
        row["state"] = "failed" if name in sweep.failed else state
        row |= {"seconds": "", "best_run": "", "accuracy": ""}
        with contextlib.suppress(*_NOT_THERE):
            notebook = read_json(place / sweep.lesson.name)
            duration = notebook["metadata"]["papermill"]["duration"]
            row["seconds"] = str(round(duration))
        with contextlib.suppress(*_NOT_THERE):
            board = read_json(place / "run" / "results.json")["leaderboard"]
            # A run that was stopped early may have no accuracy.
            measured = [one for one in board if one["after"] >= 0]
            best = max(measured, key=lambda one: one["after"])
            row["best_run"], row["accuracy"] = best["run"], str(best["after"])
        found.append(row)
    return pd.DataFrame(found)


_NOT_THERE = (LabError, OSError, ValueError, LookupError, TypeError)
"""A run may not have come so far, and a lesson may have no grid."""


def _report(sweep: Sweep) -> str:
    """Write sweep.csv; the table in words, and why runs failed."""
    frame = rows(sweep)
    path = sweep.folder / "sweep.csv"
    write_whole(path, frame.drop(columns="combination").to_csv(index=False))
    shown = frame.drop(columns=list(sweep.values))
    lines = ["", aligned([list(shown), *shown.to_numpy().tolist()])]
    lines += [f"{name} failed: {why}" for name, why in sweep.failed.items()]
    if not all(map(sweep.is_done, sweep.runs)):
        lines.append("The same line with --resume runs what is not done.")
    return "\n".join([*lines, f"Table: {path}"])


def main(argv: list[str] | None = None) -> int:
    """The command line; see the exit codes at the top."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_lab.runner sweep",
        description="Run a lesson for each combination of parameter values.",
    )
    runner.add_options(parser)
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
        type=int,
        default=1,
        metavar="N",
        help="runs at a time (default: 1; two on the same cores or the same "
        "GPU fight for them, and each takes its own memory)",
    )
    given = parser.parse_args(argv)
    signals: list[int] = []
    try:
        stem = f"{given.lesson.stem}-sweep"
        folder = given.output or runner.numbered(stem, given.resume)
        if given.jobs < 1:
            raise LabError("--jobs is 1 or more: so many runs at a time.")
        sweep = plan(given.lesson, given.parameters, given.varied, folder)
        refuse_other_files(folder)
        numbers = (signal.SIGINT, *processes.ENDING)
        with hold(folder), processes.on_signals(numbers, signals.append):
            settle(sweep, given.resume)
            work(sweep, given.jobs, given.time_limit, signals)
            emit(_report(sweep))
    except LabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 128 + signals[0] if signals else int(bool(sweep.failed))
