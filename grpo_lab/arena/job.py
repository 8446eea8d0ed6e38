"""The process of one experiment, and how it is started.

It outlives the notebook or terminal that submitted it. One experiment of an
arena trains at a time, since two at once are much slower than one after the
other; the others wait. The training libraries are imported when the lock is
held, so that whoever started the job soon knows that it lives.
"""

import contextlib
import os
import subprocess
import sys
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

TURN = "training.lock"
"""Below the arena's home: held by the experiment that trains."""

STARTER = "start.lock"
"""Below an experiment's directory: held by whoever starts its job."""

CLIPPED_STEPS, CLIPPED_RATIO = 5, 0.2
"""Last steps whose truncated completions are counted, and the share of them
above which a reader is warned."""

PROGRAM = "import sys; from grpo_lab.arena import job; sys.exit(job.main())"
"""What the process runs; its directory is the first argument."""


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
    """Start the job of an experiment, wait until it lives, return its pid.

    Raises:
        LabError: it runs already, ended at once, or does not begin.
    """
    directory = Path(directory).resolve()
    name = directory.name
    try:
        with filelock.FileLock(directory / STARTER, timeout=0):
            if is_alive(directory):
                raise LabError(
                    f"The experiment {name!r} runs already. Wait for it, or "
                    "stop it first with stop_experiment."
                )
            return _start(directory)
    except filelock.Timeout:
        raise LabError(
            f"The experiment {name!r} is being started right now. Wait a "
            "moment, then look at it with list_experiments."
        ) from None


def _start(directory: Path) -> int:
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
    while time.time() - begun < START_SECONDS and process.poll() is None:
        # The job writes its number when it holds the experiment's lock.
        if Status(directory).values["pid"] == process.pid:
            return process.pid
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()
        reason = (
            f"The job of {directory.name} did not begin within "
            f"{START_SECONDS:g} s and was ended. Try again when the machine "
            "is less busy."
        )
    else:
        reason = (
            f"The job of {directory.name} ended at once. Its last words were: "
            f"{last_line(directory / 'job.log') or 'none'} Put right what "
            "they name, then try again."
        )
    Status(directory).tell(status="failed", reason=reason)
    raise LabError(reason)


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
    with lock:
        status = Status(directory)
        status.tell(status="queued", reason="", doing="", pid=os.getpid())
        try:
            with _turn(directory) as is_ours:
                if is_ours:
                    status.tell(status="running", doing="loading")
                    end, why = _train(directory, status)
                else:
                    end, why = "stopped", "stopped before it began"
            status.tell(status=end, doing="", reason=why)
        except Exception as error:
            from grpo_lab.grid import reason

            with contextlib.suppress(LabError):  # a full disk
                status.tell(status="failed", doing="", reason=reason(error))
                write_whole(directory / "error.txt", traceback.format_exc())
            traceback.print_exc()
            return 1
    return 0


def _train(directory: Path, status: Status) -> tuple[str, str]:
    """Train the population; how that ended, and why."""
    from grpo_lab import environment

    environment.prepare()
    from grpo_lab.arena import experiment, population

    clipped: list[float] = []

    def progress(member, step: int, row: dict) -> None:
        clipped.append(row["clipped_ratio"])
        status.tell(
            warning=_warning(clipped[-CLIPPED_STEPS:]),
            step=step,
            generation=(step - 1) // trained.plan.evo_steps,
            member=member.number,
            reward=row["reward"],
            seconds_per_step=row["seconds"],
        )

    trained = experiment.population(
        directory, progress, lambda what: status.tell(doing=what)
    )
    status.tell(steps=trained.plan.settings.max_steps)
    try:
        trained.train()
    except population.Stopped:
        return "stopped", "stopped on request"
    finally:
        trained.context.task.rewards[0].close()
    return "done", ""


def _warning(clipped: list[float]) -> str:
    """What the last steps' share of truncated completions calls for."""
    share = sum(clipped) / len(clipped)
    if share <= CLIPPED_RATIO:
        return ""
    return (
        f"{share:.0%} of the last completions were truncated at their limit "
        "and earned little; give max_output_tokens more."
    )


@contextlib.contextmanager
def _turn(directory: Path) -> Iterator[bool]:
    """Wait until no other experiment of the arena trains.

    Yields:
        False if a stop was asked for meanwhile.
    """
    lock = filelock.FileLock(directory.parent.parent / TURN)
    while not (directory / "stop").exists():
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=0.5)
            break
    try:
        yield lock.is_locked
    finally:
        lock.release()


def main() -> int:
    """The process itself; see `PROGRAM`."""
    return run(Path(sys.argv[1]))
