"""The one place of sizes, rates and lengths: a row for each kind of machine.

`PROFILE` in a lesson picks a row of the lesson's table; any other parameter
overrides one value of it. No lesson holds a size of its own.
"""

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from grpo_lab.errors import LabError
from grpo_lab.speed.levers import LEVERS, NEED_THE_LOOP, refuse_unknown

SCHEDULERS = {
    "linear": "linear",
    "cosine": "cosine",
    # Plain "constant" of transformers would skip the warm-up.
    "constant": "constant_with_warmup",
}
"""Courses of the learning rate after the warm-up, and transformers' names."""

ATTENTION_QV = ("q_proj", "v_proj")
"""The published choice: two projections of each attention layer."""

ALL_LINEAR = (
    "q_proj", "k_proj", "v_proj", "o_proj",
    "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
"""Every linear layer of a Llama or Qwen block."""


RANGES = {
    "max_completion_length": (1, 1_000_000),
    "max_steps": (0, 10_000_000),
    "num_epochs": (0.001, 1_000),
    "temperature": (0.01, 10),
    "top_p": (0.01, 1),
    "top_k": (0, 1_000_000),
    "beta": (0, 10),
    "lora_r": (1, 4096),
    "lora_alpha": (1, 65536),
    "lora_dropout": (0, 0.99),
    "warmup_share": (0, 1),
    "save_steps": (1, 10_000_000),
    "max_failed_share": (0, 1),
    "seed": (0, 2**32 - 1),
}
"""Least and most that a setting may be, where no group size is involved."""


@dataclass(frozen=True)
class RunSettings:
    """Everything that determines one training run, in plain values.

    Two runs with equal settings, data, rewards and library versions on one
    CPU give the same weights. Lengths are in tokens, rates per optimiser
    step, `warmup_share` as a share of all steps.

    Attributes:
        model: a name from `grpo_lab.models`, a Hub id or a local folder.
        learning_rate: peak rate of the optimiser, above 0.
        num_generations: completions per prompt, the group; at least 2.
        completions_per_step: completions per optimiser step, a multiple of
            `num_generations`.
        micro_batch: completions per forward and backward pass; a divisor of
            `completions_per_step`. Lower it first when memory is short.
        max_steps: optimiser steps; 0 means `num_epochs` passes over the data.
        num_epochs: passes over the training questions when `max_steps` is 0.
        max_completion_length: tokens that a completion may have.
        temperature, top_p, top_k: sampling of the rollouts; top_k 0 is off.
        beta: weight of the KL penalty; 0 needs no reference model.
        lora_r, lora_alpha, lora_dropout, target_modules: the adapter.
        load_in_4bit: NF4 with double quantisation, else 16 or 32 bit.
        lr_scheduler: a key of `SCHEDULERS`; "linear" and "cosine" end at 0.
        save_steps: optimiser steps between checkpoints; 1 loses least.
        max_failed_share: share of completions, 0 to 1, that a reward may
            fail to grade before the run is stopped; see `rewards.health`.
        levers: what makes it faster, names of `speed.levers.LEVERS`; () is
            plain TRL. Those that the machine has no memory for are left out,
            see `models.levers_in_force`.
    """

    model: str
    learning_rate: float
    num_generations: int = 8
    completions_per_step: int = 16
    micro_batch: int = 16
    max_steps: int = 0
    num_epochs: float = 1.0
    max_completion_length: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    beta: float = 0.0
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] = ATTENTION_QV
    load_in_4bit: bool = True
    lr_scheduler: str = "linear"
    warmup_share: float = 0.1
    weight_decay: float = 0.1
    max_grad_norm: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    optimizer: str = "adamw_torch"
    gradient_checkpointing: bool = False
    save_steps: int = 1
    max_failed_share: float = 0.5
    seed: int = 42
    levers: tuple[str, ...] = tuple(LEVERS)

    def __post_init__(self) -> None:
        """Refuse settings that cannot train, before anything is loaded."""
        # JSON has lists only; a tuple keeps the settings hashable.
        object.__setattr__(self, "target_modules", tuple(self.target_modules))
        object.__setattr__(self, "levers", tuple(self.levers))
        self._refuse_bad_values()

    def _refuse_bad_values(self) -> None:
        if not 0 < self.learning_rate < 1:
            raise LabError(
                f"The learning rate is {self.learning_rate:g}, but it must "
                "lie above 0 and below 1: at 0 or below the policy never "
                "improves. Type a rate such as 1e-5."
            )
        if self.num_generations < 2:
            raise LabError(
                f"NUM_GENERATIONS is {self.num_generations}, but GRPO "
                "compares completions of one prompt with each other, so a "
                "group needs at least 2. Type for example "
                "NUM_GENERATIONS = 8."
            )
        if (
            self.completions_per_step < self.num_generations
            or self.completions_per_step % self.num_generations
        ):
            raise LabError(
                f"COMPLETIONS_PER_STEP is {self.completions_per_step}, which "
                f"is no multiple of NUM_GENERATIONS = {self.num_generations}; "
                "a step takes whole groups only. Type for example "
                f"COMPLETIONS_PER_STEP = {2 * self.num_generations}."
            )
        if (
            self.micro_batch < 1
            or self.completions_per_step % self.micro_batch
        ):
            raise LabError(
                f"MICRO_BATCH is {self.micro_batch}, which does not divide "
                f"COMPLETIONS_PER_STEP = {self.completions_per_step}; a step "
                "is a whole number of forward passes. Type for example "
                f"MICRO_BATCH = {self.num_generations}."
            )
        if self.lr_scheduler not in SCHEDULERS:
            raise LabError(
                f"There is no scheduler {self.lr_scheduler!r}; choose one of "
                f"{', '.join(SCHEDULERS)}."
            )
        self._refuse_bad_levers()
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise LabError(
                    f"{name.upper()} is {value}, but it must lie between "
                    f"{least:g} and {most:g}."
                )

    def _refuse_bad_levers(self) -> None:
        refuse_unknown(self.levers)
        loose = [name for name in self.levers if name in NEED_THE_LOOP]
        if loose and "decode_loop" not in self.levers:
            raise LabError(
                f"The lever {loose[0]!r} is a part of 'decode_loop', which "
                "is switched off. Switch both on, or both off."
            )

    @property
    def prompts_per_step(self) -> int:
        """Different questions in one optimiser step."""
        return self.completions_per_step // self.num_generations

    @property
    def accumulation_steps(self) -> int:
        """Forward and backward passes in one optimiser step."""
        return self.completions_per_step // self.micro_batch

    def steps(self, train_rows: int) -> int:
        """Optimiser steps of the whole run over `train_rows` questions."""
        if self.max_steps:
            return self.max_steps
        return max(
            1, int(train_rows // self.prompts_per_step * self.num_epochs)
        )

    @property
    def short_model(self) -> str:
        """The model without its owner or folder: `Qwen2.5-3B-Instruct`."""
        return self.model.rstrip("/").split("/")[-1]

    def to_dict(self) -> dict:
        """Plain values for JSON; `RunSettings(**d)` is the way back."""
        lists = {
            "target_modules": list(self.target_modules),
            "levers": list(self.levers),
        }
        return {**asdict(self), **lists}


def run_names(settings: Sequence[RunSettings]) -> list[str]:
    """A readable name for each run: the model, the rate, and what varies.

    Example:
        >>> one = RunSettings(model="pocket-qwen", learning_rate=1e-3)
        >>> other = RunSettings("pocket-qwen", 1e-3, lora_r=4)
        >>> run_names([one, other])
        ['pocket-qwen lr=0.001 lora_r=16', 'pocket-qwen lr=0.001 lora_r=4']
    """
    always = ("model", "learning_rate")
    rows = [one.to_dict() for one in settings]
    models = {one.model for one in settings}
    clash = len({one.short_model for one in settings}) < len(models)
    varied = [
        name
        for name in (rows[0] if rows else {})
        if name not in always and any(r[name] != rows[0][name] for r in rows)
    ]
    return [
        f"{one.model if clash else one.short_model} "
        f"lr={one.learning_rate:g}"
        + "".join(f" {name}={row[name]}" for name in varied)
        for one, row in zip(settings, rows, strict=True)
    ]


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
        "num_generations": 8,
        "completions_per_step": 16,
        "micro_batch": 8,
        "num_epochs": 2.0,
        "max_completion_length": 1024,
        "lora_r": 32,
        "lora_alpha": 64,
        "optimizer": "adamw_bnb_8bit",
        "gradient_checkpointing": True,
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
        "num_generations": 8,
        "completions_per_step": 32,
        "micro_batch": 4,
        "max_steps": 60,
        # The median answer of the 0.5B model is about 274 tokens long.
        "max_completion_length": 512,
        "optimizer": "adamw_bnb_8bit",
        "gradient_checkpointing": True,
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
        "num_generations": 8,
        "completions_per_step": 64,
        "micro_batch": 64,
        "max_steps": 32,
        "max_completion_length": 64,
        "target_modules": ALL_LINEAR,
        "max_grad_norm": 1.0,
    },
)

