# %% [markdown]
# # 4. Evolve and deploy: a population, its best policy, and a server that answers
#
# Which learning rate? Lesson 3 tried a grid of them. Another way is to train a
# few policies in turn, and every few steps to copy a good one and change its
# settings a little: **evolution**. AgileRL's Arena offers that as a
# service with an account and paid GPUs. This lesson walks through the same
# workflow with the same nouns, verbs and files (register a dataset, write
# `reward.py`, submit a manifest, watch, deploy, ask), on your own machine,
# without an account, and on the pocket profile without a network. And it asks what that tutorial does not: was evolution
# worth its price?
#
# **What you will learn**
#
# - how a reward file and a manifest are proved before anything is spent;
# - how a population of LoRA adapters evolves over one shared base model, and
#   how to read its lineage;
# - how a job outlives its notebook, and what a stop or a crash costs;
# - how to compare evolution with the same budget without it;
# - how an adapter becomes a server that speaks the OpenAI interface.
#
# **You need** this project, installed, and lesson 3's words: policy,
# completion, reward, group, adapter, held-out accuracy.
#
# | profile | machine | time | memory |
# | --- | --- | --- | --- |
# | `full` | GPU with 80 GB or more | about 4 h, estimated | 15 GB, estimated |
# | `lite` | GPU with 15 GB or more | about 2 h on a T4, estimated | 5 GB, estimated |
# | `pocket` | 2 CPU cores, no GPU, no network | 2 to 3 min, measured | 1.3 GiB, measured |
#
# Interrupted? Run the notebook again with the same `OUTPUT_DIR` (the runner
# needs `--resume`): it goes on from the last step. Changed a parameter? Take a
# new `OUTPUT_DIR`.

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
    source = "grpo-lab @ git+https://github.com/grpo-lab/grpo-lab@main"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", source]
    subprocess.run(pip, check=True)

from grpo_lab import environment

environment.prepare()
print(environment.describe())

# %% [markdown]
# ## Parameters
#
# `PROFILE` sets every size. Any other line overrides one value of it; 0 and ""
# leave the profile's.

# %% tags=["parameters"]
PROFILE: str = "lite"  # full, lite or pocket; lite is pocket without a GPU
MODEL: str = ""  # the base model: a name, a Hub id or a local folder
DATA_FILE: str = ""  # CSV, parquet or JSONL with question and answer
LEARNING_RATE: float = 0.0  # of the first members, within the profile's range
MAX_STEPS: int = 0  # completions that the population may write in all
EVO_STEPS: int = 0  # optimiser steps between two evolutions
POP_SIZE: int = 0  # policies at a time; they share MAX_STEPS
FITNESS_ROWS: int = 0  # held-out questions that rank the policies
TEST_ROWS: int = 0  # held-out questions that nothing is selected by
SEED: int = 42  # of everything that is drawn
OUTPUT_DIR: str = "runs/04_evolve_and_deploy"  # all files go below it

# %%
from pathlib import Path

from grpo_lab import memory, parameters, profiles
from grpo_lab.files import own_directory

globals().update(parameters.check(globals()))

device = memory.device_memory()
profile = profiles.choose(
    PROFILE, device.memory if device.is_gpu else 0, profiles.EVOLUTION
)
output_dir = own_directory(Path(OUTPUT_DIR), "04_evolve_and_deploy")
print(f"Profile {profile.name}.")

# %% [markdown]
# ## The arena
#
# An arena is a directory of plain files: what is registered has a folder with a
# record. There is no login, since there is nobody to log in to. What does this
# machine offer?

# %%
import pandas as pd

from grpo_lab import figures, figures_scale
from grpo_lab.arena import LocalArena

arena = LocalArena(output_dir / "arena")
resources = pd.DataFrame(arena.list_resources())
figures.table(resources, {"memory_gib": "{:.1f}", "free_disk_gib": "{:.0f}"})

