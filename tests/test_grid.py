"""Many runs: what is one, what is done again, and what survives a kill."""

import contextlib
import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import killed_grid
import pandas as pd
import pytest
import torch
from conftest import count_calls, count_loads, quick_settings
from fake_grid import graded, written
from killed_grid import held_elsewhere, variety
from ray_grid import assert_same
from safetensors.torch import load_file, save_file

import rewards
from grpo_lab import environment, evaluation, grid, memory, models, training
from grpo_lab.data import load_splits
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.grid import execute, plan
from grpo_lab.grid.state import RunState
from grpo_lab.profiles import RunSettings
from rewards.options import with_options

pytestmark = pytest.mark.numeric


def constant(completions, **kwargs) -> list[float]:
    return [1.0] * len(completions)


def infinite(completions, **kwargs) -> list[float]:
    return [float("inf"), *[1.0] * (len(completions) - 1)]


def broken(completions, **kwargs) -> list[float]:
    raise ZeroDivisionError("in the reward")


@pytest.fixture(scope="module")
def both(tiny_qwen, tiny_llama) -> list[str]:
    return [str(tiny_qwen), str(tiny_llama)]


@pytest.fixture(scope="module")
def whole(both, tmp_path_factory) -> grid.Grid:
    """A grid of two runs that nothing interrupts."""
    return killed_grid.run(both, tmp_path_factory.mktemp("whole") / "grid")


@pytest.fixture
def no_training(monkeypatch):
    """Nothing may be loaded or trained."""

    def forbidden(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load_policy", forbidden)


def files_of(folder: Path) -> dict[str, tuple]:
    """Every file below a folder, with its time and size."""
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(folder.rglob("*"))
    }


# --- The plan ---------------------------------------------------------------


def test_expand_makes_every_combination():
    base = RunSettings(model="pocket-qwen", learning_rate=1e-3, seed=7)
    runs = grid.expand(base, learning_rate=[1e-3, 1e-4], lora_r=[4, 8, 16])
    assert [(run.learning_rate, run.lora_r) for run in runs] == [
        (1e-3, 4), (1e-3, 8), (1e-3, 16), (1e-4, 4), (1e-4, 8), (1e-4, 16),
    ]  # fmt: skip
    assert {(run.model, run.seed) for run in runs} == {("pocket-qwen", 7)}
    assert grid.expand(base) == [base]


def test_expand_refuses_what_no_run_has():
    base = RunSettings(model="pocket-qwen", learning_rate=1e-3)
    with pytest.raises(LabError, match="no setting 'rate'.*learning_rate"):
        grid.expand(base, rate=[1e-3])
    with pytest.raises(LabError, match="must lie above 0"):
        grid.expand(base, learning_rate=[1e-3, 0])


def identity(settings, splits, functions=(variety,)) -> str:
    planned = plan.plan(
        [settings], grid.Task(splits, functions), Path("nowhere")
    )
    return next(iter(planned)).name


def test_every_setting_makes_another_run(tiny_qwen, tiny_splits):
    one = quick_settings(tiny_qwen, max_grad_norm=0.5, num_generations=2)
    seen = {identity(one, tiny_splits)}
    changes = {
        "num_generations": 4,
        "micro_batch": 2,
        "load_in_4bit": False,
        "gradient_checkpointing": True,
        "optimizations": (),
        "target_modules": ("k_proj",),
        "lr_scheduler": "cosine",
        "optimizer": "adamw_bnb_8bit",
        "model": str(tiny_qwen.parent),
        "completions_per_step": 8,
        "top_p": 0.9,
        "top_k": 5,
        "adam_beta1": 0.8,
        "adam_beta2": 0.95,
    }
    for field in dataclasses.fields(RunSettings):
        value = getattr(one, field.name)
        if field.name not in changes:
            assert isinstance(value, int | float), field.name
            changes[field.name] = value + 1 if value >= 1 else value + 0.125
    for name, value in changes.items():
        changed = dataclasses.replace(one, **{name: value})
        seen.add(identity(changed, tiny_splits))
    assert len(seen) == len(dataclasses.fields(RunSettings)) + 1
    again = RunSettings(**json.loads(json.dumps(one.to_dict())))
    assert identity(again, tiny_splits) in seen


