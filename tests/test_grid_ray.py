"""A grid on Ray: the same results as in one process, and the same steering."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pandas as pd
import pytest
from conftest import quick_settings
from killed_grid import variety
from ray_grid import assert_same, plan, questions, starts

from grpo_lab import environment, grid
from grpo_lab.errors import LabError
from grpo_lab.files import write_json
from grpo_lab.grid import Halving, cluster, on_ray, steering
from grpo_lab.grid.cluster import Cluster
from grpo_lab.grid.halving import (
    PROMOTED,
    STOPPED,
    Rung,
    note_rung,
    read_rungs,
)
from grpo_lab.grid.jobs import all_jobs, job_at
from grpo_lab.grid.plan import plan as plan_of


def test_the_same_results_as_in_one_process(
    machines, here, both, tmp_path, capfd
):
    """Bit for bit; with a reward that exists nowhere but here."""

    def variety(completions, **kwargs) -> list[float]:
        return [float(len(set(chat[0]["content"]))) for chat in completions]

    told = []

    def progress(run, step, steps, row):
        told.append((run.short_model, step, steps))

    found = grid.run(
        plan(both), questions(), [variety], tmp_path,
        progress=progress, engine="ray", address=machines.address,
    )  # fmt: skip
    for run, expected in zip(found.runs, here.runs, strict=True):
        assert_same(run, expected)
        [start] = starts(run)
        assert start["threads"] == 1
        log = (run.directory / "worker.log").read_text()
        assert "to step 6 of 6" in log
    # Each step of each run, in order.
    for model in ("tiny-qwen", "tiny-llama"):
        assert [t for t in told if t[0] == model] == [
            (model, step, 6) for step in range(1, 7)
        ]
    assert not (tmp_path / "ray").exists()
    assert capfd.readouterr().out == ""
    # Again: nothing is left to do, so no cluster is asked for.
    again = grid.run(
        plan(both), questions(), [variety], tmp_path,
        engine="ray", address="127.0.0.1:1",
    )  # fmt: skip
    assert [run.status for run in again.runs] == ["done", "done"]


def test_halving_and_an_object_store(machines, here, both, tmp_path):
    """The workers share no directory with the driver, one run is stopped by
    ASHA, and what is paused at a rung and goes on was never paused."""
    place = tmp_path / "grid"
    records = plan_of(plan(both), questions(), [variety], place)
    second = list(records)[1]
    write_json(place / "grid.json", records[second]["grid"])
    # No tiny model is ever right: this is what a driver before this one has
    # noted, and the first run won't reach it.
    note_rung(second, Rung(2, 0.5, PROMOTED, None, 1))
    told = []
    found = grid.run(
        plan(both), questions(), [variety], place, halving=Halving(2),
        progress=lambda run, step, *rest: told.append((run.model, step)),
        engine="ray", address=machines.address,
        storage=f"file://{tmp_path}/store",
    )  # fmt: skip
    stopped, whole = found.runs
    assert (stopped.status, stopped.steps) == ("stopped", 2)
    assert "0.0% of the held-out questions right, where 50.0%" in (
        stopped.reason
    )
    changing = ["seconds", "memory_gib"]
    pd.testing.assert_frame_equal(
        stopped.metrics.drop(columns=changing),
        here.runs[0].metrics.drop(columns=changing)[:2],
        check_exact=True,
    )
    assert_same(whole, here.runs[1])
    assert [(r.step, r.decision) for r in read_rungs(whole.directory)] == [
        (2, PROMOTED),
        (4, PROMOTED),
    ]
    # Each step of it, also the last one.
    assert [step for model, step in told if model == both[1]] == [*range(1, 7)]
    assert list(whole.directory.glob("checkpoint-*")) == []
    [stored] = (tmp_path / "store").glob(f"*/runs/{whole.directory.name}")
    assert (stored / "checkpoint-6" / "complete").exists()
    # A clone finds its parent's checkpoint where the workers left it.
    folder = steering.clone(
        whole,
        {"max_steps": 8},
        warm=True,
        storage=f"file://{tmp_path}/store",
    )
    assert [p.name for p in (folder / "parent").iterdir()] == ["checkpoint-6"]


def test_steering_while_the_workers_train(machines, here, both, tmp_path):
    """One run is stopped, a warm clone of another is made: the same call
    trains the clone. One fails, and the others go on."""
    place, done = tmp_path / "grid", []
    file = tmp_path / "digits.py"
    file.write_text(
        "def reward(question, answer, completion):\n"
        "    return sum(c.isdigit() for c in completion) / 10\n"
    )

    def progress(run, step, steps, row):
        if done or step < 3:
            return
        done.append(step)
        waiting = steering.find(place, "tiny-qwen lr=0.002")
        steering.stop(waiting)
        steering.clone(
            steering.find(place, run.short_model + " lr=0.001 max_steps=6"),
            {
                "learning_rate": 5e-4,
                "lr_scheduler": "constant",
                "max_steps": 9,
            },
            warm=True,
            rewards=[str(file)],
        )

    more = quick_settings(both[0], learning_rate=2e-3, max_steps=30)
    bad = quick_settings("no model at all", max_steps=1)
    found = grid.run(
        [*plan(both), more, bad],
        questions(),
        [variety],
        place,
        progress=progress,
        engine="ray",
        address=machines.address,
    )
    first, second, stopped, failed, clone = found.runs
    assert_same(first, here.runs[0])
    assert_same(second, here.runs[1])
    assert stopped.status == "stopped" and stopped.steps < 30
    assert clone.clone["rewards"] == ["digits"]  # sent to its worker
    assert {"digits"} <= set(clone.metrics)
    assert (clone.metrics["reward"] == clone.metrics["digits"]).all()
    assert clone.status == "done"
    assert clone.metrics["step"].min() == clone.clone["step"] + 1
    assert clone.metrics["learning_rate"].unique().tolist() == [5e-4]
    assert clone.steps == 9
    # What raises is no lost worker: it is not tried again.
    assert failed.status == "failed"
    assert "There is no model" in failed.reason
    assert len(starts(failed)) == 1
    board = found.leaderboard()
    assert (board["parent"] != "").sum() == 1
    # What was stopped there goes on here.
    steering.resume(stopped)
    last = grid.run([*plan(both), more], questions(), [variety], place)
    assert last.runs[2].status == "done"
    assert last.runs[2].metrics["step"].tolist() == list(range(1, 31))


# --- What is refused before anything starts ---------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gpus": 1}, "1 GPUs of one machine, but .* 1 CPU cores and 0 GPUs"),
        ({"cpus": 2}, "2 CPU cores .* no run would ever start"),
    ],
)
def test_a_cluster_that_is_too_small(machines, both, tmp_path, options, told):
    with pytest.raises(LabError, match=told):
        grid.run(
            plan(both[:1]), questions(), [variety], tmp_path, engine="ray",
            address=machines.address, **options,
        )  # fmt: skip
    [run] = grid.load(tmp_path).runs
    assert not (run.directory / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engine": "slurm"}, "no engine 'slurm'"),
        ({"engine": "ray", "gpu": 1}, "no option 'gpu'. It has address, cpus"),
        ({"address": "auto"}, "address can only be set for the workers"),
        ({"engine": "ray", "cpus": 0}, "can't have 0 CPU cores"),
        ({"engine": "ray", "retries": -1}, "-1 retries"),
    ],
)
def test_what_no_engine_takes(quick, tiny_splits, tmp_path, options, told):
    with pytest.raises(LabError, match=told):
        grid.run([quick], tiny_splits, [variety], tmp_path / "g", **options)
    assert not (tmp_path / "g").exists()


def test_a_storage_that_is_none(quick, tiny_splits, tmp_path):
    with pytest.raises(LabError, match="ftp"):
        grid.run(
            [quick], tiny_splits, [variety], tmp_path / "g", engine="ray",
            storage="ftp://somewhere/else",
        )  # fmt: skip


def test_an_address_where_nothing_is(quick, tiny_splits, tmp_path):
    with pytest.raises(LabError, match="no Ray cluster at '127.0.0.1:1'"):
        grid.run(
            [quick], tiny_splits, [variety], tmp_path / "g", engine="ray",
            address="127.0.0.1:1",
        )  # fmt: skip


def test_machines_that_do_not_fit():
    """Other versions train other runs; another disk takes results away."""
    wanted, mark = {"trl": "1.16.0"}, Path("/share/grid/grid.json")
    fine = {"host": "two", "sees": True, "versions": wanted}

    def look(**changes):
        told = fine | changes
        cluster._refuse_stranger(told, wanted, mark, cluster.SHARE_OR_STORE)

    look()
    for other in ({"trl": "1.15.0"}, {}):
        with pytest.raises(LabError, match="On the machine two the package"):
            look(versions=other)
    with pytest.raises(LabError, match="two does not see /share/grid, "):
        look(sees=False)


def test_without_ray_it_is_told(quick, tiny_splits, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LabError, match="pip install 'ray"):
        grid.run([quick], tiny_splits, [variety], tmp_path / "g", engine="ray")


def test_a_grid_in_one_process_needs_no_ray():
    """The import costs seconds, and a learner may not have it."""
    program = (
        "import sys; import grpo_lab.grid, grpo_lab.grid.steering; "
        "sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


LISTENING = """
import sys
from pathlib import Path