# %% [markdown]
# ## Register a dataset
#
# A dataset has a category, which says what its rows are for:
#
# - **reasoning**: a `question` and the `answer` to check against. GRPO takes
#   these;
# - **preference**: a `prompt`, a `chosen` and a `rejected` completion (DPO);
# - **sft**: a `prompt` and its `target` (supervised fine-tuning).
#
# The mapping says which column of yours is which. On full and lite this is
# GSM8K from the Hub; on pocket it is a file of generated problems in GSM8K's
# form.

# %%
import json
import textwrap

from grpo_lab.pocket import problems

if DATA_FILE:
    place = {"file": DATA_FILE}
elif profile.data == "pocket":
    made = problems.sample(800, held_out=True, seed=SEED)
    lines = [json.dumps(problem.row()) + "\n" for problem in made]
    file = output_dir / "questions.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    place = {"file": file}
else:
    place = {
        "hf_dataset_name": "openai/gsm8k",
        "hf_config": "main",
        "hf_split": "train",
    }
print({name: str(value) for name, value in place.items()})

# %% [markdown]
# The rows are read once, checked and copied into the arena.

# %%
arena.create_dataset(
    name="gsm8k",
    category="reasoning",
    column_mapping={"question": "question", "answer": "answer"},
    exist_ok=True,  # the very same rows may be there from an earlier run
    **place,
)

columns = ["name", "category", "source", "rows"]
columns += ["nulls", "unreadable", "repeated"]
figures.table(pd.DataFrame(arena.list_datasets())[columns])

# %% [markdown]
# *Nulls*, *unreadable* golds and *repeated* questions are left out and
# counted, so that nothing is trained on a row that no answer could be right
# for. Later the rows are divided in three: some to train on, some that
# **rank** the policies, and some that **nothing is selected by**, for the
# honest figure at the end.

# %% [markdown]
# ## The reward file
#
# One function, one completion, one number. The arena calls it by keyword with
# the question, the gold text as it stands in the data, and what the policy
# wrote. Ours pays 1 for the form and 1 more for the right number in it.

# %%
reward_text = '''\
import re
from fractions import Fraction

FORM = re.compile(
    r"<reasoning>.+?</reasoning>\\s*<answer>(.+?)</answer>", re.DOTALL
)
NUMBER = re.compile(r"-?[0-9]+([.][0-9]+)?")


def number(text):
    """The number that a text is, or None; 1,000 and $1000 are 1000."""
    plain = text.strip().replace("$", "").replace(",", "")
    return Fraction(plain) if NUMBER.fullmatch(plain) else None


def reward(question, answer, completion):
    """1 for the form, 1 more for the gold's number in it."""
    found = FORM.fullmatch(completion.strip())
    if found is None:
        return 0.0
    gold = number(answer.split("####")[-1])
    return 1.0 + (gold is not None and number(found[1]) == gold)
'''
reward_file = output_dir / "reward.py"
reward_file.write_text(reward_text, encoding="utf-8")
print(f"{len(reward_text.splitlines())} lines in {reward_file.name}")

# %% [markdown]
# That file is code of yours, so it never runs inside the trainer: it has a
# process of its own, with a deadline, and may write in its own temporary
# directory only. It is also *proved* before it is used, on completions that
# are built from the golds of your data: right ones in every form, and wrong,
# empty, cut, copied and hedging ones.

# %%
from grpo_lab.arena import datasets
from rewards import check_reward

rows = datasets.load_rows(arena.home / "datasets" / "gsm8k")
verdicts = check_reward(reward_file, rows)
print(verdicts)

# %% [markdown]
# The tutorial that this lesson follows has a `reward.py` of its own, which pays
# for a form and for the first number in the answer tags. It runs here as it
# is. The same check shows what it pays besides:

# %%
from rewards.published import published_arena_reward

for verdict in check_reward(published_arena_reward, rows).failures:
    print(textwrap.fill(f"{verdict.name}: {verdict.seen}", 79))
    print(textwrap.indent(verdict.completion, "  | "))

# %% [markdown]
# ## A project
#
# Experiments are filed under a project. The first one is the default.

