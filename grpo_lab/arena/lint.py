"""The lint of a manifest: what would waste the budget, before it is spent.

`manifest.load` has refused what can't be trained; here is what can be and
would still teach nothing, or something else than was meant.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from grpo_lab.arena.manifest import NO_MEANING, Manifest, room_of


@dataclass(frozen=True)
class Finding:
    """Something about a manifest that a reader should know.

    Attributes:
        level: "warning", or "note" for the keys without a meaning.
        path: the dotted path of the key, or what the paths begin with.
        text: one or two sentences that end with what to do.
    """

    level: Literal["warning", "note"]
    path: str
    text: str


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
        The warnings, and last one note if keys without a meaning are given.

    Example:
        >>> from grpo_lab.arena import manifest
        >>> example = manifest.load(manifest.EXAMPLE)
        >>> lint(example, forced_prompt="Think.")[0].path
        'environment.system_prompt'
    """
    found = [
        Finding("warning", path, f"{path} {text}")
        for path, text in (
            *_evolution(manifest),
            *_network(manifest, longest_prompt, context),
            *_prompt(manifest, forced_prompt),
        )
    ]
    if paths := manifest._without_meaning:
        reasons = "; ".join(f"{path}: {NO_MEANING[path]}" for path in paths)
        text = f"These keys have no meaning here: {reasons}. Leave or delete "
        found.append(Finding("note", ", ".join(paths), text + "them."))
    return found


def _prompt(manifest: Manifest, forced: str) -> Iterator[tuple[str, str]]:
    if manifest._cut_prompt:
        yield (
            "environment.system_prompt",
            f"ends before {manifest._cut_prompt!r}, which YAML takes for a "
            "comment. Put the whole text between quotes, or on lines of its "
            "own below `system_prompt: |`, if it belongs to the prompt.",
        )
    if not manifest.environment.system_prompt.strip():
        supplied = f": {forced!r}" if forced else ""
        yield (
            "environment.system_prompt",
            "is not given, so that nothing tells the model the format that "
            f"the reward asks for. One is supplied{supplied}. Write your own "
            "system_prompt if the reward asks for another format.",
        )


def _evolution(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for name in manifest.mutation.rl_hp_selection:
        if getattr(manifest.algorithm, name) == 0:
            yield (
                f"algorithm.{name}",
                "is 0, which no mutation (x1.2 or x0.8) changes. Give it a "
                "value above 0, or delete its range.",
            )
    training = manifest.training
    if manifest.generations < 2 and training.pop_size > 1:
        yield (
            "training.evo_steps",
            f"is {training.evo_steps}, but each member makes "
            f"{manifest.steps} optimiser steps only (max_steps is shared by "
            f"{training.pop_size} members), so that nothing ever evolves. "
            "Raise max_steps, or lower evo_steps or pop_size.",
        )
    if training.evo_steps != training.evaluation_interval:
        yield (
            "training.evaluation_interval",
            f"is {training.evaluation_interval} and evo_steps is "
            f"{training.evo_steps}. Evolution ranks by fitness, so that is "
            "measured at each evolution, and only then, whatever the "
            f"interval. Write evaluation_interval: {training.evo_steps}.",
        )
    members = training.pop_size
    size = manifest.tournament_selection.tournament_size
    if not (manifest.mutation_rate and manifest.mutation.rl_hp_selection):
        yield (
            "mutation",
            "changes nothing. Write rl_hp_mut: 0.6 and no_mut: 0.1 below "
            "probabilities and give lr or beta a min and a max below "
            "rl_hp_selection, or leave it if selection alone is wanted.",
        )
    if members == 1:
        yield (
            "training.pop_size",
            "is 1, so that there is nothing to select from. Write pop_size: "
            "2 or more, or leave it if one policy is wanted.",
        )
    elif size > members:
        yield (
            "tournament_selection.tournament_size",
            f"is {size}, but the population has {members} members. They are "
            "drawn with replacement, so the best wins nearly always. Write "
            f"tournament_size: {members}, or raise pop_size.",
        )


def _network(
    manifest: Manifest, longest_prompt: int | None, context: int | None
) -> Iterator[tuple[str, str]]:
    dropout = manifest.network.lora_config.lora_dropout
    if dropout:
        yield (
            "network.lora_config.lora_dropout",
            f"is {dropout:g} and stays active while completions are "
            "sampled, so that the text comes from another policy than the "
            "gradient. Write lora_dropout: 0.0.",
        )
    length = manifest.network.max_context_length
    if context is not None and length > context:
        yield (
            "network.max_context_length",
            f"is {length}, but the model's own context has {context} tokens, "
            f"which is what counts. Write max_context_length: {context}.",
        )
    if longest_prompt is None:
        return
    room = room_of(manifest, context)
    asked = manifest.algorithm.max_output_tokens
    if asked is None:
        yield (
            "algorithm.max_output_tokens",
            "is not given, so that a completion may have what the context "
            f"leaves: {room - longest_prompt} tokens. Longer ones are cut and "
            "never reach their answer (on GSM8K half of the answers of "
            "Qwen2.5-0.5B have more than 274). Write the number that you "
            "want, and raise max_context_length if it does not fit.",
        )
    elif longest_prompt + asked > 0.9 * room:
        left = room - longest_prompt
        yield (
            "algorithm.max_output_tokens",
            f"is {asked}, which with the longest prompt of {longest_prompt} "
            f"tokens comes near the context of {room} or exceeds it; a "
            f"completion is cut at {min(asked, left)}. Lower "
            "max_output_tokens, or raise max_context_length if the model "
            "allows it.",
        )
