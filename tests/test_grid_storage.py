"""What is stored is whole, wherever a crash ends the storing of it."""

import errno
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from grpo_lab.errors import LabError
from grpo_lab.grid import storage
from grpo_lab.grid.storage import Storage

WRITES = ("open_output_stream", "move", "delete_file", "delete_dir")


class Crash(BaseException):
    """The end of the process, which nothing may catch."""


class Spied:
    """A file system that notes what it is told to do, until it fails.

    Args:
        inner: a true one.
        error: what to raise after some writes, and from then on `lasting`.
        after: writes that work.
    """

    def __init__(self, inner, error=None, after=0, lasting=True):
        self.inner, self.error = inner, error
        self.after, self.lasting = after, lasting
        self.log: list[tuple[str, str]] = []

    def __getattr__(self, name):
        def spied(*args, **kwargs):
            if name in WRITES:
                over = len(self.log) - self.after
                self.log.append((name, str(args[-1])))
                if self.error and (over == 0 or over > 0 and self.lasting):
                    raise self.error
            return value(*args, **kwargs)

        value = getattr(self.inner, name)
        return spied if callable(value) else value

    def did(self, name):
        return [Path(path).name for call, path in self.log if call == name]


def spy(store, *args, **kwargs) -> Spied:
    inner, top = store._open()
    spied = Spied(inner, *args, **kwargs)
    store._opened = spied, top
    return spied


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(storage, "PAUSES", (0, 0, 0))


@pytest.fixture
def uri(tmp_path) -> str:
    return (tmp_path / "the store").as_uri()


@pytest.fixture
def store(uri) -> Storage:
    return Storage(uri)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def add_step(run: Path, step: int, text: str = "weights") -> None:
    """What a trainer does: a row, a checkpoint, its mark, two are kept."""
    with write(run / "metrics.csv", read(run / "metrics.csv")).open("a") as f:
        f.write(f"{step}\n")
    folder = run / f"checkpoint-{step}"
    for name in ("adapter.bin", "deep/optimizer.pt", "zzz.json"):
        write(folder / name, f"{text} {step} {name}")
    for old in sorted(run.glob("checkpoint-*"), key=step_of)[:-2]:
        shutil.rmtree(old)
    write(folder / "complete", json.dumps({"step": step, "text": text}))


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def make_run(run: Path, steps: int = 3) -> Path:
    write(run / "settings.json", "{}")
    write(run / "tensorboard" / "events", "events")
    for step in range(1, steps + 1):
        add_step(run, step)
    return run


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def checkpoints(folder: Path) -> dict[int, str]:
    """The complete checkpoints of a run; each must be whole."""
    found = {}
    for mark in folder.glob("checkpoint-*/complete"):
        value, step = json.loads(mark.read_text()), step_of(mark.parent)
        for name in ("adapter.bin", "deep/optimizer.pt", "zzz.json"):
            text = (mark.parent / name).read_text()
            assert text == f"{value['text']} {step} {name}"
        found[step] = value["text"]
    return found


# --- There and back ----------------------------------------------------------


def test_a_run_there_and_back(store, uri, tmp_path):
    run = make_run(tmp_path / "run")
    write(run / "result.json", '{"status": "done"}')
    (run / "packed.csv.gz").write_bytes(b"not packed at all")
    store.push(run, "runs/first")
    Storage(uri).pull("runs/first", tmp_path / "other")
    assert tree(tmp_path / "other") == tree(run)
    assert checkpoints(tmp_path / "other") == {2: "weights", 3: "weights"}


def test_only_what_has_changed_is_sent(store, tmp_path):
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    spied = spy(store)
    store.push(run, "run")
    assert spied.log == []
    add_step(run, 4)
    store.push(run, "run")
    assert sorted(spied.did("move")) == [
        "adapter.bin", "complete", "metrics.csv", "optimizer.pt", "zzz.json",
    ]  # fmt: skip
    assert spied.did("delete_dir") == ["checkpoint-2"]


def test_what_the_store_lost_is_sent_again(store, tmp_path):
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    (tmp_path / "the store/run/settings.json").unlink()
    write(tmp_path / "the store/run/tensorboard/events", "cut")
    store.push(run, "run")
    assert tree(tmp_path / "the store/run") == tree(run)


def test_what_is_gone_here_is_deleted_there(store, tmp_path):
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    write(tmp_path / "the store/run/left.part", "by a crash")
    shutil.rmtree(run / "tensorboard")
    (run / "settings.json").unlink()
    store.push(run, "run")
    assert tree(tmp_path / "the store/run") == tree(run)
    assert not (tmp_path / "the store/run/tensorboard").exists()


