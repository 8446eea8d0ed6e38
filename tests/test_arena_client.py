"""The arena as a user meets it: from a data set to an answer, and every no."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import filelock
import pandas as pd
import pytest
import yaml
from lessons import is_alive, wait_until

from grpo_lab.arena import LocalArena, job, manifest, records
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
    arena.create_dataset("gsm8k", "reasoning", file=questions(folder, rows))
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
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# --- The registry -----------------------------------------------------------


def test_a_name_is_taken_once(arena, tmp_path):
    before = everything_in(arena.home)
    for call in (
        lambda: arena.create_project("GSM8K Tutorial"),
        lambda: arena.create_dataset(
            "gsm8k", "reasoning", file=questions(tmp_path, 5)
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
    arena.create_project("a second", None, llm_based=True)

    def default():
        marked = [one for one in arena.list_projects() if one["default"]]
        return [one["name"] for one in marked]

    assert default() == ["GSM8K Tutorial"]
    arena.set_default_project("a second")
    assert default() == ["a second"]


def test_the_agent_to_ask_where_none_is_named(tmp_path):
    arena = LocalArena(tmp_path)
    assert arena.default_agent() is None
    for name, default in (("a", "a"), ("b", None)):
        arena.store.put("deployment", name, server=None)
        assert arena.default_agent() == default
    arena.set_default_agent("b")
    assert arena.default_agent() == "b"
    arena.delete_deployment("b")
    assert arena.default_agent() == "a"


def test_the_registry_outlives_a_move_and_looking_writes_nothing(
    arena, tmp_path
):
    """So that a full or a read-only disk can still be looked at."""
    moved = tmp_path / "elsewhere"
    arena.home.rename(moved)
    before = everything_in(moved)
    found = LocalArena(moved)
    assert found.list_datasets()[0]["name"] == "gsm8k"
    assert found.list_projects() and not found.list_experiments()
    assert everything_in(moved) == before


AT_ONCE = """
import sys
from grpo_lab.arena.store import Store
from grpo_lab.errors import LabError
for number in range(50):
    try:
        with Store(sys.argv[1]).new("project", f"p{number}") as new:
            (new[0] / "file").write_text(sys.argv[2])
            new[1]["by"] = sys.argv[2]
        print(number)
    except LabError as error:
        assert "is there already" in str(error), error
"""


def test_of_those_that_take_one_name_at_once_one_wins(tmp_path):
    """Three processes; none sees the others when it begins."""
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", AT_ONCE, str(tmp_path), name],
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "abc"
    ]
    won = [number for one in racing for number in one.communicate()[0].split()]
    assert [one.returncode for one in racing] == [0, 0, 0]
    assert sorted(map(int, won)) == list(range(50))
    for record in Store(tmp_path).all("project"):
        file = tmp_path / "projects" / record["name"] / "file"
        assert file.read_text() == record["by"]
    assert not list((tmp_path / "projects").glob(".*"))


def test_what_is_not_registered_leaves_nothing(tmp_path):
    """Whatever it fails at; and a kill leaves only what nobody lists."""
    registry = Store(tmp_path)
    for error in (OSError(28, "No space left"), KeyboardInterrupt()):
        with (
            pytest.raises((LabError, KeyboardInterrupt)),
            registry.new("project", "p") as (folder, _),
        ):
            (folder / "half").touch()
            raise error
    assert everything_in(tmp_path) == ["projects"]
    killed = tmp_path / "projects" / ".p.7.part"
    write_json(killed / "record.json", {"created": 1.0})
    assert registry.all("project") == []
    assert not registry.has("project", "p")


def test_a_kill_while_a_name_is_registered(tmp_path):
    """A process that is killed at the last step before it is there."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from grpo_lab.arena.store import Store\n"
        "Path.rename = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "with Store(sys.argv[1]).new('project', 'p') as (folder, record):\n"
        "    (folder / 'file').write_text('x')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    registry = Store(tmp_path)
    assert registry.all("project") == []
    with registry.new("project", "p") as (_, record):
        record["by"] = "the next"
    assert registry.get("project", "p")["by"] == "the next"


def test_an_arena_that_can_not_be_kept(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match="can't be kept in .*--home"):
        LocalArena(tmp_path / "file" / "arena")


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


HEAD = "def reward(question, answer, completion): "
# What each refusal names: in the manifest, beside it, or the reward file.
REFUSED = {
    "did you mean algorithm.beta": {"algorithm__beat": 1},
    "GRPO compares": {"algorithm__group_size": 1},
    "Type 'gsm8k'": {"environment__name": "gsm8"},
    "reasoning": {"environment__name": "pairs"},
    "max_steps: 8 or more": {"training__max_steps": 3},
    "fitness_rows": {"environment__fitness_rows": 400},
    "Type 'pocket-qwen'": {
        "network__pretrained_model_name_or_path": "pocket-quen"
    },
    "no room for an answer": {"network__max_context_length": 20},
    "not for language models": {"project": "games"},
    "Type 'GSM8K Tutorial'": {"project": "GSM8K"},
    "this machine is the only one": {"resource_id": "huge"},
    "needs a machine": {"num_nodes": 0},
    "line 2": {"manifest": "algorithm: {name: GRPO\n  lr: ]"},
    "no valid Python": {"text": "def reward(:"},
    "timeout": {"text": HEAD + "\n    while True: pass"},
    "is finite": {"text": HEAD + "return float('nan')"},
    "rewards right answers": {"text": HEAD + "return 0.0"},
    # The experiment keeps the file alone, so it is proved alone.
    "my_helper.*the file alone": {"text": "import my_helper\n" + REWARD},
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_would_not_work_is_refused_before_anything_starts(
    arena, tmp_path, tiny_qwen, no_job, monkeypatch, told
):
    arena.create_project("games", None, llm_based=False)
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "p", "chosen": "c", "rejected": "r"}\n')
    arena.create_dataset("pairs", "preference", file=file)
    written(tmp_path, "PAY = 1.0", "my_helper.py")
    values = dict(REFUSED[told])
    reward_file = written(tmp_path, values.pop("text", REWARD))
    changes = {k: values.pop(k) for k in list(values) if "__" in k}
    values.setdefault("manifest", small(tiny_qwen, **changes))
    before = everything_in(arena.home)
    with pytest.raises((LabError, RewardError), match=told) as error:
        arena.submit_experiment(
            reward_file=reward_file, experiment_name="e", **values
        )
    assert "\n" not in str(error.value)
    assert everything_in(arena.home) == before
    assert no_job == [] and arena.list_experiments() == []


