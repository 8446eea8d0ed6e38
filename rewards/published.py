r"""Rewards as published, faults and all: to compare with, never to train on.

What the most copied GRPO rewards compute, written afresh from descriptions of
them. Nothing here is mended. For training take `rewards.five_part` and
`rewards.cookbook`, which mean the same and get it right.

=============================  ==========================================
reward                         what it gets wrong
=============================  ==========================================
published_correctness_reward   "18.0", "$18" and "1,000" are wrong where
                               the gold is 18 or 1000; without tags the
                               whole text is the answer, and a gold
                               "None" equals the answer "None"
published_integer_reward       "-3", "18.0" and "1,000" are no integers
published_strict_format_reward reasoning over two lines pays nothing, nor
                               does a text without a last newline
published_soft_format_reward   a newline in a block pays nothing, so that
                               strict and soft exclude each other; nor
                               does a word before it; doubled blocks pay
published_tag_count_reward     without a last newline every character of
                               a right answer costs, and a long text goes
                               far below zero; tags in a line count not
published_think_format_reward  reasoning over two lines pays nothing;
                               doubled blocks pay
published_accuracy_reward      a gold that can't be parsed pays 1.0; reads
                               the whole completion, so a guess in the
                               reasoning pays and a plain tagged 18 does
                               not; answer and gold are swapped; its time
                               limit works in the main thread only
published_arena_reward         "-3" equals 3 and "18.5" equals 18; a unit
                               or words before the number don't matter;
                               the first block counts, also one in the
                               reasoning
=============================  ==========================================

`rewards` itself exports none of them, so that nobody trains on one by
accident: `from rewards.published import FIVE_PART_AS_PUBLISHED`.
"""

import re
from collections.abc import Sequence
from typing import Any

from rewards.batch import completion_texts, gold_column

