"""The process of one experiment, and how it is started.

It outlives the notebook or terminal that submitted it. One experiment of an
arena trains at a time, since two at once are much slower than one after the
other; the others wait, and whichever looks first is the next. The training
libraries are imported when the lock is held, so that whoever started the job
soon knows that it lives.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import filelock

from grpo_lab.arena.experiment import (
    LOCK,
    START_SECONDS,
    is_alive,
    read_status,
)
from grpo_lab.errors import LabError
from grpo_lab.files import last_line, write_json, write_whole

BEAT_SECONDS = 2.0
TURN = "training.lock"
"""Below the arena's home: held by the experiment that trains."""

STARTER = "start.lock"
"""Below an experiment's directory: held by whoever starts its job."""

METRICS_SECONDS = 5.0
"""How often the experiment's metrics.csv is written, at most."""

CUT_STEPS = 5
"""Optimiser steps that `CUT_SHARE` is taken over."""

CUT_SHARE = 0.2
"""Share of completions cut at their limit above which a reader is warned."""

PROGRAM = "import sys; from grpo_lab.arena import job; sys.exit(job.main())"
"""What the process runs; its directory is the first argument."""


class _StopRequested(Exception):
    """A stop was asked for while the job waited for its turn."""


class Status:
    """The file status.json of an experiment, kept up to date by its job."""

    def __init__(self, directory: Path) -> None:
        self.path = Path(directory) / "status.json"
        self.values = read_status(directory)

    def tell(self, **changes: object) -> None:
        """Change some values and write the file."""
        self.values |= {**changes, "time": time.time()}
        write_json(self.path, self.values)


def start(directory: Path) -> int:
    """Start the job of an experiment and wait until it lives.

    Returns:
        The number of its process.

    Raises:
        LabError: it ended at once, or does not begin.
    """
    directory = Path(directory).resolve()
    try:
        with filelock.FileLock(directory / STARTER, timeout=0):
            return _start(directory)
    except filelock.Timeout:
        raise LabError(
            f"The experiment {directory.name!r} is being started right now. "
            "Wait a moment, then look at it with list_experiments."
        ) from None


def _start(directory: Path) -> int:
    if is_alive(directory):
        raise LabError(
            f"The experiment {directory.name!r} runs already. Wait for it, "
            "or stop it first with stop_experiment."
        )
    (directory / "stop").unlink(missing_ok=True)
    Status(directory).tell(status="queued", reason="", pid=None)
    begun = time.time()
    with (directory / "job.log").open("ab") as log:
        process = subprocess.Popen(
            # -P: else a file such as `datasets.py` of the working directory
            # would stand in for the library of that name.
            [sys.executable, "-P", "-c", PROGRAM, str(directory)],
            # One that is there as long as the experiment is.
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # So that Ctrl-C or the end of a kernel do not reach it.
            start_new_session=True,
        )
    while time.time() - begun < START_SECONDS:
        # The job writes its number when it holds the experiment's lock.
        if Status(directory).values["pid"] == process.pid:
            return process.pid
        if process.poll() is not None:
            words = last_line(directory / "job.log") or "none"
            raise _not_started(
                directory,
                f"The job of {directory.name} ended at once. Its last words "
                f"were: {words} Put right what they name, then try again.",
            )
        time.sleep(0.05)
    process.kill()
    raise _not_started(
        directory,
        f"The job of {directory.name} did not begin within "
        f"{START_SECONDS:g} s and was ended. Try again when the machine is "
        "less busy.",
    )


def _not_started(directory: Path, reason: str) -> LabError:
    Status(directory).tell(status="failed", reason=reason)
    return LabError(reason)


def run(directory: Path) -> int:
    """Train an experiment to its end.

    Returns:
        An exit status: 0 done or stopped, 1 failed, 3 another job of the
        experiment lives.
    """
    lock = filelock.FileLock(directory / LOCK, timeout=5)
    try:
        lock.acquire()
    except filelock.Timeout:
        print(f"Another job of {directory.name} lives.", file=sys.stderr)
        return 3
    with lock, _heartbeat(directory):
        status = Status(directory)
        status.tell(status="queued", reason="", doing="", pid=os.getpid())
        try:
            with _turn(directory):
                status.tell(status="running", doing="loading")
                _train(directory, status)
        except _StopRequested:
            status.tell(
                status="stopped", doing="", reason="stopped before it began"
            )
        except Exception as error:
            with contextlib.suppress(LabError):  # a full disk
                write_whole(directory / "error.txt", traceback.format_exc())
            with contextlib.suppress(LabError):
                status.tell(status="failed", doing="", reason=_reason(error))
            traceback.print_exc()
            return 1
    return 0


def _train(directory: Path, status: Status) -> None:
    from grpo_lab import environment

    environment.prepare()
    from grpo_lab.arena import experiment, population

    recent: list[float] = []
    written = 0.0

    def progress(member, step: int, row: dict) -> None:
        nonlocal written
        recent.append(row["clipped_ratio"])
        if time.monotonic() - written > METRICS_SECONDS:
            _write_metrics(directory)
            written = time.monotonic()
        status.tell(
            warning=_warning(recent[-CUT_STEPS:]),
            step=step,
            generation=(step - 1) // trained.plan.evo_steps,
            member=member.number,
            reward=row["reward"],
            seconds_per_step=row["seconds"],
        )

    def doing(what: str) -> None:
        status.tell(doing=what)

    trained = experiment.population(directory, progress, doing)
    status.tell(steps=trained.plan.settings.max_steps)
    try:
        trained.train()
    except population.Stopped:
        status.tell(status="stopped", doing="", reason="stopped on request")
        return
    finally:
        [reward] = trained.context.task.rewards
        reward.close()
        _write_metrics(directory)
    status.tell(status="done", doing="")


def _write_metrics(directory: Path) -> None:
    from grpo_lab.arena import records

    frame = records.metrics(directory)
    write_whole(directory / "metrics.csv", frame.to_csv(index=False))


def _warning(cut: list[float]) -> str:
    """What the last steps' share of cut completions calls for."""
    share = sum(cut) / len(cut)
    if share <= CUT_SHARE:
        return ""
    return (
        f"{share:.0%} of the last completions were cut at their limit and "
        "earned little; give max_output_tokens more."
    )


def _reason(error: Exception) -> str:
    from grpo_lab.grid import reason

    return reason(error)


@contextlib.contextmanager
def _heartbeat(directory: Path) -> Iterator[None]:
    """Touch a file every few seconds for as long as this process lives."""
    over = threading.Event()
    beat = directory / "heartbeat"

    def go() -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk is told elsewhere
                beat.touch()
            if over.wait(BEAT_SECONDS):
                return

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _turn(directory: Path) -> Iterator[None]:
    """Wait until no other experiment of the arena trains."""
    lock = filelock.FileLock(directory.parent.parent / TURN)
    while True:
        if (directory / "stop").exists():
            raise _StopRequested
        try:
            lock.acquire(timeout=0.5)
            break
        except filelock.Timeout:
            continue
    try:
        yield
    finally:
        lock.release()


def main() -> int:
    """The process itself; see `PROGRAM`."""
    return run(Path(sys.argv[1]))
