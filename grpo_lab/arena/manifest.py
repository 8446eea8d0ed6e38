"""The manifest: what an experiment trains, and how, in one YAML file.

The form is that of AgileRL's Arena, so that a manifest of its tutorial runs
unchanged. `load` refuses what can't be trained; `grpo_lab.arena.lint` warns
of what can and would still waste the budget. What a key means here:

    algorithm.batch_size    prompts, not completions, of one optimiser step
    algorithm.group_size    completions of each prompt
    training.max_steps      completions, summed over the whole population
    training.evo_steps      optimiser steps of a member between evolutions

Keys of that form without a meaning on one machine are accepted and left out;
`NO_MEANING` says why, and the lint names those that are given.
"""

import copy
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from grpo_lab.errors import LabError, first_line, nearest
from grpo_lab.settings import RANGES, Layers, RunSettings

_FOLDER = files("grpo_lab.arena") / "manifests"

EXAMPLE = (_FOLDER / "example.yaml").read_text(encoding="utf-8")
"""A manifest for a machine without a GPU."""

PUBLISHED = (_FOLDER / "published.yaml").read_text(encoding="utf-8")
"""The manifest of the tutorial that the arena follows, value for value.

AgileRL's documentation, "Training GRPO on GSM8K in Arena". It is accepted as
it is; the lint says what is doubtful in it.
"""

NO_MEANING: dict[str, str] = {
    path: reason
    for reason, paths in yaml.safe_load(
        (_FOLDER / "without_meaning.yaml").read_text(encoding="utf-8")
    ).items()
    for path in paths
}
"""Keys of the published form that change nothing here, and why."""

MUTABLE = {"lr": (0.0, 0.99), "beta": RANGES["beta"]}
"""What evolution may change, and where it may lie."""

SELECTION = "tournament_selection"
OTHER_NAME = "selection_strategy"  # what newer manifests call it

# --- The form ---------------------------------------------------------------


def _within(name: str) -> Any:
    """The bounds that `RunSettings` has for this setting."""
    least, most = RANGES[name]
    return Field(ge=least, le=most)


Count = Annotated[int, Field(ge=1, le=10**18)]
Share = Annotated[float, Field(ge=0, le=1)]
Never = Annotated[float, Field(ge=0, le=0)]
Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_switch(cls, value: object, info: ValidationInfo) -> object:
        # pydantic would read `yes`, which YAML takes for true, as 1.
        kind = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and kind is not bool:
            raise ValueError("a number or a text, and not true or false")
        return value


class Algorithm(_Section):
    """How the policy learns; what is left out has the tutorial's value.

    Attributes:
        batch_size, group_size: prompts of one optimiser step, and completions
            of each prompt.
        lr, beta: learning rate, and weight of the KL penalty, of each member
            until they are mutated.
        max_output_tokens: most tokens of a completion; None is what the
            context leaves.
        micro_batch_size_per_gpu: completions of one forward and backward
            pass; None is all of a step.
    """

    name: Literal["GRPO"]
    batch_size: Count = 6
    group_size: Annotated[int, Field(ge=2)] = 8
    beta: Annotated[float, _within("beta")] = 0.001
    lr: Annotated[float, Field(gt=0, lt=1)] = 5e-6
    max_grad_norm: Annotated[float, _within("max_grad_norm")] = 0.1
    update_epochs: Annotated[int, Field(ge=1, le=1)] = 1
    temperature: Annotated[float, _within("temperature")] = 0.9
    top_p: Annotated[float, _within("top_p")] = 1.0
    top_k: Annotated[int, _within("top_k")] = 0
    max_output_tokens: Count | None = None
    micro_batch_size_per_gpu: Count | None = None
    gradient_checkpointing: bool = False


class Environment(_Section):
    """What the policy is asked: the questions of a registered dataset.

    Attributes:
        system_prompt: what the policy is told; "" lets the experiment supply
            a text that names the tags which the reward asks for.
        fitness_rows, test_rows: held-out questions that rank the members,
            and those that nothing is selected by.
    """

    name: Name
    system_prompt: str = ""
    fitness_rows: Count = 100
    test_rows: Count = 200


class Training(_Section):
    """How long, and how many; evaluations are at evolutions."""

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

    min: float
    max: float