def test_other_questions_make_another_run(quick, tiny_splits):
    fewer = dataclasses.replace(
        tiny_splits, fingerprint=tiny_splits.fingerprint[::-1]
    )
    assert identity(quick, fewer) != identity(quick, tiny_splits)


def test_other_weights_make_another_run(tiny_qwen, tiny_splits, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_qwen, folder)
    settings = quick_settings(folder)
    before = identity(settings, tiny_splits)
    assert identity(settings, tiny_splits) == before
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert identity(settings, tiny_splits) != before


REWARD = """
BONUS = 1.0

def helper(text):
    return BONUS * len(text)

def reward(completions, **kwargs):
    return [helper(text) for text in completions]
"""


def test_a_notebooks_reward_counts_with_all_that_it_uses(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)

    def fingerprint(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        function = importlib.import_module(name).reward
        function.__module__ = "cells"  # one notebook, edited
        function.__globals__["helper"].__module__ = "cells"
        return grid.reward_fingerprint([function])

    first = fingerprint("cells_1", REWARD)
    assert fingerprint("cells_2", REWARD + "\n\nOTHER = 3\n") == first
    changed = {
        "itself": REWARD.replace("[helper(text)", "[-helper(text)"),
        "a helper": REWARD.replace("BONUS * len", "BONUS + len"),
        "a constant": REWARD.replace("1.0", "2.0"),
    }
    for at, text in enumerate(changed.values()):
        assert fingerprint(f"cells_changed_{at}", text) != first, text


def test_a_packages_reward_counts_with_its_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "some_rewards"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(REWARD)
    (package / "helpers.py").write_text("def unused(): return 1\n")
    importlib.invalidate_caches()
    function = importlib.import_module("some_rewards.parts").reward
    first = grid.reward_fingerprint([function])
    assert grid.reward_fingerprint([function]) == first
    (package / "helpers.py").write_text("def unused(): return 2\n")
    assert grid.reward_fingerprint([function]) != first


def test_the_options_and_the_file_of_a_reward_count(tmp_path):
    plain = [rewards.correctness_reward]
    lenient = [with_options(rewards.correctness_reward, policy="flexible")]
    assert grid.reward_fingerprint(plain) != grid.reward_fingerprint(lenient)
    files = []
    for pay in ("1.0", "2.0"):
        text = f"def reward(question, answer, completion): return {pay}\n"
        (tmp_path / "mine.py").write_text(text)
        files.append([rewards.load_reward(tmp_path / "mine.py")])
    assert grid.reward_fingerprint(files[0]) != grid.reward_fingerprint(
        files[1]
    )
    found = {
        grid.reward_fingerprint(some)
        for some in (
            rewards.reward_set(),
            rewards.reward_set([1, 1, 1, 1, 1]),
            rewards.reward_set([3, 1, 1, 1, 1]),
            rewards.reward_set(prefilled="<think>\n"),
        )
    }
    assert len(found) == 4
    changed = with_options(lenient[0], policy="stated")
    assert grid.reward_fingerprint([changed]) not in (
        grid.reward_fingerprint(lenient),
        grid.reward_fingerprint(plain),
    )


def test_the_set_of_rewards_counts():
    parts = list(rewards.FIVE_PART)
    assert grid.reward_fingerprint(parts) != grid.reward_fingerprint(parts[:4])


def test_the_same_run_twice_is_refused(both, task, tmp_path):
    settings = killed_grid.plan([both[0], both[1], both[0]])
    with pytest.raises(LabError, match="have the same settings"):
        grid.run(settings, task, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_the_estimate_counts_what_a_grid_will_do():
    settings = [
        RunSettings(
            model="pocket-qwen", learning_rate=rate, completions_per_step=32
        )
        for rate in (1e-3, 1e-4)
    ]
    pace = grid.Pace(seconds=2.0, layers=4)
    rows = grid.estimates(settings, 100, 80, pace)
    assert list(rows["run"]) == [
        "pocket-qwen lr=0.001",
        "pocket-qwen lr=0.0001",
    ]
    assert list(rows["steps"]) == [25, 25]  # four questions a step
    assert list(rows["completions"]) == [800, 800]
    assert (rows["needs GiB"] > 0).all()
    grid.check_memory(settings, prompt_tokens=80)


# --- A finished grid --------------------------------------------------------


def test_a_run_keeps_everything_in_its_directory(whole, both):
    assert [run.status for run in whole.runs] == ["done", "done"]
    assert [run.name for run in whole.runs] == [
        "tiny-qwen lr=0.001",
        "tiny-llama lr=0.001",
    ]
    assert sorted(p.name for p in whole.output_dir.iterdir()) == [
        "base", "grid.json", "grid.lock", "runs",
    ] or sorted(p.name for p in whole.output_dir.iterdir()) == [
        "base", "grid.json", "runs",
    ]  # fmt: skip
    threads = torch.get_num_threads()
    for run, model in zip(whole.runs, both, strict=True):
        names = {path.name for path in run.directory.iterdir()}
        assert names >= {
            "settings.json", "environment.json", "metrics.csv", "tensorboard",
            "completions", "checkpoint-5", "adapter", "evaluation.json",
            "result.json",
        }  # fmt: skip
        record = json.loads((run.directory / "settings.json").read_text())
        assert RunSettings(**record["settings"]) == run.settings
        assert run.settings.model == model
        assert record["grid"]["rewards"] == ["variety"]
        starts = json.loads((run.directory / "environment.json").read_text())
        assert [start["threads"] for start in starts] == [threads]
        assert starts[0]["versions"]["trl"] == "1.16.0"
        assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5]
        assert len(run.evaluation.answers) == len(run.base.answers) == 3
        assert list(run.adapter.glob("*.safetensors"))
        assert not list(run.directory.rglob("*.bin.index*"))


def test_the_adapter_is_what_was_evaluated(whole):
    """Loaded as a learner would, it answers as the grid recorded."""
    from peft import PeftModel

    run = whole.runs[0]
    policy, tokenizer = models.load_policy(run.settings.model)
    policy = PeftModel.from_pretrained(policy, run.adapter)
    again = evaluation.evaluate(
        policy, tokenizer, killed_grid.questions().eval, 8, 3,
        optimizations=memory.resolve(run.settings, 100).optimizations,
    )  # fmt: skip
    assert again.answers == run.evaluation.answers


def test_a_finished_grid_runs_nothing_again(whole, both, no_training):
    before = files_of(whole.output_dir / "runs")
    told = []
    again = grid.run(
        killed_grid.plan(both),
        grid.Task(killed_grid.questions(), [variety]),
        whole.output_dir,
        progress=lambda *seen: told.append(seen),
    )
    assert files_of(whole.output_dir / "runs") == before
    assert [run.status for run in again.runs] == ["done", "done"]
    pd.testing.assert_frame_equal(again.leaderboard(), whole.leaderboard())
    # A live table shows them as finished all the same.
    assert [(step, total) for _, step, total, _ in told] == [(5, 5), (5, 5)]


def test_a_grid_reads_back_from_its_directory_alone(whole, no_training):
    read = grid.load(whole.output_dir)
    assert {run.directory for run in read.runs} == {
        run.directory for run in whole.runs
    }
    boards = [
        one.leaderboard().sort_values("run", ignore_index=True)
        for one in (read, whole)
    ]
    pd.testing.assert_frame_equal(*boards)


def test_the_last_cell_can_write_the_summary(whole):
    text = json.dumps(whole.summary(), allow_nan=False)
    summary = json.loads(text)
    assert [run["status"] for run in summary["runs"]] == ["done", "done"]
    assert summary["runs"][0]["last_step"]["step"] == 5
    assert len(summary["leaderboard"]) == 2


def copy_of(whole, tmp_path) -> Path:
    """The finished grid in another place."""
    return Path(shutil.copytree(whole.output_dir, tmp_path / "grid"))


def test_a_grid_can_grow(whole, both, tmp_path, monkeypatch):
    """A new rate is trained, the old ones are kept, the base is cached."""
    place = copy_of(whole, tmp_path)
    old = killed_grid.plan(both)
    new = dataclasses.replace(old[0], learning_rate=1e-4)
    loaded = count_loads(monkeypatch)
    grown = grid.run(
        [*old, new], grid.Task(killed_grid.questions(), [variety]), place
    )
    assert loaded == [(both[0], True)]
    assert [run.status for run in grown.runs] == ["done"] * 3
    assert len(list((place / "base").iterdir())) == 2
    weights = [
        load_file(run.adapter / "adapter_model.safetensors")
        for run in (grown.runs[0], grown.runs[2])
    ]
    assert any(
        not torch.equal(v, weights[1][k]) for k, v in weights[0].items()
    )


@pytest.mark.parametrize("lost", [False, True])
def test_no_run_waits_for_a_base_model_that_another_evaluates(
    whole, both, tmp_path, monkeypatch, lost
):
    """It trains meanwhile, and evaluates it itself if the other is lost."""
    place = copy_of(whole, tmp_path)
    old = killed_grid.plan(both)
    new = dataclasses.replace(old[0], learning_rate=1e-4)
    base = RunState(place / "runs" / whole.runs[0].directory.name).base
    base.unlink()
    evaluated = count_calls(monkeypatch, evaluation, "evaluate")

    with contextlib.ExitStack() as elsewhere:
        elsewhere.enter_context(held_elsewhere(base.with_suffix(".lock")))

        def let_go():
            if not lost:
                whole.runs[0].base.save(base)
            elsewhere.close()

        def progress(settings, step, total, row):
            assert not base.exists()
            if settings == new and step == total:
                # By then this run has got to its end, and waits.
                threading.Timer(2, let_go).start()

        grown = grid.run(
            [*old, new],
            grid.Task(killed_grid.questions(), [variety]),
            place,
            progress=progress,
        )
    grown.raise_failures()
    assert Evaluation.load(base).answers == whole.runs[0].base.answers
    assert len(evaluated) == 1 + lost


def test_runs_are_compared_with_their_own_base(tiny_qwen, tmp_path):
    """Another limit on length is another base evaluation."""
    settings = [
        quick_settings(tiny_qwen, max_steps=1, max_completion_length=length)
        for length in (4, 6)
    ]
    found = grid.run(
        settings, grid.Task(killed_grid.questions(), [variety]), tmp_path
    )
    for run in found.runs:
        limit = run.settings.max_completion_length
        assert {answer.tokens for answer in run.base.answers} == {limit}
    assert [run.name for run in found.runs] == [
        "tiny-qwen lr=0.001 max_completion_length=4",
        "tiny-qwen lr=0.001 max_completion_length=6",
    ]


# --- Refused before anything is written -------------------------------------


def test_another_grids_directory_is_left_alone(
    whole, both, tiny_splits, no_training
):
    before = files_of(whole.output_dir)
    plan, questions = killed_grid.plan(both), killed_grid.questions()
    other = [dataclasses.replace(one, beta=0.04) for one in plan]
    for (runs, splits, reward), word in (
        ((other, questions, variety), "none of its runs"),
        ((plan, tiny_splits, variety), "data_fingerprint"),
        ((plan, questions, constant), "reward_fingerprint, rewards"),
    ):
        task = grid.Task(splits, [reward])
        with pytest.raises(LabError, match="belongs to another grid") as told:
            grid.run(runs, task, whole.output_dir)
        assert word in str(told.value)
        with pytest.raises(LabError, match="belongs to another grid"):
            grid.check(runs, task, whole.output_dir)
    assert files_of(whole.output_dir) == before


def test_strange_files_are_left_alone(quick, task, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    before = files_of(tmp_path)
    with pytest.raises(LabError, match="files that are not of a grid"):
        grid.run([quick], task, tmp_path)
    with pytest.raises(LabError, match="is a file, but"):
        grid.run([quick], task, tmp_path / "thesis.txt")
    assert files_of(tmp_path) == before


def test_two_processes_do_not_share_a_directory(
    quick, task, tmp_path, no_training
):
    (tmp_path / "grid").mkdir()
    with held_elsewhere(tmp_path / "grid" / "grid.lock"):
        with pytest.raises(LabError, match="Another process is training"):
            grid.run([quick], task, tmp_path / "grid")
        assert not (tmp_path / "grid" / "runs").exists()


def test_a_nearly_full_disk_is_refused(
    quick, task, tmp_path, monkeypatch, no_training
):
    usage = shutil.disk_usage(tmp_path)._replace(free=2**28)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(LabError, match="There are 0.25 GiB left") as told:
        grid.run([quick], task, tmp_path / "new" / "grid")
    assert "Free some space" in str(told.value)
    assert list(tmp_path.iterdir()) == []


# --- Runs that fail ---------------------------------------------------------


def test_a_failed_run_does_not_stop_the_others(
    tiny_qwen, task, tmp_path, monkeypatch
):
    settings = [
        quick_settings("nobody/no-such-model", max_steps=1),
        quick_settings("no model at all", max_steps=1),
        quick_settings(tiny_qwen, max_steps=1),
    ]
    found = grid.run(settings, task, tmp_path)
    assert [run.status for run in found.runs] == ["failed", "failed", "done"]
    assert "nobody/no-such-model" in found.runs[0].reason
    assert "There is no model" in found.runs[1].reason
    assert "\n" not in found.runs[0].reason
    assert "Traceback" in (found.runs[0].directory / "error.txt").read_text()
    assert [run.name for run in found.done] == ["tiny-qwen lr=0.001"]
    assert list(found.leaderboard()["run"]) == ["tiny-qwen lr=0.001"]
    assert found.best == found.runs[2]
    assert "Only one run finished" in found.verdict()
    json.dumps(found.summary(), allow_nan=False)
    with pytest.raises(LabError, match="2 of 3 runs failed") as told:
        found.raise_failures()
    assert "no-such-model lr=0.001: nobody/no-such-model" in str(told.value)
    # Again: the failed ones are tried once more, the finished one is not.
    loaded = count_loads(monkeypatch)
    grid.run(settings, task, tmp_path)
    names = ("nobody/no-such-model", "no model at all")
    assert loaded == [(name, True) for name in names]


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (broken, r"ZeroDivisionError: in the reward\. The full traceback"),
        (infinite, r"of step 1 is .*lower the rate"),
    ],
)
def test_a_reward_that_fails_is_told(
    quick, tiny_splits, tmp_path, reward, reason
):
    found = grid.run([quick], grid.Task(tiny_splits, [reward]), tmp_path)
    assert found.runs[0].status == "failed"
    with pytest.raises(LabError, match=reason):
        found.raise_failures()
    with pytest.raises(LabError, match=reason):
        _ = found.best
    assert found.leaderboard().empty
    assert "nothing to compare" in found.verdict()
    assert found.warnings() == []