import psutil

from grpo_lab.grid.cluster import Cluster, PretendedCluster, connected

place = Path(sys.argv[1])
if sys.argv[2] == "pretended":
    started = PretendedCluster()
else:
    started = connected(Cluster(), place, mark="")
with started:
    ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
    print({
        connection.laddr.ip.removeprefix("::ffff:")
        for process in ours
        if process.status() != psutil.STATUS_ZOMBIE
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    })
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pretended", "of the call"])
def test_a_cluster_that_we_start_listens_here_alone(tmp_path, kind):
    """Ray has no password: whoever reaches a port may run code."""
    done = subprocess.run(
        [sys.executable, "-c", LISTENING, tmp_path, kind],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1:] == ["{'127.0.0.1'}"], done.stderr


# --- ASHA -------------------------------------------------------------------


class Arrivals:
    """Runs that report to a referee, as trials of Tune would."""

    def __init__(self, place, settings, **halving):
        for run in grid.load(place).runs:
            (run.directory / "result.json").unlink(missing_ok=True)
        self.jobs = [job_at(run.directory) for run in grid.load(place).runs]
        self.referee = on_ray.Referee(Halving(**halving), self.jobs)
        self.trials = [
            types.SimpleNamespace(
                trial_id=f"trial-{number}", config={"run": job.directory.name}
            )
            for number, job in enumerate(self.jobs)
        ]
        for trial in self.trials:
            self.referee.on_trial_add(None, trial)

    def report(self, number: int, step: int, accuracy: float) -> str:
        result = {"done": False, "step": step, "accuracy": accuracy}
        return self.referee.on_trial_result(None, self.trials[number], result)


