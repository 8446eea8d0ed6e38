"""The rewards as published: each fault is there, so that it can be shown."""

import subprocess
import sys
import threading

import pytest

import rewards
from rewards import FIVE_PART, RewardError
from rewards.published import (
    COOKBOOK_AS_PUBLISHED,
    FIVE_PART_AS_PUBLISHED,
    published_accuracy_reward,
    published_arena_reward,
    published_correctness_reward,
    published_integer_reward,
    published_soft_format_reward,
    published_strict_format_reward,
    published_tag_count_reward,
    published_think_format_reward,
)

FORM = "<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>\n"
PERFECT = FORM.format("9 + 9 = 18", 18)
ONE_LINE = "<reasoning>9 + 9 = 18</reasoning><answer>18</answer>"


def parts(text, gold="#### 18"):
    return [part([text], answer=[gold])[0] for part in FIVE_PART_AS_PUBLISHED]


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        (PERFECT, [2.0, 0.5, 0.5, 0.0, 0.5]),  # strict and soft exclude
        (ONE_LINE, [2.0, 0.5, 0.0, 0.5, -0.001 * len(ONE_LINE)]),  # each other
        (ONE_LINE * 2, [2.0, 0.5, 0.0, 0.5, -0.002 * len(ONE_LINE)]),
        ("So: " + ONE_LINE, [2, 0.5, 0, 0, -0.001 * len("So: " + ONE_LINE)]),
        (FORM.format("9 + 9\n= 18", 18), [2.0, 0.5, 0.0, 0.0, 0.5]),
        (PERFECT[:-1], [2.0, 0.5, 0.0, 0.0, 0.5 - 0.001 * len(PERFECT[:-1])]),
        ("So: " + PERFECT, [2.0, 0.5, 0.0, 0.0, 0.5]),
        (PERFECT + "I hope", [2.0, 0.5, 0.0, 0.0, 0.494]),
        (PERFECT + "x" * 4000, [2.0, 0.5, 0.0, 0.0, -3.5]),
        (FORM.format("x", "18.0"), [0.0, 0.0, 0.5, 0.0, 0.5]),
        (FORM.format("x", "$18"), [0.0, 0.0, 0.5, 0.0, 0.5]),
        (FORM.format("x", 19), [0.0, 0.5, 0.5, 0.0, 0.5]),
        ("18", [2.0, 0.5, 0.0, 0.0, -0.002]),
        ("<answer>18", [2.0, 0.5, 0.0, 0.0, -0.01]),
        ("<answer>17</answer><answer>18</answer>", [2, 0.5, 0, 0, -0.038]),
        ("<reasoning><answer>18</answer>", [2.0, 0.5, 0.0, 0.0, -0.03]),
    ],
)
def test_what_the_published_five_parts_pay(text, paid):
    assert parts(text) == pytest.approx(paid)


def test_a_right_answer_can_cost_the_published_set_more_than_none():
    right = PERFECT[:-1] + "\n\n" + "Let me explain. " * 300
    assert parts(right)[0] == 2.0
    assert sum(parts(right)) < 0 < sum(parts(FORM.format("", 0)))


@pytest.mark.parametrize(
    ("answer", "gold", "paid"),
    [
        ("-3", "#### -3", [2.0, 0.0]),
        ("1000", "#### 1,000", [0.0, 0.5]),
        ("18.0", "18", [0.0, 0.0]),
        ("None", None, [2.0, 0.0]),
        ("²", "2", [0.0, 0.5]),  # isdigit takes a superscript
    ],
)
def test_the_published_parts_compare_letters(answer, gold, paid):
    text = [f"<answer>{answer}</answer>"]
    assert [
        published_correctness_reward(text, answer=[gold])[0],
        published_integer_reward(text)[0],
    ] == paid


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        ("<think>x</think>\n<answer>18</answer>", 1.0),
        ("<think>x\ny</think>\n<answer>18</answer>", 0.0),
        ("<think>x</think>\n<answer>\n18\n</answer>", 0.0),
        ("<think>x</think><think>y</think><answer>18</answer>", 1.0),  # F05
        ("<think>x</think> so <answer>18</answer>", 0.0),
        ("x</think><answer>18</answer>", 0.0),
    ],
)
def test_the_published_think_format(text, paid):
    assert published_think_format_reward([text]) == [paid]


