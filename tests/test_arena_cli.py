"""The arena in a terminal: what is typed, printed, and the exit codes."""

import argparse
import inspect
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path

import filelock
import pandas as pd
import pytest
import yaml

from grpo_lab.arena import cli, job, manifest
from grpo_lab.arena import experiment as experiments
from grpo_lab.arena.client import LocalArena, Submitted
from grpo_lab.arena.experiment import LOCK
from grpo_lab.arena.lint import Finding
from grpo_lab.errors import LabError
from grpo_lab.files import write_json
from rewards import RewardError
from rewards.contract.verdicts import Verdict, Verdicts

ROWS = Path(__file__).parent / "data" / "gsm8k_rows.jsonl"
MAPPING = '{"question": "question", "answer": "answer"}'

REWARD = """\
def reward(question, answer, completion):
    gold = answer.split("####")[-1].strip()
    return float(f"<answer>{gold}</answer>" in completion)
"""

# fmt: off
STATUS = {
    "status": "running", "reason": "", "step": 3, "steps": 8, "generation": 0,
    "member": 1, "reward": 0.25, "seconds_per_step": 1.5,
}
RECORD = {
    "name": "e-1", "created": 1.0, "project": "p", "dataset": "d",
    "control": False,
}
CHECKPOINT = {
    "name": "step_10", "step": 10, "member": 2, "completions": 160,
    "accuracy": 0.5, "low": 0.4, "high": 0.6, "mean_reward": 1.25,
    "size_mb": 0.88,
}
AGREEMENT = {
    "questions": 50, "adapter_correct": 31, "merged_correct": 30,
    "same_text": 48, "worse": False,
}
DEPLOYMENT = {
    "name": "e-1", "checkpoint": "step_10", "agreement": AGREEMENT,
    "status": "serving", "url": "http://127.0.0.1:8001/v1", "pid": 7,
}
FIRST = {
    "generation": 1, "step": 10, "rank": 1, "member": 0, "parent": None,
    "born": 1, "change": "", "learning_rate": 1e-12, "beta": 0.001,
    "accuracy": 0.5, "low": 0.4, "high": 0.6, "mean_reward": float("nan"),
}
LINEAGE = pd.DataFrame(
    [FIRST, FIRST | {"member": 2, "parent": 1, "change": "lr x0.8"}]
).astype({"parent": "Int64"})
SUBMITTED = Submitted(
    name="e-1",
    findings=(Finding("warning", "algorithm.lr", "algorithm.lr is small."),),
    verdicts=Verdicts("mine", "a box", (Verdict("is finite", True, "72"),)),
    system_prompt="Think [bold]first[/bold].",
    plan={"members at a time": 2},
)
DATASET = {
    "name": "gsm8k", "category": "reasoning", "rows": 5,
    "source": "rows.jsonl", "nulls": 1, "unreadable": 2, "repeated": 3,
    "description": "",
}
RESOURCE = {
    "id": "local-cpu", "device": "a CPU", "nodes": 1, "memory_gib": 8.0,
    "free_disk_gib": 9.0,
}
# fmt: on


@dataclass(frozen=True)
class Result:
    """As `serving.Result`, which takes long to import."""

    completion: str
    truncated: bool
    tokens: int


class FakeAgent:
    """Says "12", " + ", "7" and keeps what stdout held before each piece."""

    def __init__(self, truncated: bool = False, breaks: bool = False) -> None:
        self.truncated = truncated
        self.breaks = breaks
        self.seen = []
        self.last = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def generate_stream(self, prompt):
        for piece in ("12", " + ", "7"):
            self.seen.append(sys.stdout.getvalue())
            yield piece
            if self.breaks:
                raise LabError("The server gave no answer.")
        result = Result("12 + 7", self.truncated, 3)
        self.last = types.SimpleNamespace(results=(result,))


