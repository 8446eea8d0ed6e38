"""What a lesson runs on, and how its libraries are set up for it."""

import importlib.metadata
import os
import platform
import textwrap
import warnings
from pathlib import Path

import psutil

LIBRARIES = (
    "torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes",
    "datasets", "papermill",
)  # fmt: skip


def prepare() -> None:
    """Quiet libraries, no counting of users, and one GPU.

    Call it before the training libraries are imported. Progress bars and
    notices that would bury the lesson are off; errors still show.
    """
    # On a machine with several GPUs the trainer would split each batch over
    # all of them, which a 4-bit model can't do.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    # CPU threads that wait for each other fight with whatever else runs: of
    # two trainings at once a step took 20 times as long as alone. Without any
    # waiting each of the many small operations first wakes a thread. Waiting
    # a moment, a pocket step takes 0.7 s, and 1.9 s beside a second training;
    # without, 1.2 and 0.95 s (2 cores).
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    # Without this TRL tells its makers of every trainer that is built.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing")

    from datasets.utils import logging as datasets_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    datasets_logging.disable_progress_bar()


CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where Linux tells a container its limits (control groups, version 2)."""


def usable_cores() -> int:
    """CPU cores that this process may use, in a container its share."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota, _, period = _limit("cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_memory() -> int:
    """Bytes of memory that this machine has, in a container its share."""
    total, limit = psutil.virtual_memory().total, _limit("memory.max")
    return min(total, int(limit)) if limit.isdecimal() else total


def _limit(name: str) -> str:
    try:
        return (CONTROL_GROUP / name).read_text().strip()
    except OSError:
        return ""  # not in a container, or not on Linux


def versions() -> dict[str, str]:
    """Version of Python and of each library that can change a result."""
    found = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), **found}


def machine() -> str:
    """What this runs on, such as `AMD EPYC (2 cores), 23.5 GiB of memory`."""
    from grpo_lab import memory

    device = memory.device_memory()
    return f"{device.name}, {device.memory:.1f} GiB of memory"


def describe() -> str:
    """The machine, then the versions, in lines that fit a screen."""
    numbers = ", ".join(f"{k} {v}" for k, v in versions().items())
    return f"{machine()}\n{textwrap.fill(numbers, 79)}"
