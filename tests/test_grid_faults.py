"""What breaks while a grid trains: each with a real kill.

At most one step is lost, nothing that was finished is done again, and nothing
broken is taken for a result: every run ends as one that was left alone.
`test_grid.py` has the kills of a grid in one process, in training, in a
checkpoint and in an evaluation, and a disk that fills up there; here are those
of a grid on workers, of this machine or on Ray. What takes longest is slow:
`make test-slow`. On 2 cores the disk that fills up took 44 s,
the loss of a machine 36 s, the kill of a kernel 23 s, a worker that is lost
again and again 13 s, a population whose workers are lost 21 s.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import nbformat
import psutil
import pytest
from killed_grid import held_elsewhere
from ray_grid import assert_same, options, plan, small_task, starts

from grpo_lab import grid, training
from grpo_lab.errors import LabError
from grpo_lab.files import read_metrics, write_json
from grpo_lab.grid.cluster import PretendedCluster
from grpo_lab.grid.plan import plan as plan_of
from grpo_lab.grid.state import RunState, hold

TESTS = Path(__file__).parent
ROOM_FOR_ROWS = 48 * 1024
"""Bytes for a row of metrics and some completions; a checkpoint has more."""

TESTED = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}


def assert_all_same(found: grid.Grid, expected: grid.Grid) -> None:
    """Every run is done, with each step once, as if nothing had been."""
    for run, whole in zip(found.runs, expected.runs, strict=True):
        assert_same(run, whole)


def rows_of(directory: Path) -> int:
    """Steps that a run's metrics tell."""
    return len(read_metrics(directory / "metrics.csv"))


def wait_for_rows(place: Path, rows: int, seconds: float = 180) -> Path:
    """The directory of the first run at work that has made so many steps."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for path in place.glob("runs/*/metrics.csv"):
            over = (path.parent / "result.json").exists()
            if not over and rows_of(path.parent) >= rows:
                return path.parent
        time.sleep(0.01)
    raise AssertionError(f"no run in {place} has made {rows} steps")


def wait_for_death(process: int) -> None:
    """Until a process that was killed writes no more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


def once_at(step: int, act):
    """A progress callback that acts once."""
    done = []

    def progress(settings, at, total, row):
        if at >= step and not done:
            done.append(act())

    return progress


def slowed(seconds: float):
    """The reward of the tests, slow enough for something to happen."""

    def variety(completions, **kwargs) -> list[float]:
        time.sleep(seconds)
        return [float(len(set(chat[0]["content"]))) for chat in completions]

    return variety


@pytest.fixture(params=["here", "ray"])
def where(request) -> str:
    """Two workers: processes of this machine, or on a cluster."""
    if request.param == "here":
        return "2"
    return request.getfixturevalue("machines").address


def test_a_worker_that_is_killed(where, here, both, tmp_path):
    """Another one goes on from its last step."""
    killed = []

    def kill():
        folder = wait_for_rows(tmp_path, 2)
        [start] = json.loads((folder / "environment.json").read_text())
        os.kill(start["process"], signal.SIGKILL)
        wait_for_death(start["process"])
        killed.extend([folder, rows_of(folder)])

    found = grid.run(
        plan(both), small_task(slowed(0.5)), tmp_path,
        progress=once_at(2, kill), **options(where),
    )  # fmt: skip
    assert_all_same(found, here)
    [again] = [run for run in found.runs if run.directory == killed[0]]
    first, second = starts(again)
    assert first["process"] != second["process"]
    assert (first["step"], second["step"] >= killed[1] - 1) == (0, True)


@pytest.mark.slow
def test_a_worker_that_is_lost_again_and_again(where, both, tmp_path):
    """It is given up after the retries, with its last words."""

    def variety(completions, **kwargs):
        print("these are my last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    found = grid.run(
        plan(both[:1]), small_task(variety), tmp_path, **options(where)
    )
    [run] = found.runs
    assert run.status == "failed"
    assert "lost again and again" in run.reason
    assert "these are my last words" in run.reason
    assert len(starts(run)) == 4


