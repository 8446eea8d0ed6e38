"""Handlers for worker processes, with everything that can go wrong."""

import ctypes
import json
import os
import signal
import sys
import threading
import time
import warnings

print("printed while it was imported")

KEPT = []
KEEPER = os.getpid()
"""The process that imported this: in a worker, the one that forks."""


def do(request):
    """Do what the request says: the name of a deed, and what it needs."""
    name, *details = request
    return DEEDS[name](*details)


def make():
    print("printed while it was made")
    return do


def no_handler(reason):
    """A factory that fails: it raises, exits, crashes, hangs or has died."""
    print("this is what it said", file=sys.stderr, flush=True)
    if reason == "hangs":
        time.sleep(60)
    do(["raise", "no handler today"] if reason == "raises" else [reason])


def second_time_fails(marker):
    """A factory that works once, and then only raises."""
    with open(marker, "x"):
        return do


def slow_to_make(marker):
    """A factory that takes long, though not the first time."""
    if os.path.exists(marker):
        time.sleep(2.5)
    open(marker, "w").close()
    return do


def _raise(text):
    raise ValueError(text)


def _recurse():
    return _recurse()


def _power():
    # One multiplication after another in C, deaf to any Python handler.
    return 9**9**9


def _deaf(seconds):
    """Ignore both alarms and sleep, as code that uses them itself may."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    time.sleep(seconds)


def _use_alarms():
    """Set both alarms to something that ends nothing."""
    signal.signal(signal.SIGPROF, lambda *_: None)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(100)
    return "set"


def _is_nowhere(descriptor):
    return os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))


def _burn(seconds):
    """Use this much CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return "burnt"


def _take(mib):
    return len(bytearray(mib * 1024 * 1024))


def _keep(mib):
    KEPT.append(bytearray(mib * 1024 * 1024))
    return len(KEPT)


def _segfault():
    ctypes.string_at(0)


def _print(text):
    print(text)
    print(text, file=sys.stderr)
    os.write(1, text.encode())
    os.write(2, text.encode())
    return sys.stdin.read()


def _fork():
    """Fork, and let both return; the one that is left over sleeps first."""
    warnings.simplefilter("ignore")
    if os.fork() == 0:
        time.sleep(0.2)
    return os.getpid()


def _leave_sleeper():
    if os.fork() == 0:
        time.sleep(300)
        os._exit(0)
    return os.getpid()


def _stop():
    # The whole group, so that nothing here can end it: only a worker's own.
    assert os.getpgrp() == KEEPER
    os.kill(0, signal.SIGSTOP)


def _kill_keeper(status=None):
    # Only ever our own parent: a lost child's parent is the system's first.
    assert os.getppid() == KEEPER
    os.kill(KEEPER, signal.SIGKILL)
    if status is not None:
        os._exit(status)


def _crash_later():
    threading.Timer(0.1, _segfault).start()
    return "soon"


class _NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def _raise_no_text():
    raise _NoText


DEEDS = {
    "say": lambda value: value,
    "raise": _raise,
    "raise without text": _raise_no_text,
    "recurse": _recurse,
    "power": _power,
    "sleep": lambda seconds: time.sleep(seconds) or "slept",
    "deaf": _deaf,
    "use alarms": _use_alarms,
    "is nowhere": _is_nowhere,
    "burn": _burn,
    "take": _take,
    "keep": _keep,
    "segfault": _segfault,
    "exit": lambda: sys.exit(3),
    "end": lambda: os._exit(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill keeper": _kill_keeper,
    "close": lambda: os.closerange(0, 256),
    "print": _print,
    "fork": _fork,
    "leave sleeper": _leave_sleeper,
    "stop": _stop,
    "crash later": _crash_later,
    "pid": os.getpid,
    "keeper": lambda: KEEPER,
    "path": lambda: sys.path,
    "environment": lambda name: os.environ.get(name),
    "nan": lambda: float("nan"),
    "infinity": lambda: [float("inf")],
    "set": lambda: {1, 2},
    "deep": lambda depth: json.loads("[" * depth + "]" * depth),
    "surrogate": lambda: "\ud800",
    "large": lambda size: "x" * size,
}
