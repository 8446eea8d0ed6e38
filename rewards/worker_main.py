"""What runs in the processes of rewards.workers; started as a script.

The process that is started, the keeper, imports the module of the handler,
which may take seconds, and then forks. The child makes the handler and
answers requests; before each it asks the kernel to end it at the deadline,
so that no code, not even a loop in C, runs longer. When the child is gone,
the keeper says how and forks the next one, in milliseconds. When the parent
is gone, even by SIGKILL, the keeper ends the child at once. Where there is
no fork (Windows) the keeper answers by itself and has no limits of its own:
there the parent's deadline is all.

Each request and each reply is a line: a number, a space and JSON. The lines
"starting" and "ready" frame the time that the making of a handler takes.
Nothing here may import from `rewards`: the script runs before the path is
set.
"""

import contextlib
import gc
import importlib
import json
import mmap
import os
import select
import signal
import sys
import traceback

try:
    import resource
except ImportError:  # Windows
    resource = None

MIB = 1024 * 1024
NOWHERE = -1  # no file descriptor
LONGEST_DETAIL = 500

# What the shared cell says while it is not the number of the request in work.
STARTING = -2  # the child has not had a request yet
CLOSED = -1  # the child has found the pipe closed
IDLE = 0


def lines(descriptor):
    """Yield the lines that arrive at a file descriptor, until its end."""
    parts = []
    while chunk := os.read(descriptor, 65536):
        first, *others = chunk.split(b"\n")
        parts.append(first)
        for part in others:
            yield b"".join(parts)
            parts = [part]


