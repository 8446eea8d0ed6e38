"""Where the members of an experiment train: in its job, or on Ray's workers.

That determines nothing of what comes of it, so it is kept apart from what
does, in engine.json of the experiment's directory, and whoever resumes the
experiment may choose anew.
"""

from dataclasses import asdict
from pathlib import Path

from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json

ENGINES = ("process", "ray")
"""One member after the other in the job, or one on each worker of Ray."""

FILE = "engine.json"


def chosen(engine: str | None, options: dict[str, object]) -> dict | None:
    """What `note` is to write, checked.

    Args:
        engine: one of `ENGINES`; None leaves it as it is.
        options: for "ray", values of `grid.cluster.Cluster` by name.

    Returns:
        Plain values; None if nothing was chosen.

    Raises:
        LabError: it can't be had, or the options are none of it.
    """
    if engine not in (None, *ENGINES):
        raise LabError(
            f"There is no engine {engine!r}. Type engine='process' to train "
            "the members one after the other in one process, or "
            "engine='ray' for the workers of a Ray cluster."
        )
    if engine == "ray":
        return {"engine": engine, **_cluster(options)}
    if options:
        raise LabError(
            f"{', '.join(options)} can only be set for the workers of a Ray "
            "cluster. Add engine='ray', or leave it out."
        )
    return None if engine is None else {"engine": engine}


def _cluster(options: dict[str, object]) -> dict:
    from grpo_lab.grid.cluster import cluster_of

    # All machines share the directory, see `on_ray`.
    values = asdict(cluster_of(options, storage=""))
    del values["storage"]
    return values


def note(directory: Path, choice: dict | None) -> None:
    """Keep what `chosen` gave in an experiment's directory."""
    if choice is not None:
        write_json(Path(directory) / FILE, choice)


def noted(directory: Path) -> dict:
    """What `note` has kept; {} if there is nothing."""
    return read_json(Path(directory) / FILE) or {}


def workers(directory: Path):
    """Where the members train, as `population.Population` takes it.

    Returns:
        A `grid.cluster.Cluster`; None for the job's own process.
    """
    values = noted(directory)
    if values.pop("engine", "process") == "process":
        return None
    from grpo_lab.grid.cluster import Cluster

    return Cluster(**values)
