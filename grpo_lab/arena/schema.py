"""The sections and keys of a manifest, their types and their limits."""

import contextlib
from collections.abc import Iterator
from importlib.resources import files
from typing import Annotated, Literal

import yaml
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
)
from pydantic_core import PydanticCustomError

from grpo_lab.profiles import ALL_LINEAR, RANGES


def packaged(name: str) -> str:
    """The text of a file in the folder manifests of this package."""
    folder = files("grpo_lab.arena") / "manifests"
    return (folder / name).read_text(encoding="utf-8")


NO_MEANING = {
    path: reason
    for reason, paths in yaml.safe_load(
        packaged("without_meaning.yaml")
    ).items()
    for path in paths
}
"""Keys of the published form that change nothing here, and why."""

MUTABLE = {"lr": (0.0, 0.99), "beta": RANGES["beta"]}
"""The hyperparameters that evolution may change, and where they may lie."""


def _number(value: object) -> object:
    """YAML reads `1e-5` as a text, and `yes` as true, which is no number."""
    if isinstance(value, bool):
        raise PydanticCustomError("no_number", "a number")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _layers(value: object) -> object:
    return ALL_LINEAR if value == "all-linear" else value


def _within(name: str) -> object:
    """The bounds that `RunSettings` has for this setting."""
    least, most = RANGES[name]
    return Field(ge=least, le=most)


