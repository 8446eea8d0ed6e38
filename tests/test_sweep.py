"""Sweeps: every combination once, whatever fails, is killed or comes twice."""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from grpo_lab import runner, sweep
from grpo_lab.build import METADATA
from grpo_lab.sweep import Combination, Sweep

PARAMETERS = """\
NAME: str = "none"  # shared by all
SEED: int = 0  # of chance
RATES: list[float] = [1.0]  # learning rates
OUTPUT_DIR: str = "runs/tiny"  # where results go
"""
# One line for each start and each end of a run, in the working directory.
NOTE = """\
import json, os, subprocess, sys, time
from pathlib import Path

def note(event):
    line = json.dumps([event, NAME, SEED, RATES, OUTPUT_DIR])
    with open("notes.txt", "a") as file:
        file.write(line + "\\n")

note("begin")
"""
RESULTS = """\
assert SEED == 1 or len(RATES) > 1 or Path("ready").exists(), "not ready"
board = [{"run": "b", "after": SEED / 4}, {"run": "a", "after": 0.125}]
Path(OUTPUT_DIR).mkdir(parents=True)
results = Path(OUTPUT_DIR, "results.json")
results.write_text(json.dumps({"leaderboard": board}))
note("end")
"""
# A child in a session of its own, as a server or a data loader may be.
ENDLESS = """\
code = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
pids = json.dumps([child.pid, os.getpid(), os.getppid()])
Path(f"part-{SEED}").write_text(pids)
os.replace(f"part-{SEED}", f"pids-{SEED}")
time.sleep(600)
"""
# The first time the second run does not end; the next time it does, and
# nothing may be left of the first.
KILLED = f"""\
import psutil

if SEED == 2 and not Path("go").exists():
{textwrap.indent(ENDLESS, "    ")}
for pid in json.loads(Path("pids-2").read_text()) if SEED == 2 else ():
    if psutil.pid_exists(pid):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
"""


def lesson(folder, *cells, name="01_tiny.ipynb"):
    """A lesson that has parameters, notes its start, and has these cells."""
    parameters = new_code_cell(PARAMETERS)
    parameters.metadata["tags"] = ["parameters"]
    notebook = new_notebook(metadata=METADATA)
    notebook.cells = [parameters, *map(new_code_cell, (NOTE, *cells))]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path


def sweep_here(folder, *arguments):
    """A sweep in this process; its exit code and both streams."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = runner.main(["sweep", *map(str, arguments)])
    return SimpleNamespace(
        code=code, out=out.getvalue(), err=err.getvalue(), folder=folder
    )


@pytest.fixture
def start(tmp_path):
    """Start a sweep as a reader does; a test that fails leaves none."""
    started = []

    def start_one(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_lab.runner", "sweep"]
            + [str(argument) for argument in arguments],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.terminate()
        process.communicate(timeout=60)
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get(sweep.MARK, "").startswith(str(tmp_path)):
                one.kill()


def notes(folder):
    return [
        json.loads(line)
        for line in (folder / "notes.txt").read_text().splitlines()
    ]


def begun(folder):
    """The seeds of the runs that began, in order."""
    return [note[2] for note in notes(folder) if note[0] == "begin"]


def record(folder):
    return json.loads((folder / "sweep.json").read_text())


def states(folder):
    return [one["state"] for one in record(folder)["combinations"]]


def pids(folder, seed, seconds=60):
    """What an endless run has started, its kernel, and its runner."""
    path = folder / f"pids-{seed}"
    end = time.monotonic() + seconds
    while time.monotonic() < end and not path.exists():
        time.sleep(0.05)
    return json.loads(path.read_text())


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- Real runs --------------------------------------------------------------

LINE = (
    *("-p", "NAME", "a {b}'c"),
    *("--vary", "SEED", 1, 2),
    *("--vary", "RATES", "[1e-3, 2e-3]", "1e-4"),
)
NAMES = [
    "SEED=1_RATES=1e-3,2e-3",
    "SEED=1_RATES=1e-4",
    "SEED=2_RATES=1e-3,2e-3",
    "SEED=2_RATES=1e-4",
]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Four combinations, of which the last one fails."""
    folder = tmp_path_factory.mktemp("swept")
    lesson(folder / "lite", RESULTS)
    return sweep_here(folder, "lite/01_tiny.ipynb", *LINE)


