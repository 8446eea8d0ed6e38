"""The lessons, run to their end as a reader would, most of them cut short."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

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


def run_lesson(name: str, output: Path, *options: str):
    """Run a lite lesson headless; returns the finished process."""
    command = [sys.executable, "-m", "grpo_lab.runner"]
    command += [str(ROOT / "lite" / f"{name}.ipynb"), "--output", str(output)]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=output.parent
    )


def finished(name: str, output: Path, *options: str):
    """Results and notebook of a lite lesson that ran to its end on a CPU."""
    done = run_lesson(name, output, "-p", "PROFILE", "pocket", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((output / "run" / "results.json").read_text())
    return results, nbformat.read(output / f"{name}.ipynb", as_version=4)


def committed_results(name: str) -> dict:
    """What the run wrote whose outputs stand in the built lesson."""
    return json.loads((ROOT / "lite/results" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", CLAIMS)
def test_the_committed_lesson_is_true(name):
    CLAIMS[name](committed_results(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_the_whole_lesson_is_true(name, tmp_path):
    results, _ = finished(name, tmp_path / name)
    CLAIMS[name](results)


def outputs_of(notebook) -> list:
    """Everything that the code cells of a notebook have put out."""
    return [
        out
        for cell in notebook.cells
        if cell.cell_type == "code"
        for out in cell.outputs
    ]


def typed(values: dict[str, str]) -> list[str]:
    """Parameters as they are typed behind the name of a lesson."""
    return [word for item in values.items() for word in ("-p", *item)]


@pytest.fixture(scope="module")
def grid_search(tmp_path_factory):
    """The grid-search lesson, each run cut down to two steps."""
    output = tmp_path_factory.mktemp("lessons") / "03"
    small = SHORT | {"MAX_STEPS": "2", "TRAIN_ROWS": "16"}
    done = run_lesson(
        "03_grid_search", output, "-p", "PROFILE", "pocket", *typed(small)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return output, done.stdout


def test_target_is_measured_on_held_out_questions(grid_search):
    """As many as were asked for, all different, none trained on."""
    output, _ = grid_search
    folders = list((output / "run" / "grid" / "runs").iterdir())
    assert len(folders) == 4
    for folder in folders:
        answers = json.loads((folder / "evaluation.json").read_text())
        asked = {answer["question"] for answer in answers["answers"]}
        assert len(asked) == 20
        settings = json.loads((folder / "settings.json").read_text())
        assert settings["grid"]["eval_rows"] == len(answers["answers"])


def test_executed_lesson_shows_what_it_promises(grid_search):
    """Curves as pictures, tables as HTML, no error, no machine path."""
    output, _ = grid_search
    notebook = nbformat.read(next(output.glob("*.ipynb")), as_version=4)
    outputs = outputs_of(notebook)
    kinds = [out.output_type for out in outputs]
    assert "error" not in kinds
    pictures = [out for out in outputs if "image/png" in out.get("data", {})]
    tables = [
        out
        for out in outputs
        if "<table" in "".join(out.get("data", {}).get("text/html", ""))
    ]
    assert len(pictures) == 3
    assert len(tables) >= 8


def test_runner_tells_where_everything_is(grid_search):
    """The end of `make demo`: leaderboard, notebook, HTML, TensorBoard."""
    _, printed = grid_search
    for word in ("pocket-qwen", ".ipynb", ".html", "ensor"):
        assert word in printed


def test_a_failed_run_is_told_and_the_lesson_fails(tmp_path):
    """The other runs go on, the leaderboard stands, the exit is not 0."""
    broken = tmp_path / "broken"
    shutil.copytree(WEIGHTS_DIR / "pocket-llama", broken)
    (broken / "model.safetensors").write_bytes(b"cut short")
    small = {"MAX_STEPS": "1", "TRAIN_ROWS": "16", "EVAL_ROWS": "8"}
    small |= {"COMPLETIONS_PER_STEP": "16", "MICRO_BATCH": "16"}
    small |= {"MODELS": f"pocket-qwen,{broken}", "LEARNING_RATES": "1e-3"}
    output = tmp_path / "03"
    done = run_lesson(
        "03_grid_search", output, "-p", "PROFILE", "pocket", *typed(small)
    )
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((output / "run" / "results.json").read_text())
    by_name = {run["name"]: run for run in results["runs"]}
    assert by_name["pocket-qwen lr=0.001"]["status"] == "done"
    assert by_name["broken lr=0.001"]["status"] == "failed"
    assert len(results["leaderboard"]) == 1
    assert "broken lr=0.001" in done.stdout + done.stderr


@pytest.mark.slow
def test_the_grid_lesson_on_workers(tmp_path):
    """With ENGINE = "ray": on a cluster of its own, on this machine."""
    small = {"MAX_STEPS": "2", "EVAL_ROWS": "10", "ENGINE": "ray"}
    small |= {"MODELS": "pocket-qwen", "CPUS": "2"}
    output = tmp_path / "03"
    done = run_lesson(
        "03_grid_search", output, "-p", "PROFILE", "pocket", *typed(small)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    logs = list((output / "run" / "grid" / "runs").glob("*/worker.log"))
    assert len(logs) == 2
    for log in logs:
        [start] = json.loads(log.with_name("environment.json").read_text())
        assert start["threads"] == 2


@pytest.fixture(scope="module")
def rewards_lesson(tmp_path_factory):
    """The lesson on rewards, in the full profile: no GPU is asked for."""
    output = tmp_path_factory.mktemp("lessons") / "01"
    done = run_lesson("01_rewards", output, "-p", "PROFILE", "full")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((output / "run" / "results.json").read_text())
    notebook = nbformat.read(output / "01_rewards.ipynb", as_version=4)
    return results, notebook


def test_rewards_lesson_agrees_with_trl(rewards_lesson):
    """To 1e-6: advantages, loss and gradient, for the same numbers."""
    results, _ = rewards_lesson
    differences = results["difference_from_trl"]
    assert set(differences) == {"advantages", "loss", "gradient"}
    assert all(0 <= gap < 1e-6 for gap in differences.values())


def test_rewards_lesson_says_what_its_numbers_say(rewards_lesson):
    """Each claim of the prose on advantages, loss and learning."""
    results, _ = rewards_lesson
    assert list(results["rewards"].values()) == [4.0, 3.5, 2.0, 0.0]
    advantages = results["advantages"]
    assert sum(advantages.values()) == pytest.approx(0, abs=1e-6)
    assert min(advantages, key=advantages.get) == "right, no tags"
    assert advantages["right, no tags"] < 5 * advantages["wrong, well tagged"]
    first, unsure, even, turned = results["losses"]
    assert (first["loss"], even["loss"]) == pytest.approx(
        (-0.226, 0), abs=1e-3
    )
    assert unsure == {**first, "case": unsure["case"]}
    assert turned["loss"] > 0.1
    assert all(row["size of the gradient"] > 0.1 for row in results["losses"])
    learning = results["learning"]
    assert {row["loss"] for row in learning} == {0.0}
    means = [row["mean reward"] for row in learning]
    assert means == sorted(means) and means[0] < 2.4 and means[-1] > 3.8


def test_rewards_lesson_is_fair_to_both_sets(rewards_lesson):
    """Each claim of the prose below the figure."""
    results, _ = rewards_lesson
    ours, published = (
        {row["completion"]: row[name] for row in results["totals"]}
        for name in ("ours", "as published")
    )
    honest = "honest, two lines"
    empty = "empty reasoning"
    assert published[empty] == published["honest, one line"] == 3.5
    assert ours[empty] == ours["honest, one line"] == ours[honest] == 4.0
    assert (
        published[honest]
        == 3.0
        == max(
            paid
            for name, paid in published.items()
            if published[empty] != paid
        )
    )
    for name in ("swapped tags", "unclosed reasoning", "bare number"):
        assert published[honest] - 0.51 < published[name] < published[honest]
        assert ours[name] < 0.5
    for name in ("hedged answer", "copied placeholder"):
        assert published[name] <= 1.0 < ours[name] == 1.5 < 2.0
    assert ours["tag spam"] == 0 < published["tag spam"] < 0.35
    assert ours["answer stuffing"] == published["answer stuffing"] == 2.75
    assert published["very long tail"] < 0 and ours["very long tail"] == 3.0
    assert max(ours.values()) == ours[honest]


def test_rewards_lesson_judges_rewards(rewards_lesson):
    """What the reader is told that `check_reward` finds."""
    results, _ = rewards_lesson
    assert results["failed_checks"] == {
        "sloppy": ["not for wrong", "not for swapped", "not for a hedge"],
        "as published": [],
        "ours": [],
    }


def test_rewards_lesson_ran_and_shows_its_figure(rewards_lesson):
    _, notebook = rewards_lesson
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    outputs = outputs_of(notebook)
    kinds = [set(out.get("data", {})) for out in outputs]
    assert sum("image/png" in kind for kind in kinds) == 1
    assert sum("text/html" in kind for kind in kinds) == 6
    assert not any(out.get("name") == "stderr" for out in outputs)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The first run, cut down to two steps."""
    output = tmp_path_factory.mktemp("lessons") / "02"
    small = SHORT | {"MAX_STEPS": "2", "SHORT_STEPS": "2", "TRAIN_ROWS": "32"}
    results, notebook = finished("02_first_grpo_run", output, *typed(small))
    return output, results, notebook


