"""The training of a population: members in turn, or on many workers.

    directory/
      plan.json               how it trains, and for how long
      population.json         the generation that trains, and the lineage
      base.json               the base model on the questions that rank
      members/003/            one member, with all that a run's directory has:
        settings.json           what it trains with
        metrics.csv, tensorboard/, completions/, checkpoint-N/
        parent/                 the checkpoint that it began with
        fitness-10.json         its answers at step 10, and their mean reward
        worker.log              what its worker printed, if it had one
      checkpoints/step_10/    the best member's adapter at step 10
      test/                   base and best on questions that select nothing
      result.json             written last

Everything that a member is lies in its newest checkpoint, so that a kill costs
at most the step that was being made. What is drawn by chance depends on the
seed and the generation alone, so that the lineage is the same wherever the
members train: in this process, in others or on the workers of a cluster.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from grpo_lab import evaluation
from grpo_lab.arena import evolution
from grpo_lab.arena.evolution import Fitness, Member
from grpo_lab.arena.records import ADAPTER_FILES, checkpoints, member_folder
from grpo_lab.arena.train_member import (
    MEASURE_BASE,
    MemberTraining,
    Plan,
    read_fitness,
)
from grpo_lab.data import Splits
from grpo_lab.errors import LabError
from grpo_lab.evaluation import Evaluation
from grpo_lab.files import last_line, read_json, write_json
from grpo_lab.grid.cluster import Cluster
from grpo_lab.grid.execute import execute
from grpo_lab.grid.pool import Answer, LocalPool, ThisProcess, WorkerLost
from grpo_lab.grid.state import PARENT
from grpo_lab.grid.storage import shown
from grpo_lab.grid.train_run import Part, Stopped
from grpo_lab.task import Task

__all__ = ["Plan", "Population", "Progress", "State", "Stopped"]

KEPT_CHECKPOINTS = 5
"""The best that are kept, beside the newest one."""

WAITING = "waiting for a free worker"

SHARE = (
    "Keep the arena in a directory that all machines share (NFS) and that "
    "has the same path on each: --home DIRECTORY."
)

Progress = Callable[[Member, int, dict], None]
"""Called after each optimiser step: member, its step, its row of metrics."""

Doing = Callable[[str], None]
"""Called with what begins, in words."""


@dataclass(frozen=True)
class State:
    """A generation, and the step at which it began."""

    generation: int
    step: int
    members: list[Member]
    lineage: list[dict]


class Population:
    """A population and its directory, ready to train.

    Args:
        plan: how it trains.
        splits: the questions to train on, and those that rank the members.
        test_rows: further held-out questions; nothing is selected by them.
        reward: the reward function, with TRL's signature.
        directory: the experiment's own; every write goes below it.
        progress, doing: see `Progress` and `Doing`.
        workers: where the members train: a cluster, or a number of processes
            of this machine. By default one after the other in this process.
            Whoever goes on with a population may have others.

    Raises:
        LabError: the workers can't have the directory.
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
        workers: Cluster | int | None = None,
    ) -> None:
        self.plan = plan
        self.directory = Path(directory)
        self.progress, self.doing = progress, doing
        self.context = MemberTraining(
            Task(splits, [reward]), plan.eval_batch_size, self.directory,
            plan=plan, test_rows=test_rows,
        )  # fmt: skip
        self.workers = workers
        if isinstance(workers, Cluster) and workers.storage:
            raise LabError(
                f"The members of a population can't be kept in "
                f"{shown(workers.storage)}, only in a directory that all "
                "machines share. Leave storage out, and keep the arena's home "
                "there."
            )
        self.said, self.asked, self.is_over = "", "", False
        self.reached: dict[str, int] = {}

    def train(self) -> None:
        """Train to the end, going on where an earlier call was ended.

        Raises:
            Stopped: the file `stop` appeared in the directory.
            LabError: a run can't go on; or the workers can't be had, or are
                lost again and again.
        """
        write_json(self.directory / "plan.json", self.plan.to_dict())
        self.is_over = False
        execute(self, self._pool())
        if not self.is_over:
            raise Stopped

    def _pool(self) -> Any:
        if self.workers in (None, 1):
            return ThisProcess(self.context)
        self.context.directory = self.directory.resolve()
        rewards, members = self.context.task.rewards, self.plan.pop_size
        if not isinstance(self.workers, Cluster):
            size = min(self.workers, members)
            self.context.gpus = 1 / size
            return LocalPool(self.context, size, functions=rewards)
        from grpo_lab.grid.on_ray import RayPool

        self.context.gpus = self.workers.gpus
        mark = self.context.directory / "plan.json"
        return RayPool(
            self.context, self.workers, members, rewards, mark, SHARE
        )

    # --- What `execute` asks and reports

    def decide(self) -> list[Part]:
        """What may be done now; generations that are over are noted."""
        if (self.directory / "stop").exists():
            return []
        if not (self.directory / "base.json").exists():
            return [MEASURE_BASE]
        state = self._state()
        steps = self.plan.settings.max_steps
        while True:
            target = min(state.step + self.plan.evo_steps, steps)
            fitness, parts = {}, []
            for one in state.members:
                place = f"members/{one.number:03d}"
                found = read_fitness(self.directory / place, target)
                if found:
                    fitness[one.number] = found
                else:
                    parts.append(Part(place, target, one))
            if parts:
                return parts
            state = self._noted(state, target, fitness)
            self._save(state)
            if target == steps:
                return self._last()
            state = self._next(state, target, fitness)
            self._save(state)
            self._forget_the_dead(state)

    def _last(self) -> list[Part]:
        """The questions by which nothing was selected; then the result."""
        best = checkpoints(self.directory)[0]["name"]
        if self.asked != best:
            return [Part("test", 0, best)]
        base, after = (
            Evaluation.load(self.directory / "test" / f"{name}.json")
            for name in ("base", "best")
        )
        assert base and after
        pair = evaluation.compare(base, after)
        write_json(
            self.directory / "result.json",
            {
                "best": best,
                "questions": len(base.answers),
                "before": base.accuracy,
                "after": after.accuracy,
                "gain": pair.difference,
                "gain_interval": pair.interval,
                "p_value": pair.p_value,
            },
        )
        self.is_over = True
        return []

    def begin(self, part: Part) -> bool:
        """Nothing is to be prepared."""
        return True

    def look(self, working: Sequence[Part]) -> None:
        """Say what is being done."""
        words = _doings(working, self.reached) if working else WAITING
        if words != self.said:
            self.said = words
            self.doing(words)

    def step(self, part: Part, row: dict) -> None:
        """Show a step."""
        self.reached[part.place] = row["step"]
        if self.progress and isinstance(part.run, Member):
            self.progress(part.run, row["step"], row)

    def take(self, answer: Answer) -> None:
        """Raise what went wrong."""
        part, error = answer.item, answer.error
        assert isinstance(part, Part)
        if isinstance(error, WorkerLost):
            log = self.context.fetch(part)
            raise LabError(_lost_again(part, error, log)) from error
        if error is not None and not isinstance(error, Stopped):
            raise error
        if part.place == "test" and error is None:
            self.asked = str(part.run)

    # --- Generations

    def _state(self) -> State:
        """The generation that trains."""
        saved = read_json(self.directory / "population.json")
        if saved:
            members = [Member(**one) for one in saved["members"]]
            return State(**saved | {"members": members})
        settings = self.plan.settings
        members = [
            Member(number, settings.learning_rate, settings.beta)
            for number in range(self.plan.pop_size)
        ]
        return State(0, 0, members, [])

    def _save(self, state: State) -> None:
        write_json(self.directory / "population.json", asdict(state))

    def _noted(
        self, state: State, target: int, fitness: dict[int, Fitness]
    ) -> State:
        """The state with its generation in the lineage, and a checkpoint."""
        rows: list[dict] = []
        for member in evolution.ranked(state.members, fitness):
            own = fitness[member.number]
            low, high = own.interval
            row = {
                "generation": state.generation,
                "step": target,
                "rank": len(rows) + 1,
                "member": member.number,
                "parent": member.parent,
                "born": member.born,
                "change": member.change,
                "learning_rate": member.learning_rate,
                "beta": member.beta,
                "accuracy": own.accuracy,
                "low": low,
                "high": high,
                "mean_reward": own.mean_reward,
                "completions": target * self.plan.completions_per_step,
            }
            rows.append(row)
        now = state.generation
        earlier = [r for r in state.lineage if r["generation"] != now]
        self._keep(rows[0])
        return replace(state, lineage=earlier + rows)

    def _next(
        self, state: State, target: int, fitness: dict[int, Fitness]
    ) -> State:
        """The next generation, each copy with its parent's checkpoint."""
        generation = state.generation + 1
        # The generation that is over is in the lineage, too.
        born = 1 + max(row["member"] for row in state.lineage)
        members = evolution.next_generation(
            state.members, fitness, self.plan.rules, generation, born
        )
        for member in members:
            if member.born == generation:
                self._inherit(member, target)
        return State(generation, target, members, state.lineage)

    def _forget_the_dead(self, state: State) -> None:
        """Delete the checkpoints, and only those, of dead members."""
        alive = {member.number for member in state.members}
        for number in {row["member"] for row in state.lineage} - alive:
            folder = member_folder(self.directory, number)
            for checkpoint in (*folder.glob("checkpoint-*"), folder / PARENT):
                shutil.rmtree(checkpoint, ignore_errors=True)

    def _inherit(self, member: Member, step: int) -> None:
        """Give a new member the checkpoint that its parent has at a step."""
        name = f"checkpoint-{step}"
        folder = member_folder(self.directory, member.number) / PARENT / name
        assert member.parent is not None
        parent = member_folder(self.directory, member.parent)
        _copy(parent / name, folder)

    def _keep(self, row: dict) -> None:
        """Keep the adapter of a generation's best member as a checkpoint."""
        name = f"step_{row['step']}"
        folder = self.directory / "checkpoints" / name
        member = member_folder(self.directory, row["member"])
        record = {"name": name, **row}
        _copy(member / f"checkpoint-{row['step']}", folder, record)
        for worse in checkpoints(self.directory)[KEPT_CHECKPOINTS:]:
            if worse["name"] != name:
                shutil.rmtree(folder.parent / worse["name"])


