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
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ray import tune
from ray.tune.error import TuneError
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    TrialScheduler,
)
from ray.tune.search import Searcher

from grpo_lab import environment, memory
from grpo_lab.errors import LabError
from grpo_lab.files import last_line, read_metrics
from grpo_lab.grid.cluster import (
    Cluster,
    connected,
    places,
    printing_to,
    see_own_gpus,
    ship_by_value,
)
from grpo_lab.grid.halving import (
    PROMOTED,
    STOPPED,
    Halving,
    Rung,
    note_rung,
    read_rungs,
)
from grpo_lab.grid.jobs import Job, all_jobs, job_at
from grpo_lab.grid.storage import Mirror
from grpo_lab.grid.work import Progress, Work, run_to

LOOK_SECONDS = 1.0
"""How often the driver looks for new steps, and for new runs."""

ARRIVAL_SECONDS = 60.0
"""How long the result of a run may take to be seen by the driver."""


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
        LabError: the cluster can't be used, or the driver can't go on.
        KeyboardInterrupt: somebody has interrupted it.
    """
    if not _open_jobs(output_dir, planned):
        return
    mirror = Mirror(cluster.storage, output_dir) if cluster.storage else None
    task = Task(
        output_dir.resolve(),
        replace(work, progress=None, gpus=cluster.gpus),
        halving,
        max(1, int(cluster.cpus)),
        Path.cwd(),
        mirror,
    )
    with connected(cluster, task.output_dir):
        ship_by_value(work.rewards)
        # Somebody may resume or clone a run while the last one ends.
        while _open_jobs(output_dir, planned):
            queue = Queue(output_dir, planned, mirror)
            _fit(task, queue, Watch(queue, work.progress), cluster)
            if not queue.finished:
                raise KeyboardInterrupt  # Tune has swallowed it


def _open_jobs(output_dir: Path, planned: Sequence[Path]) -> list[Job]:
    return [job for job in all_jobs(output_dir, planned) if job.is_open]


def _fit(task: Task, queue: "Queue", watch: "Watch", cluster: Cluster) -> None:
    """One experiment of Tune; nothing is ever read back from its files."""
    home = task.output_dir / "ray"
    found = all_jobs(queue.output_dir, queue.planned)
    # With one of its searchers Tune starts one worker after the other.
    os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(places(cluster))
    tuner = tune.Tuner(
        tune.with_resources(
            tune.with_parameters(GridTrial, task=task),
            {"cpu": cluster.cpus, "gpu": cluster.gpus},
        ),
        tune_config=tune.TuneConfig(
            search_alg=queue,
            scheduler=_scheduler(task.halving, found),
            num_samples=-1,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name=f"{time.time_ns()}",
            storage_path=str(home),
            callbacks=[watch],
            failure_config=tune.FailureConfig(max_failures=cluster.retries),
            verbose=0,
            # That for notebooks clears the output of the cell.
            progress_reporter=tune.CLIReporter(),
        ),
    )
    try:
        tuner.fit()
    except TuneError as error:
        raise _told(error) from error
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _told(error: TuneError) -> LabError:
    """The paragraph of ours that Tune has put into a traceback, if any."""
    ours = re.findall(r"LabError: (.+)", str(error))
    if ours:
        return LabError(ours[-1])
    last = [line for line in str(error).splitlines() if line.strip()][-1:]
    return LabError(
        f"Ray Tune ended with an error: {' '.join(last)[:300]} What was "
        "trained is kept: run this again with the same OUTPUT_DIR."
    )


# --- On a worker ------------------------------------------------------------


class GridTrial(tune.Trainable):
    """A run of a grid; each step of the trial goes to its next rung."""

    def setup(self, config: dict, task: Task) -> None:
        """Make this process a worker."""
        import torch

        see_own_gpus()
        environment.prepare()
        # Where a relative path to a model or to data leads.
        if task.directory.is_dir():
            os.chdir(task.directory)
        torch.set_num_threads(task.threads)
        self.task = task
        self.work = replace(task.work)
        self.job = None

    def reset_config(self, config: dict) -> bool:
        """Take another run, with the base model still loaded."""
        self.job = None
        return True

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Nothing: the run's directory has a checkpoint of each step."""

    def load_checkpoint(self, checkpoint: object) -> None:
        """Nothing, for the same reason."""

    def cleanup(self) -> None:
        """Leave nothing on this machine that lies in the store."""
        if self.task.mirror:
            self.task.mirror.close()

    def step(self) -> dict:
        """Train to the next rung, or to the end of the run."""
        try:
            # Not in `setup`: what fails there is not tried again.
            if self.job is None:
                self._take(self.config["run"])
            return self._advance()
        except LabError as error:  # of a store, or of another process
            return {"done": True, "failed": str(error)}

    def _take(self, name: str) -> None:
        place = self.task.output_dir
        if self.task.mirror:
            self.task.mirror.forget()
            place = self.task.mirror.fetch_run(name)
        self.job = job_at(place / "runs" / name)
        self.rungs = self._rungs_ahead()

    def _rungs_ahead(self) -> list[int]:
        first = self.job.next_rung(self.task.halving)
        if first is None:
            return []
        rungs = self.task.halving.rungs(self.job.steps)
        return rungs[rungs.index(first) :]

    def _advance(self) -> dict:
        job, log = self.job, self.job.directory / "worker.log"
        target = self.rungs.pop(0) if self.rungs else job.steps
        with printing_to(log), job.held():
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError):  # a full disk is told below
                print(f"{when}: to step {target} of {job.steps}", flush=True)
            # Another worker may have got there before it was lost.
            measured = target < job.steps and job.at_rung(target)
            if job.is_open and not measured:
                self._run_to(target)
        memory.free_memory()
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


