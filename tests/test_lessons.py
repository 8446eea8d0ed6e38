"""The lessons, run to their end as a reader would, most of them cut short."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import psutil
import pytest
from lesson_claims import CLAIMS

from grpo_lab.pocket import WEIGHTS_DIR

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.lesson

SHORT = {"COMPLETIONS_PER_STEP": "16", "MICRO_BATCH": "16", "EVAL_ROWS": "20"}
"""What makes a lesson short enough for `make test`, beside two steps.

What it learns is asked of its committed results and of whole runs, see
`lesson_claims`.
"""


def finished(
    output: Path, code: int = 0, cores=None, profile="pocket", **parameters
):
    """A lite lesson, run headless on a CPU.

    Args:
        output: a new directory, named as the lesson is.
        code: the exit code that is expected.
        cores: how many it may use; on one a grid starts no processes.
        profile, parameters: as the lesson takes them.
    """
    name = output.name
    command = [sys.executable, "-m", "grpo_lab.runner"]
    command += [str(ROOT / "lite" / f"{name}.ipynb"), "--output", str(output)]
    for pair in {"PROFILE": profile, **parameters}.items():
        command += ["-p", *map(str, pair)]
    few = sorted(os.sched_getaffinity(0))[:cores] if cores else []
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=output.parent,
        preexec_fn=(lambda: os.sched_setaffinity(0, few)) if few else None,
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    cells = nbformat.read(output / f"{name}.ipynb", as_version=4).cells
    cells = [cell for cell in cells if cell.cell_type == "code"]
    outputs = [out for cell in cells for out in cell.outputs]
    return SimpleNamespace(
        output=output,
        results=read_json(output / "run" / "results.json"),
        cells=cells,
        outputs=outputs,
        printed="".join(out.get("text", "") for out in outputs),
        told=done.stdout + done.stderr,
    )


def read_json(path: Path):
    return json.loads(path.read_text())


def shows(lesson, pictures: int) -> list[str]:
    """Check that nothing went wrong before a reader's eyes.

    Returns:
        The HTML of the tables.
    """
    assert all(cell.execution_count for cell in lesson.cells)
    assert not any(out.output_type == "error" for out in lesson.outputs)
    assert not any(out.get("name") == "stderr" for out in lesson.outputs)
    data = [out.get("data", {}) for out in lesson.outputs]
    assert sum("image/png" in one for one in data) == pictures
    pages = [one["text/html"] for one in data if "text/html" in one]
    return [page for page in pages if "<table" in page]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("lessons")


@pytest.mark.parametrize("name", CLAIMS)
def test_the_committed_lesson_is_true(name):
    CLAIMS[name](read_json(ROOT / "lite/results" / f"{name}.json"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_the_whole_lesson_is_true(name, tmp_path):
    CLAIMS[name](finished(tmp_path / name).results)


# --- 01 Rewards -------------------------------------------------------------


@pytest.fixture(scope="module")
def rewards_lesson(place):
    """In the full profile: no GPU is asked for."""
    return finished(place / "01_rewards", profile="full")


def test_rewards_lesson_agrees_with_trl(rewards_lesson):
    """To 1e-6: advantages, loss and gradient, for the same numbers."""
    differences = rewards_lesson.results["difference_from_trl"]
    assert set(differences) == {"advantages", "loss", "gradient"}
    assert all(0 <= gap < 1e-6 for gap in differences.values())


def test_rewards_lesson_says_what_its_numbers_say(rewards_lesson):
    """Each claim of the prose on advantages, loss and learning."""
    results = rewards_lesson.results
    assert list(results["rewards"].values()) == [4.0, 3.5, 2.0, 0.0]
    advantages = results["advantages"]
    assert sum(advantages.values()) == pytest.approx(0, abs=1e-6)
    assert min(advantages, key=advantages.get) == "right, no tags"
    assert advantages["right, no tags"] < 5 * advantages["wrong, well tagged"]
    first, unsure, even, turned = results["losses"]
    losses = (first["loss"], even["loss"])
    assert losses == pytest.approx((-0.226, 0), abs=1e-3)
    assert unsure == {**first, "case": unsure["case"]}
    assert turned["loss"] > 0.1
    assert all(row["size of the gradient"] > 0.1 for row in results["losses"])
    learning = results["learning"]
    assert {row["loss"] for row in learning} == {0.0}
    means = [row["mean reward"] for row in learning]
    assert means == sorted(means) and means[0] < 2.4 and means[-1] > 3.8


def test_rewards_lesson_is_fair_to_both_sets(rewards_lesson):
    """Each claim of the prose below the figure."""
    results = rewards_lesson.results
    ours, published = (
        {row["completion"]: row[name] for row in results["totals"]}
        for name in ("ours", "as published")
    )
    honest, empty = "honest, two lines", "empty reasoning"
    assert published[empty] == published["honest, one line"] == 3.5
    assert ours[empty] == ours["honest, one line"] == ours[honest] == 4.0
    assert published[honest] == 3.0
    others = (score for score in published.values() if score != 3.5)
    assert max(others) == 3.0
    for name in ("swapped tags", "unclosed reasoning", "bare number"):
        assert published[honest] - 0.51 < published[name] < published[honest]
        assert ours[name] < 0.5
    for name in ("hedged answer", "copied placeholder"):
        assert published[name] <= 1.0 < ours[name] == 1.5 < 2.0
    assert ours["tag spam"] == 0 < published["tag spam"] < 0.35
    assert ours["answer stuffing"] == published["answer stuffing"] == 2.75
    assert published["very long tail"] < 0 and ours["very long tail"] == 3.0
    assert max(ours.values()) == ours[honest]
    assert results["failed_checks"] == {
        "sloppy": [
            "not for wrong",
            "not for swapped",
            "not for truncated",
            "not for a hedge",
        ],
        "as published": [],
        "ours": [],
    }


def test_rewards_lesson_shows_its_figure(rewards_lesson):
    assert len(shows(rewards_lesson, pictures=1)) == 8


# --- 02 First run -----------------------------------------------------------

TWO_STEPS = SHORT | {"MAX_STEPS": 2, "SHORT_STEPS": 2, "TRAIN_ROWS": 32}


def test_the_first_run(place):
    """Faults are shown, saved answers are the judgement, nothing is pushed."""
    lesson = finished(place / "02_first_grpo_run", **TWO_STEPS)
    results = lesson.results
    assert results["before"]["questions"] == results["after"]["questions"]
    saved = read_json(lesson.output / "run/run/evaluation.json")["answers"]
    right = sum(answer["correct"] for answer in saved)
    assert right / len(saved) == results["after"]["accuracy"]
    refusals = results["refusals"]
    assert set(refusals) == {"TRL", "grpo_lab", "rewards"}
    assert "at least 2" in refusals["TRL"]
    assert "other columns are: none" in refusals["rewards"]
    assert results["faults"]["cookbook pair"] == []
    assert "rewards right answers" in results["faults"]["paid for effort"]
    shows(lesson, pictures=2)
    assert "trainable params: 108,544" in lesson.printed
    assert "Nothing was pushed." in lesson.printed


def test_the_published_values_can_be_run(tmp_path):
    """Two steps of them: other settings, and the lesson still holds."""
    # Numbers as answers and their own prompt: the lesson's tags stay.
    values = TWO_STEPS | {"SETTINGS": "published", "DATA": "pocket"}
    lesson = finished(tmp_path / "02_first_grpo_run", **values)
    used = lesson.results["settings"]
    assert (used["learning_rate"], used["lora_dropout"]) == (1e-5, 0.1)
    assert used["target_modules"] == ["q_proj", "v_proj"]
    assert (used["load_in_4bit"], used["num_generations"]) == (False, 4)
    assert lesson.results["target"] == []
    assert "reasoning process here" in lesson.printed
    assert lesson.results["faults"]["cookbook pair"]


# --- 03 Grid search ---------------------------------------------------------


def test_the_grid_search(place):
    """Held-out questions, all different; figures; where everything is."""
    small = SHORT | {"MAX_STEPS": 2, "TRAIN_ROWS": 16}
    lesson = finished(place / "03_grid_search", **small)
    folders = list((lesson.output / "run" / "grid" / "runs").iterdir())
    assert len(folders) == 4
    for folder in folders:
        answers = read_json(folder / "evaluation.json")["answers"]
        assert len({answer["question"] for answer in answers}) == 20
        settings = read_json(folder / "settings.json")
        assert settings["grid"]["eval_rows"] == len(answers)
    assert len(shows(lesson, pictures=3)) >= 8
    # The end of `make demo`: leaderboard, notebook, HTML, TensorBoard.
    for word in ("pocket-qwen", ".ipynb", ".html", "ensor"):
        assert word in lesson.told


def test_a_failed_run_is_told_and_the_lesson_fails(tmp_path):
    """The other runs go on, the leaderboard stands, the exit is not 0."""
    broken = tmp_path / "broken"
    shutil.copytree(WEIGHTS_DIR / "pocket-llama", broken)
    (broken / "model.safetensors").write_bytes(b"cut short")
    small = SHORT | {"MAX_STEPS": 1, "TRAIN_ROWS": 16, "EVAL_ROWS": 8}
    small |= {"MODELS": f"pocket-qwen,{broken}", "LEARNING_RATES": "1e-3"}
    lesson = finished(tmp_path / "03_grid_search", 1, cores=1, **small)
    runs = lesson.results["runs"]
    assert {run["name"]: run["status"] for run in runs} == {
        "pocket-qwen lr=0.001": "done",
        "broken lr=0.001": "failed",
    }
    assert len(lesson.results["leaderboard"]) == 1
    assert "broken lr=0.001" in lesson.told


@pytest.mark.slow
def test_the_grid_lesson_on_workers(tmp_path):
    """With ENGINE = "ray": on a cluster of its own, on this machine."""
    small = {"MAX_STEPS": 2, "EVAL_ROWS": 10, "ENGINE": "ray"}
    small |= {"MODELS": "pocket-qwen", "CPUS": 2}
    lesson = finished(tmp_path / "03_grid_search", **small)
    logs = list((lesson.output / "run/grid/runs").glob("*/worker.log"))
    assert len(logs) == 2
    for log in logs:
        [start] = read_json(log.with_name("environment.json"))
        assert start["threads"] == 2


# --- 04 Evolve and deploy ---------------------------------------------------


@pytest.fixture(scope="module")
def evolved(place):
    """The arena lesson with short evolutions, server included."""
    small = {"MAX_STEPS": 384, "EVO_STEPS": 1}
    small |= {"FITNESS_ROWS": 20, "TEST_ROWS": 20}
    return finished(place / "04_evolve_and_deploy", **small)


def test_a_population_evolves(evolved):
    """Two members, three evolutions, and the best one is judged."""
    results = evolved.results
    rows = results["lineage"]
    for generation in range(4):
        now = [row for row in rows if row["generation"] == generation]
        assert len(now) == 2 and {row["rank"] for row in now} == {1, 2}
    assert len(rows) == 8
    assert sum(row["parent"] is not None for row in rows) >= 3
    best = results["checkpoints"][0]
    first = results["results"]["gsm8k-grpo-v1"]
    assert first["questions"] == 20 and best["name"] == first["best"]
    assert best["accuracy"] == max(row["accuracy"] for row in rows)
    # On a very fast machine it may have ended before it could be stopped.
    stopped = results["stopped"]
    assert stopped is None or stopped["status"] in ("stopped", "done")


def test_the_verdict_is_that_of_the_answers(evolved):
    """Evolution against control, on questions that selected nothing."""
    pair = evolved.results["evolution_minus_control"]
    folder = evolved.output / "run" / "arena" / "experiments"
    evolution, control = (
        [one["correct"] for one in read_json(file)["answers"]]
        for file in (
            folder / "gsm8k-grpo-v1" / "test" / "best.json",
            folder / "gsm8k-grpo-v1-control" / "test" / "best.json",
        )
    )
    gained = sum(a > b for a, b in zip(evolution, control, strict=True))
    lost = sum(a < b for a, b in zip(evolution, control, strict=True))
    assert (pair["gained"], pair["lost"]) == (gained, lost)
    assert f"{gained} to {lost}" in evolved.printed.replace("\n", " ")


def test_the_mistakes_are_refused_with_the_remedy(evolved):
    told = evolved.results["refusals"]
    assert "algorithm.group_size" in told["a group of one"]
    assert "algorithm.beta" in told["a misspelt key"]
    assert "create_dataset" in told["no such dataset"]
    assert "rewards right answers" in told["a reward that never pays"]
    assert len(told) == 4


def test_the_deployed_policy_answered_and_nothing_runs(evolved):
    """A streamed answer is one text; three figures; the server is gone."""
    answer = evolved.results["answer"]
    assert answer
    deployments = evolved.results["deployments"]
    assert [one["status"] for one in deployments] == ["down"]
    assert left_by(evolved) == []
    shows(evolved, pictures=3)
    texts = [out.get("text", "") for out in evolved.outputs]
    assert sum(answer in text for text in texts) == 2


def left_by(lesson) -> list[int]:
    """Processes that name the lesson's directory or work in its parent."""
    left = []
    for process in psutil.process_iter():
        try:
            words, here = " ".join(process.cmdline()), process.cwd()
        except psutil.Error:
            continue
        if str(lesson.output) in words or here == str(lesson.output.parent):
            left.append(process.pid)
    return left


