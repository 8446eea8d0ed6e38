"""Where runs are trained: this process, or workers that each train one.

A pool runs *items*: any value that can be pickled and hashed. Each process
that runs them holds a *context*, which knows how to: `context.run(item)` does
it and returns what came of it, `context.fetch(item)` brings what it needs to
the worker and returns the file that the worker prints to, and
`context.close()` clears up.

    with pool:
        pool.submit(item)  # no more than `pool.free` of them
        for answer in pool.wait(seconds=1): ...

All that an item does has to lie on a disk: a worker may be killed at any
moment. Its item is in no answer then, and `working` has it no more, so that
whoever submits what is still open submits it again.
"""

import collections
import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, Protocol

import cloudpickle

from grpo_lab.errors import LabError
from grpo_lab.grid.fingerprint import unwrapped

RETRIES = 3
"""Times that an item is done anew after its worker was lost."""

LEAVE_SECONDS = 10.0
"""How long a worker may take to clear up after itself."""

PROGRAM = """
import sys
sys.path[:] = {path!r}
from grpo_lab.grid import worker
worker.main({control}, {context}, {threads})
"""
"""What a worker of this machine runs: with the modules that are seen here."""


@dataclass(frozen=True)
class Answer:
    """What came of an item.

    Attributes:
        item: as it was submitted.
        value: what `context.run` returned.
        error: what it raised, or `WorkerLost`; else None.
    """

    item: Hashable
    value: object = None
    error: Exception | None = None


class WorkerLost(LabError):
    """A worker was lost over one item, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__(f"its worker was lost {times} times")
        self.times = times


class Context(Protocol):
    """What runs items; see the head of this module."""

    def run(self, item: Any) -> object:
        """Do an item, and return what came of it."""

    def fetch(self, item: Any) -> Path:
        """Bring what an item needs; the file that its worker prints to."""

    def close(self) -> None:
        """Clear up."""


class ThisProcess:
    """The pool that runs one item at a time in the process that asks."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.working: list = []

    def __enter__(self) -> "ThisProcess":
        return self

    def __exit__(self, *error) -> None:
        self.context.close()

    @property
    def free(self) -> int:
        """Items that can be submitted now."""
        return 1 - len(self.working)

    def submit(self, item: Hashable) -> None:
        """Take an item; `wait` runs it."""
        self.working = [item]

    def wait(self, seconds: float) -> list[Answer]:
        """Run the item that was submitted, however long it takes."""
        if not self.working:
            return []
        [item] = self.working
        try:
            return [Answer(item, self.context.run(item))]
        except Exception as error:
            return [Answer(item, error=error)]
        finally:
            self.working = []


READY, LOST = "ready", "lost"
"""What is heard of a worker, beside its answers."""


class WorkerPool:
    """Workers, each with the context; those that are lost are replaced.

    Args:
        context: pickled once; see `pickled`.
        size: workers.
        retries: times that an item may lose its worker and be submitted
            again.
        functions: of the context, by which modules may be meant that the
            workers would not find.

    How a worker is hired, given an item, heard and ended is the back end's.
    """

    def __init__(
        self,
        context: object,
        size: int,
        retries: int = RETRIES,
        functions: Sequence[Callable] = (),
    ) -> None:
        self.size, self.retries = size, retries
        self.payload = pickled(context, functions)
        self.starting: list = []
        self.idle: list = []
        self.busy: dict = {}
        self.losses: collections.Counter[Hashable] = collections.Counter()
        self.never_came = 0

    def _hire(self) -> Any:
        raise NotImplementedError

    def _give(self, worker: Any, item: Hashable) -> None:
        raise NotImplementedError

    def _heard(self, seconds: float) -> list[tuple]:
        """Workers of which something was heard, each with what."""
        raise NotImplementedError

    def _end(self, worker: Any) -> str:
        """End a worker if it lives; what it said last."""
        raise NotImplementedError

    def _dismiss(self) -> None:
        """Let all workers go."""
        raise NotImplementedError

    def __enter__(self) -> "WorkerPool":
        try:
            for _ in range(self.size):
                self.starting.append(self._hire())
        except BaseException:
            self._dismiss()
            raise
        return self

    def __exit__(self, *error) -> None:
        self._dismiss()

    @property
    def free(self) -> int:
        """Items that can be submitted now: workers that wait for one."""
        return len(self.idle)

    @property
    def working(self) -> list:
        """The items that workers are at."""
        return list(self.busy.values())

    def submit(self, item: Hashable) -> None:
        """Give an item to a worker."""
        worker = self.idle.pop(0)
        self.busy[worker] = item
        self._give(worker, item)

    def wait(self, seconds: float) -> list[Answer]:
        """What has come of items, after so many seconds at most.

        Raises:
            LabError: no worker starts.
        """
        answers = []
        for worker, message in self._heard(seconds):
            if message == LOST:
                answers += self._replace(worker)
            elif message == READY:
                self.never_came = 0
                self.starting.remove(worker)
                self.idle.append(worker)
            else:
                answers.append(Answer(self.busy.pop(worker), *message))
                self.idle.append(worker)
        return answers

    def _replace(self, worker: Hashable) -> list[Answer]:
        words = self._end(worker)
        if worker in self.starting:
            self.starting.remove(worker)
            self._refuse_to_wait(words)
        elif worker in self.idle:
            self.idle.remove(worker)
        self.starting.append(self._hire())
        item = self.busy.pop(worker, None)
        if item is None:
            return []
        self.losses[item] += 1
        if self.losses[item] <= self.retries:
            return []
        return [Answer(item, error=WorkerLost(self.losses[item]))]

    def _refuse_to_wait(self, words: str) -> None:
        self.never_came += 1
        too_often = self.never_came > (1 + self.retries) * self.size
        # While others train, a machine without memory may be free again.
        if too_often and not (self.busy or self.idle):
            raise LabError(
                "No worker starts, though there is room for them. The last "
                f"one said: {words or 'nothing'} See whether `python -c "
                "'import grpo_lab.grid'` works on each machine, then run this "
                "again: what was finished is kept."
            )