@pytest.mark.lesson
def test_each_combination_runs_once_with_its_values(swept):
    place = Path("runs/01_tiny-sweep-001")
    rates = [[1e-3, 2e-3], [1e-4]]
    expected = [
        ["a {b}'c", seed, rate, str(place / name / "run")]
        for name, (seed, rate) in zip(
            NAMES, [(s, r) for s in (1, 2) for r in rates], strict=True
        )
    ]
    told = notes(swept.folder)
    # One at a time, in order: each ends before the next begins.
    assert told[:6] == [
        [event, *one] for one in expected[:3] for event in ("begin", "end")
    ]
    assert told[6:] == [["begin", *expected[3]]]
    for name in NAMES:
        executed = swept.folder / place / name / "01_tiny.ipynb"
        assert executed.is_file()
        assert (swept.folder / place / f"{name}.log").is_file()


@pytest.mark.lesson
def test_a_failure_stops_no_other_and_is_told(swept):
    folder = swept.folder / "runs/01_tiny-sweep-001"
    assert swept.code == 1
    assert states(folder) == ["done", "done", "done", "failed"]
    found = record(folder)
    assert found["lesson"] == str(swept.folder / "lite/01_tiny.ipynb")
    assert found["values"] == {
        "SEED": [1, 2],
        "RATES": [[1e-3, 2e-3], [1e-4]],
        "NAME": ["a {b}'c"],
    }
    failed = found["combinations"][3]
    assert failed["exit_code"] == 1
    assert failed["reason"].endswith("AssertionError: not ready")
    log = f"runs/01_tiny-sweep-001/{NAMES[3]}.log"
    assert f"AssertionError: not ready ({log})" in swept.out
    assert "--resume" in swept.out


@pytest.mark.lesson
def test_the_table_is_printed_and_written(swept):
    lines = swept.out.splitlines()
    at = lines.index(next(x for x in lines if x.startswith("combination")))
    assert lines[at].split() == [
        *("combination", "state", "seconds", "best", "run", "accuracy")
    ]
    rows = [line.split() for line in lines[at + 1 : at + 5]]
    assert [row[0] for row in rows] == NAMES
    assert [row[1] for row in rows] == ["done"] * 3 + ["failed"]
    assert [row[3:] for row in rows[:3]] == [
        ["b", "25.0%"],
        ["b", "25.0%"],
        ["b", "50.0%"],
    ]
    assert len(rows[3]) == 3
    path = swept.folder / "runs/01_tiny-sweep-001/sweep.csv"
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == [
        *("SEED", "RATES", "NAME"),
        *("state", "seconds", "best_run", "accuracy"),
    ]
    assert [float(row["accuracy"] or "nan") for row in table[:3]] == [
        0.25, 0.25, 0.5,
    ]  # fmt: skip
    assert [row["RATES"] for row in table[:2]] == ["[1e-3, 2e-3]", "1e-4"]
    assert table[3]["state"] == "failed"
    assert table[3]["best_run"] == table[3]["accuracy"] == ""
    assert float(table[0]["seconds"]) > 0


@pytest.mark.lesson
def test_resume_runs_the_failed_one_and_no_other(swept):
    before = len(notes(swept.folder))
    seconds = record(swept.folder / "runs/01_tiny-sweep-001")
    (swept.folder / "ready").touch()
    again = sweep_here(swept.folder, "lite/01_tiny.ipynb", *LINE, "--resume")
    assert again.code == 0, again.err
    assert [(n[0], *n[2:4]) for n in notes(swept.folder)[before:]] == [
        ("begin", 2, [1e-4]),
        ("end", 2, [1e-4]),
    ]
    found = record(swept.folder / "runs/01_tiny-sweep-001")["combinations"]
    assert [one["state"] for one in found] == ["done"] * 4
    assert found[3]["reason"] == "" and found[3]["exit_code"] == 0
    assert found[3]["seconds"] > seconds["combinations"][3]["seconds"]
    assert found[:3] == seconds["combinations"][:3]

    once_more = sweep_here(
        swept.folder, "lite/01_tiny.ipynb", *LINE, "--resume"
    )
    assert once_more.code == 0
    assert "starts" not in once_more.out and "50.0%" in once_more.out
    assert len(notes(swept.folder)) == before + 2


