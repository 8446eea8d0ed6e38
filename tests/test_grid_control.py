"""Stop, resume and clone runs, while a grid trains and afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import quick_settings
from killed_grid import variety

from grpo_lab import grid
from grpo_lab.errors import LabError
from grpo_lab.grid import Halving, control
from grpo_lab.grid.__main__ import main
from grpo_lab.grid.state import RunState, hold
from rewards import RewardError

CHANGING = ["seconds", "memory_gib"]


def shorter(completions, **kwargs) -> list[float]:
    """Another reward, so that a clone can leave one out."""
    return [-float(len(chat[0]["content"])) for chat in completions]


REWARDS = [variety, shorter]


@pytest.fixture(scope="module")
def task(tiny_splits):
    return grid.Task(tiny_splits, REWARDS)


@pytest.fixture(scope="module")
def settings(tiny_qwen):
    return [
        quick_settings(
            tiny_qwen, learning_rate=rate, max_steps=4, lr_scheduler="constant"
        )
        for rate in (1e-3, 2e-3)
    ]


@pytest.fixture(scope="module")
def left_alone(settings, task, tmp_path_factory):
    """Two runs that nobody steered."""
    place = tmp_path_factory.mktemp("alone")
    return grid.run(settings, task, place)


@pytest.fixture
def place(left_alone, tmp_path) -> Path:
    """A copy of that grid's directory, to do with as one likes."""
    import shutil

    copy = tmp_path / "grid"
    shutil.copytree(left_alone.output_dir, copy)
    return copy


def once_at(step: int, act):
    """A progress callback that acts once, after a step of the first run."""
    done = []

    def progress(one, at, total, row):
        if at == step and not done:
            done.append(act())

    return progress


def assert_same(run: grid.Run, expected: grid.Run, steps: int = 4) -> None:
    pd.testing.assert_frame_equal(
        run.metrics.drop(columns=CHANGING),
        expected.metrics.drop(columns=CHANGING)[:steps],
        check_exact=True,
    )


# --- Stop and resume --------------------------------------------------------


def test_stop_and_resume_while_it_trains(
    settings, task, left_alone, tmp_path, capsys
):
    """The step that is being made is saved; later it goes on as if nothing
    had been, and the other run is not touched."""
    at = ["--grid", str(tmp_path)]
    found = grid.run(
        settings,
        task,
        tmp_path,
        progress=once_at(2, lambda: main(["runs", "stop", "1", *at])),
    )
    first, second = found.runs
    # It was asked for when step 2 was over, so the next is the last one.
    assert (first.status, first.steps) == ("stopped", 3)
    assert first.reason == "stopped by hand after step 3 of 4"
    assert (second.status, second.steps) == ("done", 4)
    assert found.failed == []
    assert "ends after the step" in capsys.readouterr().out
    board = found.leaderboard()
    assert list(board["stopped"]) == ["", first.reason]
    assert board["after"].isna().tolist() == [False, True]
    json.dumps(found.summary()["runs"])
    # Again: what was stopped stays so, until somebody resumes it.
    again = grid.run(settings, task, tmp_path)
    assert again.runs[0].status == "stopped"
    assert main(["runs", "resume", "lr=0.001", *at]) == 0
    assert control.table(tmp_path)["state"].tolist() == ["waiting", "done"]
    last = grid.run(settings, task, tmp_path)
    for run, expected in zip(last.runs, left_alone.runs, strict=True):
        assert run.status == "done"
        assert_same(run, expected)


def test_a_stop_before_its_turn_and_its_withdrawal(settings, task, tmp_path):
    def act():
        waiting = control.find(tmp_path, "lr=0.002")
        control.stop(waiting)

    found = grid.run(settings, task, tmp_path, progress=once_at(1, act))
    assert [run.steps for run in found.runs] == [4, 0]
    assert found.runs[1].reason == "stopped by hand after step 0 of 4"
    control.resume(control.find(tmp_path, "2"))
    run = control.find(tmp_path, "2")
    control.stop(run)
    assert RunState(run.directory).stop_requested
    control.resume(run)
    assert not RunState(run.directory).stop_requested


def test_what_halving_stopped_can_go_on(settings, task, left_alone, tmp_path):
    """And is not stopped at the next rung."""

    def run():
        return grid.run(settings, task, tmp_path, halving=Halving(1))

    [stopped] = run().stopped
    assert "stopped by halving after step 1 of 4" in stopped.reason
    control.resume(stopped)
    found = run()
    assert [one.status for one in found.runs] == ["done", "done"]
    for one, expected in zip(found.runs, left_alone.runs, strict=True):
        assert_same(one, expected)


def test_what_can_not_be_stopped_or_resumed(place):
    run = control.find(place, "1")
    with pytest.raises(LabError, match="is done already"):
        control.stop(run)
    with pytest.raises(LabError, match="clone it with more steps"):
        control.resume(run)


# --- Clone ------------------------------------------------------------------


