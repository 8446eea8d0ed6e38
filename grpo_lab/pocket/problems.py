"""A seeded generator of math problems in exactly GSM8K's row form.

Word problems come as GSM8K writes them: a question, and an answer that holds
a rationale with calculator notes (`<<12-5=7>>`) and ends in `#### 7`. Short
problems with LaTeX answers come as NuminaMath-TIR writes them: a problem, and
a solution that ends in a `\\boxed{}`.

The numbers stay below 100, mostly below 50, so that a model of two million
parameters can learn to compute with them. One question in ten is held out
for good, by a hash of its text, so that no seed can ever put an evaluation
question into the pocket models' corpus or into a training set.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NAMES = (
    "Ada", "Ben", "Cara", "Dan", "Eli", "Fay", "Gus", "Hana", "Ivan", "Jo",
    "Kim", "Leo", "Mia", "Noah", "Omar", "Pia", "Rosa", "Sam", "Tara", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "books", "cards", "coins", "eggs", "flags", "keys", "lamps",
    "mugs", "nuts", "pens", "plums", "rings", "shells", "stamps", "toys",
)  # fmt: skip

LETTERS = ("x", "y", "z", "n", "k", "m")


@dataclass(frozen=True)
class Problem:
    """One problem and everything that the corpus needs to solve it.

    Attributes:
        kind: a key of `WORD_KINDS` or `LATEX_KINDS`.
        question: the text that the policy sees.
        steps: the right calculation, one equation per line, `12 - 5 = 7`.
        result: the right answer, an integer in digits or LaTeX.
        slip: the calculation of someone who makes this kind's usual mistake.
        slip_result: where that mistake leads; never equal to `result`.
    """

    kind: str
    question: str
    steps: tuple[str, ...]
    result: str
    slip: tuple[str, ...]
    slip_result: str

    def row(self) -> dict[str, str]:
        """This problem as a row of GSM8K: columns `question`, `answer`."""
        lines = [_calculator_note(step) for step in self.steps]
        answer = "\n".join([*lines, f"#### {self.result}"])
        return {"question": self.question, "answer": answer}

    def latex_row(self) -> dict[str, str]:
        """This problem as a row of NuminaMath: `problem`, `solution`."""
        working = "\n".join(f"${step}$" for step in self.steps)
        solution = f"{working}\nSo the result is $\\boxed{{{self.result}}}$."
        return {"problem": self.question, "solution": solution}


def _calculator_note(step: str) -> str:
    """`12 - 5 = 7` in GSM8K's notation: `12 - 5 = <<12-5=7>>7`."""
    left, right = step.split(" = ")
    return f"{left} = <<{left.replace(' ', '')}={right}>>{right}"


def _equation(a: int, sign: str, b: int) -> tuple[str, int]:
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    return f"{a} {sign} {b} = {value}", value


def _one_step(
    kind: str, question: str, a: int, sign: str, b: int, slip_sign: str
) -> Problem:
    step, value = _equation(a, sign, b)
    slip, slip_value = _equation(a, slip_sign, b)
    return Problem(
        kind, question, (step,), str(value), (slip,), str(slip_value)
    )


def _gain(rng: random.Random) -> Problem:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    verb = rng.choice(("finds", "buys", "gets"))
    a, b = rng.randint(12, 30), rng.randint(3, 11)
    question = (
        f"{name} has {a} {things}. {name} {verb} {b} more. "
        f"How many {things} does {name} have now?"
    )
    return _one_step("gain", question, a, "+", b, "-")


def _loss(rng: random.Random) -> Problem:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    verb = rng.choice(("loses", "sells", "gives away"))
    a, b = rng.randint(12, 30), rng.randint(3, 11)
    question = (
        f"{name} has {a} {things}. {name} {verb} {b} of them. "
        f"How many {things} does {name} have left?"
    )
    return _one_step("loss", question, a, "-", b, "+")


def _compare(rng: random.Random) -> Problem:
    first, second = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    a, b = rng.randint(12, 30), rng.randint(3, 11)
    question = (
        f"{first} has {a} {things} and {second} has {b} {things}. "
        f"How many more {things} does {first} have than {second}?"
    )
    return _one_step("compare", question, a, "-", b, "+")


def _groups(rng: random.Random) -> Problem:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    container = rng.choice(("boxes", "bags", "rows"))
    a, b = rng.randint(3, 9), rng.randint(3, 9)
    question = (
        f"{name} has {a} {container} with {b} {things} in each. "
        f"How many {things} does {name} have?"
    )
    return _one_step("groups", question, a, "*", b, "+")


def _gain_loss(rng: random.Random) -> Problem:
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    a, b, c = rng.randint(8, 20), rng.randint(3, 11), rng.randint(3, 11)
    first, total = _equation(a, "+", b)
    second, value = _equation(total, "-", c)
    slip, slip_value = _equation(total, "+", c)
    question = (
        f"{name} has {a} {things}, buys {b} more and then sells {c}. "
        f"How many {things} does {name} have in the end?"
    )
    steps, slips = (first, second), (first, slip)
    return Problem(
        "gain_loss", question, steps, str(value), slips, str(slip_value)
    )


