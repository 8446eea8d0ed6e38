"""Reusable processes that are killed at a deadline or a memory limit.

Some work of a reward can hang, in C code too, or take all memory: symbolic
maths on what a policy wrote, and rewards that other people wrote. Here it
runs in processes of its own. They are plain programs that talk through
pipes, in JSON: they start from any thread, notebook or process, even a
daemonic one of multiprocessing, they share nothing with the trainer, and
what they send is never executed. No signal, alarm or handler of the calling
process is touched. They need a POSIX system.

Not a pool of multiprocessing, nor Pebble, which adds deadlines to one: these
run a script without a main guard a second time, refuse to start in a
daemonic process, can't be used after a fork, unpickle what a worker sends,
and leave a busy worker running when the trainer is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rewards import worker_main
from rewards.batch import RewardError

START_SECONDS = 120.0
"""How long a process may take to import and make its handler."""

GRACE_SECONDS = 5.0
"""How much longer than `wall_seconds` a process may keep silent."""

MOST_PROCESSES = 4
"""How many processes are used at most when nobody says how many."""

_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)


@dataclass(frozen=True)
class Reply:
    """What became of one request: a value, or the kind of a failure.

    `failure` is "" for a value, "timeout" for work that was killed at a
    deadline, "memory" for work that asked for more than it may have or was
    killed by the system for want of memory, "crash" for a process that ended
    in any other way, and "error" for a handler that raised or whose value
    is not JSON (NaN and infinities are not). `detail` says more, in one
    line.

    >>> Reply(value=[1, 2]).failure
    ''
    """

    value: Any = None
    failure: str = ""
    detail: str = ""


class Workers:
    """Processes that answer requests, each within its own limits.

    `factory`, written "package.module:function", is called in the worker
    with the `arguments` (JSON values) and returns the handler: a callable
    that takes one request (a JSON value) and returns its answer (another).
    The handler is made anew whenever a process is replaced, so it must not
    count on what it did before. Up to `processes` of them run (None: one for
    each usable core, 4 at most), started at the first request and kept.

    A request may use `cpu_seconds` of CPU time, whatever else the machine
    does, and last `wall_seconds`, which is for work that sleeps; it may grow
    the address space by `memory_mib` (only Linux limits it). Imports and the
    making of the handler count against none of them; what the handler
    imports later does. This holds accidents, not attackers: the code runs
    with your rights.

    >>> workers = Workers(
    ...     "operator:itemgetter", "b",
    ...     cpu_seconds=1, wall_seconds=5, memory_mib=100,
    ... )
    >>> [first, second], [third] = workers.ask([[{"b": 1}, {}], [{"b": 2}]])
    >>> first.value, second.failure, second.detail, third.value
    (1, 'error', "KeyError: 'b'", 2)
    >>> workers.close()

    The idea of a process that forks a fresh child for each that is lost is
    that of pre-forking servers; the limits are POSIX setitimer and
    setrlimit.
    """

    def __init__(
        self,
        factory: str,
        *arguments: Any,
        processes: int | None = None,
        cpu_seconds: float,
        wall_seconds: float,
        memory_mib: int,
    ) -> None:
        self._settings = {
            "factory": factory,
            "arguments": arguments,
            "cpu_seconds": cpu_seconds,
            "wall_seconds": wall_seconds,
            "memory_mib": memory_mib,
        }
        self._processes = processes or min(_usable_cores(), MOST_PROCESSES)
        self._closed = False
        self._reset()
        _OPEN.add(self)

    def ask(self, groups: Sequence[Sequence[Any]]) -> list[list[Reply]]:
        """Return the replies to groups of requests, in the same shape.

        The requests of one group go to one worker, in order, so that what it
        keeps of one can serve the next. Any number of threads may ask; one
        after another is served. An interrupt ends the work at once, and the
        next call starts afresh.

        Raises RewardError when a worker can't start, and when the workers
        were closed; TypeError for a request that is not JSON.

        >>> workers = Workers(
        ...     "operator:methodcaller", "upper", processes=1,
        ...     cpu_seconds=1, wall_seconds=5, memory_mib=100,
        ... )
        >>> workers.ask([["a"], []])
        [[Reply(value='A', failure='', detail='')], []]
        >>> workers.close()
        """
        if self._owner != os.getpid():  # forked: leave those to the parent
            self._reset()
        with self._lock:
            try:
                return self._ask(groups)
            except BaseException:
                for worker in self._workers:
                    worker.end()
                raise

    def close(self) -> None:
        """End all processes, at once; a second call does nothing.

        A program that ends closes its workers by itself.
        """
        self._closed = True
        if self._owner != os.getpid():
            return
        for worker in self._workers:
            worker.kill()
        # A thread that asks clears up by itself.
        if self._lock.acquire(blocking=False):
            for worker in self._workers:
                worker.end()
            self._lock.release()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._workers = [
            _Worker(self._settings) for _ in range(self._processes)
        ]

    def _ask(self, groups: Sequence[Sequence[Any]]) -> list[list[Reply]]:
        replies: list[list[Reply]] = [[] for _ in groups]
        todo = deque(
            (deque(group), found)
            for group, found in zip(groups, replies, strict=True)
            if group
        )
        busy: dict[_Worker, tuple[deque[Any], list[Reply]]] = {}
        idle = self._workers[: len(todo)]
        while todo or busy:
            if self._closed:
                raise RewardError("These workers were closed: make new ones.")
            for worker in idle[: len(todo)]:
                busy[worker] = todo.popleft()
                worker.send(busy[worker][0].popleft())
            idle = []
            _wait(list(busy))
            for worker, (requests, found) in list(busy.items()):
                reply = worker.receive()
                if reply is None:
                    continue
                found.append(reply)
                if requests:
                    worker.send(requests.popleft())
                else:
                    del busy[worker]
                    idle.append(worker)
        return replies


def _wait(workers: list[_Worker]) -> None:
    """Wait until a worker can be read from or written to, or is late."""
    ready = select.poll()
    for worker in workers:
        worker.register(ready)
    left = min(worker.deadline for worker in workers) - time.monotonic()
    ready.poll(max(left, 0) * 1000 + 1)


class _Process(subprocess.Popen[bytes]):
    """A process with pipes to and from it."""

    stdin: IO[bytes]
    stdout: IO[bytes]


class _Worker:
    """One process, started when it is needed; one request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.deadline = 0.0
        self._settings = settings
        self._process: _Process | None = None
        self._ready = False
        self._number = 0
        self._unsent = b""
        self._received = b""
        self._failed = ""

    def send(self, request: Any) -> None:
        """Begin to send a request; start the process if need be."""
        self._number += 1
        text = json.dumps(request).encode()
        if self._process and self._process.poll() is not None:
            self.end()
        if not self._process:
            self._start()
        self._unsent += b"%d " % self._number + text + b"\n"
        self._expect(self._ready)

    def register(self, ready: select.poll) -> None:
        """Add what this worker waits for."""
        process = self._running()
        ready.register(process.stdout, select.POLLIN)
        if self._unsent:
            ready.register(process.stdin, select.POLLOUT)

    def receive(self) -> Reply | None:
        """Send and read what can be, and return the reply if it came.

        Raises RewardError when the process can't start.
        """
        process = self._running()
        if self._unsent:
            # When the process is gone, the end of what it sends tells.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                sent = os.write(process.stdin.fileno(), self._unsent)
                self._unsent = self._unsent[sent:]
        try:
            chunk = os.read(process.stdout.fileno(), 1 << 20)
        except BlockingIOError:
            late = time.monotonic() > self.deadline
            return self._loss(True) if late else None
        if not chunk:
            return self._loss(False)
        *lines, self._received = (self._received + chunk).split(b"\n")
        reply = None
        for line in lines:
            word, _, text = line.partition(b" ")
            if line in (b"starting", b"ready"):
                self._expect(ready=line == b"ready")
            elif word == b"failed":
                self._failed = self._failed or text.decode()
            elif word == b"%d" % self._number:
                reply = Reply(**json.loads(text))
        return reply

    def kill(self) -> None:
        """End the process and all that it started; from any thread."""
        process = self._process
        if process and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def end(self) -> None:
        """End the process and close the pipes."""
        self.kill()
        if self._process:
            self._process.stdin.close()
            self._process.stdout.close()
        self._process, self._unsent, self._received = None, b"", b""

    def _start(self) -> None:
        if not hasattr(os, "fork"):
            raise self._start_error("Windows has no fork; use WSL")
        settings = self._settings | {"path": _path(), "parent": os.getpid()}
        self._unsent = json.dumps(settings).encode()
        size = str(len(self._unsent))
        self._ready, self._failed = False, ""
        try:
            self._process = _Process(
                # -P: the folder of the script, where numbers.py hides the
                # one of Python, stays out of the path.
                [sys.executable, "-P", worker_main.__file__, size],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,  # an interrupt does not reach it
            )
        except OSError as error:
            raise self._start_error(str(error)) from error
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)

    def _running(self) -> _Process:
        assert self._process
        return self._process

    def _expect(self, ready: bool) -> None:
        """Set the deadline: for a reply, or for becoming ready."""
        self._ready = ready
        patience = START_SECONDS
        if ready:
            patience = self._settings["wall_seconds"] + GRACE_SECONDS
        self.deadline = time.monotonic() + patience

    def _loss(self, late: bool) -> Reply:
        """Clear up after a process that is gone or late; return the reply."""
        process = self._running()
        self.end()
        if not self._ready:
            late_how = f"not ready after {START_SECONDS:g} s" if late else ""
            raise self._start_error(
                self._failed
                or late_how
                or worker_main.how_it_ended(process.returncode)
            )
        if late:
            return Reply(None, "timeout", "the worker itself was stuck")
        how = worker_main.how_it_ended(process.returncode)
        return Reply(None, "crash", how)

    def _start_error(self, how: str) -> RewardError:
        factory = self._settings["factory"]
        return RewardError(
            f"A worker process for {factory} could not start: {how}. So what "
            "it should compute has no result. Look for the fault by hand: "
            f"{sys.executable} -c 'import {factory.partition(':')[0]}'."
        )


def _path() -> list[str]:
    """Return what a worker imports from: all that this process does."""
    root = str(Path(__file__).resolve().parent.parent)
    path = [str(place) for place in sys.path]
    return path if root in path else [root, *path]


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_OPEN: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for workers in tuple(_OPEN):
        workers.close()
