"""Call a reward with probes, as much as time allows, and keep what it gave.

`rewards.contract.check` judges what is kept here.
"""

import statistics
import time
from dataclasses import dataclass, field

from rewards.contract.probes import FORMS, Example, Probe, probes, right, wrong
from rewards.contract.reward_file import Score
from rewards.contract.subjects import Subject

FORM_ROWS = 3  # these decide which form scores best
GROUP = 8  # completions in one call, as in a group of GRPO
REPEATED = 16  # completions that are scored again, in other company
MAX_TIMEOUTS = 3  # then it is clear
MAX_SECONDS = 60.0  # what was seen until then is judged

Pair = tuple[Probe, Score]


@dataclass
class Trial:
    """The calls of one check, and what came back.

    Attributes:
        subject: the reward (see rewards.contract.subjects).
        examples: the rows of data.
        messages: whether the completions are message lists.
        form: the form that scores best, "" when unknown.
        pairs: every probe with its score, in the order of the calls.
        judged: for each example, its probes and scores in the best form.
        repeats: by what was changed ("nothing", "order", "company",
            "messages"), the probe with its score before and after.
        stopped: "", or why not every example was tried.
    """

    subject: Subject
    examples: list[Example]
    messages: bool = False
    form: str = ""
    pairs: list[Pair] = field(default_factory=list)
    judged: list[list[Pair]] = field(default_factory=list)
    repeats: dict[str, list[tuple[Probe, Score, Score]]] = field(
        default_factory=dict
    )
    stopped: str = ""
    _started: float = 0.0
    _times: list[float] = field(default_factory=list)

    def run(self) -> None:
        """Score everything, or as much as time and deadlines allow."""
        if not self.examples:
            return
        self._started = time.perf_counter()
        self.messages = isinstance(self.examples[0].row.get("prompt"), list)
        if self._hangs_or_reads_nothing():
            return
        self.form = self._best_form()
        for number, example in enumerate(self.examples):
            scored = self._score(probes(example, self.form))
            if scored:
                self.judged.append(scored)
            if number == min(1, len(self.examples) - 1):
                self._repeat()

    def seconds_each(self) -> float | None:
        """Return the mean time of a completion in a group, None if unknown.

        The first call is left out: it starts processes and fills caches.
        """
        times = self._times[1:] or self._times
        return statistics.fmean(times) if times else None

    def _hangs_or_reads_nothing(self) -> bool:
        first = self.examples[0]
        tries = [right(first, form) for form in list(FORMS)[::6]]
        scores = [score for _, score in self._score(tries)]
        if all(score.failure == "timeout" for score in scores):
            self.stopped = "it answers nothing in time"
            return True
        if "prompt" not in first.row and _all_raise(scores):
            # it may be written for message lists
            self.messages = not _all_raise(self._call(tries, messages=True))
            if self.messages:
                self.pairs.clear()
        return False

    def _best_form(self) -> str:
        """Return the form where right beats wrong most often, and by most."""
        scored = []
        for example in self.examples[:FORM_ROWS]:
            if self._elapsed() > MAX_SECONDS / 4:
                break  # the rest of the time is for the other checks
            for form in FORMS:
                scored += self._score(
                    [right(example, form), wrong(example, form)]
                )

        def gain(form: str) -> tuple[int, float, float]:
            found: dict[str, list[float]] = {"right": [], "wrong": []}
            for probe, score in scored:
                if probe.form == form:
                    found[probe.kind].append(score.value or 0.0)
            pairs = list(zip(found["right"], found["wrong"], strict=False))
            return (
                sum(good > bad for good, bad in pairs),
                sum(good - bad for good, bad in pairs),
                sum(found["right"]),
            )

        return max(FORMS, key=gain)

    def _repeat(self) -> None:
        """Score some probes again: the same way, and in other company."""
        known = [
            probe
            for scored in self.judged
            for probe, score in scored
            if score.failure != "timeout"
        ]
        some = known[:: max(1, len(known) // REPEATED)][:REPEATED]
        if not some or self._spent():
            return
        before = self._call(some)
        for change, call in (
            ("nothing", lambda: self._call(some)),
            ("order", lambda: self._call(some[::-1])[::-1]),
            ("company", lambda: [self._call([probe])[0] for probe in some]),
            ("messages", lambda: self._call(some, not self.messages)),
        ):
            if self._spent():
                return
            self.repeats[change] = list(zip(some, before, call(), strict=True))
        self.repeats["nothing"] += self._against_the_first_time()

    def _against_the_first_time(self) -> list[tuple[Probe, Score, Score]]:
        """Score a group again as it was when its completions were new.

        A reward that remembers what it has seen gives other scores then. A
        group in which a call was late is not asked again.
        """
        asked, before = zip(*self.judged[0][:GROUP], strict=True)
        if any(score.failure == "timeout" for score in before):
            return []
        return list(zip(asked, before, self._call([*asked]), strict=True))

    def _score(self, todo: list[Probe]) -> list[Pair]:
        """Score probes in groups; those for which there is no time are left.

        Returns the pairs of those that were scored.
        """
        scored: list[Pair] = []
        for start in range(0, len(todo), GROUP):
            if self._spent():
                break
            group = todo[start : start + GROUP]
            begun = time.perf_counter()
            scores = self._call(group)
            self._times.append((time.perf_counter() - begun) / len(group))
            scored += zip(group, scores, strict=True)
            self.pairs += scored[-len(group) :]
        return scored

    def _call(
        self, group: list[Probe], messages: bool | None = None
    ) -> list[Score]:
        return self.subject.scores(
            [probe.example for probe in group],
            [probe.text for probe in group],
            self.messages if messages is None else messages,
        )

    def _spent(self) -> bool:
        late = sum(score.failure == "timeout" for _, score in self.pairs)
        if late >= MAX_TIMEOUTS:
            self.stopped = f"stopped after {late} timeouts"
        elif self._elapsed() > MAX_SECONDS:
            self.stopped = f"stopped after {MAX_SECONDS:g} s"
        return bool(self.stopped)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started


def _all_raise(scores: list[Score]) -> bool:
    return all(score.failure == "error" for score in scores)