def test_another_run_beside_it_is_left_alone(store, tmp_path):
    for name in ("run", "run-2"):
        store.push(make_run(tmp_path / name), name)
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    store.push(tmp_path / "run", "run")
    assert tree(tmp_path / "the store/run-2") == tree(tmp_path / "run-2")


def test_what_is_only_of_use_here_is_not_sent(store, tmp_path):
    run = make_run(tmp_path / "run")
    for name in (
        "run.lock",
        "metrics.csv.7.part",
        "snapshots/4.part/adapter.bin",
        "part-checkpoint-9/complete",
        "checkpoint-8/adapter.bin",
    ):
        write(run / name, "x")
    store.push(run, "run")
    assert set(tree(run)) - set(tree(tmp_path / "the store/run")) == {
        "run.lock",
        "metrics.csv.7.part",
        "snapshots/4.part/adapter.bin",
        "part-checkpoint-9/complete",
        "checkpoint-8/adapter.bin",
    }


def test_a_missing_directory_deletes_nothing(store, tmp_path):
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    shutil.rmtree(run)
    with pytest.raises(LabError, match="no directory .*left as it is"):
        store.push(run, "run")
    assert checkpoints(tmp_path / "the store/run") != {}


def test_a_directory_that_can_t_be_read_deletes_nothing(
    store, tmp_path, monkeypatch
):
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    before, scandir = tree(tmp_path / "the store/run"), os.scandir

    def refuse(path):
        if Path(path).name == "tensorboard":
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(LabError, match="Could not read .*denied"):
        store.push(run, "run")
    monkeypatch.undo()
    assert tree(tmp_path / "the store/run") == before


def test_what_others_write_there_is_left_alone(store, tmp_path):
    run, there = make_run(tmp_path / "run"), tmp_path / "the store/run"
    skip = ("stop", "reward_files")
    write(run / "reward_files/old.py", "mine")
    for name in ("stop", "reward_files/new.py", "other.txt"):
        write(there / name, "theirs")
    store.push(run, "run", skip=skip)
    assert read(there / "stop") == read(there / "reward_files/new.py")
    assert not (there / "reward_files/old.py").exists()
    assert not (there / "other.txt").exists()
    assert checkpoints(there) == {2: "weights", 3: "weights"}


def test_several_may_add_to_one_directory(store, uri, tmp_path):
    for name in "ab":
        write(tmp_path / name / name / "evaluation.json", name)
        write(tmp_path / name / "result.json", name)
        if name == "b":
            (tmp_path / "b/result.json").unlink()
        Storage(uri).push(tmp_path / name, "base", delete=False)
    both = {"a/evaluation.json": "a", "b/evaluation.json": "b"}
    there = tree(tmp_path / "the store/base")
    assert there == both | {"result.json": "a"}
    write(tmp_path / "c/c/evaluation.json", "c")
    store.pull("base", tmp_path / "c", delete=False)
    assert tree(tmp_path / "c") == there | {"c/evaluation.json": "c"}


# --- The order ---------------------------------------------------------------


def test_marks_come_after_what_they_mark_and_the_result_last(store, tmp_path):
    run = make_run(tmp_path / "run")
    write(run / "result.json", "{}")
    spied = spy(store)
    store.push(run, "run")
    names = [Path(path).relative_to(tmp_path / "the store/run").as_posix()
             for call, path in spied.log if call == "move"]  # fmt: skip
    assert names == [
        "metrics.csv", "settings.json", "tensorboard/events",
        "checkpoint-3/adapter.bin", "checkpoint-3/deep/optimizer.pt",
        "checkpoint-3/zzz.json", "checkpoint-3/complete",
        "checkpoint-2/adapter.bin", "checkpoint-2/deep/optimizer.pt",
        "checkpoint-2/zzz.json", "checkpoint-2/complete", "result.json",
    ]  # fmt: skip


def test_a_mark_is_deleted_before_what_it_marks(store, tmp_path):
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    shutil.rmtree(run / "checkpoint-2")
    spied = spy(store)
    store.push(run, "run")
    assert [(call, Path(path).name) for call, path in spied.log] == [
        ("delete_file", "complete"),
        ("delete_dir", "checkpoint-2"),
    ]


