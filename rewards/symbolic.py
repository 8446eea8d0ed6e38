r"""Accuracy for golds in LaTeX: does the answer mean what the gold means?

>>> from rewards.symbolic import accuracy_reward
>>> answers = [r"<answer>\frac{2}{4}</answer>", "<answer>1/3</answer>"]
>>> accuracy_reward(answers, solution=[r"$\boxed{0.5}$"] * 2)
[1.0, 0.0]

The answer is taken out of the completion by `rewards.answers`, and compared
by `rewards.expressions`. Numbers, words and lists of them are compared right
here; what needs a LaTeX parser and sympy goes to processes that are killed
when they hang or grow (`rewards.workers`), so that no completion can stop a
run, whatever the policy writes. They are started at the first need, work
from any thread, and are kept until the program ends.

What was once decided is remembered: the completions of a group have one
gold, and most of them a few answers.
"""

from collections.abc import Sequence
from typing import Any

from rewards import expressions
from rewards.answers import answer_in_turn, extract_answer, gold_answer
from rewards.batch import gold_column
from rewards.health import Outcome, report
from rewards.notation import MAX_CHARS, Unreadable
from rewards.turns import read_turns
from rewards.workers import Reply, Workers

CPU_SECONDS = 0.5
"""CPU time for one comparison. Most take 0.01 s; CPU time, not the clock,
decides, so that a busy machine does not change a reward."""

WALL_SECONDS = 30.0
MEMORY_MIB = 1024
REMEMBERED = 50_000
"""Verdicts that are remembered, for pairs of texts of 20 characters mostly,
and never of more than 2,000."""


def make_workers(cpu_seconds: float = CPU_SECONDS) -> Workers:
    """Return the processes that compare, not started yet.

    >>> workers = make_workers()
    >>> workers.ask([[["x+1", "1+x"]]])[0][0].value
    'right'
    >>> workers.close()
    """
    return Workers(
        "rewards.symbolic_worker:handler",
        cpu_seconds=cpu_seconds,
        wall_seconds=WALL_SECONDS,
        memory_mib=MEMORY_MIB,
    )


_workers = make_workers()
Pair = tuple[str, str | None]  # a gold and an answer
_known: dict[Pair, Outcome] = {}  # RIGHT or WRONG


def accuracy_reward(
    completions: Sequence[Any],
    solution: Any = None,
    *,
    policy: str = "tagged",
    prefilled: str = "",
    **kwargs: Any,
) -> list[float | None]:
    r"""Pay 1.0 for an answer that means what the gold means, else 0.0.

    `solution` holds the gold answers, one for each completion: LaTeX or a
    number, alone, in a box, or at the end of a solution's text (a column
    named `answer` or `ground_truth` works too). A gold that can't be read
    gives None, which TRL leaves out of the sum. `policy` says where an
    answer may stand, see `rewards.answers`; `prefilled` is the opening tag
    that the chat template wrote. Returns a list of 1.0, 0.0 and None, one
    for each completion, and reports to `log_metric` and `log_extra` when the
    trainer passes them (`rewards.health`).

    Raises RewardError when the golds are missing or are not one for each
    completion, and for an unknown policy or prefilled text.

    >>> texts = ["<answer>2, 1</answer>", "<answer>1</answer>", "1 and 2"]
    >>> accuracy_reward(texts, solution=["$1,2$"] * 3)
    [1.0, 0.0, 0.0]
    >>> accuracy_reward(["<answer>5</answer>"], solution=["no number in here"])
    [None]

    Source: math_verify by Hugging Face, with a comparison by values.
    """
    golds = gold_column(
        completions, {"solution": solution, **kwargs}, first="solution"
    )
    turns = read_turns(completions, prefilled)
    answers = [answer_in_turn(text, policy) for text in turns]
    outcomes = grade(answers, golds)
    report("accuracy_reward", outcomes, {"answer": answers}, **kwargs)
    return [outcome.score(1.0) for outcome in outcomes]


def is_equivalent(
    completion: str, gold: Any, policy: str = "tagged"
) -> bool | None:
    r"""Tell whether the answer in `completion` means what `gold` means.

    Returns True, False, or None when the gold can't be read. `completion` is
    a string, `gold` as for `accuracy_reward`, `policy` one of POLICIES. What
    `rewards.is_correct` says of numbers, this says of any mathematics.

    >>> is_equivalent(r"So it is \boxed{2\sqrt{2}}.", r"$\sqrt{8}$", "stated")
    True

    Source: math_verify by Hugging Face, with a comparison by values.
    """
    answer = extract_answer(completion, policy)
    outcome = grade([answer], [gold])[0]
    return None if outcome is Outcome.NO_GOLD else outcome is Outcome.RIGHT