# --- 05 Scale out -----------------------------------------------------------

STEPS = 8
"""Of each run of the lesson on many workers; a third of the profile's."""


@pytest.fixture(scope="module")
def scaled_out(place):
    """The lesson on many workers, on a cluster pretended on this machine."""
    return finished(place / "05_scale_out", **SHORT, MAX_STEPS=STEPS)


def test_a_worker_was_killed_and_nothing_was_lost(scaled_out):
    """Its run was started twice, and ended as it does in one process."""
    results, runs = scaled_out.results, scaled_out.output / "run/grid/runs"
    [victim] = results["killed"]
    starts = read_json(runs / victim["run"] / "environment.json")
    assert len(starts) == 2
    assert starts[1]["step"] >= victim["steps"] - 1
    assert len({start["process"] for start in starts}) == 2
    assert {start["threads"] for start in starts} == {1}
    same = {"metrics": True, "adapter": True, "answers": True}
    assert results["same_as_here"] == same
    assert {run["status"] for run in results["runs"]} == {"done"}
    processes = set()
    for run in results["runs"]:
        rows = pd.read_csv(runs / run["directory"] / "metrics.csv")
        assert list(rows["step"]) == list(range(1, STEPS + 1))
        starts = read_json(runs / run["directory"] / "environment.json")
        assert len(starts) == (2 if run["directory"] == victim["run"] else 1)
        processes |= {start["process"] for start in starts}
    # Two workers, and a third took the place of the one that was killed.
    assert 3 <= len(processes) <= 5