def test_a_failed_run_that_is_put_right(quick, task, tmp_path, monkeypatch):
    """It goes on from its last checkpoint, and no trace of the fault stays."""

    def fail(path):
        raise MemoryError("for once")

    save = Evaluation.save
    monkeypatch.setattr(
        Evaluation,
        "save",
        lambda self, path: (
            fail(path) if "runs" in str(path) else save(self, path)
        ),
    )
    first = grid.run([quick], task, tmp_path)
    assert first.runs[0].reason.startswith("MemoryError: for once")
    monkeypatch.setattr(Evaluation, "save", save)
    again = grid.run([quick], task, tmp_path)
    assert again.runs[0].status == "done"
    assert again.runs[0].metrics["step"].tolist() == [1, 2, 3]
    assert not (again.runs[0].directory / "error.txt").exists()
    again.raise_failures()


def test_what_the_libraries_say_of_a_full_disk(small_disk):
    """The weights and the optimiser go to the disk by different ways."""
    values = torch.zeros(10**6)
    for write in (
        lambda path: torch.save(values, path),
        lambda path: save_file({"values": values}, path),
        lambda path: pd.DataFrame(values.numpy()).to_csv(path),
    ):
        with pytest.raises(Exception) as error:
            write(small_disk.place / "file")
        assert grid.reason(error.value).startswith("The disk is full")
        (small_disk.place / "file").unlink(missing_ok=True)