def grade(
    answers: Sequence[str | None], golds: Sequence[Any]
) -> list[Outcome]:
    r"""Return what became of each answer, a list of `health.Outcome`.

    `answers` holds texts, or None where none was given; `golds` what a data
    set gives as the gold of each.

    >>> [str(outcome) for outcome in grade(
    ...     ["0.5", None, "9^{9^{9}}"], [r"\frac{1}{2}", "3", "7"])]
    ['right', 'no_answer', 'unreadable']
    """
    texts = [gold_answer(gold) for gold in golds]
    answers = [answer or None for answer in answers]  # "" is none either
    pairs = list(zip(texts, answers, strict=True))
    known = _decide({(g, a) for g, a in pairs if g is not None})
    return [
        Outcome.NO_GOLD if gold is None else known[gold, answer]
        for gold, answer in pairs
    ]


def unusable_golds(golds: Sequence[Any]) -> list[int]:
    r"""Return the positions of the golds that no answer can be compared with.

    For whoever loads a data set: only a completion that repeats such a gold
    letter by letter could be right, and all others give None.

    >>> unusable_golds(["#### 5", "", r"$x^2$", "|||"])
    [1, 3]

    Source: TRL's accuracy_reward skips such golds too, but only tells when
    training runs.
    """
    outcomes = grade([None] * len(golds), golds)
    return [i for i, o in enumerate(outcomes) if o is Outcome.NO_GOLD]


def _decide(pairs: set[Pair]) -> dict[Pair, Outcome]:
    """Return {(gold, answer): Outcome} for pairs of texts.

    The pairs of one gold go to one worker, behind a question about the gold
    alone, so that a gold is parsed once and a bad one blames no answer.
    """
    found = {pair: _known.get(pair) for pair in pairs}  # safe among threads
    decided = {pair: one for pair, one in found.items() if one is not None}
    left: dict[str, list[str | None]] = {}
    for gold, answer in sorted(pairs - decided.keys(), key=str):
        outcome = _decided_here(gold, answer)
        if outcome is None:
            left.setdefault(gold, []).append(answer)
        else:
            decided[gold, answer] = outcome
    groups = [
        [[gold], *([gold, answer] for answer in answers if answer is not None)]
        for gold, answers in left.items()
    ]
    replies = _workers.ask(groups) if groups else []
    for group, (usable, *verdicts) in zip(groups, replies, strict=True):
        [gold] = group[0]
        for (_, answer), reply in zip(group[1:], verdicts, strict=True):
            decided[gold, answer] = _outcome(usable, reply)
        if None in left[gold]:
            decided[gold, None] = _outcome(usable)
    _remember(decided)
    return decided


def _decided_here(gold: str, answer: str | None) -> Outcome | None:
    """Return the Outcome if it takes no parser, else None."""
    if answer is not None and expressions.is_clearly_right(gold, answer):
        return Outcome.RIGHT
    try:
        if not expressions.is_plain(gold):
            return None
    except Unreadable:
        return Outcome.NO_GOLD
    if answer is None:
        return Outcome.NO_ANSWER
    try:
        if not expressions.is_plain(answer):
            return None
    except Unreadable:
        return Outcome.UNREADABLE
    return Outcome(expressions.judge(gold, answer))


def _outcome(usable: Reply, reply: Reply | None = None) -> Outcome:
    """Return the Outcome for the replies about a gold, and about a pair.

    What makes the comparison with a good gold fail is the answer's fault.
    """
    if not usable.value:
        return Outcome.NO_GOLD
    if reply is None:
        return Outcome.NO_ANSWER
    if reply.failure == "error":
        return Outcome.UNREADABLE
    return Outcome.TIMEOUT if reply.failure else Outcome(reply.value)


def _remember(decided: dict[Pair, Outcome]) -> None:
    """Keep verdicts, but no failure, which another try may not have."""
    kept = {
        (gold, answer): outcome
        for (gold, answer), outcome in decided.items()
        if outcome in (Outcome.RIGHT, Outcome.WRONG)
        and len(gold) + len(answer or "") < 2 * MAX_CHARS
    }
    if len(_known) + len(kept) > REMEMBERED:
        _known.clear()
    _known.update(kept)