def test_the_first_run_is_judged_by_its_saved_answers(first_run):
    output, results, _ = first_run
    assert results["before"]["questions"] == results["after"]["questions"]
    saved = json.loads((output / "run/run/evaluation.json").read_text())
    right = sum(answer["correct"] for answer in saved["answers"])
    assert right / len(saved["answers"]) == results["after"]["accuracy"]


def test_the_first_run_shows_its_faults(first_run):
    """Those of "what to watch out for" that need no learning."""
    _, results, _ = first_run
    assert set(results["refusals"]) == {"TRL", "grpo_lab", "rewards"}
    assert "at least 2" in results["refusals"]["TRL"]
    assert "other columns are: none" in results["refusals"]["rewards"]
    assert results["faults"]["cookbook pair"] == []
    assert "rewards right answers" in results["faults"]["paid for effort"]


def test_the_first_run_shows_what_it_promises(first_run):
    """Two figures, no error, nothing pushed, few trainable parameters."""
    _, _, notebook = first_run
    outputs = outputs_of(notebook)
    kinds = [set(out.get("data", {})) for out in outputs]
    assert sum("image/png" in kind for kind in kinds) == 2
    printed = "".join(out.get("text", "") for out in outputs)
    assert "trainable params: 108,544" in printed
    assert "Nothing was pushed." in printed