def test_a_reward_that_never_pays_can_be_forced_and_may_print(
    arena, tmp_path, tiny_qwen, no_job, capfd
):
    text = HEAD + "print('x' * 1000); return 0.0"
    file = written(tmp_path, text)
    found = arena.submit_experiment(small(tiny_qwen), file, force=True)
    assert not found.verdicts["rewards right answers"].passed
    assert len(no_job) == 1
    assert "xxxx" not in capfd.readouterr().out


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
    with pytest.raises(LabError, match="is there already"):
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


@pytest.mark.parametrize(
    ("age", "written", "status", "reason"),
    [
        (0, {"status": "running"}, "interrupted", "resume_experiment"),
        (0, {"status": "failed", "reason": "r"}, "failed", "r"),
        # One that starts is not taken for a dead one, at first.
        (0, {"status": "queued", "pid": None}, "queued", ""),
        (61, {"status": "queued", "pid": None}, "interrupted", "ended"),
    ],
)
def test_how_an_experiment_stands_without_a_job(
    tmp_path, age, written, status, reason
):
    values = written | {"step": 3, "time": time.time() - age}
    write_json(tmp_path / "status.json", values)
    found = experiments.status(tmp_path)
    assert (found["status"], found["step"]) == (status, 3)
    assert reason in found["reason"]


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


def test_many_cut_completions_are_warned_of():
    assert job._warning([0.1, 0.2]) == ""
    assert "30% of the last" in job._warning([0.2, 0.4])


def test_other_rows_under_one_name_are_refused(arena, tmp_path):
    values = {"name": "gsm8k", "category": "reasoning", "exist_ok": True}
    found = arena.create_dataset(**values, file=questions(tmp_path, 40))
    assert found["rows"] == 40
    with pytest.raises(LabError, match="registered with other rows"):
        arena.create_dataset(**values, file=questions(tmp_path, 30))


def test_verbs_that_need_a_job_or_a_result_say_so(
    arena, reward_file, tiny_qwen, no_job
):
    name = arena.submit_experiment(small(tiny_qwen), reward_file).name
    with pytest.raises(LabError, match="is interrupted: there is no job"):
        arena.stop_experiment(name)
    with pytest.raises(LabError, match="has no checkpoints"):
        arena.deploy_agent(name)
    with pytest.raises(LabError, match="is interrupted: no result yet"):
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


def test_files_of_an_experiment_that_nobody_knows_are_left_alone(
    arena, reward_file, tiny_qwen, no_job
):
    """As of an older version: they may hold a long training."""
    kept = arena.home / "experiments" / "e" / "result.json"
    write_json(kept, {"best": "step_5"})
    with pytest.raises(LabError, match="is there already"):
        arena.submit_experiment(
            small(tiny_qwen), reward_file, experiment_name="e", resume=True
        )
    assert kept.exists() and no_job == []
    assert arena.list_experiments() == []


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


# --- The whole way, with real jobs and a real server: processes --------


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
    assert now["status"] == "running"
    with pytest.raises(LabError, match="is running: wait"):
        arena.resume_experiment(name)
    with pytest.raises(LabError, match="is running: stop it first"):
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
    with pytest.raises(LabError, match="is done: give it more.*max_steps=96"):
        arena.resume_experiment(name)
    kept = pd.read_csv(arena.download_experiment_metrics(name))
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
    with pytest.raises(LabError, match="it is deployed; delete"):
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
    wait_until(lambda: not is_alive(now["pid"]))


def tutorial(folder: Path):
    """Its manifest, value for value but for the model and the budget.

    Returns:
        The arena, the manifest's text, and what the submission has found.
    """
    arena = furnished(folder, 400)
    text = manifest.PUBLISHED.replace("100_000", "576")
    text = text.replace("Qwen/Qwen2.5-0.5B-Instruct", "pocket-qwen")
    file = folder / "gsm8k_grpo.yaml"
    file.write_text(text)
    found = arena.submit_experiment(
        manifest=file,
        reward_file=written(folder, TUTORIALS_REWARD),
        resource_id="arena-medium",
        num_nodes=2,
        project="GSM8K Tutorial",
        experiment_name="gsm8k-grpo-v1",
    )
    return arena, text, found


def test_the_tutorials_files_are_accepted(no_job, tmp_path):
    _, _, found = tutorial(tmp_path)
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


@pytest.mark.slow
def test_the_tutorials_files_train_a_pocket_model(tmp_path):
    arena, text, _ = tutorial(tmp_path)
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
