"""How much faster a grid gets with a second worker, and what Ray costs.

    python benchmarks/scale_speed.py
    python benchmarks/scale_speed.py --steps 8 --json out.json

Eight pocket runs (two base models, four learning rates), each on one thread:
one after the other in one process, on one Ray worker of one core, and on two.
Each measurement is a process of its own, with a cluster of its own: one
machine that offers as many cores as there are workers, started before the
clock. Nothing else should run meanwhile. The machine needs two cores. All
three make the same runs, which is checked.

The speed-up is the time on one worker by that on two. The overhead of the
engine per run is the time on one worker minus that in one process, by eight:
the start of the worker, Tune's, and what the worker can't reuse.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

RATES = (1e-3, 5e-4, 2e-4, 1e-4)
WAYS = {"one process": 0, "one worker": 1, "two workers": 2}
"""What is measured: a name, and the workers, 0 for none."""


def measure(workers: int, steps: int, place: Path) -> dict:
    """Seconds of the grid, and its rewards; in this process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from grpo_lab import environment

    environment.prepare()
    import torch

    torch.set_num_threads(1)
    from grpo_lab import grid
    from grpo_lab.data import load_splits
    from grpo_lab.grid.cluster import PretendedCluster
    from grpo_lab.profiles import PROFILES
    from rewards import FIVE_PART

    pocket = PROFILES["pocket"]
    settings = [
        replace(one, max_steps=steps)
        for one in pocket.settings(dict.fromkeys(pocket.grid, RATES))
    ]
    splits = load_splits(
        pocket.data, train_rows=pocket.train_rows, eval_rows=pocket.eval_rows
    )
    cluster = PretendedCluster(1, cpus=workers) if workers else None
    engine = {"workers": 1}
    if cluster:
        engine = {"engine": "ray", "address": cluster.address}
    started = time.monotonic()
    found = grid.run(
        settings,
        grid.Task(splits, FIVE_PART),
        place,
        pocket.eval_batch_size,
        **engine,
    )
    seconds = time.monotonic() - started
    found.raise_failures()
    if cluster:
        cluster.close()
    return {
        "seconds": seconds,
        "training": sum(run.seconds for run in found.runs),
        "rewards": [run.metrics["reward"].tolist() for run in found.runs],
    }


def measured(workers: int, steps: int) -> dict:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [
                sys.executable, __file__, "--steps", str(steps),
                "--workers", str(workers), "--place", f"{place}/grid",
            ],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def compare(steps: int) -> dict:
    """All ways, and what follows from them."""
    found = {}
    for name, workers in WAYS.items():
        found[name] = measured(workers, steps)
        print(f"{name}: {found[name]['seconds']:.1f} s", flush=True)
    alone, one, two = found.values()
    assert alone["rewards"] == one["rewards"] == two["rewards"]
    return {
        "steps": steps,
        "seconds": {name: one["seconds"] for name, one in found.items()},
        "training": {name: one["training"] for name, one in found.items()},
        "speed-up": one["seconds"] / two["seconds"],
        "speed-up against one process": alone["seconds"] / two["seconds"],
        "overhead per run": (one["seconds"] - alone["seconds"]) / 8,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.workers is not None:
        print(json.dumps(measure(given.workers, given.steps, given.place)))
        return
    figures = compare(given.steps)
    print(f"\nspeed-up of a second worker: {figures['speed-up']:.2f}")
    print(f"overhead of the engine: {figures['overhead per run']:.1f} s a run")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
