"""Who survives, who is copied, and what is changed: plain data and chance.

The evolution of hyperparameters of AgileRL and of population based training
(Jaderberg et al., 2017, arXiv:1711.09846), without any training in it: a
generation of members and their fitness go in, the next generation comes out,
and the same seed always gives the same one.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_lab.evaluation import wilson_interval

GROW, SHRINK = 1.2, 0.8
"""What a mutation multiplies a hyperparameter by, as AgileRL does."""

FIELDS = {"lr": "learning_rate", "beta": "beta"}
"""Hyperparameters that can be mutated: in a manifest, and of a `Member`."""


@dataclass(frozen=True)
class Member:
    """One policy of a population: an adapter with its own hyperparameters.

    Attributes:
        number: unique in an experiment, in the order of birth.
        learning_rate, beta: what it trains with; per step, and the weight of
            the KL penalty.
        parent: the member whose adapter and optimiser it began with; None
            for those that began from the base model.
        born: the generation in which it began.
        change: how it differs from its parent, in words; "" if it doesn't.
    """

    number: int
    learning_rate: float
    beta: float
    parent: int | None = None
    born: int = 0
    change: str = ""


@dataclass(frozen=True)
class Fitness:
    """How good a member is on the held-out questions that rank members.

    Attributes:
        correct, total: right greedy answers, and questions.
        mean_reward: what the reward pays for those answers, on average.
    """

    correct: int
    total: int
    mean_reward: float

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the accuracy."""
        return wilson_interval(self.correct, self.total)

    @property
    def key(self) -> tuple[int, float]:
        """What is compared: accuracy first, then the mean reward."""
        return self.correct, self.mean_reward


@dataclass(frozen=True)
class Rules:
    """How the next generation is made.

    Attributes:
        tournament_size: members drawn for a tournament, with replacement.
        elitism: whether the best member stays, unchanged.
        mutation_rate: probability, 0 to 1, that a copy is mutated.
        ranges: least and most value by name; one of them is changed.
        seed: of all that is drawn.
    """

    tournament_size: int
    elitism: bool
    mutation_rate: float
    ranges: Mapping[str, tuple[float, float]]
    seed: int


def ranked(
    members: Sequence[Member], fitness: Mapping[int, Fitness]
) -> list[Member]:
    """The members, the fittest first; of equals the older.

    Args:
        fitness: by a member's number.
    """
    return sorted(
        members,
        key=lambda one: (fitness[one.number].key, -one.number),
        reverse=True,
    )


def next_generation(
    members: Sequence[Member],
    fitness: Mapping[int, Fitness],
    rules: Rules,
    generation: int,
    first_number: int,
) -> list[Member]:
    """As many members again: the elite, and copies of tournament winners.

    Args:
        members: those of the generation that was just measured.
        fitness: of each of them, by number.
        rules: how to select and to mutate.
        generation: number of the generation to be made; chance depends on it
            and on the seed alone, so that a resumed experiment draws what an
            uninterrupted one would have drawn.
        first_number: the number of the first copy; others follow.

    Returns:
        The elite comes first and is the very same member. Each of the others
        is new, even where nothing was mutated: it goes on with other rollouts
        than its parent.

    Example:
        >>> members = [Member(0, 1e-3, 0.0), Member(1, 1e-3, 0.0)]
        >>> fitness = {0: Fitness(3, 10, 0.5), 1: Fitness(5, 10, 0.9)}
        >>> rules = Rules(2, True, 1.0, {"lr": (1e-4, 1e-2)}, seed=1)
        >>> for one in next_generation(members, fitness, rules, 1, 2):
        ...     print([one.number, one.parent, one.learning_rate, one.change])
        [1, None, 0.001, '']
        [2, 1, 0.0008, 'lr x0.8']
    """
    chance = random.Random(f"{rules.seed}/{generation}")
    order = ranked(members, fitness)
    kept = order[:1] if rules.elitism else []
    copies = []
    for number in range(len(members) - len(kept)):
        winner = _tournament(order, rules.tournament_size, chance)
        copy = replace(
            winner,
            number=first_number + number,
            parent=winner.number,
            born=generation,
            change="",
        )
        copies.append(_mutated(copy, rules, chance))
    return kept + copies


def _tournament(
    order: Sequence[Member], size: int, chance: random.Random
) -> Member:
    """The fittest of some members that are drawn with replacement."""
    return order[min(chance.randrange(len(order)) for _ in range(size))]


def _mutated(member: Member, rules: Rules, chance: random.Random) -> Member:
    """The member, perhaps with one hyperparameter changed in its range."""
    if not rules.ranges or chance.random() >= rules.mutation_rate:
        return member
    name = chance.choice(sorted(rules.ranges))
    factor = chance.choice((GROW, SHRINK))
    least, most = rules.ranges[name]
    field = FIELDS[name]
    value = min(max(getattr(member, field) * factor, least), most)
    # A product such as 0.001 * 1.2 ends in noise.
    value = float(f"{value:.12g}")
    change = f"{name} x{factor:g}"
    if value in (least, most):
        change += f", held at {value:g}"
    return replace(member, change=change, **{field: value})
