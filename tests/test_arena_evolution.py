"""Selection and mutation: what must never change, and what must."""

import doctest
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.arena import evolution
from grpo_lab.arena.evolution import Fitness, Member, Rules, next_generation

RANGES = {"lr": (1e-7, 1e-5), "beta": (1e-4, 1e-2)}


def rules(**changes) -> Rules:
    values = {
        "tournament_size": 2,
        "elitism": True,
        "mutation_rate": 6 / 7,
        "ranges": RANGES,
        "seed": 42,
    }
    return Rules(**values | changes)


def population(size: int) -> list[Member]:
    return [Member(number, 5e-6, 1e-3) for number in range(size)]


def scores(*correct: int) -> dict[int, Fitness]:
    return {
        number: Fitness(right, 100, 0.5)
        for number, right in enumerate(correct)
    }


def test_the_example():
    assert doctest.testmod(evolution).failed == 0
    assert doctest.testmod(evolution).attempted > 3


def test_accuracy_ranks_then_reward_then_age():
    fitness = {
        0: Fitness(5, 10, 1.0),
        1: Fitness(6, 10, 0.1),
        2: Fitness(5, 10, 1.5),
        3: Fitness(5, 10, 1.0),
    }
    order = evolution.ranked(population(4), fitness)
    assert [one.number for one in order] == [1, 2, 0, 3]


def test_the_elite_is_the_very_same_member():
    members = population(4)
    for seed in range(50):
        after = next_generation(
            members, scores(1, 9, 3, 4), rules(seed=seed), 1, 4
        )
        assert after[0] is members[1]
        assert [one.number for one in after[1:]] == [4, 5, 6]


def test_without_elitism_all_are_copies():
    after = next_generation(
        population(3), scores(1, 2, 3), rules(elitism=False), 1, 3
    )
    assert [one.number for one in after] == [3, 4, 5]
    assert all(one.parent is not None for one in after)


def test_tournaments_are_drawn_with_replacement():
    """Of two members the worse wins when it is drawn twice: 1 in 4."""
    parents = Counter()
    for seed in range(4000):
        after = next_generation(
            population(2), scores(1, 2), rules(seed=seed), 1, 2
        )
        parents[after[1].parent] += 1
    assert parents[0] / 4000 == pytest.approx(0.25, abs=0.03)


def test_larger_tournaments_press_harder():
    def share(size: int) -> float:
        worst = 0
        for seed in range(500):
            after = next_generation(
                population(4),
                scores(4, 3, 2, 1),
                rules(seed=seed, tournament_size=size),
                1,
                4,
            )
            worst += sum(one.parent == 3 for one in after)
        return worst / 1500

    assert share(1) > share(2) > share(4)


def test_how_often_and_what_is_mutated():
    """6 of 7 copies; either hyperparameter, either way, as often."""
    changes = Counter()
    for seed in range(7000):
        after = next_generation(
            population(2), scores(1, 2), rules(seed=seed), 1, 2
        )
        changes[after[1].change] += 1
    assert changes[""] / 7000 == pytest.approx(1 / 7, abs=0.02)
    kinds = {"lr x1.2", "lr x0.8", "beta x1.2", "beta x0.8"}
    assert set(changes) == kinds | {""}
    for kind in kinds:
        assert changes[kind] / 7000 == pytest.approx(6 / 28, abs=0.02)


def test_a_mutation_stays_in_its_range_and_says_so():
    member = Member(0, 9e-6, 1.1e-4)
    seen = set()
    for seed in range(60):
        [after] = next_generation(
            [member],
            {0: Fitness(1, 2, 0)},
            rules(seed=seed, elitism=False, mutation_rate=1.0),
            1,
            1,
        )
        assert 1e-7 <= after.learning_rate <= 1e-5
        assert 1e-4 <= after.beta <= 1e-2
        seen.add((after.learning_rate, after.beta, after.change))
    assert (1e-5, 1.1e-4, "lr x1.2, held at 1e-05") in seen
    assert (9e-6, 1e-4, "beta x0.8, held at 0.0001") in seen
    assert (7.2e-6, 1.1e-4, "lr x0.8") in seen


def test_nothing_to_mutate_changes_nothing():
    for changes in ({"ranges": {}}, {"mutation_rate": 0.0}):
        after = next_generation(
            population(3), scores(1, 2, 3), rules(**changes), 1, 3
        )
        assert {(m.learning_rate, m.beta) for m in after} == {(5e-6, 1e-3)}
        assert {m.change for m in after} == {""}


@settings(deadline=None, derandomize=True, database=None)
@given(
    size=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    generation=st.integers(1, 1000),
)
def test_the_same_seed_gives_the_same_generation(size, seed, generation):
    """Whatever was drawn elsewhere before."""
    drawn = []
    for noise in (1, 2):
        random.seed(noise)
        fitness = scores(*range(size))
        drawn.append(
            next_generation(
                population(size), fitness, rules(seed=seed), generation, size
            )
        )
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == size
    assert len({member.number for member in drawn[0]}) == size


def test_generations_draw_differently():
    drawn = {
        tuple(
            next_generation(population(4), scores(1, 2, 3, 4), rules(), g, 4)
        )
        for g in range(1, 20)
    }
    assert len(drawn) > 10


def test_fitness_comes_with_its_interval():
    fitness = Fitness(50, 100, 1.2)
    low, high = fitness.interval
    assert fitness.accuracy == 0.5 and 0.40 < low < 0.42 < 0.58 < high < 0.6