@pytest.fixture
def planned(tiny_qwen, tmp_path):
    """Directories of four runs of eight steps that nobody has trained."""
    settings = [
        quick_settings(tiny_qwen, learning_rate=rate, max_steps=8)
        for rate in (1e-3, 2e-3, 3e-3, 4e-3)
    ]
    records = plan_of(settings, questions(), [variety], tmp_path)
    for directory, record in records.items():
        write_json(directory / "settings.json", record)
        write_json(tmp_path / "grid.json", record["grid"])
    return tmp_path, settings


def test_the_decisions_of_asha(planned):
    place, settings = planned
    four = Arrivals(place, settings, first=2)
    # The first to arrive goes on; then who is among the better half of what
    # has arrived before.
    assert four.report(0, 2, 0.4) == "CONTINUE"
    assert four.report(1, 2, 0.3) == "STOP"
    assert four.report(2, 2, 0.5) == "CONTINUE"
    assert four.report(3, 2, 0.45) == "CONTINUE"
    assert four.report(2, 4, 0.5) == "CONTINUE"
    assert four.report(0, 4, 0.2) == "STOP"
    told = [grid.load(place).runs[n] for n in (0, 1)]
    assert [run.status for run in told] == ["stopped", "stopped"]
    assert told[0].reason.startswith("stopped by halving after step 4 of 8")
    assert told[1].reason == (
        "stopped by halving after step 2 of 8: 30.0% of the held-out "
        "questions right, where 40.0% were needed among 2 runs"
    )
    [rung] = read_rungs(told[1].directory)
    assert (rung.decision, rung.cutoff, rung.compared) == (STOPPED, 0.4, 2)


