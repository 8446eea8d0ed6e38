"""Which runs a grid has, where each lies, and whether they may run there.

A run's record holds everything that determines it; its directory is named
after a hash of the record.
"""

import itertools
import math
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from grpo_lab import evaluation, models
from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json
from grpo_lab.grid.fingerprint import reward_fingerprint
from grpo_lab.grid.results import Run
from grpo_lab.grid.state import lock, note_start, short_hash
from grpo_lab.settings import RunSettings
from grpo_lab.task import Task

SPARE_GIB = 0.5
"""Free disk space below which no run is started, beside its checkpoints."""


def expand(base: RunSettings, **choices: Sequence) -> list[RunSettings]:
    """Every combination of some settings.

    Args:
        base: the values of all settings that are not varied.
        choices: a list of values for each varied field of `RunSettings`.

    Example:
        >>> base = RunSettings(model="pocket-qwen", learning_rate=1e-3)
        >>> runs = expand(base, learning_rate=[1e-3, 1e-4], beta=[0, 0.04])
        >>> [(run.learning_rate, run.beta) for run in runs]
        [(0.001, 0.0), (0.001, 0.04), (0.0001, 0.0), (0.0001, 0.04)]

    Raises:
        LabError: no such field, or a value that cannot train.
    """
    return [
        RunSettings(**base.to_dict() | dict(zip(choices, values, strict=True)))
        for values in itertools.product(*choices.values())
    ]


Draw = Callable[[random.Random], object]
"""Draws a value of a setting."""


def log_uniform(low: float, high: float) -> Draw:
    """Values between two bounds, each order of magnitude as often.

    Rounded to three digits, so that the name of a run tells its value.

    Raises:
        LabError: the bounds are not above 0, or not in order.
    """
    if not 0 < low < high:
        raise LabError(
            f"log_uniform({low:g}, {high:g}) has no values: type two bounds "
            "above 0, the smaller one first, such as log_uniform(1e-5, 1e-3)."
        )

    def draw(chance: random.Random) -> float:
        value = math.exp(chance.uniform(math.log(low), math.log(high)))
        return min(max(float(f"{value:.3g}"), low), high)

    return draw


def sample(
    base: RunSettings, n: int, seed: int, **choices: Draw | Sequence
) -> list[RunSettings]:
    """Runs with settings drawn at random.

    With few settings that matter it finds better ones than `expand` does with
    as many runs (Bergstra and Bengio, 2012, JMLR 13).

    Args:
        base: the values of all settings that are not varied.
        n: runs; no two are equal.
        seed: the same seed gives the same runs.
        choices: for each varied field of `RunSettings` a distribution, such as
            `log_uniform`, or a list of values that are equally likely.

    Raises:
        LabError: no such field, or there are not so many different runs.
    """
    chance, found = random.Random(seed), []
    for _ in range(100 * n):
        values = {
            name: draw(chance) if callable(draw) else chance.choice(draw)
            for name, draw in choices.items()
        }
        [one] = expand(base, **{name: [v] for name, v in values.items()})
        if one not in found:
            found.append(one)
        if len(found) == n:
            return found
    raise LabError(
        f"Of these choices {len(found)} different runs were found, not {n}. "
        "Ask for fewer, or give more values to choose from."
    )


def plan(
    settings: Sequence[RunSettings], task: Task, output_dir: Path
) -> dict[Path, dict]:
    """Each run's directory, and the record of all that determines the run.

    Raises:
        LabError: two runs are the same, a reference answer can't be read, the
            directory belongs to another grid, or the disk is full.
    """
    task.refuse_unreadable()
    if not settings:
        raise LabError(
            "This grid has no runs. Name at least one model and one learning "
            "rate, such as MODELS = ['pocket-qwen'], LEARNING_RATES = [1e-3]."
        )
    grid = shared_record(task)
    records = [(one, run_record(one, grid)) for one in settings]
    planned = {
        output_dir / "runs" / run_name(one, record): record
        for one, record in records
    }
    if len(planned) < len(settings):
        raise LabError(
            "Two runs of this grid have the same settings, so one of them "
            "would learn nothing new. Name each model and learning rate "
            "once."
        )
    _refuse_other_grid(output_dir, grid, set(planned))
    refuse_full_disk(output_dir)
    return planned


def shared_record(task: Task) -> dict:
    """What all runs of a grid have in common: data, rewards, evaluation."""
    splits, rewards = task.splits, task.rewards
    return {
        "data": splits.source,
        "data_fingerprint": splits.fingerprint,
        "train_rows": len(splits.train),
        "eval_rows": len(splits.eval),
        "rewards": [reward.__name__ for reward in rewards],
        "reward_fingerprint": reward_fingerprint(rewards, task.grader),
        "reading": evaluation.READING,
    }