@pytest.mark.lesson
def test_kill_9_in_the_middle_and_resume(tmp_path, start):
    path = lesson(tmp_path, KILLED)
    line = (path, "--vary", "SEED", 1, 2, 3, "--output", "out")
    process = start(*line, "--time-limit", 300)
    left = pids(tmp_path, 2)
    assert "--time-limit=300.0" in psutil.Process(left[2]).cmdline()
    assert states(tmp_path / "out") == ["done", "running", "waiting"]

    second = sweep_here(tmp_path, *line, "--resume", "--time-limit", 20)
    assert second.code == 2
    assert "Another sweep is at work in out" in second.err
    assert states(tmp_path / "out") == ["done", "running", "waiting"]
    assert all(map(is_alive, left))

    process.kill()
    process.communicate(timeout=60)
    assert all(map(is_alive, left))  # else nothing below is shown
    first = (tmp_path / "out/SEED=1/01_tiny.ipynb").stat().st_mtime_ns
    (tmp_path / "go").touch()
    again = sweep_here(tmp_path, *line, "--resume")
    assert again.code == 0, again.err + again.out
    assert begun(tmp_path) == [1, 2, 2, 3]
    assert states(tmp_path / "out") == ["done"] * 3
    assert not any(map(is_alive, left))
    executed = tmp_path / "out/SEED=1/01_tiny.ipynb"
    assert executed.stat().st_mtime_ns == first


@pytest.mark.lesson
@pytest.mark.parametrize(
    "number, jobs", [(signal.SIGTERM, 2), (signal.SIGINT, 1)]
)
def test_jobs_run_at_once_and_a_signal_ends_them(
    tmp_path, start, number, jobs
):
    path = lesson(tmp_path, ENDLESS)
    line = (path, "--vary", "SEED", 1, 2, 3, "--output", "out")
    process = start(*line, "--jobs", jobs)
    # None ends by itself, so that they are there at once.
    seeds = range(1, jobs + 1)
    started = [pid for seed in seeds for pid in pids(tmp_path, seed)]
    assert all(map(is_alive, started))
    if number == signal.SIGINT:  # as a Ctrl-C that ends `| tee` as well
        process.stdout.close()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert not any(map(is_alive, started))
    assert sorted(begun(tmp_path)) == list(seeds)
    assert states(tmp_path / "out") == ["waiting"] * 3
    assert number == signal.SIGINT or "--resume" in out
    table = (tmp_path / "out/sweep.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in table[1:]] == [
        ["1", "waiting"],
        ["2", "waiting"],
        ["3", "waiting"],
    ]


@pytest.mark.lesson
@pytest.mark.slow
def test_the_kernel_of_a_killed_runner_is_ended_too(tmp_path):
    kill = "import signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    path = lesson(tmp_path, ENDLESS.replace("time.sleep(600)\n", kill))
    done = sweep_here(
        *(tmp_path, path, "--vary", "SEED", 1, "--output", "out"),
    )
    assert done.code == 1
    one = record(tmp_path / "out")["combinations"][0]
    assert (one["state"], one["exit_code"]) == ("failed", -signal.SIGKILL)
    assert not any(map(is_alive, pids(tmp_path, 1)))


def test_a_sweep_within_a_run_ends_with_it(tmp_path):
    """Its runs are marked with directories of their own below the run's."""
    run = tmp_path / "SEED=1"
    within, beside = (
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env=os.environ | {sweep.MARK: str(place)},
        )
        for place in (run / "run/sweep/SEED=7", tmp_path / "SEED=10")
    )
    try:
        sweep._end_processes([run])
        assert within.wait(timeout=60) == -signal.SIGKILL
        assert beside.poll() is None
    finally:
        beside.kill()
        beside.wait()


