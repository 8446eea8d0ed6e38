"""Reusable processes that are killed at a deadline or a memory limit.

Some work of a reward can hang, in C code too, or take all memory: symbolic
maths on what a policy wrote, and rewards that other people wrote. Here it
runs in processes of its own. They are plain programs that talk through
pipes, in JSON: they start from any thread, notebook or process, even a
daemonic one of multiprocessing, they share nothing with the trainer, and
what they send is never executed. No signal, alarm or handler of the calling
process is touched.
"""

import atexit
import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rewards import worker_main
from rewards.batch import RewardError

START_SECONDS = 120.0
"""How long a process may take to import and make its handler."""

GRACE_SECONDS = 5.0
"""How much longer than `wall_seconds` a process may keep silent."""

END_SECONDS = 1.0
"""How long an idle process may take to end by itself."""

WATCH_SECONDS = 0.5
"""How often the deadlines of silent processes are looked at."""

MOST_PROCESSES = 4
"""How many processes are used at most when nobody says how many."""

MOST_WRITTEN = 2000
"""How much of what a failed process wrote an error repeats."""

_SCRIPT = str(Path(worker_main.__file__).resolve())
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
    line; for an error it is the last line of the traceback.

    >>> Reply(value=[1, 2]).failure
    ''
    """

    value: object = None
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
    imports later does. On Windows only `wall_seconds` is kept.

    Raises RewardError when a limit or `processes` is not above zero or the
    arguments are not JSON. This holds accidents, not attackers: the code
    runs with your rights.

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
        *arguments,
        processes: int | None = None,
        cpu_seconds: float,
        wall_seconds: float,
        memory_mib: int,
    ):
        if processes is None:
            processes = min(_usable_cores(), MOST_PROCESSES)
        limits = (processes, cpu_seconds, wall_seconds, memory_mib)
        if not all(0 < limit < math.inf for limit in limits):
            raise RewardError(
                "Workers need at least one process and limits above zero, "
                f"and got processes={processes}, cpu_seconds={cpu_seconds}, "
                f"wall_seconds={wall_seconds}, memory_mib={memory_mib}: "
                "nothing could be answered. Pass positive finite numbers."
            )
        self._settings = {
            "factory": factory,
            "arguments": _json_copy(arguments),
            "cpu_seconds": cpu_seconds,
            "wall_seconds": wall_seconds,
            "memory_mib": memory_mib,
        }
        self._processes = processes
        self._closed = False
        self._new_workers()
        _OPEN.add(self)

    def ask(self, groups: Sequence[Sequence[object]]) -> list[list[Reply]]:
        """Return the replies to groups of requests, in the same shape.

        The requests of one group go to one worker, in order, so that what it
        keeps of one can serve the next. A request that is not JSON is
        answered with "error". Any number of threads may ask at once. An
        interrupt ends the work at once, and the next call starts afresh.

        Raises RewardError when a worker can't start, with what it wrote, and
        when the workers were closed.

        >>> workers = Workers(
        ...     "operator:methodcaller", "upper", processes=1,
        ...     cpu_seconds=1, wall_seconds=5, memory_mib=100,
        ... )
        >>> workers.ask([["a"], []])
        [[Reply(value='A', failure='', detail='')], []]
        >>> workers.close()
        """
        self._refuse_if_closed()
        job = _Job(groups)
        lanes = min(self._processes, len(job.todo))
        threads = [
            threading.Thread(target=self._work, args=(job,), daemon=True)
            for _ in range(lanes)
        ]
        # The lanes run in threads of their own, which an interrupt or an
        # alarm of the caller can't reach in the middle of a message.
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(WATCH_SECONDS)
                    job.end_overdue()
        except BaseException:
            job.cancel()
            raise
        self._refuse_if_closed()
        if job.errors:
            raise job.errors[0]
        return job.replies

    def close(self) -> None:
        """End all processes, at once; a second call does nothing.

        A program that ends closes its workers by itself.
        """
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()
        for worker in self._workers:  # those in use: their threads clear up
            worker.kill()

    def __del__(self):
        if not getattr(self, "_closed", True):
            self.close()

    def _refuse_if_closed(self):
        if self._closed:
            raise RewardError(
                "These workers were closed, so nothing can be asked of them "
                "any more. Make new ones: Workers(...)."
            )

    def _new_workers(self):
        self._workers = [
            _Worker(self._settings) for _ in range(self._processes)
        ]
        # The last one used first, so that no more start than are needed.
        self._idle = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def _forget(self):
        """In a forked child: leave the parent's processes to the parent."""
        for worker in self._workers:
            worker.forget()
        self._new_workers()

    def _work(self, job):
        worker = self._idle.get()
        job.busy.append(worker)
        try:
            for request, replies in job.requests():
                if self._closed:
                    break
                replies.append(worker.answer(request))
        except BaseException as error:
            job.errors.append(error)
            job.cancelled = True
        finally:
            job.busy.remove(worker)
            self._idle.put(worker)
            if self._closed:
                worker.end()