def test_a_checkpoint_written_anew_is_not_marked_meanwhile(store, tmp_path):
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    shutil.rmtree(run / "checkpoint-3")
    add_step(run, 3, "other")
    spied = spy(store)
    store.push(run, "run")
    written = [x for x in spied.log if "checkpoint-3" in x[1]]
    assert written[0][0] == "delete_file"
    assert written[0][1].endswith("/complete")
    assert written[-1][1].endswith("/complete")
    assert checkpoints(tmp_path / "the store/run")[3] == "other"


def test_an_old_result_goes_before_anything_else(store, tmp_path):
    run = make_run(tmp_path / "run")
    write(run / "result.json", '{"status": "failed"}')
    store.push(run, "run")
    (run / "result.json").unlink()
    add_step(run, 4)
    spied = spy(store)
    store.push(run, "run")
    assert spied.log[0][0] == "delete_file"
    assert spied.log[0][1].endswith("/result.json")
    write(run / "result.json", '{"status": "done"}')
    spied.log.clear()
    store.push(run, "run")
    assert spied.did("move") == ["result.json"]


# --- Files that vanish -------------------------------------------------------


def test_a_checkpoint_that_is_deleted_meanwhile_gets_no_mark(
    store, tmp_path, monkeypatch
):
    run = make_run(tmp_path / "run")
    send = Storage._send_once

    def slow(self, file, name):
        if file.parent.name == "checkpoint-2":
            (file.parent / "zzz.json").unlink(missing_ok=True)
        send(self, file, name)

    monkeypatch.setattr(Storage, "_send_once", slow)
    store.push(run, "run")
    there = tmp_path / "the store/run"
    assert (there / "checkpoint-2/adapter.bin").exists()
    assert not (there / "checkpoint-2/complete").exists()
    assert checkpoints(there) == {3: "weights"}
    shutil.rmtree(run / "checkpoint-2")
    store.push(run, "run")
    assert tree(there) == tree(run)


def test_a_checkpoint_half_deleted_before_loses_its_mark(store, tmp_path):
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    (run / "checkpoint-2/adapter.bin").unlink()
    store.push(run, "run")
    assert checkpoints(tmp_path / "the store/run") == {3: "weights"}


def test_a_checkpoint_half_deleted_and_never_sent_gets_no_mark(
    store, tmp_path, monkeypatch
):
    run = make_run(tmp_path / "run")
    send = Storage._send_once

    def slow(self, file, name):
        # It had been read before these were sent.
        (run / "checkpoint-2/adapter.bin").unlink(missing_ok=True)
        send(self, file, name)

    monkeypatch.setattr(Storage, "_send_once", slow)
    store.push(run, "run")
    assert checkpoints(tmp_path / "the store/run") == {3: "weights"}


def test_a_mark_that_comes_while_its_files_are_looked_for_waits(
    store, tmp_path, monkeypatch
):
    run = make_run(tmp_path / "run", steps=1)
    look, looks = storage._local_files, []

    def late(folder):
        found = look(folder)
        if not looks:
            add_step(run, 2)
            write(run / "result.json", "{}")
        looks.append(folder)
        return found

    monkeypatch.setattr(storage, "_local_files", late)
    store.push(run, "run")
    there = tmp_path / "the store/run"
    assert checkpoints(there) == {1: "weights"}
    assert not (there / "result.json").exists()
    store.push(run, "run")
    assert tree(there) == tree(run)


def test_a_file_that_grows_meanwhile_is_sent_again(
    store, tmp_path, monkeypatch
):
    run = make_run(tmp_path / "run")
    send, sent = Storage._send_once, []

    def slow(self, file, name):
        send(self, file, name)
        if file.name == "metrics.csv" and not sent:
            sent.append(file)
            with file.open("a") as opened:
                opened.write("4\n")

    monkeypatch.setattr(Storage, "_send_once", slow)
    store.push(run, "run")
    store.push(run, "run")
    assert tree(tmp_path / "the store/run") == tree(run)


def test_a_file_that_the_store_loses_meanwhile(
    store, uri, tmp_path, monkeypatch
):
    store.push(make_run(tmp_path / "run"), "run")
    fetch = Storage._fetch_once

    def slow(self, name, file, mtime):
        there = tmp_path / "the store/run/checkpoint-2/zzz.json"
        there.unlink(missing_ok=True)
        return fetch(self, name, file, mtime)

    monkeypatch.setattr(Storage, "_fetch_once", slow)
    Storage(uri).pull("run", tmp_path / "other")
    assert checkpoints(tmp_path / "other") == {3: "weights"}


