"""What became of each completion: counted, logged, and stopped in time.

A reward of 0 says that an answer was wrong. It must not also say that the
answer could not be read, that the comparison was given up, or that the gold
is broken: such a run looks like one that learns nothing, and goes on for
hours. So every grader says what became of each completion, by an `Outcome`;
`report` hands the counts to the trainer's log, and a `FailureLimit` that reads
this log ends a run in which too much fails.
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from rewards.batch import RewardError

Log = Callable[[str, Any], None]
"""TRL's `log_metric` and `log_extra`."""


class Outcome(StrEnum):
    """What became of one completion.

    >>> Outcome.RIGHT.score(2.0), Outcome.UNREADABLE.score(2.0)
    (2.0, 0.0)
    >>> print(Outcome.NO_GOLD.score(2.0))
    None
    """

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    """The completion gives no answer where the policy looks for one."""
    UNREADABLE = "unreadable"
    """It gives one that can't be parsed."""
    UNDECIDED = "undecided"
    """It may be right: "500K" is 500,000, or 500 of a unit."""
    TIMEOUT = "timeout"
    """The work was killed at its deadline; a comparison, also for its memory
    or by a crash."""
    NO_GOLD = "no_gold"
    """The gold can't be read, so that nobody knows what is right."""
    ERROR = "error"
    """A reward file's code raised, crashed, took too much memory or gave no
    finite number."""
    SCORED = "scored"
    """A reward file gave a number, which may mean anything."""

    def score(self, right: float) -> float | None:
        """Return `right` for the right answer, 0.0 for others.

        None where nobody knows: without a gold, and for what is undecided.
        TRL leaves None out of the sum of the rewards.
        """
        if self in (Outcome.NO_GOLD, Outcome.UNDECIDED):
            return None
        return right if self is Outcome.RIGHT else 0.0


FAILURES = (
    Outcome.UNREADABLE,
    Outcome.UNDECIDED,
    Outcome.TIMEOUT,
    Outcome.NO_GOLD,
    Outcome.ERROR,
)
"""The outcomes that say something about the grading, not about the policy.

An answer that is missing is none of them: a policy that has not learned the
form yet gives none.
"""


def report(
    name: str,
    outcomes: Sequence[Outcome],
    details: Any,
    /,
    *,
    log_metric: Log | None = None,
    log_extra: Log | None = None,
    **columns: Any,
) -> None:
    """Hand the outcomes of one batch to the trainer's log.

    `name` is the reward's, `outcomes` has one Outcome for each completion,
    and `details` holds more columns of texts, such as {"answer": answers}.
    `log_metric` and `log_extra` are what TRL passes to a reward function;
    without them nothing happens. The metrics are shares of the batch, from 0
    to 1: ``name/failed``, ``name/no_answer`` and one for each of FAILURES.
    The columns ``name/outcome`` and those of `details` go to the table of
    completions.

    >>> report("accuracy", [Outcome.RIGHT, Outcome.TIMEOUT], {},
    ...        log_metric=lambda name, share: print(name, share))
    accuracy/failed 0.5
    accuracy/no_answer 0.0
    accuracy/unreadable 0.0
    accuracy/undecided 0.0
    accuracy/timeout 0.5
    accuracy/no_gold 0.0
    accuracy/error 0.0
    """
    if log_metric is not None and outcomes:
        failed = sum(outcome in FAILURES for outcome in outcomes)
        log_metric(f"{name}/failed", failed / len(outcomes))
        for outcome in (Outcome.NO_ANSWER, *FAILURES):
            share = outcomes.count(outcome) / len(outcomes)
            log_metric(f"{name}/{outcome}", share)
    if log_extra is not None:
        log_extra(f"{name}/outcome", [str(outcome) for outcome in outcomes])
        for column, texts in details.items():
            log_extra(f"{name}/{column}", [text or "" for text in texts])


class FailureLimit:
    """Ends a run in which too much can't be graded.

    Give `add` what the trainer logs after each step, from a callback of the
    trainer. Over the last `window` completions or more, at most
    `max_failed_share` of them (0 to 1; 1 never ends a run) may have an
    outcome of FAILURES, by the reward that fails most. Going by the log
    leaves the rewards as they are, and on several GPUs, where TRL averages
    what is logged, all processes end together. With 64 completions a step
    and `logging_steps=1`, for the argument `callbacks` of a trainer::

        class Stop(TrainerCallback):
            limit = FailureLimit()

            def on_log(self, args, state, control, logs, **kwargs):
                self.limit.add(logs, 64)

    Raises RewardError for a share that is not between 0 and 1, and for a
    window of less than one completion.

    >>> limit = FailureLimit(max_failed_share=0.5, window=8)
    >>> limit.add({"accuracy_reward/failed": 0.75, "reward": 0.1}, 4)
    >>> try:
    ...     limit.add({"accuracy_reward/failed": 0.75, "reward": 0.1}, 4)
    ... except RewardError as error:
    ...     print(str(error)[:43])
    Of the last 8 completions, 75 % could not b
    """

    def __init__(
        self, max_failed_share: float = 0.5, window: int = 200
    ) -> None:
        if not 0 <= max_failed_share <= 1:
            raise RewardError(
                f"The largest share of failures is {max_failed_share}, and a "
                "share lies between 0 and 1. Type one, such as 0.5; 1 never "
                "ends a run."
            )
        if window < 1:
            raise RewardError(
                f"The share of failures over {window} completions is nothing "
                "that can be known. Type window=200 or so."
            )
        self.max_failed_share = max_failed_share
        self.window = window
        self.steps: deque[tuple[int, float]] = (
            deque()
        )  # (completions, how many of them failed)

    def add(self, logs: dict, completions: int) -> None:
        """Count one step; `logs` maps the names of metrics to values.

        Raises RewardError when the share is exceeded.
        """
        failed = {k: v for k, v in logs.items() if k.endswith("/failed")}
        if not failed:
            return
        worst = max(failed, key=lambda name: failed[name])
        self.steps.append((completions, failed[worst] * completions))
        while self._seen() - self.steps[0][0] >= self.window:
            self.steps.popleft()
        share = sum(count for _, count in self.steps) / self._seen()
        if self._seen() >= self.window and share > self.max_failed_share:
            raise self._error(share, worst.removesuffix("/failed"), logs)

    def _seen(self) -> int:
        return sum(completions for completions, _ in self.steps)

    def _error(
        self, share: float, name: str, logs: dict[str, float]
    ) -> RewardError:
        kinds = ", ".join(
            f"{kind} {logs[f'{name}/{kind}']:.0%}"
            for kind in FAILURES
            if logs.get(f"{name}/{kind}")
        )
        return RewardError(
            f"Of the last {self._seen()} completions, {share * 100:.0f} % "
            f"could not be graded by {name}, so this run would learn from "
            f"noise. In the last step: {kinds or 'none'}. Look at the columns "
            f"'{name}/...' of the completions: unreadable answers call for "
            "another prompt or another reward, no_gold for other golds, "
            "error for another reward file. To go on all the same, raise the "
            "share that is allowed to fail, max_failed_share, which is "
            f"{self.max_failed_share:g} now."
        )
