"""The optimizations: what makes a run faster, each with a name and a switch.

`RunSettings.optimizations` lists those of a run. Without any the trainer is
`trl.GRPOTrainer` as it is. Each gives the same greedy completions as TRL, but
where two tokens tie, or the same gradients, but for rounding:
`tests/test_speed_*.py` prove it one by one.
"""

from collections.abc import Sequence

from grpo_lab.errors import LabError

OPTIMIZATIONS = {
    "decode_loop": (
        "completions are written by a short loop in place of `generate`, "
        "which does more for every token than a rollout needs"
    ),
    "shared_prefill": "a prompt is read once for its whole group",
    "finished_rows": "completions that have ended leave the batch",
    "dequantised_copy": (
        "on a CPU, completions come from a copy of the policy whose 4-bit "
        "weights were unpacked once a step, not for every token"
    ),
    "shared_prefix": (
        "the gradient computes a prompt once for all of its completions "
        "that are in one forward pass"
    ),
    "zero_advantage": (
        "completions whose advantage is 0 are left out of the gradient, "
        "to which they add nothing"
    ),
    "no_checkpointing": (
        "nothing is computed twice to save memory (gradient checkpointing) "
        "where there is memory enough"
    ),
    "one_base": "the runs of a grid share one loaded base model",
}
"""What each optimization does, by name."""

NEED_THE_LOOP = ("shared_prefill", "finished_rows", "dequantised_copy")
"""Optimizations that are part of `decode_loop`."""


def without(names: Sequence[str]) -> tuple[str, ...]:
    """All optimizations but some; those that need one of these go with it.

    Args:
        names: of `OPTIMIZATIONS`, or "all".

    Raises:
        LabError: there is no such optimization.
    """
    if "all" in names:
        return ()
    refuse_unknown(names)
    gone = {*names}
    if "decode_loop" in gone:
        gone.update(NEED_THE_LOOP)
    return tuple(name for name in OPTIMIZATIONS if name not in gone)


def refuse_unknown(names: Sequence[str]) -> None:
    """Refuse a name that is no optimization's.

    Raises:
        LabError: says which there are.
    """
    for name in names:
        if name not in OPTIMIZATIONS:
            raise LabError(
                f"There is no optimization {name!r}; the optimizations are "
                f"{', '.join(OPTIMIZATIONS)}. Type DISABLE = ['all'] for none "
                "of them, or [] for all."
            )