def _twice(rng: random.Random) -> Problem:
    first, second = rng.sample(NAMES, 2)
    things = rng.choice(THINGS)
    a = rng.randint(3, 15)
    double, doubled = _equation(a, "*", 2)
    total, value = _equation(a, "+", doubled)
    question = (
        f"{first} has {a} {things}. {second} has twice as many. "
        f"How many {things} do they have together?"
    )
    steps = (double, total)
    return Problem(
        "twice", question, steps, str(value), (double,), str(doubled)
    )


def _fraction_sum(rng: random.Random) -> Problem:
    c = rng.randint(5, 29)
    a, b = rng.randint(1, 14), rng.randint(1, 14)
    left = f"\\frac{{{a}}}{{{c}}} + \\frac{{{b}}}{{{c}}}"
    result = f"\\frac{{{a + b}}}{{{c}}}"
    slip = f"\\frac{{{a + b}}}{{{c + c}}}"
    return Problem(
        "fraction_sum",
        f"What is ${left}$?",
        (f"{left} = {result}",),
        result,
        (f"{left} = {slip}",),
        slip,
    )


def _share(rng: random.Random) -> Problem:
    a, b, x = rng.randint(2, 39), rng.randint(3, 19), rng.choice(LETTERS)
    result, slip = f"\\frac{{{a}}}{{{b}}}", f"\\frac{{{b}}}{{{a}}}"
    if a == b:  # both readings would be 1
        return _share(rng)
    return Problem(
        "share",
        f"Solve ${b}{x} = {a}$ for ${x}$.",
        (f"{x} = {result}",),
        result,
        (f"{x} = {slip}",),
        slip,
    )


def _shift(rng: random.Random) -> Problem:
    a, b, x = rng.randint(3, 11), rng.randint(14, 30), rng.choice(LETTERS)
    step, value = _equation(b, "-", a)
    slip, slip_value = _equation(b, "+", a)
    return Problem(
        "shift",
        f"Solve ${x} + {a} = {b}$ for ${x}$.",
        (f"{x} = {step}",),
        str(value),
        (f"{x} = {slip}",),
        str(slip_value),
    )


def drill(rng: random.Random) -> tuple[str, str]:
    """One bare equation of the kind that the problems need, in two parts.

    Returns:
        The left side with its equals sign, `12 + 7 =`, and the right, ` 19`.
    """
    sign = rng.choice("++--*")
    if sign == "*":
        a, b = rng.randint(2, 15), rng.randint(2, 9)
    else:
        a, b = rng.randint(3, 36), rng.randint(2, 30)
        a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
    left, right = _equation(a, sign, b)[0].split(" = ")
    return f"{left} =", f" {right}"


Maker = Callable[[random.Random], Problem]

WORD_KINDS: dict[str, Maker] = {
    "gain": _gain,
    "loss": _loss,
    "compare": _compare,
    "groups": _groups,
    "gain_loss": _gain_loss,
    "twice": _twice,
}
LATEX_KINDS: dict[str, Maker] = {
    "fraction_sum": _fraction_sum,
    "share": _share,
    "shift": _shift,
}


def is_held_out(question: str) -> bool:
    """Whether a question belongs to evaluation: one in ten, by its hash."""
    return hashlib.sha256(question.encode()).digest()[0] % 10 == 0


def stream(
    seed: int, kinds: dict[str, Maker] = WORD_KINDS
) -> Iterator[Problem]:
    """Endless problems, each kind as often as the others; seeded."""
    rng = random.Random(seed)
    makers = list(kinds.values())
    while True:
        yield rng.choice(makers)(rng)


def sample(
    count: int,
    *,
    held_out: bool,
    seed: int,
    kinds: dict[str, Maker] = WORD_KINDS,
) -> list[Problem]:
    """Draw `count` problems with different questions from one side.

    Args:
        count: how many.
        held_out: True for evaluation, False for training.
        seed: any integer; the same seed gives the same problems.
        kinds: `WORD_KINDS` or `LATEX_KINDS`, or a part of them.

    Returns:
        A list of problems; no question occurs twice.

    Raises:
        ValueError: there are not that many different questions.
    """
    chosen: dict[str, Problem] = {}
    for problem in itertools.islice(stream(seed, kinds), 50 * count + 5000):
        if len(chosen) == count:
            break
        if is_held_out(problem.question) == held_out:
            chosen.setdefault(problem.question, problem)
    if len(chosen) < count:
        raise ValueError(
            f"The generator found {len(chosen)} different problems of kinds "
            f"{', '.join(kinds)}; {count} were asked for. Ask for fewer."
        )
    return list(chosen.values())
