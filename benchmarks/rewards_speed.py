r"""How fast the rewards are: four ratios, each measured in one run.

    python benchmarks/rewards_speed.py

1. numbers: `correctness_reward` against `trl.rewards.accuracy_reward`, on
   the same completions of the length of a GSM8K solution;
2. LaTeX: `accuracy_reward` against math_verify called in a plain loop, on
   the same golds with 8 completions each, none seen before;
3. hanging: `accuracy_reward` on such completions of which 1 % make
   math_verify hang for more than 3 s, against none of them;
4. the same with 1 % that are killed at the deadline of a comparison.

Each is the median of alternating measurements, among which the golds are
shared out. "right" counts what was paid in the last of them; of the answers
in LaTeX, every other one is right. Other work on the machine disturbs the
figures: run nothing beside it.
"""

import argparse
import logging
import platform
import random
import statistics
import time

from math_verify import parse, verify
from trl.rewards import accuracy_reward as trl_accuracy_reward

from rewards import correctness_reward
from rewards.symbolic import accuracy_reward

COMPLETIONS_PER_GOLD = 8

# Each of these kept math_verify 0.9.0 busy for more than 3 s of CPU time,
# against the gold 7 or x + 1. N becomes a digit, another one in each copy.
HANGING = [
    "9^{9^{9^{N}}}",
    "10^{10^{1N}}",
    "(10^{1N})!",
    "(1N!)!!",
    r"10^{\left(5^{5^{5^{5^{N}}} \cdot \log_{10}(5)} - 4\right)}",
    "2^{2^{10N}}",
    "(9^9)^{9^N}",
    r"\sum_{i=1}^{1000000N} \frac{1}{i}",
    r"\prod_{i=1}^{100000N} i",
    r"\int \frac{1}{x^{10N}+x+1} dx",
    "(x+y+z+1)^{50N}",
    "(x+1)^{999N}",
    r"\binom{100000N}{50000N}",
    r"\binom{10^{9}}{N\cdot 10^8}",
    "e^{e^{e^{e^{N}}}}",
    r"9^{N\cdot 9^{9}}",
    "9^{99*99*99*9N}",
    r"\sum_{n=1}^{\infty}\frac{\sin n}{n+N}",
    r"(1+x)^{999N}\cdot(1-x)^{9999}",
]
# What no looks give away: these are killed at the deadline of a comparison.
ENDLESS = [
    r"\sum_{i=1}^{99}\sum_{j=1}^{99}\sum_{k=1}^{99}\frac{N}{i+j+k}",
    r"\prod_{i=1}^{99}\prod_{j=1}^{99}\prod_{k=1}^{99}(N+\frac{i}{j+k})",
]


def main() -> None:
    """Print the four ratios as a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--numbers", type=int, default=2000)
    parser.add_argument("--golds", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    accuracy_reward(["<answer>x</answer>"], solution=["$y+1$"])  # start-up
    print(f"Python {platform.python_version()} on {platform.machine()}")
    print(f"{'':40}{'seconds':>10}{'per second':>12}{'right':>8}{'ratio':>8}")
    seeds = range(options.repeat)
    count = -(-options.golds // options.repeat)
    _compare(
        [_numbers(options.numbers, seed) for seed in seeds],
        {
            "trl.rewards.accuracy_reward": _by_trl,
            "rewards.correctness_reward": _by_number,
        },
        "numbers",
    )
    _compare(
        [_latex(count, seed) for seed in seeds],
        {
            "math_verify in a loop": _by_loop,
            "rewards.accuracy_reward": _by_symbol,
        },
        "LaTeX",
    )
    _compare_hanging("1 % hang math_verify", HANGING, count, seeds)
    _compare_hanging("1 % reach our deadline", ENDLESS, count, seeds)


def _compare_hanging(name, texts, count, seeds):
    _compare(
        [
            (_latex(count, f"{name} {seed}"), _latex(count, seed, texts))
            for seed in seeds
        ],
        {
            name: lambda pair: _by_symbol(pair[1]),
            "none do": lambda pair: _by_symbol(pair[0]),
        },
        name,
    )


def _compare(batches, ways, name):
    """Time each way on each batch, in turn, and print medians and ratio."""
    seconds = {way: [] for way in ways}
    found = {}
    for batch in batches:
        for way, score in ways.items():
            start = time.perf_counter()
            scores = score(batch)
            seconds[way].append(time.perf_counter() - start)
            found[way] = (
                len(scores),
                sum(s is not None and s > 0 for s in scores),
            )
    first, last = seconds.values()
    ratio = statistics.median(a / b for a, b in zip(first, last, strict=True))
    print(name)
    for way, times in seconds.items():
        count, right = found[way]
        median = statistics.median(times)
        shown = f"{ratio:8.2f}" if times is last else ""
        print(
            f"  {way:38}{median:10.3f}{count / median:12.0f}{right:8}{shown}",
            flush=True,
        )


# --- What is graded ----------------------------------------------------------


def _numbers(count, seed):
    """(completions, golds): three in four right, GSM8K's length of text."""
    source = random.Random(seed)
    completions, golds = [], []
    for _ in range(count):
        a, b, c = (source.randint(2, 900) for _ in range(3))
        total = a * b + c
        said = (
            total if source.random() < 0.75 else total + source.randint(1, 9)
        )
        steps = (
            f"A shop packs {a} boxes with {b} pens in each box, so there are "
            f"{a} * {b} = {a * b} pens in the boxes. Another {c} pens lie on "
            f"the shelf, which makes {a * b} + {c} = {said} pens in all. We "
            "check that no pen is counted twice: the boxes are closed, and "
            "those on the shelf are in no box."
        )
        completions.append(
            f"<reasoning>\n{steps}\n</reasoning>\n"
            f"<answer>\n$\\boxed{{{said}}}$\n</answer>"
        )
        golds.append(str(total))
    return completions, golds


