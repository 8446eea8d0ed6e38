"""A grid on Ray: the same results as in one process, and the same control."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from conftest import quick_settings
from ray_grid import assert_same, plan, small_task, starts

from grpo_lab import environment, grid
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.grid import Halving, cluster, control, on_ray, worker
from grpo_lab.grid.cluster import Cluster
from grpo_lab.grid.halving import PROMOTED, STOPPED, read_rungs


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
        plan(both), small_task(variety), tmp_path,
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
        plan(both), small_task(variety), tmp_path,
        engine="ray", address="127.0.0.1:1",
    )  # fmt: skip
    assert [run.status for run in again.runs] == ["done", "done"]


def test_halving_and_an_object_store(
    machines, here, both, tmp_path, monkeypatch
):
    """The workers share no directory with the driver, one run is stopped at
    a rung, and what is paused there and goes on was never paused."""
    place, load = tmp_path / "grid", Evaluation.load.__func__

    def better(cls, path):
        """No tiny model is ever right: the Llama has one right answer."""
        found = load(cls, path)
        if path.parent.name != "rungs" or "llama" not in str(path):
            return found
        first, *others = found.answers
        right = dataclasses.replace(first, correct=True)
        return dataclasses.replace(found, answers=(right, *others))

    monkeypatch.setattr(Evaluation, "load", classmethod(better))
    told = []
    found = grid.run(
        plan(both),
        small_task(),
        place,
        halving=Halving(2),
        progress=lambda run, step, *rest: told.append((run.model, step)),
        engine="ray",
        address=machines.address,
        storage=f"file://{tmp_path}/store",
    )
    stopped, whole = found.runs
    assert (stopped.status, stopped.steps) == ("stopped", 2)
    assert "0.0% of the held-out questions right, where 33.3%" in (
        stopped.reason
    )
    [rung] = read_rungs(stopped.directory)
    assert (rung.decision, rung.compared) == (STOPPED, 2)
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
    folder = control.clone(
        whole,
        {"max_steps": 8},
        warm=True,
        storage=f"file://{tmp_path}/store",
    )
    assert [p.name for p in (folder / "parent").iterdir()] == ["checkpoint-6"]


def test_control_while_the_workers_train(machines, here, both, tmp_path):
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
        waiting = control.find(place, "tiny-qwen lr=0.002")
        control.stop(waiting)
        control.clone(
            control.find(place, run.short_model + " lr=0.001 max_steps=6"),
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
        small_task(),
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
    control.resume(stopped)
    last = grid.run([*plan(both), more], small_task(), place)
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
            plan(both[:1]),
            small_task(),
            tmp_path,
            engine="ray",
            address=machines.address,
            **options,
        )
    [run] = grid.load(tmp_path).runs
    assert not (run.directory / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engine": "slurm"}, "no engine 'slurm'"),
        ({"engine": "ray", "gpu": 1}, "no option 'gpu'. It has address, cpus"),
        ({"engine": "ray", "workers": 2}, "no option 'workers'"),
        ({"workers": 0}, "0 processes can't train"),
        ({"address": "auto"}, "address can only be set for the workers"),
        ({"engine": "ray", "cpus": 0}, "can't have 0 CPU cores"),
        ({"engine": "ray", "retries": -1}, "-1 retries"),
    ],
)
def test_what_no_engine_takes(quick, task, tmp_path, options, told):
    with pytest.raises(LabError, match=told):
        grid.run([quick], task, tmp_path / "g", **options)
    assert not (tmp_path / "g").exists()


def test_a_storage_that_is_none(quick, task, tmp_path):
    with pytest.raises(LabError, match="ftp"):
        grid.run(
            [quick],
            task,
            tmp_path / "g",
            engine="ray",
            storage="ftp://somewhere/else",
        )


def test_an_address_where_nothing_is(quick, task, tmp_path):
    with pytest.raises(LabError, match="no Ray cluster at '127.0.0.1:1'"):
        grid.run(
            [quick], task, tmp_path / "g", engine="ray", address="127.0.0.1:1"
        )


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


def test_without_ray_it_is_told(quick, task, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LabError, match="pip install 'ray"):
        grid.run([quick], task, tmp_path / "g", engine="ray")


def test_a_grid_in_one_process_needs_no_ray():
    """The import costs seconds, and a learner may not have it."""
    program = (
        "import sys; import grpo_lab.grid, grpo_lab.grid.control; "
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
    started = connected(Cluster())
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


def test_gpus_that_nobody_asks_for_are_told(monkeypatch):
    """Before days are spent on the CPUs beside them."""
    import ray

    node = {"Alive": True, "Resources": {"CPU": 8, "GPU": 4}}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    with pytest.raises(LabError, match="4 GPUs, .* would train on a CPU"):
        cluster._refuse_small(Cluster())
    cluster._refuse_small(Cluster(gpus=0.5))


def test_each_worker_asks_for_what_a_run_gets(monkeypatch):
    """And waits where there is no room for it."""
    asked = {}

    class Remote:
        def options(self, **kwargs):
            asked.update(kwargs)
            raise StopIteration

    monkeypatch.setattr(on_ray.ray, "remote", lambda worker: Remote())
    pool = on_ray.RayPool(None, Cluster(cpus=2, gpus=0.5), 1)
    pool.context = None
    with pytest.raises(StopIteration):
        pool._hire()
    assert (asked["num_cpus"], asked["num_gpus"]) == (2, 0.5)
    assert asked["max_restarts"] == 0


@pytest.mark.parametrize(("own", "seen"), [([], ""), ([3], "3")])
def test_a_worker_without_a_gpu_of_its_own_sees_none(monkeypatch, own, seen):
    """Or all runs of a machine would train on its first one."""
    import ray

    monkeypatch.setattr(ray, "get_gpu_ids", lambda: own)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    worker.see_own_gpus()
    environment.prepare()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_the_defaults_of_a_cluster():
    assert Cluster() == Cluster("", 1, 0, 3, "")