# %%
if "GSM8K Tutorial" not in [one["name"] for one in arena.list_projects()]:
    arena.create_project("GSM8K Tutorial", None, llm_based=True)
figures.table(pd.DataFrame(arena.list_projects())[["name", "default"]])

# %% [markdown]
# ## The manifest
#
# What is yours to choose, beside the data and the reward, stands in one YAML
# file. These are the profile's values, with yours from above in their place.

# %%
import copy

import yaml

form = copy.deepcopy(profile.manifest)
chosen = {
    ("network", "pretrained_model_name_or_path"): MODEL,
    ("algorithm", "lr"): LEARNING_RATE,
    ("training", "max_steps"): MAX_STEPS,
    ("training", "evo_steps"): EVO_STEPS,
    ("training", "pop_size"): POP_SIZE,
    ("environment", "fitness_rows"): FITNESS_ROWS,
    ("environment", "test_rows"): TEST_ROWS,
}
for (section, key), value in chosen.items():
    if value:
        form[section][key] = value
form["training"]["evaluation_interval"] = form["training"]["evo_steps"]
form["mutation"]["rand_seed"] = SEED

manifest_file = output_dir / "gsm8k_grpo.yaml"
manifest_file.write_text(yaml.safe_dump(form, sort_keys=False))
print(manifest_file.read_text())

# %% [markdown]
# How to read it:
#
# - a step takes `batch_size` prompts with `group_size` completions each;
# - `max_steps` counts completions, over the whole population;
# - every `evo_steps` optimiser steps the population **evolves**. Each policy
#   answers the same held-out questions, greedily; its accuracy is its
#   **fitness**. The best goes on as it is (`elitism`). Each other place goes
#   to a copy of the winner of a **tournament**: `tournament_size` policies are
#   drawn, with replacement, and the fittest wins;
# - a copy is **mutated** with probability `rl_hp_mut / (no_mut + rl_hp_mut)`:
#   its `lr` or its `beta` is multiplied by 1.2 or by 0.8, within its range;
# - `evaluation_interval` is there for the tutorial's sake: here fitness is
#   measured at each evolution.
#
# The rate is constant between evolutions, since they are what changes it.
# Here the policies train one after the other. With `--engine ray` behind
# `arena experiments submit` they train side by side, on the workers that
# lesson 5 is about, and the tournament is the same.
#
# The tutorial's own manifest is accepted as well, value for value. The lint
# says what is doubtful in it before anything is spent.

# %%
from grpo_lab.arena import lint, manifest

published = manifest.load(manifest.PUBLISHED)
findings = lint.lint(published)
figures.table(pd.DataFrame([vars(one) for one in findings]))

# %% [markdown]
# ## What would be refused
#
# Mistakes are cheap when they are caught before the training. Here are four,
# and what the arena answers. Nothing is registered for any of them.

# %%
from grpo_lab.errors import LabError

never_pays = output_dir / "never_pays.py"
never_pays.write_text(
    "def reward(question, answer, completion):\n"
    "    return float(completion.strip() == answer + ' exactly')\n"
)


def with_value(section: str, key: str, value: object) -> dict:
    """The manifest with one value changed."""
    return form | {section: form[section] | {key: value}}


mistakes = {
    "a group of one": (with_value("algorithm", "group_size", 1), reward_file),
    "a misspelt key": (with_value("algorithm", "beat", 0.1), reward_file),
    "no such dataset": (with_value("environment", "name", "x"), reward_file),
    "a reward that never pays": (form, never_pays),
}
refusals = {}
for mistake, (wrong, file) in mistakes.items():
    try:
        arena.submit_experiment(wrong, file, experiment_name="wrong")
    except LabError as error:
        refusals[mistake] = str(error)
    else:
        raise AssertionError(f"{mistake} was not refused")
figures.table(pd.DataFrame(refusals.items(), columns=["mistake", "answer"]))

# %% [markdown]
# ## Submit
#
# > **No prompt template?** The published tutorial never tells the model which
# > form the reward asks for; it has to stumble on it. Here the check of the
# > reward file knows which form is paid best, and a system prompt that asks
# > for it is supplied and shown. Write `system_prompt` into the manifest to
# > use your own.

