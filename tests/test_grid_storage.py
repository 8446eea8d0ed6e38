"""What is stored is whole, wherever a crash ends the storing of it."""

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from object_store import BUCKET, SECRET, serving

from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json
from grpo_lab.grid import storage
from grpo_lab.grid.storage import Mirror, shown

PARTS = ("adapter.bin", "deep/optimizer.pt", "zzz.json")


@pytest.fixture(scope="module")
def served():
    with serving() as store:
        yield store


@pytest.fixture
def s3(served):
    yield served
    served.quiet()


@pytest.fixture
def driver(s3, tmp_path):
    return Mirror(s3.uri, tmp_path / "grid")


@pytest.fixture
def run(driver, tmp_path):
    """The directory of a run, as a driver has planned and given it."""
    directory = tmp_path / "grid" / "runs" / "first"
    write(directory / "settings.json", "{}")
    driver.send_run(directory)
    return directory


def worker(mirror):
    """The same as another process has it, and its copy of the run."""
    other = pickle.loads(pickle.dumps(mirror))
    return other, other.fetch_run("first") / "runs" / "first"


@pytest.fixture
def first(driver, run):
    """A worker's mirror, and its copy of the run."""
    return worker(driver)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def train(directory, *steps):
    """What a trainer does: a row, a checkpoint, its mark, two are kept."""
    directory.mkdir(parents=True, exist_ok=True)
    for step in steps:
        with (directory / "metrics.csv").open("a") as file:
            file.write(f"{step}\n")
        folder = directory / f"checkpoint-{step}"
        for name in PARTS:
            write(folder / name, f"{step} {name}" * 1000)
        write(folder / "complete", "{}")
        shutil.rmtree(directory / f"checkpoint-{step - 2}", ignore_errors=True)


def checkpoints(mirror, place):
    """The steps of the complete checkpoints; each must be whole."""
    mirror.fetch_checkpoints(Path("first"), place)
    steps = []
    for folder in place.glob("checkpoint-*"):
        step = int(folder.name.rpartition("-")[2])
        for name in PARTS:
            assert (folder / name).read_text() == f"{step} {name}" * 1000
        assert (folder / "complete").exists()
        steps.append(step)
    return sorted(steps)


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def noted(mirror, monkeypatch, method):
    """Names of what a mirror copies there or here from now on."""
    names, copy = [], getattr(mirror, method)

    def noting(*places):
        copy(*places)
        [place] = [one for one in places if isinstance(one, str)]
        names.append(place.removeprefix("runs/first/"))

    monkeypatch.setattr(mirror, method, noting)
    return names


# --- There and back ----------------------------------------------------------


def test_a_run_goes_from_worker_to_worker_and_home(
    driver, run, first, tmp_path
):
    mirror, here = first
    train(here, 1, 2, 3)
    write(here / "tensorboard" / "events.gz", "not packed at all")
    write(here / "result.json", '{"status": "done"}')
    write(mirror.root / "base" / "model" / "evaluation.json", "[]")
    mirror.after(here)
    other, there = worker(driver)
    assert tree(other.root) == tree(mirror.root)
    assert checkpoints(driver, tmp_path / "found") == [2, 3]
    assert driver.has_finished(run)
    driver.collect(run)
    home = {
        name: text
        for name, text in tree(here).items()
        if not name.startswith("checkpoint-")
    }
    assert tree(run) == home
    assert (tmp_path / "grid/base/model/evaluation.json").exists()
    for one in (mirror, other):
        one.close()
        assert not one.root.exists()


def test_only_what_has_changed_is_sent_and_the_result_last(
    driver, run, first, monkeypatch
):
    """And two checkpoints stay in the store, whatever a crash had left."""
    mirror, here = first
    train(here, 1, 2)
    mirror.after(here)
    names = noted(mirror, monkeypatch, "_copy_there")
    mirror.after(here)
    assert names == []
    mirror._store.delete_file("runs/first/checkpoint-1.complete")
    train(here, 3, 4)
    write(here / "result.json", '{"status": "done"}')
    mirror.after(here)
    assert names == [
        "metrics.csv", "checkpoint-4", "checkpoint-3", "result.json",
    ]  # fmt: skip
    listed = mirror._list("runs/first")
    assert sorted(name for name in listed if "checkpoint" in name) == [
        "checkpoint-3", "checkpoint-3.complete",
        "checkpoint-4", "checkpoint-4.complete",
    ]  # fmt: skip
    fetched = noted(driver, monkeypatch, "_copy_here")
    driver.collect(run)
    assert fetched[-1] == "result.json"
    other, there = worker(driver)
    names = noted(other, monkeypatch, "_copy_there")
    other.after(there)
    assert names == []  # what was fetched isn't sent back


