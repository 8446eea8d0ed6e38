"""Train a member of a population to a step, and measure it there."""

import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from grpo_lab import evaluation, memory, training
from grpo_lab.arena.evolution import Fitness, Member, Rules
from grpo_lab.files import read_json, write_json
from grpo_lab.grid.state import hold, note_start
from grpo_lab.grid.train_run import Part, Training
from grpo_lab.settings import RunSettings

MEASURE_BASE = Part("base", 0)
"""The base model answers the questions that rank."""


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

        Each has a seed of its own, for its adapter's start, its questions and
        its rollouts. The first has the plan's, so that a control begins as it
        does; the others' are far from those of a plan with the next seed.
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


@dataclass
class MemberTraining(Training):
    """Trains the members of a population; the context of a pool.

    Attributes:
        plan: how the population trains.
        test_rows: held-out questions by which nothing is selected.
    """

    plan: Plan = field(kw_only=True)
    test_rows: Dataset = field(kw_only=True)

    def fetch(self, part: Part) -> Path:
        """The file that its worker prints to."""
        own = self.directory / part.place
        return (own if part.target else self.directory) / "worker.log"

    def close(self) -> None:
        """End the process of a reward file, too."""
        super().close()
        for reward in self.task.rewards:
            getattr(reward, "close", lambda: None)()

    def run(self, part: Part) -> None:
        """Train a member to a step and measure it there, or ask others.

        Raises:
            Stopped: the file `stop` appeared in the directory.
            LabError: the run can't go on; or another process does not let go
                of the member.
        """
        settings = self.plan.settings
        if part == MEASURE_BASE:
            base, tokenizer = self.take_base(settings)
            path = self.directory / "base.json"
            self._measure(settings, base, tokenizer, path)
            self.leave_base(settings, (base, tokenizer))
        elif isinstance(part.run, Member):
            folder = self.directory / part.place
            with hold(folder):
                # By now another process may have done it.
                if read_fitness(folder, part.target) is None:
                    self._train_and_measure(part.run, part.target, folder)
            memory.free_memory()
        else:
            self._ask_test(str(part.run))

    def _train_and_measure(
        self, member: Member, target: int, folder: Path
    ) -> None:
        settings = self.plan.settings_of(member, target)
        write_json(
            folder / "settings.json", asdict(member) | settings.to_dict()
        )
        note_start(folder)
        base, tokenizer = self.take_base(settings)
        trainer = self.train(
            (base, tokenizer), settings, folder, self.task.rewards, target,
            (self.directory / "stop").exists, extend=True,
        )  # fmt: skip
        path = folder / f"fitness-{target}.json"
        self._measure(settings, trainer.model, tokenizer, path)
        self.leave_base(
            settings, (training.detach_adapter(trainer), tokenizer)
        )

    def _measure(
        self,
        settings: RunSettings,
        policy: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        path: Path,
    ) -> None:
        """Greedy answers to the questions that rank, and what they earn."""
        found = self.evaluate(settings, policy, tokenizer)
        [reward] = self.task.rewards
        earned = reward(
            [answer.text for answer in found.answers],
            question=[answer.question for answer in found.answers],
            answer=[answer.gold for answer in found.answers],
        )
        known = [value for value in earned if value is not None]
        mean = sum(known) / len(known) if known else 0.0
        write_json(path, asdict(found) | {"mean_reward": mean})

    def _ask_test(self, checkpoint: str) -> None:
        """Ask base and best what nothing was selected by."""
        settings = self.plan.settings
        base, tokenizer = self.take_base(settings)
        found = evaluation.evaluate_snapshots(
            base,
            {1: self.directory / "checkpoints" / checkpoint},
            tokenizer,
            self.test_rows,
            settings.max_completion_length,
            self.eval_batch_size,
            grader=self.task.grader,
            optimizations=self.resolve(settings, tokenizer).optimizations,
        )
        for name, answers in zip(
            ("base", "best"), found.values(), strict=True
        ):
            answers.save(self.directory / "test" / f"{name}.json")


def read_fitness(folder: Path, step: int) -> Fitness | None:
    """How good a member is at a step; None if it was not measured there."""
    found = read_json(folder / f"fitness-{step}.json")
    if found is None:
        return None
    answers = found["answers"]
    return Fitness(
        correct=sum(answer["correct"] for answer in answers),
        total=len(answers),
        mean_reward=found["mean_reward"],
    )
