"""Run a grid again and again, killing it where it hurts most.

Imports once and forks for each attempt, so that a kill costs no new import.
Prints a line for each attempt; the last one is left to finish.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def variety(completions, **kwargs) -> list[float]:
    """Different characters, so that groups have a spread."""
    return [float(len(set(chat[0]["content"]))) for chat in completions]


def plan(models: list[str]) -> list:
    """Two steps a pass over the questions, five steps; a rate that stays."""
    from conftest import quick_settings

    return [
        quick_settings(model, max_steps=5, lr_scheduler="constant")
        for model in models
    ]


def questions():
    from grpo_lab.data import load_splits

    return load_splits("pocket", train_rows=4, eval_rows=3, seed=3)


def run(models: list[str], output_dir: Path):
    from grpo_lab import grid

    task = grid.Task(questions(), [variety])
    # Whatever kills it is in this process.
    return grid.run(plan(models), task, output_dir, workers=1)


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_checkpoint() -> None:
    """Half of the optimiser's state is on the disk, of the third step."""
    import torch

    save = torch.save

    def half(value, path, *args, **kwargs):
        save(value, path, *args, **kwargs)
        if str(path).endswith("checkpoint-3/optimizer.pt"):
            with open(path, "r+b") as file:
                file.truncate(os.path.getsize(path) // 2)
            die()

    torch.save = half


def die_in_the_evaluation() -> None:
    """The training is over and its adapter saved, but nothing is graded."""
    from grpo_lab.evaluation import Evaluation

    save = Evaluation.save

    def save_or_die(self, path):
        die() if path.parent.parent.name == "runs" else save(self, path)

    Evaluation.save = save_or_die


@contextlib.contextmanager
def held_elsewhere(lock: Path):
    """Another process holds a lock for as long as the block lasts."""
    program = (
        "import filelock, sys\n"
        f"with filelock.FileLock({str(lock)!r}):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        yield
    finally:
        other.communicate("")


def wait_for_rows(output_dir: Path, pid: int, rows: int) -> None:
    """Kill from outside, at whatever moment it is, after some steps."""
    while True:
        for path in output_dir.glob("runs/*/metrics.csv"):
            if path.read_bytes().count(b"\n") > rows:
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.005)


def attempt(name: str, models: list[str], output_dir: Path) -> int:
    """One attempt in a process of its own; the signal that ended it."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        if name == "in a checkpoint":
            die_in_a_checkpoint()
        if name == "in the evaluation":
            die_in_the_evaluation()
        try:
            run(models, output_dir).raise_failures()
        except BaseException as error:  # a fork must never run on
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    if name == "in training":
        wait_for_rows(output_dir, pid, rows=2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(output_dir: str, *models: str) -> None:
    import torch

    import grpo_lab.grid  # noqa: F401

    # As in the process of the test, which compares with its own run.
    threads = int(os.environ.get("GRPO_LAB_TEST_THREADS", "1"))
    torch.set_num_threads(threads)
    for name in (
        "in training",
        "in a checkpoint",
        "in the evaluation",
        "left alone",
    ):
        code = attempt(name, list(models), Path(output_dir))
        print(f"{name}: {code}", flush=True)
