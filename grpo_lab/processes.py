"""Processes of this machine: start them, end them with all they started.

A process may start others in sessions of their own, and its parent may be
killed, so that no tree of processes leads to it any more. What belongs to the
run of a lesson therefore carries the run's directory in its environment, and
`end_marked` finds it wherever it is. Servers listen on the loopback address
only.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

HOST = "127.0.0.1"
"""Servers ask for no password, so nobody else may reach them."""

MARK = "GRPO_LAB_RUN"
"""Environment variable: the directory of the run a process belongs to."""

PARENT = "GRPO_LAB_PARENT"
"""Environment variable: the process that `end_with_parent` looks at."""

PATIENCE = 10.0
"""Seconds from the request to end to the kill."""

ENDING = [signal.SIGTERM]
"""Signals that end a command beside Ctrl-C; Windows has no SIGHUP."""
if hasattr(signal, "SIGHUP"):
    ENDING.append(signal.SIGHUP)

_started: list[subprocess.Popen] = []
"""Children of this process; one that has ended is a zombie until polled."""


def start(
    command: Sequence[str],
    log: Path,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen:
    """Start a process that Ctrl-C and the end of a notebook do not reach.

    Args:
        command: the program and its arguments.
        log: the file for what it prints; overwritten.
        environment: variables beside those of this process.
    """
    _reap()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )
    _started.append(process)
    return process


def is_running(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie does not.

    In a container nobody may ever ask an orphan how it ended. As long as a
    zombie has threads that are still ending, it holds its ports and runs.
    """
    try:
        zombie = process.status() == psutil.STATUS_ZOMBIE
        ended = zombie and process.num_threads() <= 1
        return process.is_running() and not ended
    except psutil.Error:
        return False


def tree(pid: int | None, started: float | None = None) -> list:
    """A process and all below it; [] if it does not run.

    Args:
        pid: its number; None gives [].
        started: when it began, in seconds since 1970; tells it from another
            process that was given the same number later.

    Returns:
        A list of `psutil.Process`, the root first.
    """
    _reap()
    if pid is None:  # which psutil takes for this very process
        return []
    try:
        root = psutil.Process(pid)
        # A clock that is put right moves the start by a moment.
        other = started and abs(root.create_time() - started) >= 1
        if other or not is_running(root):
            return []
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def end_tree(
    pid: int | None, patience: float = PATIENCE, started: float | None = None
) -> None:
    """End a process and all below it: ask, and kill what stays.

    Args:
        pid, started: as for `tree`; nothing happens if it does not run.
        patience: seconds from the request to the kill.
    """
    family = tree(pid, started)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for one in list(family):
            with contextlib.suppress(psutil.Error):
                # What it has started meanwhile.
                family += one.children(recursive=True)
        for one in filter(is_running, set(family)):
            with contextlib.suppress(psutil.Error):
                ask(one)
        deadline = time.monotonic() + patience
        while any(map(is_running, family)) and time.monotonic() < deadline:
            time.sleep(0.05)
    _reap()


def end_marked(places: Sequence[Path]) -> None:
    """Kill all processes of some runs but this one, in any session.

    Args:
        places: directories of runs, see `MARK`; a run below one of them, as
            of a sweep that a lesson made, belongs to it.
    """
    ours = [place.resolve() for place in places]
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = [p for p in psutil.process_iter() if _is_of(p, ours)]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.Error):  # gone meanwhile
                process.kill()
        time.sleep(0.1)


def _is_of(process: psutil.Process, places: list[Path]) -> bool:
    try:
        mark = process.environ().get(MARK)
    except psutil.Error:  # gone meanwhile, or another user's
        return False
    return (
        mark is not None
        and process.pid != os.getpid()
        and any(Path(mark).is_relative_to(place) for place in places)
        and is_running(process)
    )


@contextlib.contextmanager
def on_signals(
    numbers: Sequence[int], handler: Callable[[int], None]
) -> Iterator[None]:
    """Handle signals; those that are ignored, as after nohup, stay so.

    The caller's handlers come back: a process that is forked later would
    inherit ours, and one that is about to wait in C code may never run it.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, old in before.items():
            if old is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: handler(number))
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def end_with_parent() -> None:
    """Have SIGTERM sent to this process when its parent ends, if asked to.

    The parent asks with its own number in the variable `PARENT`; even a
    `kill -9` of it then leaves nothing behind.
    """
    parent = int(os.environ.pop(PARENT, 0))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    if parent:
        threading.Thread(target=watch, daemon=True).start()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def is_free(port: int) -> bool:
    """Whether a server could listen on a port now."""
    with socket.socket() as probe:
        if os.name == "posix":  # the port of an ended server is free at once
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
    return port > 0


def listens(family: Sequence[psutil.Process], port: int) -> bool:
    """Whether one of these processes listens on a port."""
    try:
        return any(
            one.status == psutil.CONN_LISTEN and one.laddr.port == port
            for member in family
            for one in member.net_connections("tcp")
        )
    except psutil.Error:  # it ended meanwhile
        return False


def _reap() -> None:
    _started[:] = [one for one in _started if one.poll() is None]
