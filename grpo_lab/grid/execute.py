"""Run a grid: one loop for every pool and every scheduler."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from grpo_lab import environment, memory, training
from grpo_lab.errors import LabError
from grpo_lab.files import last_line, read_json, read_metrics, write_json
from grpo_lab.grid.cluster import Cluster, cluster_of
from grpo_lab.grid.halving import (
    Halving,
    Scheduler,
    note_halving,
    refuse_other_halving,
)
from grpo_lab.grid.plan import plan
from grpo_lab.grid.pool import Answer, LocalPool, ThisProcess, WorkerLost
from grpo_lab.grid.results import Grid, load
from grpo_lab.grid.state import RunState, all_runs, claim
from grpo_lab.grid.storage import Mirror
from grpo_lab.grid.train_run import GridTraining, Part, reason
from grpo_lab.settings import RunSettings
from grpo_lab.task import Task

ENGINES = ("process", "ray")
"""Names of the engines: processes of this machine, or workers on Ray."""

LOOK_SECONDS = 1.0
"""How often the driver looks for new steps, and for new runs."""

SPARE_SHARE = 0.1
"""Share of the machine's memory that workers leave alone."""

PROMPT_TOKENS = 512
"""More than the prompts of the lessons have."""

Progress = Callable[[RunSettings, int, int, dict], None]
"""Called after each step with the run, step, total steps, metrics row."""


# --- The loop ---------------------------------------------------------------


class Work(Protocol):
    """What `execute` asks and reports to: a grid or a population."""

    directory: Path
    """That of all runs."""

    def decide(self) -> list[Part]:
        """What may train now, the first one first, also what trains."""

    def begin(self, part: Part) -> bool:
        """Have ready what a worker needs; False if there is nothing to do."""

    def look(self, working: Sequence[Part]) -> None:
        """Called about once a second with what workers are at."""

    def step(self, part: Part, row: dict) -> None:
        """Called with each new row of a run's metrics."""

    def take(self, answer: Answer) -> None:
        """Called with what came of a part."""


def execute(work: Work, pool) -> None:
    """Train until nothing is left to do.

    What is to be done is asked anew each time, since a decision, a second
    terminal or a lost worker may have changed it.

    Args:
        work: what there is to do.
        pool: a pool whose context runs parts; see `grpo_lab.grid.pool`.
    """
    steps: dict[str, int] = {}

    def report_steps(part: Part) -> None:
        if not part.target:
            return
        file = work.directory / part.place / "metrics.csv"
        for row in read_metrics(file):
            if row["step"] > steps[part.place]:
                steps[part.place] = row["step"]
                work.step(part, row)

    def look() -> None:
        work.look(pool.working)
        for part in pool.working:
            report_steps(part)

    if isinstance(pool, ThisProcess):
        vars(pool.context)["on_step"] = look
    with pool:
        while True:
            busy = {part.place for part in pool.working}
            wanted = [p for p in work.decide() if p.place not in busy]
            for part in wanted[: pool.free]:
                if work.begin(part):
                    # A step that is done once more is reported once.
                    at = _step_at(work.directory / part.place)
                    steps.setdefault(part.place, at)
                    pool.submit(part)
            if not (wanted or pool.working):
                return
            look()
            for answer in pool.wait(LOOK_SECONDS):
                work.take(answer)
                report_steps(answer.item)


def _step_at(directory: Path) -> int:
    """The step from which a run goes on."""
    checkpoint = training.last_checkpoint(directory)
    return training.step_of(checkpoint) if checkpoint else 0


# --- A grid -----------------------------------------------------------------


def check(
    settings: Sequence[RunSettings],
    task: Task,
    output_dir: Path | str,
    *,
    halving: Halving | None = None,
    engine: str = "process",
    workers: int | None = None,
    **cluster: object,
) -> None:
    """Refuse a grid that can't run, before anything is loaded or written.

    Args:
        settings, task, output_dir: as for `run`.
        halving, engine, workers, cluster: as for `run`; the cluster itself is
            not looked at.

    Raises:
        LabError: two runs are the same, the directory belongs to another
            grid, the disk is full, or there is no such engine.
    """
    places(engine, workers, cluster)
    _planned(settings, task, Path(output_dir), halving)


