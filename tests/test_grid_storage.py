"""What is stored is whole, wherever a crash ends the storing of it."""

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    create_backend_app,
)
from pyarrow import fs
from werkzeug.serving import make_server

from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json
from grpo_lab.grid import storage
from grpo_lab.grid.storage import Mirror, shown

BUCKET, SECRET = "runs-of-tests", "a-secret-key"
PARTS = ("adapter.bin", "deep/optimizer.pt", "zzz.json")


class ObjectStore:
    """Moto's S3 server, which refuses requests or waits when it is told.

    Attributes:
        refuse: whether a request is answered with an error of the server.
        before: called with the number of each request that changes what is
            stored, before it is handled.
        changes: how many of these have come.
    """

    def __init__(self):
        self.app = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        self.changes = 0
        self.quiet()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def quiet(self):
        self.refuse = lambda: False
        self.before = lambda number: None

    def __call__(self, environ, start_response):
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            self.changes += 1
            self.before(self.changes)
        if not self.refuse():
            return self.app(environ, start_response)
        start_response("503 Slow Down", [("Content-Type", "text/xml")])
        return [b"<Error><Code>SlowDown</Code></Error>"]

    @property
    def uri(self):
        return (
            f"s3://key:{SECRET}@{BUCKET}/grids?region=us-east-1&scheme=http"
            f"&endpoint_override=127.0.0.1:{self.server.server_port}"
        )


@pytest.fixture(scope="module")
def served():
    store = ObjectStore()
    fs.S3FileSystem(
        access_key="key", secret_key=SECRET, region="us-east-1",
        scheme="http", allow_bucket_creation=True,
        endpoint_override=f"127.0.0.1:{store.server.server_port}",
    ).create_dir(BUCKET)  # fmt: skip
    yield store
    store.server.shutdown()


@pytest.fixture
def s3(served):
    yield served
    served.quiet()


@pytest.fixture(params=["s3", "file"])
def uri(request, tmp_path):
    if request.param == "file":
        return (tmp_path / "the store").as_uri()
    return request.getfixturevalue("s3").uri


@pytest.fixture
def driver(uri, tmp_path):
    return Mirror(uri, tmp_path / "grid")


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


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def train(directory, *steps):
    """What a trainer does: a row, a checkpoint, its mark, two are kept."""
    for step in steps:
        with (directory / "metrics.csv").open("a") as file:
            file.write(f"{step}\n")
        folder = directory / f"checkpoint-{step}"
        for name in PARTS:
            write(folder / name, f"{step} {name}" * 1000)
        write(folder / "complete", "{}")
        for old in storage._numbers(
            storage._CHECKPOINT, os.listdir(directory)
        )[2:]:
            shutil.rmtree(directory / f"checkpoint-{old}")


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


def sent(mirror, monkeypatch):
    """Names of what a mirror sends from now on."""
    names, copy = [], mirror._copy_there

    def noted(source, name):
        copy(source, name)
        names.append(name.removeprefix("runs/first/").removesuffix(".part"))

    monkeypatch.setattr(mirror, "_copy_there", noted)
    return names


# --- There and back ----------------------------------------------------------


def test_a_run_goes_from_worker_to_worker_and_home(driver, run, tmp_path):
    mirror, here = worker(driver)
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


def test_only_what_has_changed_is_sent(driver, run, monkeypatch):
    mirror, here = worker(driver)
    train(here, 1, 2)
    mirror.after(here)
    names = sent(mirror, monkeypatch)
    mirror.after(here)
    assert names == []
    train(here, 3)
    mirror.after(here)
    assert names == ["metrics.csv", "checkpoint-3"]
    other, there = worker(driver)
    names = sent(other, monkeypatch)
    other.after(there)
    assert names == []  # what was fetched isn't sent back


def test_two_checkpoints_stay_in_the_store(driver, run):
    mirror, here = worker(driver)
    for step in range(1, 6):
        train(here, step)
        mirror.after(here)
    listed = mirror._list("runs/first")
    found = sorted(name for name in listed if "checkpoint" in name)
    assert found == [
        "checkpoint-4", "checkpoint-4.complete",
        "checkpoint-5", "checkpoint-5.complete",
    ]  # fmt: skip


