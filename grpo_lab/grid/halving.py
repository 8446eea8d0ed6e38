"""Successive halving: most of the budget for the runs that deserve it.

At each *rung*, a number of optimiser steps, the runs are compared by their
held-out accuracy; the best part goes on, the rest is stopped where it is.
Source: Jamieson and Talwalkar, 2016, arXiv:1502.07943. In one process all runs
reach a rung before anything is decided (`decide`); on Ray each is decided when
it arrives, by what has arrived before (Li et al., 2018, arXiv:1810.05934), see
`grpo_lab.grid.on_ray`.

Every decision is written to `rungs.json` of its run, so that a grid that was
killed goes on with the same ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import read_json, write_json

PROMOTED, STOPPED = "promoted", "stopped"


@dataclass(frozen=True)
class Halving:
    """When runs are compared, and how many go on.

    Attributes:
        first: optimiser steps of the first rung.
        factor: one of so many runs goes on; the next rung lies at so many
            times the steps.
    """

    first: int
    factor: int = 2

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


def next_rung(
    directory: Path, halving: Halving | None, steps: int
) -> int | None:
    """The first rung of a run that is not decided; None if there is none."""
    decided = {rung.step for rung in read_rungs(directory)}
    rungs = halving.rungs(steps) if halving else []
    return next((step for step in rungs if step not in decided), None)


def decide(step: int, found: Sequence[Evaluation], factor: int) -> list[Rung]:
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
