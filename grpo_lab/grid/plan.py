"""Which runs a grid has, where each lies, and whether they may run there.

A run's record holds everything that determines it; its directory is named
after a hash of the record.
"""

import itertools
import math
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import filelock

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
        RunSettings(
            **{**base.to_dict(), **dict(zip(choices, values, strict=True))}
        )
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
    settings: Sequence[RunSettings],
    task: Task,
    output_dir: Path,
) -> dict[Path, dict]:
    """Each run's directory, and the record of all that determines the run.

    Raises:
        LabError: two runs are the same, a gold can't be read, the directory
            belongs to another grid, or the disk is full.
    """
    task.refuse_unreadable()
    grid = shared_record(task)
    if not settings:
        raise LabError(
            "This grid has no runs. Name at least one model and one learning "
            "rate, such as MODELS = ['pocket-qwen'], LEARNING_RATES = [1e-3]."
        )
    records = {}
    for one in settings:
        record = run_record(one, grid)
        records[output_dir / "runs" / run_name(one, record)] = record
    if len(records) < len(settings):
        raise LabError(
            "Two runs of this grid have the same settings, so one of them "
            "would learn nothing new. Name each model and learning rate "
            "once."
        )
    _refuse_strange(output_dir, grid, list(records))
    refuse_full_disk(output_dir)
    return records


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


def refuse_file(directory: Path) -> None:
    """Refuse to write results where a file is."""
    if directory.exists() and not directory.is_dir():
        raise LabError(
            f"{directory} is a file, but results need a directory. Choose "
            "another OUTPUT_DIR."
        )


def _refuse_strange(
    output_dir: Path, shared: dict, directories: Sequence[Path]
) -> None:
    refuse_file(output_dir)
    found = read_json(output_dir / "grid.json")
    if found is None:
        inside = output_dir.iterdir() if output_dir.exists() else []
        if any(not path.name.startswith("grid.") for path in inside):
            raise LabError(
                f"{output_dir} holds files that are not of a grid, and "
                "nothing is written among them. Choose another OUTPUT_DIR, "
                "an empty or a new one."
            )
        return
    differs = sorted(key for key in shared if found.get(key) != shared[key])
    if differs:
        raise LabError(
            f"{output_dir} belongs to another grid: it differs in "
            f"{', '.join(differs)}. Its results are left alone. Choose "
            "another OUTPUT_DIR, or set those values back to go on with it."
        )
    there = list((output_dir / "runs").glob("*"))
    if there and not set(there) & set(directories):
        names = ", ".join(path.name for path in there)
        raise LabError(
            f"{output_dir} belongs to another grid: none of its runs "
            f"({names}) has the settings of this one. Its results are left "
            "alone. Choose another OUTPUT_DIR, or set the parameters back "
            "to go on with it."
        )


def refuse_full_disk(output_dir: Path) -> None:
    """Refuse to begin with less than `SPARE_GIB` left on the disk."""
    existing = next(
        path
        for path in (output_dir, *output_dir.absolute().parents)
        if path.exists()
    )
    free = shutil.disk_usage(existing).free / 2**30
    if free < SPARE_GIB:
        raise LabError(
            f"There are {free:.2f} GiB left on the disk of {output_dir}, "
            f"but checkpoints need at least {SPARE_GIB} GiB. Free some "
            "space or choose another OUTPUT_DIR."
        )


# --- One run outside of a grid ----------------------------------------------

_OPENED = {"run.lock", "settings.json", "environment.json"}
"""What `open_run` writes: a directory with nothing else is free to take."""


_HELD: dict[Path, filelock.BaseFileLock] = {}
"""Locks of `open_run`, which last as long as the process."""


def open_run(
    settings: RunSettings,
    task: Task,
    directory: Path | str,
) -> Run:
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
    shared = shared_record(task)
    record = run_record(settings, shared)
    refuse_full_disk(directory)
    _refuse_other_run(directory, record)
    held = lock(directory, "run.lock", is_singleton=True)
    _HELD[directory.resolve()] = held
    write_json(directory / "settings.json", record)
    note_start(directory)
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
