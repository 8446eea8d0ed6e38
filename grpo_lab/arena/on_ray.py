"""Members in parallel: one at a time on each worker of a Ray cluster.

A worker is an actor with a `Nursery` of its own, which loads the base model
once. The driver, where the tournament is, gives each member to a worker that
is free, and follows the members' metrics. Which worker trains a member
changes nothing of it: what it is lies in its directory, and where a worker or
its machine is lost another one goes on from the newest checkpoint.

All that depends on the device is done by workers, the answers of the base
model included, so that the driver may be a machine that could not train.
"""

import collections
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray.exceptions import RayError, RayTaskError

from grpo_lab import environment, training
from grpo_lab.arena.evolution import Fitness, Member
from grpo_lab.arena.nursery import (
    Doing,
    Material,
    Nursery,
    Progress,
    Stopped,
    read_fitness,
)
from grpo_lab.arena.records import member_folder
from grpo_lab.errors import LabError
from grpo_lab.files import last_line, read_metrics
from grpo_lab.grid.cluster import (
    Cluster,
    connected,
    printing_to,
    see_own_gpus,
    ship_by_value,
)

LOOK_SECONDS = 1.0
"""How often the driver looks for new steps and for a request to stop."""

LEAVE_SECONDS = 10.0
"""How long a worker may take to clear up after itself."""

WAITING = "waiting for a free worker"

SHARE = (
    "Keep the arena in a directory that all machines share (NFS) and that "
    "has the same path on each: --home DIRECTORY."
)


@dataclass(frozen=True)
class Task:
    """What every worker needs to know; it is pickled.

    Attributes:
        material: what members are raised with.
        threads: CPU threads of a worker.
        directory: where the driver was started.
    """

    material: Material
    threads: int
    directory: Path


@dataclass
class Errand:
    """Something that one worker does, without the others.

    Attributes:
        verb: the method of `Nursery` that does it.
        arguments: what that is given.
        log: where the worker prints meanwhile.
        words: what it is, to be shown; "" to show nothing.
        member: whom it raises, if anyone, and
        target: to which step.
        losses: workers that were lost over it.
        result: what the method returned.
    """

    verb: str
    arguments: tuple
    log: Path
    words: str = ""
    member: Member | None = None
    target: int = 0
    losses: int = 0
    result: object = None


# --- On a worker ------------------------------------------------------------


class Worker:
    """A process of the cluster with a nursery; Ray makes an actor of it."""

    def __init__(self, task: Task) -> None:
        import torch

        see_own_gpus()
        environment.prepare()
        os.chdir(task.directory if task.directory.is_dir() else "/")
        torch.set_num_threads(task.threads)
        self.material = task.material
        self.nursery: Nursery | None = None

    def ready(self) -> None:
        """An answer says that the worker is there."""

    def run(self, errand: Errand) -> object:
        """Do an errand; what it raises reaches the driver."""
        errand.log.parent.mkdir(parents=True, exist_ok=True)
        with printing_to(errand.log):
            # Not before: what can't be loaded is an error of an errand.
            self.nursery = self.nursery or Nursery(self.material)
            return getattr(self.nursery, errand.verb)(*errand.arguments)

    def leave(self) -> None:
        """Clear up; an actor is ended without its own last words."""
        getattr(self.material.reward, "close", lambda: None)()


# --- On the driver ----------------------------------------------------------


