# %% [markdown]
# # 5. Scale out: one grid on many workers
#
# Four runs fit into an evening. Four hundred do not, and over the days that
# they take, something will break: a process, a machine, the notebook itself.
# This lesson trains the grid of lesson 3 on several workers, kills one of them
# in the middle and shows that nothing was lost. Then it saves work: runs that
# fall behind are stopped early, and one of those is cloned and goes on with
# another learning rate.
#
# Without a GPU the workers are those of a cluster of two machines, which is
# pretended on this one. The calls are the same for a real cluster.
#
# **What you will learn**
#
# - how the runs of a grid are trained by the workers of a Ray cluster;
# - what a killed worker costs, and why the result is the same to the last bit;
# - successive halving: which runs are stopped, what that saves and what it
#   risks;
# - how to stop, resume and clone runs while the grid trains;
# - how to sweep over a parameter of a whole lesson;
# - what to change for 8 GPUs or 8 machines, and what it would cost.
#
# **You need** this project, installed, and lesson 3: its grid, its
# leaderboard, and its words policy, completion, reward and held-out accuracy.
# Three more:
#
# - a **worker** is a process that trains one run at a time;
# - the **driver** is the process that gives the runs to the workers, here the
#   one behind this notebook;
# - a **cluster** is the machines that the workers are on.
#
# | profile | machine | time | memory |
# | --- | --- | --- | --- |
# | `full` | one or more GPUs with 80 GB or more | about 7 h on one, estimated | 40 GB for each worker, estimated |
# | `lite` | one or more GPUs with 15 GB or more | about 3.5 h on a T4, estimated | 10 GB for each worker, estimated |
# | `pocket` | 2 CPU cores, no GPU, no network | 4.5 min, measured | 4 GiB, measured |
#
# Interrupted? Run the notebook again with the same `OUTPUT_DIR` (the runner
# needs `--resume`): what is done is kept.

# %% [markdown]
# ## Set-up
#
# On your own machine `make demo` has installed everything. In Colab the next
# cell does it, and keeps the PyTorch that Colab already has.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("grpo_lab") is None:
    if "google.colab" not in sys.modules:
        raise ModuleNotFoundError(
            "The package grpo_lab is not installed. In the folder of this "
            "project type `make demo`, then start Jupyter from its .venv."
        )
    source = "grpo-lab[scale] @ git+https://github.com/grpo-lab/grpo-lab@main"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", source]
    subprocess.run(pip, check=True)

from grpo_lab import environment

environment.prepare()
print(environment.describe())

# %% [markdown]
# ## Parameters
#
# `PROFILE` sets every size. Any other line overrides one value of it; 0, ""
# and [] leave the profile's.

# %% tags=["parameters"]
PROFILE: str = "lite"  # full, lite or pocket; lite is pocket without a GPU
MODELS: list[str] = []  # base models: names, Hub ids or local folders
LEARNING_RATES: list[float] = []  # peak rates, each tried on each model
DATA: str = ""  # gsm8k, or pocket for the embedded problems
EVAL_ROWS: int = 0  # held-out questions
MAX_STEPS: int = 0  # optimiser steps of each run
COMPLETIONS_PER_STEP: int = 0  # completions for each optimiser step
MICRO_BATCH: int = 0  # completions in one forward pass: lower it for memory
FIRST_RUNG: int = 0  # the step of the first comparison; 0: a quarter of a run
FACTOR: int = 2  # one in so many runs goes on
ADDRESS: str = ""  # of a Ray cluster, such as auto; "": this machine alone
CPUS: float = 1.0  # CPU cores for each run
GPUS: float = 0.0  # GPUs for each run; 0: one, where there are any
STORAGE: str = ""  # such as s3://bucket/folder, if no disk is shared
PRICE_PER_GPU_HOUR: float = 2.0  # in US dollars, assumed: put in yours
SEED: int = 42  # of the adapters, the rollouts and the choice of questions
OUTPUT_DIR: str = "runs/05_scale_out"  # every file is written below it

# %%
from grpo_lab import memory, parameters, profiles
from grpo_lab.files import own_directory

globals().update(parameters.check(globals()))

device = memory.device_memory()
profile = profiles.choose(
    PROFILE, device.memory if device.is_gpu else 0, profiles.SCALE_OUT
)
overrides = {
    "max_steps": MAX_STEPS,
    "completions_per_step": COMPLETIONS_PER_STEP,
    "micro_batch": MICRO_BATCH,
}
settings = profile.settings(
    grid=profile.choose_grid(MODELS, LEARNING_RATES),
    seed=SEED,
    **{name: value for name, value in overrides.items() if value},
)
output_dir = own_directory(OUTPUT_DIR, "05_scale_out")
print(f"Profile {profile.name}: {len(settings)} runs.")