# --- On the driver ----------------------------------------------------------


class Queue(Searcher):
    """Gives Tune the runs that are not over, also those that are added.

    Args:
        output_dir: the grid's directory.
        planned: the runs of the plan; clones come after them.
        mirror: where the workers' runs are, if they are not there.

    Attributes:
        given: the runs that are with a worker, by trial.
        ending: those that a worker is done with, but whose result has not
            arrived here, and when that was.
        finished: whether everything was over when it was asked last.
    """

    def __init__(
        self, output_dir: Path, planned: Sequence[Path], mirror: Mirror | None
    ) -> None:
        super().__init__(metric="accuracy", mode="max")
        self.output_dir, self.planned = output_dir, planned
        self.mirror = mirror
        self.given: dict[str, Job] = {}
        self.ending: dict[Job, float] = {}
        self.finished = False
        self.looked = 0.0

    def suggest(self, trial_id: str) -> dict | str | None:
        """The next run; None while all are given, FINISHED when all end."""
        if time.monotonic() - self.looked < LOOK_SECONDS:
            return None  # Tune asks many times a second
        self._settle()
        busy = {job.directory for job in (*self.given.values(), *self.ending)}
        for job in _open_jobs(self.output_dir, self.planned):
            if job.directory not in busy and self._may_begin(job):
                self.given[trial_id] = job
                return {"run": job.directory.name}
        self.looked = time.monotonic()
        self.finished = not (self.given or self.ending)
        return Searcher.FINISHED if self.finished else None

    def _may_begin(self, job: Job) -> bool:
        """Give a run to the workers, unless they had finished it before."""
        if self.mirror is None:
            return True
        if self.mirror.has_finished(job.directory):
            self.mirror.collect(job.directory)
            return False
        self.mirror.send_run(job.directory)
        return True

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """Note how a run has ended, or that no worker could finish it."""
        job = self.given.pop(trial_id, None)
        if job is None:
            return
        self.looked = 0.0
        reason = (result or {}).get("failed", "")
        if self.mirror and (error or reason):
            # Its log, if the store has it, and if there is a store.
            with contextlib.suppress(LabError):
                self.mirror.collect(job.directory)
        if error and job.is_open:
            words = last_line(job.directory / "worker.log") or "none"
            reason = (
                "its worker was lost again and again; unless its last words "
                "tell of an error, the memory of its machine was full, as a "
                f"rule. They were: {words}"
            )
        if reason:
            job.end("failed", reason)
        else:
            self.ending[job] = time.monotonic()
            self._settle()

    def _settle(self) -> None:
        """Fetch what has ended; a shared disk or a store may take a while.

        A run that stays open was resumed by somebody in the meantime.
        """
        for job, since in list(self.ending.items()):
            waited = time.monotonic() - since
            try:
                if self.mirror:
                    self.mirror.collect(job.directory)
            except LabError:
                if waited > ARRIVAL_SECONDS:
                    raise
                continue
            if not job.is_open or waited > ARRIVAL_SECONDS:
                del self.ending[job]

    def __getstate__(self) -> dict:
        """Nothing: Tune saves its searchers, and a store's address may hold
        a key."""
        return {}

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
        job = job_at(self.directory / trial.config["run"])
        if job.is_exempt:  # since it began
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
        queue: knows which runs are with a worker.
        progress: called for each new step.
    """

    def __init__(self, queue: Queue, progress: Progress | None) -> None:
        self.queue, self.progress = queue, progress
        self.told: dict[Path, int] = {}
        self.looked = 0.0

    def __getstate__(self) -> dict:
        """Nothing: Tune saves its callbacks, and `progress` can be anything
        that no file can hold."""
        return {}

    def on_step_end(self, iteration: int, trials: list, **info) -> None:
        """Look, but not at every turn of Tune's loop."""
        if time.monotonic() - self.looked < LOOK_SECONDS:
            return
        self.looked = time.monotonic()
        for job in list(self.queue.given.values()):
            self._look_at(job)

    def on_trial_result(
        self, iteration: int, trials: list, trial, result: dict, **info
    ) -> None:
        """Tell the steps up to a rung or the end."""
        job = self.queue.given.get(trial.trial_id)
        if job:
            self._look_at(job)

    def _look_at(self, job: Job) -> None:
        if self.queue.mirror:
            # What a store refuses now it may take at the next look.
            with contextlib.suppress(LabError):
                self.queue.mirror.exchange(job.directory)
        self.tell(job)

    def tell(self, job: Job) -> None:
        """Tell each step that was not told before."""
        if self.progress is None:
            return
        last = self.told.get(job.directory, 0)
        for row in read_metrics(job.directory / "metrics.csv"):
            if row["step"] > last:
                self.progress(job.settings, row["step"], job.steps, row)
                self.told[job.directory] = row["step"]
