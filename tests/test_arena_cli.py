"""The arena in a terminal: what is typed, printed, and the exit codes."""

import inspect
import json
import re
import resource
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
import typer
import yaml
from typer.testing import CliRunner

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

STATUS = {
    "status": "running",
    "reason": "",
    "step": 3,
    "steps": 8,
    "generation": 0,
    "member": 1,
    "reward": 0.25,
    "seconds_per_step": 1.5,
    "heartbeat": 0.1,
}
RECORD = {
    "name": "e-1",
    "created": 1.0,
    "project": "p",
    "dataset": "d",
    "control": False,
}
CHECKPOINT = {
    "name": "step_10",
    "step": 10,
    "member": 2,
    "completions": 160,
    "accuracy": 0.5,
    "low": 0.4,
    "high": 0.6,
    "mean_reward": 1.25,
    "size_mb": 0.88,
}
DEPLOYMENT = {
    "name": "e-1",
    "checkpoint": "step_10",
    "agreement": {
        "questions": 50,
        "adapter_correct": 31,
        "merged_correct": 30,
        "same_text": 48,
        "worse": False,
    },
    "status": "serving",
    "url": "http://127.0.0.1:8001/v1",
    "pid": 7,
}
LINEAGE = pd.DataFrame(
    [
        {
            "generation": 1,
            "step": 10,
            "rank": rank,
            "member": member,
            "parent": parent,
            "born": 1,
            "change": change,
            "learning_rate": 1e-12,
            "beta": 0.001,
            "accuracy": 0.5,
            "low": 0.4,
            "high": 0.6,
            "mean_reward": float("nan"),
        }
        for rank, member, parent, change in [
            (1, 0, None, ""),
            (2, 2, 1, "lr x0.8"),
        ]
    ]
).astype({"parent": "Int64"})
SUBMITTED = Submitted(
    name="e-1",
    findings=(Finding("warning", "algorithm.lr", "algorithm.lr is small."),),
    verdicts=Verdicts("mine", "a box", (Verdict("is finite", True, "72"),)),
    system_prompt="Think [bold]first[/bold].",
    plan={"members at a time": 2},
)
DATASET = {
    "name": "gsm8k",
    "category": "reasoning",
    "rows": 5,
    "source": "rows.jsonl",
    "nulls": 1,
    "unreadable": 2,
    "repeated": 3,
    "description": "",
}


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
            self.seen.append(sys.stdout.buffer.getvalue().decode())
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
        self.deployments = [{"name": "e-1"}]
        self.store = types.SimpleNamespace(all=lambda kind: self.deployments)
        self.agent = FakeAgent()
        self.answers = {
            "create_dataset": DATASET,
            # As registered, and as on the Hub.
            "list_datasets": [
                DATASET | {"id": "a", "downloads": 1, "likes": 0}
            ],
            "dataset_exists": True,
            "create_project": {"name": "p"},
            "list_projects": [],
            "list_resources": [
                {
                    "id": "local-cpu",
                    "device": "a CPU",
                    "nodes": 1,
                    "memory_gib": 8.0,
                    "free_disk_gib": 9.0,
                }
            ],
            "submit_experiment": SUBMITTED,
            "list_experiments": [RECORD | STATUS],
            "watch_experiment": [STATUS, STATUS | {"status": "done"}],
            "stop_experiment": STATUS | {"status": "stopped"},
            "resume_experiment": STATUS,
            "download_experiment_metrics": Path("metrics.csv"),
            "list_checkpoints": [CHECKPOINT],
            "experiment_lineage": LINEAGE,
            "deploy_agent": DEPLOYMENT,
            "list_inference_deployments": [DEPLOYMENT],
        }

    def __getattr__(self, verb):
        signature = inspect.signature(getattr(LocalArena, verb))

        def call(*args, **options):
            given = signature.bind(self, *args, **options).arguments
            given.pop("self")
            # What is None was not typed.
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
    monkeypatch.setattr(cli, "LocalArena", lambda home: arena)
    monkeypatch.setattr(cli.environment, "prepare", lambda: None)
    return arena


