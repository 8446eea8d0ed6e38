"""One run outside of a grid, in a directory of its own."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import filelock

from grpo_lab.data import Splits
from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json
from grpo_lab.grid.locks import lock
from grpo_lab.grid.plan import (
    refuse_file,
    refuse_full_disk,
    run_record,
    shared_record,
)
from grpo_lab.grid.results import Run
from grpo_lab.grid.work import note_environment
from grpo_lab.settings import RunSettings

_OPENED = {"run.lock", "settings.json", "environment.json"}
"""What `open_run` writes: a directory with nothing else is free to take."""


_HELD: dict[Path, filelock.BaseFileLock] = {}
"""Locks of `open_run`, which last as long as the process."""


def open_run(
    settings: RunSettings,
    splits: Splits,
    rewards: Sequence[Callable],
    directory: Path | str,
) -> Run:
    """Take a directory for one run outside of a grid.

    Notes in it what determines the run, and holds it for this process until
    the process ends. Whoever opens the same run there again goes on with it.

    Args:
        settings, splits, rewards: what will be trained, on what.
        directory: the run's own; made if missing.

    Raises:
        LabError: it holds another run or other files, is in use or can't be
            written to, or the disk is full.
    """
    directory = Path(directory)
    shared = shared_record(splits, rewards)
    record = run_record(settings, shared)
    refuse_full_disk(directory)
    _refuse_other_run(directory, record)
    held = lock(directory, "run.lock", is_singleton=True)
    _HELD[directory.resolve()] = held
    write_json(directory / "settings.json", record)
    note_environment(directory)
    return Run(settings.short_model, settings, directory, "unfinished")


def _refuse_other_run(directory: Path, record: dict) -> None:
    refuse_file(directory)
    found = read_json(directory / "settings.json")
    if found == record:
        return
    there = directory.iterdir() if directory.exists() else []
    # a kill may leave a file half written
    names = {re.sub(r"([.]\d+)?[.]part$", "", path.name) for path in there}
    begun = names - _OPENED
    ours = isinstance(found, dict) and found.keys() == record.keys()
    if not begun and (ours or found is None):
        return
    if not ours:
        raise LabError(
            f"{directory} holds files that are not of a run, and nothing is "
            "written among them. Choose another OUTPUT_DIR, an empty or a "
            "new one."
        )
    before, now = (
        {"weights": one["weights"], **one["settings"], **one["grid"]}
        for one in (found, record)
    )
    differs = sorted(key for key in now if before.get(key) != now[key])
    raise LabError(
        f"{directory} holds another run: it differs in {', '.join(differs)}. "
        "Its results are left alone. Choose another OUTPUT_DIR, or set those "
        "values back to go on with it."
    )