def test_the_published_values_can_be_run(tmp_path):
    """Two steps of them: other settings, and the lesson still holds."""
    small = {"SETTINGS": "published", "MAX_STEPS": "2", "SHORT_STEPS": "2"}
    small |= SHORT | {"TRAIN_ROWS": "32"}
    # number golds and their own prompt: the lesson's tags stay
    small |= {"DATA": "pocket"}
    output = tmp_path / "02"
    done = run_lesson(
        "02_first_grpo_run", output, "-p", "PROFILE", "pocket", *typed(small)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((output / "run" / "results.json").read_text())
    used = results["settings"]
    assert (used["learning_rate"], used["lora_dropout"]) == (1e-5, 0.1)
    assert used["target_modules"] == ["q_proj", "v_proj"]
    assert (used["load_in_4bit"], used["num_generations"]) == (False, 4)
    assert results["target"] == []
    notebook = nbformat.read(next(output.glob("*.ipynb")), as_version=4)
    printed = [out.get("text", "") for out in outputs_of(notebook)]
    assert any("between <think> and" in text for text in printed)


@pytest.fixture(scope="module")
def evolved(tmp_path_factory):
    """The arena lesson with short evolutions, server included."""
    output = tmp_path_factory.mktemp("lessons") / "04"
    small = {"MAX_STEPS": "384", "EVO_STEPS": "1"}
    small |= {"FITNESS_ROWS": "20", "TEST_ROWS": "20"}
    results, notebook = finished("04_evolve_and_deploy", output, *typed(small))
    return output, results, notebook


def test_a_population_evolves(evolved):
    """Two members, three evolutions, and the best one is judged."""
    _, results, _ = evolved
    rows = results["lineage"]
    assert {row["generation"] for row in rows} == {0, 1, 2, 3}
    for generation in range(4):
        now = [row for row in rows if row["generation"] == generation]
        assert len(now) == 2 and {row["rank"] for row in now} == {1, 2}
    assert sum(row["parent"] is not None for row in rows) >= 3
    best = results["checkpoints"][0]
    first = results["results"]["gsm8k-grpo-v1"]
    assert first["questions"] == 20 and best["name"] == first["best"]
    assert best["accuracy"] == max(row["accuracy"] for row in rows)


def test_the_verdict_is_that_of_the_answers(evolved):
    """Evolution against control, on questions that selected nothing."""
    output, results, notebook = evolved
    pair = results["evolution_minus_control"]
    folder = output / "run" / "arena" / "experiments"
    marks = []
    for name in ("gsm8k-grpo-v1", "gsm8k-grpo-v1-control"):
        file = folder / name / "test" / "best.json"
        answers = json.loads(file.read_text())["answers"]
        marks.append([answer["correct"] for answer in answers])
    evolution, control = marks
    gained = sum(a > b for a, b in zip(evolution, control, strict=True))
    lost = sum(a < b for a, b in zip(evolution, control, strict=True))
    assert (pair["gained"], pair["lost"]) == (gained, lost)
    printed = "".join(out.get("text", "") for out in outputs_of(notebook))
    assert f"{gained} to {lost}" in printed.replace("\n", " ")


def test_what_was_stopped_was_gone_on_with(evolved):
    _, results, _ = evolved
    """On a very fast machine it may have ended before it could be stopped."""
    stopped = results["stopped"]
    assert stopped is None or stopped["status"] in ("stopped", "done")


def test_the_mistakes_are_refused_with_the_remedy(evolved):
    _, results, _ = evolved
    told = results["refusals"]
    assert "algorithm.group_size" in told["a group of one"]
    assert "algorithm.beta" in told["a misspelt key"]
    assert "create_dataset" in told["no such dataset"]
    assert "rewards right answers" in told["a reward that never pays"]
    assert len(told) == 4


def test_the_deployed_policy_answered_and_nothing_runs(evolved):
    output, results, _ = evolved
    assert results["answer"]
    assert [one["status"] for one in results["deployments"]] == ["down"]
    left = [
        process.pid
        for process in psutil.process_iter()
        if str(output) in " ".join(_command(process))
    ]
    assert left == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_arena_lesson_shows_what_it_promises(evolved):
    """Three figures, a streamed answer as one text, no error, no warning."""
    _, results, notebook = evolved
    outputs = outputs_of(notebook)
    kinds = [set(out.get("data", {})) for out in outputs]
    assert sum("image/png" in kind for kind in kinds) == 3
    assert not any(out.get("name") == "stderr" for out in outputs)
    texts = [out.get("text", "") for out in outputs]
    assert sum(results["answer"] in text for text in texts) == 2


STEPS = 8
"""Of each run of the lesson on many workers; a third of the profile's."""


@pytest.fixture(scope="module")
def scaled_out(tmp_path_factory):
    """The lesson on many workers, on a cluster pretended on this machine."""
    output = tmp_path_factory.mktemp("lessons") / "05"
    small = SHORT | {"MAX_STEPS": str(STEPS)}
    results, notebook = finished("05_scale_out", output, *typed(small))
    return output, results, notebook


def test_a_worker_was_killed_and_nothing_was_lost(scaled_out):
    """Its run was started twice, and ended as it does in one process."""
    output, results, _ = scaled_out
    [victim] = results["killed"]
    folder = output / "run" / "grid" / "runs" / victim["run"]
    starts = json.loads((folder / "environment.json").read_text())
    assert len(starts) == 2
    assert starts[1]["step"] >= victim["steps"] - 1
    assert len({start["process"] for start in starts}) == 2
    assert {start["threads"] for start in starts} == {1}
    assert results["same_as_here"] == {
        "metrics": True,
        "adapter": True,
        "answers": True,
    }
    assert {run["status"] for run in results["runs"]} == {"done"}
    for run in results["runs"]:
        file = output / "run" / "grid" / "runs" / run["directory"]
        rows = pd.read_csv(file / "metrics.csv")
        assert list(rows["step"]) == list(range(1, STEPS + 1))
        others = json.loads((file / "environment.json").read_text())
        assert len(others) == (2 if run["directory"] == victim["run"] else 1)


def test_two_workers_trained_the_grid(scaled_out):
    """And a third one took the place of the one that was killed."""
    output, _, _ = scaled_out
    processes = {
        start["process"]
        for file in output.glob("run/grid/runs/*/environment.json")
        for start in json.loads(file.read_text())
    }
    assert 3 <= len(processes) <= 5


def test_halving_stopped_runs_and_says_what_it_saved(scaled_out):
    _, results, _ = scaled_out
    saved, halved = results["savings"], results["halved"]
    own = [run for run in halved["runs"] if run["clone"] is None]
    spent = sum(run["completions"] for run in own)
    assert (spent, 4 * STEPS * 16) == (saved["completions"], saved["of"])
    assert results["rungs"] == [STEPS // 4, STEPS // 2]
    stopped = [run for run in own if run["status"] == "stopped"]
    assert len(stopped) <= 3
    for run in stopped:
        assert run["completions"] in [16 * at for at in results["rungs"]]
        assert run["reason"].startswith("stopped by halving after step")
    assert saved["share"] == pytest.approx(spent / saved["of"])


def test_the_clone_went_on_with_its_own_rate(scaled_out):
    output, results, _ = scaled_out
    [clone] = [run for run in results["halved"]["runs"] if run["clone"]]
    assert clone["status"] == "done"
    runs = output / "run" / "halved" / "runs"
    parent = json.loads(
        (runs / clone["clone"]["parent"] / "settings.json").read_text()
    )["settings"]
    rows = pd.read_csv(runs / clone["directory"] / "metrics.csv")
    assert list(rows["step"])[0] == clone["clone"]["step"] + 1
    rate = clone["settings"]["learning_rate"]
    assert rate != parent["learning_rate"]
    steps = clone["settings"]["max_steps"]
    warm = round(clone["settings"]["warmup_share"] * steps)
    left = (steps - rows["step"] + 1) / (steps - warm)
    assert list(rows["learning_rate"]) == pytest.approx(list(rate * left))


def test_the_sweep_ran_both_seeds(scaled_out):
    _, results, _ = scaled_out
    assert [row["SEED"] for row in results["sweep"]] == [1, 2]
    assert {row["state"] for row in results["sweep"]} == {"done"}
    assert all(0 <= row["accuracy"] <= 1 for row in results["sweep"])


def test_the_lesson_on_many_workers_shows_what_it_promises(scaled_out):
    """Two timelines, three live tables that filled in, no word of Ray's."""
    _, _, notebook = scaled_out
    outputs = outputs_of(notebook)
    kinds = [set(out.get("data", {})) for out in outputs]
    assert sum("image/png" in kind for kind in kinds) == 2
    assert not any(out.get("name") == "stderr" for out in outputs)
    pages = [out.get("data", {}).get("text/html", "") for out in outputs]
    live = [page for page in pages if "<progress" in page]
    assert len(live) == 3
    assert live[0].count(f"{STEPS}/{STEPS}") == 4
    printed = "".join(out.get("text", "") for out in outputs)
    assert "raylet" not in printed and "Traceback" not in printed
    assert "metrics: equal\nadapter: equal\nanswers: equal" in printed
    assert "$ python -m grpo_lab.grid runs list" in printed


def test_no_process_of_the_cluster_is_left(scaled_out):
    output, _, _ = scaled_out
    left = [
        process.pid
        for process in psutil.process_iter()
        if _directory(process) == str(output.parent)
    ]
    assert left == []


def _directory(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""
