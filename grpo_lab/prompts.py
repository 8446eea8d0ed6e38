"""What the policy is told to do, and how a question becomes a prompt.

The reward functions ask for tags, so something has to tell the model about
them: the system prompt. It names the tags and says what goes between them.
It never shows a filled-in example such as "reasoning process here", because
a policy soon learns that copying such a placeholder earns the format reward.
"""

from collections.abc import Sequence
from typing import Any

REASONING_PROMPT = (
    "Solve the problem step by step. Write your steps between <reasoning> "
    "and </reasoning>, then only the final number between <answer> and "
    "</answer>."
)
"""For number answers (GSM8K): the tags of `rewards.FIVE_PART`."""

THINK_PROMPT = (
    "Solve the problem. Write your thoughts between <think> and </think>, "
    "then the final result in LaTeX between <answer> and </answer>."
)
"""For LaTeX answers (NuminaMath-TIR)."""

PUBLISHED_THINK_PROMPT = (
    "A conversation between User and Assistant. The user asks a question, and "
    "the Assistant solves it. The assistant first thinks about the reasoning "
    "process in the mind and then provides the user with the answer. The "
    "reasoning process and answer are enclosed within <think> </think> and "
    "<answer> </answer> tags, respectively, i.e., <think> reasoning process "
    "here </think><answer> answer here </answer>"
)
"""That of the Cookbook's recipe, with the example that a policy can copy.

Quoted from DeepSeek-R1 (2025, arXiv:2501.12948), table 1, and the recipe.
"""

_STEPS = "Solve the problem step by step."
_THOUGHTS = f"{_STEPS} Write your thoughts between <think> and </think>"

THINK_NUMBER_PROMPT = (
    f"{_THOUGHTS}, then, on a new line, only the final number between "
    "<answer> and </answer>."
)
"""For number answers in the tags of AgileRL's Arena tutorial."""

FORM_PROMPTS = {
    "<reasoning> and <answer>": REASONING_PROMPT,
    "<reasoning> and <answer>, a line each": REASONING_PROMPT,
    "<think> and <answer>": THINK_NUMBER_PROMPT,
    "<think> and <answer>, a line each": THINK_NUMBER_PROMPT,
    "<answer> after a <think> that the prompt has opened": (
        THINK_NUMBER_PROMPT
    ),
    "<think>, then a box in <answer>": (
        f"{_THOUGHTS}, then the final number in \\boxed{{}} between "
        "<answer> and </answer>."
    ),
    "a box": f"{_STEPS} Put the final number in \\boxed{{}}.",
    "#### and the answer": (
        f"{_STEPS} Write the final number alone on the last line, after ####."
    ),
    "The answer is ...": (
        f"{_STEPS} End with a sentence that begins with 'The answer is' and "
        "holds the final number."
    ),
    "the answer alone": "Answer with the final number and nothing else.",
}
"""A prompt for each form that `check_reward` finds to earn most.

The names are those of `rewards.contract.probes.FORMS`.
"""

TEMPLATE_VALUES = {"date_string": "26 Jul 2024"}
"""What every chat template is given beside the messages.

Llama 3's template writes today's date into the system message unless it is
told one, so that the same run would see another prompt tomorrow.
"""


def messages(question: str, system_prompt: str) -> list[dict[str, str]]:
    """The system and user messages after which the policy generates.

    They have the form that chat templates and TRL's conversational data sets
    take.
    """
    return [
        {"role": "system", "content": system_prompt},
        {"role": "user", "content": question},
    ]


def longest_prompt(tokenizer: Any, prompts: Sequence[list[dict]]) -> int:
    """Tokens of the longest prompt, rendered with the chat template."""
    rendered = tokenizer.apply_chat_template(
        list(prompts),
        add_generation_prompt=True,
        return_dict=True,
        **TEMPLATE_VALUES,
    )
    return max(len(ids) for ids in rendered["input_ids"])
