"""What a grid takes on many workers, simulated: hours, cost, idle workers.

Nothing is trained. A plan is as good as the numbers that it is made from:
measure a step and an evaluation of one run first.

All machines are booked at once and paid, whole, from then until the last run
is over. A worker takes the next run as soon as it has none: it starts with
loading the base model, makes the steps, and evaluates the policy at the end
and, if there is halving, at each rung before.

Halving is asynchronous (Li et al., 2020, arXiv:1810.05934), in the form that
ends a run instead of letting it wait: one that comes to a rung goes on if its
score is as good as those of the best share that came there before it.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from grpo_lab.errors import LabError

NOISE = 0.5
"""Standard deviation of what chance adds to a score at a rung.

That of the runs' true qualities is 1.
"""

HOUR = 3600


@dataclass(frozen=True)
class Assumptions:
    """What a plan is made from.

    Attributes:
        steps: optimiser steps of a run.
        step_seconds: what a step takes, on average over the runs.
        step_spread: standard deviation of that between runs, relative to it;
            a run's steps all take the same. Log-normal, so that no run is
            ever faster than nothing and a few take very long.
        evaluation_seconds: what one evaluation takes.
        start_seconds: a worker process's start with a run: imports, and
            loading the base model.
        price_per_worker_hour: in any currency; 0 for machines of one's own.
        lost_per_worker_hour: how often a busy worker is lost. Its run goes
            on from its last checkpoint, after `start_seconds`; half a step
            is made again.
        machine_start_seconds: from booking a machine until its workers can
            start.
        workers_per_machine: a machine is booked, and paid, whole.

    Raises:
        LabError: a number is none that such a thing can have, or workers are
            lost faster than they start again.
    """

    steps: int
    step_seconds: float
    step_spread: float = 0.2
    evaluation_seconds: float = 0
    start_seconds: float = 0
    price_per_worker_hour: float = 0
    lost_per_worker_hour: float = 0
    machine_start_seconds: float = 0
    workers_per_machine: int = 1

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type is int:
                _refuse_count(one.name, value)
            else:
                _refuse_amount(one.name, value)
        if not self.step_seconds:
            raise LabError(
                "step_seconds is 0, and a plan needs what a step takes. "
                "Measure it with one short run."
            )
        if self.lost_per_second * self.lost_seconds >= 1:
            raise LabError(
                f"With {self.lost_per_worker_hour:g} losses an hour, each of "
                f"{self.lost_seconds:g} seconds, no run would ever be over. "
                "Lower lost_per_worker_hour or start_seconds."
            )

    @property
    def lost_per_second(self) -> float:
        """Losses per second of a busy worker."""
        return self.lost_per_worker_hour / HOUR

    @property
    def lost_seconds(self) -> float:
        """What the loss of a worker adds to its run."""
        return self.start_seconds + self.step_seconds / 2


@dataclass(frozen=True)
class Plan:
    """What a grid takes.

    Attributes:
        hours: from booking the machines until the last run is over.
        worker_hours: of these, summed over workers, with a run.
        cost: in the currency of the assumptions.
        steps_made: optimiser steps of all runs, each counted once.
        share_of_full_grid: these against all steps of all runs.
        utilisation: share of the paid hours with a run.
        lost_workers: how many were lost.
        machines: how many are booked.
    """

    hours: float
    worker_hours: float
    cost: float
    steps_made: int
    share_of_full_grid: float
    utilisation: float
    lost_workers: int
    machines: int


def simulate(
    runs: int,
    workers: int,
    assumptions: Assumptions,
    halving: tuple[int, int] | None = None,
    seed: int = 0,
) -> Plan:
    """Simulate a grid.

    Args:
        runs: how many it has.
        workers: how many runs can be trained at a time.
        assumptions: what each thing takes.
        halving: the first rung's step and the factor: a rung is at first,
            first * factor, first * factor**2 and so on, and of the runs that
            reach one, one in `factor` goes on. None to finish every run.
        seed: of chance. A run has the same speed, qualities and luck for
            any number of workers, with and without halving.

    Raises:
        LabError: there is nothing to do or nobody to do it, or a rung is not
            before the end.
    """
    _refuse_count("runs", runs)
    _refuse_count("workers", workers)
    rungs, factor = _rungs(assumptions.steps, halving)
    simulated = [_Run(one, assumptions, seed) for one in range(runs)]
    ends = _last_end(simulated, workers, assumptions, rungs, factor)
    machines = math.ceil(workers / assumptions.workers_per_machine)
    paid = ends / HOUR * machines * assumptions.workers_per_machine
    busy = sum(run.seconds for run in simulated) / HOUR
    steps = sum(run.steps for run in simulated)
    return Plan(
        hours=ends / HOUR,
        worker_hours=busy,
        cost=paid * assumptions.price_per_worker_hour,
        steps_made=steps,
        share_of_full_grid=steps / (runs * assumptions.steps),
        utilisation=busy / paid,
        lost_workers=sum(run.losses for run in simulated),
        machines=machines,
    )


def table(
    runs: Sequence[int],
    workers: Sequence[int],
    assumptions: Assumptions,
    halving: tuple[int, int] | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Plans side by side, ready to be shown.

    Args:
        runs, workers: every pair of these has a row; with `halving`, two.
        assumptions, halving, seed: as for `simulate`.

    Raises:
        LabError: as for `simulate`.
    """
    kinds = (None,) if halving is None else (None, halving)
    return pd.DataFrame(
        [
            _row(one, some, kind, simulate(one, some, assumptions, kind, seed))
            for one in runs
            for some in workers
            for kind in kinds
        ],
        columns=[
            "runs", "workers", "halving", "hours", "worker hours", "cost",
            "share of all steps", "busy",
        ],
    )  # fmt: skip


