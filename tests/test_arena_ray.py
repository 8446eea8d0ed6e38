"""Members on workers: the same lineage, come what may."""

import contextlib
import functools
import os
import signal
import time
from pathlib import Path

import filelock
import pandas as pd
import pytest
from test_arena_client import REWARD, furnished, small, written
from test_arena_population import reward, small_plan

from grpo_lab.arena import (
    LocalArena,
    experiment,
    job,
    population,
    records,
)
from grpo_lab.arena.evolution import Member
from grpo_lab.arena.population import Plan, Population, Stopped
from grpo_lab.data import load_splits
from grpo_lab.errors import LabError
from grpo_lab.grid import state
from grpo_lab.grid.cluster import Cluster, PretendedCluster, connected
from grpo_lab.grid.pool import Answer, WorkerLost
from grpo_lab.grid.train_run import Part

UNLIKE = ["seconds", "memory_gib"]
"""Columns that no two runs have in common."""


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
    """Two generations of two steps."""
    return small_plan(tiny_qwen, max_steps=4)


@pytest.fixture(scope="module")
def expected(plan, splits, tmp_path_factory) -> Path:
    """The directory of the plan, trained in this process."""
    directory = tmp_path_factory.mktemp("sequential")
    Population(plan, splits, splits.eval, reward, directory).train()
    return directory


@pytest.fixture(scope="module")
def cluster():
    """Two machines with room for one worker each; a test loses one.

    The connection is kept, which spares each test some processes. So a
    population has to give its workers' room back.
    """
    with (
        PretendedCluster(machines=2, cpus=1) as pretended,
        connected(Cluster(pretended.address)),
    ):
        yield pretended