@pytest.mark.parametrize(
    ("text", "gold", "paid"),
    [
        (r"<answer>$\frac{1}{2}$</answer>", "$0.5$", 1.0),
        ("<answer>$3$</answer>", "$5$", 0.0),
        ("<answer>5</answer>", "no maths in this gold", 1.0),
        ("", "72", 1.0),  # a bare number is no LaTeX, so no gold
        ("<answer>18</answer>", "$18$", 0.0),
        (r"<think>or \boxed{18}</think><answer>17</answer>", "$18$", 1.0),
        ("$1 < x < 2$", "$(1, 2)$", 1.0),
        ("$(1, 2)$", "$1 < x < 2$", 0.0),  # swapped: no longer symmetric
    ],
)
def test_the_published_accuracy(text, gold, paid):
    assert published_accuracy_reward([text], solution=[gold]) == [paid]


def test_the_published_accuracy_needs_the_main_thread_or_no_limits():
    outcomes = []

    def ask(**limits):
        try:
            outcomes.extend(
                published_accuracy_reward(["$5$"], solution=["$5$"], **limits)
            )
        except ValueError as error:
            outcomes.append(type(error))

    for limits in ({}, {"parsing_timeout": None, "timeout_seconds": None}):
        thread = threading.Thread(target=ask, kwargs=limits)
        thread.start()
        thread.join()
    assert outcomes == [ValueError, 1.0]


@pytest.mark.parametrize(
    ("text", "gold", "paid"),
    [
        ("x</think>\n<answer>18</answer>", "#### 18", 2.0),
        ("x\ny</think>\n<answer>\n18\n</answer>", "#### 18", 2.0),
        ("x</think><answer>18</answer>", "#### 18", 1.0),
        ("x</think>\n<answer>17</answer>", "#### 18", 1.0),
        ("<answer>18</answer>", "#### 18", 1.0),
        ("<answer>1,000 eggs</answer>", "#### 1000", 1.0),
        ("<answer>3</answer>", "#### -3", 1.0),
        ("<answer>18.5</answer>", "#### 18", 1.0),
        ("<answer>18</answer> <answer>5</answer>", "#### 18", 1.0),
        ("<answer>none</answer>", "no number", 0.0),
        ("18", "#### 18", 0.0),
        ("", "#### 18", 0.0),
    ],
)
def test_the_published_arena_reward(text, gold, paid):
    assert (
        published_arena_reward(question="?", answer=gold, completion=text)
        == paid
    )


def test_nobody_gets_a_published_reward_by_accident():
    names = {
        reward.__name__
        for reward in (*FIVE_PART_AS_PUBLISHED, *COOKBOOK_AS_PUBLISHED)
    }
    assert all(name.startswith("published_") for name in names)
    assert len(names) == 7
    assert not names & set(rewards.__all__)
    assert not names & {part.__name__ for part in FIVE_PART}


def test_the_published_set_takes_what_a_trainer_gives():
    chats = [[{"role": "assistant", "content": PERFECT}]]
    for part in (*FIVE_PART_AS_PUBLISHED, published_think_format_reward):
        assert part(completions=chats, answer=["18"], prompts=["?"]) == part(
            [PERFECT], answer=["18"]
        )
    assert published_accuracy_reward(chats, solution=["$18$"]) == [0.0]
    for reward in (published_correctness_reward, published_accuracy_reward):
        with pytest.raises(RewardError, match="column 'answer'"):
            reward([PERFECT])
    assert published_soft_format_reward([]) == []
    assert published_strict_format_reward([]) == []
    assert published_tag_count_reward([]) == []


def test_importing_the_published_rewards_is_light():
    code = (
        "import sys, rewards.published; "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    modules = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"math_verify", "sympy", "torch"} & set(modules)