# %% [markdown]
# The questions, and a directory for the grid, checked before anything starts.
# As in lesson 3, a gold without a number, a run that is there twice or a full
# disk would stop us here.

# %%
from grpo_lab import data, figures, figures_scale, grid
from rewards import FIVE_PART

splits = data.load_splits(
    DATA or profile.data,
    train_rows=profile.train_rows,
    eval_rows=EVAL_ROWS or profile.eval_rows,
    seed=SEED,
)
grid_dir = output_dir / "grid"
task = grid.Task(splits, FIVE_PART)
grid.check(settings, task, grid_dir)
steps = settings[0].steps(len(splits.train))
print(
    f"{len(splits.train)} questions to train on, {len(splits.eval)} held out"
)
print(f"{len(settings)} runs of {steps} steps")

# %% [markdown]
# ## Who does what
#
# The work is shared out like this:
#
# - **Ray** connects machines to a cluster, starts processes on them and tells
#   when one of them or its machine is lost;
# - **the driver**, this process, gives each worker a run, gives the run to
#   another worker if one is lost, and compares runs on the way;
# - **our directories are the memory**. Each run writes its metrics and a
#   checkpoint after every step, and the driver keeps nothing that is not in
#   them. So it may die as well.
#
# What a worker does with a run is what lesson 3 did in its own process, with
# the same code, in the same kind of directory.

# %% [markdown]
# ## A cluster
#
# On a CPU with no address, the next cell pretends two machines with one core
# each. To Ray they are separate nodes, with everything that a node has; they
# listen on 127.0.0.1 only. With a GPU and no address, Ray will take this
# machine. With an address, it joins that cluster.

# %%
from grpo_lab.grid.cluster import PretendedCluster

cluster, address = None, ADDRESS
if not ADDRESS and not device.is_gpu:
    cluster = PretendedCluster(machines=2, cpus=max(1, round(CPUS)))
    address = cluster.address

on_workers = {
    "engine": "ray",
    "address": address,
    "cpus": CPUS,
    "gpus": GPUS or float(device.is_gpu),
    "retries": 3,  # times that a run goes on after its worker was lost
    "storage": STORAGE,
}
print(on_workers)

# %% [markdown]
# ## An accident, planned
#
# Memory runs out, somebody ends the wrong process, a machine loses its power:
# the worker is gone at once and can't tidy up. `SIGKILL` does just that to a
# process. The next cell is a thread that waits until some run has made three
# steps, and then kills its worker. It finds the process in the run's
# `environment.json`, where every start of a run is noted.
#
# It makes sure that it hits a Ray worker on this machine. If the runs are on
# other machines, nobody is killed.

# %%
import os
import platform
import signal
import threading

import psutil

from grpo_lab.files import read_json, read_metrics, write_json


def is_worker_here(start: dict) -> bool:
    if start["host"] != platform.node():
        return False
    try:
        words = psutil.Process(start["process"]).cmdline()
    except psutil.Error:
        return False
    return " ".join(words).startswith("ray::")


def kill_one(grid_dir, over: threading.Event, victims: list) -> None:
    """Kill the worker of the first run that has made three steps."""
    while not victims and not over.wait(0.2):
        for file in sorted(grid_dir.glob("runs/*/metrics.csv")):
            folder, made = file.parent, len(read_metrics(file))
            starts = read_json(folder / "environment.json") or []
            ended = (folder / "result.json").exists()
            if made < 3 or ended or len(starts) != 1:
                continue
            if is_worker_here(starts[-1]):
                os.kill(starts[-1]["process"], signal.SIGKILL)
                victims.append({"run": folder.name, "steps": made})
                return


# %% [markdown]
# ## The grid on two workers
#
# The call is that of lesson 3, with `engine="ray"` and what belongs to it. The
# models are trained in the workers; this process only looks on.
#
# **What you should see**: nothing for some seconds, since each worker has to
# start and to load PyTorch. Then two runs at a time. After three steps one of
# them stands still: its worker is dead. Another one starts. When a place is
# free, and that may be after other runs, it takes the run up from its last
# checkpoint. With one GPU it is one run at a time.

# %%
import textwrap
import time

live = figures.LiveTable(settings, FIVE_PART)
over = threading.Event()
victims = read_json(output_dir / "killed.json") or []  # once is enough
killer = threading.Thread(target=kill_one, args=(grid_dir, over, victims))
killer.start()
started = time.monotonic()
try:
    results = grid.run(
        settings,
        task,
        grid_dir,
        eval_batch_size=profile.eval_batch_size,
        progress=live.update,
        **on_workers,
    )
finally:
    over.set()
    killer.join()
    write_json(output_dir / "killed.json", victims)
took = time.monotonic() - started
live.end(results)

for run in results.failed:
    print(f"FAILED {run.name}: {run.reason}")
trained = sum(run.seconds for run in results.runs)
print(f"{len(results.done)} of {len(results.runs)} runs done in {took:.0f} s")
print(f"with {trained:.0f} s of training in them.")

