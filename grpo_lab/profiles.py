"""The one place of sizes, rates and lengths: a row for each kind of machine.

`PROFILE` in a lesson picks a row of the lesson's table; any other parameter
overrides one value of it. No lesson holds a size of its own.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_lab.errors import LabError
from grpo_lab.settings import (  # noqa: F401, some are for other modules
    ALL_LINEAR,
    ATTENTION_QV,
    RANGES,
    SCHEDULERS,
    RunSettings,
    run_names,
)


@dataclass(frozen=True)
class Profile:
    """One row of the table.

    Attributes:
        name: what `PROFILE` is set to.
        needs: the machine it is for, in words.
        gpu_memory: GPU memory that it is made for, in GiB; 0 for none.
        grid: the learning rates of the grid, for each base model.
        data: where the questions come from, a key of `data.SOURCES`.
        train_rows, eval_rows: questions to train on, and to hold out.
        eval_batch_size: questions answered at once in evaluation.
        run: every other value of `RunSettings` that differs from its default.
        short_steps: optimiser steps of a run that only shows a fault.
        manifest: what an evolution trains with, in the form of
            `grpo_lab.arena.manifest`, which knows what its keys mean.
    """

    name: str
    needs: str
    gpu_memory: int
    grid: dict[str, tuple[float, ...]]
    data: str
    train_rows: int
    eval_rows: int
    eval_batch_size: int
    run: dict
    short_steps: int = 0
    manifest: dict = field(default_factory=dict)

    def choose_grid(
        self, models: Sequence[str], learning_rates: Sequence[float]
    ) -> dict[str, tuple[float, ...]]:
        """This profile's grid with other models or other rates.

        Args:
            models: base models, or [] for the profile's.
            learning_rates: rates for each model, or [] for the profile's; a
                model that is not in the profile gets its first rates.
        """
        first = next(iter(self.grid.values()))
        return {
            model: tuple(learning_rates) or self.grid.get(model, first)
            for model in (models or self.grid)
        }

    def settings(
        self,
        grid: dict[str, tuple[float, ...]] | None = None,
        **overrides: object,
    ) -> list[RunSettings]:
        """The runs of a grid, each with every value set.

        Args:
            grid: learning rates for each model, in place of this profile's.
            overrides: other values of `RunSettings`, by field name, in place
                of this profile's.

        Raises:
            LabError: a value cannot train.
        """
        values = {**self.run, **overrides}
        return [
            RunSettings(model=model, learning_rate=rate, **values)
            for model, rates in (grid or self.grid).items()
            for rate in rates
        ]


NEEDS_LITTLE_MEMORY = {
    "optimizer": "adamw_bnb_8bit",
    "gradient_checkpointing": True,
}

FULL = Profile(
    name="full",
    needs="a GPU with at least 80 GB of memory",
    gpu_memory=79,
    grid={
        "Qwen/Qwen2.5-3B-Instruct": (5e-6, 1e-5),
        "meta-llama/Llama-3.1-8B-Instruct": (5e-6,),
        "Qwen/Qwen2.5-7B-Instruct": (5e-6,),
    },
    data="gsm8k",
    train_rows=500,
    eval_rows=100,
    eval_batch_size=50,
    run={
        **NEEDS_LITTLE_MEMORY,
        "completions_per_step": 16,
        "micro_batch": 8,
        "num_epochs": 2.0,
        "max_completion_length": 1024,
        "lora_r": 32,
        "lora_alpha": 64,
    },
)

LITE = Profile(
    name="lite",
    needs="a GPU with at least 15 GB of memory, such as a T4",
    gpu_memory=14,
    grid={
        "Qwen/Qwen2.5-0.5B-Instruct": (5e-6, 2e-5),
        "meta-llama/Llama-3.2-1B-Instruct": (5e-6, 2e-5),
    },
    data="gsm8k",
    train_rows=500,
    eval_rows=100,
    eval_batch_size=25,
    run={
        **NEEDS_LITTLE_MEMORY,
        "completions_per_step": 32,
        "micro_batch": 4,
        "max_steps": 60,
        # The median answer of the 0.5B model is about 274 tokens long.
        "max_completion_length": 512,
    },
)

POCKET = Profile(
    name="pocket",
    needs="two CPU cores; no GPU, no network",
    gpu_memory=0,
    grid={
        "pocket-qwen": (1e-3, 1e-4),
        "pocket-llama": (1e-3, 1e-4),
    },
    data="pocket",
    train_rows=500,
    eval_rows=400,
    eval_batch_size=200,
    run={
        "completions_per_step": 64,
        "micro_batch": 64,
        "max_steps": 32,
        "max_completion_length": 64,
        # With q_proj and v_proj alone, 24 steps of the first run at rates
        # from 1e-3 to 1e-2 took the form from 15 to 63-100 % of the answers,
        # and accuracy from 33 to 18-32 %.
        "target_modules": ALL_LINEAR,
        "max_grad_norm": 1.0,
    },
)


def _table(*rows: Profile) -> dict[str, Profile]:
    return {row.name: row for row in rows}


PROFILES = _table(FULL, LITE, POCKET)
"""The grid search: several models and rates, golds that are numbers."""

COOKBOOK_ADAPTER = {"lora_r": 8, "lora_alpha": 32}

FIRST_RUN = _table(
    replace(
        FULL,
        grid={"Qwen/Qwen2-1.5B-Instruct": (2e-5,)},
        data="numina_math_tir",
        train_rows=3622,  # 5 % of its train split
        eval_rows=80,  # of 99; a few have no gold to compare with
        run={
            **NEEDS_LITTLE_MEMORY,
            **COOKBOOK_ADAPTER,
            "completions_per_step": 64,
            "micro_batch": 16,
            "max_completion_length": 1024,
        },
        short_steps=40,
    ),
    replace(
        LITE,
        grid={"Qwen/Qwen2-0.5B-Instruct": (4e-5,)},
        data="numina_math_tir",
        train_rows=3622,
        eval_rows=80,
        run={**LITE.run, **COOKBOOK_ADAPTER},
        short_steps=20,
    ),
    replace(
        POCKET,
        grid={"pocket-qwen": (2e-3,)},
        data="pocket_latex",
        eval_rows=300,
        eval_batch_size=150,
        run={**POCKET.run, **COOKBOOK_ADAPTER, "max_steps": 24},
        short_steps=16,
    ),
)
"""The first run: one model, one rate, golds in LaTeX."""

COOKBOOK_AS_PUBLISHED = {
    "learning_rate": 1e-5,
    "num_generations": 4,
    # In TRL 0.14.0 a batch counts prompts: 8 of them, its default, with 4
    # completions each, and 16 such batches a step.
    "completions_per_step": 512,
    "micro_batch": 32,
    "max_steps": 0,
    "num_epochs": 1.0,
    "max_completion_length": 64,
    "temperature": 0.9,
    "top_k": 50,
    "beta": 0.04,
    **COOKBOOK_ADAPTER,
    "lora_dropout": 0.1,
    "target_modules": ATTENTION_QV,
    "load_in_4bit": False,
    "warmup_share": 0.0,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "adam_beta2": 0.999,
    "optimizer": "adamw_torch",
}
"""What the GRPO recipe of the Hugging Face Cookbook trains with.

