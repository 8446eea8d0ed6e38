"""The five-part reward set: one part for being right, four for the form.

=======================  =======  ==========================================
part                     pays     when
=======================  =======  ==========================================
correctness_reward       2.0      the tagged answer equals the gold
integer_reward           0.5      the tagged answer is an integer
                                  (never where the gold is not one)
strict_format_reward     0.5      the two blocks, and nothing else
soft_format_reward       0.5      the two blocks, words around them allowed
tag_count_reward         0 - 0.5  0.125 for each tag that is there just once
=======================  =======  ==========================================

The two blocks are ``<reasoning> ... </reasoning>`` and then ``<answer> ...
</answer>``; a model that writes ``<think>`` for ``<reasoning>`` is welcome.

All five can be earned at once, 4.0 in all. The form alone never reaches what
a right answer gets, so a policy gains most by being right; but the form is
easy to find, and gives an untrained policy something to climb.

Each function scores a batch, as TRL calls it: `completions` is a list of
strings or of message lists, the columns of the dataset follow by name, and
the result has one score for each completion. To weigh the parts differently
give TRL's `GRPOConfig(reward_weights=[...])` one factor for each part.

The idea of five such parts, and their sizes, come from the GRPO demo for
GSM8K by William Brown (2025), which many tutorials copy.
"""

import re

from rewards.answers import (
    extract_answer,
    first_turn,
    gold_number,
    is_correct,
)
from rewards.batch import completion_texts, gold_column
from rewards.numbers import parse_number

CORRECT = 2.0
INTEGER = 0.5
STRICT_FORMAT = 0.5
SOFT_FORMAT = 0.5
TAG = 0.125
TAIL_PENALTY = 0.001  # for each character after the end tag

_TAG = re.compile(r"</?(?:reasoning|think|answer)>")
# All tags of a well-formed completion, in order, in both families.
_LAYOUTS = (
    ["<reasoning>", "</reasoning>", "<answer>", "</answer>"],
    ["<think>", "</think>", "<answer>", "</answer>"],
)


def correctness_reward(completions, answer=None, **kwargs):
    """Pay 2.0 for the right answer in the tags, 0.0 for anything else.

    `answer` holds the gold answers (GSM8K's text with ``####``, or a number;
    a column named `solution` or `ground_truth` works too). A gold that can't
    be read gives None, which TRL leaves out of the sum. Raises RewardError
    when the golds are missing or are not one for each completion.

    >>> right, bare = "<answer>18.0</answer>", "18"
    >>> correctness_reward([right, bare], answer=["#### 18", "#### 18"])
    [2.0, 0.0]
    >>> correctness_reward([right], answer=["no number in here"])
    [None]
    """
    golds = gold_column(completions, answer=answer, **kwargs)
    verdicts = map(is_correct, completion_texts(completions), golds)
    return [None if right is None else CORRECT * right for right in verdicts]


def integer_reward(completions, **kwargs):
    """Pay 0.5 for an integer in the answer tags, 0.0 for anything else.

    Where the gold is known and is no integer, an integer can't be right and
    pays nothing: else a wrong answer in perfect form would reach 2.0, which
    is all that a right fraction without any form gets.

    >>> integer_reward(["<answer>18</answer>", "<answer>1/2</answer>", "18"])
    [0.5, 0.0, 0.0]
    >>> integer_reward(["<answer>18</answer>"], answer=["1/2"])
    [0.0]
    """
    texts = completion_texts(completions)
    golds = gold_column(completions, optional=True, **kwargs)
    return [
        INTEGER * _fitting_integer(text, gold)
        for text, gold in zip(texts, golds, strict=True)
    ]


def strict_format_reward(completions, **kwargs):
    r"""Pay 0.5 for one reasoning block, one answer block, and nothing else.

    White space around the blocks is free, and inside them any text is.

    >>> blocks = "<reasoning>\n9+9\n</reasoning>\n<answer>\n18\n</answer>"
    >>> strict_format_reward([blocks, blocks + "\n", "So: " + blocks])
    [0.5, 0.5, 0.0]
    """
    return [
        STRICT_FORMAT * (_has_both_blocks(text) and not _outside(text))
        for text in _turns(completions)
    ]


def soft_format_reward(completions, **kwargs):
    """Pay 0.5 for the two blocks in order, each tag once, words around free.

    >>> blocks = "<reasoning>9+9</reasoning> <answer>18</answer>"
    >>> soft_format_reward([blocks, "So: " + blocks, blocks + blocks])
    [0.5, 0.5, 0.0]
    """
    return [
        SOFT_FORMAT * _has_both_blocks(text) for text in _turns(completions)
    ]


def tag_count_reward(completions, **kwargs):
    """Pay 0.125 for each of the four tags that is there exactly once.

    Every character after the last end tag costs 0.001, so that a policy
    learns to stop there; the result never falls below 0.

    >>> tag_count_reward(["<reasoning>9+9</reasoning><answer>18</answer>"])
    [0.5]
    >>> tag_count_reward(["9+9 is <answer>18", "<answer>18</answer> I hope"])
    [0.125, 0.244]
    """
    return [_tag_count(text) for text in _turns(completions)]


# The least and the most that each part pays.
RANGES = {
    correctness_reward: (0.0, CORRECT),
    integer_reward: (0.0, INTEGER),
    strict_format_reward: (0.0, STRICT_FORMAT),
    soft_format_reward: (0.0, SOFT_FORMAT),
    tag_count_reward: (0.0, 4 * TAG),
}
FIVE_PART = tuple(RANGES)
MAX_REWARD = sum(most for _, most in RANGES.values())


def _turns(completions):
    return map(first_turn, completion_texts(completions))


def _fitting_integer(text, gold):
    number = parse_number(extract_answer(text) or "")
    expected = gold_number(gold)
    return (
        number is not None
        and number.denominator == 1
        and (expected is None or expected.denominator == 1)
    )


def _has_both_blocks(text):
    return _TAG.findall(text) in _LAYOUTS


def _outside(text):
    """Return the words around the two blocks of a well-formed text."""
    before, _, between, _, after = _TAG.split(text)
    return (before + between + after).strip()


def _tag_count(text):
    tags = _TAG.findall(text)
    once = max(
        sum(tags.count(tag) == 1 for tag in layout) for layout in _LAYOUTS
    )
    _, end_tag, tail = text.rpartition("</answer>")
    penalty = TAIL_PENALTY * len(tail.strip()) if end_tag else 0.0
    return max(0.0, TAG * once - penalty)
