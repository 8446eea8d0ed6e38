"""Sweeps: every combination once, whatever fails, is killed or comes twice."""

import contextlib
import csv
import io
import json
import signal
import subprocess
import textwrap
from types import SimpleNamespace

import pytest
from lessons import ENDLESS, is_alive, lesson, pids, start, wait_until

from grpo_lab import sweep
from grpo_lab.files import write_json, write_whole

# One line for each start and each end of a run, in the working directory.
NOTE = """\
import json

def note(event):
    with open("notes.txt", "a") as file:
        file.write(json.dumps([event, SEED, RATES, OUTPUT_DIR]) + "\\n")

note("begin")
"""
RESULTS = """\
assert SEED == 1 or Path("ready").exists(), "not ready"
board = [{"run": "b", "after": SEED / 4}, {"run": "a", "after": 0.125}]
Path(OUTPUT_DIR).mkdir(parents=True)
results = Path(OUTPUT_DIR, "results.json")
results.write_text(json.dumps({"leaderboard": board}))
note("end")
"""
# The first time the second run does not end.
KILLED = f"""\
if SEED == 2 and not Path("go").exists():
{textwrap.indent(ENDLESS, "    ")}
"""


def sweep_here(folder, *arguments):
    """A sweep in this process; its exit code and both streams."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = sweep.main(list(map(str, arguments)))
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


def notes(folder):
    text = (folder / "notes.txt").read_text()
    return [json.loads(line) for line in text.splitlines()]


def states(folder):
    with (folder / "sweep.csv").open(newline="") as file:
        return [row["state"] for row in csv.DictReader(file)]


# --- Real runs: these tests start processes ---------------------------------

LINE = (
    *("lite/01_tiny.ipynb", "-p", "PROFILE", "a {b}'c"),
    *("-p", "RATES", "1e-4", "--vary", "SEED", 1, 2),
)


@pytest.mark.lesson
def test_each_combination_runs_once_and_resume_runs_the_failed_one(tmp_path):
    lesson(tmp_path / "lite", NOTE, RESULTS)
    done = sweep_here(tmp_path, *LINE)
    folder = "runs/01_tiny-sweep-001"
    place = tmp_path / folder
    assert done.code == 1
    # One at a time, in order: each ends before the next begins.
    first, second = (
        [seed, [1e-4], f"{folder}/SEED={seed}/run"] for seed in (1, 2)
    )
    began = [["begin", *first], ["end", *first], ["begin", *second]]
    assert notes(tmp_path) == began
    assert json.loads((place / "sweep.json").read_text()) == {
        "lesson": str(tmp_path / "lite/01_tiny.ipynb"),
        "SEED": [1, 2],
        "RATES": [[1e-4]],
        "PROFILE": ["a {b}'c"],
    }
    log = f"{folder}/SEED=2/log.txt"
    assert f"AssertionError: not ready ({log})" in done.out
    assert "--resume" in done.out
    lines = [line.split() for line in done.out.splitlines()]
    [row] = [line for line in lines if line[:2] == ["SEED=1", "done"]]
    assert row[3:] == ["b", "0.25"]
    assert any(line[:2] == ["SEED=2", "failed"] for line in lines)
    with (place / "sweep.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == [
        *("SEED", "PROFILE", "RATES"),
        *("state", "seconds", "best_run", "accuracy"),
    ]
    assert [row["accuracy"] for row in table] == ["0.25", ""]
    assert float(table[0]["seconds"]) > 0

    (tmp_path / "ready").touch()
    again = sweep_here(tmp_path, *LINE, "--resume")
    assert again.code == 0, again.err
    assert notes(tmp_path)[3:] == [["begin", *second], ["end", *second]]
    assert states(place) == ["done"] * 2

    once_more = sweep_here(tmp_path, *LINE, "--resume")
    assert once_more.code == 0
    assert "starts" not in once_more.out and "0.5" in once_more.out
    assert len(notes(tmp_path)) == 5


@pytest.mark.lesson
def test_kill_9_leaves_nothing_and_resume_goes_on(tmp_path):
    path = lesson(tmp_path, NOTE, KILLED)
    line = (path, "--vary", "SEED", 1, 2, "--output", "out")
    process = start(tmp_path, "sweep", *line)
    left = pids(tmp_path, 2)
    second = sweep_here(tmp_path, *line, "--resume")
    assert second.code == 2 and "is at work in out" in second.err
    assert all(map(is_alive, left))

    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not any(map(is_alive, left)))
    executed = tmp_path / "out/SEED=1/01_tiny.ipynb"
    first = executed.stat().st_mtime_ns
    (tmp_path / "go").touch()
    again = sweep_here(tmp_path, *line, "--resume")
    assert again.code == 0, again.err + again.out
    assert [one[1] for one in notes(tmp_path)] == [1, 2, 2]
    assert states(tmp_path / "out") == ["done"] * 2
    assert executed.stat().st_mtime_ns == first


@pytest.mark.lesson
@pytest.mark.parametrize(
    "number, jobs", [(signal.SIGTERM, 2), (signal.SIGINT, 1)]
)
def test_jobs_run_at_once_and_a_signal_ends_them(tmp_path, number, jobs):
    path = lesson(tmp_path, NOTE, ENDLESS)
    line = (path, "--vary", "SEED", 1, 2, 3, "--output", "out")
    process = start(tmp_path, "sweep", *line, "--jobs", jobs)
    # None ends by itself, so that they are there at once.
    seeds = range(1, jobs + 1)
    started = [pid for seed in seeds for pid in pids(tmp_path, seed)]
    assert all(map(is_alive, started))
    if number == signal.SIGINT:  # as a Ctrl-C that ends `| tee` as well
        process.stdout.close()
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert not any(map(is_alive, started))
    assert sorted(one[1] for one in notes(tmp_path)) == list(seeds)
    assert number == signal.SIGINT or "--resume" in out
    assert states(tmp_path / "out") == ["waiting"] * 3


@pytest.mark.lesson
@pytest.mark.slow
def test_the_kernel_of_a_killed_runner_is_ended_too(tmp_path):
    kill = "import signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    cell = ENDLESS.replace("time.sleep(600)\n", kill)
    path = lesson(tmp_path, NOTE, cell)
    done = sweep_here(tmp_path, path, "--vary", "SEED", 1, "--output", "out")
    assert done.code == 1
    assert "failed: exit code -9" in done.out
    assert not any(map(is_alive, pids(tmp_path, 1)))


# --- Refusals: nothing is started, nothing is written -----------------------


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Sweep, expect one paragraph and exit code 2, and return it."""

    def never(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)
    lesson(tmp_path)

    def files():
        every = sorted(tmp_path.rglob("*"))
        return [path for path in every if path.name != ".lock"]

    def sweep_and_read(*arguments, notebook="01_tiny.ipynb"):
        before = files()
        done = sweep_here(tmp_path, notebook, *arguments)
        assert (done.code, done.out) == (2, "")
        assert len(done.err.strip().splitlines()) == 1
        assert files() == before
        return done.err

    return sweep_and_read


