"""Reading mathematical notation, and what two texts have in common."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import notation
from rewards.expressions import judge
from rewards.notation import (
    Bracketed,
    Number,
    Several,
    Unreadable,
    Words,
    read,
)
from rewards.units import Unit

CALM = settings(deadline=None, derandomize=True, database=None)
DATA = Path(__file__).parent / "data"
PAIRS = [
    json.loads(line)
    for line in (DATA / "equal_pairs.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: f"{pair['gold']} ~ {pair['answer']}"
)
def test_pair(pair):
    verdict = judge(pair["gold"], pair["answer"])
    if pair["verdict"] == "right":
        assert verdict == "right"
    else:
        assert verdict in ("wrong", "unreadable")


@pytest.mark.parametrize(
    "gold", sorted({pair["gold"] for pair in PAIRS if pair["gold"]})
)
def test_a_gold_is_right_against_itself_in_every_setting(gold):
    for answer in (
        gold,
        f"${gold}$",
        rf"\({gold}\)",
        f" {gold}.",
        f"{{{gold}}}",
    ):
        if answer in ("{1,000}", r"{\$1,250}"):
            continue  # a set of two
        assert judge(gold, answer) == "right"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (
            "5 apples and 3 pears",
            Several(
                (
                    Number(
                        Fraction(5), unit=Unit(things=frozenset({"apple"}))
                    ),
                    Number(Fraction(3), unit=Unit(things=frozenset({"pear"}))),
                )
            ),
        ),
        (
            "1,000, 2,000",
            Several((Number(Fraction(1000)), Number(Fraction(2000)))),
        ),
        ("1, 000", Several((Number(Fraction(1)), Number(Fraction(0))))),
        (
            "[2, 5)",
            Bracketed("[", (Number(Fraction(2)), Number(Fraction(5))), ")"),
        ),
        ("12:30", Words(("12:30",))),
        ("6:4", Number(Fraction(3, 2))),
        (r"101_{2}", Words(("101_2",))),
        ("(B)", Words(("b",))),
        (r"0.1\overline{6}", Number(Fraction(1, 6))),
        (r"-2.\overline{3}", Number(Fraction(-7, 3))),
        ("0.50", Number(Fraction(1, 2), 2)),
    ],
)
def test_what_a_text_stands_for(text, value):
    assert read(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "$", "(1, 2", "3)", "2 3", "1.5.2", "a guess + x", ",", "x <",
     "1 < 2 > x", "9^{9^9}", "99999!", r"\binom{1000000}{2}", "1" * 1001,
     "(" * 30 + "1" + ")" * 30],
)  # fmt: skip
def test_what_is_no_mathematics(text):
    with pytest.raises(Unreadable):
        read(text)


HUGE = [
    r"9^{9^{9^{9}}}",
    r"(10^{10})!",
    r"(5!)!!",
    r"(9^9)^{9^9}",
    r"9^{9\cdot 9^{9}}",
    r"e^{e^{e^{e^{e}}}}",
    r"(x+y)^{99999}",
    r"x^{y^{z^{w^{x^{y}}}}}",
    r"\binom{1000000}{500000}",
    r"\sum_{i=1}^{10000000} \frac{1}{i}",
]


def test_what_is_too_large_is_refused_before_it_is_computed():
    """In a process that is killed: without the guard it takes for ever."""
    code = (
        "import sys\n"
        "from rewards.expressions import judge\n"
        "for text in sys.argv[1:]: print(judge('7', text))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *HUGE],
        capture_output=True, text=True, timeout=100, check=True,
        cwd=DATA.parents[1],
    )  # fmt: skip
    assert done.stdout.split() == ["unreadable"] * len(HUGE)


def test_what_the_parser_reads_only_in_part_is_not_equal(monkeypatch):
    """The parser itself stops at what it does not know."""
    monkeypatch.setattr(notation, "_ONLY_LITERAL", notation._DAY)
    monkeypatch.setattr(notation, "_BROKEN", notation._DAY)
    for text in ("3 )", "3 3", "3 | 6", "3 + "):
        assert judge("3", text) != "right"


def test_reading_imports_no_parser():
    code = (
        "import sys; from rewards.expressions import judge, is_plain\n"
        "assert judge('1, 2 and 3', '3, 2, 1') == 'right'\n"
        "assert judge('east', 'west') == 'wrong'\n"
        "assert judge('5', 'E') == 'wrong' and is_plain('5', 'E')\n"
        "assert judge('(1, 2)', '1, 2') == 'wrong'\n"
        "assert not {'sympy', 'math_verify', 'mpmath'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=DATA.parents[1]
    )


PIECES = st.sampled_from(
    [*r"0123456789xyzi+-*/^_=<>()[]{},.:;|!%$ ", r"\frac", r"\sqrt", r"\cup",
     r"\{", r"\}", r"\text", r"\le ", r"\pm ", r"\infty ", r"\dots", "and",
     "or", r"\left", r"\boxed", "½", "²", "−", "\n", r"\\", "east"]
)  # fmt: skip


@CALM
@given(st.lists(PIECES, max_size=40).map("".join))
def test_any_text_is_read_or_refused(text):
    try:
        value = read(text)
    except Unreadable:
        return
    assert hash(value) == hash(read(text))
    assert judge(text, text) in ("right", "no_gold")


@CALM
@given(
    st.fractions(max_denominator=50, min_value=-50, max_value=50),
    st.fractions(max_denominator=50, min_value=-50, max_value=50),
)
def test_two_numbers_are_equal_only_if_they_are(one, other):
    gold = rf"\frac{{{one.numerator}}}{{{one.denominator}}}"
    assert (judge(gold, str(other)) == "right") == (one == other)
    assert judge(gold, str(one)) == "right"
    pair = judge(f"({one}, {other})", f"({other}, {one})")
    assert (pair == "right") == (one == other)
    assert judge(f"{one}, {other}", f"{other} and {one}") == "right"
