"""One experiment and its directory: what it is, and how it stands.

directory/
  experiment.json   the manifest, the data set, the prompt: what it is
  manifest.yaml     the manifest as it was handed in
  reward.py         the reward file, as it was handed in
  verdicts.json     what `check_reward` found
  status.json       how it stands; written by its job
  engine.json       where its members train; see `chosen_engine`
  job.lock          held by its job as long as it lives
  job.log           what the job printed
  ...               what grpo_lab.arena.population writes
"""

import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock

from grpo_lab.errors import LabError
from grpo_lab.files import last_line, read_json, write_json

ACTIVE = ("queued", "running")
"""States in which a job lives; the others are done, failed, stopped."""

LOCK = "job.lock"
ENGINE = "engine.json"

START_SECONDS = 60.0
"""How long a new job may take until it shows that it lives."""


@dataclass(frozen=True)
class Experiment:
    """What determines an experiment, in plain values.

    Attributes:
        manifest: as `manifest.Manifest.to_dict` gives it.
        dataset: the record of the registered data set; see `datasets.read`.
        dataset_name: under which it is registered.
        system_prompt: what every policy of it is told.
        max_completion_length: tokens of a completion.
    """

    manifest: dict
    dataset: dict
    dataset_name: str
    system_prompt: str
    max_completion_length: int

    def save(self, directory: Path) -> None:
        """Write it, whole or not at all."""
        write_json(Path(directory) / "experiment.json", asdict(self))

    @classmethod
    def load(cls, directory: Path) -> "Experiment":
        """What `save` wrote.

        Raises:
            LabError: there is no experiment in the directory.
        """
        saved = read_json(Path(directory) / "experiment.json")
        if saved is None:
            raise LabError(
                f"{directory} holds no experiment: its experiment.json is "
                "missing. Submit it again under a new name."
            )
        return cls(**saved)


def questions(directory: Path):
    """The questions of an experiment: its `Splits`, and the test rows."""
    from grpo_lab.arena import datasets, manifest

    experiment = Experiment.load(directory)
    form = manifest.load(experiment.manifest)
    return datasets.splits(
        # Beside it in the same arena, wherever that was moved to.
        Path(directory).parent.parent / "datasets" / experiment.dataset_name,
        experiment.dataset,
        form.environment.fitness_rows,
        form.environment.test_rows,
        form.mutation.rand_seed,
        experiment.system_prompt,
    )


def population(directory: Path, progress=None, doing=lambda what: None):
    """The population of an experiment, ready to train.

    Args:
        directory: the experiment's.
        progress, doing: see `population.Population`.

    Raises:
        LabError: its data set or its model can't be had any more.
    """
    from grpo_lab.arena import manifest
    from grpo_lab.arena.evolution import Rules
    from grpo_lab.arena.population import Plan, Population
    from rewards.contract import load_reward

    experiment = Experiment.load(directory)
    form = manifest.load(experiment.manifest)
    settings = manifest.settings(form, experiment.max_completion_length)
    splits, test_rows = questions(directory)
    ranges = form.mutation.rl_hp_selection
    rules = Rules(
        form.tournament_selection.tournament_size,
        form.tournament_selection.elitism,
        form.mutation_rate,
        {name: (one.min, one.max) for name, one in ranges.items()},
        seed=form.mutation.rand_seed,
    )
    plan = Plan(
        settings,
        form.training.pop_size,
        form.training.evo_steps,
        rules,
        # As many as a step rolls out at once, which is known to fit.
        eval_batch_size=settings.completions_per_step,
    )
    return Population(
        plan, splits, test_rows, load_reward(Path(directory) / "reward.py"),
        directory, progress, doing, workers(directory),
    )  # fmt: skip


# --- Where its members train ------------------------------------------------
#
# That determines nothing of what comes of it, so it is kept apart from what
# does, and whoever resumes the experiment may choose anew.


def chosen_engine(
    engine: str | None, options: dict[str, object]
) -> dict | None:
    """What `note_engine` is to write, checked; None if nothing was chosen.

    Args:
        engine: one of `grid.ENGINES`; None leaves it as it is.
        options: for "ray", values of `grid.cluster.Cluster` by name; for
            "process" the number of `workers`, 1 by default.

    Raises:
        LabError: it can't be had, or the options are none of it.
    """
    if engine is None and not options:
        return None
    from grpo_lab.grid.cluster import cluster_of
    from grpo_lab.grid.execute import places

    if engine == "ray":
        # All machines share the directory.
        values = asdict(cluster_of(options, storage=""))
        del values["storage"]
        return {"engine": engine, **values}
    others: dict[str, Any] = dict(options)
    count = others.pop("workers", None)
    places(engine or "process", count, others)
    return {"engine": "process"} | ({"workers": count} if count else {})


def note_engine(directory: Path, choice: dict | None) -> None:
    """Keep what `chosen_engine` gave in an experiment's directory."""
    if choice is not None:
        write_json(Path(directory) / ENGINE, choice)


def noted_engine(directory: Path) -> dict:
    """What `note_engine` has kept; {} if there is nothing."""
    return read_json(Path(directory) / ENGINE) or {}


def workers(directory: Path):
    """A `grid.cluster.Cluster`, a number of processes, or None for the job's
    own process, as `population.Population` takes it."""
    values = noted_engine(directory)
    if values.pop("engine", "process") == "process":
        return values.get("workers")
    from grpo_lab.grid.cluster import Cluster

    return Cluster(**values)


# --- How it stands ----------------------------------------------------------


def is_alive(directory: Path) -> bool:
    """Whether the experiment's job lives, whatever its files say.

    The operating system gives a lock back with the process that held it, so
    that a killed job is noticed at once.
    """
    lock = filelock.FileLock(Path(directory) / LOCK, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        return True
    lock.release()
    return False


def status(directory: Path) -> dict:
    """How an experiment stands.

    Returns:
        `status`: "queued" (another one trains), "running", "done",
        "stopped", "failed", or "interrupted" where its job was killed; then
        `reason`, a `warning` if there is one, what it is `doing`, the `step`
        of the member that trains, of `steps`, and its `generation`.
    """
    directory = Path(directory)
    found = {
        "status": "interrupted",
        **dict.fromkeys(("reason", "doing", "warning"), ""),
        **dict.fromkeys(("step", "steps", "generation"), 0),
        **read_status(directory),
    }
    starting = (
        found["status"] == "queued"
        and found.get("pid") is None
        and time.time() - found.get("time", 0.0) < START_SECONDS
    )
    if found["status"] in ACTIVE and not (starting or is_alive(directory)):
        # It may have ended between the two looks.
        found |= read_status(directory)
        if found["status"] in ACTIVE:
            found["status"] = "interrupted"
            found["reason"] = (
                f"Its process ended without a word, {_cause(directory)}. "
                "resume_experiment goes on from its last step."
            )
    return found


def read_status(directory: Path) -> dict:
    """What status.json says; a broken one says nothing."""
    try:
        return read_json(Path(directory) / "status.json") or {}
    except LabError:
        return {}


def _cause(directory: Path) -> str:
    """Why a job may have ended without a word."""
    if directory.is_dir() and shutil.disk_usage(directory).free < 2**20:
        return "with the disk full: free some space"
    last = last_line(directory / "job.log")
    told = f"; last in job.log: {last[-200:]}" if last else ""
    return f"as after a kill{told}"
