"""A grid on workers as a program of its own, so that it can be killed."""

import json
import sys
from pathlib import Path

from conftest import quick_settings


def plan(models: list[str], steps: int = 6) -> list:
    """A run for each model; a linear rate, so that each step has its own."""
    return [quick_settings(model, max_steps=steps) for model in models]


def questions():
    """Two steps a pass over the questions."""
    from grpo_lab.data import load_splits

    return load_splits("pocket", train_rows=4, eval_rows=3, seed=3)


def small_task(*rewards):
    """Those questions, with the reward of `killed_grid` or others."""
    from killed_grid import variety

    from grpo_lab import grid

    return grid.Task(questions(), list(rewards or [variety]))


def starts(run) -> list[dict]:
    """Where and when a run was begun or gone on with."""
    return json.loads((run.directory / "environment.json").read_text())


def assert_same(run, expected) -> None:
    """A run is done, and is another one bit for bit, each step once."""
    import pandas as pd
    import torch
    from safetensors.torch import load_file

    assert run.status == "done", run.reason
    changing = ["seconds", "memory_gib"]
    pd.testing.assert_frame_equal(
        run.metrics.drop(columns=changing),
        expected.metrics.drop(columns=changing),
        check_exact=True,
    )
    ours, theirs = (
        load_file(one.adapter / "adapter_model.safetensors")
        for one in (run, expected)
    )
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert run.evaluation.answers == expected.evaluation.answers
    assert run.base.answers == expected.base.answers


def options(where: str) -> dict:
    """Where a grid trains: a number of processes, or a cluster's address."""
    if where.isdecimal():
        return {"workers": int(where)}
    return {"engine": "ray", "address": where}


def main(output_dir: str, where: str, *models: str) -> None:
    from killed_grid import variety

    from grpo_lab import grid

    grid.run(
        plan(list(models)),
        grid.Task(questions(), [variety]),
        Path(output_dir),
        **options(where),
    ).raise_failures()


if __name__ == "__main__":
    main(*sys.argv[1:])