@pytest.mark.slow
def test_a_machine_that_is_lost(here, both, tmp_path):
    """All its processes are gone at once; the other machine does the rest."""
    made = []

    def lose():
        """When both machines are at work."""
        folders = list((tmp_path / "runs").iterdir())
        until = time.monotonic() + 60
        while not all(map(rows_of, folders)) and time.monotonic() < until:
            time.sleep(0.01)
        two.lose(1)
        made.extend(map(rows_of, folders))

    with PretendedCluster() as two:
        found = grid.run(
            plan(both), small_task(slowed(1.0)), tmp_path,
            progress=once_at(1, lose), engine="ray", address=two.address,
        )  # fmt: skip
    assert_all_same(found, here)
    [lost] = [run for run in found.runs if len(starts(run)) > 1]
    assert len(starts(lost)) == 2
    assert starts(lost)[1]["step"] >= min(made) - 1


def starts_at(folder: Path) -> list[dict]:
    """Where and when the run in a directory was begun or gone on with."""
    return json.loads((folder / "environment.json").read_text())


UNGUARDED = """
import sys

from ray_grid import plan, small_task

from grpo_lab import grid


def variety(completions, **kwargs):
    return [float(len(set(chat[0]["content"]))) for chat in completions]


place, *models = sys.argv[1:]
grid.run(plan(models), small_task(variety), place, workers=2)
"""


def test_a_program_that_is_interrupted(here, both, tmp_path):
    """One without a guard for `__main__`, and with its reward there: no worker
    of it is left, and it goes on where it was."""
    program = tmp_path / "program.py"
    program.write_text(UNGUARDED)
    line = [sys.executable, program, tmp_path / "grid", *both]
    first = subprocess.Popen(line, env=TESTED, stderr=subprocess.PIPE)
    folder = wait_for_rows(tmp_path / "grid", 2)
    workers = psutil.Process(first.pid).children()
    assert len(workers) == 2
    first.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in first.communicate(timeout=60)[1]
    assert not [one for one in workers if one.is_running()]
    made = rows_of(folder)
    subprocess.run(line, env=TESTED, check=True, timeout=300)
    place = tmp_path / "grid"
    assert_all_same(grid.load(place, in_order(place, both)), here)
    assert starts_at(folder)[1]["step"] >= made - 1


def ended(process: subprocess.Popen) -> int:
    process.send_signal(signal.SIGKILL)
    return process.wait()


def test_a_driver_that_is_killed(where, here, both, tmp_path):
    """The next one goes on with what is not finished; and a checkpoint that
    was cut short meanwhile is not the one that it goes on from."""
    [finished] = grid.run(plan(both[:1]), small_task(), tmp_path).runs
    driver = subprocess.Popen(
        [sys.executable, TESTS / "ray_grid.py", tmp_path, where, *both],
        env=TESTED,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        folder = wait_for_rows(tmp_path, 3)
    finally:
        code = ended(driver)
    assert code == -signal.SIGKILL, driver.stderr.read()
    # Its workers end with it.
    wait_for_death(starts_at(folder)[-1]["process"])
    with filelock.FileLock(folder / "run.lock", timeout=60):
        newest = training.last_checkpoint(folder)
        file = newest / "optimizer.pt"
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2)
        before = training.last_checkpoint(folder)
        assert training.step_of(before) == training.step_of(newest) - 1
    found = grid.run(plan(both), small_task(), tmp_path, **options(where))
    assert_all_same(found, here)
    assert len(starts(finished)) == 1  # in this process
    [_, again] = found.runs
    assert [start["step"] for start in starts(again)] == [
        0,
        training.step_of(before),
    ]