SEEDS = ("--vary", "SEED", "1", "2")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-p", "PROFIL", "x", *SEEDS], "no parameter PROFIL. Did you mean"),
        (["--vary", "SEDE", "1", "2"], "no parameter SEDE. Did you mean"),
        (["-p", "RATES", "fast", *SEEDS], "RATES must be a list of numbers"),
        (["--vary", "SEED", "1", "two"], "SEED must be a whole number"),
        (["-p", "SEED", "3", *SEEDS], "Name each parameter once"),
        ([*SEEDS, *SEEDS], "Name each parameter once"),
        (["-p", "OUTPUT_DIR", "x", *SEEDS], "OUTPUT_DIR can't be set"),
        (["--vary", "SEED", "1", "1.0"], "names 1 more than once"),
        (["--vary", "RATES", "1,2", "[1, 2.0]"], "more than once"),
        (["--vary", "SEED"], "with all values"),
        ([*SEEDS, "--jobs", "0"], "--jobs is 1 or more"),
    ],
)
def test_bad_parameters(refused, arguments, message):
    assert message in refused(*arguments)


def test_a_missing_lesson_and_another_directory(refused, tmp_path):
    assert "no notebook" in refused(*SEEDS, notebook="none.ipynb")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.md").write_text("mine")
    message = refused(*SEEDS, "--output", "out", "--resume")
    assert "not of a sweep (notes.md)" in message
    message = refused(*SEEDS, "--output", "out/notes.md")
    assert "out/notes.md can't be used" in message