def test_a_disk_that_fills_up_during_a_run(
    small_disk, quick, task, monkeypatch, tmp_path
):
    """It is told in one paragraph, and the run goes on when there is room."""
    place = small_disk.place
    monkeypatch.setattr(plan, "SPARE_GIB", 0)
    try:
        found = grid.run([quick], task, place / "grid")
        told = found.runs[0].reason
    except LabError as error:  # not even the reason could be written
        told = str(error)
    assert "disk is full" in told or "No space left" in told
    assert "Free some space" in told
    small_disk.resize("100m")
    again = grid.run([quick], task, place / "grid")
    again.raise_failures()
    apart = grid.run([quick], task, tmp_path / "apart")
    assert_same(again.runs[0], apart.runs[0])


# --- kill -9 ----------------------------------------------------------------


def test_kill_and_resume(whole, both, tmp_path):
    """Four times `kill -9`: the result is that of a run left alone.

    In training, in the middle of writing a checkpoint, and in the evaluation
    of each of the two runs after its training; see killed_grid.py.
    """
    place = tmp_path / "grid"
    program = "import killed_grid, sys; killed_grid.main(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(place), *both],
        cwd=Path(killed_grid.__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines() == [
        "in training: -9",
        "in a checkpoint: -9",
        "in the evaluation: -9",
        "left alone: 0",
    ], done.stdout + done.stderr
    killed = grid.load(
        place, [place / "runs" / run.directory.name for run in whole.runs]
    )
    for run, expected in zip(killed.runs, whole.runs, strict=True):
        assert_same(run, expected)
    starts = [
        len(json.loads((run.directory / "environment.json").read_text()))
        for run in killed.runs
    ]
    assert sum(starts) == 5  # one for each attempt, and one for the second


# --- Comparing runs ---------------------------------------------------------


def test_the_leaderboard_by_hand(tmp_path):
    base = graded("+---------")
    written(
        tmp_path,
        1e-4,
        base,
        graded("++--------", format_ok="+++++-----"),
        metrics=["1.5,0.5,0.1,0.2", "2.5,0.75,0.3,0.4"],
    )
    written(tmp_path, 1e-3, base, graded("-+++++++--"), metrics=["1,2,0,0"])
    found = grid.load(tmp_path).leaderboard()
    assert list(found["learning_rate"]) == [1e-3, 1e-4]  # the best first
    best, second = found.to_dict("records")
    assert best["run"] == "pocket-qwen lr=0.001"
    assert (best["before"], best["after"]) == (0.1, 0.7)
    assert best["gain"] == pytest.approx(0.6)  # seven gained, one lost
    assert best["p_value"] == pytest.approx(2 * (1 + 8) / 2**8)
    # (7 + 1 and 1 + 1 of 10 + 2)
    middle, variance = 6 / 12, (10 / 12 - (6 / 12) ** 2) / 12
    assert best["gain_low"] == pytest.approx(
        middle - 1.96 * variance**0.5, abs=1e-4
    )
    assert (best["before_low"], best["before_high"]) == pytest.approx(
        (0.0179, 0.4042), abs=1e-4
    )
    assert (best["after_low"], best["after_high"]) == pytest.approx(
        (0.3968, 0.8922), abs=1e-4
    )
    assert second["gain"] == pytest.approx(0.1)
    assert second["p_value"] == 1.0
    assert (second["format_ok_before"], second["format_ok_after"]) == (
        0.1,
        0.5,
    )
    assert (second["seconds"], second["peak_memory_gib"]) == (4.0, 0.75)
    assert second["tokens_after"] == 10


def test_between_equals_the_better_tagged_comes_first(tmp_path):
    base = graded("----")
    for rate, format_ok in ((1e-2, "+---"), (1e-3, "+++-"), (1e-4, "++--")):
        written(tmp_path, rate, base, graded("++--", format_ok=format_ok))
    found = grid.load(tmp_path)
    assert [run.settings.learning_rate for run in found.done] == [
        1e-3, 1e-4, 1e-2,
    ]  # fmt: skip


def test_the_verdict_when_two_runs_differ(tmp_path):
    base = graded("-" * 12)
    written(tmp_path, 1e-3, base, graded("+" * 10 + "--"))
    written(tmp_path, 1e-4, base, graded("-" * 10 + "+-"))
    told = grid.load(tmp_path).verdict()
    assert told.startswith(
        "Of the best two, pocket-qwen lr=0.001 and pocket-qwen lr=0.0001, "
        "the first is better: they answer 11 of 12 questions differently, "
        "10 to 1"
    )
    assert f"p = {2 * (1 + 11) / 2**11:.2g}" in told


def test_the_verdict_when_two_runs_can_not_be_told_apart(tmp_path):
    base = graded("-" * 12)
    written(tmp_path, 1e-3, base, graded("+++++++-----"))
    written(tmp_path, 1e-4, base, graded("-++++++-----"))
    told = grid.load(tmp_path).verdict()
    assert "can't be told apart" in told
    assert "1 of 12 questions differently, 1 to 0" in told
    assert "p = 1)" in told


def test_warnings_tell_what_spoils_a_run(tmp_path):
    base = graded("+-")
    good, bad = graded("++"), graded("+-")
    written(tmp_path, 1e-2, base, good, ["1,1,0.2,0.8", "1,1,0.2,0.8"])
    written(tmp_path, 1e-3, base, bad, ["1,1,0.9,0.7", "1,1,0.5,0.7"])
    written(tmp_path, 1e-4, base, bad, ["1,1,0.0,0.9", "1,1,0.1,0.9"])
    written(tmp_path, 1e-5, base, bad, ["1,1,0,0,0.1", "1,1,0,0,0.3"])
    told = sorted(grid.load(tmp_path).warnings())
    assert len(told) == 3
    assert told[0].startswith("pocket-qwen lr=0.0001: in 90% of its groups")
    assert told[1].startswith(
        "pocket-qwen lr=0.001: 70% of its completions were cut at 256 tokens"
    )
    assert "raise MAX_COMPLETION_LENGTH" in told[1]
    assert told[2].startswith(
        "pocket-qwen lr=1e-05: 20% of its completions could not be graded"
    )


def test_truncation_in_a_real_run_is_told(whole):
    """Eight tokens are hardly ever enough for the tiny models."""
    told = whole.warnings()
    for run in whole.runs:
        share = run.metrics["clipped_ratio"].mean()
        assert share > 0.8
        words = f"{share:.0%} of its completions"
        assert [text for text in told if words in text]
    assert training.METRICS["clipped_ratio"] == "completions/clipped_ratio"


# --- One run outside of a grid ----------------------------------------------


def test_one_run_takes_its_directory(quick, task, tmp_path):
    """The record of a grid's run, and whoever opens it again goes on."""
    folder = tmp_path / "new" / "run"
    run = grid.open_run(quick, task, folder)
    assert (run.settings, run.directory) == (quick, folder)
    record = json.loads((folder / "settings.json").read_text())
    [planned] = plan.plan([quick], task, tmp_path / "grid").values()
    assert record == planned
    grid.open_run(quick, task, folder)
    starts = json.loads((folder / "environment.json").read_text())
    assert len(starts) == 2


def test_another_runs_directory_is_left_alone(
    quick, tiny_splits, task, tmp_path
):
    folder = tmp_path / "run"
    typo = dataclasses.replace(quick, learning_rate=3e-3)
    grid.open_run(typo, task, folder)
    # Nothing has come of that one, so its directory is free.
    grid.open_run(quick, task, folder)
    (folder / "metrics.csv").write_text("step\n")
    before = files_of(folder)
    other = dataclasses.replace(quick, learning_rate=2e-3, seed=7)
    with pytest.raises(LabError, match="differs in learning_rate, seed"):
        grid.open_run(other, task, folder)
    with pytest.raises(LabError, match="differs in reward_fing.*, rewards"):
        grid.open_run(quick, grid.Task(tiny_splits, [constant]), folder)
    assert files_of(folder) == before


def test_a_first_start_that_was_killed_can_be_done_again(
    quick, task, tmp_path
):
    (tmp_path / "settings.json.part").write_text("{")
    grid.open_run(quick, task, tmp_path)


@pytest.mark.parametrize("text", ['{"mine": 1}', "[1]"])
def test_settings_of_something_else_are_left_alone(
    quick, task, tmp_path, text
):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(LabError, match="files that are not of a run"):
        grid.open_run(quick, task, tmp_path)
    assert (tmp_path / "settings.json").read_text() == text


def test_a_run_takes_no_strange_directory(quick, task, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    before = files_of(tmp_path)
    with pytest.raises(LabError, match="files that are not of a run"):
        grid.open_run(quick, task, tmp_path)
    with pytest.raises(LabError, match="is a file, but"):
        grid.open_run(quick, task, tmp_path / "thesis.txt")
    assert files_of(tmp_path) == before


def test_a_run_is_held_until_its_process_ends(quick, task, tmp_path):
    folder = tmp_path / "run"
    grid.open_run(quick, task, folder)
    program = (
        "import filelock\n"
        f"filelock.FileLock({str(folder / 'run.lock')!r}).acquire(timeout=0)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    assert "could not be acquired" in other.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    held = subprocess.Popen(
        [
            sys.executable, "-uc",
            f"import filelock; l = filelock.FileLock({str(elsewhere)!r} + "
            "'/run.lock'); l.acquire(); print('held'); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert held.stdout.readline() == "held\n"
        with pytest.raises(LabError, match="Another process is training"):
            grid.open_run(quick, task, elsewhere)
        assert [path.name for path in elsewhere.iterdir()] == ["run.lock"]
    finally:
        held.communicate("\n")
    grid.open_run(quick, task, elsewhere)


# --- What a grid learns from ------------------------------------------------


def test_a_grid_takes_latex(tiny_qwen, tmp_path):
    """The rewards and the problems of lesson 2, at two rates."""
    splits = load_splits("pocket_latex", train_rows=4, eval_rows=3, seed=3)
    formulas = [r"So $\boxed{x^2 + 1}$.", *splits.eval["answer"][1:]]
    held_out = splits.eval.remove_columns("answer")
    splits = dataclasses.replace(
        splits, eval=held_out.add_column("answer", formulas)
    )
    settings = quick_settings(tiny_qwen, max_steps=1)
    runs = grid.expand(settings, learning_rate=[1e-3, 2e-3])
    numbers = grid.Task(splits, rewards.COOKBOOK)
    with pytest.raises(LabError, match="reference answers can.t be compared"):
        grid.check(runs, numbers, tmp_path)
    latex = grid.Task(splits, rewards.COOKBOOK, evaluation.LATEX)
    found = grid.run(runs, latex, tmp_path)
    found.raise_failures()
    assert len(found.leaderboard()) == 2
    for run in found.runs:
        golds = [answer.gold for answer in run.evaluation.answers]
        assert golds == formulas


def test_sampled_runs():
    base = RunSettings(model="pocket-qwen", learning_rate=1e-3)
    rates = grid.log_uniform(1e-5, 1e-3)

    def runs(n: int, seed: int) -> list[RunSettings]:
        return grid.sample(
            base, n, seed, learning_rate=rates, lora_r=[8, 16, 32]
        )

    found = runs(200, 1)
    assert found == runs(200, 1) and found[:5] == runs(5, 1)
    assert found != runs(200, 2)
    assert all(1e-5 <= run.learning_rate <= 1e-3 for run in found)
    assert {run.lora_r for run in found} == {8, 16, 32}
    # Each order of magnitude as often: a binomial, five deviations wide.
    low = sum(run.learning_rate < 1e-4 for run in found)
    assert abs(low - 100) < 5 * (200 / 4) ** 0.5
    assert len({(run.learning_rate, run.lora_r) for run in found}) == 200


def test_what_can_not_be_sampled():
    base = RunSettings(model="pocket-qwen", learning_rate=1e-3)
    with pytest.raises(LabError, match="2 different runs were found, not 3"):
        grid.sample(base, 3, 1, lora_r=[8, 16])
    with pytest.raises(LabError, match="no setting 'rate'"):
        grid.sample(base, 3, 1, rate=[8, 16])
    for bounds in ((0, 1), (2, 1)):
        with pytest.raises(LabError, match="type two bounds"):
            grid.log_uniform(*bounds)


# --- How many processes -----------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "gib", "is_gpu", "runs", "workers"),
    [
        (4, 1000.0, False, 3, 3),  # no more than there are runs
        (2, 1000.0, False, 3, 2),  # nor cores
        (4, 1000.0, True, 3, 1),  # a GPU trains one at a time
        (4, 0.1, False, 3, 1),
    ],
)
def test_as_many_processes_as_fit(
    monkeypatch, tiny_qwen, cores, gib, is_gpu, runs, workers
):
    device = memory.Device("pretended", gib, is_gpu)
    monkeypatch.setattr(memory, "device_memory", lambda: device)
    monkeypatch.setattr(environment, "usable_cores", lambda: cores)
    settings = [
        quick_settings(tiny_qwen, seed=seed) for seed in range(runs - 1)
    ]
    unknown = quick_settings("nobody/no-such-model")
    assert execute.fitting_workers([*settings, unknown]) == workers


def test_the_memory_is_divided_among_processes(monkeypatch, tiny_qwen):
    """Each has room for the largest run, and a tenth is left alone."""
    one = quick_settings(tiny_qwen, optimizations=())
    needed = memory.resolve(one, execute.PROMPT_TOKENS).memory
    monkeypatch.setattr(environment, "usable_cores", lambda: 8)
    for times, workers in ((2.9, 2), (3.1, 3)):
        device = memory.Device("pretended", times * needed / 0.9, False)
        monkeypatch.setattr(memory, "device_memory", lambda d=device: d)
        assert execute.fitting_workers([one] * 8) == workers
