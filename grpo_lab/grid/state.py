"""A run's directory, and the state that its files show.

A grid's directory is the one thing that the driver, its workers, a second
terminal and the next start after a crash agree on, so each asks it anew.
Beside its record and its results a run's directory may hold `stop`, a request
to end the run after its step, and `exempt`, which says that halving leaves
the run alone.
"""

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import filelock
import torch

from grpo_lab import environment, memory, training
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import read_json, write_json
from grpo_lab.grid.halving import rung_path
from grpo_lab.settings import RunSettings

HOLD_SECONDS = 120.0
"""How long whoever takes up a run waits for a lost worker to be gone."""

PARENT = "parent"
"""Folder of a warm clone with the checkpoint that it starts from."""


@dataclass(frozen=True)
class RunState:
    """A run, as its directory shows it.

    Attributes:
        directory: the run's.
    """

    directory: Path

    @cached_property
    def record(self) -> dict:
        """Everything that determines it; see `plan.run_record`."""
        return read_json(self.directory / "settings.json")

    @cached_property
    def settings(self) -> RunSettings:
        """What it trains with."""
        # A run from before there were optimizations had none.
        return RunSettings(**{"optimizations": ()} | self.record["settings"])

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.settings.steps(self.record["grid"]["train_rows"])

    @property
    def clone(self) -> dict | None:
        """Of a clone where it comes from; see `control.clone`."""
        return self.record.get("clone")

    @property
    def base(self) -> Path:
        """Where the evaluation of its base model is kept.

        Runs with one base model, in one precision and with one limit on the
        length of answers, share it; data and reading are the grid's.
        """
        one = self.settings
        code = short_hash(
            [
                self.record["weights"],
                one.load_in_4bit,
                one.max_completion_length,
            ]
        )
        base = self.directory.parent.parent / "base"
        return base / f"{one.short_model}_{code}" / "evaluation.json"

    @property
    def result(self) -> dict:
        """Its `status`, and its `reason` if it has one."""
        found = read_json(self.directory / "result.json")
        return found or {"status": "unfinished"}

    @property
    def is_open(self) -> bool:
        """Whether it is neither done, nor failed, nor stopped."""
        return self.result["status"] == "unfinished"

    @property
    def is_exempt(self) -> bool:
        """Whether halving leaves it alone.

        Clones and runs that somebody resumed by hand are.
        """
        return self.clone is not None or (self.directory / "exempt").exists()

    @property
    def stop_requested(self) -> bool:
        """Whether somebody has asked for its end."""
        return (self.directory / "stop").exists()

    def has_reached(self, rung: int) -> bool:
        """Whether it was measured at a rung."""
        return rung_path(self.directory, rung).exists()

    def at_rung(self, rung: int) -> Evaluation | None:
        """Its answers at a rung; None if it is not there yet."""
        return Evaluation.load(rung_path(self.directory, rung))

    def end(self, status: str, reason: str = "") -> None:
        """Note how it ended; what had been asked for is over then."""
        result = {"status": status} | ({"reason": reason} if reason else {})
        write_json(self.directory / "result.json", result)
        (self.directory / "stop").unlink(missing_ok=True)

    @property
    def is_held(self) -> bool:
        """Whether a process trains it right now."""
        try:
            with hold(self.directory, patience=0):
                return False
        except LabError:
            return True


def all_runs(output_dir: Path, planned: Sequence[Path]) -> list[RunState]:
    """The planned runs, and the clones that have been made since."""
    there = sorted(
        (output_dir / "runs").glob("*/settings.json"),
        key=lambda path: path.stat().st_mtime,
    )
    others = [
        RunState(path.parent) for path in there if path.parent not in planned
    ]
    clones = [run for run in others if run.clone is not None]
    return [*map(RunState, planned), *clones]


def short_hash(value: object) -> str:
    """Eight hex digits of a plain value."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def parent_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that a warm clone was given; None for other runs."""
    return next((directory / PARENT).glob("checkpoint-*"), None)


def note_start(directory: Path) -> None:
    """Add this start of a run to the list in `environment.json`.

    Its `step` is that of the checkpoint from which it goes on.
    """
    start = training.last_checkpoint(directory) or parent_checkpoint(directory)
    starts = read_json(directory / "environment.json") or []
    starts.append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": environment.versions(),
            "device": memory.device_memory().name,
            "threads": torch.get_num_threads(),
            "host": platform.node(),
            "process": os.getpid(),
            "step": training.step_of(start) if start else 0,
        }
    )
    write_json(directory / "environment.json", starts)


# --- One process at a time in a directory -----------------------------------


@contextlib.contextmanager
def hold(directory: Path, patience: float | None = None) -> Iterator[None]:
    """Hold a run, so that no second process trains it.

    A worker may be given up as lost, or a driver be killed, while what it was
    doing goes on for a moment.

    Args:
        patience: seconds to wait for another process to let go; by default
            `HOLD_SECONDS`.

    Raises:
        LabError: another one holds it.
    """
    held = lock(
        directory,
        "run.lock",
        HOLD_SECONDS if patience is None else patience,
        f"Another process still trains {directory.name}, perhaps a worker of "
        "an earlier start. Wait for it, or end it: environment.json in the "
        "run's directory tells its machine and number. Then run this again.",
    )
    try:
        yield
    finally:
        held.release()


@contextlib.contextmanager
def claim(output_dir: Path, shared: dict) -> Iterator[None]:
    """Hold a grid's directory for one process at a time."""
    held = lock(output_dir, "grid.lock")
    try:
        write_json(output_dir / "grid.json", shared)
        yield
    finally:
        held.release()


def lock(
    directory: Path,
    name: str,
    patience: float = 0,
    advice: str = "",
    is_singleton: bool = False,
) -> filelock.BaseFileLock:
    """Make a directory, and lock it for this process.

    Args:
        name: the lock's file.
        patience: seconds to wait for another process.
        advice: what to say if that does not let go.
        is_singleton: whether this process may hold it twice.

    Raises:
        LabError: another process holds it, or nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = filelock.FileLock(directory / name, is_singleton=is_singleton)
        found.acquire(timeout=patience)
    except filelock.Timeout:
        raise LabError(
            advice
            or f"Another process is training in {directory} right now, and "
            "two would write over each other. Wait for it, stop it, or choose "
            "another OUTPUT_DIR."
        ) from None
    except OSError as error:
        raise LabError(
            f"Nothing can be written to {directory}: {error.strerror}. "
            "Choose another OUTPUT_DIR, one that you may write to."
        ) from error
    return found
