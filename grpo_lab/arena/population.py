"""The training of a population: members in turn, or on many workers.

    directory/
      plan.json               how it trains, and for how long
      population.json         the generation that trains, and the lineage
      base.json               the base model on the questions that rank
      members/003/            one member, with all that a run's directory has:
        settings.json           what it trains with
        metrics.csv, tensorboard/, completions/, checkpoint-N/
        fitness-10.json         its answers at step 10, and their mean reward
        worker.log              on a cluster: what its worker printed
      checkpoints/step_10/    the best member's adapter at step 10
      test/                   base and best on questions that select nothing
      result.json             written last

Everything that a member is lies in its newest checkpoint, so that a kill costs
at most the step that was being made: who trains again with the same plan goes
on. What is drawn by chance depends on the seed and the generation alone, so
that the lineage is the same wherever the members train: in this process
(`nursery`) or on the workers of a cluster (`on_ray`).
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from datasets import Dataset

from grpo_lab import evaluation
from grpo_lab.arena import evolution
from grpo_lab.arena.evolution import Fitness, Member
from grpo_lab.arena.nursery import (
    Doing,
    Material,
    Nursery,
    Plan,
    Progress,
    Stopped,
)
from grpo_lab.arena.records import ADAPTER_FILES, checkpoints, member_folder
from grpo_lab.data import Splits
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import read_json, write_json
from grpo_lab.grid.cluster import Cluster

__all__ = ["Plan", "Population", "Progress", "State", "Stopped"]

KEPT_CHECKPOINTS = 5
"""The best that are kept, beside the newest one."""


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
        workers: where the members train, one at a time on each worker; by
            default one after the other in this process.

    The base model is loaded once by each process that trains, and this one
    does not where there are workers. Whoever goes on with a population may
    have other workers, or none.

    Raises:
        LabError: the model can't be had, or no cluster be used.
    """

    def __init__(
        self,
        plan: Plan,
        splits: Splits,
        test_rows: Dataset,
        reward: Callable,
        directory: Path,
        progress: Progress | None = None,
        doing: Doing = lambda what: None,
        workers: Cluster | None = None,
    ) -> None:
        self.plan = plan
        self.reward = reward
        self.directory = Path(directory)
        material = Material(plan, splits, test_rows, reward, self.directory)
        if workers is None:
            self.nursery = Nursery(material, progress, doing)
        else:
            from grpo_lab.arena import on_ray

            self.nursery = on_ray.Crew(material, workers, progress, doing)

    @property
    def base(self):
        """The base model that the members of this process share."""
        return self.nursery.base

    @property
    def tokenizer(self):
        """Its tokenizer."""
        return self.nursery.tokenizer

    def train(self) -> None:
        """Train to the end, going on where an earlier call was ended.

        Raises:
            Stopped: the file `stop` appeared in the directory.
            LabError: a run can't go on, see `training.train`; or the workers
                can't be had, or are lost again and again.
        """
        write_json(self.directory / "plan.json", self.plan.to_dict())
        with self.nursery:
            self._evolve()
            self._finish()

    def _evolve(self) -> None:
        path = self.directory / "population.json"
        self.nursery.measure_base()
        state = State.load(path) or self._first()
        steps = self.plan.settings.max_steps
        while True:
            target = min(state.step + self.plan.evo_steps, steps)
            fitness = self.nursery.raise_all(state.members, target)
            state = self._noted(state, target, fitness)
            state.save(path)
            if target == steps:
                break
            state = self._next(state, target, fitness)
            state.save(path)
            self._forget_the_dead(state)

    def _first(self) -> State:
        settings = self.plan.settings
        members = tuple(
            Member(number, settings.learning_rate, settings.beta)
            for number in range(self.plan.pop_size)
        )
        return State(0, 0, members)

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
        self.nursery.inherit(member, step)

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
        """Compare base and best on what nothing was selected by."""
        best = checkpoints(self.directory)[0]
        self.nursery.ask_test(best)
        base, after = (
            Evaluation.load(self.directory / "test" / f"{name}.json")
            for name in ("base", "best")
        )
        pair = evaluation.compare(base, after)
        write_json(
            self.directory / "result.json",
            {
                "best": best["name"],
                "questions": len(base.answers),
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