@pytest.fixture
def parallel(plan, splits, cluster, tmp_path):
    """Makes the population in a directory, on the workers of the cluster."""

    def make(function=reward, progress=None, **options) -> Population:
        return Population(
            plan, splits, splits.eval, function, tmp_path, progress,
            workers=Cluster(), **options,
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


@pytest.mark.slow
def test_members_train_at_once_and_become_the_same_whatever_is_lost(
    parallel, expected, cluster, tmp_path_factory, tmp_path
):
    """Each waits for the other in its first step; one alone would fail.

    In its second step a worker dies. Later a machine is lost, for good, and
    the other one trains all.
    """
    seen = tmp_path_factory.mktemp("seen")

    def meet_or_die() -> None:
        mine = seen / str(os.getpid())
        if mine.exists():
            with contextlib.suppress(FileExistsError):
                (seen / "dead").mkdir()
                os.kill(os.getpid(), signal.SIGKILL)
        mine.touch()
        for _ in range(600):
            if len(list(seen.iterdir())) >= 2:
                return
            time.sleep(0.1)
        raise TimeoutError("nobody else trains")

    made, doings = [], []

    def progress(member, step, row) -> None:
        made.append((member.number, step, row))
        if step == 3 and len(cluster.machines) > 1:
            cluster.lose(1)
            cluster.machines.pop()

    parallel(after(meet_or_die), progress, doing=doings.append).train()
    assert_same(tmp_path, expected)
    assert (seen / "dead").exists() and len(cluster.machines) == 1
    steps = records.metrics(tmp_path)
    assert sorted((number, step) for number, step, _ in made) == sorted(
        zip(steps["member"], steps["step"], strict=True)
    )
    assert all(row["reward"] > 0 for _, _, row in made)
    assert doings[0] == "waiting for a free worker"
    assert "training members 0 and 1" in doings
    assert doings[-1] == "asking base and best the test questions"


def test_a_stop_and_a_fault_on_a_worker_and_this_process_goes_on(
    parallel, plan, splits, expected, tmp_path
):
    """The stop is asked for in a first step, which is the last one then."""

    def fail() -> None:
        raise ValueError("no reward today")

    def ask() -> None:
        (tmp_path / "stop").touch()

    with pytest.raises(ValueError, match="^no reward today$"):
        parallel(after(fail)).train()
    with pytest.raises(Stopped):
        parallel(after(ask)).train()
    (tmp_path / "stop").unlink()
    assert set(records.metrics(tmp_path)["step"]) == {1}
    Population(plan, splits, splits.eval, reward, tmp_path).train()
    assert_same(tmp_path, expected)


def test_a_member_is_held_by_whoever_trains_it(
    plan, splits, tmp_path, monkeypatch
):
    """One that was given up as lost may still be at it."""
    folder = records.member_folder(tmp_path, 0)
    folder.mkdir(parents=True)
    one = Population(plan, splits, splits.eval, reward, tmp_path)
    monkeypatch.setattr(state, "HOLD_SECONDS", 0.1)
    with (
        filelock.FileLock(folder / "run.lock"),
        pytest.raises(LabError, match="Another process still trains 000"),
    ):
        one.train()
    assert not (folder / "metrics.csv").exists()


def test_members_on_processes_of_this_machine(
    plan, splits, expected, tmp_path
):
    """One dies over its first step; another one takes its member."""
    seen = tmp_path / "seen"

    def die_once() -> None:
        with contextlib.suppress(FileExistsError):
            seen.mkdir()
            os.kill(os.getpid(), signal.SIGKILL)

    Population(
        plan, splits, splits.eval, after(die_once), tmp_path, workers=2
    ).train()
    assert_same(tmp_path, expected)
    assert seen.exists()


def test_a_member_whose_workers_are_lost(plan, splits, tmp_path):
    """It is told which, and what the last of them said."""
    one = Population(plan, splits, splits.eval, reward, tmp_path)
    part = Part("members/004", 2, Member(4, 0.1, 0))
    log = one.context.fetch(part)
    log.parent.mkdir(parents=True)
    log.write_text("Killed\n")
    with pytest.raises(LabError, match="of member 4 was lost, 2 in all.*Kil"):
        one.take(Answer(part, error=WorkerLost(2)))


# --- How it is asked for ----------------------------------------------------


@pytest.fixture
def arena(tmp_path, tiny_qwen, monkeypatch):
    """An arena with an experiment `e`; no job is ever started."""
    monkeypatch.setattr(job, "start", lambda folder: None)
    made = furnished(tmp_path)
    made.submit_experiment(
        small(tiny_qwen),
        written(tmp_path, REWARD),
        experiment_name="e",
        engine="ray",
        address="10.0.0.1:6379",
        cpus=2,
    )
    return made


def workers_of(arena: LocalArena, monkeypatch) -> Cluster | None:
    """What the job of the experiment would hand to its population."""
    seen = []
    monkeypatch.setattr(
        population, "Population", lambda *values: seen.append(values[-1])
    )
    experiment.population(arena.home / "experiments" / "e")
    return seen[0]


def test_the_engine_is_no_part_of_the_experiment(
    arena, tmp_path, tiny_qwen, monkeypatch
):
    """It is kept beside, and whoever goes on may choose another one."""
    folder = arena.home / "experiments" / "e"
    wanted = Cluster("10.0.0.1:6379", cpus=2)
    assert workers_of(arena, monkeypatch) == wanted
    assert "10.0.0.1" not in (folder / "experiment.json").read_text()
    job.Status(folder).tell(status="stopped")
    arena.resume_experiment("e")
    assert workers_of(arena, monkeypatch) == wanted
    arena.resume_experiment("e", engine="process")
    assert workers_of(arena, monkeypatch) is None
    job.Status(folder).tell(status="stopped")
    arena.resume_experiment("e", engine="process", workers=2)
    assert workers_of(arena, monkeypatch) == 2
    job.Status(folder).tell(status="stopped")
    found = arena.submit_experiment(
        small(tiny_qwen), tmp_path / "reward.py", experiment_name="e",
        resume=True, engine="ray", gpus=0.5,
    )  # fmt: skip
    assert workers_of(arena, monkeypatch) == Cluster(gpus=0.5)
    assert [one.path for one in found.findings if "worker" in one.text] == [
        "engine"
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engine": "slurm"}, "no engine 'slurm'.*Type engine="),
        ({"address": "auto"}, "address can only be set.*Add engine='ray'"),
        ({"engine": "ray", "cpu": 2}, "no option 'cpu'. It has address, cpus"),
        ({"engine": "ray", "cpus": 0}, "can't have 0 CPU cores"),
        ({"engine": "process", "workers": 0}, "0 processes can't train"),
    ],
)
def test_what_no_engine_takes(arena, options, told):
    before = experiment.noted_engine(arena.home / "experiments" / "e")
    job.Status(arena.home / "experiments" / "e").tell(status="stopped")
    with pytest.raises(LabError, match=told):
        arena.resume_experiment("e", **options)
    assert experiment.noted_engine(arena.home / "experiments" / "e") == before


def test_a_directory_that_workers_can_not_have(plan, splits, tmp_path):
    with pytest.raises(LabError, match="can't be kept in s3://b.*share"):
        Population(
            plan, splits, splits.eval, reward, tmp_path,
            workers=Cluster(storage="s3://b"),
        )  # fmt: skip
