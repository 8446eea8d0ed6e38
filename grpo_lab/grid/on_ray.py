"""A grid on Ray Tune: one trial per run, on the workers of a cluster.

Tune places the trials, starts them again when a worker or a machine is lost,
and with halving its scheduler ASHA decides at each rung. What a trial does is
what `grpo_lab.grid.work` does in one process, in the same run directory, so
results are the same ones.

The directories are the memory of it all: when the driver dies, whoever runs
the grid again starts a new Tune experiment with the runs that are not over,
and tells ASHA what it had decided. (Tune's own way back, `Tuner.restore`,
forgets the rungs: a scheduler is no part of what it saves.)
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# Before the first import of Ray: nobody is told that it is used, Tune's
# tables stay out of a lesson, a trial stays in its directory, and a result
# without accuracy is one.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")

from ray import cloudpickle, tune  # noqa: E402
from ray.tune.schedulers import (  # noqa: E402
    ASHAScheduler,
    FIFOScheduler,
    TrialScheduler,
)
from ray.tune.search import Searcher  # noqa: E402

from grpo_lab import models  # noqa: E402
from grpo_lab.files import last_line, read_metrics  # noqa: E402
from grpo_lab.grid.cluster import Cluster, connected  # noqa: E402
from grpo_lab.grid.fingerprint import unwrapped  # noqa: E402
from grpo_lab.grid.halving import (  # noqa: E402
    PROMOTED,
    STOPPED,
    Halving,
    Rung,
    note_rung,
    read_rungs,
)
from grpo_lab.grid.jobs import Job, all_jobs, job_at  # noqa: E402
from grpo_lab.grid.mirror import Mirror  # noqa: E402
from grpo_lab.grid.work import Progress, Work, run_to  # noqa: E402

LOOK_SECONDS = 1.0
"""How often the driver looks for new steps."""

HOLD_SECONDS = 120.0
"""How long a new worker waits for the one that it replaces to be gone."""


@dataclass(frozen=True)
class Task:
    """What every worker needs to know; it is pickled.

    Attributes:
        output_dir: the grid's directory, as all machines see it.
        work: what the runs share.
        halving: where the rungs are; None for none.
        threads: CPU threads of a run.
        directory: where the driver was started.
        mirror: None if all machines see `output_dir`.
    """

    output_dir: Path
    work: Work
    halving: Halving | None
    threads: int
    directory: Path
    mirror: Mirror | None


def run(
    output_dir: Path,
    planned: Sequence[Path],
    work: Work,
    halving: Halving | None,
    cluster: Cluster,
) -> None:
    """Train what is not over, on a cluster; see `engines.run`.

    Raises:
        LabError: the cluster can't be used; nothing was trained.
        KeyboardInterrupt: somebody has interrupted it.
    """
    mirror = Mirror(cluster.storage) if cluster.storage else None
    task = Task(
        output_dir.resolve(),
        replace(work, progress=None),
        halving,
        max(1, int(cluster.cpus)),
        Path.cwd(),
        mirror,
    )
    found = all_jobs(output_dir, planned)
    if not any(job.is_open for job in found):
        return
    with connected(cluster, task.output_dir):
        _ship_by_value(work.rewards)
        home = task.output_dir / "ray"
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(GridTrial, task=task),
                {"cpu": cluster.cpus, "gpu": cluster.gpus},
            ),
            tune_config=tune.TuneConfig(
                search_alg=Queue(output_dir, planned, mirror),
                scheduler=_scheduler(halving, found),
                num_samples=-1,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=f"{time.time():.0f}",
                storage_path=cluster.storage or str(home),
                callbacks=[Watch(output_dir, planned, work.progress, mirror)],
                failure_config=tune.FailureConfig(
                    max_failures=cluster.retries
                ),
                verbose=0,
            ),
        )
        tuner.fit()
        shutil.rmtree(home, ignore_errors=True)
    if any(job.is_open for job in all_jobs(output_dir, planned)):
        raise KeyboardInterrupt  # Tune has swallowed it


def _ship_by_value(rewards: Sequence[Callable]) -> None:
    """Send a learner's reward functions as they are here.

    Those of a notebook are sent so anyway; a module that lies beside it would
    be looked for on the workers.
    """
    for reward in rewards:
        function, _ = unwrapped(reward)
        name = getattr(function, "__module__", "__main__")
        if name.partition(".")[0] not in ("__main__", "rewards", "grpo_lab"):
            cloudpickle.register_pickle_by_value(sys.modules[name])


# --- On a worker ------------------------------------------------------------


class GridTrial(tune.Trainable):
    """A run of a grid; each step of the trial goes to its next rung."""

    def setup(self, config: dict, task: Task) -> None:
        """Make this process a worker, and take its first run."""
        import torch

        os.chdir(task.directory if task.directory.is_dir() else "/")
        torch.set_num_threads(task.threads)
        self.task = task
        self.work = replace(task.work)
        self._take(config["run"])

    def reset_config(self, config: dict) -> bool:
        """Take another run, with the base model still loaded."""
        self._take(config["run"])
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: the run's directory has a checkpoint of each step."""

    def load_checkpoint(self, checkpoint: object) -> None:
        """Nothing, for the same reason."""

    def _take(self, name: str) -> None:
        place = self.task.output_dir
        if self.task.mirror:
            place = self.task.mirror.fetch_run(name)
        self.job = job_at(place / "runs" / name)
        self.rungs = self._rungs_ahead()

    def _rungs_ahead(self) -> list[int]:
        first = self.job.next_rung(self.task.halving)
        if first is None:
            return []
        rungs = self.task.halving.rungs(self.job.steps)
        return rungs[rungs.index(first) :]

    def step(self) -> dict:
        """Train to the next rung, or to the end of the run."""
        job, log = self.job, self.job.directory / "worker.log"
        target = self.rungs.pop(0) if self.rungs else job.steps
        with _printing_to(log), job.held(HOLD_SECONDS):
            # Another worker may have got there before it was lost.
            measured = target < job.steps and job.at_rung(target)
            if job.is_open and not measured:
                self._run_to(target)
        models.free_memory()
        if not job.is_open or target == job.steps:
            return {"done": True}
        accuracy = job.at_rung(target).accuracy
        return {"step": target, "accuracy": accuracy, "done": False}

    def _run_to(self, target: int) -> None:
        mirror = self.task.mirror
        if mirror is None:
            run_to(self.job, target, self.work)
            return
        self.work.callbacks = (mirror.callback(self.job.directory),)
        mirror.before(self.job.directory)
        run_to(self.job, target, self.work)
        mirror.after(self.job.directory)