def test_the_decisions_outlive_the_driver(planned):
    """A referee that begins anew knows what was decided before."""
    place, settings = planned
    first = Arrivals(place, settings, first=2)
    assert first.report(0, 2, 0.6) == "CONTINUE"
    assert first.report(1, 2, 0.8) == "CONTINUE"
    again = Arrivals(place, settings, first=2)
    assert sorted(again.referee.recorded(2).values()) == [0.6, 0.8]
    assert again.report(2, 2, 0.65) == "STOP"  # the first of all otherwise
    assert again.report(3, 2, 0.75) == "CONTINUE"
    # And a run that is past its rung is asked about the next one only.
    assert job_at(again.jobs[1].directory).next_rung(Halving(2)) == 4


def test_what_ends_is_not_compared_again(planned):
    """Ray's own scheduler would count its end at the rungs that it left out,
    as a clone does."""
    place, settings = planned
    four = Arrivals(place, settings, first=2)
    last = {"done": True, "step": 8, "accuracy": 0.9}
    four.referee.on_trial_complete(None, four.trials[0], last)
    assert four.referee.recorded(2) == {}


def test_what_somebody_resumes_is_left_alone(planned):
    """Also when its worker began before."""
    place, settings = planned
    four = Arrivals(place, settings, first=2)
    assert four.report(0, 2, 0.9) == "CONTINUE"
    steering.resume(steering.find(place, "2"))
    assert four.report(1, 2, 0.1) == "CONTINUE"
    assert read_rungs(four.jobs[1].directory) == []


class Stored:
    """A store that has what a worker had printed before it was lost."""

    def collect(self, directory):
        (directory / "worker.log").write_text("my last words\n")


def test_a_lost_worker_has_its_last_words_from_the_store(planned):
    place, _ = planned
    jobs = all_jobs(place, [run.directory for run in grid.load(place).runs])
    queue = on_ray.Queue(place, [job.directory for job in jobs], Stored())
    queue.given = {"trial": jobs[0]}
    queue.on_trial_complete("trial", error=True)
    [run] = grid.load(place).failed[:1]
    assert run.status == "failed"
    assert run.reason.endswith("They were: my last words")


def test_gpus_that_nobody_asks_for_are_told(monkeypatch):
    """Before days are spent on the CPUs beside them."""
    import ray

    node = {"Alive": True, "Resources": {"CPU": 8, "GPU": 4}}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    with pytest.raises(LabError, match="4 GPUs, .* would train on a CPU"):
        cluster._refuse_small(Cluster())
    cluster._refuse_small(Cluster(gpus=0.5))


class Asked(Exception):
    """What a Tuner is made with."""


def test_each_trial_asks_for_what_a_run_gets(planned, monkeypatch):
    def tuner(trainable, **kwargs):
        asked = trainable.default_resource_request({})
        raise Asked(asked.required_resources)

    monkeypatch.setattr(on_ray.tune, "Tuner", tuner)
    monkeypatch.setattr(on_ray, "places", lambda cluster: 1)
    place, _ = planned
    queue = on_ray.Queue(place, [], None)
    task = on_ray.Task(place, None, None, 2, place, None)
    with pytest.raises(Asked) as asked:
        on_ray._fit(task, queue, None, Cluster(cpus=2, gpus=0.5))
    assert asked.value.args == ({"CPU": 2, "GPU": 0.5},)


@pytest.mark.parametrize(("own", "seen"), [([], ""), ([3], "3")])
def test_a_worker_without_a_gpu_of_its_own_sees_none(monkeypatch, own, seen):
    """Or all runs of a machine would train on its first one."""
    import ray

    monkeypatch.setattr(ray, "get_gpu_ids", lambda: own)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    cluster.see_own_gpus()
    environment.prepare()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_the_defaults_of_a_cluster():
    assert Cluster() == Cluster("", 1, 0, 3, "")
