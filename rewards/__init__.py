r"""Reward functions for GRPO on maths, for any trainer with TRL's signature.

>>> from rewards import FIVE_PART, MAX_REWARD, accuracy_reward
>>> good = "<reasoning>\n9+9 = 18\n</reasoning>\n<answer>\n18\n</answer>"
>>> [part([good], answer=["#### 18"]) for part in FIVE_PART]
[[2.0], [0.5], [0.5], [0.5], [0.5]]
>>> MAX_REWARD
4.0
>>> accuracy_reward([good], solution=[r"$\boxed{\sqrt{324}}$"])
[1.0]

What a reward is made of, from the text of a completion to its score:

- `batch`: what the trainer hands over, checked
- `answers`: where the answer stands in a text, by named policies
- `numbers`: one number, read exactly; `notation`: lists, intervals, equations
- `expressions`: whether two mathematical texts mean the same
- `workers`: processes for what may hang, killed at a deadline
- `health`: what became of each completion, counted and logged

The rewards themselves:

- `five_part`: five parts for numbers in tags, 4.0 in all
- `symbolic`: accuracy for golds in LaTeX, 1.0
- `cookbook`: the format and accuracy pair for <think> and <answer>
- `published`: what widely copied sets compute, faults and all, to compare
- `contract`: your own reward file, run apart and proved before training

Nothing here needs torch or transformers.
"""

from rewards.answers import (
    POLICIES,
    extract_answer,
    gold_answer,
    gold_number,
    is_correct,
)
from rewards.batch import RewardError
from rewards.contract import check_reward, load_reward
from rewards.cookbook import COOKBOOK, think_format_reward
from rewards.five_part import (
    FIVE_PART,
    MAX_REWARD,
    RANGES,
    correctness_reward,
    integer_reward,
    reward_set,
    soft_format_reward,
    strict_format_reward,
    tag_count_reward,
)
from rewards.health import FailureLimit, Outcome
from rewards.numbers import parse_number
from rewards.options import with_options
from rewards.symbolic import (
    accuracy_reward,
    is_equivalent,
    unusable_golds,
)

__all__ = [
    "COOKBOOK",
    "FIVE_PART",
    "FailureLimit",
    "MAX_REWARD",
    "POLICIES",
    "RANGES",
    "Outcome",
    "RewardError",
    "accuracy_reward",
    "check_reward",
    "correctness_reward",
    "extract_answer",
    "gold_answer",
    "gold_number",
    "integer_reward",
    "is_correct",
    "is_equivalent",
    "load_reward",
    "parse_number",
    "reward_set",
    "soft_format_reward",
    "strict_format_reward",
    "tag_count_reward",
    "think_format_reward",
    "unusable_golds",
    "with_options",
]