def test_the_result_comes_last(driver, run, monkeypatch):
    mirror, here = worker(driver)
    train(here, 1, 2)
    write(here / "result.json", '{"status": "done"}')
    names = sent(mirror, monkeypatch)
    mirror.after(here)
    assert names == [
        "metrics.csv", "checkpoint-2", "checkpoint-1", "result.json",
    ]  # fmt: skip
    fetched, copy = [], driver._copy_here

    def noted(name, target):
        fetched.append(name)
        copy(name, target)

    monkeypatch.setattr(driver, "_copy_here", noted)
    driver.collect(run)
    assert fetched[-1] == "runs/first/result.json"


def test_what_is_only_of_use_here_stays_here(driver, run):
    mirror, here = worker(driver)
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


def test_requests_and_decisions_go_out_and_metrics_come_back(driver, run):
    mirror, here = worker(driver)
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


def test_a_run_that_is_resumed_has_not_finished(driver, run):
    mirror, here = worker(driver)
    write(here / "result.json", '{"status": "done"}')
    mirror.after(here)
    assert driver.has_finished(run)
    # A driver of its own: it knows nothing of what was sent before.
    other = Mirror(driver.uri, run.parent.parent)
    other.send_run(run)
    assert not other.has_finished(run)
    assert not (worker(other)[1] / "result.json").exists()


def test_a_callback_sends_each_step_but_none_before_the_first(driver, run):
    from types import SimpleNamespace

    mirror, here = worker(driver)
    callback = mirror.callback(here)
    train(here, 1)
    for step, found in ((0, []), (1, [1])):
        state = SimpleNamespace(global_step=step)
        callback.on_step_begin(None, state, None)
        assert mirror._steps(storage._MARK, "runs/first") == found


def test_each_grid_has_a_folder_of_its_own(driver, run, tmp_path):
    again = Mirror(driver.uri, tmp_path / "grid")
    other = Mirror(driver.uri, tmp_path / "elsewhere" / "grid")
    assert again.folder == driver.folder != other.folder
    write_json(run / "result.json", {"status": "done"})
    driver.send_run(run)
    assert again.has_finished(run) and not other.has_finished(run)


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
        place.mkdir()
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
    place.mkdir()
    train(place, 1)
    driver.after(place)
    train(place, 2)
    assert send_in(workers, driver, place, files) == -signal.SIGKILL
    assert checkpoints(driver, tmp_path / "found") == [1]
    driver.after(place)
    assert checkpoints(driver, tmp_path / "again") == [1, 2]


def test_what_a_crash_left_of_old_checkpoints_goes(driver, run):
    mirror, here = worker(driver)
    train(here, 1)
    mirror.after(here)
    mirror._store.delete_file("runs/first/checkpoint-1.complete")
    train(here, 2, 3)
    mirror.after(here)
    assert mirror._steps(storage._CHECKPOINT, "runs/first") == [3, 2]


def test_a_checkpoint_that_goes_while_it_is_fetched(
    driver, run, tmp_path, monkeypatch
):
    mirror, here = worker(driver)
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


def test_ten_seconds_of_errors_are_survived(s3, tmp_path):
    driver = Mirror(s3.uri, tmp_path / "grid")
    place = tmp_path / "first"
    place.mkdir()
    train(place, 1, 2)
    ends, refused = time.monotonic() + 10, []

    def refuse():
        if time.monotonic() < ends:
            refused.append(1)
            return True
        return False

    s3.refuse = refuse
    driver.after(place)
    assert refused and time.monotonic() > ends
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


def test_a_bucket_that_is_not_there(s3, tmp_path):
    with pytest.raises(LabError, match="s3://no-such-bucket"):
        Mirror(s3.uri.replace(BUCKET, "no-such-bucket"), tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path):
    place = write(tmp_path / "file", "") / "under"
    with pytest.raises(LabError, match="has failed.*again"):
        Mirror(place.as_uri(), tmp_path / "grid")


def test_a_full_disk_here_leaves_no_half_of_a_file(
    driver, run, tmp_path, monkeypatch
):
    mirror, here = worker(driver)
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
        ("", "no bucket or directory"),
        ("/some/directory", "no bucket or directory"),
        ("ftp://host/x", "ftp://host/x.*s3://bucket"),
        ("http://[x/", "Invalid"),
        ("s3://", "no bucket"),
        ("file:///", "no bucket or directory"),
        (f"s3://key:{SECRET}@b/x?region=a&nonsense=1", "nonsense"),
        ("file:///a b", "%20"),
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
        ("file:///x", "file:///x"),
    ],
)
def test_no_secret_is_shown(uri, bare):
    assert shown(uri) == bare