S. Paniego, "Post training an LLM for reasoning with GRPO in TRL", Open-Source
AI Cookbook (2025); what it leaves to TRL 0.14.0 and transformers 4.47.1, the
versions that it names, is their default. Two things differ all the same: the
recipe cuts prompts at 128 tokens, and in its loss each completion weighs the
same.
"""

FIRST_RUN_VALUES = {"ours": {}, "published": COOKBOOK_AS_PUBLISHED}
"""What `SETTINGS` of the first run may be, and what it puts over a row."""


def first_run(
    profile: Profile, values: str, model: str = "", **overrides: object
) -> RunSettings:
    """The one run of the first lesson that trains.

    Args:
        profile: a row of `FIRST_RUN`.
        values: a key of `FIRST_RUN_VALUES`.
        model: the base model, or "" for the profile's.
        overrides: values of `RunSettings` in place of those two.

    Raises:
        LabError: there are no such values, or one cannot train.
    """
    if values not in FIRST_RUN_VALUES:
        raise LabError(
            f"There are no settings {values!r}; choose one of "
            f"{', '.join(FIRST_RUN_VALUES)}. Type SETTINGS = 'ours'."
        )
    [(own, [rate])] = profile.grid.items()
    chosen = {"model": model or own, "learning_rate": rate, **profile.run}
    return RunSettings(**chosen | FIRST_RUN_VALUES[values] | overrides)


RATE_AND_BETA = {
    "lr": {"min": 1e-7, "max": 1e-4},
    "beta": {"min": 1e-4, "max": 1e-2},
}
POCKET_RATES = {"lr": {"min": 1e-5, "max": 1e-2}}


def _evolution(
    model: str,
    steps: int,
    context: int,
    modules: Sequence[str],
    ranges: dict = RATE_AND_BETA,
    **algorithm: object,
) -> dict:
    """A manifest with the published values but for those that are given."""
    values: dict[str, Any] = {
        "name": "GRPO",
        "batch_size": 6,
        "group_size": 8,
        "beta": 0.001,
        "max_grad_norm": 0.1,
        "temperature": 0.9,
    } | algorithm
    per_step = values["batch_size"] * values["group_size"]
    return {
        "algorithm": values,
        "environment": {
            "name": "gsm8k",
            "fitness_rows": 100,
            "test_rows": 200,
        },
        "training": {
            "max_steps": per_step * 2 * steps,
            "pop_size": 2,
            "evo_steps": 5,
            "evaluation_interval": 5,
        },
        "mutation": {
            "rand_seed": 42,
            "probabilities": {"no_mut": 0.1, "rl_hp_mut": 0.6},
            "rl_hp_selection": ranges,
        },
        "tournament_selection": {"tournament_size": 2, "elitism": True},
        "network": {
            "pretrained_model_name_or_path": model,
            "max_context_length": context,
            "load_in_4bit": True,
            "lora_config": {
                "lora_r": 16,
                "lora_alpha": 64,
                "target_modules": list(modules),
            },
        },
    }


FULL_MANIFEST = _evolution(
    "Qwen/Qwen2.5-3B-Instruct",
    steps=40,
    context=1280,
    modules=ALL_LINEAR[:4],  # those of the attention
    lr=5e-6,
    max_output_tokens=768,
    micro_batch_size_per_gpu=8,
    gradient_checkpointing=True,
)
LITE_MANIFEST = _evolution(
    "Qwen/Qwen2.5-0.5B-Instruct",
    steps=20,
    context=1024,
    modules=ALL_LINEAR[:4],
    lr=1e-5,
    max_output_tokens=512,
    micro_batch_size_per_gpu=4,
    gradient_checkpointing=True,
)
POCKET_MANIFEST = _evolution(
    "pocket-qwen",
    steps=20,
    context=256,
    modules=ALL_LINEAR,
    ranges=RATE_AND_BETA | POCKET_RATES,
    lr=1e-3,
    max_output_tokens=64,
    max_grad_norm=1.0,
    temperature=1.0,
)
EVOLUTION = _table(
    replace(FULL, manifest=FULL_MANIFEST),
    replace(LITE, manifest=LITE_MANIFEST),
    replace(POCKET, manifest=POCKET_MANIFEST),
)
"""An evolution: a population of one model, as AgileRL's Arena trains it.