@contextlib.contextmanager
def _printing_to(log: Path) -> Iterator[None]:
    """Send what this process prints to a file, C code's words included."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


# --- On the driver ----------------------------------------------------------


class Queue(Searcher):
    """Gives Tune the runs that are not over, also those that are added.

    Args:
        output_dir: the grid's directory.
        planned: the runs of the plan; clones come after them.
        mirror: where the workers' runs are, if they are not there.
    """

    def __init__(
        self, output_dir: Path, planned: Sequence[Path], mirror: Mirror | None
    ) -> None:
        super().__init__(metric="accuracy", mode="max")
        self.output_dir, self.planned = output_dir, planned
        self.mirror = mirror
        self.given: dict[str, Job] = {}

    def suggest(self, trial_id: str) -> dict | str | None:
        """The next run; None while all are given, FINISHED when all end."""
        busy = {job.directory for job in self.given.values()}
        for job in all_jobs(self.output_dir, self.planned):
            if job.is_open and job.directory not in busy:
                if self.mirror:
                    self.mirror.send_run(job.directory)
                self.given[trial_id] = job
                return {"run": job.directory.name}
        return None if self.given else Searcher.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """Fetch what came of a run; note that no worker could finish it."""
        job = self.given.pop(trial_id)
        if self.mirror:
            self.mirror.collect(job.directory)
        if error and job.is_open:
            words = last_line(job.directory / "worker.log") or "none"
            job.end(
                "failed",
                "its worker was lost again and again, as a rule because the "
                f"machine's memory was full. Its last words were: {words}",
            )

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the directories know."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the directories know."""