def the_clone(found: grid.Grid) -> grid.Run:
    [clone] = [run for run in found.runs if run.clone is not None]
    return clone


def test_a_warm_clone_while_it_trains(settings, task, left_alone, tmp_path):
    """It starts where its parent stood, with the rate truly in force, and
    trains in the same call; its parent goes on as before."""
    at = ["--grid", str(tmp_path), "--warm", "--set", "learning_rate=5e-4"]
    found = grid.run(
        settings,
        task,
        tmp_path,
        # The checkpoint of step 3 is written after its row.
        progress=once_at(3, lambda: main(["runs", "clone", "1", *at])),
    )
    clone = the_clone(found)
    assert clone.status == "done"
    assert clone.clone["step"] == 2
    assert clone.metrics["step"].tolist() == [3, 4]
    assert clone.metrics["learning_rate"].tolist() == [5e-4] * 2
    state = torch.load(
        clone.directory / "checkpoint-4" / "optimizer.pt", weights_only=True
    )
    assert {group["lr"] for group in state["param_groups"]} == {5e-4}
    assert {g["initial_lr"] for g in state["param_groups"]} == {5e-4}
    # Two steps of its parent and two of its own.
    assert {int(one["step"]) for one in state["state"].values()} == {4}
    schedule = torch.load(
        clone.directory / "checkpoint-4" / "scheduler.pt", weights_only=True
    )
    assert set(schedule["base_lrs"]) == {5e-4}
    assert clone.name == "tiny-qwen lr=0.0005 (clone from step 2)"
    board = found.leaderboard().set_index("run")
    assert board.loc[clone.name, "parent"] == "tiny-qwen lr=0.001"
    assert set(board["parent"]) == {"", "tiny-qwen lr=0.001"}
    assert clone.completions == 8
    for run, expected in zip(found.runs, left_alone.runs, strict=False):
        assert_same(run, expected)


def test_a_warm_clone_with_another_course_and_more_steps(
    tiny_qwen, task, tmp_path
):
    """Rate, course and length of the clone's own settings, at every step."""
    one = quick_settings(tiny_qwen, max_steps=2, warmup_share=0)
    grid.run([one], task, tmp_path)
    changes = {"learning_rate": 4e-4, "max_steps": 6, "beta": 0.1}
    control.clone(control.find(tmp_path, "1"), changes, warm=True)
    clone = the_clone(grid.run([one], task, tmp_path))
    assert clone.metrics["step"].tolist() == [3, 4, 5, 6]
    # Linear over six steps, of which two are over.
    assert clone.metrics["learning_rate"].tolist() == pytest.approx(
        [4e-4 * left / 6 for left in (4, 3, 2, 1)]
    )
    assert clone.metrics["kl"].notna().all()  # beta above 0 needs it


def test_a_fresh_clone(settings, task, place):
    """From the base model, as a run of the plan with these settings."""
    run = control.find(place, "1")
    folder = control.clone(run, {"num_generations": 4, "seed": 7})
    found = grid.run(settings, task, place)
    clone = the_clone(found)
    assert clone.directory == folder
    assert (clone.clone["step"], clone.clone["parent"]) == (
        0,
        run.directory.name,
    )
    assert clone.settings.num_generations == 4
    assert clone.metrics["step"].tolist() == [1, 2, 3, 4]
    alike = quick_settings(
        settings[0].model,
        max_steps=4,
        lr_scheduler="constant",
        num_generations=4,
        seed=7,
    )
    apart = grid.run([alike], task, place.parent / "apart")
    assert_same(clone, apart.runs[0])


def test_a_clone_with_other_rewards(settings, task, place, tmp_path):
    """One of the grid's, and one of a reward file, which is copied."""
    file = tmp_path / "digits.py"
    file.write_text(
        "def reward(question, answer, completion):\n"
        "    return sum(c.isdigit() for c in completion) / 10\n"
    )
    at = ["--grid", str(place), "--rewards", f"shorter,{file}"]
    assert main(["runs", "clone", "1", *at]) == 0
    file.unlink()
    clone = the_clone(grid.run(settings, task, place))
    assert clone.status == "done", clone.reason
    assert {"shorter", "digits"} <= set(clone.metrics)
    assert "variety" not in clone.metrics
    assert "['shorter', 'digits']" in clone.name
    only = control.clone(clone, {}, rewards=["variety"])
    found = grid.run(settings, task, place)
    [last] = [run for run in found.runs if run.directory == only]
    assert {"variety"} == {"variety", "shorter", "digits"} & set(last.metrics)


def test_a_clone_whose_reward_is_gone_fails_alone(settings, task, place):
    """The grid's function was renamed meanwhile: the clone says so."""
    folder = control.clone(control.find(place, "1"), {}, rewards=["shorter"])
    record = json.loads((folder / "settings.json").read_text())
    record["clone"]["rewards"] = ["renamed"]
    (folder / "settings.json").write_text(json.dumps(record))
    found = grid.run(settings, task, place)
    assert the_clone(found).status == "failed"
    assert "wants the reward 'renamed'" in the_clone(found).reason
    assert len(found.done) == 2