def test_halving_stopped_runs_and_says_what_it_saved(scaled_out):
    results = scaled_out.results
    saved, halved = results["savings"], results["halved"]
    own = [run for run in halved["runs"] if run["clone"] is None]
    spent = sum(run["completions"] for run in own)
    assert (spent, 4 * STEPS * 16) == (saved["completions"], saved["of"])
    assert saved["share"] == pytest.approx(spent / saved["of"])
    assert results["rungs"] == [STEPS // 4, STEPS // 2]
    stopped = [run for run in own if run["status"] == "stopped"]
    assert len(stopped) <= 3
    for run in stopped:
        assert run["completions"] in [16 * at for at in results["rungs"]]
        assert run["reason"].startswith("stopped by halving after step")


def test_the_clone_went_on_with_its_own_rate(scaled_out):
    halved = scaled_out.results["halved"]
    [clone] = [run for run in halved["runs"] if run["clone"]]
    assert clone["status"] == "done"
    runs = scaled_out.output / "run" / "halved" / "runs"
    parent = read_json(runs / clone["clone"]["parent"] / "settings.json")
    rows = pd.read_csv(runs / clone["directory"] / "metrics.csv")
    assert list(rows["step"])[0] == clone["clone"]["step"] + 1
    rate = clone["settings"]["learning_rate"]
    assert rate != parent["settings"]["learning_rate"]
    steps = clone["settings"]["max_steps"]
    warm = round(clone["settings"]["warmup_share"] * steps)
    left = (steps - rows["step"] + 1) / (steps - warm)
    assert list(rows["learning_rate"]) == pytest.approx(list(rate * left))


def test_the_sweep_ran_both_seeds(scaled_out):
    rows = scaled_out.results["sweep"]
    assert [row["SEED"] for row in rows] == [1, 2]
    assert {row["state"] for row in rows} == {"done"}
    assert all(0 <= row["accuracy"] <= 1 for row in rows)


def test_the_lesson_on_many_workers_shows_what_it_promises(scaled_out):
    """Two timelines, three live tables that filled in, nothing left."""
    tables = shows(scaled_out, pictures=2)
    live = [page for page in tables if "<progress" in page]
    assert len(live) == 3
    assert live[0].count(f"{STEPS}/{STEPS}") == 4
    printed = scaled_out.printed
    assert "raylet" not in printed and "Traceback" not in printed
    assert "metrics: equal\nadapter: equal\nanswers: equal" in printed
    assert "$ python -m grpo_lab.grid runs list" in printed
    assert left_by(scaled_out) == []
