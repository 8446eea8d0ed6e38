"""The lint of a manifest: what would waste the budget, before it is spent.

`manifest.load` has refused what can't be understood; here is what can be and
would still teach nothing, or something else than was meant.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from grpo_lab.arena.manifest import (
    MUTABLE,
    NO_MEANING,
    Manifest,
    no_answer_fits,
    room_of,
    shown,
    too_small,
)


@dataclass(frozen=True)
class Finding:
    """Something about a manifest that a reader should know.

    Attributes:
        level: "error" stops a submission, "warning" does not, "note" is
            about a key without a meaning.
        path: the dotted path of the key.
        text: one or two sentences that end with what to do.
    """

    level: Literal["error", "warning", "note"]
    path: str
    text: str


LEVELS = ("error", "warning", "note")

Findings = Iterator[Finding]


def _error(path: str, text: str) -> Finding:
    return Finding("error", path, f"{path} {text}")


def _warning(path: str, text: str) -> Finding:
    return Finding("warning", path, f"{path} {text}")


def lint(
    manifest: Manifest,
    longest_prompt: int | None = None,
    context: int | None = None,
    forced_prompt: str = "",
) -> list[Finding]:
    """What would go wrong with a manifest, before anything is spent.

    Args:
        manifest: from `load`.
        longest_prompt: tokens of the longest prompt, if it is known.
        context: tokens that the model's own context has, if it is known.
        forced_prompt: the system prompt that the experiment supplies if the
            manifest has none.

    Returns:
        Errors first, then warnings, then notes.

    Example:
        >>> from grpo_lab.arena import manifest
        >>> example = manifest.load(manifest.EXAMPLE)
        >>> lint(example, forced_prompt="Think.")[0].path
        'environment.system_prompt'
    """
    found = [
        *_lint_algorithm(manifest),
        *_lint_ranges(manifest),
        *_lint_budget(manifest),
        *_lint_mutation(manifest),
        *_lint_selection(manifest),
        *_lint_network(manifest, context),
        *_lint_room(manifest, longest_prompt, context),
        *_lint_prompt(manifest, forced_prompt),
        *_lint_ignored(manifest),
    ]
    return sorted(found, key=lambda one: LEVELS.index(one.level))


def _lint_algorithm(manifest: Manifest) -> Findings:
    chosen = manifest.algorithm
    if chosen.name.upper() != "GRPO":
        yield _error(
            "algorithm.name",
            f"is {shown(chosen.name)}, but only GRPO runs here: SFT and DPO "
            "learn from given answers and not from a reward, and are no part "
            "of these lessons. Write name: GRPO.",
        )
    if chosen.group_size < 2:
        yield _error(
            "algorithm.group_size",
            "is 1, but GRPO compares the completions of one prompt with each "
            "other, so that a single one teaches nothing. Write group_size: "
            "8.",
        )
    if not 0 < chosen.lr < 1:
        yield _error(
            "algorithm.lr",
            f"is {chosen.lr:g}, but a learning rate lies above 0 and below "
            "1. Write lr: 0.000005.",
        )
    if chosen.update_epochs != 1:
        yield _error(
            "algorithm.update_epochs",
            f"is {chosen.update_epochs}, but here each completion is learned "
            "from once. Write update_epochs: 1.",
        )
    micro_batch = chosen.micro_batch_size_per_gpu
    if micro_batch and manifest.completions_per_step % micro_batch:
        yield _error(
            "algorithm.micro_batch_size_per_gpu",
            f"is {micro_batch}, which does not divide the "
            f"{manifest.completions_per_step} completions of a step "
            "(batch_size x group_size). Write micro_batch_size_per_gpu: "
            f"{chosen.group_size}.",
        )


def _lint_ranges(manifest: Manifest) -> Findings:
    for name, limits in manifest.mutation.rl_hp_selection.items():
        path = f"mutation.rl_hp_selection.{name}"
        if name not in MUTABLE:
            yield _error(
                path,
                f"can't be mutated; only {' and '.join(MUTABLE)} can, for "
                "nothing else can change in the middle of a run. Delete it.",
            )
            continue
        least, most = MUTABLE[name]
        own = getattr(manifest.algorithm, name)
        if limits.min > limits.max:
            yield _error(
                path,
                f"has min {limits.min:g} above max {limits.max:g}. Swap them.",
            )
        elif limits.min < least or limits.max > most:
            yield _error(
                path,
                f"goes from {limits.min:g} to {limits.max:g}, but {name} "
                f"must stay within {least:g} and {most:g}. Narrow it.",
            )
        elif name == "lr" and not 0 < own < 1:
            continue  # which is an error whatever the range
        elif not limits.min <= own <= limits.max:
            yield _error(
                f"algorithm.{name}",
                f"is {own:g}, outside of its own range in {path}, "
                f"{limits.min:g} to {limits.max:g}: the first mutation would "
                "throw it to an end. Change it, or widen the range.",
            )
        elif own == 0:
            yield _warning(
                f"algorithm.{name}",
                f"is 0, which no mutation (x1.2 or x0.8) changes. Give it a "
                f"value above 0, or delete {path}.",
            )
        elif limits.max < 1.2 * limits.min:
            yield _warning(
                path,
                f"goes from {limits.min:g} to {limits.max:g}, which is less "
                f"than one mutation (x1.2) apart. Widen it, or delete it if "
                f"{name} is to stay as it is.",
            )


def _lint_budget(manifest: Manifest) -> Findings:
    training = manifest.training
    if manifest.steps < 1:
        yield _error("training.max_steps", too_small(manifest))
    elif manifest.generations < 2 and training.pop_size > 1:
        yield _warning(
            "training.evo_steps",
            f"is {training.evo_steps}, but each member makes "
            f"{manifest.steps} optimiser steps only (max_steps is shared by "
            f"{training.pop_size} members), so that nothing ever evolves. "
            "Raise max_steps, or lower evo_steps or pop_size.",
        )
    if training.evo_steps != training.evaluation_interval:
        yield _warning(
            "training.evaluation_interval",
            f"is {training.evaluation_interval} and evo_steps is "
            f"{training.evo_steps}. Evolution ranks by fitness, so that is "
            "measured at each evolution, and only then, whatever the "
            f"interval. Write evaluation_interval: {training.evo_steps}.",
        )


def _lint_mutation(manifest: Manifest) -> Findings:
    chances = manifest.mutation.probabilities
    for name in ("arch_mut", "new_layer", "params_mut", "act_mut"):
        if getattr(chances, name):
            what = "weights" if name == "params_mut" else "architecture"
            yield _error(
                f"mutation.probabilities.{name}",
                f"would mutate the {what} of a pretrained language model, "
                "which destroys what it knows; only hyperparameters are "
                f"mutated here. Write {name}: 0.0.",
            )
    if not chances.no_mut + chances.rl_hp_mut:
        yield _warning(
            "mutation.probabilities",
            "gives neither no_mut nor rl_hp_mut, so that nothing ever "
            "mutates. Write rl_hp_mut: 0.6 and no_mut: 0.1, or leave it if "
            "selection alone is wanted.",
        )
    elif chances.rl_hp_mut and not manifest.mutation.rl_hp_selection:
        yield _warning(
            "mutation.rl_hp_selection",
            "is empty, so that there is nothing to mutate. Give lr or beta a "
            "min and a max.",
        )


def _lint_selection(manifest: Manifest) -> Findings:
    members = manifest.training.pop_size
    size = manifest.tournament_selection.tournament_size
    path = "tournament_selection.tournament_size"
    if size < 1:
        yield _error(
            path,
            f"is {size}, but a tournament needs somebody in it. Write "
            "tournament_size: 2.",
        )
    # One member plays no tournament, however large.
    elif size > members > 1:
        yield _warning(
            path,
            f"is {size}, but the population has {members} members. They are "
            "drawn with replacement, so the best wins nearly always. Write "
            f"tournament_size: {members}, or raise pop_size.",
        )
    if members == 1:
        yield _warning(
            "training.pop_size",
            "is 1, so that there is nothing to select from. Write pop_size: "
            "2 or more, or leave it if one policy is wanted.",
        )


def _lint_network(manifest: Manifest, context: int | None) -> Findings:
    dropout = manifest.network.lora_config.lora_dropout
    if dropout:
        yield _warning(
            "network.lora_config.lora_dropout",
            f"is {dropout:g} and stays active while completions are "
            "sampled, so that the text comes from another policy than the "
            "gradient. Write lora_dropout: 0.0.",
        )
    length = manifest.network.max_context_length
    if context is not None and length > context:
        yield _warning(
            "network.max_context_length",
            f"is {length}, but the model's own context has {context} tokens, "
            f"which is what counts. Write max_context_length: {context}.",
        )


def _lint_room(
    manifest: Manifest, longest_prompt: int | None, context: int | None
) -> Findings:
    if longest_prompt is None:
        return
    room = room_of(manifest, context)
    asked = manifest.algorithm.max_output_tokens
    if longest_prompt >= room:
        yield _error(
            "network.max_context_length",
            no_answer_fits(longest_prompt, room),
        )
    elif asked is None:
        yield _warning(
            "algorithm.max_output_tokens",
            "is not given, so that a completion may have what the context "
            f"leaves: {room - longest_prompt} tokens. Longer ones are cut and "
            "never reach their answer (on GSM8K half of the answers of "
            "Qwen2.5-0.5B have more than 274). Write the number that you "
            "want, and raise max_context_length if it does not fit.",
        )
    elif longest_prompt + asked > 0.9 * room:
        left = room - longest_prompt
        yield _warning(
            "algorithm.max_output_tokens",
            f"is {asked}, which with the longest prompt of {longest_prompt} "
            f"tokens comes near the context of {room} or exceeds it; a "
            f"completion is cut at {min(asked, left)}. Lower "
            "max_output_tokens, or raise max_context_length if the model "
            "allows it.",
        )


def _lint_prompt(manifest: Manifest, forced_prompt: str) -> Findings:
    if manifest.environment.system_prompt.strip():
        return
    supplied = f": {forced_prompt!r}" if forced_prompt else ""
    yield _warning(
        "environment.system_prompt",
        "is not given, so that nothing tells the model the format that the "
        f"reward asks for. One is supplied{supplied}. Write your own "
        "system_prompt if the reward asks for another format.",
    )


def _lint_ignored(manifest: Manifest) -> Findings:
    for path in manifest.without_meaning:
        yield Finding(
            "note",
            path,
            f"{path} has no meaning here: {NO_MEANING[path]}. Leave it or "
            "delete it.",
        )