def write_all(descriptor, data):
    """Write all of the bytes to a file descriptor."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def how_it_ended(code):
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


def main(size):
    """Serve until the parent closes its end of the pipe.

    The first `size` bytes of it are the settings, as JSON.
    """
    requests, replies = os.dup(0), os.dup(1)
    # Whatever is printed or asked for from here on stays out of the pipes.
    _to_nowhere(0, 1)
    if hasattr(signal, "pthread_sigmask"):
        # What the parent blocks or ignores is inherited, and would disarm
        # the deadline or hide the end of a child.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if resource:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = _read_settings(requests, size)
    sys.path[:] = settings["path"]
    module, _, name = settings["factory"].partition(":")
    factory = getattr(importlib.import_module(module), name)
    # A collection in a child would touch, and so copy, all that is shared.
    gc.freeze()
    _Keeper(settings, factory, requests, replies).keep()


def _read_settings(descriptor, size):
    # Not a byte more, since the first request may already follow.
    text = bytearray()
    while len(text) < size and (part := os.read(descriptor, size - len(text))):
        text += part
    return json.loads(text)


class _Keeper:
    def __init__(self, settings, factory, requests, replies):
        self.settings = settings
        self.factory = factory
        self.requests = requests
        self.replies = replies
        self.life = NOWHERE  # open in a child, as long as it lives
        # Shared with the children: the number of the request in work.
        self.serving = memoryview(mmap.mmap(-1, 8)).cast("q")

    def keep(self):
        """Keep one child serving, until the parent closes the pipe."""
        # A broken pipe: the parent went while a request was in work.
        with contextlib.suppress(BrokenPipeError):
            while self.serving[0] != CLOSED:
                self.replace_child()
        if hasattr(os, "getpgrp") and os.getpgrp() == os.getpid():
            # End, too, what a handler may have left running.
            os.kill(0, signal.SIGKILL)

    def replace_child(self):
        """Serve by a new child, and report it if it was lost in a request."""
        self.serving[0] = STARTING
        self.say(b"starting")
        forks = hasattr(os, "fork")
        code = self.serve_in_child() if forks else self.serve()
        if self.serving[0] == STARTING:
            print("No handler:", how_it_ended(code), file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)
        if self.serving[0] > IDLE:
            self.say(b"%d " % self.serving[0] + self.loss(code))

    def say(self, text):
        # The first newline ends a line that was left unfinished.
        write_all(self.replies, b"\n" + text + b"\n")

    def serve_in_child(self):
        end_of_child, self.life = os.pipe()
        child = os.fork()
        if not child:
            os.close(end_of_child)
            _exit_with(self.serve)
        os.close(self.life)
        orphaned = self.parent_ends_before(end_of_child)
        os.close(end_of_child)
        if orphaned:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if orphaned:
            self.serving[0] = CLOSED
        return os.waitstatus_to_exitcode(status)

    def parent_ends_before(self, end_of_child):
        """Wait for one of the two to hang up; tell whether the parent did."""
        ends = select.poll()
        ends.register(end_of_child, select.POLLIN)
        ends.register(self.requests, 0)  # not what is sent, only its end
        return end_of_child not in dict(ends.poll())

    def serve(self):
        """Make the handler and answer requests until it must be replaced."""
        self.leave_pipes_at_fork()
        handler = self.factory(*self.settings["arguments"])
        _to_nowhere(2)
        limits = _Limits(self.settings)
        self.say(b"ready")
        for line in lines(self.requests):
            number, _, text = line.partition(b" ")
            self.serving[0] = int(number)
            reply = _answer(handler, text, limits)
            self.say(number + b" " + reply)
            self.serving[0] = IDLE
            if limits.outgrown():
                return 0
        self.serving[0] = CLOSED
        return 0

    def leave_pipes_at_fork(self):
        """See that what a handler forks neither holds the pipes nor serves.

        A copy that returns from the handler fails to reply, and ends.
        """

        def leave():
            if self.replies != NOWHERE:
                os.close(self.requests)
                os.close(self.replies)
                os.close(self.life)
            self.requests = self.replies = NOWHERE

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=leave)

    def loss(self, code):
        """Return the reply to the request in which a child was lost."""
        cpu, wall = (self.settings[k] for k in ("cpu_seconds", "wall_seconds"))
        if code == -signal.SIGPROF:
            return _failure("timeout", f"more than {cpu:g} s of CPU time")
        if code == -signal.SIGALRM:
            return _failure("timeout", f"more than {wall:g} s")
        if code == -signal.SIGKILL:
            # Nothing here sends it to a child alone: the kernel does so when
            # the machine runs out of memory.
            return _failure("memory", "killed, as a full memory does")
        return _failure("crash", how_it_ended(code))


class _Limits:
    """The deadlines and the memory of one request, set in the kernel."""

    def __init__(self, settings):
        self.cpu = settings["cpu_seconds"]
        self.wall = settings["wall_seconds"]
        self.memory = settings["memory_mib"] * MIB
        self.timed = hasattr(signal, "setitimer")
        try:
            self.sizes = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:  # neither Linux nor a way to limit memory
            self.sizes = None
        self.first_size = self.size()
        self.exceeded = False

    def size(self):
        """Return the bytes of address space in use, 0 if not known."""
        if self.sizes is None or not resource:
            return 0
        pages = os.pread(self.sizes, 32, 0).partition(b" ")[0]
        return int(pages) * resource.getpagesize()

    def outgrown(self):
        """Should the process be replaced, because of its memory?"""
        return self.exceeded or self.size() > self.first_size + self.memory

    def start(self):
        # Every request gets the same memory, whatever those before it left.
        if self.first_size:
            _limit_address_space(self.size() + self.memory)
        if self.timed:
            # A handler may have set these signals to something else.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.wall)
            signal.setitimer(signal.ITIMER_PROF, self.cpu)

    def stop(self):
        if self.timed:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self.first_size:
            _limit_address_space(None)


def _limit_address_space(size):
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if size is None or (hard != resource.RLIM_INFINITY and size > hard):
        size = hard
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def _answer(handler, text, limits):
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


def _failure(failure, detail):
    return json.dumps({"failure": failure, "detail": detail}).encode()


def _last_line(error):
    try:
        text = str(error)
    except BaseException:
        text = "(an error whose text can't be read)"
    return f"{type(error).__name__}: {text}"[:LONGEST_DETAIL]


def _to_nowhere(*descriptors):
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _exit_with(function, *arguments):
    # Without the clean-up of an interpreter: what a handler left behind,
    # such as a thread that never ends, can't hold this process up.
    code = 1
    try:
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit_with(main, int(sys.argv[1]))