# --- Crashes -----------------------------------------------------------------


def comes_to_its_end(call) -> bool:
    """Whether a call does, and does not crash."""
    try:
        call()
    except Crash:
        return False
    return True


def crash_after(count: int, store: Storage, call) -> bool:
    """Let a call crash after so many writes, if it comes to these."""
    spy(store, Crash(), after=count)
    return comes_to_its_end(call)


def all_crashes(call) -> int:
    """Let a call crash after 0, 1, 2, ... writes until it does not."""
    count = 0
    while not call(count):
        count += 1
        assert count < 100
    return count


def test_a_crash_of_the_first_push_anywhere(tmp_path):
    run = make_run(tmp_path / "run")
    write(run / "result.json", "{}")

    def crash(count):
        top = tmp_path / str(count)
        store = Storage((top / "store").as_uri())
        done = crash_after(count, store, lambda: store.push(run, "run"))
        fresh = Storage((top / "store").as_uri())
        fresh.pull("run", top / "other")
        found = checkpoints(top / "other")
        assert not list((top / "other").rglob("*.part"))
        assert not (top / "other/result.json").exists() or done
        fresh.push(run, "run")
        assert tree(top / "store/run") == tree(run)
        return done and found == {2: "weights", 3: "weights"}

    assert all_crashes(crash) > 20


def test_a_crash_of_a_later_push_anywhere(tmp_path):
    """There is a whole checkpoint at any time, and no older one than before.

    One step is added, one is written anew, one is deleted and the run ends.
    """
    run = make_run(tmp_path / "run")
    Storage((tmp_path / "store").as_uri()).push(run, "run")

    def crash(count):
        top = tmp_path / str(count)
        shutil.copytree(tmp_path / "store", top / "store")
        store = Storage((top / "store").as_uri())
        store.pull("run", top / "run")
        for step in (3, 4):
            shutil.rmtree(top / f"run/checkpoint-{step}", ignore_errors=True)
            add_step(top / "run", step, "other")
        write(top / "run/result.json", "{}")
        done = crash_after(
            count, store, lambda: store.push(top / "run", "run")
        )
        fresh = Storage((top / "store").as_uri())
        fresh.pull("run", top / "back")
        found = checkpoints(top / "back")
        assert found and max(found) >= 2
        assert not (top / "back/result.json").exists() or done
        return done and found == {3: "other", 4: "other"}

    assert all_crashes(crash) > 15


def test_a_crash_of_a_pull_anywhere(store, uri, tmp_path, monkeypatch):
    """What is here is whole at any time, and the next pull completes it."""
    run = make_run(tmp_path / "run")
    write(run / "result.json", "{}")
    store.push(run, "run")
    replace = os.replace

    def crash(count):
        other = make_run(tmp_path / str(count))
        shutil.rmtree(other / "checkpoint-3")
        add_step(other, 3, "older")
        for path in other.rglob("*"):
            os.utime(path, (1, 1))
        done = []

        def crashing(*args):
            if len(done) >= count:
                raise Crash
            done.append(replace(*args))

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crashing)
            over = comes_to_its_end(lambda: Storage(uri).pull("run", other))
        checkpoints(other)
        assert over or not (other / "result.json").exists()
        assert not list(other.rglob("*.part"))
        Storage(uri).pull("run", other)
        assert tree(other) == tree(run)
        return over

    assert all_crashes(crash) == len(tree(run))


def test_an_interrupt_leaves_no_file_that_is_cut_short(
    store, tmp_path, monkeypatch
):
    """In a store where a closed stream is a file at its place."""
    monkeypatch.setattr(storage, "_WHOLE", ("local",))
    monkeypatch.setattr(storage, "_CHUNK", 4)
    (tmp_path / "the store").mkdir()
    file, there = write(tmp_path / "f", "12345678"), tmp_path / "the store/f"

    class Source(io.BytesIO):
        def read(self, size):
            if self.tell():
                raise KeyboardInterrupt
            return super().read(size)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *args: Source(b"12345678"))
        with pytest.raises(KeyboardInterrupt):
            store.send(file, "f")
    assert not there.exists()
    store.send(file, "f")
    assert there.read_text() == "12345678"


# --- Pull --------------------------------------------------------------------