class _Job:
    """One call of ask: what is left to do, by whom, and what came back."""

    def __init__(self, groups):
        groups = [list(group) for group in groups]
        self.replies = [[] for _ in groups]
        self.todo = deque(
            pair for pair in zip(groups, self.replies, strict=True) if pair[0]
        )
        self.busy = []
        self.errors = []
        self.cancelled = False

    def requests(self):
        """Yield the requests of whole groups, each with where replies go."""
        while True:
            try:
                group, replies = self.todo.popleft()
            except IndexError:
                return
            for request in group:
                if self.cancelled:
                    return
                yield request, replies

    def end_overdue(self):
        for worker in tuple(self.busy):
            if time.monotonic() > worker.deadline:
                worker.kill()

    def cancel(self):
        self.cancelled = True
        for worker in tuple(self.busy):
            worker.kill()


class _Worker:
    """One process, started when it is needed; used by one thread at a time.

    Any thread may kill it. The one that uses it then reads to the end of the
    pipe and clears up.
    """

    def __init__(self, settings):
        self._settings = settings
        self._lock = threading.RLock()
        self._process = None
        self._errors = None
        self._killed = False
        self._ready = False
        self._number = 0
        self._unsent = b""
        self.deadline = math.inf

    def answer(self, request):
        """Send a request and return the Reply; start the process if need be.

        Raises RewardError when the process can't start.
        """
        try:
            text = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return Reply(None, "error", f"The request is not JSON: {error}")
        self._start_if_gone()
        self._number += 1
        number = b"%d" % self._number
        self._expect(self._ready)
        self._send(number + b" " + text + b"\n")
        reply = self._receive(number)
        self.deadline = math.inf
        return reply or self._loss()

    def kill(self):
        """End the process and all that it started; from any thread."""
        with self._lock:
            if self._process and self._process.returncode is None:
                self._killed = True
                _kill_group(self._process)

    def end(self):
        """End the process, wait for that and close the pipes."""
        with self._lock:
            if not self._process:
                return
            if not self._killed:
                # It ends by itself then, and leaves no child to init.
                self._process.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_SECONDS)
            self.kill()
            self._process.wait()
            self._close()

    def forget(self):
        """In a forked child: close the pipes, and nothing more."""
        if self._process:
            self._process.returncode = 0  # not ours to wait for
            self._close()

    def _close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()
        self._process = None

    def _start_if_gone(self):
        with self._lock:
            if self._process and (
                self._killed or self._process.poll() is not None
            ):
                self.end()
            if not self._process:
                self._start()

    def _start(self):
        settings = json.dumps(self._settings | {"path": _path()}).encode()
        self._unsent = settings
        self._killed = False
        self._expect(ready=False)
        if not sys.executable:
            raise self._start_error(
                "this program does not know its Python",
                "Type sys.executable = '/the/path/of/python' first.",
            )
        if not Path(_SCRIPT).is_file():
            raise self._start_error(
                f"there is no file {_SCRIPT}",
                "Install rewards as files: it can't run from an archive.",
            )
        try:
            self._errors = _file_for_errors()
            # Unbuffered pipes have no lock that a fork could leave locked.
            self._process = subprocess.Popen(
                # -P: the folder of the script, where numbers.py hides the
                # one of Python, stays out of the path.
                [sys.executable, "-P", _SCRIPT, str(len(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                env=os.environ | _ONE_THREAD,
                start_new_session=True,  # an interrupt does not reach it
            )
        except OSError as error:
            if self._errors:
                self._errors.close()
            raise self._start_error(
                str(error),
                "Let this program have more of what the system refuses: "
                "ulimit -n limits its open files, ulimit -u its processes.",
            ) from error
        self._lines = worker_main.lines(self._process.stdout.fileno())

    def _expect(self, ready):
        """Set the deadline: for a reply, or for becoming ready."""
        self._ready = ready
        patience = START_SECONDS
        if ready:
            patience = self._settings["wall_seconds"] + GRACE_SECONDS
        self.deadline = time.monotonic() + patience

    def _send(self, line):
        data, self._unsent = self._unsent + line, b""
        # When the process is gone, the end of what it sends tells.
        with contextlib.suppress(OSError):
            worker_main.write_all(self._process.stdin.fileno(), data)

    def _receive(self, number):
        """Return the reply with this number, None if the process is gone."""
        for line in self._lines:
            word, _, text = line.partition(b" ")
            if line in (b"starting", b"ready"):
                self._expect(ready=line == b"ready")
            elif word == number:
                try:
                    return Reply(**json.loads(text))
                except (ValueError, TypeError, RecursionError) as error:
                    detail = f"The reply can't be read: {error}"
                    return Reply(None, "error", detail)
        return None

    def _loss(self):
        """Clear up after a process that is gone; return what to reply."""
        with self._lock:
            killed = self._killed
            self.kill()  # the keeper may be gone and its child left
            code = self._process.wait()
            self._errors.seek(0)
            written = self._errors.read().decode(errors="replace")
            self.end()
        if not self._ready:
            late = f"not ready after {START_SECONDS:g} s"
            how = late if killed else worker_main.how_it_ended(code)
            raise self._start_error(
                how,
                "Mend what it says below; if it says nothing, look for the "
                f"fault by hand: python -c 'import {self._module()}'. It "
                "wrote: " + (written.strip()[-MOST_WRITTEN:] or "nothing"),
            )
        if killed:
            return Reply(None, "timeout", "the worker itself was stuck")
        return Reply(None, "crash", worker_main.how_it_ended(code))

    def _module(self):
        return self._settings["factory"].partition(":")[0]

    def _start_error(self, how, advice):
        return RewardError(
            f"A worker process for {self._settings['factory']} could not "
            f"start: {how}. So what it should compute has no result. {advice}"
        )


def _file_for_errors():
    """Return a file for what a process writes before it is ready."""
    try:
        return tempfile.TemporaryFile(buffering=0)
    except FileNotFoundError:  # no folder can be written: do without
        return open(os.devnull, "r+b", buffering=0)


def _kill_group(process):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _json_copy(arguments):
    try:
        return json.loads(json.dumps(arguments))
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"The arguments of a factory are sent as JSON: {error}. Pass "
            "texts, numbers, lists and dictionaries, such as str(path)."
        ) from error


def _path():
    """Return what a worker imports from: all that this process does."""
    root = str(Path(__file__).resolve().parent.parent)
    path = [str(place) for place in sys.path]
    return path if root in path else [root, *path]


def _usable_cores():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_OPEN = weakref.WeakSet()


def _close_all():
    for workers in tuple(_OPEN):
        workers.close()


def _forget_all():
    for workers in tuple(_OPEN):
        workers._forget()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
