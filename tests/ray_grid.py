"""A grid on Ray as a program of its own, so that its driver can be killed."""

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


def main(output_dir: str, address: str, *models: str) -> None:
    from killed_grid import variety

    from grpo_lab import grid

    grid.run(
        plan(list(models)),
        questions(),
        [variety],
        Path(output_dir),
        engine="ray",
        address=address,
    ).raise_failures()


if __name__ == "__main__":
    main(*sys.argv[1:])