PROFILES = {row.name: row for row in (FULL, LITE, POCKET)}
"""The grid search: several models and rates, golds that are numbers."""

COOKBOOK_ADAPTER = {"lora_r": 8, "lora_alpha": 32}

FIRST_RUN = {
    row.name: row
    for row in (
        replace(
            FULL,
            grid={"Qwen/Qwen2-1.5B-Instruct": (2e-5,)},
            data="numina_math_tir",
            train_rows=3622,  # 5 % of its train split
            eval_rows=80,  # of 99; a few have no gold to compare with
            run={
                **COOKBOOK_ADAPTER,
                "num_generations": 8,
                "completions_per_step": 64,
                "micro_batch": 16,
                "max_completion_length": 1024,
                "optimizer": "adamw_bnb_8bit",
                "gradient_checkpointing": True,
            },
            short_steps=40,
        ),
        replace(
            LITE,
            grid={"Qwen/Qwen2-0.5B-Instruct": (4e-5,)},
            data="numina_math_tir",
            train_rows=3622,
            eval_rows=80,
            run={
                **COOKBOOK_ADAPTER,
                "num_generations": 8,
                "completions_per_step": 32,
                "micro_batch": 4,
                "max_steps": 60,
                "max_completion_length": 512,
                "optimizer": "adamw_bnb_8bit",
                "gradient_checkpointing": True,
            },
            short_steps=20,
        ),
        replace(
            POCKET,
            grid={"pocket-qwen": (2e-3,)},
            data="pocket_latex",
            eval_rows=300,
            eval_batch_size=150,
            run={
                **COOKBOOK_ADAPTER,
                "num_generations": 8,
                "completions_per_step": 64,
                "micro_batch": 64,
                "max_steps": 24,
                "max_completion_length": 64,
                # With q_proj and v_proj alone, 24 steps at rates from 1e-3 to
                # 1e-2 took the form from 15 to 63-100 % of the answers, and
                # accuracy from 33 to 18-32 %.
                "target_modules": ALL_LINEAR,
                "max_grad_norm": 1.0,
            },
            short_steps=16,
        ),
    )
}
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


