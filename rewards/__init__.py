"""Reward functions for GRPO on maths, for any trainer with TRL's signature.

>>> from rewards import FIVE_PART, MAX_REWARD
>>> good = "<reasoning>9 + 9 = 18</reasoning>\\n<answer>18</answer>"
>>> [part([good], answer=["#### 18"]) for part in FIVE_PART]
[[2.0], [0.5], [0.5], [0.5], [0.5]]
>>> MAX_REWARD
4.0

`five_part` is the reward set, `answers` takes the answer out of a completion
and compares it with the gold, `numbers` reads a number exactly, `batch`
checks what the trainer hands over. Nothing here needs torch or transformers.
"""

from rewards.answers import (
    POLICIES,
    extract_answer,
    gold_number,
    is_correct,
)
from rewards.batch import RewardError
from rewards.five_part import (
    FIVE_PART,
    MAX_REWARD,
    RANGES,
    correctness_reward,
    integer_reward,
    soft_format_reward,
    strict_format_reward,
    tag_count_reward,
)
from rewards.numbers import parse_number

__all__ = [
    "FIVE_PART",
    "MAX_REWARD",
    "POLICIES",
    "RANGES",
    "RewardError",
    "correctness_reward",
    "extract_answer",
    "gold_number",
    "integer_reward",
    "is_correct",
    "parse_number",
    "soft_format_reward",
    "strict_format_reward",
    "tag_count_reward",
]