# --- Refusals: nothing is started, nothing is written -----------------------


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Sweep, expect one paragraph and exit code 2, and return it."""

    def never(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    lesson(tmp_path)

    def sweep_and_read(*arguments, notebook="01_tiny.ipynb"):
        before = sorted(tmp_path.rglob("*"))
        done = sweep_here(tmp_path, notebook, *arguments)
        assert done.code == 2
        assert done.out == ""
        assert len(done.err.strip().splitlines()) == 1
        assert sorted(tmp_path.rglob("*")) == before
        return done.err

    return sweep_and_read


SEEDS = ("--vary", "SEED", "1", "2")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-p", "NAM", "x", *SEEDS], "no parameter NAM. Did you mean NAME"),
        (["--vary", "SEDE", "1", "2"], "no parameter SEDE. Did you mean"),
        (["-p", "RATES", "fast", *SEEDS], "RATES must be a list of numbers"),
        (["--vary", "SEED", "1", "two"], "SEED must be a whole number"),
        (["-p", "SEED", "3", *SEEDS], "SEED is set more than once"),
        ([*SEEDS, *SEEDS], "SEED is set more than once"),
        (
            ["-p", "NAME", "a", "-p", "NAME", "b", *SEEDS],
            "NAME is set more than once",
        ),
        (["-p", "OUTPUT_DIR", "x", *SEEDS], "OUTPUT_DIR can't be set"),
        (["--vary", "OUTPUT_DIR", "x", "y"], "OUTPUT_DIR can't be set"),
        (
            ["--vary", "SEED", "1", "2", "1"],
            "SEED names '1' and '1', which are one",
        ),
        (
            ["--vary", "SEED", "1", "1.0"],
            "SEED names '1' and '1.0', which are",
        ),
        (["--vary", "RATES", "1,2", "[1, 2.0]"], "which are one value"),
        (["--vary", "SEED"], "--vary SEED names no value"),
    ],
)
def test_bad_parameters(refused, arguments, message):
    assert message in refused(*arguments)


def test_a_missing_lesson(refused):
    assert "no notebook" in refused(*SEEDS, notebook="none.ipynb")


def earlier(folder, *varied, notebook="01_tiny.ipynb"):
    """The record of a sweep whose first run is done."""
    planned = sweep.plan(folder / notebook, [], varied, folder / "out")
    planned.combinations[0].state = "done"
    planned.save()
    return planned


def test_a_directory_that_holds_something_else(refused, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.md").write_text("mine")
    for also in ([], ["--resume"]):
        message = refused(*SEEDS, "--output", "out", *also)
        assert "not of a sweep (notes.md)" in message
        message = refused(*SEEDS, "--output", "out/notes.md", *also)
        assert "out/notes.md is a file" in message


def test_an_earlier_sweep_is_left_alone(refused, tmp_path):
    earlier(tmp_path, ("SEED", "1", "2"))
    options = ("--output", "out")
    assert "Add --resume" in refused(*SEEDS, *options)
    message = refused("--vary", "SEED", "1", "3", *options, "--resume")
    assert "other values: SEED was 1, 2, and is 1, 3 now" in message
    message = refused(*SEEDS, "-p", "NAME", "x", *options, "--resume")
    assert "NAME was not set, and is x now" in message
    lesson(tmp_path, name="02_other.ipynb")
    message = refused(*SEEDS, *options, "--resume", notebook="02_other.ipynb")
    assert "sweep of another lesson" in message
    assert "01_tiny.ipynb" in message


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"combinations": [{"name": "x"}]}']
)
def test_a_broken_record(refused, tmp_path, text):
    earlier(tmp_path, ("SEED", "1", "2"))
    (tmp_path / "out" / "sweep.json").write_text(text)
    message = refused(*SEEDS, "--output", "out", "--resume")
    assert "sweep.json is broken" in message


def test_the_same_values_in_other_words_go_on(tmp_path):
    lesson(tmp_path)
    earlier(tmp_path, ("SEED", "1", "2"), ("RATES", "[1e-3, 2]"))
    planned = sweep.plan(
        tmp_path / "01_tiny.ipynb",
        [("RATES", "0.001,2.0")],
        [("SEED", "1.0", "2")],
        tmp_path / "out",
    )
    found = sweep.settle(planned, resume=True)
    assert [one.state for one in found.combinations] == ["done", "waiting"]
    assert [one.name for one in found.combinations] == [
        "SEED=1_RATES=1e-3,2",
        "SEED=2_RATES=1e-3,2",
    ]


def test_a_lock_or_half_a_record_that_a_kill_left_is_no_sweep(tmp_path):
    lesson(tmp_path)
    planned = sweep.plan(
        *(tmp_path / "01_tiny.ipynb", [], [("SEED", "1")], tmp_path / "out")
    )
    planned.folder.mkdir()
    (planned.folder / "sweep.lock").touch()
    (planned.folder / "sweep.json.123.part").write_text("{")
    assert sweep.settle(planned, resume=False) is planned


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--vary"],
        [*SEEDS, "--jobs", "0"],
        [*SEEDS, "--jobs", "two"],
        [*SEEDS, "--time-limit", "0"],
    ],
)
def test_a_command_line_that_is_none(tmp_path, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        runner.main(["sweep", str(lesson(tmp_path)), *arguments])
    assert stop.value.code == 2


# --- Parts ------------------------------------------------------------------


def names(tmp_path, *varied):
    planned = sweep.plan(lesson(tmp_path), [], varied, tmp_path / "out")
    return [one.name for one in planned.combinations]


def test_names_are_safe_bounded_and_all_different(tmp_path):
    texts = [
        *("/data/a b", "/data/ab", "-data-ab", "../x", "é", "ü", ""),
        *("X", "x", "y", "y.log", "long" * 100, "long" * 101, "a\nb", "$(rm)"),
    ]
    found = names(tmp_path, ("SEED", "1", "-2"), ("NAME", *texts))
    logs = [f"{name}.log" for name in found]
    assert len({name.casefold() for name in found + logs}) == 4 * len(texts)
    safe = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    for name in found:
        assert set(name) <= set(safe + "._=+,-")
        assert len(name) <= 100 and name.startswith(("SEED=1_", "SEED=-2_"))
    assert found == names(tmp_path, ("SEED", "1", "-2"), ("NAME", *texts))


@pytest.mark.parametrize(
    "results, expected",
    [
        (None, (None, None)),
        ("{", (None, None)),
        ("[]", (None, None)),
        ('{"leaderboard": 3}', (None, None)),
        ('{"leaderboard": []}', (None, None)),
        ('{"leaderboard": [{"run": "a"}]}', (None, None)),
        ('{"leaderboard": [{"run": "a", "after": NaN}]}', (None, None)),
        (
            '{"leaderboard": [{"run": "a", "after": 0.5}, '
            '{"run": "b", "after": 0.75}, {"run": "c", "after": 0.75}]}',
            ("b", 0.75),
        ),
    ],
)
def test_the_best_run_of_any_results(tmp_path, results, expected):
    one = Sweep(tmp_path, "x.ipynb", {}, [Combination("N=1", {"N": "1"})])
    path = tmp_path / "N=1" / "run" / "results.json"
    path.parent.mkdir(parents=True)
    if results is not None:
        path.write_text(results)
    row = one.rows()[0]
    assert (row["best_run"], row["accuracy"]) == expected


def test_signals_are_collected_and_what_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with sweep._noted_signals() as caught:
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
        assert caught == [signal.SIGTERM, signal.SIGINT]
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with sweep._noted_signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
        assert caught == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_runner_tells_of_sweeps_and_imports_no_training():
    code = (
        "import sys, grpo_lab.sweep; "
        "print({'torch', 'pandas', 'grpo_lab.grid'} & set(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert loaded.stdout == "set()\n", loaded.stderr
    assert "sweep LESSON --vary" in " ".join(
        runner._parser().format_help().split()
    )
