r"""How often a grader is right: this project's, math_verify's and TRL's.

    python benchmarks/grader_accuracy.py [--data FOLDER] [--rows N]

These graders judge the same answers:

- ours: `rewards.accuracy_reward`, reading answers as it does for a model that
  was never told of tags (policy "flexible");
- math_verify: `parse` and `verify` with their defaults, as its README has it;
- math_verify, given the answer: the same on the answer alone, which
  `rewards.extract_answer` has cut out, between dollar signs;
- TRL: `trl.rewards.accuracy_reward`.

The last three read a reference answer between dollar signs or in a box, so
they get what `rewards.gold_answer` finds, between dollar signs.

(a) All case files of `tests/data`: answers as policies write them, with what a
    careful teacher says. They were collected from faults, so they are harder
    than what a policy writes.
(b) GSM8K: for each row one of 20 ways of writing its answer right, and one of
    20 ways of writing another value or another thing, by a seeded generator.
    With --rows each row gets all 40.

Of each: the share of right answers that were rewarded, how many wrong answers
were, and how many were left undecided (None).
"""

import argparse
import json
import logging
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

from math_verify import parse, verify
from trl.rewards import accuracy_reward as trl_accuracy_reward

from rewards import (
    accuracy_reward,
    extract_answer,
    gold_answer,
    gold_number,
)
from rewards.answers import POLICIES
from rewards.workers import Workers

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
SECONDS = 5  # that a comparison of the others may take

Case = tuple[str, object, bool]  # completion, reference answer, right?
Grader = Callable[[list[str], list], list[float | None]]


# --- Graders ----------------------------------------------------------------


def ours(completions: list[str], golds: list) -> list[float | None]:
    """This project's grader, reading as widely as it can."""
    return accuracy_reward(completions, golds, policy="flexible")


def plain_math_verify(completions: list[str], golds: list) -> list:
    """math_verify alone, with its own defaults."""
    return _in_time("math_verify_score", completions, golds)


def given_the_answer(completions: list[str], golds: list) -> list:
    """math_verify on the answer that this project finds in a text."""
    found = (extract_answer(text, "flexible") for text in completions)
    return plain_math_verify([f"${one or ''}$" for one in found], golds)


def of_trl(completions: list[str], golds: list) -> list:
    """TRL's accuracy reward."""
    return _in_time("trl_score", completions, golds)


def math_verify_score() -> Callable:
    """What a worker does for `plain_math_verify`."""

    def score(pair: list[str]) -> float | None:
        expected = parse(pair[1], parsing_timeout=None)
        if not expected:
            return None
        given = parse(pair[0], parsing_timeout=None)
        return float(verify(expected, given, timeout_seconds=None))

    return score


def trl_score() -> Callable:
    """What a worker does for `of_trl`."""

    def score(pair: list[str]) -> float | None:
        message = [{"role": "assistant", "content": pair[0]}]
        return trl_accuracy_reward([message], [pair[1]])[0]

    return score


def _in_time(factory: str, completions: list[str], golds: list) -> list:
    """Scores one by one; None for what takes too long, or raises."""
    workers = Workers(
        f"{Path(__file__).stem}:{factory}",
        cpu_seconds=SECONDS,
        wall_seconds=10 * SECONDS,
        memory_mib=2048,
    )
    pairs = zip(completions, map(_in_dollars, golds), strict=True)
    replies = workers.ask([[pair] for pair in pairs])
    workers.close()
    return [None if one.failure else one.value for [one] in replies]


def _in_dollars(gold: object) -> str:
    return f"${gold_answer(gold) or gold}$"


GRADERS: dict[str, Grader] = {
    "this project": ours,
    "math_verify": plain_math_verify,
    "  given the answer": given_the_answer,
    "TRL": of_trl,
}

# These keep math_verify busy without an end.
ENDLESS = ("^{9^", "9999", "sum_{i=1}^{1", "(10^{10})!", "100000")


# --- Cases ------------------------------------------------------------------


def case_files() -> Iterator[Case]:
    """The answers of the repository's case files that have a reference."""
    for name in ("reward_cases", "reward_cases_symbolic", "more_cases"):
        for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines():
            case = json.loads(line)
            if case["right_from"] == "no gold" or not _is_finite(case):
                continue
            yield case["input"], case["gold"], case["right_from"] in POLICIES
    for line in (DATA / "equal_pairs.jsonl").read_text("utf-8").splitlines():
        pair = json.loads(line)
        text = f"<answer>{pair['answer']}</answer>"
        yield text, pair["gold"], pair["verdict"] == "right"
    for line in (DATA / "public_cases.jsonl").read_text("utf-8").splitlines():
        case = json.loads(line)
        yield case["completion"], case["gold"], case["score"] > 0


def _is_finite(case: dict) -> bool:
    text = f"{case['input']}{case['gold']}"
    return isinstance(case["input"], str) and not any(
        one in text for one in ENDLESS
    )


def _grouped(value: int, mark: str) -> str:
    return f"{value:,}".replace(",", mark)


