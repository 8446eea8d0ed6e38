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

import reprlib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

import yaml
from pydantic import ValidationError

from grpo_lab.arena.schema import (
    KNOWN,
    MUTABLE,
    NO_MEANING,
    OTHER_NAME,
    SECTIONS,
    Manifest,
    Probabilities,
    TournamentSelection,
    packaged,
)
from grpo_lab.errors import LabError
from grpo_lab.profiles import RunSettings

EXAMPLE = packaged("example.yaml")
"""A manifest for a machine without a GPU."""

PUBLISHED = packaged("published.yaml")
"""The manifest of the tutorial that the arena follows, value for value.

AgileRL's documentation, "Training GRPO on GSM8K in Arena". It is accepted as
it is; the lint says what is doubtful in it.
"""


# --- Reading ----------------------------------------------------------------


def load(source: str | Path | dict) -> Manifest:
    """Read a manifest.

    Args:
        source: the path of a YAML file (JSON is YAML), YAML text (with a
            line break in it), or what `Manifest.to_dict` returned.

    Returns:
        A manifest that can train, which may still be a bad idea; see `lint`.

    Raises:
        LabError: there is no such file, it is no YAML, a key is unknown,
            missing or mistyped, or values contradict each other; names every
            such key with its path.
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
    data, ignored = _split(data)
    try:
        manifest = Manifest.model_validate(data)
        faults = list(_contradictions(manifest))
    except ValidationError as error:
        faults = [_fault(one) for one in error.errors(include_url=False)]
        if "tournament_selection" not in data and OTHER_NAME in data:
            faults = [
                text.replace("tournament_selection", OTHER_NAME)
                for text in faults
            ]
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
    text = manifest_text(source)
    where = "" if text is source else f" {source}"
    return _parse(text.removeprefix("\ufeff"), where), where


def manifest_text(source: str | Path | dict) -> str:
    """A manifest as it was handed in: YAML text, or what a file holds.

    Raises:
        LabError: the file can't be read.
    """
    if isinstance(source, dict):
        return yaml.safe_dump(source, sort_keys=False)
    if isinstance(source, str) and "\n" in source:
        return source
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise LabError(
            f"The manifest {str(source)!r} can't be read: {reason}. Type "
            "the path of a YAML file that is saved as UTF-8, seen from the "
            "directory that you are in, or a full path."
        ) from error


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key, of which PyYAML would take the last one."""

    def construct_mapping(self, node, deep=False):
        first: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key.value, str):
                continue  # no key of a manifest
            if key.value in first:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} is given twice in one section, also "
                    f"in line {first[key.value]}; delete one of them",
                    problem_mark=key.start_mark,
                )
            first[key.value] = line
        return super().construct_mapping(node, deep)


def _parse(text: str, where: str) -> object:
    try:
        return yaml.load(text, _Loader)
    # A tag such as !!int before something else raises whatever int() does.
    except Exception as error:
        reason = getattr(error, "problem", None) or str(error)
        mark = getattr(error, "problem_mark", None)
        reason = " ".join(reason.split())
        if mark:
            place = f"line {mark.line + 1}, column {mark.column + 1}"
            reason = f"{place}: {reason}"
        raise LabError(
            f"The manifest{where} is no YAML that can be read: {reason}. "
            "Correct that place: two spaces for each level, a space after "
            "each colon, no tabs, no tags such as !!int, and quotes around a "
            "text with a colon in it."
        ) from error


def _split(data: dict, prefix: str = "") -> tuple[dict, list[str]]:
    """What has a meaning, nested as before, and the paths that have none."""
    kept, ignored = {}, []
    for key, value in data.items():
        path = prefix + key if isinstance(key, str) else ""
        if path in NO_MEANING:
            ignored.append(path)
        elif path in SECTIONS and isinstance(value, dict):
            kept[key], below = _split(value, path + ".")
            ignored += below
        else:
            kept[key] = value
    return kept, ignored


# --- Saying what is wrong ---------------------------------------------------


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


