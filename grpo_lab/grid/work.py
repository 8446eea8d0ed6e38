"""One run, or the part of it up to a rung, in this process.

Both engines do this and nothing else with a run.
"""

import contextlib
import functools
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl import GRPOTrainer

from grpo_lab import environment, evaluation, memory, models, training
from grpo_lab.data import Splits
from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json, write_whole
from grpo_lab.grid.halving import rung_path
from grpo_lab.grid.jobs import Job
from grpo_lab.grid.plan import refuse_full_disk
from grpo_lab.grid.results import base_path, clone_of
from grpo_lab.prompts import longest_prompt
from grpo_lab.settings import RunSettings
from rewards import RewardError
from rewards.contract import load_reward

Progress = Callable[[RunSettings, int, int, dict], None]
"""Called after each step with the run, step, total steps, metrics row."""

REWARD_FILES = "reward_files"
"""Folder of a clone with the reward files that it brings."""

PARENT = "parent"
"""Folder of a warm clone with the checkpoint that it starts from."""


def tell_last(job: Job, progress: Progress | None) -> None:
    """Show the last step of a run that had ended before."""
    rows = training.read_metrics(job.directory / "metrics.csv")
    if progress and rows:
        progress(job.settings, rows[-1]["step"], job.steps, rows[-1])