# %% [markdown]
# The same as a picture: each point is a step, at the moment when the driver
# saw it. The line that rests is the run whose worker was killed.

# %%
figures_scale.timeline(live)

# %% [markdown]
# Where did they run? A row for each start of a run, with the step of the
# checkpoint that it went on from. On the pretended cluster the host is always
# this one; the processes are not. A worker that is done with a run takes the
# next one, so a process can come twice.

# %%
figures_scale.starts_table(results)

# %% [markdown]
# All about a run lies in its directory, as in lesson 3. What a worker prints
# goes to `worker.log` there; Ray would otherwise mix the words of all workers
# into this notebook. When a run fails, look there, and into `error.txt`.

# %%
run = results.runs[0]
names = sorted(path.name for path in run.directory.iterdir())
print(textwrap.fill(f"{run.directory.name}: {', '.join(names)}", 79))

# %% [markdown]
# ## What did the kill cost?
#
# The run was started twice. If a step was being made when its worker died,
# that one was made again, and only that one: the second start went on from the
# checkpoint of the step before. Each step stands in `metrics.csv` once.

# %%
by_folder = {run.directory.name: run for run in results.runs}
killed = by_folder[victims[0]["run"]] if victims else None
if killed is None:
    print("No worker was killed here: the runs were elsewhere, or done.")
else:
    starts = read_json(killed.directory / "environment.json")
    made = list(killed.metrics["step"])
    print(f"{killed.name}: killed after step {victims[0]['steps']},")
    print(f"started {len(starts)} times, each time by another process")
    print(f"the second time from the checkpoint of step {starts[1]['step']}")
    print("steps in metrics.csv:", *made)
    assert made == list(range(1, killed.steps + 1)), "a step is missing"
    assert starts[1]["step"] >= victims[0]["steps"] - 1, "work was lost"
    assert len({start["process"] for start in starts}) == len(starts) > 1

# %% [markdown]
# That all steps are there does not say that they are the right ones. A run
# that goes on with another state of its optimiser, its random numbers or its
# order of questions would look just as well. So here is the hard test: train
# that run once more, in this notebook, without Ray and without a kill, and
# compare.
#
# Sums in floating point depend on their order, and that on the number of
# threads. So this process takes as many as the worker had. On a GPU the order
# is not fixed, and two runs differ in the last digits whether they were killed
# or not; there this test is left out.

# %%
import torch

alone = None
if killed is not None and not device.is_gpu:
    threads = torch.get_num_threads()
    torch.set_num_threads(starts[-1]["threads"])
    [alone] = grid.run(
        [killed.settings],
        task,
        output_dir / "alone",
        eval_batch_size=profile.eval_batch_size,
    ).runs
    torch.set_num_threads(threads)
    print(f"{alone.name}: {alone.status} after {alone.steps} steps, here")
else:
    print("Nothing to compare.")

# %% [markdown]
# Every column of the metrics but the time and the memory, every weight of the
# adapter, and every answer to a held-out question:

# %%
same = {}
if alone is not None:
    measured = killed.metrics.columns.drop(["seconds", "memory_gib"])
    weights = [
        (run.adapter / "adapter_model.safetensors").read_bytes()
        for run in (killed, alone)
    ]
    same = {
        "metrics": killed.metrics[measured].equals(alone.metrics[measured]),
        "adapter": weights[0] == weights[1],
        "answers": killed.evaluation.answers == alone.evaluation.answers,
    }
    for what, equal in same.items():
        print(f"{what}: {'equal' if equal else 'DIFFERENT'}")

# %% [markdown]
# So the same seed gives the same policy: killed or not, on a worker or here.

# %% [markdown]
# ## What the grid has found
#
# All runs were trained to their end, so this is a leaderboard as in lesson 3.

# %%
figures.show(figures.leaderboard_text(results.leaderboard()))
print(textwrap.fill(results.verdict(), 79))

# %% [markdown]
# ## Halving, by hand
#
# Did we have to train all of them to the end? **Successive halving** compares
# the runs on the way. At a **rung**, a number of steps, all are asked the
# held-out questions; the better half goes on to the next rung, at twice the
# steps, and the rest is stopped. Here are four runs that could make 24 steps,
# with rungs at 6 and 12:

# %%
import pandas as pd

at_6 = {"A": 0.40, "B": 0.60, "C": 0.55, "D": 0.70}
at_12 = {"B": 0.75, "D": 0.72}

best_half = sorted(at_6, key=at_6.get)[-2:]
winner = max(at_12, key=at_12.get)
steps_made = 4 * 6 + 2 * 6 + 1 * 12
print(f"after step 6 {' and '.join(best_half)} go on; after step 12 {winner}")
print(f"{steps_made} steps instead of {4 * 24}")