def _copy(source: Path, folder: Path, record: dict | None = None) -> None:
    """Copy a checkpoint, or with a record its adapter, unless it is there.

    A reader or a kill never meets half of one.
    """
    if folder.exists():
        return
    part = folder.with_name(f".part-{folder.name}")
    shutil.rmtree(part, ignore_errors=True)
    if record is None:
        shutil.copytree(source, part)
    else:
        part.mkdir(parents=True)
        for file in ADAPTER_FILES:
            shutil.copy(source / file, part / file)
        write_json(part / "checkpoint.json", record)
    part.rename(folder)


def _doings(working: Sequence[Part], reached: dict[str, int]) -> str:
    """What workers are at, in words.

    Args:
        reached: the steps that were reported, by a member's place.

    Example:
        >>> first, second = (Part(f"members/00{n}", 4, n) for n in (0, 1))
        >>> _doings([first, second], {"members/000": 3, "members/001": 4})
        'training member 0, measuring member 1'
    """
    numbers: dict[str, list[str]] = {}
    for part in working:
        if part.place == "base":
            numbers["measuring the base model"] = []
        elif part.place == "test":
            numbers["asking base and best the test questions"] = []
        else:
            trains = reached.get(part.place, 0) < part.target
            verb = "training" if trains else "measuring"
            number = str(int(Path(part.place).name))
            numbers.setdefault(f"{verb} member", []).append(number)
    return ", ".join(
        f"{words}{'s' * (len(found) > 1)} {' and '.join(found)}".strip()
        for words, found in numbers.items()
    )


def _lost_again(part: Part, error: WorkerLost, log: Path) -> str:
    words = last_line(log) or "none"
    whose = f" of member {int(Path(part.place).name)}" if part.target else ""
    return (
        f"The worker{whose} was lost, {error.times} in all, as a rule "
        f"because the machine's memory was full. Its last words were: {words} "
        "Have fewer workers on a machine, with more CPU cores or GPUs for "
        "each, then resume the experiment: what was finished is kept."
    )
