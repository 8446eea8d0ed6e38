"""Run a grid, in this process or on a Ray cluster."""

from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_lab import memory
from grpo_lab.data import Splits
from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json
from grpo_lab.grid.cluster import Cluster, cluster_of
from grpo_lab.grid.halving import (
    STOPPED,
    Halving,
    decide,
    note_halving,
    note_rung,
    read_rungs,
    refuse_other_halving,
)
from grpo_lab.grid.jobs import Job, all_jobs
from grpo_lab.grid.locks import claim
from grpo_lab.grid.plan import plan
from grpo_lab.grid.results import Grid, load, status_of
from grpo_lab.grid.work import Progress, Work, run_to, tell_last
from grpo_lab.settings import RunSettings

ENGINES = ("process", "ray")
"""Names of the engines: one run after the other here, or many on workers."""


def check(
    settings: Sequence[RunSettings],
    splits: Splits,
    rewards: Sequence[Callable],
    output_dir: Path | str,
    *,
    halving: Halving | None = None,
    engine: str = "process",
    **cluster: object,
) -> None:
    """Refuse a grid that can't run, before anything is loaded or written.

    Args:
        settings, splits, rewards, output_dir: as for `run`.
        halving, engine, cluster: as for `run`; the cluster itself is not
            looked at.

    Raises:
        LabError: two runs are the same, the directory belongs to another
            grid, the disk is full, or there is no such engine.
    """
    _prepared(settings, splits, rewards, output_dir, halving, engine, cluster)


def _prepared(
    settings: Sequence[RunSettings],
    splits: Splits,
    rewards: Sequence[Callable],
    output_dir: Path | str,
    halving: Halving | None,
    engine: str,
    cluster: dict,
) -> tuple[dict[Path, dict], Cluster | None]:
    """The records of the runs, and the workers if there are any."""
    workers = _workers(engine, cluster)
    if halving:
        steps = [one.steps(len(splits.train)) for one in settings]
        halving.refuse_useless(steps or [0])
    records = plan(settings, splits, rewards, Path(output_dir))
    refuse_other_halving(Path(output_dir), halving)
    return records, workers


def run(
    settings: Sequence[RunSettings],
    splits: Splits,
    rewards: Sequence[Callable],
    output_dir: Path | str,
    eval_batch_size: int = 50,
    progress: Progress | None = None,
    *,
    halving: Halving | None = None,
    engine: str = "process",
    **cluster: object,
) -> Grid:
    """Run a grid; skip what is done, go on with what was interrupted.

    A run that fails is recorded with its reason and the others go on. See
    `Grid.raise_failures`. While it runs, `grpo_lab.grid.steering` stops,
    resumes and clones runs, from this process or another one.

    Args:
        settings: the runs; equal ones are refused.
        splits: training and held-out questions; see `grpo_lab.data`.
        rewards: reward functions with TRL's signature.
        output_dir: the grid's directory; made if missing.
        eval_batch_size: held-out questions answered at once.
        progress: called after each optimiser step.
        halving: stops the worse runs early; by default none is.
        engine: "process" for one run after the other in this process, "ray"
            for Ray Tune, one trial per run.
        cluster: for the engine "ray" the values of `cluster.Cluster`, such as
            `address`, `cpus`, `gpus`, `retries` and `storage`.

    Raises:
        LabError: before anything is trained, if the directory belongs to
            another grid or is in use, the disk is full, or the cluster can't
            be reached or has no machine that is large enough.
    """
    output_dir = Path(output_dir)
    records, workers = _prepared(
        settings, splits, rewards, output_dir, halving, engine, cluster
    )
    planned = list(records)
    work = Work(splits, rewards, eval_batch_size, progress)
    with claim(output_dir, next(iter(records.values()))["grid"]):
        note_halving(output_dir, halving)
        for directory, record in records.items():
            if read_json(directory / "settings.json") != record:
                write_json(directory / "settings.json", record)
        for job in all_jobs(output_dir, planned):
            _take_up(job)
            if not job.is_open:
                tell_last(job, progress)
        if workers is None:
            _run_here(output_dir, planned, work, halving)
        else:
            from grpo_lab.grid import on_ray

            on_ray.run(output_dir, planned, work, halving, workers)
    jobs = all_jobs(output_dir, planned)
    return load(output_dir, [job.directory for job in jobs])


def _workers(engine: str, cluster: dict) -> Cluster | None:
    if engine not in ENGINES:
        raise LabError(
            f"There is no engine {engine!r}. Type engine='process' to train "
            "one run after the other in this process, or engine='ray' for "
            "the workers of a Ray cluster."
        )
    if engine == "process":
        if cluster:
            raise LabError(
                f"{', '.join(cluster)} can only be set for the workers of a "
                "Ray cluster. Add engine='ray', or leave it out."
            )
        return None
    return cluster_of(cluster)


def _take_up(job: Job) -> None:
    """What failed is tried again; what was stopped stays so.

    A kill may have come between the decision to stop a run and its result.
    """
    if status_of(job.directory)["status"] == "failed":
        (job.directory / "result.json").unlink(missing_ok=True)
    if not job.is_exempt:
        _end_if_stopped(job)


def _run_here(
    output_dir: Path,
    planned: Sequence[Path],
    work: Work,
    halving: Halving | None,
) -> None:
    """One run after the other, each at most to its next rung."""
    with work:
        while True:
            found = all_jobs(output_dir, planned)
            turn = _next_turn(found, halving)
            if turn is None:
                return
            job, target = turn
            with job.held():
                run_to(job, target, work)
            memory.free_memory()


def _next_turn(
    found: Sequence[Job], halving: Halving | None
) -> tuple[Job, int] | None:
    """The run that trains next and the step that it trains to.

    A rung is decided when all runs that go on have reached it.
    """
    while True:
        waiting = [job for job in found if job.is_open]
        rungs = [job.next_rung(halving) for job in waiting]
        rung = min((step for step in rungs if step), default=None)
        if rung is None:
            break
        there = [
            job
            for job, step in zip(waiting, rungs, strict=True)
            if step == rung
        ]
        for job in there:
            if job.at_rung(rung) is None:
                return job, rung
        _decide(rung, found, halving)
    return next(((job, job.steps) for job in waiting), None)


def _decide(rung: int, found: Sequence[Job], halving: Halving) -> None:
    """Compare all runs that came to a rung, and stop the worse ones.

    Those about which a start before has decided already are compared too, so
    that a kill in between changes nothing.
    """
    came = [job for job in found if not job.is_exempt and job.at_rung(rung)]
    answers = [job.at_rung(rung) for job in came]
    for job, one in zip(
        came, decide(rung, answers, halving.factor), strict=True
    ):
        if job.is_open and job.next_rung(halving) == rung:
            note_rung(job.directory, one)
            _end_if_stopped(job)


def _end_if_stopped(job: Job) -> None:
    """Note the end of a run about which its last rung has decided so."""
    last = read_rungs(job.directory)[-1:]
    if job.is_open and last and last[0].decision == STOPPED:
        job.end("stopped", last[0].reason(job.steps))
