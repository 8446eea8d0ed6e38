r"""What the policy said as its answer: one turn, without its reasoning.

A completion may hold more than that: tokens that end a turn, a question that
the model asks itself and answers, reasoning in tags or in a channel of its
own. What is left here is what `rewards.answers` reads.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rewards.batch import RewardError, completion_texts

_END_OF_TURN = re.compile(
    r"<(?:\|(?:im_end|eot_id|eot|eom_id|end_of_text|endoftext|end|return|call"
    # a turn of somebody else begins
    r"|im_start|start_header_id|start|user)\|>"
    r"|(?:end|start)_of_turn>|eos>|/s>|｜(?:end▁of▁sentence|User)｜>)"
)
_INSTRUCTION = "[INST]"  # and here
_OWN_HEADER = re.compile(
    r"\s*(?:<\|im_start\|>assistant|<start_of_turn>model|<\|start\|>assistant"
    r"|<\|start_header_id\|>assistant<\|end_header_id\|>|<｜Assistant｜>)\s*"
)
# gpt-oss: with its special tokens, and with what is left without them
_FINAL_CHANNEL = re.compile(r"<\|channel\|>\s*final\s*(?:<\|[^|]*\|>)+")
_BARE_CHANNELS = re.compile(r"analysis.*?(?:assistantfinal|\Z)", re.DOTALL)
_BARE_ANALYSIS = re.compile(r"analysis(?=[A-Z0-9]|<\|message\|>)")
_ATTRIBUTES = r"(?:\s[^<>]*)?>"
_REASONING_TAG = re.compile(
    rf"<(/?)(?:reasoning|think(?:ing)?|thoughts?|reflection|scratchpad"
    rf"|reason|rationale|analysis)"
    rf"{_ATTRIBUTES}",
    re.IGNORECASE,
)
# Other spellings of these tags, and theirs.
_OTHER_TAGS = {
    "[THINK]": "<think>",
    "[/THINK]": "</think>",
    "◁think▷": "<think>",
    "◁/think▷": "</think>",
    "<|begin_of_thought|>": "<think>",
    "<|end_of_thought|>": "</think>",
}
_OTHER_TAG = re.compile("|".join(map(re.escape, _OTHER_TAGS)))
_NEXT_QUESTION = re.compile(
    r"\n[ \t]*(?:\*\*|#{1,4} ?)?(?:(?:next |new |another )?"
    r"(?:question|problem|exercise|task)|human|user|instruction|q)"
    r"(?: *[0-9]{1,3})?(?:\*\*)?(?: ?[:.)]|[ \t]*(?=\n))",
    re.IGNORECASE,
)


def first_turn(text: str) -> str:
    """Return what the policy says in its own turn, its final channel only.

    >>> first_turn("<answer>18</answer><|im_end|>\\n<answer>5</answer>")
    '<answer>18</answer>'
    >>> first_turn("<|channel|>analysis<|message|>Is it 17?<|end|><|start|>"
    ...     "assistant<|channel|>final<|message|>18<|return|>")
    '18'
    """
    # Most texts have none of it, and are told at once.
    if not (
        "<|" in text or "_turn>" in text or "｜" in text or "s>" in text
        or _INSTRUCTION in text or text.startswith("analysis")
    ):  # fmt: skip
        return text
    if "<|channel|>" in text:
        final = list(_FINAL_CHANNEL.finditer(text))
        text = text[final[-1].end() :] if final else ""
    elif text.startswith("analysis") and (
        "assistantfinal" in text or _BARE_ANALYSIS.match(text)
    ):
        text = _BARE_CHANNELS.sub("", text, count=1)
    if header := _OWN_HEADER.match(text):
        text = text[header.end() :]
    if _INSTRUCTION in text:
        text = text.partition(_INSTRUCTION)[0]
    end = _END_OF_TURN.search(text)
    return text[: end.start()] if end else text


def read_turns(completions: Sequence[Any], prefilled: str = "") -> list[str]:
    r"""Return what the policy said in each completion of a batch, as texts.

    `completions` is what a trainer hands over, the result has one string for
    each, cut at the first end-of-turn token. Some chat templates write the
    opening reasoning tag themselves, so that the completion begins after it:
    `prefilled` is the text that the template wrote, and is put in front.
    Raises RewardError when `prefilled` is anything but one opening reasoning
    tag and white space, as it would count as said by the policy.

    >>> read_turns(["So.</think> 18<|im_end|>"], prefilled="<think>\n")
    ['<think>\nSo.</think> 18']
    """
    if prefilled and not (
        isinstance(prefilled, str)
        and prefilled.strip() in ("<reasoning>", "<think>")
    ):
        raise RewardError(
            f"The prefilled text is {prefilled!r:.60}, but it may only be the "
            "opening reasoning tag that the chat template writes at the start "
            "of a completion, with white space. Type "
            r"prefilled='<think>\n' or prefilled='<reasoning>\n' as your "
            "template has it, or leave it out."
        )
    return [
        prefilled + first_turn(text) for text in completion_texts(completions)
    ]


def after_reasoning(text: str) -> str:
    """Return what follows the last reasoning tag; "" if that tag opens.

    >>> after_reasoning("<think>9+9</think> 18"), after_reasoning("[THINK]18")
    (' 18', '')
    """
    if "THINK]" in text or "◁" in text or "_of_thought|>" in text:
        text = _OTHER_TAG.sub(lambda tag: _OTHER_TAGS[tag[0]], text)
    tags = list(_REASONING_TAG.finditer(text))
    if not tags:
        return text
    return text[tags[-1].end() :] if tags[-1][1] else ""


def before_next_question(
    text: str, has_answer: Callable[[str], object]
) -> str:
    """Return `text` up to a question that follows an answer to the first.

    A model that does not stop asks itself the next question and answers that.

    >>> text = "#### 8\\nQuestion: 1+1?\\n#### 2"
    >>> before_next_question(text, lambda before: "####" in before)
    '#### 8'
    """
    for found in _NEXT_QUESTION.finditer(text):
        before = text[: found.start()]
        if has_answer(before):
            return before
    return text