class Mutation(_Section):
    """What evolution may change, and the seed of all that is drawn."""

    rand_seed: Annotated[int, _within("seed")] = 42
    probabilities: Probabilities = Probabilities()
    rl_hp_selection: dict[Literal["lr", "beta"], Range] = Field(
        default_factory=dict
    )


class TournamentSelection(_Section):
    """How the next population is chosen; see `evolution.Rules`."""

    tournament_size: Count = 2
    elitism: bool = True


class LoraConfig(_Section):
    """The adapter of each member."""

    lora_r: Annotated[int, _within("lora_r")] = 16
    lora_alpha: Annotated[int, _within("lora_alpha")] = 64
    target_modules: Layers = (
        "q_proj", "k_proj", "v_proj", "o_proj",
    )  # fmt: skip
    lora_dropout: Annotated[float, _within("lora_dropout")] = 0.0
    task_type: Literal["CAUSAL_LM"] = "CAUSAL_LM"


class Network(_Section):
    """The base model: of `grpo_lab.models`, of the Hub or a local folder.

    `max_context_length` is of a prompt and its completion together.
    """

    pretrained_model_name_or_path: Name
    max_context_length: Count = 512
    load_in_4bit: bool = True
    lora_config: LoraConfig = LoraConfig()


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
    tournament_selection: TournamentSelection = TournamentSelection()
    network: Network

    _without_meaning: list[str] = PrivateAttr(default_factory=list)
    _cut_prompt: str = PrivateAttr(default="")

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
    *(f"mutation.rl_hp_selection.{name}" for name in MUTABLE),
)
"""The paths of the keys that have a meaning."""

# --- Reading ----------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Takes a manifest for what is typed in it.

    PyYAML would read 016 as 14, 50:00 as 3000 and 5e-6 as text; take the last
    of two keys that are equal; and take what follows " #" for a comment, also
    in a prompt that names GSM8K's ####.

    Attributes:
        cut: keys whose text ends at a comment, with the comment.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.cut: dict[str, str] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key.value, str):
                continue  # no key of a manifest
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} is given twice in one section; "
                    "delete one of them",
                    problem_mark=key.start_mark,
                )
            seen.add(key.value)
            end = value.end_mark
            rest = end.buffer[end.pointer :].split("\n", 1)[0].strip(" \0")
            if isinstance(value, yaml.ScalarNode) and rest.startswith("#"):
                self.cut[key.value] = rest
        return super().construct_mapping(node, deep)


_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] not in _TAGS]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _form in (
    ("int", r"[-+]?(?:0|[1-9][0-9]*)"),
    ("float", r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}",
        # 016 is no number to YAML, and so a text, which pydantic reads as 16
        re.compile(rf"(?![-+]?0[0-9])(?:{_form})$"),
        list("-+.0123456789"),
    )


