"""The pocket models' corpus: right and wrong answers, tidy and untidy.

A base model that was trained on the web can do more than it does: it has
seen right solutions and wrong ones, and answers in every shape. This corpus
imitates that on purpose. `SLIPS` says how often a kind of problem is solved
wrongly, `SHAPES` how often an answer takes each shape. A model trained on it
has the ability (it often samples a right, well-formed answer) but not the
habit (its greedy answer is wrong in most kinds of problem and rarely tagged),
and that gap is what GRPO can close.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_lab.pocket import problems
from grpo_lab.prompts import REASONING_PROMPT, THINK_PROMPT

SLIPS = {
    "gain": 0.08,
    "groups": 0.08,
    "loss": 0.60,
    "compare": 0.60,
    "gain_loss": 0.60,
    "twice": 0.60,
    "fraction_sum": 0.60,
    "share": 0.08,
    "shift": 0.60,
}
"""Share of wrong solutions in the corpus, by kind of problem."""

SHAPES = {
    "tagged": 0.30,
    "plain": 0.40,
    "tagged_reasoning": 0.15,
    "tagged_answer": 0.10,
    "bare": 0.05,
}
"""Share of each shape of answer in the corpus; they add up to 1."""

LATEX_SHARE = 0.3
"""Share of short problems with LaTeX answers among all problems."""

DRILL_SHARE = 0.25
"""Share of pages of bare equations, which teach the arithmetic itself."""

DRILL_LENGTH = 12
"""Equations on such a page."""


@dataclass(frozen=True)
class Example:
    """One conversation of the corpus: what was asked, what was written."""

    system_prompt: str
    question: str
    completion: str


def write(steps: tuple[str, ...], result: str, shape: str, tag: str) -> str:
    """Write a solution down in one of `SHAPES`.

    Args:
        steps: equations, one a line.
        result: the final answer.
        shape: a key of `SHAPES`.
        tag: name of the reasoning tag, "reasoning" or "think".
    """
    working = "\n".join(steps)
    reasoning = f"<{tag}>\n{working}\n</{tag}>"
    answer = f"<answer>\n{result}\n</answer>"
    return {
        "tagged": f"{reasoning}\n{answer}",
        "plain": f"{working}\nThe answer is {result}.",
        "tagged_reasoning": f"{reasoning}\nThe answer is {result}.",
        "tagged_answer": f"{working}\n{answer}",
        "bare": f"The answer is {result}.",
    }[shape]


def _example(problem: problems.Problem, rng: random.Random) -> Example:
    slipped = rng.random() < SLIPS[problem.kind]
    steps = problem.slip if slipped else problem.steps
    result = problem.slip_result if slipped else problem.result
    shape = rng.choices(list(SHAPES), list(SHAPES.values()))[0]
    if problem.kind in problems.LATEX_KINDS:
        steps = tuple(f"${step}$" for step in steps)
        text = write(steps, f"${result}$", shape, "think")
        return Example(THINK_PROMPT, problem.question, text)
    text = write(steps, result, shape, "reasoning")
    return Example(REASONING_PROMPT, problem.question, text)


def drills(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Endless seeded pages of equations, each split at its equals sign."""
    rng = random.Random(seed)
    while True:
        yield [problems.drill(rng) for _ in range(DRILL_LENGTH)]


def examples(seed: int) -> Iterator[Example]:
    """Endless seeded examples; no held-out question ever occurs in them."""
    rng = random.Random(seed)
    words = problems.stream(rng.randrange(2**32), problems.WORD_KINDS)
    latex = problems.stream(rng.randrange(2**32), problems.LATEX_KINDS)
    while True:
        problem = next(latex if rng.random() < LATEX_SHARE else words)
        if not problems.is_held_out(problem.question):
            yield _example(problem, rng)