def pickled(context: object, functions: Sequence[Callable]) -> bytes:
    """A context as workers get it, with a learner's functions as they are.

    Functions of a notebook or of the program that was started are sent by
    value anyway; a module that lies beside it would be looked for on the
    workers, and may not be there.
    """
    for one in functions:
        function, _ = unwrapped(one)
        name = getattr(function, "__module__", None) or "__main__"
        known = name.partition(".")[0] in ("__main__", "rewards", "grpo_lab")
        if not known and name in sys.modules:
            cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        return cloudpickle.dumps(context)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise LabError(
            f"A reward can't be sent to the processes that train: {error}. "
            "It holds something that belongs to this process, such as a "
            "client, a lock or an open file. Make that inside the function, "
            "or type workers=1 to train in this process."
        ) from error


# --- Workers of this machine ------------------------------------------------


@dataclass(eq=False)
class _Worker:
    """A process of `LocalPool`, and the connection to it."""

    process: subprocess.Popen
    connection: Connection
    output: IO[bytes]


class LocalPool(WorkerPool):
    """Processes of this machine.

    They are programs of their own, so that a program without a guard for
    `__main__`, a notebook and a daemon can have them. Ctrl-C and the end of a
    kernel do not reach them; they end when the process that hired them has
    closed its connection or is gone, in the middle of a step if need be.

    Args:
        threads: CPU threads of each worker.
    """

    def __init__(self, *values, threads: int = 1, **options) -> None:
        super().__init__(*values, **options)
        self.threads = threads
        self.own = contextlib.ExitStack()
        self.file = self.own.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self.file.write(self.payload)
        self.file.flush()

    def _hire(self) -> _Worker:
        ours, theirs = Pipe()
        passed = theirs.fileno(), self.file.fileno()
        program = PROGRAM.format(
            path=[str(one) for one in sys.path],
            control=passed[0],
            context=passed[1],
            threads=self.threads,
        )
        output = self.own.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        process = subprocess.Popen(
            # -P: else a file such as `datasets.py` of the working directory
            # would stand in for the library of that name.
            [sys.executable, "-P", "-c", program],
            env={"CUDA_VISIBLE_DEVICES": "0"}
            | os.environ
            | {"OMP_NUM_THREADS": str(self.threads)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=passed,
            start_new_session=True,
        )
        theirs.close()
        return _Worker(process, ours, output)

    def _give(self, worker: _Worker, item: Hashable) -> None:
        with contextlib.suppress(OSError):  # it is gone: that is heard next
            worker.connection.send(item)

    def _heard(self, seconds: float) -> list[tuple]:
        workers = {
            one.connection: one
            for one in (*self.starting, *self.idle, *self.busy)
        }
        found = [workers[one] for one in wait([*workers], seconds)]
        # A process that a dead worker has left may hold its connection.
        found += [
            one
            for one in workers.values()
            if one not in found and one.process.poll() is not None
        ]
        return [(one, self._message(one)) for one in found]

    def _message(self, worker: _Worker) -> object:
        try:
            if worker.connection.poll():
                return worker.connection.recv()
        except (EOFError, OSError):
            pass
        return LOST

    def _end(self, worker: _Worker) -> str:
        worker.connection.close()
        worker.process.kill()
        worker.process.wait()
        worker.output.seek(0)
        lines = worker.output.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")

    def _dismiss(self) -> None:
        for one in (*self.starting, *self.idle, *self.busy):
            one.connection.close()
        for one in self.idle:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(LEAVE_SECONDS)
        for one in (*self.starting, *self.idle, *self.busy):
            self._end(one)
        self.own.close()