def _latex(golds, seed, hanging=()):
    """(completions, golds), 8 completions for each gold in LaTeX.

    Of `hanging` texts, one takes the place of each hundredth answer. No pair
    comes twice, so that nothing is remembered from another measurement.
    """
    source = random.Random(f"{seed} {len(hanging)}")
    completions, solutions = [], []
    for _ in range(golds):
        gold, right, wrong = source.choice(_KINDS)(source)
        for index in range(COMPLETIONS_PER_GOLD):
            answer = source.choice(right if index % 2 else wrong)
            if hanging and len(completions) % 100 == 50:
                digits = str(source.randint(1, 9999))
                answer = source.choice(hanging).replace("N", digits[0])
                answer += f" + {digits}"
            completions.append(
                "<think>\nWe write down what is given, and solve it step by "
                "step, which leaves one result.\n</think>\n"
                f"<answer>$\\boxed{{{answer}}}$</answer>"
            )
            solutions.append(f"${gold}$")
    return completions, solutions


def _fraction(source):
    a, b, k = (
        source.randint(1, 99),
        source.randint(2, 99),
        source.randint(2, 9),
    )
    right = [rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a * k}}}{{{b * k}}}"]
    return (
        rf"\frac{{{a}}}{{{b}}}",
        right,
        [rf"\frac{{{a + 1}}}{{{b}}}", f"{a}"],
    )


def _root(source):
    a, b = source.randint(2, 30), source.randint(2, 50)
    right = [rf"\sqrt{{{a * a * b}}}", rf"{a}\sqrt{{{b}}}"]
    return (
        rf"{a}\sqrt{{{b}}}",
        right,
        [rf"{b}\sqrt{{{a}}}+1", rf"\sqrt{{{b}}}"],
    )


def _product(source):
    a, b = source.randint(1, 40), source.randint(1, 40)
    right = [rf"(x+{a})(x-{b})", rf"x^2+{a}x-{b}x-{a * b}"]
    return rf"(x+{a})(x-{b})", right, [rf"(x-{a})(x+{b}+1)", rf"x^2-{a * b}"]


def _interval(source):
    a, b = source.randint(-40, 0), source.randint(1, 40)
    right = [rf"[{a},{b})", rf"{a} \le x < {b}"]
    return rf"[{a}, {b})", right, [rf"({a},{b})", rf"[{a},{b}]"]


def _values(source):
    a, b = source.randint(-40, 0), source.randint(1, 40)
    right = [rf"{b}, {a}", rf"x={a} \text{{ or }} x={b}"]
    return rf"{a}, {b}", right, [f"{a}", rf"{a}, {b + 1}"]


def _angle(source):
    a, b = source.randint(1, 20), source.randint(2, 40)
    right = [rf"\frac{{{a}\pi}}{{{b}}}", rf"\frac{{{2 * a}}}{{{2 * b}}}\pi"]
    return (
        rf"\frac{{{a}\pi}}{{{b}}}",
        right,
        [rf"\frac{{\pi}}{{{b + 1}}}", f"{a}"],
    )


def _line(source):
    a, b = source.randint(2, 30), source.randint(1, 30)
    right = [rf"y={a}x+{b}", rf"y-{a}x={b}"]
    return rf"y={a}x+{b}", right, [rf"y={b}x-{a}", rf"y={a}x"]


_KINDS = (_fraction, _root, _product, _interval, _values, _angle, _line)


# --- Ways to grade -----------------------------------------------------------


def _by_trl(batch):
    completions, golds = batch
    messages = [[{"role": "assistant", "content": c}] for c in completions]
    return trl_accuracy_reward(messages, [f"${gold}$" for gold in golds])


def _by_number(batch):
    completions, golds = batch
    return correctness_reward(completions, answer=golds)


def _by_loop(batch):
    return [
        float(verify(parse(gold), parse(completion)))
        for completion, gold in zip(*batch, strict=True)
    ]


def _by_symbol(batch):
    completions, golds = batch
    return accuracy_reward(completions, solution=golds)


if __name__ == "__main__":
    main()
