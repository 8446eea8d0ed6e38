"""Runner: bad input before a kernel, limits that hold, nothing lost."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from grpo_lab import runner
from grpo_lab.build import METADATA
from grpo_lab.errors import LabError

PARAMETERS = """\
PROFILE: str = "lite"  # a row of the table
RATES: list[float] = []  # learning rates
OUTPUT_DIR: str = "runs/tiny"  # where results go
"""
CHECK = """\
from grpo_lab.parameters import check

settings = check(globals())
"""
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
# A child in a session of its own, as a server or a data loader may be.
ENDLESS = """\
import os, subprocess, sys, time

code = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
Path("kernel.pid").write_text(str(os.getpid()))
Path("child.pid").write_text(str(child.pid))
print("waiting", flush=True)
time.sleep(600)
"""


def lesson(folder, *cells, name="01_tiny.ipynb"):
    """A lesson with a title, parameters, their check and these cells."""
    parameters = new_code_cell(PARAMETERS)
    parameters.metadata["tags"] = ["parameters"]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    notebook = new_notebook(metadata=METADATA)
    notebook.cells = [
        new_markdown_cell("# A tiny lesson"),
        parameters,
        new_code_cell(CHECK + "from pathlib import Path"),
        *map(new_code_cell, cells),
    ]
    nbformat.write(notebook, path)
    return path


def start(cwd, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_lab.runner", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def finish(cwd, *arguments):
    """Run to the end; the exit code and both streams."""
    process = start(cwd, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def shown(executed):
    """All text of a notebook's outputs."""
    cells = nbformat.read(executed, as_version=4).cells
    outputs = [o for cell in cells for o in cell.get("outputs", ())]
    return "".join(o.get("text", "") + o.get("evalue", "") for o in outputs)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def appears(path, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (path.exists() and path.read_text()):
        time.sleep(0.05)
    return path.read_text()


def test_a_lesson_runs_from_another_directory_and_says_where_things_are(
    tmp_path,
):
    path = lesson(tmp_path / "a {b} repo" / "lite", RESULTS)
    cwd = tmp_path / "elsewhere {x}"
    cwd.mkdir()
    code, out, err = finish(
        cwd, path, "-p", "PROFILE", "pocket", "-p", "RATES", "1e-3,2"
    )
    assert code == 0, err
    assert err == ""
    folder = Path("runs/01_tiny-001")
    assert f"Notebook:    {folder}/01_tiny.ipynb\n" in out
    assert f"HTML:        {folder}/01_tiny.html\n" in out
    assert f"tensorboard --logdir {folder}/run\n" in out
    assert "rank  model\n1     pocket-qwen" in out
    assert "s] A tiny lesson" in out
    assert (cwd / folder / "01_tiny.ipynb").exists()
    assert "A tiny lesson" in (cwd / folder / "01_tiny.html").read_text()
    facts = json.loads((cwd / folder / "run" / "results.json").read_text())
    assert facts["settings"] == {
        "PROFILE": "pocket",
        "RATES": [1e-3, 2.0],
        "OUTPUT_DIR": f"{folder}/run",
    }
    assert facts["cwd"] == str(cwd)
    assert facts["tqdm"] == "1"
    assert not (tmp_path / "a {b} repo" / "lite" / "runs").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-p", "PROFLE", "pocket"], "no parameter PROFLE. Did you mean"),
        (["-p", "profile", "pocket"], "Did you mean PROFILE?"),
        (["-p", "RATES", "fast"], "RATES must be a list of numbers"),
    ],
)
def test_a_bad_parameter_stops_before_anything_is_written(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    path = lesson(tmp_path, "1")
    assert runner.main([str(path), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-p", "PROFLE", "pocket"], "LabError: .*Did you mean PROFILE"),
        (["-p", "PROFILE", "3"], "LabError: PROFILE must be text"),
    ],
)
def test_plain_papermill_stops_at_a_bad_parameter_too(
    tmp_path, arguments, message
):
    path = lesson(tmp_path, "Path('reached').touch()")
    result = subprocess.run(
        [sys.executable, "-m", "papermill", path, tmp_path / "out.ipynb"]
        + ["-k", "python3", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode != 0
    assert re.search(message, result.stderr)
    assert not (tmp_path / "reached").exists()


def test_a_missing_lesson_and_a_file_that_is_none(tmp_path):
    with pytest.raises(LabError, match="no notebook"):
        runner.run(tmp_path / "none.ipynb", {})
    for text in ("not json", "{}", '{"nbformat": 4, "cells": 3}'):
        broken = tmp_path / "broken.ipynb"
        broken.write_text(text)
        with pytest.raises(LabError, match="is no Jupyter notebook"):
            runner.run(broken, {})


def test_a_notebook_without_parameters_takes_none(tmp_path):
    path = tmp_path / "plain.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1")]), path)
    with pytest.raises(LabError, match="Its parameters are none"):
        runner.run(path, {"PROFILE": "pocket"})
    # The next number, whatever else lies there.
    for name in ("plain-007", "plain-old", "plainer-009"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    code, out, err = finish(tmp_path, path)
    assert code == 0, err
    assert "runs/plain-008/plain.ipynb" in out
    assert "TensorBoard" not in out


def test_an_output_directory_in_use_is_refused_before_a_kernel(tmp_path):
    path = lesson(tmp_path, "1")
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(LabError, match="--resume"):
        runner.run(path, {}, out)
    (out / "02_other.ipynb").write_text("{}")
    with pytest.raises(LabError, match=r"another lesson \(02_other"):
        runner.run(path, {}, out, resume=True)
    with pytest.raises(LabError, match="is a file"):
        runner.run(path, {}, out / "notes.txt")
    assert sorted(p.name for p in out.iterdir()) == [
        "02_other.ipynb",
        "notes.txt",
    ]


def test_a_failing_cell_keeps_the_notebook_and_resume_goes_on(tmp_path):
    second_time = (
        "print('so far')\n"
        "assert Path('ready').exists(), 'the first time fails'"
    )
    path = lesson(tmp_path, second_time, "print('the end')")
    code, out, err = finish(tmp_path, path)
    executed = tmp_path / "runs/01_tiny-001/01_tiny.ipynb"
    assert code == 1
    assert "AssertionError: the first time fails" in err
    assert str(executed) in err or "runs/01_tiny-001/01_tiny.ipynb" in err
    assert "so far" in shown(executed) and "the end" not in shown(executed)

    (tmp_path / "ready").touch()
    code, out, err = finish(tmp_path, path, "--resume")
    assert code == 0, err
    assert "the end" in shown(executed)
    assert not (tmp_path / "runs/01_tiny-002").exists()


@pytest.mark.lesson
def test_a_kernel_that_dies_is_a_failed_lesson(tmp_path):
    path = lesson(tmp_path, "print('before')", "import os; os._exit(9)")
    code, _, err = finish(tmp_path, path)
    assert code == 1
    assert "ended without a word" in err and "memory" in err
    assert "before" in shown(tmp_path / "runs/01_tiny-001/01_tiny.ipynb")


def test_the_time_limit_ends_the_kernel_and_its_children(tmp_path):
    # On a slow machine the kernel needs longer to get to its child.
    for limit in (12, 60, 300):
        place = tmp_path / str(limit)
        place.mkdir()
        code, _, err = finish(
            place, lesson(place, ENDLESS), "--time-limit", limit
        )
        assert code == 124
        assert f"limit of {limit} s" in err and "--time-limit" in err
        if (place / "child.pid").exists():
            break
    child = int((place / "child.pid").read_text())
    kernel = int((place / "kernel.pid").read_text())
    assert not is_alive(child) and not is_alive(kernel)
    assert "waiting" in shown(place / "runs/01_tiny-001/01_tiny.ipynb")


@pytest.mark.lesson
def test_a_time_limit_before_the_kernel_is_up_holds_too(tmp_path):
    code, _, err = finish(
        tmp_path, lesson(tmp_path, "1"), "--time-limit", "0.05"
    )
    assert code == 124, err


@pytest.mark.lesson
def test_the_cell_time_limit_holds(tmp_path):
    for limit in (3, 15, 75):
        place = tmp_path / str(limit)
        place.mkdir()
        path = lesson(place, "print('short')", ENDLESS)
        code, _, err = finish(place, path, "--cell-time-limit", limit)
        assert code == 124
        if (place / "child.pid").exists():
            break
    assert "--cell-time-limit" in err
    assert not is_alive(int((place / "child.pid").read_text()))
    assert "short" in shown(place / "runs/01_tiny-001/01_tiny.ipynb")


@pytest.mark.lesson
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_runner_ends_the_kernel(tmp_path, number):
    process = start(tmp_path, lesson(tmp_path, ENDLESS))
    child = int(appears(tmp_path / "child.pid"))
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not is_alive(child)


def test_the_callers_signal_handler_comes_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    path = lesson(tmp_path, "1")
    assert runner.main([str(path), "-p", "PROFLE", "pocket"]) == 2
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.lesson
def test_what_a_finished_lesson_left_running_is_ended(tmp_path):
    leave = ENDLESS.rsplit("time.sleep", 1)[0]
    code, _, err = finish(tmp_path, lesson(tmp_path, leave))
    assert code == 0, err
    assert not is_alive(int((tmp_path / "child.pid").read_text()))


@pytest.mark.lesson
def test_a_kernel_of_the_same_name_elsewhere_is_not_taken(
    tmp_path, monkeypatch
):
    spec = tmp_path / "share" / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        '{"argv": ["/bin/false"], "display_name": "x", "language": "python"}'
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    path = lesson(tmp_path, "import sys; print(sys.executable)")
    code, out, err = finish(tmp_path, path)
    assert code == 0, err
    executed = tmp_path / "runs/01_tiny-001/01_tiny.ipynb"
    assert os.path.basename(sys.executable) in shown(executed)


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "soon"])
def test_a_time_limit_is_a_positive_number(limit, capsys):
    with pytest.raises(SystemExit) as stop:
        runner.main(["lesson.ipynb", "--time-limit", limit])
    assert stop.value.code == 2
