"""Plans against cases that can be worked out by hand."""

import math

import numpy as np
import pytest

from grpo_lab.errors import LabError
from grpo_lab.grid import Halving, simulation
from grpo_lab.grid.simulation import simulate

PLAIN = {
    "steps": 100,
    "step_seconds": 3.6,
    "step_spread": 0,
    "evaluation_seconds": 20,
    "start_seconds": 40,
    "price_per_worker_hour": 2,
}
"""A run of 100 steps takes 360 + 20 + 40 = 420 seconds."""

LONG = {"steps": 8000, "step_seconds": 3.6, "step_spread": 0}


def parts(number, stops=(100,), seed=0, **seconds):
    return list(simulation._parts([*stops], seed, number, **seconds))


@pytest.mark.parametrize(
    ("runs", "workers", "rounds"),
    [(1, 1, 1), (8, 2, 4), (8, 1, 8), (8, 8, 1), (7, 2, 4), (3, 64, 1)],
)
@pytest.mark.parametrize("booking", [0, 420])
def test_equal_runs_take_whole_rounds(runs, workers, rounds, booking):
    plan = simulate(runs, workers, machine_start_seconds=booking, **PLAIN)
    hours = (rounds * 420 + booking) / 3600
    assert plan["hours"] == pytest.approx(hours)
    assert plan["worker hours"] == pytest.approx(runs * 420 / 3600)
    assert plan["cost in USD"] == pytest.approx(2 * workers * hours)
    assert plan["busy"] == pytest.approx(runs * 420 / 3600 / workers / hours)
    assert plan["share of all steps"] == 1
    assert (plan["runs"], plan["workers"], plan["halving"]) == (
        runs, workers, "no",
    )  # fmt: skip


def test_the_next_run_goes_to_the_worker_that_is_first_free():
    """Four runs of different speed, followed by hand."""
    spread = {"step_seconds": 3.6, "step_spread": 0.5}
    seconds = [parts(n, seed=3, **spread)[0][0] for n in range(4)]
    assert len(set(seconds)) == 4
    free = [0.0, 0.0]
    for one in seconds:
        free.sort()
        free[0] += one
    plan = simulate(4, 2, steps=100, seed=3, **spread)
    assert plan["hours"] == pytest.approx(max(free) / 3600)
    assert plan["worker hours"] == pytest.approx(sum(seconds) / 3600)


def test_speeds_have_the_mean_and_the_spread_that_were_asked_for():
    paces = [
        parts(n, step_seconds=3.6, step_spread=0.3)[0][0] / 360
        for n in range(2000)
    ]
    assert min(paces) > 0
    assert np.mean(paces) == pytest.approx(1, abs=0.03)
    assert np.std(paces) == pytest.approx(0.3, abs=0.03)


def test_lost_workers_are_as_many_and_cost_as_much_as_was_asked_for():
    plan = simulate(4000, 4, lost_per_worker_hour=3, **PLAIN)
    expected = 3 * plan["worker hours"]
    assert abs(plan["lost workers"] - expected) < 4 * math.sqrt(expected)
    more = plan["worker hours"] - 4000 * 420 / 3600
    assert more == pytest.approx(plan["lost workers"] * (40 + 1.8) / 3600)
    assert plan["share of all steps"] == 1


# --- Halving -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "share"),
    [
        # 1000, and of the next 1000, 2000 and 4000 one in 2, in 4, in 8
        (2, (1000 + 1000 / 2 + 2000 / 4 + 4000 / 8) / 8000),
        (4, (1000 + 3000 / 4 + 4000 / 16) / 8000),
    ],
)
def test_halving_of_many_runs_leaves_the_share_that_theory_says(factor, share):
    plan = simulate(3000, 8, halving=Halving(1000, factor), **LONG)
    found = plan["share of all steps"]
    assert found == pytest.approx(share, rel=0.05)
    assert plan["worker hours"] == pytest.approx(found * 3000 * 8)


def test_a_run_alone_goes_on_and_is_evaluated_at_every_rung():
    plan = simulate(1, 1, halving=Halving(25), **PLAIN)
    assert plan["share of all steps"] == 1
    assert plan["hours"] == pytest.approx((420 + 2 * 20) / 3600)


def test_who_goes_on():
    before, halving = [], Halving(1)
    scores = (5, 4, 6, 1, 4.5, 9)
    assert [simulation._is_good(s, before, halving) for s in scores] == [
        True,  # the first
        False,  # below 5
        True,  # above 4.5
        False,  # below 5
        True,  # not below 4.5
        True,
    ]
    assert before == list(scores)


def test_a_score_is_a_quality_with_noise():
    """Scores of one run agree as much as half of noise leaves them to."""
    found = [parts(n, (1, 2), step_seconds=1) for n in range(2000)]
    first, second = ([one[at][3] for one in found] for at in (0, 1))
    assert np.std(first) == pytest.approx(math.sqrt(1.25), rel=0.05)
    agree = np.corrcoef(first, second)[0, 1]
    assert agree == pytest.approx(1 / 1.25, abs=0.03)


def test_halving_frees_workers_for_the_next_runs():
    full, halved = (
        simulate(64, 8, halving=one, **{**LONG, "step_spread": 0.2})
        for one in (None, Halving(1000))
    )
    assert halved["hours"] < 0.6 * full["hours"]


# --- What is always so -------------------------------------------------------


@pytest.mark.parametrize("halving", [None, Halving(10), Halving(30, 3)])
@pytest.mark.parametrize("runs", [1, 5, 40])
@pytest.mark.parametrize("workers", [1, 4, 64])
def test_what_is_so_for_any_grid(runs, workers, halving):
    rough = {**PLAIN, "step_spread": 0.4, "lost_per_worker_hour": 2}
    rough |= {"machine_start_seconds": 100, "halving": halving}
    plan = simulate(runs, workers, seed=5, **rough)
    assert plan == simulate(runs, workers, seed=5, **rough)
    assert plan != simulate(runs, workers, seed=6, **rough)
    busy = plan["worker hours"] / (plan["hours"] - 100 / 3600)
    assert busy <= min(runs, workers) + 1e-9
    assert 0 < plan["busy"] <= 1
    assert 0 < plan["share of all steps"] <= 1
    paid = plan["worker hours"] / plan["busy"]
    assert plan["cost in USD"] == pytest.approx(2 * paid)
    if halving is None:
        alone = simulate(runs, 1, seed=5, **rough)
        assert plan["worker hours"] == pytest.approx(alone["worker hours"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"runs": 0}, "each above 0"),
        ({"workers": 0}, "each above 0"),
        ({"steps": 0}, "each above 0"),
        ({"step_seconds": 0}, "Measure"),
        ({"lost_per_worker_hour": 90}, "90 losses an hour.*41.8 seconds"),
    ],
)
def test_a_plan_of_nothing_is_refused(changed, words):
    with pytest.raises(LabError, match=words):
        simulate(**{"runs": 1, "workers": 1, **PLAIN, **changed})
