"""The manifest: what an experiment trains, and how, in one YAML file.

The form is that of AgileRL's Arena, so that a manifest of its tutorial runs
unchanged. `load` refuses what can't be understood (a misspelt key, a word in
place of a number), `lint` what can be understood and would still waste the
budget. What a key means here:

    algorithm.batch_size    prompts, not completions, of one optimiser step
    algorithm.group_size    completions of each prompt
    training.max_steps      completions, summed over the whole population
    training.evo_steps      optimiser steps of a member between evolutions

Keys of that form without a meaning on one machine are accepted, kept and
listed in `NO_MEANING`; the lint names each one that is given.
"""

import contextlib
import difflib
import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from grpo_lab.errors import LabError
from grpo_lab.parameters import convert
from grpo_lab.profiles import ALL_LINEAR, RANGES, RunSettings

EXAMPLE = """\
algorithm:
  name: GRPO
  batch_size: 8              # prompts of one optimiser step
  group_size: 8              # completions of each prompt
  lr: 1.0e-3                 # learning rate
  beta: 0.001                # weight of the KL penalty
  max_grad_norm: 1.0
  temperature: 1.0
  max_output_tokens: 64
environment:
  name: pocket               # a registered dataset
training:
  max_steps: 3072            # completions of the whole population
  pop_size: 2                # members, each an adapter of its own
  evo_steps: 8               # optimiser steps between evolutions
  evaluation_interval: 8
mutation:
  rand_seed: 42
  probabilities:
    no_mut: 0.1
    rl_hp_mut: 0.6
  rl_hp_selection:
    lr: {min: 1.0e-4, max: 1.0e-2}
    beta: {min: 1.0e-4, max: 1.0e-2}
tournament_selection:
  tournament_size: 2
  elitism: true              # the best member goes on unchanged
network:
  pretrained_model_name_or_path: pocket-qwen
  max_context_length: 256    # tokens of a prompt and its completion
  lora_config:
    lora_r: 16
    lora_alpha: 32
    target_modules: all-linear
    lora_dropout: 0.0
"""
"""A manifest for a machine without a GPU."""

PUBLISHED = """\
algorithm:
  name: GRPO
  batch_size: 6
  beta: 0.001
  lr: 0.000005
  clip_coef: 0.2
  max_grad_norm: 0.1
  update_epochs: 1
  group_size: 8
  temperature: 0.9
  calc_position_embeddings: true
environment:
  name: gsm8k
training:
  max_steps: 100_000
  evo_steps: 5
  pop_size: 2
  eval_loop: 1
  evaluation_interval: 5
mutation:
  mutation_sd: 0.1
  rand_seed: 42
  probabilities:
    no_mut: 0.1
    arch_mut: 0.0
    new_layer: 0.0
    params_mut: 0.0
    act_mut: 0.0
    rl_hp_mut: 0.6
  rl_hp_selection:
    lr:
      min: 1e-7
      max: 1e-5
    beta:
      min: 1e-4
      max: 1e-2
selection_strategy:
  tournament_size: 2
  elitism: true
network:
  pretrained_model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
  max_context_length: 512
  lora_config:
    lora_r: 16
    lora_alpha: 64
    target_modules: [q_proj, k_proj, v_proj, o_proj]
    lora_dropout: 0.05
    task_type: CAUSAL_LM
"""
"""The manifest of the tutorial that the arena follows, value for value.

AgileRL's documentation, "Training GRPO on GSM8K in Arena". It is accepted as
it is; the lint says what is doubtful in it.
"""

MUTABLE = {"lr": (0.0, 0.99), "beta": RANGES["beta"]}
"""The hyperparameters that evolution may change, and where they may lie."""

_VLLM = "the rollouts come from transformers, in the training process"
_DEVICES = "one process trains the members one after the other"
_LOSS = "the loss is the one that grpo_lab.training sets for every lesson"
_REWARD = "the reward file is an argument of submit_experiment"
_DATASET = "create_dataset asks for it when the dataset is registered"
_CHECKPOINTS = "a checkpoint is written after every optimiser step"
_STEPS = "the run ends when max_steps completions have been learned from"
_MUTATION = "a mutation multiplies lr or beta by 1.2 or 0.8"