# %%
NAME = "gsm8k-grpo-v1"
submitted = arena.submit_experiment(
    manifest=manifest_file,
    reward_file=reward_file,
    resource_id=resources["id"][0],
    num_nodes=1,
    project="GSM8K Tutorial",
    experiment_name=NAME,
    resume=True,  # go on, if the very same experiment is there already
)
print(textwrap.fill(submitted.system_prompt, 79))
plan = pd.DataFrame(submitted.plan.items(), columns=["what", "value"])
figures.table(plan.astype(str))

# %% [markdown]
# And what is doubtful about *this* manifest:

# %%
findings = pd.DataFrame([vars(one) for one in submitted.findings])
figures.table(findings)

# %% [markdown]
# ## Watch
#
# The experiment runs as a process of its own: close this notebook and it goes
# on, as long as the machine runs (in Colab: as long as the session). Interrupt
# the next cell and it goes on as well; run it again to look on. The base model
# is loaded once, and each policy in turn puts its own adapter on it.
#
# **What you should see**: first the base model is measured, then member 0
# makes its steps and is measured, then member 1, and a new generation begins.
# The step jumps back when the next member's turn comes.

# %%
from IPython.display import display

shown = display(
    figures_scale.status_table(arena.experiment_status(NAME)),
    display_id=True,
)
for now in arena.watch_experiment(NAME):
    shown.update(figures_scale.status_table(now))

assert now["status"] == "done", now["reason"]

# %% [markdown]
# The metrics can be downloaded at any time, also while the job runs. Their
# columns are always the same.

# %%
metrics_file = arena.download_experiment_metrics(NAME, output_dir)
metrics = pd.read_csv(metrics_file)
print(textwrap.fill(", ".join(metrics.columns), 79))
figures_scale.population_curves(metrics)

# %% [markdown]
# As in lesson 3: a share of groups with **equal rewards** near 1 means steps
# that teach nothing, and **truncated** completions never reach their answer. A
# line that begins in the middle is a copy, which begins with its parent's
# adapter and optimizer.

# %% [markdown]
# ## The lineage
#
# Who descends from whom, what was changed, and how good it was. Square
# brackets are 95 % intervals.

# %%
lineage = arena.experiment_lineage(NAME)
figures_scale.lineage_table(lineage)

# %% [markdown]
# The same as a picture. A dashed line joins a copy to the parent that it began
# as; a bar is a 95 % interval.

# %%
from grpo_lab.files import read_json

folder = arena.home / "experiments" / NAME
answers = read_json(folder / "base.json")["answers"]
base = sum(answer["correct"] for answer in answers) / len(answers)
figures_scale.lineage_figure(lineage, base)

# %% [markdown]
# Three things to look for:
#
# - the member that is *itself* in the next generation is the elite: its
#   adapter, optimiser and settings were not touched;
# - are the members of one generation close? Then the ranking may be luck, and
#   more questions (`fitness_rows`) would rank better;
# - how far did `lr` and `beta` get? One mutation moves a value by a fifth. A
#   few evolutions can't correct a rate that is wrong by a factor of ten.

# %% [markdown]
# ## Was it worth it?
#
# Evolution spends its completions on several policies. The same completions
# could have gone to one policy, which then makes more steps, at the manifest's
# own `lr` and `beta`. That is the fair control, and it is one word away.
#
# It also shows what a stop costs. The next cell stops the job once it has made
# a few steps; the one after goes on.

# %%
CONTROL = f"{NAME}-control"
arena.submit_experiment(
    manifest=manifest_file,
    reward_file=reward_file,
    project="GSM8K Tutorial",
    experiment_name=CONTROL,
    control=True,
    resume=True,
)
stopped = None
for now in arena.watch_experiment(CONTROL):
    if 2 <= now["step"] < now["steps"] and stopped is None:
        stopped = arena.stop_experiment(CONTROL, seconds=1800)
print(f"{now['status']} after step {now['step']} of {now['steps']}")

