"""What a grid will take, before it starts."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_lab import evaluation, memory, models
from grpo_lab.data import Splits
from grpo_lab.prompts import longest_prompt
from grpo_lab.settings import RunSettings, run_names
from grpo_lab.speed.dequantised import generation_model

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
    longest = longest_prompt(tokenizer, splits.train["prompt"])
    optimizations = memory.resolve(settings, longest).optimizations
    evaluation.generate(
        generation_model(policy, optimizations),
        tokenizer,
        prompts,
        limit,
        temperature=settings.temperature,
        optimizations=optimizations,
    )
    seconds = time.monotonic() - started
    return Pace(seconds, policy.config.num_hidden_layers)


def estimates(
    settings: Sequence[RunSettings],
    train_rows: int,
    prompt_tokens: int,
    pace: Pace,
    gpus: float = 1.0,
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
        gpus: GPUs of each run, such as 0.5 for two runs on one.

    Returns:
        A row for each run: optimiser steps, completions per step and in all,
        the memory it needs with the optimisations that it will have, and the
        memory that it may use, both in GiB, and the minutes of its training.
    """
    share = memory.Share.of_gpus(gpus)

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
                "needs GiB": memory.resolve(one, prompt_tokens, share).memory,
                "there are GiB": share.memory,
                "minutes, about": minutes(one),
            }
            for name, one in zip(run_names(settings), settings, strict=True)
        ]
    )


def check_memory(
    settings: Sequence[RunSettings], prompt_tokens: int, gpus: float = 1.0
) -> None:
    """Refuse runs that would end out of memory; see `memory.check_fits`.

    Args:
        settings: the runs.
        prompt_tokens: length of the longest prompt.
        gpus: GPUs of each run, such as 0.5 for two runs on one.

    Raises:
        LabError: says by how much, and what to lower first.
    """
    share = memory.Share.of_gpus(gpus)
    for one in settings:
        shape = models.entry(one.model)
        least = memory.estimate_memory(shape, one, prompt_tokens)
        memory.check_fits(least, one, share)
