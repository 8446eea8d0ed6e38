"""Members on the workers of a Ray cluster: the same lineage, come what may."""

import contextlib
import functools
import os
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
from conftest import quick_settings

from grpo_lab.arena import records
from grpo_lab.arena.evolution import Rules
from grpo_lab.arena.population import Plan, Population, Stopped
from grpo_lab.data import load_splits
from grpo_lab.grid.cluster import Cluster, PretendedCluster

UNLIKE = ["seconds", "memory_gib"]
"""Columns that no two runs have in common."""


def reward(completions, answer, **kwargs) -> list[float]:
    """Different characters, so that groups have a spread."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(set(text))) for text in texts]


def after(deed):
    """The reward, with a deed before each step's; not where members rank."""

    @functools.wraps(reward)
    def first(completions, prompts=None, **kwargs):
        if prompts is not None:
            deed()
        return reward(completions, **kwargs)

    return first


@pytest.fixture(scope="module")
def splits():
    return load_splits("pocket", train_rows=12, eval_rows=8, seed=1)


@pytest.fixture(scope="module")
def plan(tiny_qwen) -> Plan:
    """Two generations of two steps, and one of one step."""
    settings = quick_settings(
        tiny_qwen,
        max_steps=5,
        lr_scheduler="constant",
        warmup_share=0.0,
        beta=0.01,
    )
    ranges = {"lr": (1e-4, 1e-2), "beta": (1e-4, 1e-1)}
    rules = Rules(2, True, 1.0, ranges, seed=3)
    return Plan(settings, pop_size=2, evo_steps=2, rules=rules)


@pytest.fixture(scope="module")
def expected(plan, splits, tmp_path_factory) -> Path:
    """The directory of the plan, trained in this process."""
    directory = tmp_path_factory.mktemp("sequential")
    Population(plan, splits, splits.eval, reward, directory).train()
    return directory


@pytest.fixture(scope="module")
def cluster():
    """Two machines with room for one worker each; a test loses one."""
    with PretendedCluster(machines=2, cpus=1) as pretended:
        yield pretended


@pytest.fixture
def parallel(plan, splits, cluster, tmp_path):
    """Makes the population in a directory, on the workers of the cluster."""

    def make(function=reward, progress=None, **options) -> Population:
        workers = Cluster(cluster.address, **options)
        return Population(
            plan, splits, splits.eval, function, tmp_path, progress,
            workers=workers,
        )  # fmt: skip

    return make


def assert_same(directory: Path, expected: Path) -> None:
    """The same lineage, metrics, answers and result."""
    pd.testing.assert_frame_equal(
        records.lineage(directory), records.lineage(expected)
    )
    pd.testing.assert_frame_equal(
        records.metrics(directory).drop(columns=UNLIKE),
        records.metrics(expected).drop(columns=UNLIKE),
    )
    names = ["population.json", "result.json"]
    names += [str(p.relative_to(expected)) for p in expected.rglob("fit*")]
    for name in names:
        found, wanted = ((d / name).read_text() for d in (directory, expected))
        assert timeless(found) == timeless(wanted), name


def timeless(text: str) -> list[str]:
    return [line for line in text.splitlines() if '"seconds"' not in line]


def test_members_train_at_once_and_become_the_same(
    parallel, expected, tmp_path_factory, tmp_path
):
    """Each waits for the other in its first step; one alone would fail."""
    meeting = tmp_path_factory.mktemp("meeting")

    def meet() -> None:
        (meeting / str(os.getpid())).touch()
        for _ in range(600):
            if len(list(meeting.iterdir())) == 2:
                return
            time.sleep(0.1)
        raise TimeoutError("nobody else trains")

    made, doings = [], []
    population = parallel(
        after(meet), lambda member, step, row: made.append((member, step, row))
    )
    population.nursery.doing = doings.append
    population.train()
    assert_same(tmp_path, expected)
    steps = records.metrics(tmp_path)
    told = [(member.number, step) for member, step, _ in made]
    assert sorted(told) == sorted(
        zip(steps["member"], steps["step"], strict=True)
    )
    assert all(row["reward"] > 0 for _, _, row in made)
    assert doings[0] == "waiting for a free worker"
    assert "training members 0 and 1" in doings
    assert doings[-1] == "asking base and best the test questions"


def test_a_lost_worker_and_a_lost_machine_change_nothing(
    parallel, expected, cluster, tmp_path_factory, tmp_path
):
    """A worker dies at once; later one machine of two, for good."""
    seen = tmp_path_factory.mktemp("seen")

    def die() -> None:
        """In the second step of the first worker that gets there."""
        mine = seen / str(os.getpid())
        if mine.exists():
            with contextlib.suppress(FileExistsError):
                (seen / "dead").mkdir()
                os.kill(os.getpid(), signal.SIGKILL)
        mine.touch()

    made = []

    def progress(member, step, row) -> None:
        made.append((member.number, step))
        if step == 3 and len(cluster.machines) > 1:
            cluster.lose(1)
            cluster.machines.pop()

    parallel(after(die), progress).train()
    assert (seen / "dead").exists() and len(cluster.machines) == 1
    assert len(made) == len(set(made)) == 10
    assert_same(tmp_path, expected)


def test_a_stop_saves_the_steps_and_this_process_goes_on(
    parallel, plan, splits, expected, tmp_path
):
    """Asked for in a first step, which is the last one then."""

    def ask() -> None:
        (tmp_path / "stop").touch()

    with pytest.raises(Stopped):
        parallel(after(ask)).train()
    (tmp_path / "stop").unlink()
    assert set(records.metrics(tmp_path)["step"]) == {1}
    Population(plan, splits, splits.eval, reward, tmp_path).train()
    assert_same(tmp_path, expected)


def test_what_fails_on_a_worker_fails_here(parallel, tmp_path):
    """By the very error, and at once."""

    def fail() -> None:
        raise ValueError("no reward today")

    with pytest.raises(ValueError, match="^no reward today$"):
        parallel(after(fail)).train()
    assert not (tmp_path / "population.json").exists()
