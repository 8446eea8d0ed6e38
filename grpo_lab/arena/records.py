"""What an experiment has come to, read back from its directory.

Nothing here needs the training libraries, so that a list or a look at the
metrics answers at once; see `population` for what writes the files.
"""

from pathlib import Path

import pandas as pd

from grpo_lab.files import read_json, read_metrics

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")

COLUMNS = (
    "step", "generation", "member", "completions", "learning_rate", "beta",
    "reward", "reward_std", "frac_reward_zero_std", "clipped_ratio",
    "mean_length", "loss", "grad_norm", "entropy", "kl", "failed_share",
    "seconds", "memory_gib",
)  # fmt: skip
"""Columns of `metrics`; see `training.METRICS` for those of a step.

`step` counts a member's optimiser steps, those of its ancestors included, and
`completions` what the whole population has written when it gets there.
"""


def member_folder(directory: Path, number: int) -> Path:
    """The run directory of a member."""
    return Path(directory) / "members" / f"{number:03d}"


def lineage(directory: Path) -> pd.DataFrame:
    """Who descends from whom, how it was changed, and how good it was.

    Returns:
        A row for each member of each generation that was measured, the best
        of a generation first: `generation`, `step` at which it was measured,
        `rank`, `member`, `parent` (missing where it began from the base
        model), `born` (generation), `change`, `learning_rate`, `beta`,
        `accuracy` with `low` and `high` of its 95 % interval, `mean_reward`,
        and `completions`, what the population had written by then.
    """
    state = read_json(Path(directory) / "population.json")
    rows = state["lineage"] if state else []
    frame = pd.DataFrame(rows)
    if rows:
        frame["parent"] = frame["parent"].astype("Int64")
    return frame


def checkpoints(directory: Path) -> list[dict]:
    """The checkpoints of an experiment, the best first.

    Returns:
        For each its `name`, `step`, `member`, `completions`, `accuracy` with
        `low` and `high` of its 95 % interval, `mean_reward`, and
        `size_mb`. Of equals the earlier comes first.
    """
    folder = Path(directory) / "checkpoints"
    found = []
    for file in folder.glob("step_*/checkpoint.json"):
        files = [file.with_name(name) for name in ADAPTER_FILES]
        if not all(one.is_file() for one in files):
            continue  # it is being deleted
        size = sum(one.stat().st_size for one in files) / 1e6
        found.append(read_json(file) | {"size_mb": round(size, 2)})
    return sorted(
        found,
        key=lambda one: (-one["accuracy"], -one["mean_reward"], one["step"]),
    )


def metrics(directory: Path) -> pd.DataFrame:
    """Every optimiser step of every member, while it trains or after.

    Returns:
        A row for each, with `COLUMNS`, sorted by step and member.
    """
    frames = [
        _member_metrics(folder)
        for folder in sorted((Path(directory) / "members").glob("*"))
    ]
    frames = [frame for frame in frames if len(frame)]
    if not frames:
        return pd.DataFrame(columns=COLUMNS)
    plan = read_json(Path(directory) / "plan.json")
    found = pd.concat(frames)
    found["generation"] = (found["step"] - 1) // plan["evo_steps"]
    found["completions"] = found["step"] * plan["completions_per_step"]
    found = found.sort_values(["step", "member"], ignore_index=True)
    return found[list(COLUMNS)]


def _member_metrics(folder: Path) -> pd.DataFrame:
    member = read_json(folder / "settings.json")
    rows = read_metrics(folder / "metrics.csv")
    own = {name: member[name] for name in ("number", "beta")} if member else {}
    return pd.DataFrame(
        [row | {"member": own["number"], "beta": own["beta"]} for row in rows]
    )