class Crew:
    """The workers of a cluster, with the verbs of a `Nursery`.

    As many as there are members; those that find no room on the cluster wait
    for it, and the others take their share.

    Args:
        material: what members are raised with.
        cluster: where the workers are.
        progress: called after each optimiser step of a member.
        doing: called with what begins, in words.

    Use it in a `with` block, which has the workers.
    """

    def __init__(
        self,
        material: Material,
        cluster: Cluster,
        progress: Progress | None = None,
        doing: Doing = lambda what: None,
    ) -> None:
        if cluster.storage:
            raise LabError(
                f"The members of a population can't be kept in "
                f"{cluster.storage}, only in a directory that all machines "
                "share. Leave storage out, and keep the arena's home there."
            )
        directory = material.directory.resolve()
        self.material = replace(
            material, directory=directory, gpus=cluster.gpus
        )
        self.directory, self.cluster = directory, cluster
        self.progress, self.doing = progress, doing
        self.said = ""
        self.told: dict[int, int] = {}

    # --- Workers come and go ---

    def __enter__(self) -> "Crew":
        """Have the workers.

        Raises:
            LabError: the cluster can't be used; see `cluster.connected`.
        """
        # Calls of workers: what they were asked, and who is to answer.
        self.idle: list = []
        self.asked: dict = {}
        self.busy: dict = {}
        self.never_came = 0
        with ExitStack() as own:
            own.enter_context(
                connected(self.cluster, self.directory, "plan.json", SHARE)
            )
            own.callback(self._dismiss)
            ship_by_value([self.material.reward])
            threads = max(1, int(self.cluster.cpus))
            self.task = ray.put(Task(self.material, threads, Path.cwd()))
            for _ in range(self.material.plan.pop_size):
                self._hire()
            self.own = own.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.own.close()

    def _hire(self) -> None:
        worker = ray.remote(Worker).options(
            num_cpus=self.cluster.cpus,
            num_gpus=self.cluster.gpus,
            scheduling_strategy="SPREAD",
            # Where it was, there may be no room for it any more, and a member
            # that waits for it would not be given to another one.
            max_restarts=0,
        )
        self._ask(worker.remote(self.task))

    def _ask(self, worker) -> None:
        """Ask whether a worker is there; a new one answers when it is."""
        self.asked[worker.ready.remote()] = worker

    def _dismiss(self) -> None:
        leaving = [worker.leave.remote() for worker in self.idle]
        if leaving:
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_SECONDS)
        busy = [worker for worker, _ in self.busy.values()]
        for worker in (*self.idle, *self.asked.values(), *busy):
            ray.kill(worker)

    # --- What a nursery does ---

    def measure_base(self) -> None:
        """Let the base model answer the questions that rank, once."""
        if not (self.directory / "base.json").exists():
            self._have_done(
                self._errand("measure_base", words="measuring the base model")
            )

    def inherit(self, member: Member, step: int) -> None:
        """Give a new member the checkpoint that its parent has at a step."""
        self._have_done(self._errand("inherit", member, step))

    def ask_test(self, best: dict) -> None:
        """Ask base and best what nothing was selected by."""
        words = "asking base and best the test questions"
        self._have_done(self._errand("ask_test", best, words=words))

    def raise_all(
        self, members: Sequence[Member], target: int
    ) -> dict[int, Fitness]:
        """The fitness of each member at a step, by its number.

        Raises:
            Stopped, LabError: as `Nursery.raise_to`, whichever member it was;
                or workers were lost again and again.
        """
        found, errands = {}, {}
        for member in members:
            folder = member_folder(self.directory, member.number)
            fitness = read_fitness(folder, target)
            if fitness is None:
                errands[member.number] = Errand(
                    "raise_to",
                    (member, target),
                    folder / "worker.log",
                    member=member,
                    target=target,
                )
            else:
                found[member.number] = fitness
        self._have_done(*errands.values())
        return found | {n: errand.result for n, errand in errands.items()}

    def _errand(self, verb: str, *arguments, words: str = "") -> Errand:
        return Errand(verb, arguments, self.directory / "worker.log", words)

    # --- Having it done ---

    def _have_done(self, *errands: Errand) -> None:
        """Have errands done, each by whichever worker is free.

        Raises:
            Stopped: a stop was asked for, and no worker trains any more.
        """
        waiting, stopped = collections.deque(errands), False
        while waiting or self.busy:
            for _ in range(min(len(self.idle), len(waiting))):
                self._ask(self.idle.pop())
            answers = self._answers()
            if waiting and (stopped or self.material.stop_request.exists()):
                stopped = True
                waiting.clear()
            for call in answers:
                if call in self.asked:
                    self._came(call, waiting)
                else:
                    stopped |= self._ended(call, waiting)
            self._tell(errands)
            if waiting and not (self.busy or self.idle):
                self._say(WAITING)
        if stopped:
            raise Stopped

    def _answers(self) -> list:
        calls = [*self.busy, *self.asked]
        found, _ = ray.wait(
            calls, num_returns=1, timeout=LOOK_SECONDS, fetch_local=False
        )
        return found

    def _came(self, call, waiting: collections.deque) -> None:
        """Give a worker that is there an errand, if there is one left."""
        worker = self.asked.pop(call)
        try:
            ray.get(call)
        except RayError as error:
            self.never_came += 1
            if self.never_came > self._patience():
                raise LabError(_told_of_none(error)) from error
            self._hire()
            return
        self.never_came = 0
        if not waiting:
            self.idle.append(worker)
            return
        errand = waiting.popleft()
        if errand.member:
            self._note_start(errand.member)
        self.busy[worker.run.remote(errand)] = worker, errand

    def _patience(self) -> int:
        """Workers that may be lost in a row before they have an errand."""
        return (1 + self.cluster.retries) * self.material.plan.pop_size

    def _ended(self, call, waiting: collections.deque) -> bool:
        """Take what came of an errand; whether it was to stop."""
        worker, errand = self.busy.pop(call)
        try:
            errand.result = ray.get(call)
        except RayTaskError as error:
            self.idle.append(worker)
            if isinstance(error.cause, Stopped):
                return True
            raise error.cause from error
        except RayError as error:
            ray.kill(worker)  # if it was only out of reach
            errand.losses += 1
            if errand.losses > self.cluster.retries:
                raise LabError(_told_of_losses(errand)) from error
            self._hire()
            waiting.appendleft(errand)
        else:
            self.idle.append(worker)
        return False

    # --- Telling ---

    def _note_start(self, member: Member) -> None:
        """From where on its steps are new; a lost one is not told twice."""
        folder = member_folder(self.directory, member.number)
        checkpoint = training.last_checkpoint(folder)
        step = training.step_of(checkpoint) if checkpoint else 0
        self.told.setdefault(member.number, step)

    def _tell(self, errands: Sequence[Errand]) -> None:
        """Tell each new step of a member, and what is being done."""
        for errand in errands:
            if errand.member and errand.member.number in self.told:
                self._tell_steps(errand.member)
        self._say(self._doings())

    def _say(self, words: str) -> None:
        if words not in ("", self.said):
            self.said = words
            self.doing(words)

    def _tell_steps(self, member: Member) -> None:
        folder = member_folder(self.directory, member.number)
        for row in read_metrics(folder / "metrics.csv"):
            if row["step"] > self.told[member.number]:
                self.told[member.number] = row["step"]
                if self.progress:
                    self.progress(member, row["step"], row)

    def _doings(self) -> str:
        errands = [errand for _, errand in self.busy.values()]
        words: list[str] = []
        raised: dict[str, list[int]] = {"training": [], "measuring": []}
        for errand in errands:
            if errand.member is None:
                words.append(errand.words)
                continue
            number = errand.member.number
            trains = self.told[number] < errand.target
            raised["training" if trains else "measuring"].append(number)
        for verb, numbers in raised.items():
            if numbers:
                words.append(f"{verb} {_named(numbers)}")
        return ", ".join(words)


def _named(numbers: list[int]) -> str:
    """Members by their numbers, in words.

    Example:
        >>> _named([4]), _named([2, 0, 1])
        ('member 4', 'members 0, 1 and 2')
    """
    *others, last = sorted(numbers)
    if not others:
        return f"member {last}"
    return f"members {', '.join(map(str, others))} and {last}"


def _told_of_losses(errand: Errand) -> str:
    words = last_line(errand.log) or "none"
    whose = f" of member {errand.member.number}" if errand.member else ""
    return (
        f"The worker{whose} was lost, {errand.losses} in all, as a rule "
        f"because the machine's memory was full. Its last words were: {words} "
        "Have fewer workers on a machine, with more CPU cores or GPUs for "
        "each, then resume the experiment: what was finished is kept."
    )


def _told_of_none(error: RayError) -> str:
    *_, words = [line for line in str(error).splitlines() if line.strip()]
    return (
        "No worker of the cluster starts, though it has room for them. The "
        f"last one said: {words.strip()} See whether `python -c 'import "
        "grpo_lab.arena'` works on each of its machines, then resume the "
        "experiment."
    )