RIGHT: list[Callable[[int], str]] = [
    lambda n: f"The answer is {n}.",
    lambda n: f"#### {n}",
    lambda n: rf"Hence \boxed{{{n}}}.",
    lambda n: f"<answer>{n}</answer>",
    lambda n: f"<answer>\n{n}\n</answer>",
    lambda n: f"<answer>{n}.00</answer>",
    lambda n: f"**Answer:** {_grouped(n, ',')}",
    lambda n: rf"\boxed{{{_grouped(n, '{,}')}}}",
    lambda n: f"The answer is ${n}$.",
    lambda n: f"<answer>${n}</answer>",
    lambda n: f"<answer>{n} in total</answer>",
    lambda n: f"<answer>x = {n}</answer>",
    lambda n: f"<answer>{n - 1} + 1 = {n}</answer>",
    lambda n: rf"<answer>\frac{{{2 * n}}}{{2}}</answer>",
    lambda n: rf"\boxed{{\text{{Answer: }}{n}}}",
    lambda n: f"<answer>({n})</answer>",
    lambda n: f"**Answer:**\n\n- {n}",
    lambda n: f"<think>Is it {n + 1}?</think> The answer is {n}.",
    lambda n: f"#### {n}\n\nQuestion: 1 + 1?\n#### {n + 2}",
    lambda n: f"<answer>approximately {n}</answer>",
]
"""Ways of writing an answer right."""

WRONG: list[Callable[[int], str]] = [
    lambda n: f"The answer is {n + 1}.",
    lambda n: f"#### {n - 1}",
    lambda n: rf"Hence \boxed{{{10 * n + 10}}}.",
    lambda n: f"<answer>{-n if n else 1}</answer>",
    lambda n: f"<answer>{n}.5</answer>",
    lambda n: f"<answer>1{n}</answer>",
    lambda n: f"<answer>{n}, {n + 1}</answer>",
    lambda n: f"<answer>{n} or {n + 1}</answer>",
    lambda n: f"<answer>{n} thousand</answer>",
    lambda n: f"<answer>{n}x</answer>",
    lambda n: f"<answer>{n + 1}/2 + {n}</answer>",
    lambda n: f"<answer>between {n - 1} and {n + 1}</answer>",
    lambda n: f"<answer>not {n}</answer>",
    lambda n: f"<think>It is {n}",
    lambda n: f"<answer>x > {n}</answer>",
    lambda n: rf"<answer>{n}\pi</answer>",
    lambda n: f"<answer>{n}^2 + 1</answer>",
    lambda n: f"<answer>({n}, {n})</answer>",
    lambda n: f"<answer>{n}</answer> Wait. <answer>{n + 3}</answer>",
    lambda n: f"#### {n + 1}\n\nQuestion: 1 + 1?\n#### {n}",
]
"""Ways of writing it wrong."""


def gsm8k(folder: Path, every: int, seed: int) -> Iterator[Case]:
    """Answers to GSM8K's questions, written right and wrong."""
    chance = random.Random(seed)
    lines = [
        line
        for name in ("test.jsonl", "train.jsonl")
        for line in (folder / name).read_text("utf-8").splitlines()
    ]
    for line in lines[: every or None]:
        gold = json.loads(line)["answer"]
        value = gold_number(gold)
        if value is None or Fraction(value).denominator != 1:
            continue
        right = RIGHT if every else [chance.choice(RIGHT)]
        wrong = WRONG if every else [chance.choice(WRONG)]
        answer = gold.rpartition("####")[2].strip()
        for write in right:
            yield write(int(value)), answer, True
        for write in wrong:
            yield write(int(value)), answer, False


# --- The table --------------------------------------------------------------


def judged(grader: Grader, cases: list[Case]) -> dict[str, int]:
    """How many right and wrong answers were rewarded, and undecided."""
    scores = grader([c[0] for c in cases], [c[1] for c in cases])
    found = dict.fromkeys(
        ("right", "right rewarded", "wrong", "wrong rewarded", "undecided"), 0
    )
    for (_, _, is_right), score in zip(cases, scores, strict=True):
        kind = "right" if is_right else "wrong"
        found[kind] += 1
        found[f"{kind} rewarded"] += bool(score)
        found["undecided"] += score is None
    return found


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data" / "gsm8k"
    )
    parser.add_argument("--rows", type=int, default=0, help="all 40 for these")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    sets = {"(a) case files": list(case_files())}
    if given.data.is_dir():
        sets["(b) GSM8K"] = list(gsm8k(given.data, given.rows, given.seed))
    for name, cases in sets.items():
        print(f"\n{name}: {len(cases)} answers")
        print(f"{'':20}{'right rewarded':>18}{'wrong rewarded':>18}", end="")
        print(f"{'undecided':>12}")
        for grader, judge in GRADERS.items():
            found = judged(judge, cases)
            share = found["right rewarded"] / max(1, found["right"])
            right = f"{found['right rewarded']} ({share:.1%})"
            wrong = f"{found['wrong rewarded']} of {found['wrong']}"
            print(f"{grader:20}{right:>18}{wrong:>18}", end="")
            print(f"{found['undecided']:>12}")


if __name__ == "__main__":
    main()
