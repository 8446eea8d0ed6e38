"""What a grid takes on many workers, simulated: hours, cost, idle workers.

Nothing is trained; a plan is as good as the seconds that it is made from. All
workers are paid from the booking of their machines until the last run is
over. With halving, a run that reaches a rung goes on if its score is among
the best `1 / factor` of those that came there before it (Li et al., 2018,
arXiv:1810.05934); a score is the run's quality and half as much noise.
"""

import heapq
import math
from collections.abc import Iterator

import numpy as np

from grpo_lab.errors import LabError
from grpo_lab.grid.halving import Halving

NOISE = 0.5  # standard deviation in a score; that of the qualities is 1


def simulate(
    runs: int,
    workers: int,
    *,
    steps: int,
    halving: Halving | None = None,
    price_per_worker_hour: float = 0.0,
    machine_start_seconds: float = 0.0,
    seed: int = 0,
    **seconds: float,
) -> dict[str, object]:
    """Simulate a grid, event by event.

    Args:
        runs: how many it has.
        workers: how many are trained at a time.
        steps: optimiser steps of a run.
        price_per_worker_hour: in US dollars; 0 for machines of one's own.
        machine_start_seconds: from booking until the workers can start.
        seed: of chance; a run has the same luck on any number of workers.
        **seconds: `step_seconds` and what else `_parts` takes.

    Returns:
        hours until the last run is over; worker hours with a run; cost in
        USD; share of the steps of all runs; busy share of the paid hours.

    Raises:
        LabError: there is nothing to do, or nobody to do it.
    """
    if min(runs, workers, steps, seconds["step_seconds"]) <= 0:
        raise LabError(
            "A plan needs runs, workers, steps and the seconds of a step, "
            "each above 0. Measure a step with one short run."
        )
    rungs = halving.rungs(steps) if halving else []
    stops = [*rungs, steps]
    waiting = (_parts(stops, seed, n, **seconds) for n in range(runs))
    scores: dict[int, list[float]] = {rung: [] for rung in rungs}
    now, busy, lost, made = machine_start_seconds, 0.0, 0, 0
    events: list[tuple] = []

    def go_on(worker: int, run: Iterator[tuple] | None) -> None:
        if run:
            part = next(run)
            heapq.heappush(events, (now + part[0], worker, part, run))

    for worker in range(workers):
        go_on(worker, next(waiting, None))
    while events:
        now, worker, (passed, part_steps, stop, score, gone), run = (
            heapq.heappop(events)
        )
        busy, made, lost = busy + passed, made + part_steps, lost + gone
        over = stop == steps or not (
            halving and _is_good(score, scores[stop], halving)
        )
        go_on(worker, next(waiting, None) if over else run)
    return {
        "runs": runs,
        "workers": workers,
        "halving": "yes" if halving else "no",
        "hours": now / 3600,
        "worker hours": busy / 3600,
        "cost in USD": now / 3600 * workers * price_per_worker_hour,
        "share of all steps": made / (runs * steps),
        "busy": busy / (now * workers),
        "lost workers": lost,
    }


def _parts(
    stops: list[int],
    seed: int,
    number: int,
    *,
    step_seconds: float,
    step_spread: float = 0.2,
    start_seconds: float = 0.0,
    evaluation_seconds: float = 0.0,
    lost_per_worker_hour: float = 0.0,
) -> Iterator[tuple[float, int, int, float, int]]:
    """A run from stop to stop: seconds, steps, stop, score, losses.

    Args:
        step_seconds: of a step, the mean over the runs.
        step_spread: relative standard deviation of that between runs.
        start_seconds: of a worker with a run, imports and base model.
        evaluation_seconds: of one evaluation, at each stop.
        lost_per_worker_hour: of a busy worker. Each loss costs a start and
            half a step, for each step is saved.
    """
    chance = np.random.default_rng([seed, number])
    # Of its own, for how often it is drawn from depends on the rungs.
    fate = np.random.default_rng([seed, number, 1])
    variance = math.log1p(step_spread**2)
    pace = math.exp(math.sqrt(variance) * chance.normal() - variance / 2)
    quality, before = chance.normal(), 0
    rate, again = lost_per_worker_hour / 3600, start_seconds + step_seconds / 2
    if rate * again >= 1:
        raise LabError(
            f"With {lost_per_worker_hour:g} losses an hour, each of {again:g} "
            "seconds, no run would ever be over. Lower lost_per_worker_hour."
        )
    for stop in stops:
        seconds = (stop - before) * step_seconds * pace + evaluation_seconds
        seconds += 0 if before else start_seconds
        left, lost = seconds, 0
        while rate and (passed := fate.exponential(1 / rate)) < left:
            left, lost = left + again - passed, lost + 1
        score = quality + NOISE * chance.normal()
        yield seconds + lost * again, stop - before, stop, score, lost
        before = stop


def _is_good(score: float, before: list[float], halving: Halving) -> bool:
    """Whether a run is among the best of those that came to a rung."""
    share = 100 * (1 - 1 / halving.factor)
    good = not before or score >= np.nanpercentile(before, share)
    before.append(score)
    return bool(good)