@pytest.mark.parametrize(
    ("changes", "warm", "rewards", "told"),
    [
        ({}, False, (), "changes nothing"),
        ({"rate": 1e-3}, False, (), "no setting 'rate'"),
        ({"learning_rate": 2.0}, False, (), "must lie above 0"),
        ({"learning_rate": "fast"}, False, (), "LEARNING_RATE is 'fast'"),
        ({"learning_rate": True}, False, (), "LEARNING_RATE is True"),
        ({"max_steps": 2.5}, False, (), "MAX_STEPS is 2.5"),
        ({"lora_r": 8}, True, (), "Leave --warm out"),
        ({"learning_rate": 1e-4}, True, (), r"--set max_steps=8"),
        ({}, False, ("nothing",), "Those of this grid are variety, shorter"),
        ({}, False, ("shorter", "shorter"), "once each"),
    ],
)
def test_clones_that_can_not_be(place, changes, warm, rewards, told):
    before = sorted(place.rglob("*"))
    with pytest.raises(LabError, match=told):
        control.clone(control.find(place, "1"), changes, warm, rewards)
    assert sorted(place.rglob("*")) == before


def test_a_broken_reward_file_is_refused(place, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def reward(:\n")
    with pytest.raises(RewardError):
        control.clone(control.find(place, "1"), {}, rewards=[str(file)])


def test_a_clone_is_made_once(place):
    run = control.find(place, "1")
    control.clone(run, {"seed": 8})
    with pytest.raises(LabError, match="There is a clone"):
        control.clone(run, {"seed": 8})


def test_no_warm_clone_before_the_first_step(place):
    run = control.find(place, "1")
    import shutil

    for checkpoint in run.directory.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(LabError, match="has no checkpoint here"):
        control.clone(run, {"seed": 8}, warm=True)


def test_a_broken_checkpoint_is_no_start_of_a_clone(place):
    """The one before is."""
    run = control.find(place, "1")
    newest = run.directory / "checkpoint-4" / "optimizer.pt"
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size // 2)
    folder = control.clone(run, {"seed": 8}, warm=True)
    assert [p.name for p in (folder / "parent").iterdir()] == ["checkpoint-3"]


# --- The list, and which run is meant ---------------------------------------


def test_the_list(place, capsys):
    found = control.table(place)
    assert found["run"].tolist() == [
        "tiny-qwen lr=0.001",
        "tiny-qwen lr=0.002",
    ]
    assert found["state"].tolist() == ["done", "done"]
    assert found["steps"].tolist() == found["of"].tolist() == [4, 4]
    assert main(["runs", "list", "--grid", str(place)]) == 0
    assert "tiny-qwen lr=0.002" in capsys.readouterr().out


def test_what_is_training_is_told(place):
    job = RunState(control.find(place, "1").directory)
    (job.directory / "result.json").unlink()
    with hold(job.directory):
        assert control.table(place)["state"].tolist() == ["training", "done"]
    assert control.table(place)["state"].tolist() == ["waiting", "done"]


@pytest.mark.parametrize("text", ["3", "0", "lr=0.00", "qwen", ""])
def test_a_run_must_be_meant(place, text):
    with pytest.raises(LabError, match="should mean one run"):
        control.find(place, text)


def test_the_whole_name_wins(place):
    """Also where it is a part of another one's."""
    run = control.find(place, "1")
    control.clone(run, {"max_steps": 8}, warm=True)
    assert control.find(place, run.directory.name).clone is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("learning_rate=5e-4", 5e-4),
        ("max_steps=8", 8),
        ("lr_scheduler=constant", "constant"),
        ("load_in_4bit=false", False),
        ('target_modules=["q_proj"]', ["q_proj"]),
    ],
)
def test_changes_are_read(text, value):
    assert list(control.read_changes([text]).values()) == [value]


def test_the_command_line_tells_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "list"]) == 2
    assert "There is no grid below" in capsys.readouterr().err
    assert main(["runs", "list", "--grid", "nowhere"]) == 2
    assert "There is no grid in nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit) as code:
        main(["runs", "restart"])
    assert code.value.code == 2


def test_a_second_terminal(place, monkeypatch):
    """The command as it is typed, for the latest grid below ./runs."""
    (place.parent / "runs").mkdir()
    place.rename(place.parent / "runs" / "grid")
    done = subprocess.run(
        [
            sys.executable, "-m", "grpo_lab.grid", "runs", "clone", "lr=0.002",
            "--set", "max_steps=8", "--warm",
        ],
        cwd=place.parent,
        env=os.environ
        | {"PYTHONPATH": str(Path(grid.__file__).parent.parent.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "is a run of this grid now" in done.stdout
    assert len(grid.load(place.parent / "runs" / "grid").runs) == 3