def run_record(settings: RunSettings, shared: dict) -> dict:
    """Everything that determines one run."""
    weights = models.fingerprint(settings.model)
    return {"settings": settings.to_dict(), "weights": weights, "grid": shared}


def run_name(settings: RunSettings, record: dict) -> str:
    """The name of a run's directory."""
    rate = f"{settings.learning_rate:g}"
    return f"{settings.short_model}_lr{rate}_{short_hash(record)}"


def _refuse_other_grid(
    output_dir: Path, shared: dict, planned: set[Path]
) -> None:
    found = read_json(output_dir / "grid.json")
    if found is None:
        _refuse_strange(output_dir, "grid", ["grid."])
        return
    there = set((output_dir / "runs").glob("*"))
    differs = _differences(found, shared)
    if not differs and there and not there & planned:
        differs = "the settings of every run"
    if differs:
        raise LabError(
            f"{output_dir} belongs to another grid: it differs in {differs}. "
            "Its results are left alone. Choose another OUTPUT_DIR, or set "
            "those values back to go on with it."
        )


def _refuse_strange(directory: Path, kind: str, ours: Sequence[str]) -> None:
    """Refuse to write results where a file is, or files that are not ours.

    Args:
        kind: what the directory is wanted for, in words.
        ours: how the names of files begin that a start may leave.
    """
    if directory.exists() and not directory.is_dir():
        raise LabError(
            f"{directory} is a file, but results need a directory. Choose "
            "another OUTPUT_DIR."
        )
    inside = directory.iterdir() if directory.exists() else []
    if not all(path.name.startswith(tuple(ours)) for path in inside):
        raise LabError(
            f"{directory} holds files that are not of a {kind}, and nothing "
            "is written among them. Choose another OUTPUT_DIR, an empty or a "
            "new one."
        )


def _differences(found: dict, wanted: dict) -> str:
    """The names of the values that differ, in words; "" if none does."""
    return ", ".join(sorted(k for k in wanted if found.get(k) != wanted[k]))


def refuse_full_disk(output_dir: Path) -> None:
    """Refuse to begin with less than `SPARE_GIB` left on the disk."""
    places = (output_dir, *output_dir.absolute().parents)
    existing = next(path for path in places if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if free < SPARE_GIB:
        raise LabError(
            f"There are {free:.2f} GiB left on the disk of {output_dir}, "
            f"but checkpoints need at least {SPARE_GIB} GiB. Free some "
            "space or choose another OUTPUT_DIR."
        )


# --- One run outside of a grid ----------------------------------------------

_OPENED = ["run.lock", "settings.json", "environment.json"]
"""What `open_run` writes: a directory with nothing else is free to take."""

_HELD: dict[Path, AbstractContextManager] = {}
"""Locks of `open_run`, which last as long as the process."""


def open_run(settings: RunSettings, task: Task, directory: Path | str) -> Run:
    """Take a directory for one run outside of a grid.

    Notes in it what determines the run, and holds it for this process until
    the process ends. Whoever opens the same run there again goes on with it.

    Args:
        settings, task: what will be trained, on what.
        directory: the run's own; made if missing.

    Raises:
        LabError: it holds another run or other files, is in use or can't be
            written to, or the disk is full.
    """
    directory = Path(directory)
    record = run_record(settings, shared_record(task))
    refuse_full_disk(directory)
    _refuse_other_run(directory, record)
    _HELD[directory.resolve()] = lock(
        directory / "run.lock", is_singleton=True
    )
    write_json(directory / "settings.json", record)
    note_start(directory)
    return Run(settings.short_model, settings, directory, "unfinished")


def _refuse_other_run(directory: Path, record: dict) -> None:
    found = read_json(directory / "settings.json")
    if found is None or set(found) != set(record):
        _refuse_strange(directory, "run", _OPENED if found is None else [])
        return
    names = [path.name for path in directory.iterdir()]
    begun = not all(name.startswith(tuple(_OPENED)) for name in names)
    if found == record or not begun:
        return
    before, now = (
        {"weights": one["weights"], **one["settings"], **one["grid"]}
        for one in (found, record)
    )
    raise LabError(
        f"{directory} holds another run: it differs in "
        f"{_differences(before, now)}. Its results are left alone. Choose "
        "another OUTPUT_DIR, or set those values back to go on with it."
    )