@dataclass
class Work:
    """What the runs of one call share.

    Attributes:
        splits, rewards, eval_batch_size, progress: as for `run`.
        gpus: GPUs of each run, such as 0.5 for two runs on one.
        callbacks: further ones for every trainer.
        loaded: the base model and tokenizer that the last run has left, and
            what they are; None if there are none.
    """

    splits: Splits
    rewards: Sequence[Callable]
    eval_batch_size: int
    progress: Progress | None = None
    gpus: float = 1.0
    callbacks: tuple[TrainerCallback, ...] = ()
    loaded: tuple | None = None

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *error) -> None:
        """Free the memory of the last base model."""
        self.loaded = None
        memory.free_memory()

    def take_base(
        self, settings: RunSettings
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """A run's base model, loaded if the last one left another."""
        found, self.loaded = self.loaded, None
        wanted = settings.model, settings.load_in_4bit
        if found and found[0] == wanted and "one_base" in settings.levers:
            return found[1:]
        del found  # its memory, before the next one is loaded
        memory.free_memory()
        return models.load_policy(*wanted)

    def leave_base(
        self,
        settings: RunSettings,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Leave the base model of a run that is done for the next one."""
        if "one_base" in settings.levers:
            wanted = settings.model, settings.load_in_4bit
            self.loaded = wanted, model, tokenizer

    def resolve(
        self, settings: RunSettings, tokenizer: PreTrainedTokenizerBase
    ) -> memory.Resolved:
        """What is decided for a run on its share of this machine."""
        longest = longest_prompt(tokenizer, self.splits.train["prompt"])
        share = memory.Share.of_gpus(self.gpus)
        return memory.resolve(settings, longest, share)

    def evaluate(
        self,
        resolved: memory.Resolved,
        tokenizer: PreTrainedTokenizerBase,
        policy: torch.nn.Module,
        path: Path,
    ) -> None:
        """Write a policy's answers to the held-out questions to a file."""
        evaluation.evaluate(
            policy, tokenizer, self.splits.eval,
            resolved.settings.max_completion_length, self.eval_batch_size,
            levers=resolved.levers,
        ).save(path)  # fmt: skip


class StoppedByHand(Exception):
    """Somebody asked for the end of a run, and its last step is saved."""


def run_to(job: Job, target: int, work: Work) -> None:
    """Train a run to a rung, or to its end, and measure it there.

    What becomes of it lies in its directory: the answers at the rung, or a
    result with the reason if it failed or was stopped.

    Args:
        job: the run; it goes on from its last checkpoint.
        target: the optimiser step; the run's last one is its end.
        work: what it shares with other runs.
    """
    while _stop_was_withdrawn(job, target, work):
        pass


def _stop_was_withdrawn(job: Job, target: int, work: Work) -> bool:
    """Do what `run_to` says; or answer that it has to be done again."""
    (job.directory / "error.txt").unlink(missing_ok=True)
    try:
        if job.stop_requested:
            raise StoppedByHand
        note_environment(job.directory)
        _train_and_evaluate(job, target, work)
    except StoppedByHand:
        if not job.stop_requested:
            return True
        checkpoint = training.last_checkpoint(job.directory)
        step = training.step_of(checkpoint) if checkpoint else 0
        job.end("stopped", f"stopped by hand after step {step} of {job.steps}")
    except Exception as error:
        with contextlib.suppress(LabError):  # a full disk takes no text
            write_whole(job.directory / "error.txt", traceback.format_exc())
        job.end("failed", reason(error))
    return False


def _train_and_evaluate(job: Job, target: int, work: Work) -> None:
    settings, directory = job.settings, job.directory
    refuse_full_disk(directory)
    model, tokenizer = work.take_base(settings)
    resolved = work.resolve(settings, tokenizer)
    _note_levers(directory, resolved.levers)
    evaluate = functools.partial(work.evaluate, resolved, tokenizer)
    base = base_path(directory)
    # Wanted for the comparison, not for the training: while another worker
    # is at it, this one need not wait.
    _once(base, functools.partial(evaluate, model), wait=False)
    trainer = _train(job, target, work, resolved, model, tokenizer)
    if target < job.steps:
        evaluate(trainer.model, rung_path(directory, target))
    else:
        trainer.model.save_pretrained(directory / "adapter")
        evaluate(trainer.model, directory / "evaluation.json")
    model = training.detach_adapter(trainer)
    if target == job.steps:
        # That other worker may have been lost.
        _once(base, functools.partial(evaluate, model), wait=True)
        job.end("done")
    work.leave_base(settings, model, tokenizer)


def _train(
    job: Job,
    target: int,
    work: Work,
    resolved: memory.Resolved,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> GRPOTrainer:
    """Train a run to a step; its trainer, with the policy.

    Raises:
        StoppedByHand: before it got there.
    """
    settings, directory = job.settings, job.directory
    with rewards_of(directory, work.rewards) as rewards:
        trainer = training.build_trainer(
            resolved, work.splits.train, rewards, directory, model, tokenizer,
            work.progress and functools.partial(work.progress, settings),
            [
                training.StopWhen(lambda step: job.stop_requested),
                *work.callbacks,
            ],
        )  # fmt: skip
        _start_from_parent(directory, trainer.args)
        reached = training.train(trainer, until=target)
    if reached < target or job.stop_requested:
        raise StoppedByHand
    return trainer


def _once(path: Path, make: Callable[[Path], None], wait: bool) -> None:
    """Make a file that several processes want, in one of them.

    Args:
        path: the file.
        make: writes it there.
        wait: while another process is at it; else leave it to that.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    seconds = -1 if wait else 0
    lock = filelock.FileLock(path.with_suffix(".lock"), timeout=seconds)
    with contextlib.suppress(filelock.Timeout), lock:
        if not path.exists():
            make(path)


@contextlib.contextmanager
def rewards_of(
    directory: Path, rewards: Sequence[Callable]
) -> Iterator[list[Callable]]:
    """The rewards of a run: those of its grid, or a clone's own.

    Raises:
        LabError: the grid has no reward of that name now.
    """
    known = {reward.__name__: reward for reward in rewards}
    names = (clone_of(directory) or {}).get("rewards") or list(known)
    with contextlib.ExitStack() as files:
        for file in sorted((directory / REWARD_FILES).glob("*.py")):
            own = files.enter_context(contextlib.closing(load_reward(file)))
            known[own.__name__] = own
        yield _chosen(known, names)


def _chosen(known: dict[str, Callable], names: list[str]) -> list[Callable]:
    missing = [name for name in names if name not in known]
    if missing:
        raise LabError(
            f"This clone wants the reward {missing[0]!r}, but the grid has "
            f"{', '.join(known)}. Clone again with --rewards and one of "
            "those, or with a reward file."
        )
    return [known[name] for name in names]


def _start_from_parent(directory: Path, arguments: object) -> None:
    """Put a warm clone where its parent stood, unless it is further."""
    start = _of_parent(directory)
    if start is None or training.last_checkpoint(directory) is not None:
        return
    training.warm_start(start, arguments)
    if training.last_checkpoint(directory) is None:
        raise LabError(
            f"The checkpoint in {directory / PARENT} is broken, so this clone "
            "has no start. Clone again."
        )


def _of_parent(directory: Path) -> Path | None:
    """The one checkpoint that a warm clone has been given; None for others."""
    return next((directory / PARENT).glob("checkpoint-*"), None)


def note_environment(directory: Path) -> None:
    """Add this start of a run to the list in `environment.json`.

    Its `step` is that of the checkpoint from which it goes on.
    """
    starts = read_json(directory / "environment.json") or []
    starts.append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": environment.versions(),
            "device": memory.device_memory().name,
            "threads": torch.get_num_threads(),
            "host": platform.node(),
            "process": os.getpid(),
            "step": _step_at(directory),
        }
    )
    write_json(directory / "environment.json", starts)


def _note_levers(directory: Path, levers: Sequence[str]) -> None:
    """Add what makes this start faster to its entry."""
    path = directory / "environment.json"
    *before, last = read_json(path)
    write_json(path, [*before, last | {"levers": list(levers)}])


def _step_at(directory: Path) -> int:
    """The step from which a run goes on; 0 from the base model."""
    found = training.last_checkpoint(directory) or _of_parent(directory)
    return training.step_of(found) if found else 0


def reason(error: Exception) -> str:
    """One paragraph for a learner; the traceback is in `error.txt`."""
    if isinstance(error, LabError | RewardError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "The GPU's memory was not enough. Lower MICRO_BATCH first, then "
            "MAX_COMPLETION_LENGTH, then take a smaller model."
        )
    text = str(error)
    # torch.save only says that the file ended where it should not.
    if "No space left" in text or "unexpected pos" in text:
        return (
            "The disk is full. Free some space and run this again with the "
            "same OUTPUT_DIR: it goes on from its last checkpoint."
        )
    first_line = text.splitlines()[0] if text else "no message"
    return (
        f"{type(error).__name__}: {first_line}. The full traceback is in "
        "error.txt in the run's directory."
    )