@pytest.fixture
def home(monkeypatch, tmp_path) -> Path:
    monkeypatch.setattr(cli.environment, "prepare", lambda: None)
    monkeypatch.setenv("GRPO_LAB_ARENA", str(tmp_path / "home"))
    return tmp_path / "home"


def typed(*words: str, code: int = 0):
    """The result of a command; no traceback, and the exit code."""
    result = CliRunner().invoke(cli.app, words)
    if not isinstance(result.exception, (SystemExit, type(None))):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def line(text: str, code: int = 0):
    return typed(*shlex.split(text), code=code)


def value(*words: str, code: int = 0):
    return json.loads(typed("--json", *words, code=code).stdout)


# --- The lines of the tutorial, and all others ------------------------------

WENG = "Weng earns $12 an hour. How much did she earn in 50 minutes?"
LINES = [
    (
        "datasets create gsm8k --category reasoning "
        "--hf-dataset openai/gsm8k --hf-config main --hf-split train "
        f"--column-mapping '{MAPPING}'",
        "create_dataset",
        {
            "name": "gsm8k",
            "category": "reasoning",
            "column_mapping": MAPPING,
            "hf_dataset_name": "openai/gsm8k",
            "hf_config": "main",
            "hf_split": "train",
            "description": "",
        },
    ),
    (
        "datasets create d --category sft --file r.csv --description 'my own' "
        "--column-mapping '{}'",
        "create_dataset",
        {
            "name": "d",
            "category": "sft",
            "column_mapping": "{}",
            "file": Path("r.csv"),
            "description": "my own",
        },
    ),
    ("datasets list", "list_datasets", {}),
    ("datasets exists gsm8k", "dataset_exists", {"name": "gsm8k"}),
    ("datasets delete gsm8k", "delete_dataset", {"name": "gsm8k"}),
    (
        'projects create "GSM8K Tutorial" --llm-based',
        "create_project",
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
            "reward_file": Path("reward.py"),
            "resource_id": "arena-medium",
            "num_nodes": 2,
            "project": "GSM8K Tutorial",
            "experiment_name": "gsm8k-grpo-v1",
            "control": False,
            "force": False,
        },
    ),
    (
        "experiments submit m.yaml --reward-file r.py --completion 72 "
        "--control --force",
        "submit_experiment",
        {
            "manifest": Path("m.yaml"),
            "reward_file": Path("r.py"),
            "completion": "72",
            "control": True,
            "force": True,
        },
    ),
    ("experiments list", "list_experiments", {}),
    ("experiments watch e", "watch_experiment", {"experiment_name": "e"}),
    ("experiments stop e", "stop_experiment", {"experiment_name": "e"}),
    ("experiments resume e", "resume_experiment", {"experiment_name": "e"}),
    (
        "experiments resume e --max-steps 99",
        "resume_experiment",
        {"experiment_name": "e", "max_steps": 99},
    ),
    (
        "experiments metrics gsm8k-grpo-v1 --output-file metrics.csv",
        "download_experiment_metrics",
        {
            "experiment_name": "gsm8k-grpo-v1",
            "output_path": Path("metrics.csv"),
        },
    ),
    (
        "experiments checkpoints gsm8k-grpo-v1",
        "list_checkpoints",
        {"experiment_name": "gsm8k-grpo-v1"},
    ),
    ("experiments lineage e", "experiment_lineage", {"experiment_name": "e"}),
    ("experiments delete e", "delete_experiment", {"experiment_name": "e"}),
    (
        "agent deploy gsm8k-grpo-v1",
        "deploy_agent",
        {"experiment_name": "gsm8k-grpo-v1"},
    ),
    (
        "agent deploy gsm8k-grpo-v1 --checkpoint step_500 --port 8001",
        "deploy_agent",
        {
            "experiment_name": "gsm8k-grpo-v1",
            "checkpoint": "step_500",
            "port": 8001,
        },
    ),
    ("agent run e", "set_default_agent", {"deployment_name": "e"}),
    ("agent list", "list_inference_deployments", {}),
    ("agent stop e", "stop_deployment", {"deployment_name": "e"}),
    ("agent delete e", "delete_deployment", {"deployment_name": "e"}),
    (
        f'agent generate gsm8k-grpo-v1 --prompt "{WENG}"',
        "open_inference_agent",
        {"deployment_name": "gsm8k-grpo-v1"},
    ),
    (
        "agent generate e --prompt hi --max-new-tokens 9",
        "open_inference_agent",
        {"deployment_name": "e", "max_new_tokens": 9},
    ),
]


