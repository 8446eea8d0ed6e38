"""Runner: bad input before a kernel, limits that hold, nothing lost."""

import json
import os
import re
import signal
import subprocess
import sys

import nbformat
import psutil
import pytest
from lessons import (
    ENDLESS,
    appears,
    is_alive,
    lesson,
    pids,
    shown,
    start,
)
from nbformat.v4 import new_code_cell, new_notebook

from grpo_lab import cli, processes, runner
from grpo_lab.errors import LabError

RESULTS = """\
import json, os
from pathlib import Path

folder = Path(settings["OUTPUT_DIR"])
folder.mkdir(parents=True)
facts = {
    "leaderboard_text": "rank  model\\n1     pocket-qwen",
    "settings": settings,
    "cwd": os.getcwd(),
    "tqdm": os.environ["TQDM_DISABLE"],
}
(folder / "results.json").write_text(json.dumps(facts))
(folder / "events.out.tfevents.1").touch()
"""


def finish(cwd, *arguments, **options):
    """Run to the end; the exit code and both streams."""
    process = start(cwd, *arguments, **options)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


# --- Nothing is started -----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "PROFLE", "pocket"], "no parameter PROFLE. Did you mean"),
        (["-p", "RATES", "fast"], "RATES must be a list of numbers"),
    ],
)
def test_a_bad_parameter_stops_before_anything_is_written(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    path = lesson(tmp_path, "1")
    before = signal.getsignal(signal.SIGTERM)
    assert runner.main([str(path), *arguments]) == 2
    assert signal.getsignal(signal.SIGTERM) == before
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_what_is_no_lesson(tmp_path):
    with pytest.raises(LabError, match="no notebook"):
        runner.run(tmp_path / "none.ipynb", {})
    for text in ("not json", '{"nbformat": 4, "cells": 3}'):
        broken = tmp_path / "broken.ipynb"
        broken.write_text(text)
        with pytest.raises(LabError, match="is no Jupyter notebook"):
            runner.run(broken, {})


def test_an_output_directory_in_use_is_refused(tmp_path):
    path = lesson(tmp_path, "1")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(LabError, match="an earlier run.*--resume"):
        runner.run(path, {}, out)
    (out / "02_other.ipynb").write_text("{}")
    with pytest.raises(LabError, match="holds 02_other"):
        runner.run(path, {}, out, resume=True)
    with pytest.raises(LabError, match="is a file"):
        runner.run(path, {}, out / "notes.txt")
    assert len(list(out.iterdir())) == 2


@pytest.mark.parametrize("limit", ["0", "nan"])
def test_a_time_limit_is_a_positive_number(limit, tmp_path, capsys):
    path = str(lesson(tmp_path))
    assert runner.main([path, f"--time-limit={limit}"]) == 2
    assert "more than 0" in capsys.readouterr().err


def test_the_command_knows_every_verb_and_imports_none(monkeypatch, capsys):
    """A process: what `grpo-lab --help` has imported."""
    code = "import sys; from grpo_lab import cli; cli.main(['--help']); "
    code += "print(len(sys.modules), 'argparse' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    for words in cli.VERBS:
        assert " ".join(words) in done.stdout
    assert done.stdout.splitlines()[-1].endswith("False"), done.stderr
    assert cli.main(["rnu"]) == 2
    called = []
    monkeypatch.setattr(runner, "main", called.append)
    cli.main(["run", "x.ipynb"])
    assert called == [["x.ipynb"]]
    with pytest.raises(SystemExit):
        cli.main(["rewards", "check", "--help"])


# --- Tests that start a kernel or other processes ---------------------------


def test_plain_papermill_stops_at_a_bad_parameter_too(tmp_path):
    path = lesson(tmp_path, "Path('reached').touch()")
    options = ("-k", "python3", "-p", "PROFLE", "pocket")
    code, _, err = finish(
        tmp_path, path, tmp_path / "out.ipynb", *options, module="papermill"
    )
    assert code != 0
    assert re.search("LabError: .*Did you mean PROFILE", err)
    assert not (tmp_path / "reached").exists()


def test_a_lesson_runs_from_another_directory_and_says_where_things_are(
    tmp_path,
):
    path = lesson(tmp_path / "a {b} repo" / "lite", RESULTS)
    cwd = tmp_path / "elsewhere {x}"
    cwd.mkdir()
    code, out, err = finish(
        cwd, path, "-p", "PROFILE", "pocket", "-p", "RATES", "1e-3,2"
    )
    assert (code, err) == (0, "")
    folder = "runs/01_tiny-001"
    for said in (
        f"Notebook:    {folder}/01_tiny.ipynb\n",
        f"HTML:        {folder}/01_tiny.html\n",
        f"tensorboard --logdir {folder}/run\n",
        "rank  model\n1     pocket-qwen",
        "s] A tiny lesson",
    ):
        assert said in out
    assert (cwd / folder / "01_tiny.ipynb").exists()
    assert "A tiny lesson" in (cwd / folder / "01_tiny.html").read_text()
    facts = json.loads((cwd / folder / "run" / "results.json").read_text())
    assert facts["settings"] == {
        "PROFILE": "pocket",
        "SEED": 0,
        "RATES": [1e-3, 2.0],
        "OUTPUT_DIR": f"{folder}/run",
    }
    assert (facts["cwd"], facts["tqdm"]) == (str(cwd), "1")
    assert not (path.parent / "runs").exists()


def test_a_notebook_without_parameters_and_the_next_number(
    tmp_path, monkeypatch
):
    """And a kernel of the same name elsewhere is not taken."""
    spec = tmp_path / "share" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        '{"argv": ["/bin/false"], "display_name": "x", "language": "python"}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    path = tmp_path / "plain.ipynb"
    cell = new_code_cell("import sys; print(sys.executable)")
    nbformat.write(new_notebook(cells=[cell]), path)
    with pytest.raises(LabError, match="Its parameters are none"):
        runner.run(path, {"PROFILE": "pocket"})
    for name in ("plain-007", "plain-old", "plainer-009"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    code, out, err = finish(tmp_path, path)
    assert code == 0, err
    assert "runs/plain-008/plain.ipynb" in out and "TensorBoard" not in out
    executed = tmp_path / "runs/plain-008/plain.ipynb"
    assert os.path.basename(sys.executable) in shown(executed)


def test_a_failing_cell_keeps_the_notebook_and_resume_goes_on(tmp_path):
    """What a lesson has left running is ended, however the lesson ends."""
    leave = ENDLESS.rsplit("time.sleep", 1)[0]
    second_time = "assert Path('ready').exists(), 'the first time fails'"
    path = lesson(tmp_path, leave, second_time, "print('the end')")
    code, out, err = finish(tmp_path, path)
    executed = tmp_path / "runs/01_tiny-001/01_tiny.ipynb"
    assert code == 1
    assert "AssertionError: the first time fails" in err
    assert "runs/01_tiny-001/01_tiny.ipynb" in err
    assert "waiting" in shown(executed) and "the end" not in shown(executed)
    assert not executed.with_suffix(".html").exists()
    assert not is_alive(pids(tmp_path)[0])

    (tmp_path / "ready").touch()
    code, out, err = finish(tmp_path, path, "--resume")
    assert code == 0, err
    assert "the end" in shown(executed)
    assert executed.with_suffix(".html").exists()
    assert not (tmp_path / "runs/01_tiny-002").exists()
    assert not is_alive(pids(tmp_path)[0])


@pytest.mark.lesson
def test_a_kernel_that_dies_is_a_failed_lesson(tmp_path):
    path = lesson(tmp_path, "print('before')", "import os; os._exit(9)")
    code, _, err = finish(tmp_path, path)
    assert code == 1
    assert "process died" in err and "memory" in err
    assert "before" in shown(tmp_path / "runs/01_tiny-001/01_tiny.ipynb")


@pytest.mark.lesson
def test_the_time_limit_ends_the_kernel_and_its_children(tmp_path):
    process = start(tmp_path, lesson(tmp_path, ENDLESS), "--time-limit", 30)
    left = pids(tmp_path)
    # Another run in the same directory would do everything twice.
    second = finish(tmp_path, tmp_path / "01_tiny.ipynb", "--resume")
    assert second[0] == 2 and "is at work in" in second[2]
    _, err = process.communicate(timeout=120)
    assert process.returncode == 124
    assert "--time-limit of 30 s" in err
    assert not any(map(is_alive, left))
    assert "waiting" in shown(tmp_path / "runs/01_tiny-001/01_tiny.ipynb")


@pytest.mark.lesson
@pytest.mark.parametrize(
    ("option", "limit"), [("--time-limit", 0.05), ("--cell-time-limit", 8)]
)
def test_a_limit_before_the_kernel_is_up_and_one_of_a_cell(
    tmp_path, option, limit
):
    path = lesson(tmp_path, "print('short')", ENDLESS)
    code, _, err = finish(tmp_path, path, option, limit)
    assert code == 124 and option in err
    if option == "--cell-time-limit":
        assert not is_alive(pids(tmp_path)[0])
        assert "short" in shown(tmp_path / "runs/01_tiny-001/01_tiny.ipynb")


@pytest.mark.lesson
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_runner_ends_the_kernel(tmp_path, number):
    process = start(tmp_path, lesson(tmp_path, ENDLESS))
    left = pids(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert not any(map(is_alive, left))


# --- Processes --------------------------------------------------------------

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = """\
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"]
)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_tree_is_ended_with_what_ignores_the_request(tmp_path):
    log = tmp_path / "new" / "log"
    process = processes.start([sys.executable, "-c", STUBBORN], log)
    child = int(appears(log))
    [root, _] = processes.tree(process.pid)
    began = root.create_time()
    # A number that was given to another process later is left alone.
    processes.end_tree(process.pid, started=began - 3600)
    assert processes.is_running(root)
    processes.end_tree(process.pid, patience=0.2, started=began)
    assert not processes.is_running(root) and not is_alive(child)
    processes.end_tree(process.pid)  # gone already
    # psutil takes no number for the process that asks.
    processes.end_tree(None)


def test_a_zombie_does_not_run():
    """Else one would wait for ever for a process that nobody asks."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert psutil.pid_exists(child.pid)
    assert not processes.is_running(process)
    child.wait()
    assert not processes.is_running(process)


def test_a_run_within_a_run_ends_with_it(tmp_path):
    """Its mark is a directory of its own below the outer one's."""
    run = tmp_path / "SEED=1"
    within, beside = (
        processes.start(SLEEP, tmp_path / "log", {processes.MARK: str(place)})
        for place in (run / "run/sweep/SEED=7", tmp_path / "SEED=10")
    )
    try:
        processes.end_marked([run])
        assert within.wait(timeout=60) == -signal.SIGKILL
        assert beside.poll() is None
    finally:
        processes.end_tree(beside.pid)


def test_what_is_ignored_stays_ignored_and_handlers_come_back():
    numbers = (signal.SIGHUP, signal.SIGTERM)
    caught = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with processes.on_signals(numbers, caught.append):
            for number in numbers:
                os.kill(os.getpid(), number)
        assert caught == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ports_of_this_machine():
    port = processes.free_port()
    assert processes.is_free(port)
    for wrong in (0, -1, 70_000):
        assert not processes.is_free(wrong)
