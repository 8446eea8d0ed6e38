r"""How fast a grid is against plain TRL, on the same work.

    python benchmarks/grid_speed.py

1. the pocket grid of lesson 03, as a loop over `trl.GRPOTrainer` with TRL's
   own rollouts, and through `grpo_lab.grid`, in one process and with a run on
   each core: the same questions, completions, steps, seeds and settings, the
   same evaluation of each base model and of each run. The loop keeps no
   checkpoints, the grid one for each step. Seconds, completions per second,
   peak memory, held-out accuracy;
2. what each optimization brings: steps of the first pocket run without it;
3. SmolLM2-135M in 4 bit, rollouts and whole steps;
4. the lite models likewise, where there is a GPU.

The ways take turns, each time in a process of its own; a ratio is the
median over the pairs, above 1 where grpo_lab is better. Where a step's time
goes is told for both. Optimizations are switched off in turn in one process,
each time in another order. Plain TRL's threads wait for each other as
PyTorch has them, ours as `environment.prepare` says; on free cores the
first is faster. Other work on the machine disturbs the figures: run nothing
beside it.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path

from grpo_lab import environment

environment.prepare()

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from scipy import stats  # noqa: E402
from trl import GRPOTrainer  # noqa: E402

from grpo_lab import (  # noqa: E402
    data,
    evaluation,
    grid,
    guards,
    memory,
    models,
    training,
)
from grpo_lab.profiles import LITE, POCKET, run_names  # noqa: E402
from grpo_lab.prompts import longest_prompt  # noqa: E402
from grpo_lab.speed import optimizations  # noqa: E402
from grpo_lab.speed.optimizations import OPTIMIZATIONS  # noqa: E402
from grpo_lab.speed.trainer import FastTrainer  # noqa: E402
from rewards import FIVE_PART  # noqa: E402

WAYS = ("plain TRL", "grpo_lab")
WORKERS = "grpo_lab, a run per core"
"""The grid as it runs by default: processes of one thread, one for a core.

Its parts are not timed, for they are those of the workers.
"""

USUAL_WAIT = {"GOMP_SPINCOUNT": "300000"}
"""How long the threads of PyTorch on Linux wait if nothing is set."""

SEEDS = (42, 43, 44)

PARTS = {
    "rollouts": (GRPOTrainer, "_generate"),
    "rewards": (GRPOTrainer, "_calculate_rewards"),
    "forward pass": (FastTrainer, "compute_loss"),
    "backward pass": (Accelerator, "backward"),
    "checkpoint": (GRPOTrainer, "_save_checkpoint"),
}
"""What a step consists of, and the function that does it."""


def main() -> None:
    """Measure in child processes, or be one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5, help="seeds: 42, ...")
    parser.add_argument(
        "--max-steps", type=int, default=POCKET.run["max_steps"]
    )
    parser.add_argument("--few-steps", type=int, default=2)
    parser.add_argument("--only", choices=("grid", "optimizations", "models"))
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _be_child(json.loads(options.child))
        return
    print(environment.describe(), flush=True)
    figures = {"machine": environment.machine()}
    if options.only in (None, "grid"):
        jobs = [
            {"what": "grid", "seed": 42 + pair, "steps": options.max_steps}
            for pair in range(options.pairs)
        ]
        figures["pocket grid"] = _pairs(jobs, (*WAYS, WORKERS))
        _tell_grid(figures["pocket grid"])
    if options.only in (None, "optimizations"):
        job = {"what": "optimizations", "way": WAYS[1], "steps": 8}
        figures["optimizations"] = [
            _measured(job | {"seed": seed}) for seed in SEEDS
        ]
        _tell_optimizations(figures["optimizations"], job["steps"])
    few = ["smollm2-135m"] if options.only in (None, "models") else []
    if few and torch.cuda.is_available():
        few += [*LITE.grid]
    for model in few:
        job = {"what": "model", "model": model, "steps": options.few_steps}
        figures[model] = _pairs([job | {"seed": seed} for seed in SEEDS])
        _tell_model(model, figures[model])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


# --- Measuring ---------------------------------------------------------------