NO_MEANING = {
    "api_version": "there is one form only",
    "replay_buffer": "GRPO learns from fresh completions only",
    "algorithm.clip_coef": (
        "each completion is learned from once, so the probability ratio is 1 "
        "and the clip never acts"
    ),
    "algorithm.use_vllm": _VLLM,
    "algorithm.vllm_config": _VLLM,
    "algorithm.vllm_importance_sampling_correction": _VLLM,
    "algorithm.vllm_importance_sampling_cap": _VLLM,
    "algorithm.offload_trainer_during_rollout": _VLLM,
    "algorithm.old_logprobs_source": _VLLM,
    "algorithm.calc_position_embeddings": (
        "the positions of Llama and Qwen models are relative, so that padding "
        "shifts nothing"
    ),
    "algorithm.reduce_memory_peak": (
        "micro_batch_size_per_gpu is what lowers the memory"
    ),
    "algorithm.mini_batch_size": "a step learns from its whole batch at once",
    "algorithm.activation_offload": _DEVICES,
    "algorithm.cosine_lr_schedule_config": (
        "the rate is constant between evolutions, which are what changes it"
    ),
    "algorithm.use_separate_reference_adapter": (
        "the reference of the KL penalty is the base model without an adapter"
    ),
    "algorithm.pad_token": "the tokenizer's own is used",
    "algorithm.pad_token_id": "the tokenizer's own is used",
    "algorithm.seed": "the seed is mutation.rand_seed",
    "algorithm.quantization": "network.load_in_4bit says it",
    "algorithm.attn_implementation": "transformers chooses it",
    "algorithm.chunk_rows": _LOSS,
    "algorithm.use_liger_loss": _LOSS,
    "algorithm.use_sequence_packing": _LOSS,
    "algorithm.adv_norm": _LOSS,
    "algorithm.adv_clip_range": _LOSS,
    "algorithm.whiten_advantages": _LOSS,
    "algorithm.filter_zero_adv": _LOSS,
    "algorithm.adv_filter_eps": _LOSS,
    "algorithm.advantage_granularity": _LOSS,
    "algorithm.turn_advantage_trajectory_fallback": _LOSS,
    "algorithm.importance_sampling_level": _LOSS,
    "algorithm.use_kl_advantage_shaping": _LOSS,
    "algorithm.loss_norm": _LOSS,
    "algorithm.loss_type": _LOSS,
    "algorithm.lora_target_scope": "network.lora_config says what is trained",
    "algorithm.min_output_tokens": "a completion may be as short as it likes",
    "algorithm.min_p": "temperature, top_p and top_k are what is sampled with",
    "algorithm.repetition_penalty": "repetition is never penalised",
    "algorithm.profiling_config": "metrics.csv has the seconds of each step",
    "environment.env_type": "every experiment is a reasoning one",
    "environment.columns": _DATASET,
    "environment.train_test_split": (
        "fitness_rows and test_rows say how many questions are held out"
    ),
    "environment.rubric_file_path": _REWARD,
    "environment.rubric_name": _REWARD,
    "environment.reward_file_path": _REWARD,
    "environment.reward_fn_name": _REWARD,
    "environment.max_reward": "the rewards are reported as they are",
    "environment.max_turns": "a completion answers one prompt",
    "training.name": "the experiment's name is given when it is submitted",
    "training.eval_loop": "a greedy answer is the same each time",
    "training.eval_steps": "an evaluation answers all its questions",
    "training.eval_samples_per_task": "a greedy answer is the same each time",
    "training.eval_greedy": "an evaluation always decodes greedily",
    "training.eval_max_concurrent_episodes": _DEVICES,
    "training.hpo": "mutation.probabilities says it",
    "training.target_score": _STEPS,
    "training.num_epochs": _STEPS,
    "training.max_wall_seconds": _STEPS,
    "training.evo_epochs": "evo_steps says it",
    "training.checkpoint_steps": _CHECKPOINTS,
    "training.checkpoint_path": _CHECKPOINTS,
    "training.overwrite_checkpoints": _CHECKPOINTS,
    "training.checkpoint_optimizer": _CHECKPOINTS,
    "training.reporting_interval": "every optimiser step is reported",
    "training.experience_sharing": (
        "each member learns from its own completions"
    ),
    "mutation.name": "there is one kind of mutation only",
    "mutation.mutation_sd": "it belongs to mutations of the weights",
    "mutation.mutate_elite": "the best member goes on unchanged",
    "mutation.rl_hp_selection.lr.grow_factor": _MUTATION,
    "mutation.rl_hp_selection.lr.shrink_factor": _MUTATION,
    "mutation.rl_hp_selection.beta.grow_factor": _MUTATION,
    "mutation.rl_hp_selection.beta.shrink_factor": _MUTATION,
    "tournament_selection.name": "there is one kind of selection only",
}
"""Keys of the published form that change nothing here, and why."""


