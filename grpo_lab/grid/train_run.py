"""Train the run in a directory to a step, and measure it there.

All that a run is lies in its directory: whoever is asked next, this process or
a worker, goes on from there. Only the base model is kept in memory, for the
next run.
"""

import contextlib
import functools
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

from grpo_lab import evaluation, memory, models, training
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import read_json, write_json, write_whole
from grpo_lab.grid.halving import rung_path
from grpo_lab.grid.plan import refuse_full_disk
from grpo_lab.grid.state import (
    PARENT,
    RunState,
    hold,
    note_start,
    parent_checkpoint,
)
from grpo_lab.grid.storage import Mirror
from grpo_lab.prompts import longest_prompt
from grpo_lab.settings import RunSettings
from grpo_lab.task import Task
from rewards import RewardError
from rewards.contract import load_reward

REWARD_FILES = "reward_files"
"""Folder of a clone with the reward files that it brings."""

Base = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@dataclass(frozen=True)
class Part:
    """A run, to be trained to a step.

    Attributes:
        place: the run's directory, below that of all runs.
        target: the optimiser step; 0 for work that trains nothing.
        run: what else the context has to know about it.
    """

    place: str
    target: int
    run: object = None


class Stopped(Exception):
    """Somebody asked for the end of a run, and its last step is saved."""