class FakeArena:
    """Keeps the calls, bound to the real signatures, and answers them."""

    def __init__(self) -> None:
        self.home = Path("somewhere")
        self.calls = []
        self.agent = FakeAgent()
        self.answers = {
            "create_dataset": DATASET,
            "list_datasets": [DATASET],
            "dataset_exists": True,
            "create_project": {"name": "p"},
            "list_projects": [],
            "list_resources": [RESOURCE],
            "submit_experiment": SUBMITTED,
            "list_experiments": [RECORD | STATUS],
            "watch_experiment": [STATUS, STATUS | {"status": "done"}],
            "stop_experiment": STATUS | {"status": "stopped"},
            "resume_experiment": STATUS,
            "download_experiment_metrics": Path("metrics.csv"),
            "list_checkpoints": [CHECKPOINT],
            "experiment_lineage": LINEAGE,
            "deploy_agent": DEPLOYMENT,
            "list_inference_deployments": [DEPLOYMENT | {"default": True}],
            "default_agent": "e-1",
        }

    def __getattr__(self, verb):
        signature = inspect.signature(getattr(LocalArena, verb))

        def call(*args, **options):
            given = signature.bind(self, *args, **options).arguments
            given.pop("self")
            # What is None was not typed.
            given |= given.pop("cluster", {})
            self.calls.append(
                (verb, {k: v for k, v in given.items() if v is not None})
            )
            if verb == "open_inference_agent":
                return self.agent
            answer = self.answers.get(verb)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call


@pytest.fixture
def fake(monkeypatch) -> FakeArena:
    arena = FakeArena()
    monkeypatch.setattr(cli, "LocalArena", Pretended(arena))
    return arena


class Pretended:
    """In place of the class `LocalArena`: its methods, but one arena."""

    def __init__(self, arena: FakeArena) -> None:
        self.arena = arena

    def __call__(self, home):
        return self.arena

    def __getattr__(self, name):
        return getattr(LocalArena, name)


