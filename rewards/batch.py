"""What a trainer hands to a reward function, checked.

TRL calls a reward function once per batch, by keyword: the completions, then
every column of the dataset as a list of the same length. Here the texts and
the gold answers are taken out of that call, and a call that can't be scored
is refused with one clear error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

GOLD_COLUMNS = ("answer", "solution", "ground_truth")
# What TRL passes at each call beside the columns of the dataset.
FROM_THE_TRAINER = (
    "completions", "prompts", "completion_ids",
    "trainer_state", "environments", "log_metric", "log_extra",
)  # fmt: skip


class RewardError(ValueError):
    """A reward function was called in a way that can't give a right score.

    The message is one paragraph: what happened, why, and what to type next.
    """


def completion_text(completion: Any) -> str:
    """Return the text of one completion, plain or conversational.

    A plain completion is a string. A conversational one is a list of
    messages, and the last one is what the policy said: "" if it has no text,
    as a call of a tool has none, or if a tool said it. Raises RewardError
    for anything else.

    >>> completion_text("18")
    '18'
    >>> completion_text([{"role": "assistant", "content": "18"}])
    '18'
    >>> completion_text([{"role": "tool", "content": "18"}])
    ''
    """
    if isinstance(completion, str):
        return completion
    try:
        last = completion[-1] if len(completion) else {}
        said = last.get("role", "assistant") == "assistant"
        text = content_text(last.get("content")) if said else ""
    except (AttributeError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise RewardError(
            "A completion is a string or a list of messages, such as "
            "[{'role': 'assistant', 'content': '18'}], and this one has no "
            f"text: {type(completion).__name__} {completion!r:.60}. Pass one "
            "of the two."
        )
    return text


def content_text(content: Any) -> str:
    """Return the text of a message's content: a string, blocks, or None.

    Blocks that hold reasoning are no part of what the policy answers.

    >>> content_text([{"type": "text", "text": "18"}, {"type": "image"}])
    '18'
    >>> content_text([{"type": "reasoning", "text": "17?"}])
    ''
    >>> content_text(None)
    ''
    """
    if isinstance(content, list):
        return "".join(
            block.get("text") or ""
            for block in content
            if block.get("type", "text") in _ANSWERS
        )
    return content or ""


_ANSWERS = ("text", "output_text")


def completion_texts(completions: Sequence[Any]) -> list[str]:
    """Return the texts of a batch of completions, one string for each.

    Raises RewardError when `completions` is one string instead of a list, or
    no list at all.

    >>> completion_texts(["a", [{"role": "assistant", "content": "b"}]])
    ['a', 'b']
    """
    _refuse_no_list(completions)
    return [completion_text(completion) for completion in completions]


def gold_column(
    completions: Sequence[Any],
    columns: Mapping[str, Any],
    *,
    first: str = "answer",
    optional: bool = False,
) -> list[Any]:
    """Return the gold answers of a batch, one for each completion.

    `columns` holds what the trainer passed beside the completions. The golds
    are in the column `first`, else in the first of GOLD_COLUMNS that is
    there. A column whose value is None counts as absent. Raises RewardError
    when there is no such column (with `optional`, every gold is None then),
    when it is not a list, or when its length is not the number of
    completions. Arrays of NumPy and tensors of torch are lists, too.

    >>> gold_column(["a", "b"], {"answer": ["#### 1", "#### 2"]})
    ['#### 1', '#### 2']
    >>> both = {"answer": ["B"], "solution": ["2"]}
    >>> gold_column(["a"], both, first="solution")
    ['2']
    """
    _refuse_no_list(completions)
    for name in (first, *GOLD_COLUMNS):
        if columns.get(name) is not None:
            return _checked(name, columns[name], len(completions))
    if optional:
        return [None] * len(completions)
    no_golds = {*GOLD_COLUMNS, *FROM_THE_TRAINER}
    given = ", ".join(sorted(set(columns) - no_golds)) or "none"
    raise RewardError(
        "The gold answers are missing: a reward for right answers reads them "
        "from the column 'answer' ('solution' and 'ground_truth' work too), "
        f"and the other columns are: {given}. Rename yours before "
        "training: dataset = dataset.rename_column('YOUR_COLUMN', 'answer')."
    )


def _refuse_no_list(completions: Any) -> None:
    if isinstance(completions, str):
        raise RewardError(
            "A reward function scores a list of completions and got one "
            "string, whose letters it would score one by one. Put the text "
            "in a list: completions=[text]."
        )
    if not hasattr(completions, "__len__") or isinstance(completions, dict):
        raise RewardError(
            "A reward function scores a list of completions and got "
            f"{type(completions).__name__} {completions!r:.40}. Put what is "
            "to be scored in a list: completions=[completion]."
        )


def _checked(name: str, golds: Any, expected: int) -> list[Any]:
    golds = _plain(golds)
    if not hasattr(golds, "__len__") or isinstance(golds, str | dict | set):
        raise RewardError(
            f"The column '{name}' must be a list with one gold answer for "
            f"each completion and is {type(golds).__name__} {golds!r:.40}. "
            f"For a single completion write {name}=[gold]."
        )
    if len(golds) != expected:
        raise RewardError(
            f"There are {expected} completions and {len(golds)} gold answers "
            f"in the column '{name}', so some completion would be scored "
            "against a wrong gold. Pass one gold for each completion, "
            "repeated for every completion of the same prompt."
        )
    return [_plain(gold) for gold in golds]


def _plain(value: Any) -> Any:
    """Return an array or a tensor as lists and numbers, all else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
