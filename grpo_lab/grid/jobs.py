"""What is left to do in a grid, as its directory tells it.

A grid's directory is the one thing that the engines, the terminal from which
somebody steers and the next start after a crash agree on, so each asks it
anew. Beside the run's record and results a run's directory may hold `stop`, a
request to end the run after its step, and `exempt`, which says that halving
leaves the run alone.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import read_json, write_json
from grpo_lab.grid.halving import Halving, next_rung, rung_path
from grpo_lab.grid.results import (
    clone_of,
    settings_in,
    status_of,
    steps_in,
)
from grpo_lab.settings import RunSettings

UNFINISHED = "unfinished"

HOLD_SECONDS = 120.0
"""How long whoever takes up a run waits for a lost worker to be gone."""


@dataclass(frozen=True)
class Job:
    """A run, seen from what has to be done about it.

    Attributes:
        directory: the run's.
        settings: what it trains with.
        steps: optimiser steps of the whole run.
    """

    directory: Path
    settings: RunSettings
    steps: int

    @property
    def is_open(self) -> bool:
        """Whether it is neither done, nor failed, nor stopped."""
        return status_of(self.directory)["status"] == UNFINISHED

    @property
    def is_exempt(self) -> bool:
        """Whether halving leaves it alone.

        Clones and runs that somebody resumed by hand are.
        """
        by_hand = (self.directory / "exempt").exists()
        return by_hand or clone_of(self.directory) is not None

    @property
    def stop_requested(self) -> bool:
        """Whether somebody has asked for its end."""
        return (self.directory / "stop").exists()

    def next_rung(self, halving: Halving | None) -> int | None:
        """The rung that it trains to next; None if no more are ahead."""
        if self.is_exempt:
            return None
        return next_rung(self.directory, halving, self.steps)

    def at_rung(self, step: int) -> Evaluation | None:
        """Its answers at a rung; None if it is not there yet."""
        return Evaluation.load(rung_path(self.directory, step))

    def end(self, status: str, reason: str = "") -> None:
        """Note how it ended; what had been asked for is over then."""
        result = {"status": status} | ({"reason": reason} if reason else {})
        write_json(self.directory / "result.json", result)
        (self.directory / "stop").unlink(missing_ok=True)

    @contextlib.contextmanager
    def held(self, patience: float = HOLD_SECONDS) -> Iterator[None]:
        """Hold it, so that no second process trains it.

        Args:
            patience: seconds to wait for another process to let go.

        Raises:
            LabError: another one holds it.
        """
        lock = filelock.FileLock(self.directory / "run.lock")
        try:
            lock.acquire(timeout=patience)
        except filelock.Timeout:
            raise LabError(
                f"Another process still trains {self.directory.name}, perhaps "
                "a worker of an earlier start. Wait for it, or end it: "
                "environment.json in the run's directory tells its machine "
                "and number. Then run this again."
            ) from None
        try:
            yield
        finally:
            lock.release()

    @property
    def is_held(self) -> bool:
        """Whether a process trains it right now."""
        try:
            with self.held(patience=0):
                return False
        except LabError:
            return True


def job_at(directory: Path) -> Job:
    """The job of a run's directory."""
    record = read_json(directory / "settings.json")
    return Job(directory, settings_in(record), steps_in(record))


def all_jobs(output_dir: Path, planned: Sequence[Path]) -> list[Job]:
    """The planned runs, and the clones that have been made since."""
    there = sorted(
        (output_dir / "runs").glob("*/settings.json"),
        key=lambda path: path.stat().st_mtime,
    )
    clones = [
        path.parent
        for path in there
        if path.parent not in planned and clone_of(path.parent) is not None
    ]
    return [job_at(directory) for directory in (*planned, *clones)]