@dataclass
class Training:
    """What the runs of one call share, in the process that trains them.

    Attributes:
        task: the questions, the rewards and how answers are judged.
        eval_batch_size: held-out questions answered at once.
        directory: that of all runs.
        gpus: GPUs of each run, such as 0.5 for two runs on one.
        on_step: called after each optimiser step.
        callbacks: further ones for every trainer.
        loaded: the base model and tokenizer that the last run has left, and
            what they are; None if there are none.
    """

    task: Task
    eval_batch_size: int
    directory: Path
    gpus: float = 1.0
    on_step: Callable[[], None] | None = None
    callbacks: tuple[TrainerCallback, ...] = ()
    loaded: tuple | None = None

    def close(self) -> None:
        """Free the memory of the last base model."""
        self.loaded = None
        memory.free_memory()

    def take_base(self, settings: RunSettings) -> Base:
        """A run's base model, loaded if the last one left another."""
        found, self.loaded = self.loaded, None
        wanted = settings.model, settings.load_in_4bit
        if (
            found
            and found[0] == wanted
            and "one_base" in settings.optimizations
        ):
            return found[1:]
        del found  # its memory, before the next one is loaded
        memory.free_memory()
        return models.load_policy(*wanted)

    def leave_base(self, settings: RunSettings, base: Base) -> None:
        """Leave the base model of a run that is done for the next one."""
        if "one_base" in settings.optimizations:
            self.loaded = ((settings.model, settings.load_in_4bit), *base)

    def resolve(
        self, settings: RunSettings, tokenizer: PreTrainedTokenizerBase
    ) -> memory.Resolved:
        """What is decided for a run on its share of this machine."""
        longest = longest_prompt(tokenizer, self.task.splits.train["prompt"])
        share = memory.Share.of_gpus(self.gpus)
        return memory.resolve(settings, longest, share)

    def train(
        self,
        base: Base,
        settings: RunSettings,
        directory: Path,
        rewards: Sequence[Callable],
        until: int,
        stop_requested: Callable[[], bool],
        extend: bool = False,
    ) -> GRPOTrainer:
        """Train a run to a step; its trainer, with the policy.

        Args:
            until: the step.
            stop_requested: asked after each step.
            extend: whether it may have been meant to have fewer steps.

        Raises:
            Stopped: before it got there.
        """
        refuse_full_disk(directory)
        resolved = self.resolve(settings, base[1])
        _note_optimizations(directory, resolved.optimizations)
        trainer = training.build_trainer(
            resolved, self.task.splits.train, rewards, directory, *base,
            self.on_step and (lambda *step: self.on_step()),
            [
                training.StopWhen(lambda step: stop_requested()),
                *self.callbacks,
            ],
        )  # fmt: skip
        _start_from_parent(directory, trainer.args)
        if extend:
            training.extend(trainer)
        if training.train(trainer, until=until) < until or stop_requested():
            raise Stopped
        return trainer

    def evaluate(
        self, settings: RunSettings, policy: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Evaluation:  # fmt: skip
        """A policy's answers to the held-out questions."""
        return evaluation.evaluate(
            policy, tokenizer, self.task.splits.eval,
            settings.max_completion_length, self.eval_batch_size,
            grader=self.task.grader,
            optimizations=self.resolve(settings, tokenizer).optimizations,
        )  # fmt: skip


@dataclass
class GridTraining(Training):
    """Trains the runs of a grid; the context of a pool.

    Attributes:
        mirror: where the runs are, if this process is on a machine that does
            not see `directory`.
    """

    mirror: Mirror | None = None

    def fetch(self, part: Part) -> Path:
        """Have a run on this machine; the file that its worker prints to."""
        if self.mirror:
            self.mirror.forget()
            self.directory = self.mirror.fetch_run(Path(part.place).name)
        return self.directory / part.place / "worker.log"

    def close(self) -> None:
        """Leave nothing on this machine that lies in the store."""
        super().close()
        if self.mirror:
            self.mirror.close()

    def run(self, part: Part) -> None:
        """Train a run to a rung, or to its end, and measure it there.

        What becomes of it lies in its directory: the answers at the rung, or
        a result with the reason if it failed or was stopped.

        Raises:
            LabError: another process trains it, or nothing can be written.
        """
        run = RunState(self.directory / part.place)
        with hold(run.directory):
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            if self.on_step is None:  # on a worker, to its log
                with contextlib.suppress(OSError):  # a full disk fails below
                    words = f"to step {part.target} of {run.steps}"
                    print(f"{when}: {words}", flush=True)
            # Another worker may have got there before it was lost.
            if run.is_open and not (
                part.target < run.steps and run.has_reached(part.target)
            ):
                self._run_mirrored(run, part.target)
        memory.free_memory()

    def _run_mirrored(self, run: RunState, target: int) -> None:
        if self.mirror:
            self.callbacks = (self.mirror.callback(run.directory),)
            self.mirror.before(run.directory)
        while self._stop_was_withdrawn(run, target):
            pass
        if self.mirror:
            self.mirror.after(run.directory)

    def _stop_was_withdrawn(self, run: RunState, target: int) -> bool:
        """Do what `run` says; or answer that it has to be done again."""
        (run.directory / "error.txt").unlink(missing_ok=True)
        try:
            if run.stop_requested:
                raise Stopped
            note_start(run.directory)
            self._train_and_evaluate(run, target)
        except Stopped:
            if not run.stop_requested:
                return True
            checkpoint = training.last_checkpoint(run.directory)
            step = training.step_of(checkpoint) if checkpoint else 0
            run.end(
                "stopped", f"stopped by hand after step {step} of {run.steps}"
            )
        except Exception as error:
            with contextlib.suppress(LabError):  # a full disk takes no text
                write_whole(
                    run.directory / "error.txt", traceback.format_exc()
                )
            run.end("failed", reason(error))
        return False

    def _train_and_evaluate(self, run: RunState, target: int) -> None:
        settings, directory = run.settings, run.directory
        refuse_full_disk(directory)
        model, tokenizer = self.take_base(settings)

        def measure(policy: torch.nn.Module, path: Path) -> None:
            self.evaluate(settings, policy, tokenizer).save(path)

        # Wanted for the comparison, not for the training: while another
        # worker is at it, this one need not wait.
        _once(run.base, functools.partial(measure, model), wait=False)
        with rewards_of(run, self.task.rewards) as rewards:
            trainer = self.train(
                (model, tokenizer), settings, directory, rewards, target,
                lambda: run.stop_requested,
            )  # fmt: skip
        if target < run.steps:
            measure(trainer.model, rung_path(directory, target))
        else:
            trainer.model.save_pretrained(directory / "adapter")
            measure(trainer.model, directory / "evaluation.json")
        model = training.detach_adapter(trainer)
        if target == run.steps:
            # That other worker may have been lost.
            _once(run.base, functools.partial(measure, model), wait=True)
            run.end("done")
        self.leave_base(settings, (model, tokenizer))


def _note_optimizations(directory: Path, optimizations: Sequence[str]) -> None:
    """Add what makes this start faster to its entry."""
    path = directory / "environment.json"
    *before, last = read_json(path)
    write_json(path, [*before, last | {"optimizations": list(optimizations)}])


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
    run: RunState, rewards: Sequence[Callable]
) -> Iterator[list[Callable]]:
    """The rewards of a run: those of its grid, or a clone's own.

    Raises:
        LabError: the grid has no reward of that name now.
    """
    known = {reward.__name__: reward for reward in rewards}
    names = (run.clone or {}).get("rewards") or list(known)
    with contextlib.ExitStack() as files:
        for file in sorted((run.directory / REWARD_FILES).glob("*.py")):
            own = files.enter_context(contextlib.closing(load_reward(file)))
            known[own.__name__] = own
        missing = [name for name in names if name not in known]
        if missing:
            raise LabError(
                f"This clone wants the reward {missing[0]!r}, but the grid "
                f"has {', '.join(known)}. Clone again with --rewards and one "
                "of those, or with a reward file."
            )
        yield [known[name] for name in names]


def _start_from_parent(directory: Path, arguments: object) -> None:
    """Put a warm clone where its parent stood, unless it is further."""
    start = parent_checkpoint(directory)
    if start is None or training.last_checkpoint(directory) is not None:
        return
    training.warm_start(start, arguments)
    if training.last_checkpoint(directory) is None:
        raise LabError(
            f"The checkpoint in {directory / PARENT} is broken, so this clone "
            "has no start. Clone again."
        )


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