def test_what_is_only_of_use_here_stays_here(driver, first):
    mirror, here = first
    own = {
        "run.lock", "metrics.csv.7.part", "snapshots/4.part/adapter.bin",
        "part-checkpoint-9/complete", "checkpoint-8/adapter.bin",
    }  # fmt: skip
    for name in own:
        write(here / name, "x")
    write(here / "snapshots/4/adapter.bin", "x")
    mirror.after(here)
    assert set(tree(here)) - own == set(tree(worker(driver)[1]))


def test_a_clone_travels_with_its_parent_and_rewards(driver, run):
    write(run / "parent" / "checkpoint-6" / "adapter.bin", "x")
    write(run / "reward_files" / "mine.py", "y")
    driver.send_run(run)
    assert tree(worker(driver)[1]) == tree(run)


def test_requests_and_decisions_go_out_and_metrics_come_back(
    driver, run, first
):
    mirror, here = first
    write(run / "stop", "why")
    write(run / "rungs.json", "[]")
    driver.exchange(run)
    train(here, 1)
    mirror.before(here)
    assert (here / "stop").read_text() == "why"
    write(here / "rungs.json", "the worker's own, never sent")
    mirror.after(here)
    (run / "stop").unlink()
    driver.exchange(run)
    assert (run / "metrics.csv").read_text() == "1\n"
    mirror.before(here)
    assert not (here / "stop").exists()
    assert tree(worker(driver)[1])["rungs.json"] == "[]"


def test_a_run_that_is_resumed_has_not_finished(driver, run, first, tmp_path):
    mirror, here = first
    write(here / "result.json", '{"status": "done"}')
    mirror.after(here)
    assert driver.has_finished(run)
    # A driver of its own: it knows nothing of what was sent before.
    other = Mirror(driver.uri, tmp_path / "grid")
    assert other.has_finished(run)
    other.send_run(run)
    assert not other.has_finished(run)
    assert not (worker(other)[1] / "result.json").exists()
    # Another grid of that name has a folder of its own.
    write_json(run / "result.json", {"status": "done"})
    other.send_run(run)
    stranger = Mirror(driver.uri, tmp_path / "elsewhere" / "grid")
    assert other.has_finished(run) and not stranger.has_finished(run)


def test_a_callback_sends_each_step_but_none_before_the_first(
    driver, first, tmp_path
):
    mirror, here = first
    callback = mirror.callback(here)
    train(here, 1)
    for step, found in ((0, []), (1, [1])):
        state = SimpleNamespace(global_step=step)
        callback.on_step_begin(None, state, None)
        assert checkpoints(driver, tmp_path / f"after {step}") == found


# --- Crashes -----------------------------------------------------------------

WORKER = """
import os, pickle, sys
from pathlib import Path
from pyarrow import fs
from grpo_lab.grid import storage

copy, count = fs.copy_files, None

def copy_and_die(source, target, source_fs, target_fs):
    # Half of a checkpoint's files, then the end of the process.
    if not Path(source).is_dir():
        return copy(source, target, source_fs, target_fs)
    files = sorted(path for path in Path(source).rglob("*") if path.is_file())
    for file in files[:count]:
        name = f"{target}/{file.relative_to(source).as_posix()}"
        target_fs.create_dir(os.path.dirname(name))
        copy(str(file), name, source_fs, target_fs)
    os.kill(os.getpid(), 9)

for line in sys.stdin:
    # Imports take seconds, so a worker is a fork; nothing has connected yet.
    if not (pid := os.fork()):
        print(os.getpid(), flush=True)
        mirror, place, count = pickle.loads(bytes.fromhex(line))
        if count is not None:
            storage.fs.copy_files = copy_and_die
        mirror.after(place)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def workers():
    """A process that forks a worker for each line, see `send_in`."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def send_in(process, mirror, place, files=None, on_start=lambda pid: None):
    """Let a process of its own send a run; its exit status.

    It kills itself when it has sent so many files of a checkpoint.
    """
    line = pickle.dumps((mirror, place, files)).hex()
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    on_start(int(process.stdout.readline()))
    return int(process.stdout.readline())


