r"""Completions that show what a reward scores, built from a reference answer.

`examples_of` reads rows of data; `probes` builds, from one of them and one of
FORMS, the completion that a reward should score best and those that it
shouldn't.
"""

import copy
import re
from dataclasses import dataclass
from typing import Any

from rewards.answers import gold_answer
from rewards.batch import GOLD_COLUMNS, RewardError
from rewards.contract.reward_file import last_question
from rewards.numbers import parse_number

REASONING = "I take what is given, step by step, and check the result."
MANY_LINES = "\n".join(
    f"{step}, I look at what is given and at what follows from it."
    for step in ("First", "Second", "Third", "Then", "After that") * 4
)
# The forms that prompts ask for. Of those that score alike the first counts.
FORMS = {
    "<reasoning> and <answer>": (
        "<reasoning>\n{reasoning}\n</reasoning>\n"
        "<answer>\n{answer}\n</answer>\n"
    ),
    "<think> and <answer>": (
        "<think>\n{reasoning}\n</think>\n<answer>\n{answer}\n</answer>"
    ),
    "<reasoning> and <answer>, a line each": (
        "<reasoning>{reasoning}</reasoning>\n<answer>{answer}</answer>"
    ),
    "<think> and <answer>, a line each": (
        "<think>{reasoning}</think>\n<answer>{answer}</answer>"
    ),
    "<answer> after a <think> that the prompt has opened": (
        "{reasoning}</think>\n<answer>{answer}</answer>"
    ),
    "<think>, then a box in <answer>": (
        "<think>\n{reasoning}\n</think>\n"
        "<answer>\n$\\boxed{{answer}}$\n</answer>"
    ),
    "a box": "{reasoning}\nHence we have $\\boxed{{answer}}$.",
    "#### and the answer": "{reasoning}\n#### {answer}",
    "The answer is ...": "{reasoning}\nThe answer is {answer}.",
    "the answer alone": "{answer}",
}
# The answer between its tags, in the same line and on a line of its own.
IN_LINE, OWN_LINE = "<answer>{answer}<", "<answer>\n{answer}\n<"
_TAGS_ONLY = (
    "<reasoning>\n\n</reasoning>\n<answer>\n\n</answer>\n",
    "<think>\n\n</think>\n<answer>\n\n</answer>",
    "</think>\n<answer></answer>",
)


@dataclass(frozen=True)
class Example:
    """A row of data, with its question ("" where there is none).

    Attributes:
        answer: the reference answer without the solution around it.
        wrong: other answers.
        swapped: the answer of another row, or None if all are the same.
    """

    row: dict
    question: str
    answer: str
    wrong: tuple[str, ...]
    swapped: str | None


@dataclass(frozen=True)
class Probe:
    """A completion for an example, its kind, and the form it is in."""

    kind: str
    form: str
    example: Example
    text: str


def examples_of(rows: Any, most: int) -> tuple[list[Example], tuple[int, int]]:
    """Return `most` examples, and how many answers can't be read.

    The first rows are taken, and for each way of writing an answer (with a
    comma, a point, a minus, LaTeX ...) its first row, wherever it stands. The
    count, a pair (unreadable, all), is over all rows. Raises RewardError when
    there are no rows, or none with a column of reference answers.

    >>> rows = [{"question": "9 + 9?", "answer": "#### 18"},
    ...         {"question": "3 + 4?", "answer": "#### 7"},
    ...         {"question": "Why?", "answer": "nobody has ever known"}]
    >>> examples, count = examples_of(rows, 20)
    >>> examples[0].answer, examples[0].swapped, count
    ('18', '7', (1, 3))
    >>> examples[0].wrong
    ('19', '118', '18.5', '-18')
    """
    rows = [_row(row) for row in rows]
    if not rows:
        raise RewardError(
            "There are no rows to check a reward on. Pass a few rows of the "
            "data that you will train on, for example rows=dataset."
        )
    column = next((name for name in GOLD_COLUMNS if name in rows[0]), "")
    if not column:
        raise RewardError(
            "The rows have no reference answers: they are read from the "
            "column 'answer', 'solution' or 'ground_truth', and there are: "
            f"{', '.join(map(str, rows[0])) or 'none'}. Rename yours: dataset "
            "= dataset.rename_column('YOUR_COLUMN', 'answer')."
        )
    found = [(row, gold_answer(row.get(column))) for row in rows]
    read = [(row, answer) for row, answer in found if answer is not None]
    chosen = [read[at] for at in _varied([answer for _, answer in read], most)]
    answers = [answer for _, answer in chosen]
    examples = [_example(row, answer, answers) for row, answer in chosen]
    return examples, (len(rows) - len(read), len(rows))