# %% [markdown]
# A stop waits for the step that is being made (here for half an hour at most,
# by default for two minutes), so nothing is lost. A crash or a `kill -9` costs
# the step that was being made, and is resumed in the same way.

# %%
if now["status"] != "done":
    arena.resume_experiment(CONTROL)
now = arena.wait_for_experiment(CONTROL)
steps = list(arena.experiment_metrics(CONTROL)["step"])
assert now["status"] == "done", now["reason"]
assert steps == list(range(1, now["steps"] + 1)), "a step was lost"
print(f"{now['status']}: {len(steps)} steps, each made once")

# %% [markdown]
# What did each get for the completions that it wrote?

# %%
control_lineage = arena.experiment_lineage(CONTROL)
figures_scale.budget_figure(
    {"evolution": lineage, "control": control_lineage}, base
)

# %% [markdown]
# At equal completions the control has made more steps, so it can rise earlier,
# and with as many steps between two measurements it is measured more often and
# has more checkpoints to choose from. What evolution buys is the chance to
# find better settings.
#
# The questions in this figure have *selected* the best checkpoint, so they
# flatter it. The verdict comes from the other held-out questions, on which
# nothing was chosen.

# %%
from grpo_lab import evaluation

results = {name: arena.experiment_result(name) for name in (NAME, CONTROL)}
frame = pd.DataFrame(results.values()).assign(experiment=list(results))
frame["gain in points"] = 100 * frame["gain"]
frame = frame.rename(columns={"best": "best checkpoint", "p_value": "p"})
shares = dict.fromkeys(["before", "after"], "{:.1%}")
columns = ["experiment", "best checkpoint", "questions", *shares]
columns += ["gain in points", "p"]
formats = {**shares, "gain in points": "{:+.1f}", "p": "{:.2g}"}
figures.table(frame[columns], formats)

# %% [markdown]
# Each row compares an experiment with its base model. Now both with *each
# other*, question by question:

# %%
base_answers, evolved = arena.experiment_answers(NAME)
_, alone = arena.experiment_answers(CONTROL)
pair = evaluation.compare(alone, evolved)
better = "evolution" if pair.difference > 0 else "the control"
verdict = (
    f"{better} was better"
    if pair.p_value < 0.05
    else "which is better can't be told from these questions"
)
text = (
    f"Evolution has {evolved.accuracy:.1%}, the control "
    f"{alone.accuracy:.1%}: {pair}. So {verdict}."
)
print(textwrap.fill(text, 79))

# %% [markdown]
# One run of each is one draw of luck: another seed may turn it round. A claim
# that evolution is better (or is not) needs several seeds of both, and that
# holds for every tutorial that shows a single curve.

# %% [markdown]
# ## Checkpoints
#
# Each time the members are measured, the best one's adapter is kept; of many
# the best five and the newest stay. They are listed best first, by held-out
# accuracy.

# %%
checkpoints = pd.DataFrame(arena.list_checkpoints(NAME))
columns = ["name", "step", "member", "accuracy", "low", "high", "size_mb"]
shares = dict.fromkeys(["accuracy", "low", "high"], "{:.0%}")
figures.table(checkpoints[columns], {**shares, "size_mb": "{:.1f}"})

# %% [markdown]
# ## Deploy
#
# `transformers serve` takes one model and not a base with an adapter beside
# it. So the adapter is **merged**: the product of its two matrices is added to
# the weights. Those weights must not be the 4-bit ones, whose rounding would
# stay; they are the 16-bit ones of the base model. But the adapter was
# *trained* on the 4-bit base, so merging may change answers, and it is checked
# whether it does.
#
# Then `transformers serve` (on a GPU `vllm serve`, where it is installed)
# serves them on a free port of this machine, which no other machine can reach. Deployed is whichever
# of the two experiments answered more test questions.

# %%
WINNER = NAME if evolved.correct >= alone.correct else CONTROL
deployed = arena.deploy_agent(WINNER)
print(WINNER)
print(f"{deployed['checkpoint']} is {deployed['status']}: {deployed['url']}")
agreement = deployed["agreement"]
figures.table(pd.DataFrame([agreement]))

