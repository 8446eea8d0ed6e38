"""The cookbook pair: one reward for the form, one for being right.

=====================  ====  ============================================
reward                 pays  when
=====================  ====  ============================================
think_format_reward    1.0   one <think> block, then one <answer> block,
                             and nothing else
accuracy_reward        1.0   the tagged answer equals the gold, a number
                             or any LaTeX
=====================  ====  ============================================

The pair suits golds that are formulas, as in NuminaMath. It is what the Open
R1 project and the GRPO recipe of the Hugging Face cookbook (2025) mean by
such a pair; `rewards.published` has what theirs computes.
"""

from collections.abc import Sequence
from typing import Any

from rewards.five_part import (
    THINK_LAYOUT,
    has_reasoning,
    tags_of,
    words_outside,
)
from rewards.symbolic import accuracy_reward
from rewards.turns import read_turns

FORMAT = 1.0


def think_format_reward(
    completions: Sequence[Any],
    *,
    prefilled: str = "",
    min_reasoning: int = 0,
    **kwargs: Any,
) -> list[float]:
    r"""Pay 1.0 for one <think> and one <answer> block, 0.0 for else.

    `completions` is a list of strings or of message lists, the result has
    one score for each. Inside the blocks any text but another tag is free,
    over any number of lines; white space around them is free, words there
    are not. `prefilled` is the opening tag, where the chat template writes it;
    `min_reasoning` is the least number of characters between the think tags,
    as the recipe advises, so that an empty block earns nothing.
    Raises RewardError when it is anything else.

    >>> good = "<think>9 + 9\nmakes 18.</think>\n<answer>18</answer>"
    >>> think_format_reward([good, good + "!", good + good])
    [1.0, 0.0, 0.0]
    >>> think_format_reward(["9+9</think><answer>18</answer>"])
    [0.0]
    >>> think_format_reward(["9+9</think><answer>18</answer>"],
    ...                     prefilled="<think>")
    [1.0]

    Source: the format reward of Open R1 and the Hugging Face cookbook,
    ``^<think>.*?</think>\s*<answer>.*?</answer>$``, done right.
    """
    return [
        FORMAT * (_is_well_formed(text) and has_reasoning(text, min_reasoning))
        for text in read_turns(completions, prefilled)
    ]


COOKBOOK = (think_format_reward, accuracy_reward)


def _is_well_formed(text: str) -> bool:
    return tags_of(text) == THINK_LAYOUT and not words_outside(text)
