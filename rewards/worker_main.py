"""What runs in the processes of rewards.workers; started as a script.

The process that is started, the keeper, imports the module of the handler,
which may take seconds, and then forks. The child makes the handler and
answers requests; before each it asks the kernel to end it at the deadline,
so that no code, not even a loop in C, runs longer. When the child is gone,
the keeper says how and forks the next one, in milliseconds. When the parent
is gone, even by SIGKILL, the keeper ends all within a second.

What arrives are the settings, then lines: a number, a space and a request;
JSON, all of it. A line that leaves is a number, a space and a
reply, or "starting", "ready", or "failed" and why no handler could be made.
Nothing here may import from `rewards`: the script runs before the path is
set.
"""

import contextlib
import gc
import importlib
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

MIB = 1024 * 1024
LONGEST_DETAIL = 500
WATCH_SECONDS = 1.0  # how often the keeper looks whether its parent lives

# What the shared cell says while it is not the number of the request in work.
STARTING = -2  # the child has made no handler yet
CLOSED = -1  # the child has found the pipe closed
IDLE = 0


def lines(descriptor: int) -> Iterator[bytes]:
    """Yield the lines that arrive at a file descriptor, until its end."""
    parts = []
    while chunk := os.read(descriptor, 65536):
        first, *others = chunk.split(b"\n")
        parts.append(first)
        for part in others:
            yield b"".join(parts)
            parts = [part]


def how_it_ended(code: int) -> str:
    """Return an exit code in words.

    >>> how_it_ended(-11), how_it_ended(3)
    ('ended by SIGSEGV', 'ended with status 3')
    """
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"ended by signal {-code}"


def main(size: int) -> None:
    """Keep one child serving, until the parent closes the pipe.

    The first `size` bytes of it are the settings, as JSON.
    """
    import resource  # Windows, where rewards is imported too, has none

    requests, replies = os.dup(0), os.dup(1)
    # Whatever is printed or asked for from here on stays out of the pipes.
    _to_nowhere(0, 1, 2)
    # What the parent blocks or ignores is inherited, and would disarm the
    # deadline or hide the end of a child.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = _read_settings(requests, size)
    _end_with(settings["parent"])
    sys.path[:] = settings["path"]
    module, _, name = settings["factory"].partition(":")
    try:
        factory = getattr(importlib.import_module(module), name)
    except BaseException as error:
        return _say(replies, b"failed " + _last_line(error).encode())
    # A collection in a child would touch, and so copy, all that is shared.
    gc.freeze()
    serving = memoryview(mmap.mmap(-1, 8)).cast("q")  # shared with children
    while serving[0] != CLOSED:
        serving[0] = STARTING
        _say(replies, b"starting")
        child = os.fork()
        if not child:
            _serve(settings, factory, requests, replies, serving)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if serving[0] == STARTING:
            return _say(replies, b"failed " + how_it_ended(code).encode())
        if serving[0] > IDLE:
            _say(replies, b"%d " % serving[0] + _loss(settings, code))


def _read_settings(descriptor: int, size: int) -> dict[str, Any]:
    # Not a byte more: the first request, which is a child's, may follow.
    text = b""
    while len(text) < size and (part := os.read(descriptor, size - len(text))):
        text += part
    return json.loads(text)


def _end_with(parent: int) -> None:
    """Look from time to time whether the parent lives, and end with it."""

    def look(*_: object) -> None:
        if os.getppid() != parent:
            os.kill(0, signal.SIGKILL)  # and all that a handler has started

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, WATCH_SECONDS, WATCH_SECONDS)


def _serve(
    settings: dict[str, Any],
    factory: Callable[..., Any],
    requests: int,
    replies: int,
    serving: memoryview,
) -> None:
    """Make the handler and answer until it must be replaced; ends the child.

    Without the clean-up of an interpreter: what a handler left behind, such
    as a thread that never ends, can't hold this process up.
    """
    own = os.getpid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        handler = factory(*settings["arguments"])
    except BaseException as error:
        _say(replies, b"failed " + _last_line(error).encode())
        os._exit(1)
    limits = _Limits(settings)
    serving[0] = IDLE
    _say(replies, b"ready")
    for line in lines(requests):
        number, _, text = line.partition(b" ")
        serving[0] = int(number)
        reply = _answer(handler, text, limits)
        if os.getpid() != own:  # a copy that the handler has forked
            os._exit(0)
        _say(replies, number + b" " + reply)
        serving[0] = IDLE
        if limits.outgrown():
            os._exit(0)
    serving[0] = CLOSED
    os._exit(0)


def _loss(settings: dict[str, Any], code: int) -> bytes:
    """Return the reply to the request in which a child was lost."""
    if code == -signal.SIGPROF:
        detail = f"more than {settings['cpu_seconds']:g} s of CPU time"
        return _failure("timeout", detail)
    if code == -signal.SIGALRM:
        return _failure("timeout", f"more than {settings['wall_seconds']:g} s")
    if code == -signal.SIGKILL:
        # Nothing here sends it to a child alone: the kernel does so when
        # the machine runs out of memory.
        return _failure("memory", "killed, as a full memory does")
    return _failure("crash", how_it_ended(code))


class _Limits:
    """The deadlines and the memory of one request, set in the kernel."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.cpu = settings["cpu_seconds"]
        self.wall = settings["wall_seconds"]
        self.memory = settings["memory_mib"] * MIB
        self.first_size = _size()
        self.exceeded = False

    def outgrown(self) -> bool:
        """Should the process be replaced, because of its memory?"""
        return self.exceeded or _size() > self.first_size + self.memory

    def start(self) -> None:
        # Every request gets the same memory, whatever those before it left.
        if self.first_size:
            _limit_address_space(_size() + self.memory)
        # A handler may have set these signals to something else.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self.wall)
        signal.setitimer(signal.ITIMER_PROF, self.cpu)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _limit_address_space(None)


def _size() -> int:
    """Return the bytes of address space in use, 0 where it isn't Linux."""
    try:
        with open("/proc/self/statm", "rb") as sizes:
            return int(sizes.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _limit_address_space(size: int | None) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if size is None or (hard != resource.RLIM_INFINITY and size > hard):
        size = hard
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def _answer(
    handler: Callable[[Any], Any], text: bytes, limits: _Limits
) -> bytes:
    try:
        limits.start()
        value = handler(json.loads(text))
        # JSON has neither NaN nor infinities: those are errors too.
        return json.dumps({"value": value}, allow_nan=False).encode()
    except MemoryError:
        limits.exceeded = True
    except BaseException as error:
        # Its text is made within the limits: it may be anyone's code.
        return _failure("error", _last_line(error))
    finally:
        limits.stop()
    return _failure("memory", f"more than {limits.memory // MIB} MiB")


def _failure(failure: str, detail: str) -> bytes:
    return json.dumps({"failure": failure, "detail": detail}).encode()


def _last_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except BaseException:
        text = "(an error whose text can't be read)"
    text = f"{type(error).__name__}: {text}"[:LONGEST_DETAIL]
    return text.encode(errors="replace").decode()


def _say(descriptor: int, line: bytes) -> None:
    # The first newline ends a line that was left unfinished.
    rest = memoryview(b"\n" + line + b"\n")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _to_nowhere(*descriptors: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        main(int(sys.argv[1]))
    os.kill(0, signal.SIGKILL)  # what a handler may have left running