def _pairs(jobs: list[dict], ways: tuple[str, ...] = WAYS) -> list[dict]:
    """All ways for each job, in turn, the first one alternating."""
    found = []
    for index, job in enumerate(jobs):
        order = ways if index % 2 == 0 else ways[::-1]
        found.append({way: _measured(job | {"way": way}) for way in order})
    return found


def _measured(job: dict) -> dict:
    """What a process of its own measures."""
    with tempfile.TemporaryDirectory() as folder:
        job = job | {"folder": folder}
        subprocess.run(
            [sys.executable, __file__, "--child", json.dumps(job)],
            check=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | (USUAL_WAIT if job["way"] == WAYS[0] else {}),
        )
        found = json.loads((Path(folder) / "found.json").read_text())
    line = f"{job['way']}, seed {job['seed']}: {found['seconds']:.0f} s"
    print(f"  {line}", flush=True)
    return found


def _be_child(job: dict) -> None:
    folder = Path(job["folder"])
    spent = _watch_parts()
    started = time.perf_counter()
    ways = {"grid": _grid, "optimizations": _without_each, "model": _model}
    found = ways[job["what"]](job, folder)
    found["seconds"] = time.perf_counter() - started
    found["parts"] = spent
    found["memory_gib"] = _peak_memory()
    (folder / "found.json").write_text(json.dumps(found))


def _watch_parts() -> dict[str, float]:
    """Count the seconds of each part of a step, of `training` as a whole."""
    spent = defaultdict(float)
    for name, (owner, function) in PARTS.items():
        setattr(owner, function, _timed(getattr(owner, function), name, spent))
    # FastTrainer's calls this one, so only the plain trainer's own is timed
    plain = GRPOTrainer.compute_loss
    timed = _timed(plain, "forward pass", spent)

    @wraps(plain)
    def compute_loss(self, *args, **kwargs):
        chosen = plain if isinstance(self, FastTrainer) else timed
        return chosen(self, *args, **kwargs)

    GRPOTrainer.compute_loss = compute_loss
    GRPOTrainer.train = _timed(GRPOTrainer.train, "training", spent)
    _count_tokens(spent)
    return spent


def _count_tokens(spent: dict) -> None:
    """Count the tokens of all completions beside the seconds."""
    generate = GRPOTrainer._generate

    @wraps(generate)
    def counting(*args, **kwargs):
        found = generate(*args, **kwargs)
        spent["tokens"] += sum(len(ids) for ids in found[1])
        return found

    GRPOTrainer._generate = counting


def _timed(function, name: str, spent: dict):
    @wraps(function)
    def timed(*args, **kwargs):
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            spent[name] += time.perf_counter() - started

    return timed


def _peak_memory() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / 2**20


# --- The two ways ------------------------------------------------------------