# --- The form ---------------------------------------------------------------


def _converted(kind: str, value: object, needed: str) -> object:
    """YAML reads `1e-5` as a text, and `yes` as a truth value."""
    try:
        return convert(kind, value)
    except (ValueError, OverflowError) as error:
        raise PydanticCustomError("mistyped", needed) from error


def _whole(value: object) -> object:
    return _converted("int", value, "a whole number")


def _number(value: object) -> object:
    return _converted("float", value, "a number")


def _switch(value: object) -> object:
    return _converted("bool", value, "true or false")


def _text(value: object) -> object:
    try:
        _converted("str", value, "text").encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError("mistyped", "text") from error
    return value


def _name(value: object) -> object:
    if not _text(value).strip():
        raise PydanticCustomError("mistyped", "a text with something in it")
    return value


def _layers(value: object) -> object:
    if value == "all-linear":
        return ALL_LINEAR
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(name, str) and name.isascii() for name in value)
        and all(name.strip() for name in value)
    ):
        return tuple(value)
    needed = "a list of names such as [q_proj, v_proj], or all-linear"
    raise PydanticCustomError("mistyped", needed)


def _within(name: str) -> object:
    """The bounds that `RunSettings` has for this setting."""
    least, most = RANGES[name]
    return Field(ge=least, le=most)


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=1)]
Number = Annotated[float, BeforeValidator(_number)]
Share = Annotated[Number, Field(ge=0, le=1)]
Switch = Annotated[bool, BeforeValidator(_switch)]
Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, BeforeValidator(_name)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Algorithm(_Section):
    """How the policy learns; what is left out has the tutorial's value.

    Attributes:
        batch_size: prompts of one optimiser step.
        group_size: completions of each prompt.
        beta: weight of the KL penalty; 0 needs no reference.
        lr: learning rate of each member until it is mutated.
        update_epochs: must be 1, for each completion is learned from once.
        temperature, top_p, top_k: sampling of the rollouts; top_k 0 is off.
        max_output_tokens: most tokens of a completion; None is what the
            context leaves.
        micro_batch_size_per_gpu: completions of one forward and backward
            pass; None is all of a step, which suits a CPU.
        gradient_checkpointing: less memory for more time.
    """

    name: Name
    batch_size: Count = 6
    group_size: Count = 8
    beta: Annotated[Number, _within("beta")] = 0.001
    lr: Number = 5e-6
    max_grad_norm: Annotated[Number, Field(ge=0)] = 0.1
    update_epochs: Whole = 1
    temperature: Annotated[Number, _within("temperature")] = 0.9
    top_p: Annotated[Number, _within("top_p")] = 1.0
    top_k: Annotated[Whole, _within("top_k")] = 0
    max_output_tokens: Count | None = None
    micro_batch_size_per_gpu: Count | None = None
    gradient_checkpointing: Switch = False


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
    arch_mut: Share = 0.0
    new_layer: Share = 0.0
    params_mut: Share = 0.0
    act_mut: Share = 0.0
    rl_hp_mut: Share = 0.0


class Range(_Section):
    """Where a mutated hyperparameter is clipped to, both ends included."""

    min: Number
    max: Number


class Mutation(_Section):
    """What evolution may change, and the seed of all that is drawn."""

    rand_seed: Annotated[Whole, _within("seed")] = 42
    probabilities: Probabilities = Probabilities()
    rl_hp_selection: dict[str, Range] = Field(default_factory=dict)


class TournamentSelection(_Section):
    """How the next population is chosen.

    Attributes:
        tournament_size: members drawn, the best of whom is copied.
        elitism: whether the best member of all goes on unchanged.
    """

    tournament_size: Whole = 2
    elitism: Switch = True


