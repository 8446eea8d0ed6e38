"""One process at a time in a directory."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import filelock

from grpo_lab.errors import LabError
from grpo_lab.files import write_json


@contextlib.contextmanager
def claim(output_dir: Path, shared: dict) -> Iterator[None]:
    """Hold a grid's directory for one process at a time."""
    held = lock(output_dir, "grid.lock")
    try:
        write_json(output_dir / "grid.json", shared)
        yield
    finally:
        held.release()


def lock(
    directory: Path, name: str, is_singleton: bool = False
) -> filelock.BaseFileLock:
    """Make a directory, and lock it for this process, or refuse it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = filelock.FileLock(
            directory / name, timeout=0, is_singleton=is_singleton
        )
        found.acquire()
    except filelock.Timeout:
        raise LabError(
            f"Another process is training in {directory} right now, and two "
            "would write over each other. Wait for it, stop it, or choose "
            "another OUTPUT_DIR."
        ) from None
    except OSError as error:
        raise LabError(
            f"Nothing can be written to {directory}: {error.strerror}. "
            "Choose another OUTPUT_DIR, one that you may write to."
        ) from error
    return found