def _evolution(
    model: str,
    steps: int,
    algorithm: dict,
    context: int,
    ranges: dict,
    lora: dict,
) -> dict:
    """A manifest with the published values but for those that are given."""
    algorithm = {
        "name": "GRPO",
        "batch_size": 6,
        "group_size": 8,
        "beta": 0.001,
        "max_grad_norm": 0.1,
        "temperature": 0.9,
    } | algorithm
    per_step = algorithm["batch_size"] * algorithm["group_size"]
    return {
        "algorithm": algorithm,
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
            "lora_config": {"lora_r": 16, "lora_alpha": 64} | lora,
        },
    }


EVOLUTION_RANGES = {
    "lr": {"min": 1e-7, "max": 1e-4},
    "beta": {"min": 1e-4, "max": 1e-2},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

EVOLUTION = {
    row.name: row
    for row in (
        replace(
            FULL,
            manifest=_evolution(
                "Qwen/Qwen2.5-3B-Instruct",
                steps=40,
                algorithm={
                    "lr": 5e-6,
                    "max_output_tokens": 768,
                    "micro_batch_size_per_gpu": 8,
                    "gradient_checkpointing": True,
                },
                context=1280,
                ranges=EVOLUTION_RANGES,
                lora={"target_modules": ATTENTION},
            ),
        ),
        replace(
            LITE,
            manifest=_evolution(
                "Qwen/Qwen2.5-0.5B-Instruct",
                steps=20,
                algorithm={
                    "lr": 1e-5,
                    "max_output_tokens": 512,
                    "micro_batch_size_per_gpu": 4,
                    "gradient_checkpointing": True,
                },
                context=1024,
                ranges=EVOLUTION_RANGES,
                lora={"target_modules": ATTENTION},
            ),
        ),
        replace(
            POCKET,
            manifest=_evolution(
                "pocket-qwen",
                steps=20,
                algorithm={
                    "lr": 1e-3,
                    "max_output_tokens": 64,
                    "max_grad_norm": 1.0,
                    "temperature": 1.0,
                },
                context=256,
                ranges={
                    "lr": {"min": 1e-5, "max": 1e-2},
                    "beta": {"min": 1e-4, "max": 1e-2},
                },
                lora={"target_modules": list(ALL_LINEAR)},
            ),
        ),
    )
}
"""An evolution: a population of one model, as AgileRL's Arena trains it.

Of the values of that tutorial (docs.agilerl.com, "Training GRPO on GSM8K in
Arena") lite differs by a rate that can show something in 20 steps (1e-5, not
5e-6), a context of 1024 tokens, no dropout, and the budget.
"""

SCALE_OUT = {
    row.name: row
    for row in (
        replace(FULL, run={**FULL.run, "max_steps": 120}),
        replace(LITE, run={**LITE.run, "max_steps": 40}),
        replace(POCKET, eval_rows=200, run={**POCKET.run, "max_steps": 24}),
    )
}
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