@pytest.mark.slow
def test_a_notebook_whose_kernel_is_killed(here, both, tmp_path):
    """The notebook is run again with --resume."""
    lesson = tmp_path / "05_small.ipynb"
    cells = [
        nbformat.v4.new_code_cell(
            'OUTPUT_DIR: str = "out"  # where',
            metadata={"tags": ["parameters"]},
        ),
        nbformat.v4.new_code_cell(
            "import killed_grid, ray_grid, torch\n"
            "torch.set_num_threads(1)\n"
            "from grpo_lab import grid\n"
            f"plan = ray_grid.plan({both!r})\n"
            "rewards = [killed_grid.variety]\n"
            "task = grid.Task(ray_grid.questions(), rewards)\n"
            "found = grid.run(plan, task, OUTPUT_DIR, workers=1)\n"
            "found.raise_failures()"
        ),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "-"}
    nbformat.write(notebook, lesson)

    def start(*options):
        return subprocess.Popen(
            [
                sys.executable, "-m", "grpo_lab.runner", lesson,
                "--output", tmp_path / "ran", *options,
            ],
            env=TESTED,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    runner = start()
    place = tmp_path / "ran" / "run"
    try:
        killed = wait_for_rows(place, 2)
        [kernel] = psutil.Process(runner.pid).children()
        kernel.send_signal(signal.SIGKILL)
        wait_for_death(kernel.pid)
        made = rows_of(killed)
        told, _ = runner.communicate(timeout=60)
    finally:
        runner.kill()
    assert runner.returncode == 1
    assert "ended without a word" in told
    again = start("--resume")
    told, _ = again.communicate(timeout=300)
    assert again.returncode == 0, told
    found = grid.load(place, in_order(place, both))
    assert_all_same(found, here)
    [again] = [run for run in found.runs if len(starts(run)) == 2]
    assert again.directory == killed
    assert starts(again)[1]["step"] >= made - 1


def in_order(place: Path, models: list[str]) -> list[Path]:
    """The directories of a grid's runs, in the order of its plan."""
    names = [Path(model).name for model in models]
    return sorted(
        (place / "runs").iterdir(),
        key=lambda path: names.index(path.name.split("_lr")[0]),
    )


@pytest.mark.slow
def test_a_disk_that_fills_up_on_a_worker(
    small_disk, machines, here, both, tmp_path
):
    """It is told in one paragraph; with room again the run goes on."""
    disk = small_disk.place
    small_disk.resize("900m")  # what a grid asks to be free, and little more
    filler, filled = disk / "filler", tmp_path / "filled"

    def variety(completions, **kwargs) -> list[float]:
        """In the third step there is room for its rows then, but no more."""
        if any(disk.glob("grid/runs/*/checkpoint-2")) and not filled.exists():
            filled.touch()
            with contextlib.suppress(OSError), filler.open("wb", 0) as file:
                while True:
                    file.write(b"0" * 4096)
            os.truncate(filler, filler.stat().st_size - ROOM_FOR_ROWS)
        return [float(len(set(chat[0]["content"]))) for chat in completions]

    try:
        found = grid.run(
            plan(both[:1]), small_task(variety), disk / "grid",
            engine="ray", address=machines.address,
        )  # fmt: skip
        told = found.runs[0].reason
    except LabError as error:  # not even the reason could be written
        told = str(error)
    finally:
        halves = [
            folder
            for folder in (disk / "grid").glob("runs/*/checkpoint-*")
            if not (folder / training.COMPLETE).exists()
        ]
        filler.unlink(missing_ok=True)
    assert halves  # it was a checkpoint that did not fit
    assert "disk is full" in told or "No space left" in told
    assert "Free some space" in told
    found = grid.run(plan(both[:1]), small_task(variety), disk / "grid")
    assert_same(found.runs[0], here.runs[0])


def test_two_drivers_on_one_directory(both, tmp_path):
    """The second is refused before it asks for a cluster."""
    (tmp_path / "grid").mkdir()
    with (
        held_elsewhere(tmp_path / "grid" / "grid.lock"),
        pytest.raises(LabError, match="Another process is training"),
    ):
        grid.run(
            plan(both), small_task(), tmp_path / "grid",
            engine="ray", address="127.0.0.1:1",
        )  # fmt: skip


def test_two_workers_on_one_run(both, tmp_path):
    """One that was taken for lost may still live: the other waits."""
    records = plan_of(plan(both[:1]), small_task(), tmp_path)
    [(directory, record)] = records.items()
    write_json(directory / "settings.json", record)
    other = "Another process still trains tiny-qwen"
    with hold(directory), pytest.raises(LabError, match=other):
        hold(directory, patience=0.1).__enter__()
    assert not RunState(directory).is_held
