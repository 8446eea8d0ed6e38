"""Plans against cases that can be worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from grpo_lab.errors import LabError
from grpo_lab.grid import simulation
from grpo_lab.grid.simulation import Assumptions, simulate, table

PLAIN = Assumptions(
    steps=100,
    step_seconds=3.6,
    step_spread=0,
    evaluation_seconds=20,
    start_seconds=40,
    price_per_worker_hour=2,
)
"""A run of 100 steps takes 360 + 20 + 40 = 420 seconds."""

LONG = replace(PLAIN, steps=8000, evaluation_seconds=0, start_seconds=0)


# --- Without halving ---------------------------------------------------------


def test_one_run_on_one_worker_is_what_its_parts_are():
    plan = simulate(1, 1, PLAIN)
    assert plan.hours == pytest.approx(420 / 3600)
    assert plan.worker_hours == pytest.approx(plan.hours)
    assert plan.cost == pytest.approx(2 * plan.hours)
    assert (plan.steps_made, plan.share_of_full_grid) == (100, 1)
    assert plan.utilisation == pytest.approx(1)
    assert (plan.lost_workers, plan.machines) == (0, 1)


@pytest.mark.parametrize(
    ("runs", "workers", "rounds"),
    [(8, 2, 4), (8, 1, 8), (8, 8, 1), (7, 2, 4), (9, 8, 2), (3, 64, 1)],
)
def test_equal_runs_take_whole_rounds(runs, workers, rounds):
    plan = simulate(runs, workers, PLAIN)
    assert plan.hours == pytest.approx(rounds * 420 / 3600)
    assert plan.worker_hours == pytest.approx(runs * 420 / 3600)
    assert plan.cost == pytest.approx(2 * workers * plan.hours)
    assert plan.utilisation == pytest.approx(runs / (workers * rounds))


def test_a_machine_s_start_is_paid_and_nobody_is_busy():
    slow = replace(PLAIN, machine_start_seconds=420)
    plan = simulate(8, 8, slow)
    assert plan.hours == pytest.approx(840 / 3600)
    assert plan.cost == pytest.approx(2 * 8 * 840 / 3600)
    assert plan.worker_hours == pytest.approx(8 * 420 / 3600)
    assert plan.utilisation == pytest.approx(0.5)


def test_machines_are_booked_whole():
    eight = replace(PLAIN, workers_per_machine=8)
    assert [
        simulate(16, workers, eight).machines for workers in (1, 8, 9, 16)
    ] == [1, 1, 2, 2]
    plan = simulate(12, 12, eight)
    assert plan.cost == pytest.approx(2 * 16 * 420 / 3600)
    assert plan.utilisation == pytest.approx(12 / 16)


def test_the_next_run_goes_to_the_worker_that_is_first_free():
    """Four runs of different speed, followed by hand."""
    spread = replace(PLAIN, step_spread=0.5)
    seconds = [
        simulation._Run(number, spread, 3).go_on(spread.steps)
        for number in range(4)
    ]
    assert len(set(seconds)) == 4
    free = [0.0, 0.0]
    for one in seconds:
        free.sort()
        free[0] += one
    plan = simulate(4, 2, spread, seed=3)
    assert plan.hours == pytest.approx(max(free) / 3600)
    assert plan.worker_hours == pytest.approx(sum(seconds) / 3600)


def test_speeds_have_the_mean_and_the_spread_that_were_asked_for():
    spread = replace(PLAIN, step_spread=0.3)
    paces = [
        simulation._Run(number, spread, 0).step_seconds / 3.6
        for number in range(2000)
    ]
    assert min(paces) > 0
    assert np.mean(paces) == pytest.approx(1, abs=0.03)
    assert np.std(paces) == pytest.approx(0.3, abs=0.03)


# --- Lost workers ------------------------------------------------------------


def test_a_lost_worker_costs_its_start_and_half_a_step():
    risky = replace(PLAIN, lost_per_worker_hour=3)
    plan = simulate(400, 4, risky)
    lost = plan.worker_hours - 400 * 420 / 3600
    assert lost == pytest.approx(plan.lost_workers * (40 + 1.8) / 3600)
    assert plan.steps_made == 400 * 100


def test_workers_are_lost_as_often_as_was_asked_for():
    plan = simulate(4000, 4, replace(PLAIN, lost_per_worker_hour=3))
    expected = 3 * plan.worker_hours
    assert abs(plan.lost_workers - expected) < 4 * math.sqrt(expected)


# --- Halving -----------------------------------------------------------------


def test_the_rungs_are_powers_below_the_end():
    assert simulation._rungs(100, (10, 3)) == ([10, 30, 90], 3)
    assert simulation._rungs(90, (10, 3))[0] == [10, 30]
    assert simulation._rungs(100, None)[0] == []


@pytest.mark.parametrize(
    ("factor", "share"),
    [
        # 1000, and of the next 1000, 2000 and 4000 one in 2, in 4, in 8
        (2, (1000 + 1000 / 2 + 2000 / 4 + 4000 / 8) / 8000),
        (4, (1000 + 3000 / 4 + 4000 / 16) / 8000),
    ],
)
def test_halving_of_many_runs_leaves_the_share_that_theory_says(factor, share):
    plan = simulate(3000, 8, LONG, (1000, factor))
    assert plan.share_of_full_grid == pytest.approx(share, rel=0.05)
    assert plan.worker_hours == pytest.approx(plan.steps_made * 3.6 / 3600)


def test_a_run_alone_goes_on_and_pays_for_every_rung():
    plan = simulate(1, 1, PLAIN, (25, 2))
    assert plan.steps_made == 100
    assert plan.hours == pytest.approx((420 + 2 * 20) / 3600)


@pytest.mark.parametrize(
    ("second", "steps", "evaluations"),
    [(0.5, 150, 3), (1.0, 200, 4), (2.0, 200, 4)],
)
def test_two_runs_followed_by_hand(monkeypatch, second, steps, evaluations):
    """The first goes on; the second only if it is as good."""
    scores = iter([1.0, second])
    monkeypatch.setattr(simulation._Run, "score", lambda run: next(scores))
    plan = simulate(2, 1, PLAIN, (50, 2))
    assert plan.steps_made == steps
    seconds = 2 * 40 + steps * 3.6 + evaluations * 20
    assert plan.hours == pytest.approx(seconds / 3600)


def test_who_goes_on():
    before = []
    scores = (5, 4, 6, 1, 4.5, 9)
    assert [simulation._goes_on(s, before, 2) for s in scores] == [
        True,  # the first
        False,  # below 5
        True,  # above 4.5
        False,  # below 5
        True,  # not below 4.5
        True,
    ]
    assert before == list(scores)
    assert simulation._goes_on(1, [math.nan, 0], 2)


def test_better_runs_go_further():
    made = []
    init = simulation._Run.__init__

    class Noted(simulation._Run):
        def __init__(self, *args):
            init(self, *args)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "_Run", Noted)
        simulate(400, 8, LONG, (1000, 2))
    finished = [run.quality for run in made if run.steps == LONG.steps]
    stopped = [run.quality for run in made if run.steps == 1000]
    assert np.mean(finished) > np.mean(stopped) + 1


def test_halving_frees_workers_for_the_next_runs():
    spread = replace(LONG, step_spread=0.2)
    full, halved = (simulate(64, 8, spread, h) for h in (None, (1000, 2)))
    assert halved.hours < 0.6 * full.hours
    assert halved.cost < 0.6 * full.cost


# --- What is always so -------------------------------------------------------


@pytest.mark.parametrize("halving", [None, (10, 2), (30, 3)])
@pytest.mark.parametrize("runs", [1, 5, 40])
@pytest.mark.parametrize("workers", [1, 4, 8, 64])
def test_what_is_so_for_any_grid(runs, workers, halving):
    rough = replace(
        PLAIN,
        step_spread=0.4,
        lost_per_worker_hour=2,
        machine_start_seconds=100,
        workers_per_machine=4,
    )
    plan = simulate(runs, workers, rough, halving, seed=5)
    assert plan == simulate(runs, workers, rough, halving, seed=5)
    assert plan != simulate(runs, workers, rough, halving, seed=6)
    busy = plan.worker_hours / (plan.hours - 100 / 3600)
    assert busy <= min(runs, workers) + 1e-9
    assert 0 < plan.utilisation <= 1
    assert 0 < plan.share_of_full_grid <= 1
    paid = plan.worker_hours / plan.utilisation
    assert plan.cost == pytest.approx(2 * paid)
    if halving is None:
        assert plan.share_of_full_grid == 1
        alone = simulate(runs, 1, rough, seed=5)
        assert plan.worker_hours == pytest.approx(alone.worker_hours)


# --- The table ---------------------------------------------------------------


def test_a_table_has_a_row_for_each_plan():
    shown = table([8, 16], [1, 4], PLAIN, (25, 2), seed=1)
    assert list(shown.columns) == [
        "runs", "workers", "halving", "hours", "worker hours", "cost",
        "share of all steps", "busy",
    ]  # fmt: skip
    key = shown[["runs", "workers", "halving"]]
    assert list(key.itertuples(index=False, name=None)) == [
        (8, 1, "no"), (8, 1, "yes"), (8, 4, "no"), (8, 4, "yes"),
        (16, 1, "no"), (16, 1, "yes"), (16, 4, "no"), (16, 4, "yes"),
    ]  # fmt: skip
    plan = simulate(16, 4, PLAIN, (25, 2), seed=1)
    assert list(shown.iloc[-1])[3:] == [
        plan.hours, plan.worker_hours, plan.cost, plan.share_of_full_grid,
        plan.utilisation,
    ]  # fmt: skip


def test_a_table_without_halving_has_half_the_rows():
    shown = table([8], [1, 2, 4], PLAIN)
    assert list(shown["halving"]) == ["no"] * 3
    assert list(shown["hours"] * 3600) == pytest.approx([3360, 1680, 840])


# --- Bad input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"steps": 0}, "steps is 0.*whole number of at least 1"),
        ({"steps": 2.5}, "steps is 2.5"),
        ({"steps": True}, "steps is True"),
        ({"workers_per_machine": 0}, "workers_per_machine is 0"),
        ({"step_seconds": 0}, "step_seconds is 0.*Measure"),
        ({"step_seconds": -1}, "step_seconds is -1.*at least 0"),
        ({"step_spread": math.nan}, "step_spread is nan"),
        ({"evaluation_seconds": math.inf}, "evaluation_seconds is inf"),
        ({"price_per_worker_hour": "2"}, "price_per_worker_hour is '2'"),
        ({"start_seconds": None}, "start_seconds is None"),
        ({"lost_per_worker_hour": 90}, "90 losses an hour.*41.8 seconds"),
    ],
)
def test_assumptions_that_nothing_can_have(changed, words):
    with pytest.raises(LabError, match=words):
        replace(PLAIN, **changed)


@pytest.mark.parametrize(
    ("runs", "workers", "halving", "words"),
    [
        (0, 1, None, "runs is 0"),
        (1, 0, None, "workers is 0"),
        (1, 1.0, None, "workers is 1.0"),
        (1, 1, (0, 2), "first step of halving is 0"),
        (1, 1, (10, 1), "factor of halving is 1, so every run"),
        (1, 1, (10, 1.5), "factor of halving is 1.5"),
        (1, 1, 5, "halving is 5, and must be two"),
        (1, 1, (1, 2, 3), "must be two numbers"),
        (1, 1, (100, 2), "begins at step 100, and a run has 100"),
    ],
)
def test_a_grid_that_can_t_be(runs, workers, halving, words):
    with pytest.raises(LabError, match=words):
        simulate(runs, workers, PLAIN, halving)


def test_numbers_of_numpy_are_numbers():
    runs = np.arange(1, 3)
    assert len(table(runs, runs, replace(PLAIN, steps=runs[1]))) == 4
