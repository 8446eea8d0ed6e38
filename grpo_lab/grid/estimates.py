"""What a grid will take, before it starts."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab import evaluation, models
from grpo_lab.data import Splits
from grpo_lab.profiles import RunSettings, run_names
from grpo_lab.speed.dequantised import writer

STEP_BY_ROLLOUTS = 2.5
"""Time of a step by that of its rollouts; 2.6 in the pocket grid on a CPU."""


@dataclass(frozen=True)
class Pace:
    """How long a step's rollouts take, measured once on one policy.

    Attributes:
        seconds: of sampling one step's completions.
        layers: of the model that was measured.
    """

    seconds: float
    layers: int


def measure_pace(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RunSettings,
    splits: Splits,
) -> Pace:
    """Sample the completions of one optimiser step and take the time."""
    endless = itertools.cycle(splits.train["prompt"])
    groups = itertools.islice(endless, settings.prompts_per_step)
    prompts = [one for one in groups for _ in range(settings.num_generations)]
    limit = settings.max_completion_length
    started = time.monotonic()
    levers = models.levers_in_force(settings)
    evaluation.generate(
        writer(policy, levers),
        tokenizer,
        prompts,
        limit,
        temperature=settings.temperature,
        levers=levers,
    )
    seconds = time.monotonic() - started
    return Pace(seconds, policy.config.num_hidden_layers)


def estimates(
    settings: Sequence[RunSettings],
    train_rows: int,
    prompt_tokens: int,
    pace: Pace,
) -> pd.DataFrame:
    """What each run will take, before it starts.

    A step is taken to last `STEP_BY_ROLLOUTS` times as long as its rollouts,
    and to grow with the number of layers: a guess of the right size, no
    promise.

    Args:
        settings: the runs.
        train_rows: questions in the training set.
        prompt_tokens: length of the longest prompt.
        pace: from `measure_pace`.

    Returns:
        A row for each run: optimiser steps, completions per step and in all,
        the memory it needs and the memory there is, both in GiB, and the
        minutes of its training.
    """
    device = models.device_memory()

    def minutes(one: RunSettings) -> float:
        layers = models.entry(one.model).num_layers / pace.layers
        step = STEP_BY_ROLLOUTS * pace.seconds * layers
        return one.steps(train_rows) * step / 60

    return pd.DataFrame(
        [
            {
                "run": name,
                "steps": one.steps(train_rows),
                "prompts per step": one.prompts_per_step,
                "completions per step": one.completions_per_step,
                "completions": one.steps(train_rows)
                * one.completions_per_step,
                "needs GiB": models.memory_in_all(one, prompt_tokens),
                "there are GiB": device.memory,
                "minutes, about": minutes(one),
            }
            for name, one in zip(run_names(settings), settings, strict=True)
        ]
    )


def check_memory(settings: Sequence[RunSettings], prompt_tokens: int) -> None:
    """Refuse runs that would end out of memory; see `models.check_fits`.

    Raises:
        LabError: says by how much, and what to lower first.
    """
    for one in settings:
        models.check_fits(_memory(one, prompt_tokens), one)


def _memory(
    settings: RunSettings, prompt_tokens: int
) -> models.MemoryEstimate:
    shape = models.entry(settings.model)
    return models.estimate_memory(shape, settings, prompt_tokens)