def _grid(job: dict, folder: Path) -> dict:
    """The pocket grid: its accuracies, and completions in all."""
    runs = POCKET.settings(seed=job["seed"], max_steps=job["steps"])
    splits = data.load_splits(
        POCKET.data,
        train_rows=POCKET.train_rows,
        eval_rows=POCKET.eval_rows,
        seed=job["seed"],
    )
    run_all = {
        WAYS[0]: _plain_grid,
        WAYS[1]: partial(_our_grid, workers=1),  # as the loop: one process
        WORKERS: _our_grid,
    }[job["way"]]
    found = zip(run_names(runs), run_all(runs, splits, folder), strict=True)
    return {
        "runs": {
            name: {
                "accuracy": held_out.accuracy,
                "reward": statistics.mean(rewards[-len(rewards) // 4 :]),
            }
            for name, (held_out, rewards) in found
        },
        "completions": sum(
            one.steps(len(splits.train)) * one.completions_per_step
            for one in runs
        ),
    }


def _our_grid(runs, splits, folder, workers=None) -> list[tuple]:
    """An evaluation and the rewards of all steps, for each run."""
    found = grid.run(
        runs,
        grid.Task(splits, FIVE_PART),
        folder / "grid",
        POCKET.eval_batch_size,
        workers=workers,
    )
    found.raise_failures()
    return [(run.evaluation, [*run.metrics["reward"]]) for run in found.runs]


def _plain_grid(runs, splits, folder) -> list[tuple]:
    """The same, by what one writes who has TRL: a loop over its trainer."""
    found, measured = [], set()
    for index, one in enumerate(runs):
        model, tokenizer = models.load_policy(one.model)
        judge = partial(
            evaluation.evaluate,
            tokenizer=tokenizer,
            rows=splits.eval,
            max_new_tokens=one.max_completion_length,
            batch_size=POCKET.eval_batch_size,
        )
        if one.model not in measured:
            measured.add(one.model)
            judge(model)
        trainer = _plain_trainer(
            one, splits, folder / f"run-{index}", model, tokenizer
        )
        trainer.train()
        logs = trainer.state.log_history
        rewards = [row["reward"] for row in logs if "reward" in row]
        found.append((judge(trainer.model), rewards))
        del trainer, model, judge
        memory.free_memory()
    return found


def _plain_trainer(one, splits, folder, model, tokenizer) -> GRPOTrainer:
    """TRL's trainer with TRL's rollouts, and the settings of a run.

    Adapters are in 32 bit, for in 16 the learning would not be the same.
    """
    plain = _resolved(replace(one, optimizations=()), splits, tokenizer)
    arguments = training.grpo_config(plain, folder, len(splits.train))
    arguments.save_strategy = "no"
    guards.keep_sampling_ours(model)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=list(FIVE_PART),
        args=arguments,
        train_dataset=splits.train,
        processing_class=tokenizer,
        peft_config=training.lora_config(one),
    )
    guards.prepare(trainer)
    return trainer


def _our_trainer(one, splits, folder, model, tokenizer) -> GRPOTrainer:
    resolved = _resolved(one, splits, tokenizer)
    return training.build_trainer(
        resolved, splits.train, FIVE_PART, folder, model, tokenizer
    )


def _resolved(one, splits, tokenizer) -> memory.Resolved:
    longest = longest_prompt(tokenizer, splits.train["prompt"])
    return memory.resolve(one, longest)


def _without_each(job: dict, folder: Path) -> dict:
    """Seconds of some steps of a run with one optimization off, for each."""
    [first, *_] = POCKET.settings(seed=job["seed"], max_steps=job["steps"])
    splits = data.load_splits(
        POCKET.data, train_rows=POCKET.train_rows, seed=job["seed"]
    )
    names = ["", *OPTIMIZATIONS]
    for idle in ("no_checkpointing", "one_base"):
        names.remove(idle)  # nothing to switch off, or no part of a step
    turn = job["seed"] % len(names)
    order = names[turn:] + names[:turn]
    seconds = {}
    for name in (order[-1], *order):  # the first one only warms up
        one = replace(
            first, optimizations=optimizations.without([name] if name else [])
        )
        run_dir = folder / f"{len(seconds)}-{name}"
        model, tokenizer = models.load_policy(one.model)
        trainer = _our_trainer(one, splits, run_dir, model, tokenizer)
        started = time.perf_counter()
        trainer.train()
        seconds[name] = time.perf_counter() - started
        del trainer, model
        memory.free_memory()
    return {"without": seconds}


def _model(job: dict, folder: Path) -> dict:
    """A few steps of one model that is too large for a whole grid."""
    row = LITE if job["model"] in LITE.grid else POCKET
    sizes = (
        {} if row is LITE else {"completions_per_step": 8, "micro_batch": 8}
    )
    rate = {job["model"]: (1e-5,)}
    [one] = row.settings(
        rate, seed=job["seed"], max_steps=job["steps"], **sizes
    )
    splits = data.load_splits(
        "pocket", train_rows=64, eval_rows=8, seed=job["seed"]
    )
    model, tokenizer = models.load_policy(one.model)
    build = _plain_trainer if job["way"] == WAYS[0] else _our_trainer
    trainer = build(one, splits, folder / "run", model, tokenizer)
    trainer.train()
    return {
        "completions": job["steps"] * one.completions_per_step,
        "optimizations": list(_resolved(one, splits, tokenizer).optimizations),
    }


# --- Telling -----------------------------------------------------------------


def _tell_grid(pairs: list[dict]) -> None:
    print("\nThe pocket grid of lesson 03")
    _tell_times(pairs, ("training",))
    _tell_workers(pairs)
    _tell_parts(pairs)
    _tell_learning(pairs, "accuracy", "Held-out accuracy in percent", 100)
    _tell_learning(pairs, "reward", "Reward in the last quarter of the steps")


def _tell_workers(pairs: list[dict]) -> None:
    """What a run on each core takes, all in all, against plain TRL."""
    took = statistics.median(pair[WORKERS]["seconds"] for pair in pairs)
    ratio = statistics.median(
        pair[WAYS[0]]["seconds"] / pair[WORKERS]["seconds"] for pair in pairs
    )
    print(f"  {WORKERS}, all in all: {took:.0f} s, ratio {ratio:.2f}")


def _tell_learning(
    pairs: list[dict], what: str, title: str, times: float = 1.0
) -> None:
    print(f"\n{title}: mean over the seeds, 95 % interval")
    print(f"  {'':26}{WAYS[0]:>18}{WAYS[1]:>18}{'difference':>18}")
    for name in pairs[0][WAYS[0]]["runs"]:
        values = [
            [times * pair[way]["runs"][name][what] for pair in pairs]
            for way in WAYS
        ]
        more = [b - a for a, b in zip(*values, strict=True)]
        cells = "".join(f"{_mean(each):>18}" for each in (*values, more))
        print(f"  {name:26}{cells}")


def _tell_optimizations(found: list[dict], steps: int) -> None:
    print("\nA step of the first pocket run with one optimization off")
    print(f"  {'off':26}{'seconds':>14}{'ratio':>8}")
    everything = [one["without"][""] for one in found]
    for name in found[0]["without"]:
        seconds = [one["without"][name] for one in found]
        ratio = statistics.median(
            a / b for a, b in zip(seconds, everything, strict=True)
        )
        step = statistics.median(seconds) / steps
        print(f"  {name or 'none':26}{step:14.2f}{ratio:8.2f}")


def _tell_model(name: str, pairs: list[dict]) -> None:
    print(f"\n{name}, 4 bit")
    _tell_times(pairs, ("rollouts", "training"))
    _tell_parts(pairs)
    active = pairs[0][WAYS[1]]["optimizations"]
    print(f"  active optimizations: {', '.join(active)}")


def _tell_times(pairs: list[dict], parts: tuple[str, ...]) -> None:
    print(f"  {'':26}{WAYS[0]:>14}{WAYS[1]:>14}{'ratio':>8}")
    for name in (*parts, "seconds"):

        def seconds(found, name=name):
            return found["parts"].get(name) or found[name]

        label = "all in all, s" if name == "seconds" else f"{name}, s"
        _tell_row(label, pairs, seconds)
    for label, value in {
        "completions": lambda found: found["completions"],
        "tokens": lambda found: found["parts"]["tokens"],
    }.items():
        _tell_row(
            f"{label} per second",
            pairs,
            lambda found, value=value: (
                value(found) / found["parts"]["training"]
            ),
            more_is_better=True,
        )
    _tell_row("peak memory, GiB", pairs, lambda found: found["memory_gib"])


def _tell_row(
    label: str, pairs: list[dict], value, more_is_better: bool = False
) -> None:
    """Medians of both ways, and of the ratios: above 1 grpo_lab is better."""
    plain, ours = ([value(pair[way]) for pair in pairs] for way in WAYS)
    ratios = [
        b / a if more_is_better else a / b
        for a, b in zip(plain, ours, strict=True)
    ]
    ratio = statistics.median(ratios)
    medians = (statistics.median(values) for values in (plain, ours))
    cells = "".join(f"{median:14.2f}" for median in medians)
    print(f"  {label:26}{cells}{ratio:8.2f}")


def _tell_parts(pairs: list[dict]) -> None:
    """Where the time of the training goes, in shares of it."""
    for way in WAYS:
        total = sum(pair[way]["parts"]["training"] for pair in pairs)
        told, rest = [], 1.0
        for name in PARTS:
            share = sum(p[way]["parts"].get(name, 0) for p in pairs) / total
            rest -= share
            told.append(f"{name} {share:.0%}")
        print(f"  {way}: {', '.join(told)}, the rest {rest:.0%}")


def _mean(values: list[float]) -> str:
    """Mean and Student's 95 % interval."""
    middle = statistics.mean(values)
    if len(values) < 2:
        return f"{middle:.2f}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = error * stats.t.ppf(0.975, len(values) - 1)
    return f"{middle:.2f} +- {half:.2f}"


if __name__ == "__main__":
    main()