class LoraConfig(_Section):
    """The adapter of each member."""

    lora_r: Annotated[Whole, _within("lora_r")] = 16
    lora_alpha: Annotated[Whole, _within("lora_alpha")] = 64
    target_modules: Annotated[tuple[str, ...], BeforeValidator(_layers)] = (
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
    load_in_4bit: Switch = True
    lora_config: LoraConfig = LoraConfig()


class Manifest(_Section):
    """A manifest that `load` has read; its sections are named as there.

    Example:
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

    _without_meaning: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def without_meaning(self) -> dict[str, Any]:
        """The given keys of `NO_MEANING` by path, with their values."""
        return dict(self._without_meaning)

    @property
    def completions_per_step(self) -> int:
        """Completions of one optimiser step of one member."""
        return self.algorithm.batch_size * self.algorithm.group_size

    @property
    def steps(self) -> int:
        """Optimiser steps of each member; 0 if the budget allows none."""
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
        values = self.model_dump(mode="json")
        for path, value in self._without_meaning.items():
            *sections, key = path.split(".")
            place = values
            for section in sections:
                place = place[section]
            place[key] = value
        return values


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted path of every section and key."""
    for name, field in model.model_fields.items():
        yield prefix + name
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _paths(kind, f"{prefix}{name}.")


OTHER_NAME = "selection_strategy"
"""What `tournament_selection` is called in newer manifests."""

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

_SECTIONS = {path.rpartition(".")[0] for path in KNOWN}


# --- Reading ----------------------------------------------------------------


def load(source: str | Path | dict) -> Manifest:
    """Read a manifest.

    Args:
        source: the path of a YAML or JSON file, YAML text (it contains a
            line break), or what `Manifest.to_dict` returned.

    Returns:
        The manifest, which may still be a bad idea; see `lint`.

    Raises:
        LabError: there is no such file, it is no YAML, or a key is unknown,
            missing or mistyped; names every such key with its path.
    """
    data, where = _read(source)
    if not isinstance(data, dict):
        raise LabError(
            f"The manifest{where} is {shown(data)}, but it must be sections "
            "of keys with values: algorithm, environment, training, "
            "mutation, tournament_selection and network. Begin with a line "
            "`algorithm:` and put its keys below it, each indented."
        )
    # A section all of whose lines are commented out is read as null.
    data = {key: value for key, value in data.items() if value is not None}
    other_name = OTHER_NAME in data
    faults = []
    if other_name and "tournament_selection" in data:
        faults.append(
            f"tournament_selection and {OTHER_NAME} are two names of one "
            "section; delete one of them."
        )
    if other_name:
        data["tournament_selection"] = data.pop(OTHER_NAME)
    data, ignored = _split(data)
    ignored = {
        path: _plain(path, value, faults) for path, value in ignored.items()
    }
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        found = [_fault(one) for one in error.errors(include_url=False)]
        if other_name:
            found = [
                text.replace("tournament_selection", OTHER_NAME)
                for text in found
            ]
        faults += found
    if faults:
        more = len(faults) - MOST_FAULTS
        rest = f" There are {more} more such faults." if more > 0 else ""
        raise LabError(
            f"The manifest{where} can't be used. "
            f"{' '.join(faults[:MOST_FAULTS])}{rest} Correct this in the "
            "manifest, and submit it again."
        )
    manifest._without_meaning = ignored
    return manifest


MOST_FAULTS = 20  # in one message


def _read(source: str | Path | dict) -> tuple[object, str]:
    """The values of a manifest, and words that say where it is."""
    if not isinstance(source, str | Path):
        return source, ""
    if isinstance(source, str) and "\n" in source:
        return _parse(source, ""), ""
    where = f" {source}"
    return _parse(_file_text(source), where), where


def _file_text(path: str | Path) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise LabError(
            f"There is no manifest {path}. Type the path of a YAML file, "
            "seen from the directory that you are in, or a full path."
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LabError(
            f"The manifest {str(path)!r} can't be read: {reason}. Type the "
            "path of a YAML file that is saved as UTF-8."
        ) from error


def _parse(text: str, where: str) -> object:
    text = text.removeprefix("\ufeff")  # some editors put it first
    if text.lstrip().startswith("{"):
        # JSON may have tabs and pairs of escapes, which YAML may not.
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text, object_pairs_hook=_unrepeated)
    try:
        _refuse_repeated_keys(yaml.compose(text, yaml.SafeLoader), where)
        return yaml.safe_load(text)
    except LabError:
        raise
    except yaml.YAMLError as error:
        raise LabError(
            f"The manifest{where} is no YAML: {_yaml_fault(error, text)}. "
            "Correct that place: two spaces for each level, a space after "
            "each colon, no tabs, and quotes around a text with a colon in "
            "it."
        ) from error
    # A tag such as !!int before something else raises whatever int() does.
    except Exception as error:
        raise LabError(
            f"The manifest{where} has a value that can't be read: {error!r}. "
            "Write plain numbers, texts and lists, without tags such as "
            "!!int."
        ) from error


def _unrepeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Leaves it to the YAML reader to say where a key is repeated."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a repeated key")
    return dict(pairs)


