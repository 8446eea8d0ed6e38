"""All of a population that needs the base model, in one process.

A nursery raises members one after the other. What it makes of them lies in
the experiment's directory, so that any process may go on with it: this one,
the next one after a kill, or the workers of a cluster (`on_ray`), each of
which has a nursery of its own.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import filelock
from datasets import Dataset

from grpo_lab import evaluation, memory, models, training
from grpo_lab.arena.evolution import Fitness, Member, Rules
from grpo_lab.arena.records import member_folder
from grpo_lab.data import Splits
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import read_json, write_json
from grpo_lab.prompts import longest_prompt
from grpo_lab.settings import RunSettings

HOLD_SECONDS = 120.0
"""How long to wait for another process to let go of a member."""

Progress = Callable[[Member, int, dict], None]
"""Called after each optimiser step: member, its step, its row of metrics."""

Doing = Callable[[str], None]
"""Called with what begins, in words."""


class Stopped(Exception):
    """The training was asked to stop, and has saved its last step."""


@dataclass(frozen=True)
class Plan:
    """All that determines how a population trains.

    Attributes:
        settings: of the first members; `max_steps` are those of every member
            together with its ancestors.
        pop_size: members at a time.
        evo_steps: optimiser steps of a generation.
        rules: how the next generation is made.
        eval_batch_size: held-out questions answered at once.
    """

    settings: RunSettings
    pop_size: int
    evo_steps: int
    rules: Rules
    eval_batch_size: int = 50

    @property
    def completions_per_step(self) -> int:
        """Completions of one optimiser step of every member."""
        return self.settings.completions_per_step * self.pop_size

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "settings": self.settings.to_dict(),
            "pop_size": self.pop_size,
            "evo_steps": self.evo_steps,
            "completions_per_step": self.completions_per_step,
            "rules": asdict(self.rules),
        }

    def settings_of(self, member: Member, steps: int) -> RunSettings:
        """What a member trains with until it has made so many steps.

        Each has a seed of its own: members with equal hyperparameters differ
        by the start of their adapters, their questions and their rollouts.
        That of the first is the plan's, so that a control begins as it does;
        the others' are far from those of a plan with the next seed.
        """
        seed = self.settings.seed
        if member.number:
            seed = random.Random(f"{seed}/{member.number}").randrange(2**31)
        return replace(
            self.settings,
            learning_rate=member.learning_rate,
            beta=member.beta,
            seed=seed,
            max_steps=steps,
        )


@dataclass(frozen=True)
class Material:
    """What members are raised with; it can be pickled if its reward can.

    Attributes:
        plan: how the population trains.
        splits: the questions to train on, and those that rank the members.
        test_rows: further held-out questions; nothing is selected by them.
        reward: the reward function, with TRL's signature.
        directory: the experiment's own; every write goes below it.
        gpus: GPUs of each member, such as 0.5 for two members on one.
    """

    plan: Plan
    splits: Splits
    test_rows: Dataset
    reward: Callable
    directory: Path
    gpus: float = 1.0

    @property
    def stop_request(self) -> Path:
        """The file that asks for the end of the training."""
        return self.directory / "stop"


class Nursery:
    """Raises members in this process, one after the other.

    Args:
        material: what with.
        progress: called after each optimiser step.
        doing: called with what begins, in words.

    The base model is loaded once; each member in turn puts its adapter on it.

    Raises:
        LabError: the base model can't be had; see `models.load_policy`.
    """

    def __init__(
        self,
        material: Material,
        progress: Progress | None = None,
        doing: Doing = lambda what: None,
    ) -> None:
        self.material, self.plan = material, material.plan
        self.directory = material.directory
        self.progress, self.doing = progress, doing
        settings = self.plan.settings
        self.base, self.tokenizer = models.load_policy(
            settings.model, settings.load_in_4bit
        )
        prompts = material.splits.train["prompt"]
        self.longest = longest_prompt(self.tokenizer, prompts)
        self.levers = self._resolved(settings).levers

    def _resolved(self, settings: RunSettings) -> memory.Resolved:
        share = memory.Share.of_gpus(self.material.gpus)
        return memory.resolve(settings, self.longest, share)

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing: the base model stays, for another call."""

    def measure_base(self) -> None:
        """Let the base model answer the questions that rank, once."""
        path = self.directory / "base.json"
        if not path.exists():
            self.doing("measuring the base model")
            write_json(path, self._judge(self.base))

    def inherit(self, member: Member, step: int) -> None:
        """Give a new member the checkpoint that its parent has at a step.

        On the kind of device that members train on, since what it holds
        depends on that.
        """
        parent = member_folder(self.directory, member.parent)
        training.warm_start(
            parent / f"checkpoint-{step}",
            training.grpo_config(
                self._resolved(self.plan.settings_of(member, step)),
                member_folder(self.directory, member.number),
                len(self.material.splits.train),
            ),
        )

    def raise_all(
        self, members: Sequence[Member], target: int
    ) -> dict[int, Fitness]:
        """The fitness of each member at a step, by its number.

        Raises:
            Stopped, LabError: see `raise_to`.
        """
        return {one.number: self.raise_to(one, target) for one in members}

    def raise_to(self, member: Member, target: int) -> Fitness:
        """Train a member until it has made `target` steps, and measure it.

        Raises:
            Stopped: the file `stop` appeared in the directory.
            LabError: the run can't go on; see `training.train`. Or another
                process does not let go of the member.
        """
        folder = member_folder(self.directory, member.number)
        found = read_fitness(folder, target)
        if found is not None:
            return found
        with _held(folder, member):
            # By now another process may have done it.
            if read_fitness(folder, target) is None:
                found = self._train_and_judge(member, target, folder)
                write_json(fitness_path(folder, target), found)
        return read_fitness(folder, target)

    def ask_test(self, best: dict) -> None:
        """Ask base and best what nothing was selected by.

        Args:
            best: the best checkpoint, as `records.checkpoints` lists it.
        """
        self.doing("asking base and best the test questions")
        found = evaluation.evaluate_snapshots(
            self.base,
            {best["step"]: self.directory / "checkpoints" / best["name"]},
            self.tokenizer,
            self.material.test_rows,
            self.plan.settings.max_completion_length,
            self.plan.eval_batch_size,
            levers=self.levers,
        )
        base, after = found.values()
        base.save(self.directory / "test" / "base.json")
        after.save(self.directory / "test" / "best.json")

    def _train_and_judge(
        self, member: Member, target: int, folder: Path
    ) -> dict:
        settings = self.plan.settings_of(member, target)
        write_json(
            folder / "settings.json", asdict(member) | settings.to_dict()
        )

        self.doing(f"training member {member.number}")

        def progress(step: int, total: int, row: dict) -> None:
            if self.progress:
                self.progress(member, step, row)

        stop_request = self.material.stop_request
        trainer = training.build_trainer(
            self._resolved(settings), self.material.splits.train,
            [self.material.reward], folder, self.base, self.tokenizer,
            progress, [training.StopWhen(lambda step: stop_request.exists())],
        )  # fmt: skip
        try:
            training.extend(trainer)
            reached = training.train(trainer)
            if reached < target or stop_request.exists():
                raise Stopped
            self.doing(f"measuring member {member.number}")
            return self._judge(trainer.model)
        finally:
            # The next member puts its own adapter on the same base model.
            self.base = training.detach_adapter(trainer)
            del trainer
            memory.free_memory()

    def _judge(self, policy) -> dict:
        """Greedy answers to the questions that rank, and what they earn."""
        found = evaluation.evaluate(
            policy, self.tokenizer, self.material.splits.eval,
            self.plan.settings.max_completion_length,
            self.plan.eval_batch_size,
            levers=self.levers,
        )  # fmt: skip
        return asdict(found) | {"mean_reward": self._mean_reward(found)}

    def _mean_reward(self, found: Evaluation) -> float:
        paid = self.material.reward(
            [answer.text for answer in found.answers],
            question=[answer.question for answer in found.answers],
            answer=[answer.gold for answer in found.answers],
        )
        known = [value for value in paid if value is not None]
        return sum(known) / len(known) if known else 0.0


def fitness_path(folder: Path, step: int) -> Path:
    """Where a member's answers at a step are, once it was measured there."""
    return folder / f"fitness-{step}.json"


def read_fitness(folder: Path, step: int) -> Fitness | None:
    """How good a member is at a step; None if it was not measured there."""
    found = read_json(fitness_path(folder, step))
    if found is None:
        return None
    answers = found["answers"]
    return Fitness(
        correct=sum(answer["correct"] for answer in answers),
        total=len(answers),
        mean_reward=found["mean_reward"],
    )


@contextlib.contextmanager
def _held(folder: Path, member: Member) -> Iterator[None]:
    """Hold a member, so that no second process trains it.

    A worker may be given up as lost, or a job be killed, while what it was
    doing goes on for a moment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / "member.lock", HOLD_SECONDS)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise LabError(
            f"Member {member.number} is trained by another process, which "
            f"has not let go of it for {HOLD_SECONDS:g} s, and two would "
            "spoil it. Look for a worker of this experiment that still runs "
            "and end it, then resume the experiment with resume_experiment."
        ) from None
    try:
        yield
    finally:
        lock.release()
