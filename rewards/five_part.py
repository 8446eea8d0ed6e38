"""The five-part reward set: one part for being right, four for the form.

=======================  =======  ==========================================
part                     pays     when
=======================  =======  ==========================================
correctness_reward       2.0      the tagged answer equals the gold
integer_reward           0.5      the tagged answer is an integer
                                  (never where the gold is not one)
strict_format_reward     0.5      the two blocks, each of the four tags on a
                                  line of its own, and nothing else
soft_format_reward       0.5      the two blocks, words around them allowed
tag_count_reward         0 - 0.5  0.125 for each tag that is there just once
=======================  =======  ==========================================

The two blocks are ``<reasoning> ... </reasoning>`` and then ``<answer> ...
</answer>``; a model that writes ``<think>`` for ``<reasoning>`` is welcome.

All five can be earned at once, 4.0 in all. The form alone never reaches what
a right answer gets, so a policy gains most by being right; but the form is
easy to find, and gives an untrained policy something to climb.

Where the chat template writes the opening reasoning tag itself, the policy
never says it. Tell the parts so with the option `prefilled`, the very text
that the template wrote: every part then reads prefilled + completion.

`reward_set` sets weights and options, and refuses weights with which a wrong
answer in good form could score as much as a right one; TRL's own
`GRPOConfig(reward_weights=[...])` works too, but refuses nothing.

The idea of five such parts, and their sizes, come from the GRPO demo for
GSM8K by William Brown (2025), which many tutorials copy.
"""

import functools
import math
import numbers
import re
from collections.abc import Callable, Sequence
from typing import Any

from rewards.answers import answer_in_turn, compare_numbers, gold_number
from rewards.batch import RewardError, gold_column
from rewards.health import Outcome, report
from rewards.numbers import parse_number
from rewards.options import with_options
from rewards.turns import read_turns

Reward = Callable[..., Any]
"""A function with TRL's signature."""

CORRECT = 2.0
INTEGER = 0.5
STRICT_FORMAT = 0.5
SOFT_FORMAT = 0.5
TAG = 0.125
TAIL_PENALTY = 0.001  # for each character after the end tag

_TAG = re.compile(r"</?(?:reasoning|think|answer)>")
# All tags of a well-formed completion, in order, in both families.
THINK_LAYOUT = ["<think>", "</think>", "<answer>", "</answer>"]
_LAYOUTS = (
    ["<reasoning>", "</reasoning>", "<answer>", "</answer>"],
    THINK_LAYOUT,
)


def correctness_reward(
    completions: Sequence[Any],
    answer: Any = None,
    *,
    policy: str = "tagged",
    prefilled: str = "",
    **kwargs: Any,
) -> list[float | None]:
    """Pay 2.0 for the right answer, 0.0 for anything else.

    `answer` holds the gold answers (GSM8K's text with ``####``, or a number;
    a column named `solution` or `ground_truth` works too). A gold that can't
    be read gives None, which TRL leaves out of the sum. `policy` says where
    an answer may stand (see `rewards.answers`): in the tags, unless another
    is chosen. Raises RewardError when the golds are missing or are not one
    for each completion, and for an unknown policy or prefilled text. What
    could not be graded is reported to the trainer, see `rewards.health`.

    >>> right, bare = "<answer>18.0</answer>", "18"
    >>> correctness_reward([right, bare], answer=["#### 18", "#### 18"])
    [2.0, 0.0]
    >>> correctness_reward([right], answer=["no number in here"])
    [None]

    Source: William Brown's GRPO demo for GSM8K (2025).
    """
    golds = gold_column(completions, {"answer": answer, **kwargs})
    turns = read_turns(completions, prefilled)
    answers = [answer_in_turn(text, policy) for text in turns]
    outcomes = list(map(compare_numbers, answers, golds))
    report("correctness_reward", outcomes, {"answer": answers}, **kwargs)
    return [outcome.score(CORRECT) for outcome in outcomes]