def _row(runs: int, workers: int, halving: tuple | None, plan: Plan) -> tuple:
    return (
        runs,
        workers,
        "yes" if halving else "no",
        plan.hours,
        plan.worker_hours,
        plan.cost,
        plan.share_of_full_grid,
        plan.utilisation,
    )


class _Run:
    """A run with its luck, which nothing else that is simulated changes."""

    def __init__(
        self, number: int, assumptions: Assumptions, seed: int
    ) -> None:
        self.assumptions = assumptions
        self.chance = np.random.default_rng([seed, number])
        # Of its own, for how often it is drawn from depends on the rungs.
        self.fate = np.random.default_rng([seed, number, 1])
        self.step_seconds = assumptions.step_seconds * self._pace()
        self.quality = self.chance.normal()
        self.steps, self.seconds, self.losses = 0, 0.0, 0

    def _pace(self) -> float:
        """Log-normal around a mean of 1."""
        variance = math.log1p(self.assumptions.step_spread**2)
        return math.exp(
            math.sqrt(variance) * self.chance.normal() - variance / 2
        )

    def go_on(self, step: int) -> float:
        """Train up to a step and evaluate; the seconds that it takes."""
        work = (step - self.steps) * self.step_seconds
        work += self.assumptions.evaluation_seconds
        if not self.steps:
            work += self.assumptions.start_seconds
        self.steps = step
        seconds = work + self._lost(work)
        self.seconds += seconds
        return seconds

    def _lost(self, work: float) -> float:
        """Seconds that lost workers add to some of work."""
        rate, left, added = self.assumptions.lost_per_second, work, 0.0
        while rate and (passed := self.fate.exponential(1 / rate)) < left:
            left += self.assumptions.lost_seconds - passed
            added += self.assumptions.lost_seconds
            self.losses += 1
        return added

    def score(self) -> float:
        """What an evaluation finds."""
        return self.quality + NOISE * self.chance.normal()


def _last_end(
    runs: Sequence[_Run],
    workers: int,
    assumptions: Assumptions,
    rungs: Sequence[int],
    factor: int,
) -> float:
    """When the last run is over, in seconds after booking."""
    waiting = iter(runs)
    scores: dict[int, list[float]] = {rung: [] for rung in rungs}
    now = assumptions.machine_start_seconds
    # Times when a worker has come to a rung or an end; the second number
    # decides who is first of those at one time.
    events: list[tuple[float, int, _Run]] = []

    def go_on(worker: int, run: _Run | None) -> None:
        if run is not None:
            stop = next((r for r in rungs if r > run.steps), assumptions.steps)
            heapq.heappush(events, (now + run.go_on(stop), worker, run))

    for worker in range(workers):
        go_on(worker, next(waiting, None))
    while events:
        now, worker, run = heapq.heappop(events)
        before = scores.get(run.steps)
        over = before is None or not _goes_on(run.score(), before, factor)
        go_on(worker, next(waiting, None) if over else run)
    return now


def _goes_on(score: float, before: list[float], factor: int) -> bool:
    """Whether a run is among the best of those that came to a rung."""
    share = 100 * (1 - 1 / factor)
    best = not before or score >= np.nanpercentile(before, share)
    before.append(score)
    return bool(best)


def _rungs(
    steps: int, halving: tuple[int, int] | None
) -> tuple[list[int], int]:
    """The steps at which runs are compared, and the factor."""
    if halving is None:
        return [], 0
    try:
        first, factor = halving
    except (TypeError, ValueError):
        raise LabError(
            f"halving is {halving!r}, and must be two numbers: the first "
            "rung's step and the factor. Type, for example, (4, 2)."
        ) from None
    _refuse_count("the first step of halving", first)
    _refuse_count("the factor of halving", factor)
    if factor < 2:
        raise LabError(
            "The factor of halving is 1, so every run would go on. Type 2 "
            "to let one in two go on, or halving=None to finish all."
        )
    if first >= steps:
        raise LabError(
            f"Halving begins at step {first}, and a run has {steps} steps, "
            "so every run would be finished. Begin it earlier, or type "
            "halving=None."
        )
    return list(_powers(first, factor, steps)), factor


def _powers(first: int, factor: int, end: int) -> Iterator[int]:
    while first < end:
        yield first
        first *= factor


def _refuse_count(name: str, value: object) -> None:
    whole = isinstance(value, int | np.integer)
    if not whole or isinstance(value, bool) or value < 1:
        raise LabError(
            f"{name} is {value!r}, and must be a whole number of at least 1."
            " Type one, such as 8."
        )


def _refuse_amount(name: str, value: object) -> None:
    number = isinstance(value, int | float | np.number)
    if not number or not 0 <= value < math.inf:
        raise LabError(
            f"{name} is {value!r}, and must be a number of at least 0. Type "
            "one, in the unit that its name says."
        )