# %% [markdown]
# This is the synchronous form
# ([Jamieson and Talwalkar, 2016](https://arxiv.org/abs/1502.07943)): a rung is
# decided when all runs are there. `grid.Halving` does that.
#
# On many workers it would be a waste: the fast ones wait for the slowest. The
# **asynchronous** form, ASHA ([Li et al.,
# 2018](https://arxiv.org/abs/1810.05934)), decides about each run when it
# arrives, by what has arrived before it (`asynchronous=True`): with a factor
# of 2 it goes on if it is at least as good as their median. The first one to
# arrive always goes on. So the *order* counts:

# %%
import statistics


def asha(order: str) -> list[str]:
    """Who goes on after step 6, when they arrive in this order."""
    came, going_on = [], []
    for run in order:
        if not came or at_6[run] >= statistics.median(came):
            going_on.append(run)
        came.append(at_6[run])
    return going_on


orders = {"all at once": best_half}
orders |= {order: asha(order) for order in ("ABCD", "DCBA", "BDAC")}
rows = [
    (order, *("goes on" if run in found else "stopped" for run in at_6))
    for order, found in orders.items()
]
columns = ["arrival"] + [f"{run}: {share:.0%}" for run, share in at_6.items()]
figures.table(pd.DataFrame(rows, columns=columns))

# %% [markdown]
# In the order ABCD each run is better than the median of those before it, and
# nobody is stopped. If the best comes first, it goes on alone. With four runs
# that is much luck. With hundreds the median soon settles, and what the first
# few got for free does not matter.

# %% [markdown]
# ## Halving, for real
#
# The same runs again, in a directory of their own, with rungs. Nobody is
# killed this time.
#
# **What you should see**: some runs end at the first rung. Which ones depends
# on who arrives first as well, and so on how busy this machine is. In the
# picture below the table a line rests at a rung while the held-out questions
# are answered.