Whole = Annotated[int, BeforeValidator(_number)]
Count = Annotated[Whole, Field(ge=1, le=10**18)]
Number = Annotated[float, BeforeValidator(_number)]
Share = Annotated[Number, Field(ge=0, le=1)]
Never = Annotated[Number, Field(ge=0, le=0)]
# A pattern also refuses half of a surrogate pair, as JSON can have.
Text = Annotated[str, Field(pattern="")]
Name = Annotated[str, Field(pattern=r"\S")]
Layers = Annotated[
    tuple[Name, ...], Field(min_length=1), BeforeValidator(_layers)
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Algorithm(_Section):
    """How the policy learns; what is left out has the tutorial's value.

    Attributes:
        batch_size: prompts of one optimiser step.
        group_size: completions of each prompt.
        beta: weight of the KL penalty; 0 needs no reference.
        lr: learning rate of each member until it is mutated.
        update_epochs: each completion is learned from once.
        temperature, top_p, top_k: sampling of the rollouts; top_k 0 is off.
        max_output_tokens: most tokens of a completion; None is what the
            context leaves.
        micro_batch_size_per_gpu: completions of one forward and backward
            pass; None is all of a step, which suits a CPU.
        gradient_checkpointing: less memory for more time.
    """

    name: Literal["GRPO"]
    batch_size: Count = 6
    group_size: Annotated[Whole, Field(ge=2)] = 8
    beta: Annotated[Number, _within("beta")] = 0.001
    lr: Annotated[Number, Field(gt=0, lt=1)] = 5e-6
    max_grad_norm: Annotated[Number, Field(ge=0)] = 0.1
    update_epochs: Annotated[Whole, Field(ge=1, le=1)] = 1
    temperature: Annotated[Number, _within("temperature")] = 0.9
    top_p: Annotated[Number, _within("top_p")] = 1.0
    top_k: Annotated[Whole, _within("top_k")] = 0
    max_output_tokens: Count | None = None
    micro_batch_size_per_gpu: Count | None = None
    gradient_checkpointing: bool = False


class Environment(_Section):
    """What the policy is asked.

    Attributes:
        name: a registered dataset.
        system_prompt: what the policy is told; "" lets the experiment supply
            a text that names the tags which the reward asks for.
        fitness_rows: held-out questions that rank the members.
        test_rows: held-out questions that nothing is selected by.
    """

    name: Name
    system_prompt: Text = ""
    fitness_rows: Count = 100
    test_rows: Count = 200


class Training(_Section):
    """How long, and how many.

    Attributes:
        max_steps: completions to learn from, over the whole population.
        evo_steps: optimiser steps of each member between evolutions.
        pop_size: members of the population.
        evaluation_interval: kept for the form; evaluations are at evolutions.
    """

    max_steps: Count
    evo_steps: Count = 5
    pop_size: Count = 2
    evaluation_interval: Count = 5


class Probabilities(_Section):
    """Weights of what may happen to a new member; only their ratio counts."""

    no_mut: Share = 0.0
    arch_mut: Never = 0.0
    new_layer: Never = 0.0
    params_mut: Never = 0.0
    act_mut: Never = 0.0
    rl_hp_mut: Share = 0.0


class Range(_Section):
    """Where a mutated hyperparameter is clipped to, both ends included."""

    min: Number
    max: Number


class Mutation(_Section):
    """What evolution may change, and the seed of all that is drawn."""

    rand_seed: Annotated[Whole, _within("seed")] = 42
    probabilities: Probabilities = Probabilities()
    rl_hp_selection: dict[Literal["lr", "beta"], Range] = Field(
        default_factory=dict
    )


class TournamentSelection(_Section):
    """How the next population is chosen.

    Attributes:
        tournament_size: members drawn, the best of whom is copied.
        elitism: whether the best member of all goes on unchanged.
    """

    tournament_size: Count = 2
    elitism: bool = True


class LoraConfig(_Section):
    """The adapter of each member."""

    lora_r: Annotated[Whole, _within("lora_r")] = 16
    lora_alpha: Annotated[Whole, _within("lora_alpha")] = 64
    target_modules: Layers = (
        "q_proj", "k_proj", "v_proj", "o_proj",
    )  # fmt: skip
    lora_dropout: Annotated[Number, _within("lora_dropout")] = 0.0
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"


class Network(_Section):
    """The base model.

    Attributes:
        pretrained_model_name_or_path: a name from `grpo_lab.models`, a Hub
            id or a local folder.
        max_context_length: most tokens of a prompt and its completion.
        load_in_4bit: NF4, else 16 or 32 bit.
    """

    pretrained_model_name_or_path: Name
    max_context_length: Count = 512
    load_in_4bit: bool = True
    lora_config: LoraConfig = LoraConfig()


OTHER_NAME = "selection_strategy"
"""What `tournament_selection` is called in newer manifests."""


class Manifest(_Section):
    """A manifest that `load` has read; its sections are named as there.

    Example:
        >>> from grpo_lab.arena.manifest import EXAMPLE, load
        >>> manifest = load(EXAMPLE)
        >>> manifest.completions_per_step, manifest.steps
        (64, 24)
        >>> manifest.generations, round(manifest.mutation_rate, 2)
        (3, 0.86)
        >>> load(manifest.to_dict()) == manifest
        True
    """

    algorithm: Algorithm
    environment: Environment
    training: Training
    mutation: Mutation = Mutation()
    # Newer manifests use the second name.
    tournament_selection: TournamentSelection = Field(
        TournamentSelection(),
        validation_alias=AliasChoices("tournament_selection", OTHER_NAME),
    )
    network: Network

    _without_meaning: list[str] = PrivateAttr(default_factory=list)

    @property
    def without_meaning(self) -> list[str]:
        """The paths of `NO_MEANING` that were given."""
        return list(self._without_meaning)

    @property
    def completions_per_step(self) -> int:
        """Completions of one optimiser step of one member."""
        return self.algorithm.batch_size * self.algorithm.group_size

    @property
    def steps(self) -> int:
        """Optimiser steps of each member, at least 1."""
        together = self.completions_per_step * self.training.pop_size
        return self.training.max_steps // together

    @property
    def generations(self) -> int:
        """Stretches of training, each of at most `evo_steps` steps."""
        return -(-self.steps // self.training.evo_steps)

    @property
    def mutation_rate(self) -> float:
        """Chance, 0 to 1, that a new member gets another lr or beta."""
        chances = self.mutation.probabilities
        both = chances.no_mut + chances.rl_hp_mut
        return chances.rl_hp_mut / both if both else 0.0

    def to_dict(self) -> dict:
        """Plain values for JSON, in the published form; `load` reads them."""
        return self.model_dump(mode="json")


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted path of every section and key."""
    for name, field in model.model_fields.items():
        yield prefix + name
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _paths(kind, f"{prefix}{name}.")


KNOWN = (
    *_paths(Manifest),
    OTHER_NAME,
    *(f"mutation.rl_hp_selection.{name}" for name in MUTABLE),
    *(
        f"mutation.rl_hp_selection.{name}.{end}"
        for name in MUTABLE
        for end in ("min", "max")
    ),
    *NO_MEANING,
)
"""Every path that a manifest may have."""

SECTIONS = {path.rpartition(".")[0] for path in KNOWN}
"""The paths that have keys below them."""
