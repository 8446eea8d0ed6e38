"""Files that a crash never leaves half-written."""

import contextlib
import csv
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from grpo_lab.errors import LabError

LOCK = ".lock"
"""In a directory that `hold` was called for."""


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one.

    Raises:
        LabError: the disk is full.
    """
    path = Path(path)
    # Else two processes that write one file would take each other's part.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise LabError(
            f"Could not write {path}: {error.strerror}. What was finished "
            "before is still there. Free some space or choose another "
            "directory (OUTPUT_DIR), then run this again: it goes on where "
            "it stopped."
        ) from error


def write_json(path: Path, value: object) -> None:
    """`write_whole` for plain values, readable."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None if there is no such file.

    Raises:
        LabError: somebody or something has broken it.
    """
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except ValueError as error:
        raise LabError(
            f"{path} is broken: {error}. No program of these lessons leaves "
            "it so. Put a good copy of it back; or delete it and go on: what "
            "can be computed again will be."
        ) from error


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[None]:
    """Make a directory, and work in it as the only process.

    Raises:
        LabError: another one does, or it can't be written to.
    """
    lock = filelock.FileLock(directory / LOCK, timeout=0)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise LabError(
            f"Another process is at work in {directory} right now. Wait for "
            "it, stop it, or choose another directory with --output."
        ) from None
    except OSError as error:
        raise LabError(
            f"{directory} can't be used: {error.strerror}. Choose a "
            "directory that you may write to with --output."
        ) from error
    try:
        yield
    finally:
        lock.release()


def last_line(log: Path) -> str:
    """The last words of a log; "" if it has none or is not there."""
    if not log.exists():
        return ""
    lines = log.read_text(errors="replace").split("\n")
    return next((x.strip() for x in reversed(lines) if x.strip()), "")


def readable(path: Path) -> Path:
    """A path as a reader would type it: from here, if it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def own_directory(path: Path, mark: str) -> Path:
    """Take a directory for a lesson that writes files of fixed names.

    Args:
        path: missing, empty, or one that this lesson took before.
        mark: the lesson's name; a file in the directory holds it.

    Returns:
        The directory.

    Raises:
        LabError: it holds other files, is one, or can't be written to.
    """
    path = Path(path)
    note = path / "lesson.json"
    try:
        there = sorted(one.name for one in path.iterdir())
    except FileNotFoundError:
        there = []
    except OSError as error:
        raise LabError(
            f"{path} can't be used for results: {error.strerror}. Choose "
            "another OUTPUT_DIR, a new directory."
        ) from error
    if there and (read_json(note) or {}).get("lesson") != mark:
        raise LabError(
            f"{path.absolute()} holds files that are not of this lesson "
            f"({', '.join(there[:3])}), and nothing is written among them. "
            "Choose another OUTPUT_DIR, an empty or a new one."
        )
    write_json(note, {"lesson": mark})
    return path


def read_metrics(path: Path) -> list[dict]:
    """The rows of a `metrics.csv`, numbers as numbers; [] if none.

    A last line that a kill cut short is left out.
    """
    if not Path(path).is_file():
        return []
    with Path(path).open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    return [
        {name: float(v) if v else None for name, v in row.items()}
        | {"step": int(float(row["step"]))}
        for row in csv.DictReader(lines)
    ]