# %%
first_rung = FIRST_RUNG or max(1, steps // 4)
halving = grid.Halving(first_rung, FACTOR, asynchronous=True)
rungs = halving.rungs(steps)
print(f"Compared after {' and '.join(map(str, rungs))} of {steps} steps.")

halved_dir = output_dir / "halved"
live = figures.LiveTable(settings, FIVE_PART)
halved = grid.run(
    settings,
    task,
    halved_dir,
    eval_batch_size=profile.eval_batch_size,
    progress=live.update,
    halving=halving,
    **on_workers,
)
live.end(halved)
# Its clones come later, and are there if this notebook is run again.
planned = tuple(run for run in halved.runs if run.clone is None)
halved = grid.Grid(halved_dir, planned)
print(f"{len(halved.done)} done, {len(halved.stopped)} stopped early")

# %%
figures_scale.timeline(live, rungs)

# %% [markdown]
# What each run had reached at each rung, what was needed there when it
# arrived, and how many had arrived by then, itself included. *Needed* is, with
# a factor of 2, the median of those before it.

# %%
figures_scale.halving_table(halved)

# %% [markdown]
# The decisions lie in `rungs.json` of each run, so a grid that is killed goes
# on with the same ones. On the leaderboard stopped runs come last, with what
# they had reached at their last rung: that is no fair comparison with runs
# that were trained to the end, and it is not meant to be one.

# %%
figures.leaderboard_table(halved.leaderboard())

# %% [markdown]
# ## What it saved, and what it risked
#
# The completions that were written are the honest measure, since they take the
# time. But halving has a price as well: at each rung a run answers all the
# held-out questions.

# %%
from grpo_lab.grid.halving import read_rungs

saved = halved.savings(results)
at_rungs = sum(len(read_rungs(run.directory)) for run in halved.runs)
asked = at_rungs * len(splits.eval)
print(f"every run to its end: {saved['of']} completions")
print(f"with halving: {saved['completions']}, {saved['share']:.0%} of them,")
print(f"and {asked} answers to held-out questions at the rungs")

# %% [markdown]
# Is the winner the same one?

# %%
if saved["same_winner"]:
    text = f"The winner is the same one: {saved['winner']}."
else:
    text = (
        f"Every run to its end: {saved['full_winner']}. With halving: "
        f"{saved['winner']}. The winner with halving against the other: "
        f"{saved['verdict']}."
    )
print(textwrap.fill(text, 79))

# %% [markdown]
# And what would have become of those that were stopped? The first grid knows,
# for there they went on.

# %%
whole = {run.settings: run for run in results.runs}
rows = [
    {
        "stopped": run.name,
        "at step": run.steps,
        "accuracy there": run.evaluation.accuracy,
        "at its end, in the first grid": whole[
            run.settings
        ].evaluation.accuracy,
        "winner with halving": halved.best.evaluation.accuracy,
    }
    for run in halved.stopped
    if run.settings in whole
]
columns = list(rows[0]) if rows else []
shares = dict.fromkeys(columns[2:], "{:.1%}")
figures.table(pd.DataFrame(rows, columns=columns), shares)

# %% [markdown]
# Three risks, whatever came out above:
#
# - **Late bloomers.** A run that learns slowly at first and is the best at the
#   end is stopped at the first rung. A low learning rate looks bad early by
#   its nature. A later first rung helps, and saves less.
# - **Luck.** With few held-out questions, runs that are a few points apart may
#   well be equally good. A rung makes no test of that: it stops the one with
#   the lower figure.
# - **Flattery.** The same held-out questions now select at each rung and once
#   more at the end. The winner's accuracy is too good by a little more than it
#   was in lesson 3. For a figure to publish, ask it questions that have
#   selected nothing, as lesson 4 does.

# %% [markdown]
# ## Steer a grid from a terminal
#
# A grid that trains for days should not be something that you can only wait
# for. Four commands look at it and steer it, from another terminal and while
# it trains. First the list: the next cell runs the command and shows what a
# terminal would.

# %%
steer = [sys.executable, "-m", "grpo_lab.grid", "runs"]


def terminal(*words: str) -> None:
    """Run a command as in a terminal, and show what it says."""
    print("$ python -m grpo_lab.grid runs", *words)
    done = subprocess.run(
        [*steer, *words], capture_output=True, text=True, check=False
    )
    print(done.stderr if done.returncode else done.stdout)


terminal("list", "--grid", str(halved_dir))

# %% [markdown]
# - `stop 2` ends run 2 after the step that it is making; it is saved.
# - `resume 2` lets it go on, or one that halving has stopped. From then on
#   halving leaves it alone: somebody has decided.
# - `clone 2` adds a run that differs from run 2 in what you `--set`. With
#   `--warm` it starts from the last checkpoint of run 2, with its adapter and
#   the state of its optimiser; without, from the base model.
#
# Did a run deserve to be stopped, or was only its learning rate too low? Ask:
# clone one that halving has stopped, warm, with nearly the winner's rate: four
# fifths of it, so that the tables tell both apart. (If none was stopped with a
# lower rate than that, the winner is cloned, for a few steps more.)

# %%
best = halved.best
rate = 0.8 * best.settings.learning_rate
parent = min(
    halved.stopped, key=lambda run: run.settings.learning_rate, default=best
)
changes = [f"learning_rate={rate:g}"]
if parent.settings.learning_rate >= rate:
    parent = best
    changes.append(f"max_steps={best.steps + first_rung}")
print(f"{parent.name}, at step {parent.steps}, with {', '.join(changes)}")

# %% [markdown]
# In a terminal that is one line. A run is meant by its number in the list, or
# by a part of its name.

# %%
from grpo_lab.grid import control

if not any(run.clone for run in grid.load(halved_dir).runs):
    listed = list(control.table(halved_dir)["run"])
    words = ["clone", str(1 + listed.index(parent.name)), "--warm"]
    for change in changes:
        words += ["--set", change]
    if STORAGE:  # that is where the checkpoints are
        words += ["--storage", STORAGE]
    terminal(*words, "--grid", str(halved_dir))
print(f"{len(control.table(halved_dir))} runs in this grid now")

# %% [markdown]
# No grid is at work right now, so the clone waits. Running the grid once more,
# with the same call, trains what is left: the clone and nothing else. If the
# grid had been running, a worker would have taken it up by itself.

# %%
live = figures.LiveTable(settings, FIVE_PART)
with_clone = grid.run(
    settings,
    task,
    halved_dir,
    eval_batch_size=profile.eval_batch_size,
    progress=live.update,
    halving=halving,
    **on_workers,
)
live.end(with_clone)
clone = next(run for run in with_clone.runs if run.clone)
print(f"{clone.name}: {clone.status} at step {clone.steps}")

# %% [markdown]
# The same list from Python. *Parent* is the directory that the clone comes
# from.

# %%
columns = ["number", "run", "state", "steps", "of", "accuracy", "parent"]
listed = control.table(halved_dir)[columns]
figures.table(listed, {"accuracy": "{:.1%}"})

# %% [markdown]
# Is the new rate in force from the clone's first step on? It follows the same
# course as its parent's would have (a warm-up, then down to 0), at another
# height. The parent's rates are those of the first grid, where it was not
# stopped.

# %%
twin = next(run for run in results.runs if run.settings == parent.settings)
rates = pd.DataFrame(
    {
        "parent": twin.metrics.set_index("step")["learning_rate"],
        "clone": clone.metrics.set_index("step")["learning_rate"],
    }
).reset_index()
rates["clone / parent"] = rates["clone"] / rates["parent"]
around = rates["step"].between(parent.steps - 1, parent.steps + 3)
formats = {name: "{:.3g}" for name in rates.columns[1:]}
figures.table(rates[around], formats)

# %% [markdown]
# Was it worth it? The clone is compared with its parent as that went on in the
# first grid, with its old rate, and with the winner:

# %%
from grpo_lab import evaluation

for name, other in (("its parent", twin), ("the winner", best)):
    pair = evaluation.compare(other.evaluation, clone.evaluation)
    text = (
        f"Against {name} ({other.evaluation.accuracy:.1%}) the clone has "
        f"{clone.evaluation.accuracy:.1%}: {pair}."
    )
    print(textwrap.fill(text, 79))

# %% [markdown]
# ## Sweep over a whole lesson
#
# A grid varies settings of a run. Some questions vary a whole lesson: is the
# result the same with another seed? `sweep` runs a notebook once for each
# value, each in a process and a directory of its own, and writes a table. Here
# lesson 3 with two seeds, both at a time, cut down to one run of a few steps
# and always in the pocket profile: the tool is to be shown, not a result.

# %%
from pathlib import Path

lesson = Path(environment.__file__).parents[1] / "lite/03_grid_search.ipynb"
sweep_dir = output_dir / "sweep"
small = {"PROFILE": "pocket", "MODELS": "pocket-qwen"}
small |= {"LEARNING_RATES": "1e-3", "MAX_STEPS": "4", "EVAL_ROWS": "40"}
words = ["sweep", str(lesson), "--vary", "SEED", "1", "2"]
for name, value in small.items():
    words += ["-p", name, value]
words += ["--jobs", "2", "--output", str(sweep_dir)]
if (sweep_dir / "sweep.json").exists():
    words.append("--resume")

if lesson.is_file():
    command = [sys.executable, "-m", "grpo_lab.runner", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stderr or done.stdout)
    sweep = pd.read_csv(sweep_dir / "sweep.csv")
else:
    sweep = None
    print("The notebooks are not installed here, so there is no sweep.")

# %% [markdown]
# In a terminal, in the folder of the project:
#
#     python -m grpo_lab.runner sweep lite/03_grid_search.ipynb \
#         -p PROFILE pocket --vary SEED 1 2 --vary MAX_STEPS 16 32 --jobs 2
#
# Several `--vary` give every combination, `--jobs` says how many run at a
# time, and after a crash `--resume` runs only what is not done.

# %% [markdown]
# ## What to change for 8 GPUs and for 8 machines
#
# **One machine with 8 GPUs.** Start Ray in a terminal, with this project's
# `.venv` active, and tell the notebook to join:
#
#     ray start --head --num-gpus 8
#
#     ADDRESS = "auto"    GPUS = 1    CPUS = 4
#
# Eight runs train at a time. With `GPUS = 0.5` there are sixteen, two on each
# GPU; then each must fit into half of its memory, which Ray does not enforce.
#
# **Eight machines.** On the first, then on each other one:
#
#     ray start --head --port 6379
#     ray start --address FIRST:6379
#
# The notebook runs on one of them with `ADDRESS = "auto"`. What it needs:
#
# - **the same packages** on every machine: the driver asks each one before it
#   starts and refuses those that differ;
# - **the same files**: `OUTPUT_DIR` on a disk that all machines see under one
#   path, such as NFS. If there is none, `STORAGE = "s3://bucket/folder"` (or
#   `gs://`): workers push each checkpoint there. The credentials are those
#   that the machines have; they are no parameter and are never sent;
# - **the models**: each machine downloads them once, unless `HF_HOME` is on
#   the shared disk;
# - **nothing for the rewards**: functions that you have written in the
#   notebook are sent along with the runs.
#
# > **Ray asks for no password.** Whoever reaches its ports can run any code on
# > every machine of the cluster. Start it inside a private network only, and
# > open none of its ports to the internet. The pretended cluster listens on
# > 127.0.0.1.
#
# Then `ray stop` on each machine, or they go on costing money.

# %% [markdown]
# ## What would it cost?
#
# Before you rent anything, simulate it. `grid.simulation` plays a grid through
# event by event: workers that start, steps, evaluations, rungs, lost workers.
# Each run pays a whole start there, though a worker that is running already
# takes the next run faster; the base models' own answers are left out.
# **Nothing below was trained; all of it is simulated**, from these
# assumptions:

# %%
from grpo_lab.grid import simulation

first_told, _ = live.seen[live.names[clone.settings]][0]
start = max(0.0, first_told - clone.metrics["seconds"].iloc[0])
price = PRICE_PER_GPU_HOUR if device.is_gpu else 0.0
here = {
    "steps": (steps, "this grid"),
    "step_seconds": (
        trained / sum(run.steps for run in results.runs),
        "measured above, the mean of all steps",
    ),
    "step_spread": (0.2, "assumed"),
    "evaluation_seconds": (
        statistics.mean(run.evaluation.seconds for run in results.done),
        "measured above, the mean",
    ),
    "start_seconds": (
        start or 10.0,
        "measured above, of the clone" if start else "assumed",
    ),
    "price_per_worker_hour": (price, "PRICE_PER_GPU_HOUR; a CPU: nothing"),
    "lost_per_worker_hour": (0.02, "assumed: once in two days"),
    "machine_start_seconds": (120, "assumed"),
}
rows = [(name, f"{value:.3g}", why) for name, (value, why) in here.items()]
figures.table(pd.DataFrame(rows, columns=["assumption", "value", "from"]))

# %% [markdown]
# Four runs like ours, 64 and 512, on one worker, on 8 and on 64. *Busy* is the
# share of the paid time in which a worker had a run.


# %%
def plans(assumptions: dict, first: int) -> pd.DataFrame:
    """A row for each number of runs and of workers, with and without."""
    known = {name: value for name, (value, _) in assumptions.items()}
    return pd.DataFrame(
        simulation.simulate(runs, workers, halving=halving, seed=SEED, **known)
        for runs in (4, 64, 512)
        for workers in (1, 8, 64)
        if workers <= runs
        for halving in (None, grid.Halving(first, FACTOR))
    )


plan_here = plans(here, first_rung)
figures_scale.plan_table(plan_here)

# %% [markdown]
# How to read it:
#
# - more workers shorten the hours, and hardly change the worker hours: the
#   work is the same;
# - with many workers for few runs the last run decides, and the others stand
#   idle: *busy* falls, and if they are paid, the cost rises;
# - halving saves fewer hours than steps: a run that is stopped has cost its
#   worker's start and its evaluations as well. It pays when runs are long.
#
# Now the full profile of lesson 3. Its time was **estimated, not measured**:
# about 15 h for 4 runs on one GPU, evaluation included. What else is in the
# table is a guess as well, so this is a plan built on estimates. Measure a few
# steps of yours first. (The pace of each run is drawn with the spread that is
# given, so four runs on one worker need not take 15 h exactly.)

# %%
full = profiles.PROFILES["full"]
full_steps = full.settings()[0].steps(full.train_rows)
estimated = {
    "steps": (full_steps, "the full profile of lesson 3"),
    "step_seconds": (15 * 3600 / 4 / full_steps, "estimated: 15 h, 4 runs"),
    "step_spread": (0.4, "guessed: models of 3, 7 and 8 B"),
    "evaluation_seconds": (120, "guessed"),
    "start_seconds": (120, "guessed: 16 GB to load"),
    "price_per_worker_hour": (PRICE_PER_GPU_HOUR, "PRICE_PER_GPU_HOUR"),
    "lost_per_worker_hour": (0.02, "assumed: once in two days"),
    "machine_start_seconds": (300, "guessed"),
}
rows = [(n, f"{value:.3g}", why) for n, (value, why) in estimated.items()]
figures.table(pd.DataFrame(rows, columns=["assumption", "value", "from"]))

# %% [markdown]
# The first rung lies at a quarter of the steps.

# %%
plan_full = plans(estimated, full_steps // 4)
figures_scale.plan_table(plan_full)

# %% [markdown]
# With many runs halving saves about half of the steps here, with four of them
# little: the first at each rung goes on for free. An earlier first rung or a
# larger factor would save more, at a higher risk. In the simulation each run
# has a true quality, and a rung sees it with noise; what that does to *your*
# winner it can't say.

# %% [markdown]
# ## Faults survived
#
# | what happens | what the grid does | what is lost | what you do |
# | --- | --- | --- | --- |
# | a worker is killed | another one takes its run up, from the last checkpoint | at most one step | nothing |
# | a machine is lost | the same, for each of its runs, on the others | at most one step of each | nothing; `cluster.lose(1)` shows it on the pretended cluster |
# | a worker dies again and again | after `retries` the run is noted as failed, with the last words of the worker; the others go on | that run | look at its `worker.log`; as a rule it needs more memory |
# | the notebook or its machine dies | the workers end as well | at most one step of each run | run it again with the same `OUTPUT_DIR` |
# | the disk is full | the run that notices is noted as failed, and says why | at most one step | make room, run it again: failed runs are tried again |
# | a checkpoint was cut short | it is noticed, and the one before is taken | one step more | nothing |
# | two drivers in one directory | the second is refused, before it writes | nothing | wait, or another `OUTPUT_DIR` |
#
# What is *not* survived: a disk that is lost with the directory on it. Copy
# it, or let `STORAGE` be elsewhere.

# %% [markdown]
# ## Exercises
#
# A solution stands right below each task: cover it and try first.
#
# **1. A larger factor** (10 minutes, easy). 16 runs could make 64 steps each,
# with 64 completions a step. The first rung is at step 4, the factor 4, and a
# rung waits for all runs. At which steps are the rungs? How many runs reach
# each, and how many completions are written in all, against those of the full
# grid?

# %% tags=["solution"]
wide = grid.Halving(first=4, factor=4).rungs(64)
runs_left, before, total = 16, 0, 0
for step in [*wide, 64]:
    total += runs_left * (step - before)
    print(f"{runs_left} of 16 make the steps {before + 1} to {step}")
    before, runs_left = step, runs_left // 4
print(f"rungs at {wide}: {64 * total} completions of {64 * 16 * 64}")

# %%
assert wide == [4, 16]
assert total == 16 * 4 + 4 * 12 + 1 * 48 == 160
print(f"{total / (16 * 64):.0%} of the full grid")

# %% [markdown]
# **2. A clone with other rewards** (10 minutes, medium). A clone can be paid
# by some of the grid's rewards only. Clone the winner of the first grid from
# the base model, with correctness and nothing else. Which file says so? And
# what happens with a name that the grid does not know?

# %% tags=["solution"]
import shutil

from grpo_lab.errors import LabError

winner_run = results.best
folder = control.clone(winner_run, {}, rewards=["correctness_reward"])
told = read_json(folder / "settings.json")["clone"]
print(told)
shutil.rmtree(folder)  # only to look at: the next run would train it

refused = ""
try:
    control.clone(winner_run, {}, rewards=["kindness_reward"])
except LabError as error:
    refused = str(error)
print(textwrap.fill(refused, 79))

# %%
assert told["rewards"] == ["correctness_reward"] and told["step"] == 0
assert "kindness_reward" in refused

# %% [markdown]
# **3. Are cheap machines cheap?** (15 minutes, medium). Machines that may be
# taken away at any moment cost a third. Say that each is lost once in ten
# hours, and once in one hour. What do 64 runs of the full plan cost on 8
# workers, without halving? Guess first whether the losses eat up the discount.

# %% tags=["solution"]
known = {name: value for name, (value, _) in estimated.items()}
cases = {"kept": (1, 0), "lost in 10 h": (1 / 3, 0.1)}
cases["lost in 1 h"] = (1 / 3, 1.0)
cost = {}
for name, (share, lost) in cases.items():
    known["price_per_worker_hour"] = PRICE_PER_GPU_HOUR * share
    known["lost_per_worker_hour"] = lost
    plan = simulation.simulate(64, 8, seed=SEED, **known)
    cost[name] = plan["cost in USD"]
    print(f"{name}: {cost[name]:.0f} USD, ", end="")
    print(f"{plan['lost workers']} lost, {plan['hours']:.1f} h")

# %%
if PRICE_PER_GPU_HOUR:
    assert max(cost["lost in 10 h"], cost["lost in 1 h"]) < cost["kept"]

# %% [markdown]
# A loss costs a start and half a step, minutes in all, because each step is
# saved. That is why cheap machines stay cheap. With a checkpoint once an hour
# instead, and one loss an hour, the work would take 1.7 times as long.
#
# The plan lets a run go on after any number of losses. A grid gives a run up
# after `retries` of them, 3 above, and takes it up again when it is run again:
# where losses are many, set more.

# %% [markdown]
# ## Clean up
#
# The pretended cluster would end with this notebook; it is ended here all the
# same. A real one goes on until `ray stop`.

# %%
if cluster is not None:
    cluster.close()
    cluster = None
    print("The pretended cluster is gone.")

# %% [markdown]
# ## Recap
#
# - A grid on many workers is the same call with `engine="ray"`; the runs'
#   directories are the memory, and Ray only does the work.
# - A killed worker costs at most one step, and on a CPU not a bit of the
#   result.
# - Halving spends the budget on the runs that are ahead. It saves much if runs
#   are many and long, may stop a late bloomer, and flatters its winner.
# - Runs are stopped, resumed and cloned from a terminal, while the grid
#   trains.
# - Simulate before you rent, from a step that you have measured.
#
# **Next**: your own grid, with your own models and rewards, on the machines
# that you have. Symptoms and their fixes are in
# [TROUBLESHOOTING.md](../TROUBLESHOOTING.md).

# %% [markdown]
# ## Results
#
# The last cell writes `results.json`, and fails if any run failed, so that a
# batch job notices.

# %%
summary = {
    "lesson": "05_scale_out",
    "profile": profile.name,
    "machine": environment.machine(),
    "data": splits.source,
    "leaderboard_text": figures.leaderboard_text(
        with_clone.leaderboard()
    ).to_string(),
    **results.summary(),
    "seconds": took,
    "killed": victims,
    "same_as_here": same,
    "rungs": rungs,
    "halved": with_clone.summary(),
    "savings": saved,
    "clone_of": parent.name,
    "sweep": None if sweep is None else sweep.to_dict("records"),
    "plan_here": plan_here.to_dict("records"),
    "plan_full": plan_full.to_dict("records"),
}
write_json(output_dir / "results.json", summary)
results.raise_failures()
with_clone.raise_failures()
print(f"{len(results.done)} runs done: {output_dir / 'results.json'}")