def load(source: str | Path | dict) -> Manifest:
    """Read a manifest that can train; see `lint` for bad ideas in it.

    Args:
        source: the path of a YAML file (JSON is YAML), YAML text (with a
            line break in it), or what `Manifest.to_dict` returned.

    Raises:
        LabError: there is no such file, it is no YAML, a key is unknown,
            missing or mistyped, or values contradict each other; names every
            such key with its path.
    """
    data: Any = source
    cut: dict[str, str] = {}
    if isinstance(source, str | Path):
        text = manifest_text(source).removeprefix("\ufeff")
        try:
            loader = _Loader(text)
            data, cut = loader.get_single_data(), loader.cut
        # A tag such as !!int before a word raises whatever int() does.
        except (yaml.YAMLError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise LabError(
                f"The manifest is no YAML that can be read: {reason}. Correct "
                "that place: two spaces for each level, a space after each "
                "colon, no tabs, no tags such as !!int, and quotes around a "
                "text with a colon in it."
            ) from error
    if not isinstance(data, dict):
        raise LabError(
            f"The manifest is {data!r:.60}, but it must be sections of keys "
            "with values: algorithm, environment, training, mutation, "
            "tournament_selection and network. Begin with a line `algorithm:` "
            "and put its keys below it, each indented."
        )
    # A section all of whose lines are commented out is read as null.
    data = copy.deepcopy({k: v for k, v in data.items() if v is not None})
    renamed = OTHER_NAME in data and SELECTION not in data
    if renamed:
        data[SELECTION] = data.pop(OTHER_NAME)
    ignored = [path for path in NO_MEANING if _taken_out(data, path)]
    try:
        manifest = Manifest.model_validate(data)
        faults = list(_contradictions(manifest))
    except ValidationError as error:
        faults = [_fault(one) for one in error.errors(include_url=False)]
    if faults:
        text = " ".join(faults)
        if renamed:
            text = text.replace(SELECTION, OTHER_NAME)
        raise LabError(
            f"The manifest can't be used. {text} Correct this in the "
            "manifest, and submit it again."
        )
    manifest._without_meaning = ignored
    manifest._cut_prompt = cut.get("system_prompt", "")
    return manifest


def manifest_text(source: str | Path | dict) -> str:
    """A manifest as it was handed in: YAML text, or what a file holds."""
    if isinstance(source, dict):
        return yaml.safe_dump(source, sort_keys=False)
    if isinstance(source, str) and "\n" in source:
        return source
    try:
        return Path(source).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise LabError(
            f"The manifest {str(source)!r} can't be read: {first_line(error)} "
            "Type the path of a YAML file that is saved as UTF-8, seen from "
            "the directory that you are in, or a full path."
        ) from error


def _taken_out(data: dict, path: str) -> bool:
    """Delete the key at a path; False if there is none."""
    *sections, key = path.split(".")
    for name in sections:
        data = data.get(name, {})
        if not isinstance(data, dict):
            return False
    there = key in data
    data.pop(key, None)
    return there


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Why values that are fine one by one can't train together."""
    algorithm, members = manifest.algorithm, manifest.training.pop_size
    per_step = manifest.completions_per_step
    if per_step % (algorithm.micro_batch_size_per_gpu or 1):
        yield (
            "algorithm.micro_batch_size_per_gpu is "
            f"{algorithm.micro_batch_size_per_gpu}, which does not divide the "
            f"{per_step} completions of a step (batch_size x group_size). "
            f"Write micro_batch_size_per_gpu: {algorithm.group_size}."
        )
    if manifest.steps < 1:
        needed = per_step * members
        yield (
            f"training.max_steps is {manifest.training.max_steps}, but one "
            f"optimiser step of the population takes {needed} completions "
            f"({algorithm.batch_size} prompts x {algorithm.group_size} "
            f"completions x {members} members), so that nothing would be "
            f"trained. Write max_steps: {needed} or more."
        )
    for name, limits in manifest.mutation.rl_hp_selection.items():
        path = f"mutation.rl_hp_selection.{name}"
        goes = f"{limits.min:g} to {limits.max:g}"
        least, most = MUTABLE[name]
        own = getattr(algorithm, name)
        if not least <= limits.min <= limits.max <= most:
            yield (
                f"{path} goes from {goes}, but min must not be above max, and "
                f"both must stay within {least:g} and {most:g}."
            )
        elif not limits.min <= own <= limits.max:
            yield (
                f"algorithm.{name} is {own:g}, outside of its own range in "
                f"{path}, {goes}: the first mutation would throw it to an "
                "end. Change it, or widen the range."
            )


_HINTS = {
    "algorithm.name": (
        "Write GRPO: SFT and DPO learn from given answers and not from a "
        "reward, and are no part of these lessons."
    ),
    "algorithm.group_size": (
        "GRPO compares the completions of one prompt with each other, so that "
        "a single one teaches nothing."
    ),
    "algorithm.update_epochs": "Each completion is learned from once.",
    "network.lora_config.target_modules": (
        "Write a list of names such as [q_proj, v_proj], or all-linear."
    ),
    OTHER_NAME: "It is another name of tournament_selection: delete one.",
} | dict.fromkeys(
    [
        f"mutation.probabilities.{name}"
        for name in ("arch_mut", "new_layer", "params_mut", "act_mut")
    ],
    "It would change the weights of a pretrained model, which destroys what "
    "it knows; only lr and beta are mutated.",
)
"""What helps where a key is missing or refused."""


def _fault(error: Any) -> str:
    """One fault that pydantic found, as a sentence or two."""
    parts = [str(part) for part in error["loc"] if part != "[key]"]
    path = ".".join(parts)
    hint = f" {_HINTS[path]}" if path in _HINTS else ""
    kind = error["type"]
    if kind in ("extra_forbidden", "invalid_key") or "[key]" in error["loc"]:
        return f"There is no key {path}{_suggestion(path)}{hint}"
    if kind == "missing":
        example = "`python -m grpo_lab.arena manifest example`"
        return f"{path} is missing; {example} shows a whole manifest.{hint}"
    needed = error["msg"].removeprefix("Input should be ")
    needed = needed.removeprefix("Value error, ")
    if kind in ("model_type", "dict_type"):
        needed = "a section of keys with values"
    return f"{path} is {error['input']!r:.60}, but must be {needed}.{hint}"


def _suggestion(path: str) -> str:
    """The key of that name elsewhere, or the nearest beside it."""
    parent, _, key = path.rpartition(".")
    near = [known for known in KNOWN if known.rpartition(".")[2] == key]
    beside = {
        known.rpartition(".")[2]: known
        for known in KNOWN
        if known.rpartition(".")[0] == parent
    }
    if not near and (name := nearest(key, beside)):
        near = [beside[name]]
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; the keys there are {', '.join(beside)}." if beside else "."


# --- Using ------------------------------------------------------------------


def room_of(manifest: Manifest, context: int | None) -> int:
    """Tokens that a prompt and its completion may have together."""
    length = manifest.network.max_context_length
    return length if context is None else min(length, context)


def completion_limit(
    manifest: Manifest, longest_prompt: int, context: int
) -> int:
    """Tokens that a completion may have, at least 1.

    `max_output_tokens`, or what the model's own `context` leaves after the
    longest prompt, where that is less or nothing was asked for.

    Raises:
        LabError: the longest prompt leaves no room.
    """
    room = room_of(manifest, context)
    left = room - longest_prompt
    if left < 1:
        raise LabError(
            "network.max_context_length leaves no room for an answer: the "
            f"longest prompt has {longest_prompt} tokens, and prompt and "
            f"completion together may have {room}. Raise max_context_length "
            "if the model allows it, or leave the longest questions out of "
            "the dataset."
        )
    return min(manifest.algorithm.max_output_tokens or left, left)


def settings(manifest: Manifest, limit: int) -> RunSettings:
    """One member's training, at the manifest's own lr and beta.

    The rate is constant and has no warm-up, since evolution is what changes
    it. Without a `micro_batch_size_per_gpu` a step is one pass over all its
    completions, which suits a CPU; on a GPU give one when memory is short.

    Args:
        limit: tokens of a completion, from `completion_limit`.
    """
    algorithm, network = manifest.algorithm, manifest.network
    adapter = network.lora_config
    per_step = manifest.completions_per_step
    return RunSettings(
        model=network.pretrained_model_name_or_path,
        learning_rate=algorithm.lr,
        num_generations=algorithm.group_size,
        completions_per_step=per_step,
        micro_batch=algorithm.micro_batch_size_per_gpu or per_step,
        max_steps=manifest.steps,
        max_completion_length=limit,
        temperature=algorithm.temperature,
        top_p=algorithm.top_p,
        top_k=algorithm.top_k,
        beta=algorithm.beta,
        lora_r=adapter.lora_r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules=adapter.target_modules,
        load_in_4bit=network.load_in_4bit,
        lr_scheduler="constant",
        warmup_share=0.0,
        max_grad_norm=algorithm.max_grad_norm,
        gradient_checkpointing=algorithm.gradient_checkpointing,
        save_steps=1,
        seed=manifest.mutation.rand_seed,
    )


def control(manifest: Manifest) -> Manifest:
    """The same budget without evolution: one policy gets all completions.

    Its `max_steps` is what the population really uses, whole steps only, so
    that both learn from exactly as many completions.
    """
    training = manifest.training
    used = manifest.steps * manifest.completions_per_step * training.pop_size
    values = manifest.to_dict()
    values["training"] |= {"pop_size": 1, "max_steps": used}
    values["mutation"]["probabilities"] = {"no_mut": 1.0}
    values[SELECTION] = {"tournament_size": 1}
    alone = Manifest.model_validate(values)
    alone._without_meaning = manifest._without_meaning
    return alone
