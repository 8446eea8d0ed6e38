"""Call any kind of reward and learn what it gave: a Score for each text."""

import asyncio
import functools
import inspect
import os
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rewards.batch import RewardError
from rewards.contract.probes import Example
from rewards.contract.reward_file import (
    FileReward,
    Score,
    calls_of,
    finite_score,
    load_reward,
    told,
)

# What the trainer passes by other names, or never.
_NO_COLUMNS = ("prompt", "completion", "completion_ids")
# What each call gets a copy of.
_MADE_ANEW = ("prompts", "completions", "completion_ids")


class Subject:
    """A reward that can be called with texts of examples.

    Attributes:
        name: of the reward.
        changed: the name of an argument that it has changed, or "".
    """

    name = ""
    changed = ""

    def scores(
        self, examples: list[Example], texts: list[str], conversational: bool
    ) -> list[Score]:
        """Score a text for each example, plain or as a list of messages."""
        raise NotImplementedError

    def close(self) -> None:
        """End what it has started."""


def subject_of(reward: Any, seconds: float) -> Subject:
    """Return the subject for a path, a function, or a list of them.

    Raises RewardError for anything else.

    >>> from rewards import correctness_reward, integer_reward
    >>> subject_of([correctness_reward, integer_reward], seconds=5.0).name
    'sum of correctness_reward, integer_reward'
    """
    if isinstance(reward, str | os.PathLike):
        return _File(load_reward(reward, seconds=seconds))
    if isinstance(reward, list | tuple) and reward:
        return _Sum([subject_of(part, seconds) for part in reward])
    if isinstance(reward, FileReward):
        return _File(reward)
    if callable(reward):
        return _Function(reward)
    raise RewardError(
        f"A reward is a function, the path of a reward file, or a list of "
        f"them, and this is {type(reward).__name__} {reward!r:.40}. Pass for "
        "example check_reward('reward.py', rows)."
    )


class _File(Subject):
    def __init__(self, reward: FileReward) -> None:
        self.reward = reward
        self.name = reward.__name__

    def close(self) -> None:
        self.reward.close()

    def scores(
        self, examples: list[Example], texts: list[str], conversational: bool
    ) -> list[Score]:
        call = _call(examples, texts, conversational)
        del call["completion_ids"]
        return self.reward.scores(**call)


class _Function(Subject):
    def __init__(self, function: Any) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        one = _takes_one_completion(function)
        self.function = _for_a_batch(function) if one else function

    def scores(
        self, examples: list[Example], texts: list[str], conversational: bool
    ) -> list[Score]:
        try:
            return self._batch(examples, texts, conversational)
        except (Exception, SystemExit) as error:
            if len(texts) == 1:
                return [Score(None, "error", told(error))]
        # one by one, to find the completion that it can't take
        return [
            self.scores([example], [text], conversational)[0]
            for example, text in zip(examples, texts, strict=True)
        ]

    def _batch(
        self, examples: list[Example], texts: list[str], conversational: bool
    ) -> list[Score]:
        call = _call(examples, texts, conversational)
        values = self.function(
            **call,
            trainer_state=types.SimpleNamespace(
                global_step=0, max_steps=1, epoch=0.0
            ),
            log_extra=lambda column, values: None,
            log_metric=lambda name, value: None,
        )
        if inspect.isawaitable(values):
            values = _awaited(values)
        self._notice_changes(call, _call(examples, texts, conversational))
        values = list(values)
        if len(values) != len(texts):
            raise ValueError(
                f"it returned {len(values)} scores for {len(texts)} "
                "completions"
            )
        return [Score() if v is None else finite_score(v) for v in values]

    def _notice_changes(
        self, call: dict[str, Any], as_it_was: dict[str, Any]
    ) -> None:
        for name, values in call.items():
            if name in _MADE_ANEW:
                changed = values != as_it_was[name]
            else:  # the row's own values, which may be arrays
                changed = [*map(id, values)] != [*map(id, as_it_was[name])]
            if changed:
                self.changed = name


class _Sum(Subject):
    """The parts' scores added up as TRL does: None is left out."""

    def __init__(self, parts: list[Subject]) -> None:
        self.parts = parts
        self.name = "sum of " + ", ".join(part.name for part in parts)

    def scores(
        self, examples: list[Example], texts: list[str], conversational: bool
    ) -> list[Score]:
        columns = [
            part.scores(examples, texts, conversational) for part in self.parts
        ]
        self.changed = next((p.changed for p in self.parts if p.changed), "")
        return [self._added(scores) for scores in zip(*columns, strict=True)]

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def _added(self, scores: Sequence[Score]) -> Score:
        for part, score in zip(self.parts, scores, strict=True):
            if score.failure:
                reason = f"{part.name}: {score.reason}"
                return Score(None, score.failure, reason)
        values = [s.value for s in scores if s.value is not None]
        return Score(sum(values)) if values else Score()


def _takes_one_completion(function: Any) -> bool:
    """Tell whether a function has the form of a reward file's."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return "completion" in names and "completions" not in names


def _for_a_batch(function: Any) -> Callable[..., list[Any]]:
    """Return a function of one completion as one with TRL's signature."""

    @functools.wraps(function)
    def reward(
        completions: list[Any], prompts: list[Any], **columns: Any
    ) -> list[Any]:
        calls = calls_of(completions, prompts, columns)
        scores = [function(**call) for call in calls if call is not None]
        if any(score is None for score in scores):
            raise TypeError("it returned None, which is no number")
        return scores

    return reward


def _call(
    examples: list[Example], texts: list[str], conversational: bool
) -> dict[str, Any]:
    """Return the arguments with which TRL would call a reward function."""
    return {
        "prompts": [_prompt(e, conversational) for e in examples],
        "completions": [
            [{"role": "assistant", "content": text}]
            if conversational
            else text
            for text in texts
        ],
        # a token a byte: a reward may read how long a completion is
        "completion_ids": [list(t.encode(errors="replace")) for t in texts],
    } | {
        name: [example.row.get(name) for example in examples]
        for name in examples[0].row
        if name not in _NO_COLUMNS
    }


def _prompt(example: Example, conversational: bool) -> Any:
    prompt = example.row.get("prompt")
    if not conversational:
        return prompt if isinstance(prompt, str) else example.question
    if isinstance(prompt, list):
        return [dict(message) for message in prompt]
    return [{"role": "user", "content": example.question}]


def _awaited(values: Any) -> Any:
    """Wait for an asynchronous reward; a notebook has a loop of its own."""

    async def wait() -> Any:
        return await values

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, wait()).result()
