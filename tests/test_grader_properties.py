"""What must hold for any answer: spelling keeps a verdict, meaning decides it.

Each test rewrites a value at random, in a way that keeps it or in one that
changes it, and asks `judge` in both directions.
"""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.answers import compare_numbers
from rewards.expressions import judge
from rewards.health import Outcome

CALM = settings(deadline=None, derandomize=True, database=None)
DATA = Path(__file__).parent / "data" / "equal_pairs.jsonl"
PAIRS = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]

INTEGERS = st.integers(-10_000_000, 10_000_000)
COUNTS = st.integers(2, 10_000_000)
SMALL = st.integers(-30, 30)


def equal(one: str, other: str) -> bool:
    """Whether two texts mean the same, whichever is the reference."""
    there, back = judge(one, other), judge(other, one)
    assert (there == "right") == (back == "right"), (one, other)
    return there == "right"


def _spaced(n: int, mark: str) -> str:
    return f"{n:,}".replace(",", mark)


KEEPING = [
    str,
    lambda n: f"{n}.0",
    lambda n: f"+{n}" if n >= 0 else f"−{-n}",
    lambda n: f"${n}$",
    lambda n: rf"\boxed{{{n}}}",
    lambda n: rf"\text{{{n}}}",
    lambda n: f"**{n}**",
    lambda n: f"“{n}”",
    lambda n: f"[{n}]",
    lambda n: f"({n})",
    lambda n: f"x = {n}",
    lambda n: f"approx. {n}",
    lambda n: _spaced(n, ","),
    lambda n: _spaced(n, "{,}"),
    lambda n: _spaced(n, r"\,"),
    lambda n: _spaced(n, "\u202f"),
    lambda n: _spaced(n, " "),
    lambda n: rf"\frac{{{2 * n}}}{{2}}",
    lambda n: f"{3 * n}/3",
    lambda n: f"{n} eggs",
    lambda n: rf"{n} \text{{ eggs}}",
    lambda n: f"{n} in total",
    lambda n: "".join(chr(0xFF10 + int(c)) if c.isdigit() else c
                      for c in str(n)),
    lambda n: "".join(chr(0x0966 + int(c)) if c.isdigit() else c
                      for c in str(n)),
]  # fmt: skip
CHANGING = [
    lambda n: str(n + 1),
    lambda n: str(-n),
    lambda n: f"{n}.5",
    lambda n: f"1{abs(n)}",
    lambda n: str(10 * n),
    lambda n: f"{n}x",
    lambda n: f"{n}, {n + 1}",
    lambda n: f"{n}, {n}",
    lambda n: f"{n} thousand",
    lambda n: f"{n}!" if n > 2 else f"{n}x",
    lambda n: rf"{n}\pi",
    lambda n: f"x > {n}",
    lambda n: f"({n}, {n})",
    lambda n: f"not {n}",
]


@CALM
@given(INTEGERS, st.sampled_from(KEEPING), st.sampled_from(KEEPING))
def test_a_rewriting_keeps_the_verdict(n, one, other):
    assert equal(one(n), other(n))
    assert compare_numbers(one(n), n) is Outcome.RIGHT


@CALM
@given(COUNTS, st.sampled_from(CHANGING), st.sampled_from(KEEPING))
def test_a_change_loses_it(n, change, keep):
    assert not equal(keep(n), change(n))
    assert compare_numbers(change(n), n) is not Outcome.RIGHT


@CALM
@given(SMALL, SMALL)
def test_fractions_are_equal_if_their_values_are(one, other):
    for parts in (2, 3, 7):
        gold, answer = Fraction(one, parts), Fraction(other, parts)
        latex = rf"\frac{{{one}}}{{{parts}}}"
        assert equal(latex, str(answer)) == (gold == answer)


UNITS = [
    ("hours", 3600), ("minutes", 60), ("seconds", 1), ("m", "m"),
    ("eggs", "egg"), ("dollars", "$"), ("kg", "kg"), ("m/s", "speed"),
]  # fmt: skip


@CALM
@given(COUNTS, st.sampled_from(UNITS), st.sampled_from(UNITS))
def test_two_units_have_to_agree(n, one, other):
    (name, size), (word, factor) = one, other
    assert equal(f"{n} {name}", str(n))
    assert equal(rf"{n}\text{{ {name}}}", f"{n} {word}") == (size == factor)
    if isinstance(size, int) and isinstance(factor, int):
        there = Fraction(n * size, factor)
        assert equal(f"{n} {name}", f"{there} {word}")


@CALM
@given(st.lists(SMALL, min_size=2, max_size=5), st.randoms())
def test_a_list_counts_its_values_in_any_order(values, chance):
    mixed = list(values)
    chance.shuffle(mixed)
    gold = ", ".join(map(str, values))
    assert equal(gold, " and ".join(map(str, mixed)))
    assert not equal(gold, ", ".join(map(str, [*mixed[1:], 31])))
    assert not equal(gold, ", ".join(map(str, [*mixed, mixed[0]])))
    braces = r"\{" + ", ".join(map(str, mixed)) + r"\}"
    assert equal(gold, braces) == (len(set(values)) == len(values))


@CALM
@given(SMALL, SMALL, st.sampled_from("xyt"), st.sampled_from("xyt"))
def test_a_condition_keeps_its_variable_and_its_ends(low, size, one, other):
    low, high = low, low + abs(size) + 1
    interval = f"({low}, {high})"
    both = f"{one}>{low} and {one}<{high}"
    assert equal(both, f"{low}<{one}<{high}") and equal(both, interval)
    assert equal(both, f"{low}<{other}<{high}") == (one == other)
    assert not equal(both, f"{one}>{low}")
    assert not equal(both, f"{one}>{low} or {one}<{high}")
    assert not equal(both, f"{low}<={one}<{high}")
    inside = ", ".join(str(n) for n in range(low + 1, high))
    domain = rf"{both}, {one} \in \mathbb{{Z}}"
    if inside:
        assert equal(domain, rf"\{{{inside}\}}")
    assert not equal(domain, interval)


@CALM
@given(SMALL, SMALL, SMALL)
def test_names_number_roots_or_quantities(a, b, c):
    roots = f"x_1={a}, x_2={b}, x_3={c}"
    assert equal(roots, f"x={c}, x={a}, x={b}")
    terms = f"a_1={a}, a_2={b}, a_3={c}"
    assert equal(terms, f"a_2={b}, a_3={c}, a_1={a}")
    swapped = f"a_1={b}, a_2={a}, a_3={c}"
    assert equal(terms, swapped) == (a == b)


@pytest.mark.parametrize(
    "pair",
    [p for p in PAIRS if p["gold"] and p["answer"] != "70k"],
    ids=lambda pair: f"{pair['gold']} ~ {pair['answer']}",
)
def test_equal_is_equal_from_both_sides(pair):
    if pair["answer"]:
        equal(pair["gold"], pair["answer"])