_DESTROYS = (
    "It would change the weights of a pretrained model, which destroys what "
    "it knows; only lr and beta are mutated."
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
    "mutation.probabilities.arch_mut": _DESTROYS,
    "mutation.probabilities.new_layer": _DESTROYS,
    "mutation.probabilities.params_mut": _DESTROYS,
    "mutation.probabilities.act_mut": _DESTROYS,
    "network.lora_config.target_modules": (
        "Write a list of names such as [q_proj, v_proj], or all-linear."
    ),
    OTHER_NAME: "It is another name of tournament_selection: delete one.",
}
"""What helps where a key is missing or refused."""

_NEEDED = {
    "model_type": "a section of keys with values",
    "dict_type": "a section of keys with values",
    "string_pattern_mismatch": "a text with something in it",
    "tuple_type": "a list of names",
    "too_short": "a list of at least one name",
}


def _fault(error: dict) -> str:
    """One fault that pydantic found, as a sentence or two."""
    parts = [part for part in error["loc"] if part != "[key]"]
    if parts[0] == OTHER_NAME and len(parts) > 1:
        parts[0] = "tournament_selection"
    path = ".".join(_spoken(part) for part in parts)
    hint = f" {_HINTS[path]}" if path in _HINTS else ""
    kind = error["type"]
    unknown = kind == "literal_error" and "[key]" in error["loc"]
    if unknown or kind in ("extra_forbidden", "invalid_key"):
        return f"There is no key {path}{_suggestion(path)}{hint}"
    if kind == "missing":
        example = "`python -m grpo_lab.arena manifest example`"
        return f"{path} is missing; {example} shows a whole manifest.{hint}"
    message = error["msg"].removeprefix("Input should be ")
    needed = _NEEDED.get(kind, message)
    return f"{path} is {shown(error['input'])}, but must be {needed}.{hint}"


def _suggestion(path: str) -> str:
    parent, _, key = path.rpartition(".")
    beside, elsewhere = [], []
    for known in KNOWN:
        section, _, name = known.rpartition(".")
        if known == path:  # it was given under both of its names
            return "."
        if section == parent:
            beside.append(name)
        elif name == key:
            elsewhere.append(known)
    close = get_close_matches(key[:80], beside, cutoff=0.5)
    prefix = f"{parent}." if parent else ""
    near = elsewhere or [prefix + name for name in close]
    if near:
        return f"; did you mean {' or '.join(near[:3])}?"
    names = [name for name in beside if prefix + name not in NO_MEANING]
    return f"; the keys there are {', '.join(names)}." if names else "."


def _spoken(part: object) -> str:
    """A part of a path; anything at all may stand where a key should."""
    if isinstance(part, str) and part.isprintable() and len(part) <= 80:
        return part
    return shown(part)


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def shown(value: object) -> str:
    """A value as YAML has it, cut."""
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
            "network.max_context_length leaves no room for an answer: the "
            f"longest prompt has {longest_prompt} tokens, and prompt and "
            f"completion together may have {room}. Raise max_context_length "
            "if the model allows it, or leave the longest questions out of "
            "the dataset."
        )
    asked = manifest.algorithm.max_output_tokens
    return left if asked is None else min(asked, left)


def settings(manifest: Manifest, limit: int) -> RunSettings:
    """One member's training, at the manifest's own lr and beta.

    The rate is constant and has no warm-up, since evolution is what changes
    it. Without a `micro_batch_size_per_gpu` a step is one pass over all its
    completions, which suits a CPU; on a GPU give one when memory is short.

    Args:
        manifest: from `load`.
        limit: tokens of a completion, from `completion_limit`.

    Raises:
        LabError: a size is beyond what `RunSettings` allows.
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

    Returns:
        A manifest of one member that nothing happens to. Its `max_steps` is
        what the population really uses, whole steps only, so that both learn
        from exactly as many completions.
    """
    training = manifest.training
    used = manifest.steps * manifest.completions_per_step * training.pop_size
    alone = {"pop_size": 1, "max_steps": used}
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