def earlier(folder, *varied):
    """A sweep of which the first run is done."""
    path, out = folder / "01_tiny.ipynb", folder / "out"
    planned = sweep.plan(path, [], varied, out)
    sweep.settle(planned, resume=False)
    first = out / next(iter(planned.runs))
    first.mkdir()
    (first / "01_tiny.html").touch()
    return planned


def test_an_earlier_sweep_is_left_alone(refused, tmp_path):
    earlier(tmp_path, ("SEED", "1", "2"))
    options = ("--output", "out")
    assert "Add --resume" in refused(*SEEDS, *options)
    message = refused("--vary", "SEED", "1", "3", *options, "--resume")
    assert "SEED was [1, 2] and is [1, 3]" in message
    message = refused(*SEEDS, "-p", "PROFILE", "x", *options, "--resume")
    assert "PROFILE was not set and is ['x']" in message
    lesson(tmp_path, name="02_other.ipynb")
    message = refused(*SEEDS, *options, "--resume", notebook="02_other.ipynb")
    assert "lesson was" in message and "01_tiny.ipynb" in message
    (tmp_path / "out" / "sweep.json").write_text("{")
    message = refused(*SEEDS, "--output", "out", "--resume")
    assert "sweep.json is broken" in message


def test_the_same_values_in_other_words_go_on(tmp_path):
    lesson(tmp_path)
    earlier(tmp_path, ("SEED", "1", "2"), ("RATES", "[1e-3, 2]"))
    # A kill may have left half a record.
    (tmp_path / "out" / "sweep.json.123.part").write_text("{")
    planned = sweep.plan(
        tmp_path / "01_tiny.ipynb",
        [],
        [("RATES", "[1e-3, 2.0]"), ("SEED", "1.0", "2")],
        tmp_path / "out",
    )
    sweep.refuse_other_files(planned.folder)
    sweep.settle(planned, resume=True)
    assert [planned.is_done(name) for name in planned.runs] == [True, False]


# --- Parts ------------------------------------------------------------------


def test_names_are_safe_bounded_and_all_different(tmp_path):
    texts = [
        *("/data/a b", "/data/ab", "-data-ab", "../x", "é", "ü", ""),
        *("X", "x", "y", "y-1", "long" * 100, "long" * 101, "a\nb", "$(rm)"),
    ]
    varied = [("SEED", "1", "-2"), ("PROFILE", *texts)]
    path = lesson(tmp_path)
    found = list(sweep.plan(path, [], varied, tmp_path).runs)
    assert len({name.casefold() for name in found}) == 2 * len(texts)
    safe = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    for name in found:
        assert set(name) <= set(safe + "._=+,-~")
        assert len(name) <= 100 and name.startswith("PROFILE=")
    two = [("SEED", "1", "2"), ("RATES", "[1e-3, 2e-3]", "1e-4")]
    assert list(sweep.plan(path, [], two, tmp_path).runs) == [
        "RATES=0.001,0.002_SEED=1",
        "RATES=0.0001_SEED=1",
        "RATES=0.001,0.002_SEED=2",
        "RATES=0.0001_SEED=2",
    ]


@pytest.mark.parametrize(
    "results, expected",
    [
        (None, ("", "")),
        ("{", ("", "")),
        ("[]", ("", "")),
        ('{"other": 1}', ("", "")),
        ('{"leaderboard": [{"run": "a"}]}', ("", "")),
        ('{"leaderboard": [{"run": "a", "after": NaN}]}', ("", "")),
        ('{"leaderboard": [{"run": "a", "after": null}]}', ("", "")),
        (
            '{"leaderboard": [{"run": "a", "after": 0.5}, '
            '{"run": "b", "after": 0.75}, {"run": "c", "after": 0.75}]}',
            ("b", "0.75"),
        ),
    ],
)
def test_the_best_run_of_any_results(tmp_path, results, expected):
    planned = sweep.plan(lesson(tmp_path), [], [("SEED", "1")], tmp_path)
    place = tmp_path / "SEED=1"
    notebook = {"metadata": {"papermill": {"duration": 7.4}}}
    write_json(place / "01_tiny.ipynb", notebook)
    if results is not None:
        write_whole(place / "run" / "results.json", results)
    [row] = sweep.rows(planned).to_dict("records")
    assert (row["best_run"], row["accuracy"]) == expected
    assert row["seconds"] == "7"
