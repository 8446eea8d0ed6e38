"""Answers as real policies write them, judged before the code was run.

`data/more_cases.jsonl` has a completion and a gold on each line, the
strictest policy that finds the answer right ("never": none does; "no gold":
the gold can't be read), why a careful teacher says so, and the public report
that the case is after ("own": none). tests/test_symbolic.py judges them all.
"""

import collections
import json
from pathlib import Path

import numpy as np
import pytest

from rewards.answers import POLICIES, gold_number, is_correct
from rewards.symbolic import accuracy_reward

DATA = Path(__file__).parent / "data" / "more_cases.jsonl"
CASES = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]

# What the numeric path does not read, as it takes computing.
COMPUTED = (
    r"0.3333333333333333", r"\frac{1}{-2}", r"2^3 \cdot 5", "5!",
    r"\sqrt[3]{8}", r"\log_{10} 100", "3:2", r"e^{i\pi}", "10^5",
    r"\lfloor 2.5 \rfloor", r"\int_0^1 x^2 dx", "0." + 300 * "3",
)  # fmt: skip


def by_id(case):
    return case["id"]


def wanted(right_from):
    if right_from == "no gold":
        return [None] * len(POLICIES)
    first = (*POLICIES, "never").index(right_from)
    return [float(i >= first) for i in range(len(POLICIES))]


def is_numeric(case):
    return (
        isinstance(case["input"], str)
        and gold_number(case["gold"]) is not None
        and not any(f"\n{text}\n" in case["input"] for text in COMPUTED)
    )


@pytest.mark.parametrize("case", list(filter(is_numeric, CASES)), ids=by_id)
def test_the_numeric_path_says_the_same(case):
    said = [is_correct(case["input"], case["gold"], p) for p in POLICIES]
    assert said == wanted(case["right_from"]), case["why"]


@pytest.mark.parametrize(
    "gold",
    [
        np.int64(18),
        np.float32(18),
        np.array(18),
        np.array([18]),
        np.str_("18"),
    ],
)
def test_a_gold_of_numpy_is_what_it_holds(gold):
    texts = ["<answer>18</answer>", "<answer>17</answer>"]
    assert accuracy_reward(texts, [gold, gold]) == [1.0, 0.0]
    assert [is_correct(text, gold) for text in texts] == [True, False]


def test_a_missing_gold_of_numpy_is_none():
    assert accuracy_reward(["<answer>nan</answer>"], [np.nan]) == [None]
    assert accuracy_reward(["<answer></answer>"], [np.array([])]) == [None]


def test_the_cases_are_well_formed_and_of_every_kind():
    ids = collections.Counter(case["id"] for case in CASES)
    assert max(ids.values()) == 1
    assert {tuple(case) for case in CASES} == {
        ("id", "kind", "input", "gold", "right_from", "why", "source")
    }
    kinds = collections.Counter(case["kind"] for case in CASES)
    assert len(kinds) == 9
    assert len(CASES) >= 200
    assert {case["right_from"] for case in CASES} == {
        *POLICIES, "never", "no gold",
    }  # fmt: skip
