"""Successive halving: most of the budget for the runs that deserve it.

At each *rung*, a number of optimiser steps, the runs are compared by their
held-out accuracy; the best part goes on, the rest is stopped where it is.
Source: Jamieson and Talwalkar, 2016, arXiv:1502.07943. All runs reach a rung
before anything is decided, so that the decisions do not depend on which run is
the fastest; or each is decided when it arrives, by what has arrived until then
(ASHA; Li et al., 2018, arXiv:1810.05934), so that no worker waits.

Every decision is written to `rungs.json` of its run, so that a grid that was
killed goes on with the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import read_json, write_json

if TYPE_CHECKING:
    from grpo_lab.grid.state import RunState

PROMOTED, STOPPED = "promoted", "stopped"


class Scheduler:
    """Trains every run to its end, and stops none."""

    def decide(self, runs: Sequence[RunState]) -> list[tuple[RunState, int]]:
        """The runs that may train now, the first one first, and to which step.

        What is decided about runs is in their directories by then, so that
        it can be asked at any time, also by the next start after a kill.

        Args:
            runs: all of a grid, also those that train or are over.
        """
        return [(run, run.steps) for run in runs if run.is_open]


@dataclass(frozen=True)
class Halving(Scheduler):
    """When runs are compared, and how many go on.

    Attributes:
        first: optimiser steps of the first rung.
        factor: one of so many runs goes on; the next rung lies at so many
            times the steps.
        asynchronous: decide about a run when it arrives at a rung; which runs
            go on then depends on their order of arrival.
    """

    first: int
    factor: int = 2
    asynchronous: bool = False

    def __post_init__(self) -> None:
        """Refuse what halves nothing."""
        if self.first < 1 or self.factor < 2:
            raise LabError(
                f"Halving from step {self.first} on by a factor of "
                f"{self.factor} is not possible: the first rung is at step 1 "
                "or later, and of so many runs one goes on, so the factor is "
                "2 or more. Type for example Halving(first=8, factor=2)."
            )

    def rungs(self, steps: int) -> list[int]:
        """The steps at which a run of so many steps is compared.

        Example:
            >>> Halving(first=8, factor=2).rungs(32)
            [8, 16]
        """
        found, rung = [], self.first
        while rung < steps:
            found.append(rung)
            rung *= self.factor
        return found

    def next_rung(self, run: RunState) -> int | None:
        """The first rung of a run that is not decided; None if none is."""
        if run.is_exempt:
            return None
        decided = {rung.step for rung in read_rungs(run.directory)}
        rungs = self.rungs(run.steps)
        return next((step for step in rungs if step not in decided), None)

    def decide(self, runs: Sequence[RunState]) -> list[tuple[RunState, int]]:
        """Compare the runs at the rungs that they have reached.

        Returns:
            See `Scheduler.decide`; those at the lowest rung come first.
        """
        for run in runs:
            # A kill may have come between the decision and its result.
            _end_if_stopped(run)
        decide = self._arrivals if self.asynchronous else self._whole_rung
        while decide(runs):
            pass
        ahead = [
            (run, self.next_rung(run) or run.steps)
            for run in runs
            if run.is_open
        ]
        training = [
            (run, step)
            for run, step in ahead
            if step == run.steps or not run.has_reached(step)
        ]
        return sorted(training, key=lambda one: one[1])

    def _whole_rung(self, runs: Sequence[RunState]) -> bool:
        """Decide the lowest rung, if all that go on have reached it.

        Those about which a start before has decided already are compared too,
        so that a kill in between changes nothing.
        """
        ahead = {r: self.next_rung(r) for r in runs if r.is_open}
        rung = min(filter(None, ahead.values()), default=None)
        there = [run for run, step in ahead.items() if step == rung]
        if rung is None or not all(run.has_reached(rung) for run in there):
            return False
        came = [r for r in runs if not r.is_exempt and r.has_reached(rung)]
        answers = [a for run in came if (a := run.at_rung(rung))]
        for run, one in zip(
            came, compare(rung, answers, self.factor), strict=True
        ):
            if run in there:
                _note(run, one)
        return True

    def _arrivals(self, runs: Sequence[RunState]) -> bool:
        """Decide about the first run that waits at a rung, if one does."""
        for run in runs:
            rung = self.next_rung(run) if run.is_open else None
            if rung is None or not run.has_reached(rung):
                continue
            before = [
                one.accuracy
                for other in runs
                for one in read_rungs(other.directory)
                if one.step == rung
            ]
            found = run.at_rung(rung)
            assert found
            _note(run, on_arrival(rung, found.accuracy, before, self.factor))
            return True
        return False

    def refuse_useless(self, steps: Sequence[int]) -> None:
        """Refuse a first rung that no run reaches before it is over.

        Raises:
            LabError: says which rung would be of use.
        """
        if not self.rungs(max(steps)):
            raise LabError(
                f"The first rung is at step {self.first}, but no run has "
                f"more than {max(steps)} steps, so nothing would ever be "
                f"stopped. Type for example first={max(1, max(steps) // 4)}."
            )


def note_halving(output_dir: Path, halving: Halving | None) -> None:
    """Note how the runs of a grid are halved, for its next start."""
    if halving:
        write_json(output_dir / "grid.halving.json", vars(halving))


def refuse_other_halving(output_dir: Path, halving: Halving | None) -> None:
    """Refuse to compare runs at rungs where they were not compared before.

    Raises:
        LabError: a run has begun, and the grid was halved otherwise.
    """
    if not any((output_dir / "runs").glob("*/metrics.csv")):
        return
    found = read_json(output_dir / "grid.halving.json")
    before = Halving(**found) if found else None
    if before != halving:
        raise LabError(
            f"{output_dir} was begun with halving={before}, and now it is "
            f"{halving}: some of its runs are past the rungs of the other. "
            "Set it back to go on, or choose another OUTPUT_DIR."
        )


@dataclass(frozen=True)
class Rung:
    """What a run had reached at a rung, and what became of it.

    Attributes:
        step: the optimiser step.
        accuracy: share of the held-out questions answered right.
        decision: `PROMOTED` or `STOPPED`.
        cutoff: the accuracy that was needed; None for the first to arrive.
        compared: runs that had been compared there then, this one included.
    """

    step: int
    accuracy: float
    decision: str
    cutoff: float | None
    compared: int

    def reason(self, steps: int) -> str:
        """Why a run was stopped, in a sentence."""
        assert self.cutoff is not None  # the first to arrive goes on
        more = "" if self.accuracy < self.cutoff else " and better form"
        return (
            f"stopped by halving after step {self.step} of {steps}: "
            f"{self.accuracy:.1%} of the held-out questions right, where "
            f"{self.cutoff:.1%}{more} were needed among {self.compared} runs"
        )


def rung_path(directory: Path, step: int) -> Path:
    """The answers of a run at a rung, see `Evaluation.load`."""
    return Path(directory) / "rungs" / f"{step}.json"


def read_rungs(directory: Path) -> list[Rung]:
    """The decisions about a run so far, the first one first."""
    found = read_json(Path(directory) / "rungs.json") or []
    return [Rung(**one) for one in found]


def note_rung(directory: Path, rung: Rung) -> None:
    """Write a decision about a run."""
    others = [r for r in read_rungs(directory) if r.step < rung.step]
    write_json(
        Path(directory) / "rungs.json", [vars(r) for r in (*others, rung)]
    )


def _note(run: RunState, rung: Rung) -> None:
    note_rung(run.directory, rung)
    _end_if_stopped(run)


def _end_if_stopped(run: RunState) -> None:
    """Note the end of a run about which its last rung has decided so."""
    last = read_rungs(run.directory)[-1:]
    stopped = last and last[0].decision == STOPPED and not run.is_exempt
    if stopped and run.is_open:
        run.end("stopped", last[0].reason(run.steps))


def compare(step: int, found: Sequence[Evaluation], factor: int) -> list[Rung]:
    """Which of the runs that have reached a rung go on.

    One of `factor` does, rounded up, so that the last one is never stopped.
    Between equals, see `Evaluation.rank`, the earlier one is better.

    Args:
        step: the rung.
        found: what each run has reached there.
        factor: see `Halving`.
    """
    kept = math.ceil(len(found) / factor)
    order = sorted(range(len(found)), key=lambda at: (found[at].rank, -at))
    going_on = set(order[-kept:])
    cutoff = found[order[-kept]].accuracy
    return [
        Rung(
            step,
            one.accuracy,
            PROMOTED if at in going_on else STOPPED,
            cutoff,
            len(found),
        )
        for at, one in enumerate(found)
    ]


def on_arrival(
    step: int, accuracy: float, before: Sequence[float], factor: int
) -> Rung:
    """Whether a run goes on that has reached a rung after some others.

    It does if it is as good as the best of `factor` parts of those; the first
    one always does.

    Args:
        step: the rung.
        accuracy: what the run has reached there.
        before: what those before it had reached.
        factor: see `Halving`.
    """
    cutoff = float(np.quantile(before, 1 - 1 / factor)) if before else None
    goes_on = cutoff is None or accuracy >= cutoff
    decision = PROMOTED if goes_on else STOPPED
    return Rung(step, accuracy, decision, cutoff, len(before) + 1)