def test_only_the_two_newest_complete_checkpoints_are_fetched(store, tmp_path):
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    there = tmp_path / "the store/run"
    for step in (1, 10):
        add_step(tmp_path / "more", step)
        shutil.copytree(
            tmp_path / f"more/checkpoint-{step}", there / f"checkpoint-{step}"
        )
    write(there / "checkpoint-11/adapter.bin", "half")
    store.pull("run", tmp_path / "other")
    assert sorted(checkpoints(tmp_path / "other")) == [3, 10]
    assert not (tmp_path / "other/checkpoint-11").exists()


def test_what_is_skipped_is_neither_fetched_nor_deleted(store, tmp_path):
    store.push(make_run(tmp_path / "run"), "run")
    other = tmp_path / "other"
    for name in ("checkpoint-1/complete", "tensorboard/own", "run.lock"):
        write(other / name, "own")
    write(other / "old.txt", "stale")
    store.pull("run", other, skip=("checkpoint-*", "tensorboard"))
    assert sorted(tree(other)) == [
        "checkpoint-1/complete", "metrics.csv", "run.lock", "settings.json",
        "tensorboard/own",
    ]  # fmt: skip


def test_a_pull_makes_a_directory_as_it_is_stored(store, tmp_path):
    """Also where a machine had gone further than it could store."""
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    add_step(run, 4)
    add_step(run, 5)
    write(run / "result.json", "{}")
    store.pull("run", run)
    assert tree(run) == tree(tmp_path / "the store/run")
    assert not (run / "checkpoint-5").exists()


def test_nothing_stored_leaves_a_directory_alone(store, tmp_path):
    run = make_run(tmp_path / "run")
    before = tree(run)
    store.pull("run", run)
    store.pull("run", tmp_path / "none")
    assert tree(run) == before
    assert not (tmp_path / "none").exists()


def test_what_is_here_is_not_fetched_again(store, uri, tmp_path, monkeypatch):
    store.push(make_run(tmp_path / "run"), "run")
    Storage(uri).pull("run", tmp_path / "other")
    newer = tmp_path / "other/settings.json"
    os.utime(newer)
    fetched, fetch = [], Storage._fetch_once

    def noted(self, name, file, mtime):
        fetched.append(name)
        return fetch(self, name, file, mtime)

    monkeypatch.setattr(Storage, "_fetch_once", noted)
    Storage(uri).pull("run", tmp_path / "other")
    assert fetched == []
    os.utime(newer, (1, 1))
    (tmp_path / "other/metrics.csv").write_text("of another size")
    Storage(uri).pull("run", tmp_path / "other")
    assert fetched == ["run/metrics.csv", "run/settings.json"]


def test_what_was_pulled_is_not_sent_back(store, uri, tmp_path):
    store.push(make_run(tmp_path / "run"), "run")
    Storage(uri).pull("run", tmp_path / "other")
    for _ in range(2):  # also what was here already
        again = Storage(uri)
        again.pull("run", tmp_path / "other")
        spied = spy(again)
        again.push(tmp_path / "other", "run")
        assert spied.log == []


# --- Single files ------------------------------------------------------------


def test_single_files(store, tmp_path):
    file = write(tmp_path / "file.json", "text")
    assert not store.fetch("deep/file.json", tmp_path / "no" / "back.json")
    assert not (tmp_path / "no").exists()
    store.delete("deep/file.json")
    store.send(file, "deep/file.json")
    assert store.fetch("deep/file.json", tmp_path / "new" / "back.json")
    assert read(tmp_path / "new" / "back.json") == "text"
    write(file, "another")
    store.send(file, "deep/file.json")
    assert store.fetch("deep/file.json", tmp_path / "new" / "back.json")
    assert tree(tmp_path / "new") == {"back.json": "another"}
    store.delete("deep/file.json")
    assert not store.fetch("deep/file.json", tmp_path / "no" / "back.json")