def integer_reward(
    completions: Sequence[Any], *, prefilled: str = "", **kwargs: Any
) -> list[float]:
    """Pay 0.5 for an integer in the answer tags, 0.0 for anything else.

    Where the gold is known, it decides too, so that no wrong answer in
    perfect form, 2.0 at most, reaches a right one without any form. Where it
    is no integer, an integer can't be right and pays nothing; where it is
    one, every right answer counts as one, "(A) 18" and "x ≈ 18" too.

    >>> integer_reward(["<answer>18</answer>", "<answer>1/2</answer>", "18"])
    [0.5, 0.0, 0.0]
    >>> integer_reward(["<answer>18</answer>"], answer=["1/2"])
    [0.0]
    >>> integer_reward(["<answer>(A) 18</answer>"], answer=["18"])
    [0.5]

    Source: William Brown's GRPO demo for GSM8K (2025).
    """
    golds = gold_column(completions, kwargs, optional=True)
    return [
        INTEGER * _fitting_integer(text, gold)
        for text, gold in zip(
            read_turns(completions, prefilled), golds, strict=True
        )
    ]


def strict_format_reward(
    completions: Sequence[Any],
    *,
    prefilled: str = "",
    min_reasoning: int = 0,
    **kwargs: Any,
) -> list[float]:
    r"""Pay 0.5 for the two blocks, tags on their own lines, nothing else.

    Inside the blocks any text is free, as long as none of it shares a line
    with a tag; white space, CRLF line ends and a last newline are free.
    `min_reasoning` is the least number of characters between the reasoning
    tags, so that an empty block earns nothing.

    >>> blocks = "<reasoning>\n9+9\n</reasoning>\n<answer>\n18\n</answer>"
    >>> strict_format_reward([blocks, blocks + "\n", "So: " + blocks])
    [0.5, 0.5, 0.0]
    >>> strict_format_reward(["<think>9+9</think><answer>18</answer>"])
    [0.0]
    >>> cut = blocks.removeprefix("<reasoning>\n")
    >>> strict_format_reward([cut], prefilled="<reasoning>\n")
    [0.5]
    >>> strict_format_reward([blocks, blocks], min_reasoning=4)
    [0.0, 0.0]

    Source: William Brown's GRPO demo for GSM8K (2025).
    """
    return [
        STRICT_FORMAT
        * (
            _tags_have_lines(text)
            and not words_outside(text)
            and has_reasoning(text, min_reasoning)
        )
        for text in read_turns(completions, prefilled)
    ]


def soft_format_reward(
    completions: Sequence[Any],
    *,
    prefilled: str = "",
    min_reasoning: int = 0,
    **kwargs: Any,
) -> list[float]:
    """Pay 0.5 for the two blocks in order, each tag once, words around free.

    `min_reasoning` as for `strict_format_reward`.

    >>> blocks = "<reasoning>9+9</reasoning> <answer>18</answer>"
    >>> soft_format_reward([blocks, "So: " + blocks, blocks + blocks])
    [0.5, 0.5, 0.0]

    Source: William Brown's GRPO demo for GSM8K (2025).
    """
    return [
        SOFT_FORMAT
        * (tags_of(text) in _LAYOUTS and has_reasoning(text, min_reasoning))
        for text in read_turns(completions, prefilled)
    ]


def tag_count_reward(
    completions: Sequence[Any], *, prefilled: str = "", **kwargs: Any
) -> list[float]:
    """Pay 0.125 for each of the four tags that is there exactly once.

    Every character after the last end tag costs 0.001, so that a policy
    learns to stop there; the result never falls below 0.

    >>> tag_count_reward(["<reasoning>9+9</reasoning><answer>18</answer>"])
    [0.5]
    >>> tag_count_reward(["9+9 is <answer>18", "<answer>18</answer> I hope"])
    [0.125, 0.244]

    Source: William Brown's GRPO demo for GSM8K (2025).
    """
    return [_tag_count(text) for text in read_turns(completions, prefilled)]


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