@pytest.fixture
def home(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("GRPO_LAB_ARENA", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def typed(capsys):
    """Type a line, as text or in words; what it prints."""

    def type_line(*words: str, code: int = 0):
        words = shlex.split(words[0]) if len(words) == 1 else words
        capsys.readouterr()
        try:
            found = cli.main(words)
        except SystemExit as stop:  # from argparse
            found = stop.code
        shown = capsys.readouterr()
        assert found == code, shown.out + shown.err
        return shown

    return type_line


@pytest.fixture
def value(typed):
    """The value of a line with --json."""

    def type_line(*words: str, code: int = 0):
        words = shlex.split(words[0]) if len(words) == 1 else words
        return json.loads(typed("--json", *words, code=code).out)

    return type_line


# --- The lines of the tutorial, and all others ------------------------------

WENG = "Weng earns $12 an hour. How much did she earn in 50 minutes?"
SUBMIT = "experiments submit m.yaml --reward-file r.py"
E = {"experiment_name": "e"}
AGENT = {"deployment_name": "e"}
# fmt: off
LINES = [
    (
        "datasets create gsm8k --category reasoning "
        "--hf-dataset openai/gsm8k --hf-config main --hf-split train "
        f"--column-mapping '{MAPPING}'",
        "create_dataset",
        {
            "name": "gsm8k", "category": "reasoning",
            "column_mapping": MAPPING, "hf_dataset_name": "openai/gsm8k",
            "hf_config": "main", "hf_split": "train",
        },
    ),
    (
        "datasets create d --category sft --file r.csv --description 'my own'",
        "create_dataset",
        {
            "name": "d", "category": "sft", "file": Path("r.csv"),
            "description": "my own",
        },
    ),
    ("datasets list", "list_datasets", {}),
    ("datasets list --search gsm", "list_datasets", {"search": "gsm"}),
    ("datasets exists gsm8k", "dataset_exists", {"name": "gsm8k"}),
    ("datasets delete gsm8k", "delete_dataset", {"name": "gsm8k"}),
    (
        'projects create "GSM8K Tutorial" --llm-based', "create_project",
        {"name": "GSM8K Tutorial", "llm_based": True},
    ),
    (
        "projects create other --no-llm-based --description 'a walker'",
        "create_project",
        {"name": "other", "llm_based": False, "description": "a walker"},
    ),
    ("projects list", "list_projects", {}),
    ("projects set-default p", "set_default_project", {"name": "p"}),
    ("resources list", "list_resources", {}),
    (
        "experiments submit gsm8k_grpo.yaml --reward-file reward.py "
        "--resource-id arena-medium --num-nodes 2 "
        "--project 'GSM8K Tutorial' --experiment-name gsm8k-grpo-v1",
        "submit_experiment",
        {
            "manifest": Path("gsm8k_grpo.yaml"),
            "reward_file": Path("reward.py"), "resource_id": "arena-medium",
            "num_nodes": 2, "project": "GSM8K Tutorial",
            "experiment_name": "gsm8k-grpo-v1",
        },
    ),
    (
        SUBMIT + " --completion 72 --control --force --engine ray --cpus 2",
        "submit_experiment",
        {
            "manifest": Path("m.yaml"), "reward_file": Path("r.py"),
            "completion": "72", "control": True, "force": True,
            "engine": "ray", "cpus": 2.0,
        },
    ),
    ("experiments list", "list_experiments", {}),
    ("experiments watch e", "watch_experiment", E),
    ("experiments stop e", "stop_experiment", E),
    ("experiments resume e", "resume_experiment", E),
    (
        "experiments resume e --max-steps 99 --engine ray --address auto "
        "--gpus 0.5",
        "resume_experiment",
        E | {"max_steps": 99, "engine": "ray", "address": "auto", "gpus": 0.5},
    ),
    (
        "experiments metrics e --output-file metrics.csv",
        "download_experiment_metrics",
        E | {"output_path": Path("metrics.csv")},
    ),
    ("experiments checkpoints e", "list_checkpoints", E),
    ("experiments lineage e", "experiment_lineage", E),
    ("experiments delete e", "delete_experiment", E),
    ("agent deploy e", "deploy_agent", E),
    (
        "agent deploy e --checkpoint step_500 --port 8001", "deploy_agent",
        E | {"checkpoint": "step_500", "port": 8001},
    ),
    ("agent run e", "set_default_agent", AGENT),
    ("agent list", "list_inference_deployments", {}),
    ("agent stop e", "stop_deployment", AGENT),
    ("agent delete e", "delete_deployment", AGENT),
    (f'agent generate e --prompt "{WENG}"', "open_inference_agent", AGENT),
    (
        "agent generate --prompt hi --max-new-tokens 9",
        "open_inference_agent",
        {"deployment_name": "e-1", "max_new_tokens": 9},
    ),
]
# fmt: on


@pytest.mark.parametrize(("text", "verb", "given"), LINES)
def test_a_line_calls_its_verb_and_json_is_one_value(
    fake, typed, text, verb, given
):
    typed(text)
    assert (verb, given) in fake.calls
    json.loads(typed(f"--json {text}").out)


# --- Help -------------------------------------------------------------------


def commands(parser=None, path=()):
    """Every group and verb: the words that lead to it."""
    yield path
    for action in (parser or cli.parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, one in action.choices.items():
                yield from commands(one, (*path, name))


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_help_shows_examples_that_run(
    fake, typed, path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("gsm8k_grpo.yaml").write_text(manifest.EXAMPLE)
    help_text = typed(*path, "--help").out
    assert not re.search(r"None|Args:|Returns:|`\w+_\w+`", help_text)
    shown = help_text.partition("Example:\n")[2].replace("\\\n", "")
    lines = [one for one in shown.splitlines() if one.strip()]
    assert lines
    for one in lines:
        words = shlex.split(one.partition(" > ")[0])
        assert words[:3] == ["python", "-m", "grpo_lab.arena"]
        assert words[3 : 3 + len(path)] == list(path) or path == ()
        typed(*words[3:])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("experiments", "verbs:"),
        ("", "groups:"),
        ("experiments lsit", "invalid choice: 'lsit'"),
        ("datasets create x", "--category"),
        ("agent generate e", "--prompt"),
        (SUBMIT + " --num-nodes two", "invalid int value"),
    ],
)
def test_a_usage_error_is_wrong_input(fake, typed, text, said):
    result = typed(*shlex.split(text), code=2)
    assert said in result.err and not result.out
    assert fake.calls == []


def clean(code: str) -> subprocess.CompletedProcess:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_lists_and_a_stop_load_no_training_library(tmp_path):
    """A process: what it has imported; and --help makes no directory."""
    home = tmp_path / "home"
    (tmp_path / "manifest.yaml").write_text(manifest.EXAMPLE)
    found = clean(
        "import os, sys\n"
        "from grpo_lab.arena import cli\n"
        f"place = ['--home', {str(home)!r}]\n"
        "try: cli.main([*place, 'datasets', 'list', '--help'])\n"
        "except SystemExit: pass\n"
        f"assert not os.path.exists({str(home)!r})\n"
        "for words in ('datasets list', 'projects list', 'experiments list',"
        " 'agent list', 'agent stop x', 'manifest example'):\n"
        "    cli.main([*place, *words.split()])\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pandas'} "
        "& set(sys.modules)))"
    )
    assert found.stdout.splitlines()[-1] == "[]", found.stderr


# --- Errors -----------------------------------------------------------------


@pytest.mark.parametrize("kind", [LabError, RewardError])
def test_an_error_to_put_right_is_one_paragraph_and_the_way_out(
    fake, typed, kind
):
    """Codes that it quotes do not reach the terminal."""
    fake.answers["list_projects"] = kind(
        "Its log ends in \x1b[31mred. Make one with create_project."
    )
    result = typed("projects list", code=2)
    assert result.out == ""
    assert result.err == (
        "Its log ends in \\x1b[31mred. Make one with create_project. In a "
        "terminal create_project is `python -m grpo_lab.arena projects "
        "create`.\n"
    )


def test_every_verb_that_an_error_names_can_be_typed():
    sources = Path(cli.__file__).parent.glob("*.py")
    text = "".join(one.read_text() for one in sources)
    verbs = {name for name in dir(LocalArena) if not name.startswith("_")}
    verbs -= {"experiment_status", "experiment_exists"}
    named = (
        set(re.findall(r"(?:with|:|or) \"?\s*f?\"?(\w+_\w+)", text)) & verbs
    )
    assert len(named) > 5
    assert named <= {verb.calls for verb in cli.VERBS.values()}


def test_ctrl_c_is_130(fake, typed):
    fake.answers["submit_experiment"] = KeyboardInterrupt()
    assert "Interrupted." in typed(SUBMIT, code=130).err


def test_a_bug_shows_its_traceback_but_no_values():
    """A process: its exit code and both streams."""
    found = clean(
        "import sys\n"
        "from grpo_lab.arena import cli\n"
        "def broken(self, home):\n"
        "    token = 'hf_' + 'secret'\n"
        "    raise RuntimeError('a bug')\n"
        "cli.LocalArena.__init__ = broken\n"
        "sys.exit(cli.main(['projects', 'list']))\n"
    )
    assert found.returncode == 1
    assert "RuntimeError: a bug" in found.stderr
    assert "hf_secret" not in found.stderr + found.stdout


def test_what_libraries_print_is_not_on_stdout(fake, typed, monkeypatch):
    def deploy(experiment_name):
        print("The merged weights answer worse.")
        return DEPLOYMENT

    monkeypatch.setattr(fake, "deploy_agent", deploy, raising=False)
    result = typed("--json agent deploy e-1")
    assert json.loads(result.out) == DEPLOYMENT
    assert "answer worse" in result.err


# --- Tables -----------------------------------------------------------------


def test_a_table_has_a_line_for_each_record_and_no_codes(fake, typed):
    long = "a-very-long-name-" * 8 + "[red]end[/red]"
    fake.answers["list_datasets"] = [
        DATASET | {"description": long},
        DATASET | {"name": "[b]x", "description": "\x1b[2Ja\nb"},
    ]
    lines = typed("datasets list").out.splitlines()
    assert len(lines) == 3
    assert long in lines[1]
    assert lines[2].startswith("[b]x") and lines[2].endswith("\\x1b[2Ja b")
    assert lines == [one.rstrip() for one in lines]
    hit = {"id": "openai/gsm8k", "downloads": 10, "likes": 3}
    fake.answers["list_datasets"] = [hit]
    shown = typed("datasets list --search gsm").out
    assert shown.split() == [*hit, "openai/gsm8k", "10", "3"]


def test_tables_of_usual_values_fit_80_columns(fake, typed):
    for text in (
        "experiments list", "experiments checkpoints e",
        "experiments lineage e", "agent list", "resources list",
        "datasets list",
    ):  # fmt: skip
        lines = typed(text).out.splitlines()
        assert max(map(len, lines)) <= 80, text


@pytest.mark.parametrize(
    ("text", "verb", "advice"),
    [
        ("datasets list", "list_datasets", "datasets create"),
        ("projects list", "list_projects", "projects create"),
        ("experiments list", "list_experiments", "experiments submit"),
        ("experiments checkpoints e", "list_checkpoints", "watch e"),
        ("agent list", "list_inference_deployments", "agent deploy"),
    ],
)
def test_an_empty_list_says_how_to_fill_it(fake, typed, text, verb, advice):
    fake.answers[verb] = []
    assert advice in typed(text).err
    assert typed(f"--json {text}").out == "[]\n"


def test_the_lineage_as_json_is_exact(fake, typed, value):
    first, second = value("experiments lineage e")
    assert first["parent"] is None and second["parent"] == 1
    assert first["learning_rate"] == 1e-12
    assert first["mean_reward"] is None  # NaN is no JSON
    fake.answers["experiment_lineage"] = pd.DataFrame([])
    assert "None yet" in typed("experiments lineage e").err
    assert value("experiments lineage e") == []


def test_a_reward_that_is_no_number_is_null(fake, typed):
    bad = {"reward": float("nan"), "status": "failed", "reason": "No space."}
    fake.answers["list_experiments"] = [RECORD | STATUS | bad]
    result = typed("--json experiments list").out
    assert "NaN" not in result
    assert json.loads(result)[0]["reward"] is None
    assert "No space." in typed("experiments list").out


# --- Submit, watch, stop ----------------------------------------------------


def test_a_submission_shows_all_that_was_found_and_decided(fake, typed, value):
    shown = typed(SUBMIT).out
    parts = [
        "warning: algorithm.lr is small.",
        str(SUBMITTED.verdicts),
        "Think [bold]first[/bold].",
        "members at a time  2",
        "Next: python -m grpo_lab.arena experiments watch e-1",
    ]
    places = [shown.find(one) for one in parts]
    assert -1 not in places
    assert places == sorted(places)
    found = value(SUBMIT)
    assert found["findings"][0]["level"] == "warning"
    assert found["verdicts"][0]["name"] == "is finite"
    assert found["plan"] == SUBMITTED.plan
    assert value(SUBMIT + " --watch")["end"]["status"] == "done"


ENDS = [("done", 0), ("failed", 1), ("stopped", 3), ("interrupted", 3)]


@pytest.mark.parametrize(("end", "code"), ENDS)
@pytest.mark.parametrize(
    "text", ["experiments watch e-1", SUBMIT + " --watch"]
)
def test_a_watch_ends_with_the_code_of_the_experiment(
    fake, typed, text, end, code
):
    queued = {"status": "queued", "reason": "", "step": 0, "steps": 8}
    last = STATUS | {"status": end, "reason": "for a reason"}
    fake.answers["watch_experiment"] = [queued, STATUS, last]
    shown = typed(text, code=code).out
    assert "queued: step 0 of 8\n" in shown
    assert "running: member 1, step 3 of 8, reward 0.250, 1.5 s\n" in shown
    assert f"{end}: member 1" in shown
    assert "for a reason" in shown
    typed(f"--json {text}", code=code)


def stub_job(folder: Path) -> threading.Thread:
    """What a job does to its directory, without a training."""
    lives = threading.Event()

    def live() -> None:
        with filelock.FileLock(folder / LOCK):
            write_json(folder / "status.json", STATUS)
            lives.set()
            while not (folder / "stop").exists():
                threading.Event().wait(0.02)
            stopped = {"status": "stopped", "reason": "stopped on request"}
            write_json(folder / "status.json", STATUS | stopped)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    assert lives.wait(60)
    return thread


@pytest.fixture
def registered(home) -> Path:
    """The directory of an experiment "e-1" of a real arena."""
    known = {k: RECORD[k] for k in ("project", "dataset", "control")}
    store = LocalArena().store
    with store.new("experiment", "e-1") as (_, record):
        record |= known
    return store.folder("experiment", "e-1")


def test_a_job_is_watched_and_stopped(registered, typed, value, monkeypatch):
    thread = stub_job(registered)
    assert value("experiments list")[0]["status"] == "running"
    real = experiments.status

    def look(directory):
        now = real(directory)
        (registered / "stop").touch()  # once it was seen to run
        return now

    monkeypatch.setattr(experiments, "status", look)
    shown = typed("experiments watch e-1", code=3).out
    assert shown.startswith("running: ")
    assert "stopped: member 1, step 3 of 8" in shown
    assert "experiments resume e-1" in shown
    thread.join()
    (registered / "stop").unlink()
    thread = stub_job(registered)
    assert value("experiments stop e-1")["status"] == "stopped"
    thread.join()
    assert "no job to stop" in typed("experiments stop e-1", code=2).err


def test_ctrl_c_in_a_terminal_ends_the_watch_and_not_the_job(
    registered, value
):
    """A process: the terminal that is left."""
    thread = stub_job(registered)
    watch = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "grpo_lab.arena",
            "experiments",
            "watch",
            "e-1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watch.stdout.readline().startswith("running: ")
    watch.send_signal(signal.SIGINT)
    _, said = watch.communicate(timeout=60)
    assert watch.returncode == 130
    assert "goes on" in said and "experiments watch e-1" in said
    assert "Traceback" not in said
    assert value("experiments list")[0]["status"] == "running"
    (registered / "stop").touch()
    thread.join()


def test_a_killed_job_ends_its_watch_and_is_resumed(
    registered, typed, monkeypatch
):
    write_json(registered / "status.json", STATUS)  # and nobody has the lock
    shown = typed("experiments watch e-1", code=3).out
    assert "experiments resume e-1" in shown
    started = []
    monkeypatch.setattr(job, "start", started.append)
    typed("experiments resume e-1")
    assert started == [registered]


def test_a_real_submission_from_the_data_to_the_job(
    home, typed, value, tmp_path, monkeypatch
):
    """The tutorial's lines, with small data and a pocket model."""
    started = []
    monkeypatch.setattr(job, "start", started.append)
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text(REWARD)
    form = yaml.safe_load(manifest.EXAMPLE)
    form["environment"] = {"name": "gsm8k", "fitness_rows": 4, "test_rows": 4}
    form["network"]["max_context_length"] = 512
    Path("gsm8k_grpo.yaml").write_text(yaml.safe_dump(form))
    create = f"datasets create gsm8k --category reasoning --file '{ROWS}' "
    bad = typed(
        create + f"--column-mapping '{MAPPING[:-8]}result\"}}'", code=2
    )
    assert "'result'" in bad.err and "Traceback" not in bad.err
    assert value("datasets list") == []
    assert typed("datasets exists gsm8k", code=1).out == "no\n"
    assert value("datasets exists gsm8k", code=1) is False
    shown = typed(create + f"--column-mapping '{MAPPING}'").out
    assert "gsm8k_rows.jsonl" in shown and "60" in shown
    assert typed("datasets exists gsm8k").out == "yes\n"
    assert "is there already" in typed(create, code=2).err
    assert (
        "Make one first"
        in typed(
            "experiments submit gsm8k_grpo.yaml --reward-file reward.py",
            code=2,
        ).err
    )
    typed('projects create "GSM8K Tutorial" --llm-based')
    submit = (
        "experiments submit gsm8k_grpo.yaml --reward-file reward.py "
        "--resource-id arena-medium --num-nodes 2 "
        "--project 'GSM8K Tutorial' --experiment-name gsm8k-grpo-v1"
    )
    shown = typed(submit).out
    assert "resource_id arena-medium is a machine of AgileRL's" in shown
    assert "answers can be read" in shown
    assert "completions in all" in shown
    assert started == [home / "experiments" / "gsm8k-grpo-v1"]
    assert "nothing is written over it" in typed(submit, code=2).err
    assert len(started) == 1
    assert "gsm8k-grpo-v1" in typed("datasets delete gsm8k", code=2).err
    assert "delete_experiment is" in typed("datasets delete gsm8k", code=2).err


def test_projects_and_the_default_one(home, typed, value):
    typed("projects create one")
    typed("projects create two --no-llm-based --description 'a [b]walker'")
    assert "a [b]walker" in typed("projects list").out
    typed("projects set-default two")
    marked = {one["name"]: one["default"] for one in value("projects list")}
    assert marked == {"one": False, "two": True}
    error = typed("projects set-default three", code=2).err
    assert "no project 'three'" in error


def test_the_home_is_chosen_and_repeated_in_what_to_type(
    home, typed, tmp_path
):
    other = tmp_path / "an other"
    shown = typed("--home", str(other), "projects", "create", "one").out
    assert f"--home '{other}' experiments" in shown
    assert (other / "projects").is_dir()
    assert not home.exists()
    assert "--home" not in typed("projects create one").out


# --- Agents -----------------------------------------------------------------


def test_an_answer_comes_in_pieces(fake, typed):
    result = typed("agent generate e-1 --prompt hi")
    assert fake.agent.seen == ["", "12", "12 + "]
    assert result.out == "12 + 7\n"
    assert "cut" not in result.err


def test_a_cut_answer_is_told_beside_it(fake, typed, value):
    fake.agent = FakeAgent(truncated=True)
    result = typed("agent generate e-1 --prompt hi")
    assert result.out == "12 + 7\n"
    assert "cut after 3 tokens" in result.err
    assert value("agent generate e-1 --prompt hi") == {
        "name": "e-1",
        "prompt": "hi",
        "completion": "12 + 7",
        "truncated": True,
        "tokens": 3,
    }


def test_an_answer_that_breaks_off_keeps_what_came(fake, typed):
    fake.agent = FakeAgent(breaks=True)
    result = typed("agent generate e-1 --prompt hi", code=2)
    assert result.out == "12\n"
    assert "gave no answer" in result.err


def test_nobody_is_guessed_where_none_is_named(fake, typed):
    fake.answers["default_agent"] = None
    error = typed("agent generate --prompt hi", code=2).err
    assert "agent run" in error
    assert [verb for verb, _ in fake.calls] == ["default_agent"]


# --- Manifests --------------------------------------------------------------


def test_the_example_is_a_manifest(fake, typed, value, tmp_path):
    shown = typed("manifest example").out
    assert shown == manifest.EXAMPLE
    file = tmp_path / "mine.yaml"
    file.write_text(shown)
    assert "steps of each member" in typed(f"manifest validate {file}").out
    found = value(f"manifest validate {file}")
    assert found["plan"]["generations"] == 3


def test_a_manifest_that_can_not_be_run(fake, typed, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(manifest.EXAMPLE.replace("group_size: 8", "group_size: 1"))
    result = typed(f"manifest validate {file}", code=2)
    assert "algorithm.group_size is 1" in result.err
    file.write_text("algorithm: [")
    result = typed(f"manifest validate {file}", code=2)
    assert "YAML" in result.err and not result.out
    missing = typed(f"manifest validate {tmp_path / 'none.yaml'}", code=2)
    assert "none.yaml" in missing.err