_STRICT = re.compile(
    r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n$"
)
_SOFT = re.compile(r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>")
_THINK = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$")
_ARENA_FORM = re.compile(
    r"<think>.*?</think>\n<answer>.*?</answer>", re.DOTALL
)
_ARENA_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_DIGITS_AND_COMMAS = re.compile(r"[0-9][0-9,]*")
_END_TAG = "\n</answer>\n"
_TAGS = ("<reasoning>\n", "\n</reasoning>\n", "\n<answer>\n", "\n</answer>")


# --- The five-part set (William Brown's GRPO demo for GSM8K, 2025) ----------


def published_correctness_reward(
    completions: Sequence[Any], answer: Any = None, **kwargs: Any
) -> list[float]:
    """Pay 2.0 if the text in the last answer tags is the gold, as a string.

    `completions` and the golds are as in `rewards.five_part`; of a gold with
    ``####`` the text after it counts. The whole completion is the answer when
    it has no <answer>. Raises RewardError when the golds don't fit.

    >>> texts = ["<answer>18</answer>", "<answer>18.0</answer>", "18"]
    >>> published_correctness_reward(texts, answer=["#### 18"] * 3)
    [2.0, 0.0, 2.0]

    Source: William Brown's GRPO demo for GSM8K (2025).
    """
    golds = gold_column(completions, {"answer": answer, **kwargs})
    return [
        2.0 * (_between_tags(text) == str(gold).rpartition("####")[2].strip())
        for text, gold in zip(
            completion_texts(completions), golds, strict=True
        )
    ]


def published_integer_reward(
    completions: Sequence[Any], **kwargs: Any
) -> list[float]:
    """Pay 0.5 if the text in the last answer tags is all digits.

    >>> texts = ["<answer>18</answer>", "<answer>-18</answer>", "18"]
    >>> published_integer_reward(texts)
    [0.5, 0.0, 0.5]

    Source: William Brown's GRPO demo for GSM8K (2025).
    """
    return [
        0.5 * _between_tags(text).isdigit()
        for text in completion_texts(completions)
    ]


def published_strict_format_reward(
    completions: Sequence[Any], **kwargs: Any
) -> list[float]:
    r"""Pay 0.5 for a line of reasoning and a line of answer between newlines.

    >>> text = "<reasoning>\n9+9\n</reasoning>\n<answer>\n18\n</answer>\n"
    >>> published_strict_format_reward(
    ...     [text, text.strip(), text.replace("9+9", "9\n+9")])
    [0.5, 0.0, 0.0]

    Source: William Brown's GRPO demo for GSM8K (2025).
    """
    return [
        0.5 * bool(_STRICT.match(text))
        for text in completion_texts(completions)
    ]


def published_soft_format_reward(
    completions: Sequence[Any], **kwargs: Any
) -> list[float]:
    r"""Pay 0.5 for a text that begins with a one-line reasoning and answer.

    >>> text = "<reasoning>9+9</reasoning> <answer>18</answer> or 19"
    >>> published_soft_format_reward([text, "So: " + text])
    [0.5, 0.0]

    Source: William Brown's GRPO demo for GSM8K (2025).
    """
    return [
        0.5 * bool(_SOFT.match(text)) for text in completion_texts(completions)
    ]


def published_tag_count_reward(
    completions: Sequence[Any], **kwargs: Any
) -> list[float]:
    r"""Pay 0.125 for each tag that is there once, less 0.001 a character.

    A tag counts with the newlines of its own line only. The characters are
    those after the end tag with its newline, or all of the text where that is
    absent; many copies take them off once more for the end tag without its
    newline. There is no least: the range is from below any number to 0.5.

    >>> text = "<reasoning>\n9+9\n</reasoning>\n<answer>\n18\n</answer>\n"
    >>> texts = [text, text[:-1], text + "x" * 999, "18"]
    >>> [round(score, 3) for score in published_tag_count_reward(texts)]
    [0.5, 0.45, -0.499, -0.002]

    Source: William Brown's GRPO demo for GSM8K (2025).
    """
    return [
        0.125 * sum(text.count(tag) == 1 for tag in _TAGS)
        - 0.001 * len(text.split(_END_TAG)[-1])
        for text in completion_texts(completions)
    ]


FIVE_PART_AS_PUBLISHED = (
    published_correctness_reward,
    published_integer_reward,
    published_strict_format_reward,
    published_soft_format_reward,
    published_tag_count_reward,
)


def _between_tags(text: str) -> str:
    """Return what is after the last <answer> and before the next </answer>."""
    if "<answer>" not in text:
        return text.strip()
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


# --- The cookbook pair (Hugging Face cookbook and Open R1, 2025) ------------


def published_think_format_reward(
    completions: Sequence[Any], **kwargs: Any
) -> list[float]:
    r"""Pay 1.0 for a one-line think block, then a one-line answer block.

    >>> text = "<think>9+9</think><answer>18</answer>"
    >>> lines = text.replace("+", "\n+")
    >>> published_think_format_reward([text, lines, text * 2])
    [1.0, 0.0, 1.0]

    Source: the GRPO recipe of the Hugging Face cookbook and Open R1 (2025).
    """
    return [
        float(bool(_THINK.match(text)))
        for text in completion_texts(completions)
    ]


def published_accuracy_reward(
    completions: Sequence[Any],
    solution: Any = None,
    *,
    parsing_timeout: Any = 5,
    timeout_seconds: Any = 5,
    **kwargs: Any,
) -> list[float]:
    r"""Pay 1.0 where math_verify finds the gold in the completion, or no gold.

    The two limits are math_verify's own, in seconds. They use an alarm of the
    process, which ends any alarm of the caller; outside of the main thread
    math_verify refuses to work, or prints that it gives up, unless both are
    None. Needs the package math-verify, and some inputs hang it whatever the
    limits: give it only texts that you know.

    >>> texts = [r"$\frac{1}{2}$", "<answer>18</answer>", "any text"]
    >>> golds = ["$0.5$", "$18$", "a gold without maths"]
    >>> published_accuracy_reward(texts, solution=golds)
    [1.0, 0.0, 1.0]

    Source: the GRPO recipe of the Hugging Face cookbook and Open R1 (2025).
    """
    from math_verify import LatexExtractionConfig, parse, verify

    def parsed(text: str) -> Any:
        return parse(
            text,
            extraction_config=[LatexExtractionConfig()],
            extraction_mode="first_match",
            parsing_timeout=parsing_timeout,
        )

    def score(text: str, gold: str) -> float:
        parsed_gold = parsed(str(gold))
        if not parsed_gold:
            return 1.0
        # The order that math_verify documents is gold, then answer.
        swapped = parsed(text), parsed_gold
        return float(verify(*swapped, timeout_seconds=timeout_seconds))

    golds = gold_column(
        completions, {"solution": solution, **kwargs}, first="solution"
    )
    texts = completion_texts(completions)
    return [score(*pair) for pair in zip(texts, golds, strict=True)]


COOKBOOK_AS_PUBLISHED = (
    published_think_format_reward,
    published_accuracy_reward,
)


# --- The Arena tutorial's reward.py ------------------------------------------


def published_arena_reward(
    question: str, answer: str, completion: str
) -> float:
    r"""Pay 1.0 for the first number in the first answer block, 1.0 for form.

    Called by keyword with three texts, for one completion; returns 0.0, 1.0
    or 2.0. The chat template of that tutorial writes "<think>", which is put
    in front of the completion before the form is looked at.

    >>> text = "9+9</think>\n<answer>18</answer>"
    >>> published_arena_reward("?", "#### 18", text)
    2.0
    >>> published_arena_reward("?", "#### -18", text)
    2.0

    Source: AgileRL's Arena tutorial, its reward.py.
    """
    block = _ARENA_ANSWER.search(completion)
    given = _digits_and_commas(block[1]) if block else None
    gold = _digits_and_commas(str(answer).rpartition("####")[2])
    right = given is not None and given == gold
    form = _ARENA_FORM.match("<think>" + completion)
    return float(right) + float(bool(form))


def _digits_and_commas(text: str) -> str | None:
    """Return the first run of digits and commas without its commas."""
    number = _DIGITS_AND_COMMAS.search(text)
    return number and number[0].replace(",", "")
