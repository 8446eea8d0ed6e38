"""Everything that determines one training run, and what its values may be.

Ranges and types stand here alone: a lesson, `--set`, `-p` and a manifest all
end in a `RunSettings`, which refuses what cannot train.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from grpo_lab.errors import LabError
from grpo_lab.speed.optimizations import (
    NEED_THE_LOOP,
    OPTIMIZATIONS,
    refuse_unknown,
)

SCHEDULERS = {
    "linear": "linear",
    "cosine": "cosine",
    # Plain "constant" of transformers would skip the warm-up.
    "constant": "constant_with_warmup",
}
"""Courses of the learning rate after the warm-up, and transformers' names."""

OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "adamw_8bit",
    "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "lion_32bit",
    "paged_lion_8bit", "paged_lion_32bit", "adafactor", "sgd", "adagrad",
    "rmsprop", "rmsprop_bnb_8bit",
)  # fmt: skip
"""Those of transformers that need no further package or argument."""

ATTENTION_QV = ("q_proj", "v_proj")
"""The published choice: two projections of each attention layer."""

ALL_LINEAR = (
    "q_proj", "k_proj", "v_proj", "o_proj",
    "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
"""Every linear layer of a Llama or Qwen block."""


def _no_text(value: object) -> object:
    # pydantic would read "8" as 8 and True as 1.
    if isinstance(value, bool | str | bytes):
        raise ValueError
    return value


def _layers(value: object) -> object:
    # as PEFT calls them; a parameter of a lesson is a list
    return ALL_LINEAR if value in ("all-linear", ["all-linear"]) else value


Whole = Annotated[int, BeforeValidator(_no_text)]
Number = Annotated[float, BeforeValidator(_no_text)]
Name = Annotated[str, Field(pattern=r"\S")]
Layers = Annotated[
    tuple[Name, ...], Field(min_length=1), BeforeValidator(_layers)
]
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, config=STRICT)
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
        optimizer: one of `OPTIMIZERS`.
        save_steps: optimiser steps between checkpoints; 1 loses least.
        max_failed_share: share of completions, 0 to 1, that a reward may
            fail to grade before the run is stopped; see `rewards.health`.
        optimizations: what makes it faster, names of
            `speed.optimizations.OPTIMIZATIONS`; () is plain TRL.
            `memory.resolve` leaves out those that lack memory.

    Raises:
        LabError: a value of the wrong type, outside of its range, or one
            that does not go with another.
    """

    model: str
    learning_rate: Number = Field(gt=0, lt=1)
    num_generations: Whole = Field(default=8, ge=2, le=1_000_000)
    completions_per_step: Whole = Field(default=16, ge=2, le=10_000_000)
    micro_batch: Whole = Field(default=16, ge=1, le=10_000_000)
    max_steps: Whole = Field(default=0, ge=0, le=10_000_000)
    num_epochs: Number = Field(default=1.0, ge=0.001, le=1_000)
    max_completion_length: Whole = Field(default=256, ge=1, le=1_000_000)
    temperature: Number = Field(default=1.0, ge=0.01, le=10)
    top_p: Number = Field(default=1.0, ge=0.01, le=1)
    top_k: Whole = Field(default=0, ge=0, le=1_000_000)
    beta: Number = Field(default=0.0, ge=0, le=10)
    lora_r: Whole = Field(default=16, ge=1, le=4096)
    lora_alpha: Whole = Field(default=32, ge=1, le=65536)
    lora_dropout: Number = Field(default=0.0, ge=0, le=0.99)
    target_modules: Layers = ATTENTION_QV
    load_in_4bit: StrictBool = True
    lr_scheduler: str = "linear"
    warmup_share: Number = Field(default=0.1, ge=0, le=1)
    weight_decay: Number = Field(default=0.1, ge=0, le=10)
    max_grad_norm: Number = Field(default=0.1, ge=0, le=1_000_000)
    adam_beta1: Number = Field(default=0.9, ge=0, lt=1)
    adam_beta2: Number = Field(default=0.99, ge=0, lt=1)
    optimizer: str = "adamw_torch"
    gradient_checkpointing: StrictBool = False
    save_steps: Whole = Field(default=1, ge=1, le=10_000_000)
    max_failed_share: Number = Field(default=0.5, ge=0, le=1)
    seed: Whole = Field(default=42, ge=0, le=2**32 - 1)
    optimizations: tuple[str, ...] = tuple(OPTIMIZATIONS)

    @model_validator(mode="wrap")
    @classmethod
    def _in_our_words(
        cls, values: object, validate: Callable[[object], Self]
    ) -> Self:
        try:
            return validate(values)
        except ValidationError as error:
            raise LabError(_explained(error.errors()[0])) from None

    @model_validator(mode="after")
    def _refuse_bad_combinations(self) -> Self:
        group, per_step = self.num_generations, self.completions_per_step
        if per_step % group:
            raise LabError(
                f"COMPLETIONS_PER_STEP is {per_step}, which is no multiple "
                f"of NUM_GENERATIONS = {group}; a step takes whole groups "
                f"only. Type for example COMPLETIONS_PER_STEP = {2 * group}."
            )
        if per_step % self.micro_batch:
            raise LabError(
                f"MICRO_BATCH is {self.micro_batch}, which does not divide "
                f"COMPLETIONS_PER_STEP = {per_step}; a step is a whole "
                "number of forward passes. Type for example "
                f"MICRO_BATCH = {group}."
            )
        for what, value, known in (
            ("scheduler", self.lr_scheduler, SCHEDULERS),
            ("optimiser", self.optimizer, OPTIMIZERS),
        ):
            if value not in known:
                raise LabError(
                    f"There is no {what} {value!r}; choose one of "
                    f"{', '.join(known)}."
                )
        refuse_unknown(self.optimizations)
        loose = [name for name in self.optimizations if name in NEED_THE_LOOP]
        if loose and "decode_loop" not in self.optimizations:
            raise LabError(
                f"The optimization {loose[0]!r} is a part of 'decode_loop', "
                "which is switched off. Switch both on, or both off."
            )
        return self

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
            "optimizations": list(self.optimizations),
        }
        return {**asdict(self), **lists}


_FIELDS: dict[str, FieldInfo] = vars(RunSettings)["__pydantic_fields__"]


def _limits(name: str) -> dict[str, float]:
    """The limits of a setting: those of `ge`, `gt`, `le` and `lt` it has."""
    found = {}
    for rule in _FIELDS[name].metadata:
        for kind in ("ge", "gt", "le", "lt"):
            if hasattr(rule, kind):
                found[kind] = getattr(rule, kind)
    return found


NAMES = tuple(field.name for field in fields(RunSettings))
RANGES = {
    name: (limits["ge"], limits["le"])
    for name in NAMES
    if (limits := _limits(name)).keys() == {"ge", "le"}
}
"""Least and most that a setting may be, both of them allowed."""

HINTS = {
    "learning_rate": (
        "At 0 or below the policy never improves. Type a rate such as 1e-5."
    ),
    "num_generations": (
        "GRPO compares completions of one prompt with each other, so a group "
        "needs at least 2. Type for example NUM_GENERATIONS = 8."
    ),
    "target_modules": (
        "Name at least one layer, such as target_modules=['q_proj', "
        "'v_proj'], or type 'all-linear' for every linear layer."
    ),
}
"""What to type in place of a value that is refused, where it helps."""


def _explained(error: ErrorDetails) -> str:
    """What pydantic found wrong, as one paragraph for a learner."""
    where, kind = error["loc"][0], error["type"]
    by_place = isinstance(where, int) and where < len(NAMES)
    name = NAMES[int(where)] if by_place else str(where)
    if kind == "missing":
        return f"A run needs a {name}. Type {name}= and its value."
    if name not in NAMES:
        return f"A run has no setting {name!r}. It has {', '.join(NAMES)}."
    needed = _range(name) if "_than" in kind else _kind(name)
    hint = HINTS.get(name, "")
    value = error["input"]
    text = f"{name.upper()} is {value!r}, but it must {needed}. {hint}"
    return text.rstrip()


def _range(name: str) -> str:
    limits = _limits(name)
    if limits.keys() == {"ge", "le"}:
        return f"lie between {limits['ge']} and {limits['le']}"
    least = f"be at least {limits['ge']}" if "ge" in limits else "lie above 0"
    return f"{least} and below {limits['lt']}"


def _kind(name: str) -> str:
    kinds: dict[object, str] = {
        int: "be a whole number",
        float: "be a finite number",
        bool: "be True or False",
        str: "be a text",
    }
    annotation = _FIELDS[name].annotation
    return kinds.get(annotation, "be a list of names")


def kind_of(name: str) -> str:
    """The type of a setting, as `parameters.KINDS` calls it.

    Example:
        >>> kind_of("lora_r"), kind_of("target_modules")
        ('int', 'list[str]')
    """
    annotation = _FIELDS[name].annotation
    names = {int: "int", float: "float", bool: "bool", str: "str"}
    return names.get(annotation, "list[str]")  # type: ignore[arg-type]


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