def test_a_worker_killed_before_any_change(s3, workers, tmp_path):
    """Whatever an object store had been told by then, no half of a
    checkpoint is taken for a whole one, and the next one finishes it."""
    changes = 0
    for count in range(1, 100, 2):
        driver = Mirror(s3.uri, tmp_path / str(count) / "grid")
        place = tmp_path / str(count) / "first"
        train(place, 1)
        driver.after(place)
        train(place, 2, 3)

        # Nothing is answered before the worker's number is known.
        known, last = threading.Event(), s3.changes + count
        pids = []

        def kill(number, known=known, last=last, pids=pids):
            known.wait(60)
            if number == last:
                os.kill(pids[0], signal.SIGKILL)

        def start(pid, known=known, pids=pids):
            pids.append(pid)
            known.set()

        s3.before = kill
        status = send_in(workers, driver, place, on_start=start)
        s3.quiet()
        found = checkpoints(driver, tmp_path / str(count) / "found")
        assert found in ([1], [1, 3], [2, 3])
        if status == 0:
            changes = count
            break
        assert status == -signal.SIGKILL
        driver.after(place)
        again = tmp_path / str(count) / "again"
        assert checkpoints(driver, again) == [2, 3]
    assert changes > 10 and found == [2, 3]


@pytest.mark.parametrize("files", [0, 2, 4])
def test_a_worker_killed_amid_a_checkpoint(driver, workers, tmp_path, files):
    place = tmp_path / "first"
    train(place, 1)
    driver.after(place)
    train(place, 2)
    assert send_in(workers, driver, place, files) == -signal.SIGKILL
    assert checkpoints(driver, tmp_path / "found") == [1]
    driver.after(place)
    assert checkpoints(driver, tmp_path / "again") == [1, 2]


def test_a_checkpoint_that_goes_while_it_is_fetched(
    driver, first, tmp_path, monkeypatch
):
    mirror, here = first
    train(here, 1, 2)
    mirror.after(here)
    copy = driver._copy_here

    def late(name, target):
        if name.endswith("checkpoint-1"):
            train(here, 3)
            mirror.after(here)  # deletes it
        copy(name, target)

    monkeypatch.setattr(driver, "_copy_here", late)
    assert checkpoints(driver, tmp_path / "found") == [2]
    assert not list((tmp_path / "found").glob("part-*"))


# --- Errors ------------------------------------------------------------------


def test_requests_that_are_refused_are_made_again(s3, tmp_path):
    driver, refused = Mirror(s3.uri, tmp_path / "grid"), []
    train(tmp_path / "first", 1, 2)

    def refuse():
        refused.append(len(refused) < 6)  # more than pyarrow itself would try
        return refused[-1]

    s3.refuse = refuse
    driver.after(tmp_path / "first")
    assert sum(refused) == 6
    assert checkpoints(driver, tmp_path / "found") == [1, 2]


def test_a_store_that_stays_away_is_reported(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "TRIES", 2)
    driver = Mirror(s3.uri, tmp_path / "grid")
    write(tmp_path / "first" / "metrics.csv", "1\n")
    s3.refuse = lambda: True
    with pytest.raises(LabError, match="goes on where it stopped") as failed:
        driver.after(tmp_path / "first")
    with pytest.raises(LabError, match="credentials may read") as checked:
        Mirror(s3.uri, tmp_path / "grid")
    for caught in (failed, checked):
        lines = traceback.format_exception(caught.value)
        assert f"s3://{BUCKET}/grids" in str(caught.value)
        assert SECRET not in "".join(lines)
    s3.refuse = lambda: False
    driver.after(tmp_path / "first")
    with pytest.raises(LabError, match="s3://no-such-bucket"):
        Mirror(s3.uri.replace(BUCKET, "no-such-bucket"), tmp_path)


def test_a_full_disk_here_leaves_no_half_of_a_file(
    driver, run, first, monkeypatch
):
    mirror, here = first
    train(here, 1)
    mirror.after(here)

    def full(name, target):
        write(target, "half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(driver, "_copy_here", full)
    before = tree(run)
    with pytest.raises(LabError, match="No space left"):
        driver.collect(run)
    assert tree(run) == before


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("/some/directory", "no bucket"),
        ("file:///somewhere", "no bucket"),
        ("ftp://host/x", "ftp://host/x.*s3://bucket"),
        (f"s3://key:{SECRET}@b/x?region=a&nonsense=1", "nonsense"),
        (f"gs://key:{SECRET}@b/x?nonsense=1", "gs://b/x"),
    ],
)
def test_a_uri_of_no_store_is_refused_at_once(uri, words, tmp_path):
    with pytest.raises(LabError, match=words) as refused:
        Mirror(uri, tmp_path)
    assert SECRET not in "".join(traceback.format_exception(refused.value))
    assert read_json(tmp_path / "grid.store.json") is None


@pytest.mark.parametrize(
    ("uri", "bare"),
    [
        ("s3://key:secret@bucket/x?region=here", "s3://bucket/x"),
        ("abfs://a@b.net/x?a=secret", "abfs://a@b.net/x"),
        ("abfs://a:secret@b.net/x", "abfs://a@b.net/x"),
    ],
)
def test_no_secret_is_shown(uri, bare):
    assert shown(uri) == bare