def _planned(
    settings: Sequence[RunSettings],
    task: Task,
    output_dir: Path,
    halving: Halving | None,
) -> dict[Path, dict]:
    """The directories of the runs, and the record of each."""
    if halving:
        steps = [one.steps(len(task.splits.train)) for one in settings]
        halving.refuse_useless(steps or [0])
    records = plan(settings, task, output_dir)
    refuse_other_halving(output_dir, halving)
    return records


def run(
    settings: Sequence[RunSettings],
    task: Task,
    output_dir: Path | str,
    eval_batch_size: int = 50,
    progress: Progress | None = None,
    *,
    halving: Halving | None = None,
    engine: str = "process",
    workers: int | None = None,
    **cluster: object,
) -> Grid:
    """Run a grid; skip what is done, go on with what was interrupted.

    A run that fails is recorded with its reason and the others go on. See
    `Grid.raise_failures`. While it runs, `grpo_lab.grid.control` stops,
    resumes and clones runs, from this process or another one.

    Args:
        settings: the runs; equal ones are refused.
        task: the questions, the rewards and how answers are judged.
        output_dir: the grid's directory; made if missing.
        eval_batch_size: held-out questions answered at once.
        progress: called after each optimiser step.
        halving: stops the worse runs early; by default none is.
        engine: "process" for processes of this machine, "ray" for the workers
            of a Ray cluster.
        workers: for the engine "process" how many there are; with 1 this
            process trains one run after the other, with its own number of
            threads. By default as many as a CPU has cores and memory for,
            one thread each, and 1 on a GPU and for a single run.
        cluster: for the engine "ray" the values of `cluster.Cluster`, such as
            `address`, `cpus`, `gpus`, `retries` and `storage`.

    Raises:
        LabError: before anything is trained, if the directory belongs to
            another grid or is in use, the disk is full, or the cluster can't
            be reached or has no machine that is large enough.
    """
    output_dir = Path(output_dir)
    chosen = places(engine, workers, cluster)
    records = _planned(settings, task, output_dir, halving)
    with claim(output_dir, next(iter(records.values()))["grid"]):
        note_halving(output_dir, halving)
        for directory, record in records.items():
            if read_json(directory / "settings.json") != record:
                write_json(directory / "settings.json", record)
        work = GridWork(output_dir, list(records), halving, progress)
        work.take_up()
        context = GridTraining(task, eval_batch_size, output_dir)
        if work.open_runs:
            execute(work, _pool(context, work, chosen))
    return load(output_dir, [one.directory for one in work.runs])


class GridWork:
    """The runs of a grid, as `execute` sees them.

    Args:
        directory: the grid's.
        planned: the runs of the plan; clones come after them.
        halving: None for none.
        progress: called after each optimiser step.

    Attributes:
        mirror: where the workers' runs are, if they are not in `directory`.
    """

    def __init__(
        self,
        directory: Path,
        planned: Sequence[Path],
        halving: Halving | None,
        progress: Progress | None,
    ) -> None:
        self.directory, self.planned = directory, planned
        self.scheduler = halving or Scheduler()
        self.progress = progress
        self.mirror: Mirror | None = None

    @property
    def runs(self) -> list[RunState]:
        """The runs of the plan, and the clones that have been made since."""
        return all_runs(self.directory, self.planned)

    @property
    def open_runs(self) -> list[RunState]:
        """Those that are not over."""
        return [run for run in self.runs if run.is_open]

    def take_up(self) -> None:
        """What failed is tried again; of what is over the last step is shown.

        What was stopped stays so.
        """
        for run in self.runs:
            if run.result["status"] == "failed":
                (run.directory / "result.json").unlink()
        self.decide()
        for run in self.runs:
            rows = read_metrics(run.directory / "metrics.csv")
            if self.progress and rows and not run.is_open:
                self._show(run, rows[-1])

    def _show(self, run: RunState, row: dict) -> None:
        if self.progress:
            self.progress(run.settings, row["step"], run.steps, row)

    def _run(self, part: Part) -> RunState:
        return RunState(self.directory / part.place)

    def decide(self) -> list[Part]:
        """What may train now; see `Scheduler.decide`."""
        return [
            Part(f"runs/{run.directory.name}", step)
            for run, step in self.scheduler.decide(self.runs)
        ]

    def begin(self, part: Part) -> bool:
        """Give a run to the workers, unless they had finished it before."""
        folder = self.directory / part.place
        if self.mirror and self.mirror.has_finished(folder):
            self.mirror.collect(folder)
            return False
        if self.mirror:
            self.mirror.send_run(folder)
        return True

    def look(self, working: Sequence[Part]) -> None:
        """Pass on requests to workers elsewhere, and fetch their metrics."""
        if self.mirror is None:
            return
        for part in working:
            # What a store refuses now it may take at the next look.
            with contextlib.suppress(LabError):
                self.mirror.exchange(self.directory / part.place)

    def step(self, part: Part, row: dict) -> None:
        """Show a step."""
        self._show(self._run(part), row)

    def take(self, answer: Answer) -> None:
        """Fetch what came of a run, and note what its worker could not."""
        part, error = answer.item, answer.error
        assert isinstance(part, Part)
        run = self._run(part)
        if self.mirror:
            # Of a run that failed its log, if the store has it.
            with contextlib.suppress(*[LabError] if error else []):
                self.mirror.collect(run.directory)
        if error is None or not run.is_open:
            return
        why = reason(error)
        if isinstance(error, WorkerLost):
            words = last_line(run.directory / "worker.log") or "none"
            why = (
                "its worker was lost again and again; unless its last words "
                "tell of an error, the memory of its machine was full, as a "
                "rule: type workers=1 to train one run after the other. They "
                f"were: {words}"
            )
        run.end("failed", why)