def _yaml_fault(error: yaml.YAMLError, text: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark:
        line, column = mark.line + 1, mark.column + 1
        what = error.problem
    else:
        before = text[: getattr(error, "position", 0)]
        line = before.count("\n") + 1
        column = len(before) - (before.rfind("\n") + 1) + 1
        what = getattr(error, "reason", "it can't be read")
    return f"line {line}, column {column}: {what}"


def _refuse_repeated_keys(root: yaml.Node | None, where: str) -> None:
    """PyYAML would quietly take the last one."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            waiting += [value for _, value in node.value]
            keys = [key for key, _ in node.value]
            _refuse_repeated(keys, where)


def _refuse_repeated(keys: list[yaml.Node], where: str) -> None:
    first: dict[str, int] = {}
    for key in keys:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if key.value in first:
            raise LabError(
                f"The manifest{where} gives {key.value} twice in one section, "
                f"in line {first[key.value]} and in line {line}. Delete one "
                "of them."
            )
        first[key.value] = line


def _split(data: dict, prefix: str = "") -> tuple[dict, dict[str, object]]:
    """What has a meaning, nested as before, and what has none, by path."""
    kept, ignored = {}, {}
    for key, value in data.items():
        path = prefix + key if isinstance(key, str) else ""
        if path in NO_MEANING:
            ignored[path] = value
        elif path in _SECTIONS and isinstance(value, dict):
            kept[key], below = _split(value, path + ".")
            ignored |= below
        else:
            kept[key] = value
    return kept, ignored


def _plain(path: str, value: object, faults: list[str]) -> object:
    """The value as JSON has it; notes a fault if JSON can't."""
    try:
        if _is_small(value):
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            return json.loads(text.encode())
    except (TypeError, ValueError, RecursionError):
        pass
    faults.append(
        f"{path} is {shown(value)}, but must be plain numbers, texts, lists "
        "or mappings."
    )
    return None


def _is_small(value: object, most: int = 500) -> bool:
    """Aliases can make a value of billions from a few lines of YAML."""
    waiting = [value]
    while waiting and most:
        most -= 1
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return not waiting


# --- Saying what is wrong ---------------------------------------------------

_NEEDED = {
    "model_type": "a section of keys with values",
    "dict_type": "a section of keys with values",
    "string_type": "text",
    "literal_error": "CAUSAL_LM",
}

_REQUIRED = {
    "algorithm": "a section with `name: GRPO` in it",
    "algorithm.name": "GRPO",
    "environment": "a section with the `name` of a dataset in it",
    "environment.name": "the name of a registered dataset",
    "training": "a section with `max_steps` in it",
    "training.max_steps": "the completions to learn from, such as 100_000",
    "network": "a section with `pretrained_model_name_or_path` in it",
    "network.pretrained_model_name_or_path": (
        "a model such as Qwen/Qwen2.5-0.5B-Instruct"
    ),
}


def _fault(error: dict) -> str:
    """One fault that pydantic found, as a sentence."""
    parts = [part for part in error["loc"] if part != "[key]"]
    path = ".".join(_spoken(part) for part in parts)
    kind = error["type"]
    if kind in ("extra_forbidden", "invalid_key"):
        return f"There is no key {path}{_suggestion(path)}"
    if kind == "missing":
        return f"{path} is missing: give it {_REQUIRED.get(path, 'a number')}."
    if kind == "greater_than_equal":
        needed = f"{error['ctx']['ge']:g} or more"
    elif kind == "less_than_equal":
        needed = f"{error['ctx']['le']:g} or less"
    else:
        needed = _NEEDED.get(kind, error["msg"])
    return f"{path} is {shown(error['input'])}, but must be {needed}."


def _suggestion(path: str) -> str:
    parent, _, key = path.rpartition(".")
    beside = {
        known.rpartition(".")[2]: known
        for known in KNOWN
        if known.rpartition(".")[0] == parent
    }
    near = [known for known in KNOWN if known.rpartition(".")[2] == key]
    near = near or [beside[name] for name in nearest(key, list(beside))]
    if near:
        return f"; did you mean {' or '.join(near[:3])}?"
    if beside:
        names = [name for name in beside if beside[name] not in NO_MEANING]
        return f"; the keys there are {', '.join(names)}."
    return "."


def nearest(word: str, names: list[str]) -> list[str]:
    """The names that are most like a word, all of them if some tie.

    Example:
        >>> nearest("temprature", ["temperature", "top_p"])
        ['temperature']
        >>> nearest("xyz", ["temperature", "top_p"])
        []
    """
    alike = {
        name: difflib.SequenceMatcher(None, word[:80].lower(), name).ratio()
        for name in names
    }
    best = max(alike.values(), default=0)
    return [name for name in names if best >= 0.5 and alike[name] == best]


def _spoken(part: object) -> str:
    """A part of a path; anything at all may stand where a key should."""
    if isinstance(part, str) and part.isprintable() and len(part) <= 80:
        return part
    return shown(part)


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 4


def shown(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of over 4300 digits
        return "a number that is too long to show"


# --- Using ------------------------------------------------------------------


def completion_limit(
    manifest: Manifest, longest_prompt: int, context: int
) -> int:
    """Tokens that a completion may have.

    Args:
        manifest: from `load`.
        longest_prompt: tokens of the longest prompt.
        context: tokens that the model's own context has.

    Returns:
        `max_output_tokens`, or what the context leaves after the longest
        prompt where that is less or nothing was asked for; at least 1.

    Raises:
        LabError: the longest prompt leaves no room.
    """
    room = room_of(manifest, context)
    left = room - longest_prompt
    if left < 1:
        raise LabError(
            "network.max_context_length "
            + no_answer_fits(longest_prompt, room)
        )
    asked = manifest.algorithm.max_output_tokens
    return left if asked is None else min(asked, left)


def settings(manifest: Manifest, limit: int) -> RunSettings:
    """One member's training, at the manifest's own lr and beta.

    The rate is constant and has no warm-up, since evolution is what changes
    it. Without a `micro_batch_size_per_gpu` a step is one pass over all its
    completions, which suits a CPU; on a GPU give one when memory is short.

    Args:
        manifest: without an error of `lint`.
        limit: tokens of a completion, from `completion_limit`.

    Raises:
        LabError: the manifest can't train; `lint` says it by path.
    """
    if manifest.steps < 1:
        raise LabError(f"training.max_steps {too_small(manifest)}")
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

    Returns:
        A manifest of one member that nothing happens to. Its `max_steps` is
        what the population really uses, whole steps only, so that both learn
        from exactly as many completions.
    """
    training = manifest.training
    used = manifest.steps * manifest.completions_per_step * training.pop_size
    alone = {"pop_size": 1, "max_steps": used or training.max_steps}
    mutation = {"probabilities": Probabilities(no_mut=1.0)}
    selection = TournamentSelection(tournament_size=1, elitism=True)
    return manifest.model_copy(
        update={
            "training": training.model_copy(update=alone),
            "mutation": manifest.mutation.model_copy(update=mutation),
            "tournament_selection": selection,
        }
    )


def room_of(manifest: Manifest, context: int | None) -> int:
    """Tokens that a prompt and its completion may have together."""
    length = manifest.network.max_context_length
    return length if context is None else min(length, context)


def no_answer_fits(longest_prompt: int, room: int) -> str:
    """Why a prompt leaves nothing for an answer, and what to do."""
    return (
        f"leaves no room for an answer: the longest prompt has "
        f"{longest_prompt} tokens, and prompt and completion together may "
        f"have {room}. Raise max_context_length if the model allows it, or "
        "leave the longest questions out of the dataset."
    )


def too_small(manifest: Manifest) -> str:
    """Why a budget allows no step, and what to write."""
    sizes = manifest.algorithm, manifest.training.pop_size
    needed = manifest.completions_per_step * sizes[1]
    return (
        f"is {manifest.training.max_steps}, but one optimiser step of the "
        f"population takes {needed} completions ({sizes[0].batch_size} "
        f"prompts x {sizes[0].group_size} completions x {sizes[1]} members), "
        f"so that nothing would be trained. Write max_steps: {needed} or "
        "more."
    )