def _varied(answers: list[str], most: int) -> list[int]:
    """Return positions: the first of each way of writing, then the first."""
    first: dict[tuple[bool, ...], int] = {}
    for at, answer in enumerate(answers):
        number = parse_number(answer)
        marks = tuple(mark in answer for mark in ",.-/\\%$ ")
        first.setdefault((number is None, *marks), at)
    ways = list(first.values())[:most]
    others = [at for at in range(len(answers)) if at not in ways]
    return sorted(ways + others[: most - len(ways)])


def right(example: Example, form: str) -> Probe:
    """Return the probe of the right answer in this form.

    >>> (one,), _ = examples_of([{"answer": "#### 18"}], 1)
    >>> right(one, "the answer alone").text
    '18'
    """
    return Probe("right", form, example, _fill(form, example.answer))


def wrong(example: Example, form: str) -> Probe:
    """Return the probe of a wrong answer in this form.

    >>> (one,), _ = examples_of([{"answer": "#### 18"}], 1)
    >>> wrong(one, "the answer alone").text
    '19'
    """
    return Probe("wrong", form, example, _fill(form, example.wrong[0]))


def probes(example: Example, form: str) -> list[Probe]:
    """Return all probes of one example in one form, the right one first.

    >>> rows = [{"answer": "18"}, {"answer": "7"}]
    >>> (one, _), _ = examples_of(rows, 2)
    >>> for probe in probes(one, "#### and the answer")[1:3]:
    ...     print(probe.kind, repr(probe.text[-8:]))
    many lines '\\n#### 18'
    wrong '\\n#### 19'
    """
    low, *others = example.wrong
    high = others[-1] if others else "none of these"
    asked = example.question
    texts = {
        "right": [_fill(form, example.answer)],
        "many lines": [_fill(form, example.answer, MANY_LINES)],
        "own line": _own_line(form, example.answer),
        "wrong": [_fill(form, answer) for answer in example.wrong],
        "empty": ["", " \n"],
        "tags only": [_fill(form, "", ""), *_TAGS_ONLY],
        "swapped": [_fill(form, example.swapped)] if example.swapped else [],
        "truncated": [
            _fill(form, "\0").partition("\0")[0],
            # in the middle of the reasoning, which has the number already
            _fill(form, "", f"{REASONING}\n= {example.answer}\0").partition(
                "\0"
            )[0]
            if "{reasoning}" in FORMS[form]
            else "",
        ],
        "hedge": [_fill(form, f"{low} or {example.answer} or {high}")],
        "placeholder": [_fill(form, "...", "...")],
        # unless the answer happens to stand in it
        "question": [asked] if asked and example.answer not in asked else [],
    }
    return [
        Probe(kind, form, example, text)
        for kind, them in texts.items()
        for text in dict.fromkeys(them)
        if text or kind == "empty"
    ]


def _own_line(form: str, answer: str) -> list[str]:
    """The right answer on a line of its own, if the form has it in a line."""
    layout = FORMS[form]
    if IN_LINE not in layout:
        return []
    text = layout.replace(IN_LINE, OWN_LINE).replace("{reasoning}", REASONING)
    return [text.replace("{answer}", answer)]


def _fill(form: str, answer: str, reasoning: str = REASONING) -> str:
    text = FORMS[form].replace("{reasoning}", reasoning)
    return text.replace("{answer}", answer)


def _row(row: Any) -> dict[str, Any]:
    try:
        # not dict(row), which would take a list of pairs as well
        return copy.deepcopy(dict(row.items()))
    except AttributeError:
        raise RewardError(
            f"A row must be a dict, and one is {type(row).__name__}. Pass "
            "rows as dataset, or as [{'question': ..., 'answer': ...}, ...]; "
            "of a pandas frame as frame.to_dict('records')."
        ) from None


def _example(row: Any, answer: str, answers: list[str]) -> Example:
    others = [other for other in answers if not _same(other, answer)]
    asked = (row.get(name) for name in ("question", "problem", "prompt"))
    return Example(
        row,
        question=last_question(next(filter(None, asked), "")),
        answer=answer,
        wrong=_wrong_answers(answer, others),
        swapped=others[0] if others else None,
    )


def _same(one: str, other: str) -> bool:
    numbers = parse_number(one), parse_number(other)
    if numbers == (None, None):
        return one.strip().lower() == other.strip().lower()
    return numbers[0] == numbers[1]


def _wrong_answers(answer: str, others: list[str]) -> tuple[str, ...]:
    """Return answers that look like this one and are not, never none."""
    number = parse_number(answer)
    if number is None:
        maths = re.search(r"[0-9\\^_=+]", answer)
        made = [f"{answer} + 1"] if maths else []
        return tuple(made + others[:2]) or ("something else",)
    made = [str(number + 1)]
    if number.denominator == 1:
        # a longer number with the right one inside, one that int() cuts to
        # it, and one without the sign
        made += [f"1{abs(number)}", f"{number}.5", str(-number)]
    return tuple(a for a in made if not _same(a, answer))