def reward_set(
    weights: Sequence[float] | None = None, *, prefilled: str = ""
) -> tuple[Reward, ...]:
    r"""Return the five parts, a tuple in the order of FIVE_PART, as set up.

    `weights` has one factor for each part, by which its pay and its range in
    RANGES are multiplied; without it all are 1. `prefilled` is the opening
    tag that the chat template writes. The functions keep their names.

    Raises RewardError when there are not five weights, when one is negative
    or not finite, when the form alone could reach what a right answer gets,
    and for a prefilled text that is no opening tag.

    >>> parts = reward_set([1, 0, 0.5, 0.5, 2], prefilled="<think>\n")
    >>> text = "9+9=18</think><answer>18</answer>"
    >>> [part([text], answer=["18"])[0] for part in parts]
    [2.0, 0.0, 0.0, 0.25, 1.0]

    Source: the factors are those of TRL's reward_weights; that the form must
    pay less than being right is what reports of hacked rewards teach (Amodei
    et al., 2016, arXiv:1606.06565).
    """
    read_turns([], prefilled)  # refuses what is no opening tag
    parts = [with_options(part, prefilled=prefilled) for part in FIVE_PART]
    if weights is None:
        return tuple(parts)
    weights = list(weights)
    _check_weights(weights)
    return tuple(map(_weighted, parts, weights))


def _weighted(part: Reward, weight: float) -> Reward:
    bound = functools.partial(_multiplied, part, float(weight))
    return functools.update_wrapper(bound, part)


def _multiplied(
    part: Reward, weight: float, /, completions: Sequence[Any], **columns: Any
) -> list[float | None]:
    scores = part(completions, **columns)
    return [None if score is None else weight * score for score in scores]


def _check_weights(weights: list[float]) -> None:
    """Raise RewardError for weights that would teach the wrong thing."""
    if len(weights) != len(FIVE_PART) or not all(map(_is_weight, weights)):
        raise RewardError(
            f"The weights of the five parts are {weights!r:.100}, but "
            f"there must be {len(FIVE_PART)} finite numbers that are not "
            f"negative, one each for {', '.join(_names(FIVE_PART))}. Type "
            "weights=[1, 1, 1, 1, 1] and change what you mean to change."
        )
    right, _, *form = (
        weight * most
        for weight, (_, most) in zip(weights, RANGES.values(), strict=True)
    )
    # A wrong integer may earn the integer part too; but where it may, a
    # right answer earns it for certain, so it makes no difference.
    if sum(form) >= right:
        raise RewardError(
            f"With these weights a right answer pays {right:g} and the form "
            f"alone up to {sum(form):g} ({', '.join(_names(FIVE_PART[2:]))} "
            "together), so a policy could gain as much by writing tags "
            "around anything as by being right. Raise the weight of "
            f"{FIVE_PART[0].__name__}, the first, or lower the last three."
        )


def _is_weight(weight: Any) -> bool:
    return (
        isinstance(weight, numbers.Real)
        and math.isfinite(weight)
        and float(weight) >= 0
    )


def _names(parts: Any) -> list[str]:
    return [part.__name__ for part in parts]


def _fitting_integer(text: str, gold: Any) -> bool:
    expected = gold_number(gold)
    if expected is not None and expected.denominator != 1:
        return False
    answer = answer_in_turn(text)
    number = parse_number(answer or "")
    if number is not None and number.denominator == 1:
        return True
    return compare_numbers(answer, gold) is Outcome.RIGHT


def tags_of(text: str) -> list[str]:
    """Return the tags of a text in their order, those of both families.

    >>> tags_of("So <think>9+9</think> is <answer>18")
    ['<think>', '</think>', '<answer>']
    """
    return _TAG.findall(text)


def words_outside(text: str) -> str:
    """Return the words around the two blocks of a text that has just these.

    >>> words_outside("So <think>9+9</think>, <answer>18</answer>!")
    'So , !'
    """
    before, _, between, _, after = _TAG.split(text)
    return (before + between + after).strip()


def has_reasoning(text: str, least: int) -> bool:
    """Tell whether a text of just the two blocks has so long a reasoning.

    >>> text = "<think> 9+9 </think><answer>18</answer>"
    >>> has_reasoning(text, 3), has_reasoning(text, 4)
    (True, False)
    """
    return len(_TAG.split(text)[1].strip()) >= least


def _tags_have_lines(text: str) -> bool:
    lines = [line.strip() for line in text.splitlines() if _TAG.search(line)]
    return lines in _LAYOUTS


def _tag_count(text: str) -> float:
    tags = tags_of(text)
    once = max(
        sum(tags.count(tag) == 1 for tag in layout) for layout in _LAYOUTS
    )
    _, end_tag, tail = text.rpartition("</answer>")
    penalty = TAIL_PENALTY * len(tail.strip()) if end_tag else 0.0
    return max(0.0, TAG * once - penalty)