def _scheduler(
    halving: Halving | None, found: Sequence[Job]
) -> TrialScheduler:
    return Referee(halving, found) if halving else FIFOScheduler()


class Referee(ASHAScheduler):
    """Ray's ASHA, with its decisions written to the runs' directories.

    Args:
        halving: the rungs.
        found: the runs; it takes up what was decided about them before.
    """

    def __init__(self, halving: Halving, found: Sequence[Job]) -> None:
        super().__init__(
            time_attr="step",
            metric="accuracy",
            mode="max",
            max_t=max(job.steps for job in found),
            grace_period=halving.first,
            reduction_factor=halving.factor,
            stop_last_trials=False,
        )
        self.directory = found[0].directory.parent
        for job in found:
            for rung in read_rungs(job.directory):
                self.recorded(rung.step)[job.directory.name] = rung.accuracy

    def recorded(self, step: int) -> dict[str, float]:
        """The accuracies that have arrived at a rung, by trial or run."""
        return dict(self._brackets[0]._rungs)[step]

    def on_trial_result(self, controller, trial, result: dict) -> str:
        """Decide, and note it."""
        if result["done"]:
            return TrialScheduler.CONTINUE
        step, accuracy = result["step"], result["accuracy"]
        before = self.recorded(step)
        cutoff = self._brackets[0].cutoff(before)
        decision = super().on_trial_result(controller, trial, result)
        stops = decision == TrialScheduler.STOP
        rung = Rung(
            step,
            accuracy,
            STOPPED if stops else PROMOTED,
            None if cutoff is None else float(cutoff),
            len(before),
        )
        job = job_at(self.directory / trial.config["run"])
        note_rung(job.directory, rung)
        if stops:
            job.end("stopped", rung.reason(job.steps))
        return decision

    def on_trial_complete(self, controller, trial, result: dict) -> None:
        """Nothing: what has ended was compared at its rungs."""
        self._trial_info.pop(trial.trial_id, None)


class Watch(tune.Callback):
    """Tells the progress of the workers, read from their metrics.

    Args:
        output_dir, planned: the grid's.
        progress: called for each new step.
        mirror: where the workers' runs are, if they are not there.
    """

    def __init__(
        self,
        output_dir: Path,
        planned: Sequence[Path],
        progress: Progress | None,
        mirror: Mirror | None,
    ) -> None:
        self.output_dir, self.planned = output_dir, planned
        self.progress, self.mirror = progress, mirror
        self.told: dict[Path, int] = {}
        self.looked = 0.0

    def on_step_end(self, iteration: int, trials: list, **info) -> None:
        """Look, but not at every turn of Tune's loop."""
        if time.monotonic() - self.looked < LOOK_SECONDS:
            return
        self.looked = time.monotonic()
        self.look()

    def on_experiment_end(self, trials: list, **info) -> None:
        """Tell the last steps."""
        self.look()

    def look(self) -> None:
        """Tell each step that was not told before."""
        for job in all_jobs(self.output_dir, self.planned):
            if self.mirror and job.is_open:
                self.mirror.exchange(job.directory)
            if self.progress:
                self._tell(job)

    def _tell(self, job: Job) -> None:
        last = self.told.get(job.directory, 0)
        for row in read_metrics(job.directory / "metrics.csv"):
            if row["step"] > last:
                self.progress(job.settings, row["step"], job.steps, row)
                self.told[job.directory] = row["step"]
