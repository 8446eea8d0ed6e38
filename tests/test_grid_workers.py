"""Pools: an item that is given is done, or it is told why not."""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo_lab.errors import LabError
from grpo_lab.grid.pool import (
    LOST,
    READY,
    LocalPool,
    ThisProcess,
    WorkerLost,
    WorkerPool,
    pickled,
)


class Halves:
    """A context that halves even numbers, and fails with others."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def fetch(self, item: int) -> Path:
        return self.place / f"{item}.log"

    def run(self, item: int) -> int:
        print("halving", item)
        if item % 2:
            raise ValueError(f"{item} is odd")
        if item == 666:
            os.kill(os.getpid(), signal.SIGKILL)
        return item // 2

    def close(self) -> None:
        (self.place / "closed").touch()


def done_in(pool, items: list[int]) -> dict:
    """What comes of items, given one after the other."""
    found, items = {}, list(items)
    while items or pool.working:
        while items and pool.free:
            pool.submit(items.pop(0))
        for answer in pool.wait(1.0):
            found[answer.item] = answer
    return found


@pytest.mark.parametrize("kind", [ThisProcess, LocalPool])
def test_what_comes_of_items(kind, tmp_path, capfd):
    """Also of those that fail; workers print to their files."""
    options = {} if kind is ThisProcess else {"size": 2}
    with kind(Halves(tmp_path), **options) as pool:
        found = done_in(pool, [2, 3, 4])
    assert (found[2].value, found[4].value) == (1, 2)
    assert isinstance(found[3].error, ValueError)
    assert str(found[3].error) == "3 is odd"
    assert (tmp_path / "closed").exists()
    if kind is LocalPool:
        assert (tmp_path / "2.log").read_text() == "halving 2\n"
        assert "ValueError: 3 is odd" in (tmp_path / "3.log").read_text()
        assert capfd.readouterr().out == ""


DRIVER = """
import os, sys
from pathlib import Path

from grpo_lab.grid.pool import LocalPool

place = Path(sys.argv[1])


class Sleeps:
    def fetch(self, item):
        return place / f"{item}.log"

    def run(self, item):
        import time

        print(os.getpid(), flush=True)
        time.sleep(600)


with LocalPool(Sleeps(), 1) as pool:
    while not pool.free:
        pool.wait(1.0)
    pool.submit(1)
    print(pool.idle or "at work", flush=True)
    if sys.argv[2] == "forked" and not os.fork():
        import time

        time.sleep(20)
        os._exit(0)
    pool.wait(600)
"""


@pytest.mark.parametrize("kind", ["alone", "forked"])
def test_no_worker_outlives_its_driver(tmp_path, kind):
    """Though it sleeps in a step; and though a child of the driver still has
    its end of the connection."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, tmp_path, kind], stdout=subprocess.PIPE
    )
    assert driver.stdout.readline() == b"at work\n"
    log = tmp_path / "1.log"
    while not log.exists() or not log.read_text().endswith("\n"):
        assert driver.poll() is None
    worker = int(log.read_text())
    assert alive(worker)
    driver.kill()
    driver.wait()
    with contextlib.suppress(ProcessLookupError):
        for _ in range(100):
            os.kill(worker, 0)
            if not alive(worker):
                break
            time.sleep(0.1)
    assert not alive(worker)


def alive(number: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    return False


class Pretended(WorkerPool):
    """Workers without processes; a test says what is heard of them."""

    def __init__(self, **options) -> None:
        super().__init__(None, **options)
        self.hired, self.given, self.events = 0, [], []

    def _hire(self):
        self.hired += 1
        return self.hired

    def _give(self, worker, item):
        self.given.append((worker, item))

    def _heard(self, seconds):
        heard, self.events = self.events, []
        return heard

    def _end(self, worker):
        return "Killed"

    def _dismiss(self):
        pass


def test_a_worker_that_is_lost_is_replaced():
    """And its item is free to be given again, so many times."""
    with Pretended(size=1, retries=1) as pool:
        for worker in (1, 2):
            assert pool.free == 0
            pool.events = [(worker, READY)]
            assert pool.wait(0) == []
            pool.submit("run")
            assert pool.working == ["run"]
            pool.events = [(worker, LOST)]
            answers = pool.wait(0)
            assert pool.working == []
        assert pool.given == [(1, "run"), (2, "run")] and pool.hired == 3
        [answer] = answers
        assert isinstance(answer.error, WorkerLost)
        assert (answer.item, answer.error.times) == ("run", 2)


def test_workers_that_never_come():
    with Pretended(size=2, retries=1) as pool:
        for number in range(1, 5):  # two workers, each of them twice
            pool.events = [(number, LOST)]
            assert pool.wait(0) == []
        pool.events = [(5, LOST)]
        with pytest.raises(LabError, match="No worker starts.*said: Killed"):
            pool.wait(0)


def test_a_learners_modules_are_sent(tmp_path, monkeypatch):
    """A function of a file beside a notebook, which workers may not find."""
    (tmp_path / "beside.py").write_text("def halve(n):\n    return n // 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    beside = importlib.import_module("beside")
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(8))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickled(beside.halve, [beside.halve]),
        capture_output=True,
    )
    assert done.stdout == b"4\n", done.stderr