# %% [markdown]
# *same_text* counts the questions that adapter and merged weights answer word for word alike; what matters is that *merged_correct* is not clearly
# below *adapter_correct*. *worse* says whether it is (the paired 95 % interval
# lies below 0).

# %% [markdown]
# ## Ask
#
# `open_inference_agent` talks to the server with the official `openai` client
# and puts the question into the prompt **of the training**. Another prompt
# would ask a policy that was never trained. This is a test question, which no experiment
# trained on; below the answer stands the gold. (The tutorial asks how much
# Weng earns in 50 minutes at $12 an hour. That question is in GSM8K's training
# split, so a right answer to it would prove little.)

# %%
from rewards import gold_answer

winner_answers = evolved if WINNER == NAME else alone
asked = winner_answers.answers[0]
limit = submitted.plan["tokens a completion may have"]

with arena.open_inference_agent(WINNER, max_new_tokens=limit) as agent:
    result = agent.generate(asked.question)
print(textwrap.fill(asked.question, 79))
print(f"\n{result.results[0].completion}\n")
cut = "cut at its limit" if result.truncated else "complete"
print(f"[{result.results[0].tokens} tokens, {cut}]")
print(f"The gold is {gold_answer(asked.gold)}.")

# %% [markdown]
# Or piece by piece, as the model writes it:

# %%
with arena.open_inference_agent(WINNER, max_new_tokens=limit) as agent:
    pieces = []
    for piece in agent.generate_stream(asked.question):
        print(piece, end="", flush=True)
        pieces.append(piece)
same = "".join(pieces) == result.results[0].completion
print(f"\n\n[{len(pieces)} pieces; the same answer as above: {same}]")

# %% [markdown]
# ## The same in a terminal
#
# Every verb is a command too, with the tutorial's options: its lines run when
# `arena` is replaced by `python -m grpo_lab.arena`. In the folder `OUTPUT_DIR`,
# after `export GRPO_LAB_ARENA=arena`:
#
#     python -m grpo_lab.arena resources list
#     python -m grpo_lab.arena experiments submit gsm8k_grpo.yaml \
#         --reward-file reward.py --project "GSM8K Tutorial" \
#         --experiment-name gsm8k-grpo-v2 --watch
#     python -m grpo_lab.arena experiments metrics gsm8k-grpo-v2 \
#         --output-file v2.csv
#     python -m grpo_lab.arena agent deploy gsm8k-grpo-v2 --checkpoint step_10
#     python -m grpo_lab.arena agent generate gsm8k-grpo-v2 --prompt "..."
#
# Here are two that only look:

# %%
home = str(output_dir / "arena")
command = [sys.executable, "-m", "grpo_lab.arena", "--home", home]
for verb in (["experiments", "list"], ["experiments", "checkpoints", NAME]):
    done = subprocess.run(
        [*command, *verb], capture_output=True, text=True, check=True
    )
    print(done.stdout)

# %% [markdown]
# ## Exercises
#
# A solution stands right below each task: cover it and try first.
#
# **1. Who wins a tournament?** (10 minutes, easy). A population has four
# members, and a tournament draws two of them, with replacement. How likely is
# it that the best one wins? The worst? Work it out, then count in 2,000 drawn
# generations.

# %% tags=["solution"]
from collections import Counter

from grpo_lab.arena import evolution

by_hand = {"best": 1 - (3 / 4) ** 2, "worst": (1 / 4) ** 2}
four = [evolution.Member(number, 1e-3, 0.0) for number in range(4)]
fitness = {n: evolution.Fitness(10 - n, 10, 0.0) for n in range(4)}
winners = Counter()
for seed in range(2000):
    rules = evolution.Rules(2, True, 0.0, {}, seed=seed)
    born = evolution.next_generation(four, fitness, rules, 1, 4)[1:]
    winners.update(member.parent for member in born)
