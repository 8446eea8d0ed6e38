"""Prove a reward on the real data, before any training.

`check_reward` calls a reward with completions that are built from the
reference answers of the data: right ones in every form that prompts ask for,
and wrong, empty, swapped, truncated, copied and hedging ones. A reward that
can't tell them apart would train for hours towards nothing, or towards a
trick.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rewards.batch import RewardError
from rewards.contract.probes import FORMS, OWN_LINE, Probe, examples_of
from rewards.contract.reward_file import BESIDE, Score
from rewards.contract.subjects import subject_of
from rewards.contract.trial import Pair, Trial
from rewards.contract.verdicts import Verdict, Verdicts

MAX_ROWS = 20  # more rows say little more
LEAST = 1e-9  # a smaller difference is none

# What to do when a check fails.
_ADVICE = {
    "runs": "Mend the function for this completion: a policy writes every "
    "text there is.",
    "gives a number": "Return a float in every branch, for example 0.0.",
    "is finite": "Look for a division by zero or a logarithm, and bound it.",
    "not for wrong": "Compare the whole answer with the reference, as numbers "
    "and exactly.",
    "not for swapped": "Compare with the gold of this row, not with any "
    "number.",
    "not for empty": "Return 0.0 when the completion holds no answer.",
    "not for tags only": "Reward the form less than being right.",
    "not for truncated": "Read the answer from a closed tag, a box or a last "
    "statement only.",
    "not for a hedge": "Compare the whole answer: finding the right one "
    "somewhere in it is not enough, or the policy learns to list many.",
    "not for a placeholder": "Reward the answer, not something between the "
    "tags.",
    "not for the question": "Read the answer where the prompt asks for it, "
    "not anywhere.",
    "rewards long reasoning": "In a pattern . stops at the end of a line: use "
    "re.DOTALL. If length costs something on purpose, let it cost less than "
    "being right earns.",
    "same on its own line": "In a pattern . stops at the end of a line: use "
    "re.DOTALL, and strip what is between the tags.",
    "varies in a group": "A group in which all get the same teaches nothing: "
    "score the right answer higher.",
    "same score twice": "Take chance, counters, clocks and caches out of the "
    "function.",
    "same in any order": "Match completions and columns one by one, with "
    "zip, and don't count positions.",
    "same on its own": "It is relative to its group or batch. GRPO subtracts "
    "the group's mean itself, so score each completion for itself.",
    "plain as messages": "Training with chat prompts hands over message "
    "lists, others texts. Take the text out of both: "
    "rewards.batch.completion_texts does.",
    "changes no argument": "The next reward function gets the same lists: "
    "make a copy before you change one.",
    "fast enough": "Make it faster, plan fewer rollouts, or say what it may "
    "take: check_reward(..., limit_seconds=...).",
    "answers can be read": "A reference answer needs ####, a box, a number or "
    "a short text: look whether the column is the right one.",
}
# What to do instead when the reason of a failed call holds these words.
_REMEDIES = {
    "unexpected keyword": "TRL calls a reward by keyword with more than it "
    "needs: give it **kwargs.",
    "FileNotFoundError": f"{BESIDE}.",
}
# What a call should do, and the failures that break it.
_CALLS = {
    "runs": ("timeout", "memory", "crash", "error"),
    "gives a number": ("no number",),
    "is finite": ("not finite",),
}
# What should not score like a right answer: its kind of probe, in words.
_TRAPS = {
    "not for wrong": ("wrong", "a wrong answer"),
    "not for swapped": ("swapped", "the answer of another row"),
    "not for empty": ("empty", "an empty text"),
    "not for tags only": ("tags only", "tags without an answer"),
    "not for truncated": ("truncated", "a text that ends before its answer"),
    "not for a hedge": ("hedge", "a list of several answers"),
    "not for a placeholder": (
        "placeholder",
        "a copy of the prompt's placeholder",
    ),
    "not for the question": ("question", "a copy of the question"),
}
# Right answers that should still be rewarded: their kind of probe, in words.
_RIGHT_BY_NAME = {
    "rewards long reasoning": (
        "many lines",
        "right with 20 lines of reasoning",
        "with one",
    ),
    "same on its own line": (
        "own line",
        "right with the answer on a line of its own",
        "in a line",
    ),
}
_RIGHT = tuple(kind for kind, _, _ in _RIGHT_BY_NAME.values())
# What a score should not depend on, and what Trial.repeats calls it.
_STAYS = {
    "same score twice": "nothing",
    "same in any order": "order",
    "same on its own": "company",
}


def check_reward(
    reward: Any,
    rows: Any,
    *,
    rollouts: int = 4000,
    limit_seconds: float = 600.0,
    seconds: float = 5.0,
) -> Verdicts:
    """Prove a reward on rows of the data it will train on.

    `reward` is the path of a reward file, its function itself, a function
    with TRL's signature (it may be asynchronous), or a list of those, judged
    as a sum in which None is left out. `rows` are dicts, or a dataset, with a
    reference answer in `answer`, `solution` or `ground_truth`, and a question
    in `question`, `problem` or `prompt`; the first 20 whose answer can be
    read are used. After a minute what was seen until then is judged.

    `rollouts` is how many completions the training will score, and
    `limit_seconds` what that may take; `seconds` is what one call of a reward
    file may take.

    Returns Verdicts: print it, or ask `verdicts.passed`, or
    `verdicts["rewards right answers"].passed`. What can't be judged is None.

    A function is called in this process, where nothing can end it: one that
    loops for ever hangs the check, and `os._exit` ends the program. A reward
    file can do neither.

    Raises RewardError when there are no rows that can be used, when a reward
    file can't be loaded, and for numbers that are not above zero.

    >>> def careless(question, answer, completion):
    ...     return float(answer in completion)
    >>> rows = [{"question": "9 + 9?", "answer": "18"},
    ...         {"question": "3 + 4?", "answer": "7"}]
    >>> verdicts = check_reward(careless, rows)
    >>> verdicts["rewards right answers"].passed
    True
    >>> [verdict.name for verdict in verdicts.failures]
    ['not for wrong', 'not for truncated', 'not for a hedge']

    Source: each check stands for a fault of a reward that was published, see
    rewards.published.
    """
    if not (rollouts > 0 and limit_seconds > 0):
        raise RewardError(
            f"A training of {rollouts} completions in {limit_seconds:g} s is "
            "none. Give numbers above 0, for example rollouts=4000 and "
            "limit_seconds=600."
        )
    examples, unread = examples_of(rows, MAX_ROWS)
    subject = subject_of(reward, seconds)
    try:
        trial = Trial(subject, examples)
        trial.run()
    finally:
        subject.close()
    rows = [_Row.of(scored) for scored in trial.judged]
    verdicts = [
        *_calls(trial),
        _rewards_right(trial, rows),
        *(_not_for(rows, name, *trap) for name, trap in _TRAPS.items()),
        _survives_in("rewards long reasoning", rows, trial.form),
        _survives_in("same on its own line", rows, trial.form),
        _varies(rows),
        *_stays(trial),
        _leaves_alone(trial),
        _fast(trial, rollouts, limit_seconds),
        _answers(*unread),
    ]
    return Verdicts(subject.name, trial.form, tuple(verdicts))


@dataclass(frozen=True)
class _Row:
    """The scores of one example, by kind of probe.

    Attributes:
        pairs: by kind, the probes that have a number, and it.
        right: the probe of the right answer.
        score: what that got, or None.
        rewarded: whether that is more than an empty text gets, and more than
            at least one wrong answer.
        kinds: of all probes, those without a number too.
    """

    pairs: dict[str, list[tuple[Probe, float]]]
    right: Probe
    score: float | None
    rewarded: bool
    kinds: frozenset[str] = frozenset()

    def has(self, kind: str) -> bool:
        """Whether there was such a probe, with a number or without."""
        return kind in self.kinds

    @classmethod
    def of(cls, scored: list[Pair]) -> _Row:
        pairs: dict[str, list[tuple[Probe, float]]] = {}
        for probe, score in scored:
            if score.value is not None:
                pairs.setdefault(probe.kind, []).append((probe, score.value))
        right, score = scored[0]
        others = [
            value
            for kind, found in pairs.items()
            if kind not in ("right", *_RIGHT)
            for _, value in found
        ]
        nothing = [value for _, value in pairs.get("empty", [])]
        bars = [max(nothing) if nothing else min(others, default=0.0)]
        bars += [min(v for _, v in pairs["wrong"])] if "wrong" in pairs else []
        rewarded = score.value is not None and score.value > max(bars) + LEAST
        kinds = frozenset(probe.kind for probe, _ in scored)
        return cls(pairs, right, score.value, rewarded, kinds)

    def most(self, *kinds: str) -> tuple[Probe, float] | None:
        """Return the (probe, score) of these kinds that scores best."""
        found = [pair for kind in kinds for pair in self.pairs.get(kind, [])]
        return max(found, key=lambda pair: pair[1], default=None)


def _judged(
    name: str, passed: bool | None, seen: str, completion: str = ""
) -> Verdict:
    """Return a verdict, with what to do if it failed."""
    advice = _ADVICE[name] if passed is False else ""
    return Verdict(name, passed, seen, completion, advice)


def _calls(trial: Trial) -> Iterator[Verdict]:
    """Judge that every call gave a finite number."""
    left = trial.pairs
    for name, kinds in _CALLS.items():
        bad = [pair for pair in left if pair[1].failure in kinds]
        if not left:
            why = "no call came so far" if trial.pairs else "not tried"
            yield Verdict(name, None, why)
        elif bad:
            yield _call_failed(trial, name, bad, len(left))
        else:
            seen = f"{len(left)} completions"
            if name == "runs" and trial.stopped:
                seen += f"; {trial.stopped}"
            yield Verdict(name, True, seen, left[0][0].text)
        left = [pair for pair in left if pair[1].failure not in kinds]


def _call_failed(
    trial: Trial, name: str, bad: list[Pair], tried: int
) -> Verdict:
    probe, score = bad[0]
    advice = _ADVICE[name]
    counts = Counter(score.failure for _, score in bad)
    counted = ", ".join(f"{n} x {kind}" for kind, n in counts.items())
    seen = f"{counted} in {tried} completions, the first: {score.reason}"
    if trial.stopped:
        seen += f" ({trial.stopped})"
    for words, remedy in _REMEDIES.items():
        if words in score.reason:
            advice = remedy
    return Verdict(name, False, seen, probe.text, advice)


def _rewards_right(trial: Trial, rows: list[_Row]) -> Verdict:
    name = "rewards right answers"
    if not trial.pairs:
        return Verdict(name, None, "not tried: no reference can be read")
    if not rows:
        return Verdict(
            name,
            False,
            f"no row was done: {trial.stopped}",
            trial.pairs[0][0].text,
            "Let a call end in time, then check again.",
        )
    missed = [row for row in rows if not row.rewarded]
    seen = (
        f"{len(rows) - len(missed)} of {len(rows)} rows; on average "
        f"{_mean(rows, 'right')} for a right answer, "
        f"{_mean(rows, 'wrong')} for a wrong one, "
        f"{_mean(rows, 'empty')} for an empty text"
    )
    if not missed:
        return Verdict(name, True, seen, rows[0].right.text)
    row = missed[0]
    return Verdict(name, False, seen, row.right.text, _why_not(row))


def _why_not(row: _Row) -> str:
    """Return what to do when a right answer is not rewarded."""
    empty = row.most("empty")
    if empty and (row.score or 0) > empty[1] + LEAST:
        cause = (
            "A wrong answer in the same form gets as much: only the form is "
            "rewarded. If this reward is for the form alone, judge it "
            "together with the one for right answers: check_reward([form, "
            "correctness], rows). Else"
        )
    else:
        cause = "It rewards no form of the right answer here. So"
    return (
        f"{cause} look how it reads the reference answer, which is "
        f"{row.right.example.answer!r} in this row and may stand at the end "
        "of a solution (GSM8K: after ####), and compare numbers, not texts."
    )


def _mean(rows: list[_Row], kind: str) -> str:
    best = [row.most(kind) for row in rows]
    values = [found[1] for found in best if found]
    return _number(statistics.fmean(values)) if values else "no score"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _not_for(rows: list[_Row], name: str, kind: str, words: str) -> Verdict:
    """Judge that this kind of completion gets less than a right one."""
    tried = [
        (row.score, most)
        for row in rows
        if row.rewarded and row.score is not None and (most := row.most(kind))
    ]
    if not tried:
        rewarded = any(row.rewarded for row in rows)
        why = "nothing to try" if rewarded else "no right answer is rewarded"
        return Verdict(name, None, why)
    right, (probe, value) = min(tried, key=lambda pair: pair[0] - pair[1][1])
    bad = sum(value >= right - LEAST for right, (_, value) in tried)
    seen = f"{_number(value)} for {words}, {_number(right)} for a right answer"
    if bad:
        seen += f": as much or more in {bad} of {len(tried)} rows"
    return _judged(name, not bad, seen, probe.text)


def _survives_in(name: str, rows: list[_Row], form: str) -> Verdict:
    """Judge that a right answer is rewarded when it is written otherwise."""
    kind, words, other = _RIGHT_BY_NAME[name]
    right = [row for row in rows if row.rewarded]
    if not right:
        return Verdict(name, None, "no right answer is rewarded")
    tried = [row for row in right if row.has(kind)]
    if not tried:
        so = OWN_LINE in FORMS[form]
        seen = "the best form has it so" if so else "nothing to try"
        return Verdict(name, so or None, seen, right[0].right.text)
    bad = [row for row in tried if not _survives(row, kind)]
    row = (bad or tried)[0]
    found = row.most(kind)
    got = "no score" if found is None else _number(found[1])
    seen = f"{words} gets {got}, {other} {_number(row.score or 0.0)}"
    if bad:
        seen += f", in {len(bad)} of {len(tried)} rows"
    return _judged(name, not bad, seen, (found or (row.right, 0))[0].text)


def _survives(row: _Row, kind: str) -> bool:
    """Tell whether a right answer of this kind still scores."""
    others = [row.most("empty"), row.most("wrong")]
    score = row.score or 0.0
    bars = [found[1] for found in others if found and found[1] < score]
    found = row.most(kind)
    return found is not None and found[1] > max(bars, default=-math.inf)


def _varies(rows: list[_Row]) -> Verdict:
    name = "varies in a group"
    if not rows:
        return Verdict(name, None, "not tried")
    spreads = []
    for row in rows:
        values = [v for found in row.pairs.values() for _, v in found] or [0]
        spreads.append(max(values) - min(values))
    flat = sum(spread <= LEAST for spread in spreads)
    text = rows[0].right.text
    seen = f"right and wrong ones differ by {_number(min(spreads))} or more"
    if flat:
        seen = f"every completion gets the same in {flat} of {len(rows)} rows"
    return _judged(name, not flat, seen, text)


def _stays(trial: Trial) -> Iterator[Verdict]:
    """Judge that a score depends on nothing but its own row."""
    steady = None
    for name, change in _STAYS.items():
        repeats = trial.repeats.get(change)
        if not repeats or steady is False:
            why = "not the same twice" if repeats else "not tried"
            yield Verdict(name, None, why)
            continue
        verdict = _unchanged(name, repeats)
        if change == "nothing":
            steady = verdict.passed
        yield verdict
    yield _same_for_messages(trial, steady)


def _unchanged(name: str, repeats: Any) -> Verdict:
    if all(before.failure and after.failure for _, before, after in repeats):
        return Verdict(name, None, "no score to compare")
    bad = [
        (probe, before, after)
        for probe, before, after in repeats
        if not _equal(before, after)
    ]
    if not bad:
        seen = f"{len(repeats)} completions"
        return Verdict(name, True, seen, repeats[0][0].text)
    probe, before, after = bad[0]
    seen = (
        f"{_given(before)}, then {_given(after)}; {len(bad)} of "
        f"{len(repeats)} completions changed"
    )
    return _judged(name, False, seen, probe.text)


def _equal(one: Score, other: Score) -> bool:
    if one.value is None or other.value is None:
        return one.value == other.value
    return math.isclose(one.value, other.value, rel_tol=1e-6, abs_tol=LEAST)


def _given(score: Score) -> str:
    return "no score" if score.value is None else _number(score.value)


def _same_for_messages(trial: Trial, steady: bool | None) -> Verdict:
    """Judge that plain and conversational completions get the same."""
    name = "plain as messages"
    repeats = trial.repeats.get("messages")
    here, there = ["plain texts", "message lists"][:: 1 - 2 * trial.messages]
    if not repeats or steady is False:
        why = "not the same twice" if repeats else "not tried"
        return Verdict(name, None, why)
    if all(after.failure for _, _, after in repeats):
        reason = repeats[0][2].reason
        return Verdict(name, None, f"reads {here} only; {there}: {reason}")
    verdict = _unchanged(name, repeats)
    if not verdict.passed and "prompt" in trial.examples[0].row:
        # the data says which of the two training will use
        return replace(
            verdict, passed=None, seen=f"for {here}, {there}: {verdict.seen}"
        )
    return verdict


def _leaves_alone(trial: Trial) -> Verdict:
    name = "changes no argument"
    if not trial.pairs:
        return Verdict(name, None, "not tried")
    changed = trial.subject.changed
    seen = f"it changes '{changed}'" if changed else "they are as they were"
    return _judged(name, not changed, seen)


def _fast(trial: Trial, rollouts: int, limit_seconds: float) -> Verdict:
    name = "fast enough"
    each = trial.seconds_each()
    if each is None:
        return Verdict(name, None, "not tried")
    needed = each * rollouts
    seen = (
        f"{each * 1000:,.2f} ms each, {needed:,.2f} s for {rollouts:,} "
        f"rollouts (limit {limit_seconds:,g} s)"
    )
    return _judged(name, needed <= limit_seconds, seen)


def _answers(unread: int, rows: int) -> Verdict:
    name = "answers can be read"
    seen = f"{rows - unread} of {rows}"
    if unread in (0, rows):
        return _judged(name, not unread, seen)
    seen += "; the others give no score"
    return Verdict(name, None, seen, advice=_ADVICE[name])
