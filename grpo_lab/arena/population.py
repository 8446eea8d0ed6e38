"""The training of a population: members in turn, over one base model.

    directory/
      plan.json               how it trains, and for how long
      population.json         the generation that trains, and the lineage
      base.json               the base model on the questions that rank
      members/003/            one member, with all that a run's directory has:
        settings.json           what it trains with
        metrics.csv, tensorboard/, completions/, checkpoint-N/
        fitness-10.json         its answers at step 10, and their mean reward
      checkpoints/step_10/    the best member's adapter at step 10
      test/                   base and best on questions that select nothing
      result.json             written last

Everything that a member is lies in its newest checkpoint, so that a kill costs
at most the step that was being made: who trains again with the same plan goes
on. What is drawn by chance depends on the seed and the generation alone.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from datasets import Dataset

from grpo_lab import evaluation, models, training
from grpo_lab.arena import evolution
from grpo_lab.arena.evolution import Fitness, Member, Rules
from grpo_lab.arena.records import ADAPTER_FILES, checkpoints, member_folder
from grpo_lab.data import Splits
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import read_json, write_json
from grpo_lab.profiles import RunSettings

KEPT_CHECKPOINTS = 5
"""The best that are kept, beside the newest one."""

Progress = Callable[[Member, int, dict], None]
"""Called after each optimiser step: member, its step, its row of metrics."""


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
class State:
    """A generation, and the step at which it began."""

    generation: int
    step: int
    members: tuple[Member, ...]
    lineage: tuple[dict, ...] = ()

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> "State | None":
        """What `save` wrote; None if there is no such file."""
        saved = read_json(path)
        if saved is None:
            return None
        members = tuple(Member(**one) for one in saved["members"])
        return cls(**saved | {"members": members})


class Population:
    """A population and its directory, ready to train.

    Args:
        plan: how it trains.
        splits: the questions to train on, and those that rank the members.
        test_rows: further held-out questions; nothing is selected by them.
        reward: the reward function, with TRL's signature.
        directory: the experiment's own; every write goes below it.
        progress: called after each optimiser step.
        doing: called with what begins, in words.

    The base model is loaded once; each member in turn puts its adapter on it.
    """

    def __init__(
        self,
        plan: Plan,
        splits: Splits,
        test_rows: Dataset,
        reward: Callable,
        directory: Path,
        progress: Progress | None = None,
        doing: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.plan = plan
        self.splits = splits
        self.test_rows = test_rows
        self.reward = reward
        self.directory = Path(directory)
        self.progress = progress
        self.doing = doing
        self.stop_request = self.directory / "stop"
        self.levers = models.levers_in_force(plan.settings)
        self.base, self.tokenizer = models.load_policy(
            plan.settings.model, plan.settings.load_in_4bit
        )

    def train(self) -> None:
        """Train to the end, going on where an earlier call was ended.

        Raises:
            Stopped: the file `stop` appeared in the directory.
            LabError: a run can't go on; see `training.train`.
        """
        path = self.directory / "population.json"
        write_json(self.directory / "plan.json", self.plan.to_dict())
        self._judge_base()
        state = State.load(path) or self._first()
        steps = self.plan.settings.max_steps
        while True:
            target = min(state.step + self.plan.evo_steps, steps)
            fitness = {
                member.number: self._raise_to(member, target)
                for member in state.members
            }
            state = self._noted(state, target, fitness)
            state.save(path)
            if target == steps:
                break
            state = self._next(state, target, fitness)
            state.save(path)
            self._forget_the_dead(state)
        self._finish()

    def _first(self) -> State:
        settings = self.plan.settings
        members = tuple(
            Member(number, settings.learning_rate, settings.beta)
            for number in range(self.plan.pop_size)
        )
        return State(0, 0, members)

    def _raise_to(self, member: Member, target: int) -> Fitness:
        """Train a member until it has made `target` steps, and measure it."""
        folder = member_folder(self.directory, member.number)
        measured = folder / f"fitness-{target}.json"
        found = read_json(measured)
        if found is None:
            found = self._train_and_judge(member, target, folder)
            write_json(measured, found)
        answers = found["answers"]
        return Fitness(
            correct=sum(answer["correct"] for answer in answers),
            total=len(answers),
            mean_reward=found["mean_reward"],
        )

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

        trainer = training.build_trainer(
            settings, self.splits.train, [self.reward], folder, self.base,
            self.tokenizer, progress,
            [training.StopWhen(lambda step: self.stop_request.exists())],
        )  # fmt: skip
        try:
            training.prolong(trainer)
            reached = training.train(trainer)
            if reached < target or self.stop_request.exists():
                raise Stopped
            self.doing(f"measuring member {member.number}")
            return self._judge(trainer.model)
        finally:
            # The next member puts its own adapter on the same base model.
            self.base = training.release(trainer)
            del trainer
            models.free_memory()

    def _judge(self, policy) -> dict:
        """Greedy answers to the questions that rank, and what they earn."""
        found = self._answers(policy, self.splits.eval)
        return asdict(found) | {"mean_reward": self._mean_reward(found)}

    def _answers(self, policy, rows: Dataset) -> Evaluation:
        return evaluation.evaluate(
            policy, self.tokenizer, rows,
            self.plan.settings.max_completion_length,
            self.plan.eval_batch_size,
            levers=self.levers,
        )  # fmt: skip

    def _mean_reward(self, found: Evaluation) -> float:
        paid = self.reward(
            [answer.text for answer in found.answers],
            question=[answer.question for answer in found.answers],
            answer=[answer.gold for answer in found.answers],
        )
        known = [value for value in paid if value is not None]
        return sum(known) / len(known) if known else 0.0

    def _judge_base(self) -> None:
        path = self.directory / "base.json"
        if not path.exists():
            self.doing("measuring the base model")
            write_json(path, self._judge(self.base))

    def _noted(
        self, state: State, target: int, fitness: dict[int, Fitness]
    ) -> State:
        """The state with its generation in the lineage, and a checkpoint."""
        order = evolution.ranked(state.members, fitness)
        completions = target * self.plan.completions_per_step
        rows = [
            _lineage_row(state.generation, target, member, fitness, rank)
            | {"completions": completions}
            for rank, member in enumerate(order, start=1)
        ]
        earlier = [
            row
            for row in state.lineage
            if row["generation"] != state.generation
        ]
        self._keep(rows[0])
        return replace(state, lineage=(*earlier, *rows))

    def _next(
        self, state: State, target: int, fitness: dict[int, Fitness]
    ) -> State:
        """The next generation, each copy with its parent's checkpoint.

        The checkpoints are copied at once: a parent that lives on keeps its
        newest two only.
        """
        generation = state.generation + 1
        born = 1 + max(
            [row["member"] for row in state.lineage]
            + [member.number for member in state.members]
        )
        members = evolution.next_generation(
            state.members, fitness, self.plan.rules, generation, born
        )
        for member in members:
            if member.born == generation:
                self._inherit(member, target)
        return replace(
            state, generation=generation, step=target, members=tuple(members)
        )

    def _forget_the_dead(self, state: State) -> None:
        """Delete the checkpoints of members that nobody goes on from.

        Their metrics and answers stay.
        """
        alive = {member.number for member in state.members}
        for number in {row["member"] for row in state.lineage} - alive:
            folder = member_folder(self.directory, number)
            for checkpoint in folder.glob("checkpoint-*"):
                shutil.rmtree(checkpoint, ignore_errors=True)

    def _inherit(self, member: Member, step: int) -> None:
        parent = member_folder(self.directory, member.parent)
        training.take_over(
            parent / f"checkpoint-{step}",
            training.grpo_config(
                self.plan.settings_of(member, step),
                member_folder(self.directory, member.number),
                len(self.splits.train),
            ),
        )

    def _keep(self, row: dict) -> None:
        """Keep the adapter of a generation's best member as a checkpoint."""
        name = f"step_{row['step']}"
        folder = self.directory / "checkpoints" / name
        if (folder / "checkpoint.json").exists():
            return
        member = member_folder(self.directory, row["member"])
        source = member / f"checkpoint-{row['step']}"
        part = folder.with_name(f".part-{name}")
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        part.mkdir(parents=True)
        for file in ADAPTER_FILES:
            shutil.copy(source / file, part / file)
        write_json(part / "checkpoint.json", {"name": name, **row})
        part.rename(folder)
        for worse in checkpoints(self.directory)[KEPT_CHECKPOINTS:]:
            if worse["name"] != name:
                _delete(folder.parent / worse["name"])

    def _finish(self) -> None:
        """Ask base and best what nothing was selected by."""
        self.doing("asking base and best the test questions")
        best = checkpoints(self.directory)[0]
        folder = self.directory / "checkpoints" / best["name"]
        found = evaluation.evaluate_snapshots(
            self.base,
            {best["step"]: folder},
            self.tokenizer,
            self.test_rows,
            self.plan.settings.max_completion_length,
            self.plan.eval_batch_size,
            levers=self.levers,
        )
        base, after = found.values()
        base.save(self.directory / "test" / "base.json")
        after.save(self.directory / "test" / "best.json")
        pair = evaluation.compare(base, after)
        write_json(
            self.directory / "result.json",
            {
                "best": best["name"],
                "questions": len(self.test_rows),
                "before": base.accuracy,
                "after": after.accuracy,
                "gain": pair.difference,
                "gain_interval": pair.interval,
                "p_value": pair.p_value,
            },
        )


def _delete(folder: Path) -> None:
    """Delete a checkpoint; a reader or a kill never meets half of one."""
    gone = folder.with_name(f".gone-{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _lineage_row(
    generation: int,
    step: int,
    member: Member,
    fitness: dict[int, Fitness],
    rank: int,
) -> dict:
    found = fitness[member.number]
    low, high = found.interval
    return {
        "generation": generation,
        "step": step,
        "rank": rank,
        "member": member.number,
        "parent": member.parent,
        "born": member.born,
        "change": member.change,
        "learning_rate": member.learning_rate,
        "beta": member.beta,
        "accuracy": found.accuracy,
        "low": low,
        "high": high,
        "mean_reward": found.mean_reward,
    }