@pytest.mark.parametrize(("text", "verb", "given"), LINES)
def test_a_line_calls_its_verb_with_what_was_typed(fake, text, verb, given):
    line(text)
    assert (verb, given) in fake.calls


@pytest.mark.parametrize("text", sorted({one for one, _, _ in LINES}))
def test_json_is_one_value_and_nothing_else(fake, text):
    json.loads(line(f"--json {text}").stdout)


def test_a_search_shows_what_the_hub_has(fake):
    hit = {"id": "openai/gsm8k", "downloads": 10, "likes": 3}
    fake.answers["list_datasets"] = [hit]
    assert "openai/gsm8k" in line("datasets list --search gsm").stdout
    assert fake.calls == [("list_datasets", {"search": "gsm"})]


# --- Help -------------------------------------------------------------------


def commands(command=None, path=()):
    """Every group and verb: the words that lead to it."""
    command = command or typer.main.get_command(cli.app)
    yield path
    for name, one in getattr(command, "commands", {}).items():
        yield from commands(one, (*path, name))


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_every_help_shows_examples_that_run(fake, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("mine.yaml", "gsm8k_grpo.yaml"):
        Path(name).write_text(manifest.EXAMPLE)
    help_text = typed(*path, "--help").stdout
    # In a listing of verbs no sentence is cut.
    assert "..." not in help_text.partition("Commands:")[2]
    shown = help_text.partition("Example:\n")[2].replace("\\\n", "")
    lines = [one for one in shown.splitlines() if one.strip()]
    assert lines
    for one in lines:
        words = shlex.split(one.partition(" > ")[0])
        assert words[:3] == ["python", "-m", "grpo_lab.arena"]
        assert words[3 : 3 + len(path)] == list(path) or path == ()
        typed(*words[3:])


def test_a_group_without_a_verb_shows_its_help():
    assert "Commands:" in typed("experiments", code=2).output


@pytest.mark.parametrize(
    "text",
    [
        "experiments lsit",
        "datasets create x",
        "agent generate e",
        "agent deploy e --port 0",
        "agent generate e --prompt hi --max-new-tokens 0",
        "experiments submit m.yaml --reward-file r.py --num-nodes two",
    ],
)
def test_a_usage_error_is_wrong_input(fake, text):
    result = line(text, code=2)
    assert "Error:" in result.stderr
    assert not result.stdout
    assert fake.calls == []


def clean(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_help_and_lists_load_no_training_library(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "grpo_lab.arena", "--help"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert used < 5  # seconds of CPU; waiting for a busy machine is not it
    place = ["--home", str(tmp_path)]
    found = clean(
        "import sys\n"
        "from grpo_lab.arena import cli\n"
        "for words in (['--help'], ['datasets', 'list'], ['projects', 'list'],"
        " ['experiments', 'list'], ['manifest', 'example']):\n"
        f"    cli.app({place!r} + words, standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pandas'} "
        "& set(sys.modules)))"
    )
    assert found.stdout.splitlines()[-1] == "[]", found.stderr


# --- Errors -----------------------------------------------------------------


@pytest.mark.parametrize("error", [LabError("No."), RewardError("No.")])
def test_an_error_to_put_right_is_one_paragraph(fake, error):
    fake.answers["submit_experiment"] = error
    result = line("experiments submit m.yaml --reward-file r.py", code=2)
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "No."
    assert "Traceback" not in result.stderr


def test_codes_in_an_error_do_not_reach_the_terminal(fake):
    fake.answers["list_projects"] = LabError("Its log ends in: \x1b[31mred")
    assert "\\x1b[31mred" in line("projects list", code=2).stderr


def test_an_error_that_names_a_call_says_what_to_type(fake):
    fake.answers["list_projects"] = LabError("Make one with create_project.")
    assert line("projects list", code=2).stderr == (
        "Make one with create_project. In a terminal create_project is "
        "`python -m grpo_lab.arena projects create`.\n"
    )


def test_what_is_to_be_typed_for_a_call_exists():
    known = {" ".join(path) for path in commands()}
    for verb, words in cli.VERBS.items():
        assert callable(getattr(LocalArena, verb))
        assert words in known


def test_every_verb_that_an_error_names_can_be_typed():
    sources = Path(cli.__file__).parent.glob("*.py")
    text = "".join(one.read_text() for one in sources)
    verbs = {name for name in vars(LocalArena) if not name.startswith("_")}
    named = set(re.findall(r"with \"?\s*f?\"?(\w+_\w+)", text)) & verbs
    assert named
    assert named <= set(cli.VERBS)


def test_ctrl_c_is_130(fake):
    fake.answers["submit_experiment"] = KeyboardInterrupt()
    result = line("experiments submit m.yaml --reward-file r.py", code=130)
    assert "Interrupted." in result.stderr


def test_a_bug_shows_its_traceback_but_no_values():
    found = clean(
        "from grpo_lab.arena import cli\n"
        "def broken(home):\n"
        "    token = 'hf_' + 'secret'\n"
        "    raise RuntimeError('a bug')\n"
        "cli.LocalArena = broken\n"
        "import sys\n"
        "sys.argv = ['arena', 'projects', 'list']\n"
        "cli.main()"
    )
    assert found.returncode == 1
    assert "Traceback" in found.stderr
    assert "RuntimeError: a bug" in found.stderr
    assert "hf_secret" not in found.stderr + found.stdout


def test_what_libraries_print_is_not_on_stdout(fake, monkeypatch):
    def deploy(name, checkpoint, port):
        print("The merged weights answer worse.")
        return DEPLOYMENT

    monkeypatch.setattr(fake, "deploy_agent", deploy, raising=False)
    result = line("--json agent deploy e-1")
    assert json.loads(result.stdout) == DEPLOYMENT
    assert "answer worse" in result.stderr


# --- Tables -----------------------------------------------------------------

LONG = "a-very-long-name-" * 8 + "[red]end[/red]"


def test_a_piped_table_has_a_line_for_each_record_and_no_codes(fake):
    rows = [DATASET | {"description": LONG}, DATASET | {"name": "[b]x"}]
    fake.answers["list_datasets"] = rows
    lines = line("datasets list").stdout.splitlines()
    assert len(lines) == 3
    assert LONG in lines[1]
    assert lines[2].startswith("[b]x")
    assert "\x1b" not in "".join(lines)
    assert lines == [one.rstrip() for one in lines]


def test_a_table_is_folded_to_the_terminal_and_not_cut(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    text = cli._table(("name", "rows"), [[LONG, 5], ["x", None]])
    assert max(map(len, text.splitlines())) <= 80
    folded = "".join(one[:74].strip() for one in text.splitlines()[1:-1])
    assert folded.replace("5", "") == LONG


def test_tables_of_usual_values_fit_80_columns(fake):
    for text in (
        "experiments list", "experiments checkpoints e",
        "experiments lineage e", "agent list", "resources list",
        "datasets list",
    ):  # fmt: skip
        lines = line(text).stdout.splitlines()
        assert max(map(len, lines)) <= 80, text


def test_codes_in_what_users_wrote_do_not_reach_the_terminal(fake):
    fake.answers["list_datasets"] = [DATASET | {"description": "\x1b[2Ja\nb"}]
    result = line("datasets list")
    assert "\x1b" not in result.stdout
    assert "\\x1b[2Ja b" in result.stdout


@pytest.mark.parametrize(
    ("text", "verb", "advice"),
    [
        ("datasets list", "list_datasets", "datasets create"),
        ("projects list", "list_projects", "projects create"),
        ("experiments list", "list_experiments", "experiments submit"),
        ("experiments checkpoints e", "list_checkpoints", "generation"),
        ("agent list", "list_inference_deployments", "agent deploy"),
    ],
)
def test_an_empty_list_says_how_to_fill_it(fake, text, verb, advice):
    fake.answers[verb] = []
    assert advice in line(text).stderr
    assert line(f"--json {text}").stdout == "[]\n"


def test_a_lineage_that_has_not_begun(fake):
    fake.answers["experiment_lineage"] = pd.DataFrame([])
    assert "first generation" in line("experiments lineage e").stderr
    assert value("experiments", "lineage", "e") == []


def test_the_lineage_as_json_is_exact(fake):
    first, second = value("experiments", "lineage", "e")
    assert first["parent"] is None and second["parent"] == 1
    assert first["learning_rate"] == 1e-12
    assert first["mean_reward"] is None  # NaN is no JSON


def test_a_reward_that_is_no_number_is_null(fake):
    bad = RECORD | STATUS | {"reward": float("nan")}
    fake.answers["list_experiments"] = [bad]
    result = line("--json experiments list")
    assert "NaN" not in result.stdout
    assert json.loads(result.stdout)[0]["reward"] is None


def test_the_list_says_why_an_experiment_ended(fake):
    failed = {"status": "failed", "reason": "No space left."}
    fake.answers["list_experiments"] = [RECORD | STATUS | failed]
    assert "e-1 failed: No space left." in line("experiments list").stdout


# --- Submit, watch, stop ----------------------------------------------------

SUBMIT = "experiments submit m.yaml --reward-file r.py"


def test_a_submission_shows_all_that_was_found_and_decided(fake):
    shown = line(SUBMIT).stdout
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


def test_a_submission_as_json(fake):
    found = value(*shlex.split(SUBMIT))
    assert found["findings"][0]["level"] == "warning"
    assert found["verdicts"][0]["name"] == "is finite"
    assert found["plan"] == SUBMITTED.plan
    found = value(*shlex.split(SUBMIT), "--watch")
    assert found["end"]["status"] == "done"


ENDS = [("done", 0), ("failed", 1), ("stopped", 3), ("interrupted", 3)]


@pytest.mark.parametrize(("end", "code"), ENDS)
@pytest.mark.parametrize(
    "text", ["experiments watch e-1", SUBMIT + " --watch"]
)
def test_a_watch_ends_with_the_code_of_the_experiment(fake, text, end, code):
    last = STATUS | {"status": end, "reason": "for a reason"}
    fake.answers["watch_experiment"] = [STATUS, last]
    shown = line(text, code=code).stdout
    assert "running: member 1, step 3 of 8, reward 0.250, 1.5 s\n" in shown
    assert f"{end}: member 1" in shown
    assert "for a reason" in shown
    line(f"--json {text}", code=code)


def test_a_watched_experiment_that_has_not_begun(fake):
    queued = {"status": "queued", "reason": "", "step": 0, "steps": 8}
    fake.answers["watch_experiment"] = [queued, STATUS | {"status": "done"}]
    assert "queued: step 0 of 8\n" in line("experiments watch e").stdout


def test_ctrl_c_leaves_the_watched_experiment_alone(fake):
    def interrupted():
        yield STATUS
        raise KeyboardInterrupt

    fake.answers["watch_experiment"] = interrupted()
    result = line("experiments watch e-1", code=130)
    assert "goes on" in result.stderr
    assert "experiments watch e-1" in result.stderr
    assert [verb for verb, _ in fake.calls] == ["watch_experiment"]


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
    assert lives.wait(30)
    return thread


@pytest.fixture
def registered(home) -> Path:
    """The directory of an experiment "e-1" of a real arena."""
    known = {k: RECORD[k] for k in ("project", "dataset", "control")}
    LocalArena().store.add("experiment", "e-1", known)
    folder = home / "experiments" / "e-1"
    folder.mkdir(parents=True)
    return folder


def test_a_job_is_watched_and_stopped(registered, monkeypatch):
    thread = stub_job(registered)
    assert value("experiments", "list")[0]["status"] == "running"
    real = experiments.status

    def look(directory):
        now = real(directory)
        (registered / "stop").touch()  # once it was seen to run
        return now

    monkeypatch.setattr(experiments, "status", look)
    shown = line("experiments watch e-1", code=3).stdout
    assert shown.startswith("running: ")
    assert "stopped: member 1, step 3 of 8" in shown
    thread.join()
    (registered / "stop").unlink()
    thread = stub_job(registered)
    assert value("experiments", "stop", "e-1")["status"] == "stopped"
    thread.join()
    assert "no job to stop" in line("experiments stop e-1", code=2).stderr


def test_ctrl_c_in_a_terminal_ends_the_watch_and_not_the_job(registered):
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
    assert "goes on" in said and "Traceback" not in said
    assert value("experiments", "list")[0]["status"] == "running"
    (registered / "stop").touch()
    thread.join()


def test_a_killed_job_ends_its_watch(registered):
    write_json(registered / "status.json", STATUS)  # and nobody has the lock
    shown = line("experiments watch e-1", code=3).stdout
    assert "experiments resume e-1" in shown


def test_a_job_is_resumed(registered, monkeypatch):
    started = []
    monkeypatch.setattr(job, "start", started.append)
    write_json(registered / "status.json", STATUS | {"status": "stopped"})
    line("experiments resume e-1")
    assert started == [registered]


def test_a_real_submission_from_the_data_to_the_job(
    home, tmp_path, monkeypatch
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
    line(
        f"datasets create gsm8k --category reasoning --file '{ROWS}' "
        f"--column-mapping '{MAPPING}'"
    )
    line('projects create "GSM8K Tutorial" --llm-based')
    submit = (
        "experiments submit gsm8k_grpo.yaml --reward-file reward.py "
        "--resource-id arena-medium --num-nodes 2 "
        "--project 'GSM8K Tutorial' --experiment-name gsm8k-grpo-v1"
    )
    shown = line(submit).stdout
    assert "resource_id arena-medium is a machine of AgileRL's" in shown
    assert "golds can be read" in shown
    assert "completions in all" in shown
    assert started == [home / "experiments" / "gsm8k-grpo-v1"]
    assert "nothing is written over it" in line(submit, code=2).stderr
    assert len(started) == 1


# --- Data sets and projects of a real arena ---------------------------------


def create(name: str, mapping: str = MAPPING, code: int = 0):
    words = ["--category", "reasoning", "--file", str(ROWS)]
    return typed(
        "datasets", "create", name, *words, "--column-mapping", mapping,
        code=code,
    )  # fmt: skip


def test_data_sets_come_and_go(home):
    assert line("datasets exists mine", code=1).stdout == "no\n"
    assert value("datasets", "exists", "mine", code=1) is False
    shown = create("mine").stdout
    assert "60 rows of gsm8k_rows.jsonl" in shown
    assert "projects create" in shown
    assert line("datasets exists mine").stdout == "yes\n"
    assert value("datasets", "list")[0]["rows"] == 60
    assert "a dataset that is there already" in create("mine", code=2).stderr
    line("datasets delete mine")
    assert value("datasets", "list") == []
    assert not (home / "datasets" / "mine").exists()


def test_a_bad_mapping_registers_nothing(home):
    bad = '{"question": "question", "answer": "result"}'
    error = create("mine", bad, code=2).stderr
    assert "'result'" in error
    assert "Traceback" not in error
    assert value("datasets", "list") == []


def test_projects_and_the_default_one(home):
    line("projects create one")
    line("projects create two --no-llm-based --description 'a [b]walker'")
    assert "a [b]walker" in line("projects list").stdout
    line("projects set-default two")
    marked = {one["name"]: one["default"] for one in value("projects", "list")}
    assert marked == {"one": False, "two": True}
    assert "no project 'three'" in line("projects set-default three", 2).stderr


def test_the_home_is_chosen_and_repeated_in_what_to_type(home, tmp_path):
    other = tmp_path / "an other"
    shown = typed("--home", str(other), "projects", "create", "one").stdout
    assert f"--home '{other}' experiments" in shown
    assert (other / "arena.sqlite").exists()
    assert not home.exists()
    assert "--home" not in typed("projects", "create", "one").stdout


def test_help_makes_no_arena(home):
    line("datasets list --help")
    assert not home.exists()


# --- Agents -----------------------------------------------------------------


def test_an_answer_comes_in_pieces(fake):
    result = line("agent generate e-1 --prompt hi")
    assert fake.agent.seen == ["", "12", "12 + "]
    assert result.stdout == "12 + 7\n"
    assert "cut" not in result.stderr


def test_a_cut_answer_is_told_beside_it(fake):
    fake.agent = FakeAgent(truncated=True)
    result = line("agent generate e-1 --prompt hi")
    assert result.stdout == "12 + 7\n"
    assert "cut after 3 tokens" in result.stderr
    assert value("agent", "generate", "e-1", "--prompt", "hi") == {
        "name": "e-1",
        "prompt": "hi",
        "completion": "12 + 7",
        "truncated": True,
        "tokens": 3,
    }


def test_an_answer_that_breaks_off_keeps_what_came(fake):
    fake.agent = FakeAgent(breaks=True)
    result = line("agent generate e-1 --prompt hi", code=2)
    assert result.stdout == "12\n"
    assert "gave no answer" in result.stderr


@pytest.mark.parametrize(
    ("deployments", "asked"),
    [
        ([{"name": "a"}], "a"),
        ([{"name": "a"}, {"name": "b", "default": True}], "b"),
    ],
)
def test_who_is_asked_where_none_is_named(fake, deployments, asked):
    fake.deployments = deployments
    line("agent generate --prompt hi")
    assert fake.calls == [("open_inference_agent", {"deployment_name": asked})]


@pytest.mark.parametrize(
    ("deployments", "told"),
    [
        ([], "agent deploy"),
        ([{"name": "a"}, {"name": "b", "default": False}], "agent run a"),
    ],
)
def test_nobody_is_guessed_where_none_is_named(fake, deployments, told):
    fake.deployments = deployments
    assert told in line("agent generate --prompt hi", code=2).stderr
    assert fake.calls == []


def test_the_list_marks_the_default_agent(fake):
    fake.deployments = [{"name": "e-1"}, {"name": "e-2"}]
    assert value("agent", "list")[0]["default"] is False
    fake.deployments = [{"name": "e-1", "default": True}, {"name": "e-2"}]
    assert value("agent", "list")[0]["default"] is True


# --- Manifests --------------------------------------------------------------


def test_the_example_is_a_manifest(fake, tmp_path):
    shown = line("manifest example").stdout
    assert shown == manifest.EXAMPLE
    file = tmp_path / "mine.yaml"
    file.write_text(shown)
    assert "steps of each member" in line(f"manifest validate {file}").stdout
    found = value("manifest", "validate", str(file))
    assert found["usable"] is True and found["plan"]["generations"] == 3


def test_a_manifest_that_can_not_be_run(fake, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(manifest.EXAMPLE.replace("group_size: 8", "group_size: 1"))
    shown = line(f"manifest validate {file}", code=2).stdout
    assert "error: algorithm.group_size" in shown
    assert value("manifest", "validate", str(file), code=2)["usable"] is False
    file.write_text("algorithm: [")
    result = line(f"manifest validate {file}", code=2)
    assert "YAML" in result.stderr and not result.stdout
    missing = line(f"manifest validate {tmp_path / 'none.yaml'}", code=2)
    assert "none.yaml" in missing.stderr
