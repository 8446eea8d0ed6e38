"""What a worker does: run the items that it is given, one after the other."""

import contextlib
import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle

from grpo_lab import environment
from grpo_lab.errors import LabError

WATCH_SECONDS = 1.0
"""How often a worker looks whether the process that hired it is there."""


class Worker:
    """A context in a process of its own; of `RayPool` an actor.

    Args:
        context: as `pool.pickled` gives it.
        threads: CPU threads to compute with.
        directory: where a relative path to a model or to data leads.
        gpus: whether it sees all GPUs, or only those that Ray gave to it.
    """

    def __init__(
        self, context: bytes, threads: int, directory: Path, gpus: bool = True
    ) -> None:
        import torch

        if not gpus:
            see_own_gpus()
        environment.prepare()
        if directory.is_dir():
            os.chdir(directory)
        torch.set_num_threads(threads)
        self.context = cloudpickle.loads(context)

    def ready(self) -> str:
        """An answer says that the worker is there."""
        from grpo_lab.grid.pool import READY

        return READY

    def run(self, item: object) -> tuple[object, Exception | None]:
        """Run an item; what it returns, or what it raises."""
        try:
            with printing_to(self.context.fetch(item)):
                return self.context.run(item), None
        except Exception as error:
            return None, _sendable(error)

    def close(self) -> None:
        """Clear up."""
        self.context.close()


def see_own_gpus() -> None:
    """Let PyTorch see none of the GPUs, if Ray has given none to this worker.

    Ray hides the others from a worker that asked for GPUs, and none from one
    that did not ask.
    """
    import ray

    if not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _sendable(error: Exception) -> Exception:
    """An error as it is, if the other process can have it, else its text."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return LabError(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def printing_to(log: Path) -> Iterator[None]:
    """Send what this process prints to a file, C code's words included."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    except Exception:
        traceback.print_exc()  # the last words, if there are no more tries
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # a full disk
                stream.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


# --- A process of `LocalPool` -----------------------------------------------


def main(control: int, context: int, threads: int) -> None:
    """Run what arrives, until the process that sends it is gone.

    Args:
        control: the file descriptor of a connection.
        context: that of a file with the pickled context.
        threads: as for `Worker`.
    """
    os.set_inheritable(control, False)
    connection = Connection(control)
    items: queue.SimpleQueue = queue.SimpleQueue()
    at_work = threading.Event()
    at_work.set()
    threading.Thread(
        target=_listen, args=(connection, items, at_work), daemon=True
    ).start()
    payload = os.pread(context, os.fstat(context).st_size, 0)
    os.close(context)
    worker = Worker(payload, threads, Path.cwd())
    at_work.clear()
    connection.send(worker.ready())
    while (item := items.get()) is not None:
        answer = worker.run(item)
        at_work.clear()
        connection.send(answer)
    worker.close()


def _listen(
    connection: Connection, items: queue.SimpleQueue, at_work: threading.Event
) -> None:
    """Take the items; end this process at once when its driver is gone.

    A process that the driver has forked may keep the other end of the
    connection open, so the parent is watched too.
    """
    parent = os.getppid()
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(WATCH_SECONDS):
                item = connection.recv()
                at_work.set()  # before it can be taken
                items.put(item)
    if at_work.is_set():
        os._exit(1)
    items.put(None)
