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
        mean_reward: what those answers earn, on average.
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


@dataclass(frozen=True)
class Rules:
    """How the next generation is made.

    Attributes:
        tournament_size: members drawn for a tournament, with replacement.
        elitism: whether the best member stays, unchanged.
        mutation_rate: probability, 0 to 1, that a copy is mutated.
        ranges: least and most value of `lr` and `beta`; one is changed.
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
    """The members, the fittest first; of equals the older."""

    def key(member: Member) -> tuple[int, float, int]:
        own = fitness[member.number]
        return own.correct, own.mean_reward, -member.number

    return sorted(members, key=key, reverse=True)


def next_generation(
    members: Sequence[Member],
    fitness: Mapping[int, Fitness],
    rules: Rules,
    generation: int,
    first_number: int,
) -> list[Member]:
    """As many members again: the elite, and copies of tournament winners.

    Args:
        members, fitness: the generation that was just measured, and how good
            each of them is, by number.
        rules: how to select and to mutate.
        generation: number of the generation to be made; chance depends on it
            and on the seed alone, so that a resumed experiment draws what an
            uninterrupted one would have drawn.
        first_number: the number of the first copy; others follow.

    Returns:
        The elite comes first and is the very same member. Each of the others
        is new, even where nothing was mutated.

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
        # Drawn with replacement; the fittest comes first in the order.
        drawn = (
            chance.randrange(len(order)) for _ in range(rules.tournament_size)
        )
        winner = order[min(drawn)]
        copy = replace(
            winner,
            number=first_number + number,
            parent=winner.number,
            born=generation,
            change="",
        )
        copies.append(_mutated(copy, rules, chance))
    return kept + copies


def _mutated(member: Member, rules: Rules, chance: random.Random) -> Member:
    """The member, perhaps with one hyperparameter changed in its range."""
    if not rules.ranges or chance.random() >= rules.mutation_rate:
        return member
    name = chance.choice(sorted(rules.ranges))
    factor = chance.choice((GROW, SHRINK))
    least, most = rules.ranges[name]
    old = member.learning_rate if name == "lr" else member.beta
    value = min(max(old * factor, least), most)
    # A product such as 0.001 * 1.2 ends in noise.
    value = float(f"{value:.12g}")
    change = f"{name} x{factor:g}"
    if value in (least, most):
        change += f", held at {value:g}"
    if name == "lr":
        return replace(member, change=change, learning_rate=value)
    return replace(member, change=change, beta=value)