Of the values of that tutorial (docs.agilerl.com, "Training GRPO on GSM8K in
Arena") lite differs by a rate that can show something in 20 steps (1e-5, not
5e-6), a context of 1024 tokens, no dropout, and the budget.
"""

SCALE_OUT = _table(
    replace(FULL, run={**FULL.run, "max_steps": 120}),
    replace(LITE, run={**LITE.run, "max_steps": 40}),
    replace(POCKET, eval_rows=200, run={**POCKET.run, "max_steps": 24}),
)
"""The grid on several workers: that of the search, with fewer steps.

It is trained twice, once to its end and once with halving.
"""


def choose(
    name: str, gpu_memory: float, rows: dict[str, Profile] = PROFILES
) -> Profile:
    """The profile to use on this machine.

    Args:
        name: "full", "lite" or "pocket".
        gpu_memory: memory of the first GPU here, in GiB; 0 without one.
        rows: the lesson's table.

    Returns:
        The profile of that name. Where there is no GPU at all, "lite" means
        "pocket", so that the same notebook runs anywhere.

    Raises:
        LabError: there is no such profile, or the GPU is too small for it.
    """
    if name not in rows:
        near = difflib.get_close_matches(name.lower(), rows, n=1)
        guess = near[0] if near else "pocket"
        raise LabError(
            f"There is no profile {name!r}; the profiles are "
            f"{', '.join(rows)}. Type PROFILE = {guess!r}."
        )
    if name == "lite" and not gpu_memory:
        return rows["pocket"]
    profile = rows[name]
    if gpu_memory < profile.gpu_memory:
        smaller = "lite" if name == "full" and gpu_memory >= 14 else "pocket"
        here = f"{gpu_memory:.1f} GiB" if gpu_memory else "no GPU"
        missing = profile.gpu_memory - gpu_memory
        raise LabError(
            f"PROFILE = {name!r} needs {profile.needs}, but this machine has "
            f"{here}: {missing:.1f} GiB too little. Type PROFILE = "
            f"{smaller!r} (make demo ARGS='-p PROFILE {smaller}'), or choose "
            "a machine with a larger GPU."
        )
    return profile
