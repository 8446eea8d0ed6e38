"""The arena as a user meets it: from a data set to an answer, and every no."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import filelock
import pandas as pd
import psutil
import pytest
import yaml

from grpo_lab.arena import (
    LocalArena,
    client,
    job,
    manifest,
    records,
    store,
)
from grpo_lab.arena import experiment as experiments
from grpo_lab.arena.store import Store
from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json
from grpo_lab.pocket import problems
from rewards.batch import RewardError

REWARD = '''
def reward(question, answer, completion):
    """1 for the answer in its tags, and some for other letters."""
    gold = answer.split("####")[-1].strip()
    said = completion.partition("<answer>")[2].partition("</answer>")[0]
    return float(said.strip() == gold) + 0.001 * len(set(completion))
'''

TUTORIALS_REWARD = r"""
import re


def reward(question: str, answer: str, completion: str) -> float:
    gold = first_number(answer.split("####")[-1])
    block = re.search(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    right = block is not None and first_number(block[1]) == gold
    opened = "<think>" + completion.strip()
    shape = r"<think>.*?</think>\n<answer>.*?</answer>"
    return float(right) + float(bool(re.fullmatch(shape, opened, re.DOTALL)))


def first_number(text: str) -> str | None:
    found = re.search(r"-?[\d,]+", text)
    return found[0].replace(",", "") if found else None
"""
"""In the form of the tutorial's reward.py: two parts, both as it has them."""


def questions(folder: Path, count: int) -> Path:
    """A file of problems in GSM8K's form."""
    file = folder / "questions.jsonl"
    made = problems.sample(count, held_out=True, seed=1)
    file.write_text("".join(json.dumps(one.row()) + "\n" for one in made))
    return file


def small(model, **changes) -> dict:
    """A manifest of a few seconds: three generations of two steps."""
    values = {
        "algorithm": {
            "name": "GRPO",
            "batch_size": 2,
            "group_size": 2,
            "lr": 1e-3,
            "beta": 0.01,
            "max_output_tokens": 8,
        },
        "environment": {"name": "gsm8k", "fitness_rows": 6, "test_rows": 6},
        "training": {"max_steps": 48, "evo_steps": 2, "pop_size": 2},
        "mutation": {
            "rand_seed": 3,
            "probabilities": {"rl_hp_mut": 1.0},
            "rl_hp_selection": {"lr": {"min": 1e-4, "max": 1e-2}},
        },
        "network": {
            "pretrained_model_name_or_path": str(model),
            "max_context_length": 512,
            "lora_config": {"lora_r": 4, "lora_alpha": 8},
        },
    }
    for path, value in changes.items():
        section, _, key = path.partition("__")
        values[section] = values[section] | {key: value}
    return values


@pytest.fixture
def arena(tmp_path) -> LocalArena:
    """An arena with a data set and a project; no job is ever started."""
    return furnished(tmp_path)


def furnished(folder: Path, rows: int = 40) -> LocalArena:
    arena = LocalArena(folder / "arena")
    arena.create_dataset(
        "gsm8k",
        "reasoning",
        column_mapping={"question": "question", "answer": "answer"},
        file=questions(folder, rows),
    )
    arena.create_project("GSM8K Tutorial", None, llm_based=True)
    return arena


@pytest.fixture
def reward_file(tmp_path) -> Path:
    return written(tmp_path, REWARD)


def written(folder: Path, text: str, name: str = "reward.py") -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return file


@pytest.fixture
def no_job(monkeypatch):
    """What would be started is noted instead."""
    started = []
    monkeypatch.setattr(job, "start", lambda folder: started.append(folder))
    return started


def everything_in(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if "arena.sqlite" not in path.name
    )


# --- The registry -----------------------------------------------------------


def test_a_name_is_taken_once(arena, tmp_path):
    before = everything_in(arena.home)
    for call in (
        lambda: arena.create_project("GSM8K Tutorial"),
        lambda: arena.create_dataset(
            "gsm8k",
            "reasoning",
            column_mapping={"question": "question", "answer": "answer"},
            file=questions(tmp_path, 5),
        ),
    ):
        with pytest.raises(LabError, match="there already, and nothing"):
            call()
    assert everything_in(arena.home) == before
    assert arena.list_datasets()[0]["rows"] == 40


@pytest.mark.parametrize(
    "name", ["", "../up", "a/b", ".hidden", "x" * 81, "a\nb", "end.", "ä"]
)
def test_a_name_becomes_a_folder_so_it_must_be_one(arena, name):
    with pytest.raises(LabError, match="can't be the name of a project"):
        arena.create_project(name)


def test_an_unknown_name_is_told_with_the_nearest(arena):
    with pytest.raises(LabError, match="no project 'GSM8K Tutorials'.*Type"):
        arena.set_default_project("GSM8K Tutorials")
    with pytest.raises(LabError, match="no experiment 'x'.*submit_experiment"):
        arena.list_checkpoints("x")


def test_the_first_project_is_the_default_until_another_is(arena):
    arena.create_project("second", None, llm_based=True)
    default = [one["name"] for one in arena.list_projects() if one["default"]]
    assert default == ["GSM8K Tutorial"]
    arena.set_default_project("second")
    default = [one["name"] for one in arena.list_projects() if one["default"]]
    assert default == ["second"]


def test_state_of_a_newer_version_is_left_alone(arena):
    database = sqlite3.connect(arena.home / "arena.sqlite")
    with database:
        database.execute(f"PRAGMA user_version = {store.VERSION + 1}")
    database.close()
    with pytest.raises(LabError, match="newer version .* nothing in it"):
        LocalArena(arena.home)


def test_a_broken_registry_is_told(tmp_path):
    (tmp_path / "arena.sqlite").write_text("no database at all" * 100)
    with pytest.raises(LabError, match="can't be used: .*not a database"):
        LocalArena(tmp_path)


def test_the_registry_outlives_the_process_and_a_move(arena, tmp_path):
    moved = tmp_path / "elsewhere"
    arena.home.rename(moved)
    assert LocalArena(moved).dataset_exists("gsm8k")


def test_two_processes_register_one_name_once(tmp_path):
    """Both are told apart by the database, whoever comes first."""
    one, other = Store(tmp_path), Store(tmp_path)
    one.refuse_taken("project", "p")
    other.refuse_taken("project", "p")
    one.add("project", "p", {"by": "one"})
    with pytest.raises(LabError, match="a project that is there already"):
        other.add("project", "p", {"by": "other"})
    assert one.get("project", "p")["by"] == "one"


def test_a_data_set_that_is_used_is_not_deleted(
    arena, reward_file, tiny_qwen, no_job
):
    arena.submit_experiment(small(tiny_qwen), reward_file)
    with pytest.raises(LabError, match="belongs to the experiments gsm8k-v1"):
        arena.delete_dataset("gsm8k")
    arena.delete_experiment("gsm8k-v1")
    arena.delete_dataset("gsm8k")
    assert everything_in(arena.home / "datasets") == []
    assert not arena.dataset_exists("gsm8k")


def test_this_machine_is_the_resource(arena):
    [one] = arena.list_resources()
    assert one["id"] in ("local-cpu", "local-gpu")
    assert one["nodes"] == 1 and one["memory_gib"] > 0


# --- What is refused before anything starts ---------------------------------


BAD_REWARDS = {
    "does not import": ("import nothing_of_this_name", "nothing_of_this"),
    "no Python": ("def reward(:", "no valid Python"),
    "hangs": (
        "def reward(question, answer, completion):\n    while True: pass",
        "timeout",
    ),
    "None": (
        "def reward(question, answer, completion): return None",
        "gives a number",
    ),
    "NaN": (
        "def reward(question, answer, completion): return float('nan')",
        "is finite",
    ),
    "writes outside": (
        "def reward(question, answer, completion):\n"
        "    open('/tmp/grpo_lab_outside', 'w').write('x')\n"
        "    return 1.0",
        "temporary directory only",
    ),
    "never pays": (
        "def reward(question, answer, completion): return 0.0",
        "pays for right",
    ),
}


@pytest.mark.parametrize("kind", BAD_REWARDS)
def test_a_reward_file_that_teaches_nothing_is_refused(
    arena, tmp_path, tiny_qwen, no_job, monkeypatch, kind
):
    # The check of a file that hangs takes as long as it is given.
    monkeypatch.setattr("rewards.contract.trial.MAX_SECONDS", 3.0)
    text, told = BAD_REWARDS[kind]
    before = everything_in(arena.home)
    with pytest.raises((LabError, RewardError), match=told) as error:
        arena.submit_experiment(
            small(tiny_qwen), written(tmp_path, text), experiment_name="e"
        )
    assert "\n" not in str(error.value)
    assert everything_in(arena.home) == before
    assert no_job == [] and arena.list_experiments() == []
    assert not Path("/tmp/grpo_lab_outside").exists()


def test_a_reward_file_that_prints_is_fine(
    arena, tmp_path, tiny_qwen, no_job, capfd
):
    noisy = REWARD.replace("    gold", "    print('x' * 1000)\n    gold")
    arena.submit_experiment(small(tiny_qwen), written(tmp_path, noisy))
    assert len(no_job) == 1
    assert "xxxx" not in capfd.readouterr().out


def test_a_reward_that_never_pays_can_be_forced(
    arena, tmp_path, tiny_qwen, no_job
):
    text = "def reward(question, answer, completion): return 0.0"
    found = arena.submit_experiment(
        small(tiny_qwen), written(tmp_path, text), force=True
    )
    assert not found.verdicts["pays for right"].passed
    assert len(no_job) == 1


def test_helpers_beside_a_reward_file_are_missed_before_it_starts(
    arena, tmp_path, tiny_qwen, no_job
):
    """The experiment keeps the file alone, so it is proved alone."""
    written(tmp_path, "PAY = 1.0", "my_helper.py")
    text = "import my_helper\n" + REWARD
    with pytest.raises(RewardError, match="my_helper.*the file alone"):
        arena.submit_experiment(small(tiny_qwen), written(tmp_path, text))
    assert no_job == []


def test_grpo_takes_reasoning_only(arena, reward_file, tiny_qwen, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n')
    arena.create_dataset("pairs", "preference", file=file)
    with pytest.raises(LabError, match="reasoning"):
        arena.submit_experiment(
            small(tiny_qwen, environment__name="pairs"), reward_file
        )
    assert arena.list_experiments() == []


WRONG = {
    "a misspelt key": ({"algorithm__beat": 1}, "did you mean algorithm.beta"),
    "a group of one": ({"algorithm__group_size": 1}, "GRPO compares"),
    "no such data": ({"environment__name": "gsm8"}, "Type 'gsm8k'"),
    "no budget": ({"training__max_steps": 3}, "max_steps: 8 or more"),
    "too few rows": ({"environment__fitness_rows": 400}, "fitness_rows"),
    "no such model": (
        {"network__pretrained_model_name_or_path": "pocket-quen"},
        "Type 'pocket-qwen'",
    ),
    "no room": ({"network__max_context_length": 20}, "no room for an answer"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_manifest_that_cannot_run_is_refused(
    arena, reward_file, tiny_qwen, no_job, kind
):
    changes, told = WRONG[kind]
    before = everything_in(arena.home)
    with pytest.raises(LabError, match=told) as error:
        arena.submit_experiment(small(tiny_qwen, **changes), reward_file)
    assert "\n" not in str(error.value)
    assert everything_in(arena.home) == before and no_job == []


def test_a_manifest_that_is_no_yaml_is_refused(arena, reward_file, tmp_path):
    file = tmp_path / "broken.yaml"
    file.write_text("algorithm: {name: GRPO\n  lr: ]")
    with pytest.raises(LabError, match="line 2"):
        arena.submit_experiment(file, reward_file, experiment_name="e")
    assert arena.list_experiments() == []


def test_projects_and_resources_are_checked(arena, reward_file, tiny_qwen):
    arena.create_project("games", None, llm_based=False)
    for values, told in (
        ({"project": "games"}, "not for language models"),
        ({"project": "GSM8K"}, "Type 'GSM8K Tutorial'"),
        ({"resource_id": "huge"}, "this machine is the only one"),
    ):
        with pytest.raises(LabError, match=told):
            arena.submit_experiment(small(tiny_qwen), reward_file, **values)


def test_a_completion_of_ones_own_must_get_a_score(
    arena, tmp_path, tiny_qwen, no_job
):
    picky = REWARD.replace(
        "    gold", "    if completion == 'mine': return None\n    gold", 1
    )
    file = written(tmp_path, picky)
    with pytest.raises(LabError, match="no score for your completion 'mine'"):
        arena.submit_experiment(small(tiny_qwen), file, completion="mine")
    arena.submit_experiment(small(tiny_qwen), file, completion="other")
    assert len(no_job) == 1


def test_a_submission_can_be_repeated_but_not_changed(
    arena, reward_file, tiny_qwen, no_job, tmp_path
):
    """`resume=True` goes on with the same, and refuses another."""
    values = {"experiment_name": "e", "resume": True}
    arena.submit_experiment(small(tiny_qwen), reward_file, **values)
    arena.submit_experiment(small(tiny_qwen), reward_file, **values)
    assert len(no_job) == 2
    with pytest.raises(LabError, match="differs in manifest"):
        arena.submit_experiment(
            small(tiny_qwen, algorithm__lr=2e-3), reward_file, **values
        )
    reward_file.write_text(REWARD + "\n# changed\n")
    with pytest.raises(LabError, match="differs in reward file"):
        arena.submit_experiment(small(tiny_qwen), reward_file, **values)
    with pytest.raises(LabError, match="an experiment that is"):
        arena.submit_experiment(
            small(tiny_qwen), reward_file, experiment_name="e"
        )


def test_a_prompt_is_supplied_for_the_form_that_is_paid(
    arena, tmp_path, tiny_qwen, no_job
):
    think = arena.submit_experiment(
        small(tiny_qwen), written(tmp_path, TUTORIALS_REWARD, "think.py")
    )
    assert "<think>" in think.system_prompt
    tagged = arena.submit_experiment(
        small(tiny_qwen), written(tmp_path, REWARD, "tags.py")
    )
    assert "<reasoning>" in tagged.system_prompt
    own = arena.submit_experiment(
        small(tiny_qwen, environment__system_prompt="Say it."),
        written(tmp_path, REWARD, "own.py"),
    )
    assert own.system_prompt == "Say it."


def test_every_form_has_a_prompt():
    from grpo_lab.prompts import FORM_PROMPTS
    from rewards.contract.probes import FORMS

    assert set(FORM_PROMPTS) == set(FORMS)


# --- How an experiment stands -----------------------------------------------


def test_a_job_that_was_killed_is_seen_at_once(tmp_path):
    write_json(tmp_path / "status.json", {"status": "running", "step": 3})
    found = experiments.status(tmp_path)
    assert found["status"] == "interrupted"
    assert "resume_experiment" in found["reason"] and found["step"] == 3


def test_what_has_ended_stays_as_it_ended(tmp_path):
    write_json(tmp_path / "status.json", {"status": "failed", "reason": "r"})
    assert experiments.status(tmp_path)["status"] == "failed"
    assert experiments.status(tmp_path)["reason"] == "r"


def test_a_job_that_starts_is_not_taken_for_a_dead_one(tmp_path):
    begun = {"status": "queued", "pid": None, "time": time.time()}
    write_json(tmp_path / "status.json", begun)
    assert experiments.status(tmp_path)["status"] == "queued"
    begun["time"] -= experiments.START_SECONDS + 1
    write_json(tmp_path / "status.json", begun)
    assert experiments.status(tmp_path)["status"] == "interrupted"


def test_a_job_is_started_by_one_at_a_time(tmp_path):
    with (
        filelock.FileLock(tmp_path / job.STARTER),
        pytest.raises(LabError, match="is being started right now"),
    ):
        job.start(tmp_path)
    with (
        filelock.FileLock(tmp_path / experiments.LOCK),
        pytest.raises(LabError, match="runs already"),
    ):
        job.start(tmp_path)
    assert not (tmp_path / "status.json").exists()


def test_a_job_that_dies_at_once_leaves_nothing_registered(
    arena, reward_file, tiny_qwen, monkeypatch
):
    monkeypatch.setattr(job, "PROGRAM", "raise SystemExit('no luck')")
    with pytest.raises(LabError, match="ended at once.*no luck"):
        arena.submit_experiment(small(tiny_qwen), reward_file)
    assert arena.list_experiments() == []
    assert everything_in(arena.home / "experiments") == []


def test_lost_files_break_no_list_and_can_be_forgotten(
    arena, reward_file, tiny_qwen, no_job
):
    lost, kept = (
        arena.submit_experiment(small(tiny_qwen), reward_file).name
        for _ in range(2)
    )
    shutil.rmtree(arena.home / "experiments" / lost)
    names = [one["name"] for one in arena.list_experiments()]
    assert names == [lost, kept]
    with pytest.raises(LabError, match="moved or deleted"):
        arena.resume_experiment(lost)
    arena.delete_experiment(lost)
    assert [one["name"] for one in arena.list_experiments()] == [kept]


def test_many_cut_completions_are_warned_of():
    assert job._warning([0.1, 0.2]) == ""
    assert "30% of the last" in job._warning([0.2, 0.4])


def test_other_rows_under_one_name_are_refused(arena, tmp_path):
    mapping = {"question": "question", "answer": "answer"}
    same = questions(tmp_path, 40)
    found = arena.create_dataset(
        "gsm8k", "reasoning", column_mapping=mapping, file=same, exist_ok=True
    )
    assert found["rows"] == 40
    other = questions(tmp_path, 30)
    with pytest.raises(LabError, match="registered with other rows"):
        arena.create_dataset(
            "gsm8k",
            "reasoning",
            column_mapping=mapping,
            file=other,
            exist_ok=True,
        )


def test_verbs_that_need_a_job_or_a_result_say_so(
    arena, reward_file, tiny_qwen, no_job
):
    name = arena.submit_experiment(small(tiny_qwen), reward_file).name
    with pytest.raises(LabError, match="interrupted, so there is no job"):
        arena.stop_experiment(name)
    with pytest.raises(LabError, match="has no checkpoints"):
        arena.deploy_agent(name)
    with pytest.raises(LabError, match="has no result yet"):
        arena.experiment_result(name)
    assert list(arena.experiment_metrics(name).columns) == list(
        records.COLUMNS
    )
    assert arena.list_inference_deployments() == []


def test_metrics_do_not_replace_a_file_of_another_kind(
    arena, reward_file, tiny_qwen, no_job, tmp_path
):
    name = arena.submit_experiment(small(tiny_qwen), reward_file).name
    mine = tmp_path / "mine.csv"
    mine.write_text("my,own,table\n1,2,3\n")
    with pytest.raises(LabError, match="is no file of metrics"):
        arena.download_experiment_metrics(name, mine)
    assert mine.read_text().startswith("my,own")
    first = arena.download_experiment_metrics(name, tmp_path)
    assert first == arena.download_experiment_metrics(name, tmp_path)


def test_an_experiment_can_be_made_longer_but_not_impossible(
    arena, reward_file, tiny_qwen, no_job
):
    name = arena.submit_experiment(small(tiny_qwen), reward_file).name
    folder = arena.home / "experiments" / name
    before = (folder / "experiment.json").read_bytes()
    with pytest.raises(LabError, match="max_steps: 8 or more"):
        arena.resume_experiment(name, max_steps=5)
    with pytest.raises(LabError, match="must lie between"):
        arena.resume_experiment(name, max_steps=10**18)
    assert (folder / "experiment.json").read_bytes() == before
    arena.resume_experiment(name, max_steps=56)
    kept = experiments.Experiment.load(folder).manifest
    assert kept["training"]["max_steps"] == 56


def test_a_job_without_a_number_is_not_this_process():
    """psutil takes no number for the process that asks."""
    client._end(None)


def test_files_of_an_experiment_that_nobody_knows_are_left_alone(
    arena, reward_file, tiny_qwen, no_job
):
    """As after the registry was lost: they may hold a long training."""
    kept = arena.home / "experiments" / "e" / "result.json"
    write_json(kept, {"best": "step_5"})
    with pytest.raises(LabError, match="is there already, although no"):
        arena.submit_experiment(
            small(tiny_qwen), reward_file, experiment_name="e", resume=True
        )
    assert kept.exists() and no_job == []


def test_looking_writes_nothing(arena):
    """So that a full or a read-only disk can still be looked at."""
    before = (arena.home / "arena.sqlite").read_bytes()
    LocalArena(arena.home).list_datasets()
    assert (arena.home / "arena.sqlite").read_bytes() == before
    assert [f.name for f in arena.home.glob("arena.sqlite*")] == [
        "arena.sqlite"
    ]


def test_a_broken_status_hides_no_other_experiment(
    arena, reward_file, tiny_qwen, no_job
):
    name = arena.submit_experiment(small(tiny_qwen), reward_file).name
    folder = arena.home / "experiments" / name
    (folder / "status.json").write_text('{"status": "ru')
    [one] = arena.list_experiments()
    assert (one["name"], one["status"]) == (name, "interrupted")
    (folder / "result.json").write_text("")
    with pytest.raises(LabError, match="result.json is broken"):
        arena.experiment_result(name)


def test_a_machine_is_needed(arena, reward_file, tiny_qwen, no_job):
    with pytest.raises(LabError, match="needs a machine"):
        arena.submit_experiment(small(tiny_qwen), reward_file, num_nodes=0)


# --- The whole way, with real jobs and a real server ------------------------


def wait_until(true, seconds: float = 120.0):
    """Fail where something does not happen."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def lived(tmp_path_factory, tiny_qwen):
    """An experiment that was killed, resumed, stopped and resumed."""
    folder = tmp_path_factory.mktemp("lived")
    arena = furnished(folder)
    file = written(folder, REWARD)
    name = arena.submit_experiment(small(tiny_qwen), file).name

    def step():
        return arena.experiment_status(name)["step"]

    wait_until(lambda: step() >= 2)
    now = arena.experiment_status(name)
    assert now["status"] == "running" and now["heartbeat"] < 30
    with pytest.raises(LabError, match="is running already"):
        arena.resume_experiment(name)
    with pytest.raises(LabError, match="runs. Stop it first"):
        arena.delete_experiment(name)
    os.kill(now["pid"], signal.SIGKILL)
    wait_until(lambda: arena.experiment_status(name)["status"] != "running")
    told = [arena.experiment_status(name)]
    arena.resume_experiment(name)
    wait_until(lambda: step() >= 4)
    told.append(arena.stop_experiment(name))
    arena.resume_experiment(name)
    told.append(arena.wait_for_experiment(name))
    return arena, name, told, file


@pytest.mark.lesson
def test_a_killed_and_a_stopped_job_are_gone_on_with(lived):
    arena, name, told, _ = lived
    assert [now["status"] for now in told] == [
        "interrupted", "stopped", "done",
    ]  # fmt: skip
    steps = arena.experiment_metrics(name)
    assert not steps.duplicated(["step", "member"]).any()
    assert steps.groupby("step").size().tolist() == [2] * 6
    with pytest.raises(LabError, match="Type max_steps=56 or more"):
        arena.resume_experiment(name, max_steps=48)
    with pytest.raises(LabError, match="is done. To train it further"):
        arena.resume_experiment(name)
    kept = pd.read_csv(arena.home / "experiments" / name / "metrics.csv")
    assert len(kept) == len(steps)


@pytest.mark.lesson
def test_its_lineage_is_that_of_an_experiment_without_accidents(
    lived, tiny_qwen
):
    arena, name, _, file = lived
    whole = arena.submit_experiment(small(tiny_qwen), file).name
    last = arena.submit_experiment(small(tiny_qwen), file, control=True).name
    assert arena.experiment_status(last)["status"] == "queued"
    assert arena.wait_for_experiment(whole)["status"] == "done"
    pd.testing.assert_frame_equal(
        arena.experiment_lineage(whole), arena.experiment_lineage(name)
    )
    # the control waited for its turn, and has the same budget
    assert arena.wait_for_experiment(last)["status"] == "done"
    spent = [
        arena.experiment_metrics(one)["completions"].max()
        for one in (whole, last)
    ]
    assert spent == [48, 48]
    assert set(arena.experiment_metrics(last)["member"]) == {0}


@pytest.mark.lesson
def test_the_best_is_deployed_asked_killed_and_asked_again(lived):
    arena, name, _, _ = lived
    best = arena.list_checkpoints(name)[0]
    found = arena.deploy_agent(name)
    try:
        assert found["checkpoint"] == best["name"]
        assert found["status"] == "serving"
        assert found["url"].startswith("http://127.0.0.1:")
        assert found["agreement"]["questions"] == 6
        with arena.open_inference_agent(name) as agent:
            said = agent.generate("What is 3 + 4?", max_new_tokens=6)
            streamed = list(agent.generate_stream("What is 3 + 4?", 6))
        assert "".join(streamed) == said.results[0].completion
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(LabError, match="in use"):
                arena.deploy_agent(name, port=taken.getsockname()[1])
        # which left the deployment as it was
        assert arena.list_inference_deployments()[0]["pid"] == found["pid"]
        os.kill(found["pid"], signal.SIGKILL)
        wait_until(
            lambda: arena.list_inference_deployments()[0]["status"] == "down"
        )
        # another process of another day knows of it, and starts it again
        with LocalArena(arena.home).open_inference_agent(name) as agent:
            again = agent.generate("What is 3 + 4?", max_new_tokens=6)
        assert again.results == said.results
    finally:
        arena.stop_deployment(name)
    [listed] = arena.list_inference_deployments()
    assert (listed["status"], listed["pid"]) == ("down", None)
    with pytest.raises(LabError, match="has no checkpoint 'step_5'"):
        arena.deploy_agent(name, checkpoint="step_5")
    with pytest.raises(LabError, match="is deployed. Delete the"):
        arena.delete_experiment(name)
    arena.delete_deployment(name)
    assert everything_in(arena.home / "deployments") == [f".{name}.lock"]


@pytest.mark.lesson
def test_two_jobs_of_one_experiment_do_not_train(lived):
    """The second notices the lock of the first, and ends."""
    arena, name, _, _ = lived
    folder = arena.home / "experiments" / name
    with filelock.FileLock(folder / experiments.LOCK):
        second = subprocess.run(
            [sys.executable, "-c", job.PROGRAM, str(folder)],
            capture_output=True,
            text=True,
        )
    assert second.returncode == 3
    assert "Another job" in second.stderr
    assert read_json(folder / "status.json")["status"] == "done"


@pytest.mark.lesson
def test_a_failure_is_told_with_its_reason(tmp_path, tiny_qwen):
    """Its data set was deleted by hand after the submission."""
    arena = furnished(tmp_path)
    file = written(tmp_path, REWARD)
    first = arena.submit_experiment(small(tiny_qwen), file).name
    arena.stop_experiment(first)
    (arena.home / "datasets" / "gsm8k" / "train.jsonl").unlink()
    arena.resume_experiment(first)
    now = arena.wait_for_experiment(first)
    assert now["status"] == "failed"
    assert "train.jsonl" in now["reason"] and "\n" not in now["reason"]
    wait_until(lambda: not runs(now["pid"]))


@pytest.mark.lesson
def test_the_tutorials_files_run_with_a_pocket_model(tmp_path):
    """Its manifest, value for value but for the model and the budget."""
    arena = furnished(tmp_path, 400)
    text = manifest.PUBLISHED.replace("100_000", "576")
    text = text.replace("Qwen/Qwen2.5-0.5B-Instruct", "pocket-qwen")
    file = tmp_path / "gsm8k_grpo.yaml"
    file.write_text(text)
    found = arena.submit_experiment(
        manifest=file,
        reward_file=written(tmp_path, TUTORIALS_REWARD),
        resource_id="arena-medium",
        num_nodes=2,
        project="GSM8K Tutorial",
        experiment_name="gsm8k-grpo-v1",
    )
    warned = {one.path for one in found.findings if one.level == "warning"}
    assert {
        "algorithm.max_output_tokens",
        "network.lora_config.lora_dropout",
        "environment.system_prompt",
        "resource_id",
        "num_nodes",
    } <= {path.split(" ")[0] for path in warned}
    noted = {one.path for one in found.findings if one.level == "note"}
    assert "algorithm.calc_position_embeddings" in " ".join(noted)
    assert "<think>" in found.system_prompt
    now = arena.wait_for_experiment("gsm8k-grpo-v1")
    assert now["status"] == "done", now["reason"]
    lineage = arena.experiment_lineage("gsm8k-grpo-v1")
    assert lineage["generation"].max() == 1
    given = yaml.safe_load(text)
    settings = read_json(
        arena.home / "experiments/gsm8k-grpo-v1/members/000/settings.json"
    )
    for name, value in {
        "learning_rate": given["algorithm"]["lr"],
        "beta": given["algorithm"]["beta"],
        "num_generations": 8,
        "completions_per_step": 48,
        "temperature": 0.9,
        "max_grad_norm": 0.1,
        "lora_r": 16,
        "lora_alpha": 64,
        "lora_dropout": 0.05,
        "seed": 42,
    }.items():
        assert settings[name] == value, name
