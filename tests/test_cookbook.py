"""The cookbook pair: form and accuracy, 1.0 each."""

import pickle

import pytest

from rewards import RewardError
from rewards.cookbook import COOKBOOK, think_format_reward
from rewards.options import with_options

GOOD = "<think>\n9 + 9\nmakes 18.\n</think>\n<answer>\n18\n</answer>"


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        (GOOD, 1.0),
        (GOOD.replace("\n", ""), 1.0),
        (GOOD.replace("\n", "\r\n"), 1.0),
        (f"\n{GOOD}\n", 1.0),
        (GOOD + "<|im_end|>\n", 1.0),
        (GOOD.replace("9 + 9", "3 < 5 & \\frac{1}{2}"), 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("So: " + GOOD, 0.0),
        (GOOD + " I hope.", 0.0),
        (GOOD.replace("<answer>", "so <answer>"), 0.0),
        (GOOD * 2, 0.0),
        ("<think>a</think><think>b</think><answer>5</answer>", 0.0),  # F05
        ("<think>a</think>" * 3 + "<answer>5</answer>", 0.0),  # H09
        (GOOD.replace("18\n", "18</answer>"), 0.0),
        ("<answer>18</answer><think>x</think>", 0.0),
        ("<think>x<answer>18</answer></think>", 0.0),
        (GOOD.replace("think>", "reasoning>"), 0.0),
        (GOOD.replace("makes", "<reasoning>"), 0.0),
        (GOOD.removeprefix("<think>"), 0.0),
        ("I do not need a </think> tag here.", 0.0),
        ("18", 0.0),
        ("", 0.0),
    ],
)
def test_the_form_is_two_blocks_and_nothing_else(text, paid):
    assert think_format_reward([text]) == [paid]
    chat = [[{"role": "assistant", "content": text}]]
    assert think_format_reward(completions=chat, prompts=["?"]) == [paid]


def test_the_template_may_have_written_the_opening_tag():
    text = GOOD.removeprefix("<think>\n")
    bound = with_options(think_format_reward, prefilled="<think>\n")
    assert bound([text, GOOD, ""]) == [1.0, 0.0, 0.0]
    assert think_format_reward([text]) == [0.0]
    with pytest.raises(RewardError, match="opening reasoning tag"):
        think_format_reward([text], prefilled="<think>so")


def test_the_pair_is_form_and_accuracy():
    assert [reward.__name__ for reward in COOKBOOK] == [
        "think_format_reward",
        "accuracy_reward",
    ]
    assert pickle.loads(pickle.dumps(COOKBOOK)) == COOKBOOK