counted = {
    "best": winners[0] / winners.total(),
    "worst": winners[3] / winners.total(),
}
for who, share in by_hand.items():
    print(f"{who}: {share:.3f} by hand, {counted[who]:.3f} counted")

# %%
for who in by_hand:
    assert abs(by_hand[who] - counted[who]) < 0.03

# %% [markdown]
# **2. Where does a rate drift to?** (15 minutes, medium). A mutation
# multiplies by 1.2 or by 0.8, each as often. Without any selection, is the
# rate of a line of 100 mutations as a rule higher or lower than at its start?
# Guess first.

# %% tags=["solution"]
import math
import random
import statistics

chance = random.Random(0)
ends = [
    math.prod(chance.choice((1.2, 0.8)) for _ in range(100))
    for _ in range(2000)
]
typical = statistics.median(ends)
print(f"after 100 mutations a typical rate is {typical:.2f} of the first")
print(f"as 0.96 ** 50 = {0.96**50:.2f} says: one up, one down is 0.96")

# %%
assert typical < 0.3, "no drift downwards was seen"

# %% [markdown]
# So a rate that falls over a long evolution is no proof that lower rates are
# better: the mutation alone pulls it down.
#
# **3. Does the elite's luck last?** (10 minutes, medium). Take the best member
# of each generation but the last. In how many cases is it less accurate in the
# next generation, although it has trained on?

# %% tags=["solution"]
falls, lives = 0, 0
for generation in range(lineage["generation"].max()):
    now_rows = lineage[lineage["generation"] == generation]
    next_rows = lineage[lineage["generation"] == generation + 1]
    best = now_rows[now_rows["rank"] == 1].iloc[0]
    later = next_rows[next_rows["member"] == best["member"]].iloc[0]
    lives += 1
    falls += bool(later["accuracy"] < best["accuracy"])
print(f"{falls} of {lives} elites were less accurate a generation later")

# %%
assert lives == lineage["generation"].max(), "an elite did not live on"

# %% [markdown]
# Whoever is first among several is so partly by luck, and luck does not last
# (regression to the mean). While a training still rises fast, that can hide
# it, and none may fall. The last word belongs to questions that selected
# nobody.

# %% [markdown]
# ## Clean up
#
# The server would run until the machine is switched off. Its weights stay;
# opening an agent starts it again.

# %%
arena.stop_deployment(WINNER)
listed = pd.DataFrame(arena.list_inference_deployments())
figures.table(listed[["name", "checkpoint", "status"]])

# %% [markdown]
# ## Recap
#
# - A reward file and a manifest are proved before anything is spent; what is
#   doubtful is said.
# - Evolution keeps the best, copies winners and changes their settings; on one
#   CPU, with the same number of threads, the same seed gives the same lineage.
# - Fitness selects, so it flatters. Judge on questions that selected nothing,
#   against the same budget without evolution.
# - Merge into 16-bit weights, check the answers, and ask with the prompt of
#   the training.
#
# **Next**: your own data: `create_dataset(file=...)`, your own `reward.py`,
# your own manifest. Symptoms and their fixes are in
# [TROUBLESHOOTING.md](../TROUBLESHOOTING.md).

# %% [markdown]
# ## Results
#
# The last cell writes `results.json`.

# %%
from grpo_lab.files import write_json

summary = {
    "lesson": "04_evolve_and_deploy",
    "profile": profile.name,
    "machine": environment.machine(),
    "manifest": form,
    "base": base,
    "lineage": json.loads(lineage.to_json(orient="records")),
    "checkpoints": arena.list_checkpoints(NAME),
    "results": results,
    "evolution_minus_control": {
        "difference": pair.difference,
        "gained": pair.gained,
        "lost": pair.lost,
        "p_value": pair.p_value,
    },
    "stopped": stopped,
    "winner": WINNER,
    "streamed_the_same": same,
    "refusals": refusals,
    "agreement": agreement,
    "answer": result.results[0].completion,
    "truncated": result.truncated,
    "deployments": arena.list_inference_deployments(),
}
write_json(output_dir / "results.json", summary)
print(f"Done: {output_dir / 'results.json'}")
