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

from rewards import expressions
from rewards.answers import extract_answer, gold_answer, read_turns
from rewards.batch import gold_column
from rewards.health import Outcome, report
from rewards.notation import Unreadable
from rewards.workers import Workers

CPU_SECONDS = 1.0
"""CPU time for one comparison. Most take 0.01 s; CPU time, not the clock,
decides, so that a busy machine does not change a reward."""

WALL_SECONDS = 30.0
MEMORY_MIB = 1024
REMEMBERED = 50_000
"""Comparisons that are remembered, a few MB of short texts."""


def make_workers(cpu_seconds=CPU_SECONDS):
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
_known = {}  # (gold,) -> usable?  (gold, answer) -> Outcome


def accuracy_reward(
    completions, solution=None, *, policy="tagged", prefilled="", **kwargs
):
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

    The comparison is built on math_verify by Hugging Face.
    """
    golds = gold_column(completions, solution=solution, **kwargs)
    turns = read_turns(completions, prefilled)
    answers = [extract_answer(text, policy) for text in turns]
    outcomes = grade(answers, golds)
    report("accuracy_reward", outcomes, {"answer": answers}, **kwargs)
    return [outcome.pay(1.0) for outcome in outcomes]


def is_correct(completion, gold, policy="tagged"):
    r"""Tell whether the answer in `completion` means what `gold` means.

    Returns True, False, or None when the gold can't be read. `completion` is
    a string, `gold` as for `accuracy_reward`, `policy` one of POLICIES.

    >>> is_correct(r"So it is \boxed{2\sqrt{2}}.", r"$\sqrt{8}$", "stated")
    True
    """
    answer = extract_answer(completion, policy)
    pay = grade([answer], [gold])[0].pay(1.0)
    return None if pay is None else bool(pay)


def grade(answers, golds):
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
    known = _decide({pair for pair in pairs if pair[0] is not None})
    return [
        Outcome.NO_GOLD if gold is None else known[gold, answer]
        for gold, answer in pairs
    ]


def unusable_golds(golds):
    r"""Return the positions of the golds that no answer can be compared with.

    For whoever loads a data set: a completion for one of these will never
    be rewarded, whatever the policy writes.

    >>> unusable_golds(["#### 5", "", r"$x^2$", "|||"])
    [1, 3]
    """
    outcomes = grade([None] * len(golds), golds)
    return [i for i, o in enumerate(outcomes) if o is Outcome.NO_GOLD]


def _decide(pairs):
    """Return {(gold, answer): Outcome} for pairs of texts.

    The pairs of one gold go to one worker, behind a question about the gold
    alone, so that a gold is parsed once and a bad one blames no answer.
    """
    decided = {pair: _known[pair] for pair in pairs & _known.keys()}
    left = {}
    for gold, answer in sorted(pairs - decided.keys(), key=str):
        outcome = _decided_here(gold, answer)
        if outcome is None:
            left.setdefault(gold, []).append(answer)
        else:
            decided[gold, answer] = outcome
    requests = [
        [[gold], *([gold, a] for a in answers if a is not None)]
        for gold, answers in left.items()
    ]
    replies = _workers.ask(requests) if requests else []
    for (gold, answers), (usable, *verdicts) in zip(
        left.items(), replies, strict=True
    ):
        verdicts = iter(verdicts)
        for answer in answers:
            outcome = Outcome.NO_ANSWER
            if answer is not None:
                outcome = _outcome(next(verdicts))
            if not usable.value:
                outcome = Outcome.NO_GOLD
            decided[gold, answer] = outcome
    _remember(decided)
    return decided


def _decided_here(gold, answer):
    """Return the Outcome if it takes no parser, else None."""
    try:
        if answer is None:
            return Outcome.NO_ANSWER if expressions.is_plain(gold) else None
        if expressions.alike(gold, answer):
            return Outcome.RIGHT
        if expressions.is_plain(gold, answer):
            return Outcome(expressions.judge(gold, answer))
    except Unreadable:
        pass
    return None


def _outcome(reply):
    """What an answer has that makes the comparison fail is its own fault."""
    if reply.failure == "error":
        return Outcome.UNREADABLE
    return Outcome.TIMEOUT if reply.failure else Outcome(reply.value)


def _remember(decided):
    if len(_known) + len(decided) > REMEMBERED:
        _known.clear()
    _known.update(decided)