# --- Where it trains --------------------------------------------------------


def places(
    engine: str, workers: int | None, cluster: dict
) -> int | Cluster | None:
    """Where runs are to be trained.

    Returns:
        A cluster, a number of processes, or None for as many as fit.

    Raises:
        LabError: there is no such engine, or it has no such option.
    """
    if engine not in ENGINES:
        raise LabError(
            f"There is no engine {engine!r}. Type engine='process' to train "
            "in processes of this machine, or engine='ray' for the workers "
            "of a Ray cluster."
        )
    if engine == "ray":
        if workers is not None:
            cluster = {"workers": workers, **cluster}
        return cluster_of(cluster)
    if cluster:
        raise LabError(
            f"{', '.join(cluster)} can only be set for the workers of a "
            "Ray cluster. Add engine='ray', or leave it out."
        )
    if workers is not None and workers < 1:
        raise LabError(
            f"{workers} processes can't train anything. Type workers=1 to "
            "train one run after the other, or leave workers out."
        )
    return workers


def _pool(context: GridTraining, work: GridWork, chosen: int | Cluster | None):
    """The pool that trains what is left of a grid."""
    left = len(work.open_runs)
    if isinstance(chosen, Cluster):
        from grpo_lab.grid.on_ray import RayPool

        context.directory = work.directory.resolve()
        context.gpus = chosen.gpus
        if chosen.storage:
            work.mirror = Mirror(chosen.storage, work.directory)
            context.mirror = work.mirror
        mark = None if chosen.storage else context.directory / "grid.json"
        return RayPool(context, chosen, left, context.task.functions, mark)
    fitting = chosen or fitting_workers([run.settings for run in work.runs])
    if fitting == 1:
        return ThisProcess(context)
    context.directory = work.directory.resolve()
    context.gpus = 1 / fitting  # of the one that they share, if there is one
    return LocalPool(
        context, min(fitting, left), functions=context.task.functions
    )


def fitting_workers(settings: Sequence[RunSettings]) -> int:
    """Processes that can train such runs at once on this machine.

    One on a GPU and on Windows; on a CPU one for each core, if there is
    memory for so many. The number does not depend on which of the runs are
    over, so that a grid goes on as it began.
    """
    device = memory.device_memory()
    # Elsewhere a process can't pass on its connections.
    if device.is_gpu or os.name != "posix":
        return 1
    needs = []
    for one in settings:
        with contextlib.suppress(LabError):  # an unknown model: that run fails
            needs.append(memory.resolve(one, PROMPT_TOKENS).memory)
    room = (1 - SPARE_SHARE) * device.memory
    by_memory = int(room / max(needs)) if needs else 1
    return max(1, min(environment.usable_cores(), len(settings), by_memory))