def test_a_file_of_many_chunks(store, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_CHUNK", 7)
    for size in (0, 6, 7, 100):
        file = tmp_path / "file"
        file.write_bytes(os.urandom(size))
        store.send(file, "file")
        assert store.fetch("file", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/.", "."])
def test_a_name_that_leads_out_is_refused(store, tmp_path, name):
    write(tmp_path / "run/file", "")
    for call in (
        lambda: store.push(tmp_path / "run", name),
        lambda: store.pull(name, tmp_path / "run"),
        lambda: store.delete(name),
    ):
        with pytest.raises(LabError, match="is no name in a store"):
            call()
    assert (tmp_path / "run/file").exists()


# --- The place ---------------------------------------------------------------


def test_it_can_be_sent_to_a_worker(store, uri, tmp_path):
    run = make_run(tmp_path / "run")
    store.push(run, "run")
    other = pickle.loads(pickle.dumps(store))
    assert other == store == Storage(uri)
    other.pull("run", tmp_path / "other")
    assert tree(tmp_path / "other") == tree(run)


def test_a_check_leaves_nothing(store, tmp_path):
    store.check()
    assert list((tmp_path / "the store").iterdir()) == []


def test_a_check_of_a_place_that_can_t_be_written_to(tmp_path):
    place = write(tmp_path / "file", "") / "under"
    with pytest.raises(LabError, match="can't be used to store runs.*again"):
        Storage(place.as_uri()).check()


def test_a_check_of_a_server_that_is_not_there(monkeypatch):
    store = Storage("s3://key:secret@bucket/x?region=a&scheme=http")
    store._opened = Spied(Storage("file:///x")._open()[0]), "bucket/x"
    monkeypatch.setattr(
        storage.Storage, "_writing", raising(OSError("could not connect"))
    )
    with pytest.raises(LabError, match="could not connect.*credent") as told:
        store.check()
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("", "begins with none of"),
        ("/some/directory", "begins with none of s3://.*or file:///"),
        ("ftp://host/x", "ftp://host/x. names no store"),
        ("http://[x/", "is no URI"),
        ("s3://", "names no bucket"),
        ("s3:/bucket", "names no bucket"),
        ("file:///", "names no directory"),
    ],
)
def test_a_uri_of_no_store_is_refused_at_once(uri, words):
    with pytest.raises(LabError, match=words):
        Storage(uri)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://key:secret@b/x?nonsense=1", "can't be.*nonsense.*s3://bucket"),
        ("file:///a b", "can't be understood.*%20"),
        ("file://host/x", "can't be understood.*host"),
    ],
)
def test_a_uri_that_pyarrow_can_t_open_is_told(uri, words):
    store = pickle.loads(pickle.dumps(Storage(uri)))
    with pytest.raises(LabError, match=words) as told:
        store.check()
    assert "secret" not in str(told.value)


def test_no_secret_is_shown():
    store = Storage("s3://key:secret@bucket/x?region=here")
    assert repr(store) == "Storage('s3://bucket/x')"
    azure = Storage("abfs://container@account.dfs.core.windows.net/x?a=secret")
    assert azure.shown == "abfs://container@account.dfs.core.windows.net/x"
    assert Storage("abfs://a:secret@b/x").shown == "abfs://a@b/x"


def test_google_s_client_does_not_try_for_a_quarter_of_an_hour():
    limited = storage._with_limit
    assert limited("gs://b/p") == "gs://b/p?retry_limit_seconds=60"
    assert limited("gs://b/p?a=1") == "gs://b/p?a=1&retry_limit_seconds=60"
    for uri in ("gs://b/p?retry_limit_seconds=5", "s3://b/p", "file:///p"):
        assert limited(uri) == uri


# --- Errors ------------------------------------------------------------------


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call


def test_what_may_pass_is_tried_again(store, tmp_path):
    run = make_run(tmp_path / "run")
    for after in range(0, 24, 3):
        spy(store, OSError("reset by peer"), after=after, lasting=False)
        store.push(run, f"run-{after}")
        assert tree(tmp_path / f"the store/run-{after}") == tree(run)


def test_a_lost_connection_is_told(store, tmp_path):
    run = make_run(tmp_path / "run")
    spied = spy(store, OSError("could not resolve\nhost"), after=5)
    with pytest.raises(
        LabError, match="Could not store .*: could not resolve. .*goes on"
    ):
        store.push(run, "run")
    assert len(spied.log) == 5 + 1 + len(storage.PAUSES)
    store._opened = None
    store.push(run, "run")
    assert tree(tmp_path / "the store/run") == tree(run)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError("AWS Error ACCESS_DENIED during PutObject"),
    ],
)
def test_what_will_not_pass_is_told_at_once(store, tmp_path, error):
    spied = spy(store, error)
    with pytest.raises(
        LabError, match=r"store .*file:.*(No space|.ENIED|den)"
    ):
        store.send(write(tmp_path / "file", "x"), "file")
    assert len(spied.log) == 1


def test_a_full_disk_here_is_told(store, tmp_path, monkeypatch):
    store.push(make_run(tmp_path / "run"), "run")
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(storage, "_copy", full)
    with pytest.raises(LabError, match="Could not fetch run into .*No space"):
        store.pull("run", tmp_path / "other")
    assert tree(tmp_path / "other") == {}
