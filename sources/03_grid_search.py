# %% [markdown]
# # 3. A grid search: which base model, which learning rate?
#
# With one learning rate a GRPO run learns, with another it does not, and which
# one works may depend on the base model. So you try several of both. This lesson trains a small grid of policies on math
# questions, measures every one of them on questions that none has seen, and
# says honestly which differences are real.
#
# **What you will learn**
#
# - how a grid of GRPO runs is set up: 4-bit base models, LoRA adapters, one
#   reward set for all;
# - what to watch while it runs, and why the loss is not it;
# - how to compare runs by held-out accuracy, with intervals and a paired
#   test, before you believe in a winner;
# - how to load the winner and ask it something new.
#
# **You need** this project, installed, and an idea of what a language model
# and a learning rate are. Five words that the lesson uses all the time:
#
# - the **policy** is the language model that is being trained;
# - a **completion** is what it writes after a prompt, and writing some is a
#   **rollout**;
# - a **reward** is the number that a completion earns;
# - **GRPO**, group relative policy optimisation, lets the policy write a
#   *group* of completions for one prompt and makes those likelier that earned
#   more than the group's mean: how much more is their **advantage**;
# - **LoRA** trains a small **adapter** beside the frozen model.
#
# | profile | machine | time | memory |
# | --- | --- | --- | --- |
# | `full` | GPU with 80 GB or more | about 15 h, estimated | 40 GB, estimated |
# | `lite` | GPU with 15 GB or more | about 3 h on a T4, estimated | 10 GB, estimated |
# | `pocket` | 2 CPU cores, no GPU, no network | 2 min, measured | 1.4 GiB, measured |
#
# A run that was interrupted goes on from its last step: run the notebook
# again with the same `OUTPUT_DIR`.

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
# One dial, `PROFILE`, sets every size for a kind of machine. Any other line
# overrides one value of it; 0, "" and [] leave the profile's. Under papermill
# each of them is a `-p` option. A misspelt name stops here, before anything
# is loaded.

# %% tags=["parameters"]
PROFILE: str = "lite"  # full, lite or pocket; lite is pocket without a GPU
MODELS: list[str] = []  # base models: names, Hub ids or local folders
LEARNING_RATES: list[float] = []  # peak rates, each tried on each model
DATA: str = ""  # gsm8k, or pocket for the embedded problems
DATA_PATH: str = ""  # a folder with train and test files of your own
TRAIN_ROWS: int = 0  # questions to train on
EVAL_ROWS: int = 0  # held-out questions
MAX_STEPS: int = 0  # optimiser steps of each run
NUM_GENERATIONS: int = 0  # completions for each prompt: the group
COMPLETIONS_PER_STEP: int = 0  # completions for each optimiser step
MICRO_BATCH: int = 0  # completions in one forward pass: lower it for memory
TARGET_MODULES: list[str] = []  # layers with an adapter; ["all-linear"]: all
MAX_COMPLETION_LENGTH: int = 0  # tokens that a completion may have
SEED: int = 42  # of the adapters, the rollouts and the choice of questions
DISABLE: list[str] = []  # of "What makes it fast"; ["all"]: plain TRL
ENGINE: str = "process"  # or "ray": runs side by side on workers, lesson 5
ADDRESS: str = ""  # of a Ray cluster; "" starts one on this machine
CPUS: float = 1.0  # with "ray": CPU cores for each run
GPUS: float = 0.0  # with "ray": GPUs for each run; 0: one, if there are any
OUTPUT_DIR: str = "runs/03_grid_search"  # every file is written below it

# %% [markdown]
# From these few values follows everything else.

# %%
from pathlib import Path

from grpo_lab import memory, models, parameters, profiles
from grpo_lab.speed import optimizations

globals().update(parameters.check(globals()))

device = memory.device_memory()
profile = profiles.choose(PROFILE, device.memory if device.is_gpu else 0)
overrides = {
    "max_steps": MAX_STEPS,
    "num_generations": NUM_GENERATIONS,
    "completions_per_step": COMPLETIONS_PER_STEP,
    "micro_batch": MICRO_BATCH,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "target_modules": TARGET_MODULES,
}
settings = profile.settings(
    grid=profile.choose_grid(MODELS, LEARNING_RATES),
    seed=SEED,
    optimizations=optimizations.without(DISABLE),
    **{name: value for name, value in overrides.items() if value},
)
output_dir = Path(OUTPUT_DIR)
print(f"Profile {profile.name}: {len(settings)} runs.")

# %% [markdown]
# ## The questions
#
# Each question has a gold answer. The policy is trained on some questions
# and judged on others. Rows that could not be used, such as a gold without a
# number or a question on both sides, would be refused here, before a model
# is loaded.

# %%
from grpo_lab import data, figures

splits = data.load_splits(
    DATA or profile.data,
    path=DATA_PATH,
    train_rows=TRAIN_ROWS or profile.train_rows,
    eval_rows=EVAL_ROWS or profile.eval_rows,
    seed=SEED,
)
print(splits.source)
print(f"{len(splits.train)} to train on, {len(splits.eval)} held out")
rows = splits.train.to_pandas()[["question", "answer"]]
figures.table(rows.head(2))

# %% [markdown]
# The gold is what follows `####`; the lines above it are a worked solution,
# which GRPO never shows to the policy.
#
# Before a model is loaded: can this grid run at all? `OUTPUT_DIR` must be
# this grid's own, and the disk must have room.

# %%
from grpo_lab import grid
from rewards import FIVE_PART

grid_dir = output_dir / "grid"
engine = {"engine": ENGINE}
if ENGINE == "ray":
    engine |= {"address": ADDRESS, "cpus": CPUS}
    engine["gpus"] = GPUS or float(device.is_gpu)
task = grid.Task(splits, FIVE_PART)
grid.check(settings, task, grid_dir, **engine)
print(f"{grid_dir} can be used.")

# %% [markdown]
# All that the policy sees is a prompt: the system message, which asks for
# tags, and the question, rendered with the model's own chat template.

# %%
first = settings[0]
policy, tokenizer = models.load_policy(first.model, first.load_in_4bit)
prompt = tokenizer.apply_chat_template(
    splits.train[0]["prompt"], tokenize=False, add_generation_prompt=True
)
print(prompt)

# %% [markdown]
# ## The rewards
#
# GRPO learns from rewards alone. Ours has five parts, imported from the
# shared module `rewards`, and their sum lies between 0 and 4:
#
# - **correctness**, 2.0: the number in the answer tags equals the gold;
# - **integer**, 0.5: it is a whole number, as the gold is;
# - **strict format**, 0.5: each tag on a line of its own, and nothing else;
# - **soft format**, 0.5: both blocks in order, with text around allowed;
# - **tag count**, up to 0.5: an eighth for each tag that stands once, minus
#   0.001 for each character after the last tag.
#
# To see what they pay, score completions that you can check by eye.

# %%
question = "Ada has 12 pens and loses 5. How many are left?"
completions = {
    "right, well tagged": (
        "<reasoning>\n12 - 5 = 7\n</reasoning>\n<answer>\n7\n</answer>"
    ),
    "wrong, well tagged": (
        "<reasoning>\n12 + 5 = 17\n</reasoning>\n<answer>\n17\n</answer>"
    ),
    "right, with chatter": (
        "Sure!\n<reasoning>\n12 - 5 = 7\n</reasoning>\n"
        "<answer>\n7\n</answer>\nHope this helps."
    ),
    "right, no tags": "12 - 5 = 7\nThe answer is 7.",
    "tags without content": "<reasoning></reasoning><answer></answer>",
}
figures.reward_table(completions, "#### 7", FIVE_PART)

# %% [markdown]
# Two things to notice:
#
# - the parts for format pay a wrong answer too: that is the ladder on which
#   a policy climbs before it can solve anything;
# - a right answer in the tags always earns more than a wrong one, so climbing
#   only the ladder is not worth it.
#
# A right answer without tags earns nothing: during training the reading is
# strict. When we *evaluate*, further down, it counts as right.

# %% [markdown]
# ## The grid
#
# Here is what the grid will do and what it will take. Memory is estimated from
# the shape of each model. Time is guessed from one step's rollouts, which the
# policy that is loaded now writes for the purpose.

# %%
from grpo_lab import guards, prompts, training

gpus = engine.get("gpus", 1.0)
longest = prompts.longest_prompt(tokenizer, splits.train["prompt"])
pace = grid.measure_pace(policy, tokenizer, first, splits)
plan = grid.estimates(settings, len(splits.train), longest, pace, gpus)
figures.grid_table(plan)

# %% [markdown]
# *Steps* are optimiser steps. Each takes a few prompts, writes
# a *group* of completions for each of them, and compares the completions of
# a group with each other. Steps times prompts may be fewer than the questions
# that there are; then a run never sees the rest. A run that would not fit is refused here, with the
# setting to lower first.

# %%
grid.check_memory(settings, longest, gpus)
print("Every run fits.")

# %% [markdown]
# ## One run in the open
#
# Before the grid hides them in a function, look at the four objects that make
# a run. First the base model in 4 bit. NF4 stores each weight as one of 16
# values; double quantisation also compresses the scales.

# %%
from transformers import BitsAndBytesConfig

quantisation = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=models.compute_dtype(),
)
loaded = policy.config.quantization_config
print(loaded)
assert not first.load_in_4bit or loaded.to_dict() == quantisation.to_dict()

# %% [markdown]
# Then the adapter. The base model stays frozen; only two small matrices
# beside each chosen layer are trained.

# %%
from peft import LoraConfig

adapter = LoraConfig(
    r=first.lora_r,
    lora_alpha=first.lora_alpha,
    lora_dropout=first.lora_dropout,
    target_modules=list(first.target_modules),
    bias="none",
    task_type="CAUSAL_LM",
)
assert adapter == training.lora_config(first)
print(f"r={adapter.r}, alpha={adapter.lora_alpha}")
print(f"on {', '.join(first.target_modules)}")

# %% [markdown]
# Dropout is 0 on purpose. TRL leaves it switched on while the policy writes
# its completions, so with dropout the text comes from one policy and the
# gradient from another.
#
# Then the configuration of the trainer. Every value that matters is set, for
# a default can change with the next release, and some values a model brings
# along itself.

# %%
from trl import GRPOConfig

steps = first.steps(len(splits.train))
arguments = GRPOConfig(
    output_dir=str(output_dir / "one_run"),
    # what is rolled out
    num_generations=first.num_generations,
    max_completion_length=first.max_completion_length,
    temperature=first.temperature,
    top_p=first.top_p,
    top_k=first.top_k,
    chat_template_kwargs=prompts.TEMPLATE_VALUES,
    min_p=None,
    repetition_penalty=1.0,
    # what is learned from it
    learning_rate=first.learning_rate,
    lr_scheduler_type=profiles.SCHEDULERS[first.lr_scheduler],
    warmup_steps=round(first.warmup_share * steps),
    optim=first.optimizer,
    weight_decay=first.weight_decay,
    max_grad_norm=first.max_grad_norm,
    adam_beta1=first.adam_beta1,
    adam_beta2=first.adam_beta2,
    beta=first.beta,  # weight of a KL penalty; 0 is none
    loss_type="dapo",  # every token of a step weighs the same
    scale_rewards="group",  # divide by the spread of the group
    num_iterations=1,  # each completion is learned from once
    max_steps=steps,
    # how it fits into memory
    per_device_train_batch_size=first.micro_batch,
    gradient_accumulation_steps=first.accumulation_steps,
    gradient_checkpointing=first.gradient_checkpointing,
    **models.precision_flags(),
    use_cpu=not device.is_gpu,
    # what is kept
    report_to="none",
    seed=first.seed,
)

# %% [markdown]
# Last the trainer itself. Three calls are ours: `keep_sampling_ours` forgets
# the temperature that a model brings along, `prepare` puts the adapters back
# to 32 bit, where TRL has them in 16, and `check` refuses a trainer that would
# run without learning.

# %%
from trl import GRPOTrainer

guards.keep_sampling_ours(policy)
trainer = GRPOTrainer(
    model=policy,
    reward_funcs=list(FIVE_PART),
    args=arguments,
    train_dataset=splits.train,
    processing_class=tokenizer,
    peft_config=adapter,
)
guards.prepare(trainer)
guards.check(trainer, first)
figures.table(training.facts(trainer))

# %% [markdown]
# The grid builds each of its runs with `training.build_trainer`, which does
# what you have just read, with the same values, and makes it faster, see
# below. Here they are, read off the configuration. After that we need this
# trainer no longer.

# %%
resolved = memory.resolve(first, longest, memory.Share.of_gpus(gpus))
built = training.grpo_config(
    resolved, output_dir / "one_run", len(splits.train)
)
in_force = training.values_in_force(arguments)
assert in_force.equals(training.values_in_force(built))

del trainer, policy
memory.free_memory()
figures.table(in_force)

# %% [markdown]
# ## What makes it fast
#
# With TRL as it is, about half of a pocket step on a CPU goes into writing
# completions, and every prompt is computed once for each completion of its
# group. The grid adds these *optimizations* to TRL's trainer. Greedy
# completions and gradients stay those of TRL, but for rounding; the tests of
# this project prove it on a CPU, one optimization at a time. Sampled
# completions come from the same distribution but differ from TRL's, so a run
# ends elsewhere, as with another seed. An optimization that has nothing to do
# here, or lacks the memory it needs, is off. `DISABLE` switches off any, and
# `["all"]` leaves plain TRL. What each brings is
# [measured](../docs/measurements.md).

# %%
import pandas as pd

rows = [
    (name, "on" if name in resolved.optimizations else "off", what)
    for name, what in optimizations.OPTIMIZATIONS.items()
]
figures.table(
    pd.DataFrame(rows, columns=["optimization", "here", "what it does"])
)

# %% [markdown]
# ## Run it
#
# > **"The loss is about 0 and does not fall, is it broken?"** No. GRPO centres
# > the rewards of each group, so its advantages add up to 0. What is left in
# > the value of the loss tells whether the better completions were the longer
# > ones, and not how good they were. Its *gradient* is what trains. Watch the
# > reward.
#
# **What you should see**: the reward of at least one run climbs. Correctness is
# paid only inside the answer tags, so it rises together with the format. With
# a learning rate that is too low the reward hardly moves. "zero std" is the
# share of groups in which every completion earned the same (TRL's
# `frac_reward_zero_std`): they teach nothing, and their share grows as the
# policy gets good. "clipped" is the share of completions truncated at the
# length limit (`clipped_ratio`): above 20 % raise `MAX_COMPLETION_LENGTH`.
#
# Out of memory? Lower `MICRO_BATCH` first, then `MAX_COMPLETION_LENGTH`. You
# may interrupt at any time: running the cell again goes on from the last
# step.
#
# On a CPU the runs train side by side, each in a process of its own with one
# thread, as many as there are cores and memory for. On a GPU one follows the
# other. With `ENGINE = "ray"` they train on the workers of a cluster, see
# lesson 5.

# %%
live = figures.LiveTable(settings, FIVE_PART)
results = grid.run(
    settings,
    task,
    grid_dir,
    eval_batch_size=profile.eval_batch_size,
    progress=live.update,
    **engine,
)
for run in results.failed:
    print(f"FAILED {run.name}: {run.reason}")
print(f"{len(results.done)} of {len(results.runs)} runs done")

# %% [markdown]
# ## What the runs earned
#
# Faint lines are single steps, strong ones the mean of the last five. The first panel is
# the sum that GRPO maximises; the others are its parts.

# %%
figures.reward_curves(results, FIVE_PART)

# %% [markdown]
# Format is learned fast, since a few tokens decide it, and it takes correctness
# along: a right answer that used to stand outside the tags is now paid. Once
# the format parts are near their maximum, what still rises is the solving. It
# can rise only if the policy samples a right answer at least sometimes.

# %% [markdown]
# ## Was it healthy?
#
# A high reward can hide trouble, so look at how it was earned.

# %%
figures.health_curves(results)

# %% [markdown]
# - The **standard deviation** of the rewards in a group is what GRPO learns
#   from; a **share of groups with equal rewards** near 1 means that the steps
#   cost time and teach nothing.
# - **Truncated** completions never reach their answer tag.
# - **Length**: tags make answers longer. If it only grows, look into the
#   completions.
# - **Entropy** falls as the policy gets sure. Near 0 it always writes the
#   same and explores no more.
# - The **loss** comes last: see the note above.
#
# Two of these are checked for you: more than 20 % truncated, more than 80 %
# of the groups with equal rewards.

# %%
import textwrap

for warning in results.warnings():
    print(textwrap.fill(warning, 79))
print(f"{len(results.warnings())} warnings")

# %% [markdown]
# ## The leaderboard
#
# Reward is what a run was trained for, so it cannot judge it. Accuracy can:
# every held-out question, answered greedily, once by the base model and once
# after training. The answer is read generously (the tags if there are any,
# else a final statement, else the last number), before and after alike, so
# that merely learning to write tags is no gain.
#
# - **before**, **after**: accuracy, with its 95 % Wilson interval;
# - **gain**: the paired difference on the same questions, with its interval;
# - **p**: exact McNemar test: could chance alone explain the gain?
# - **format ok**: share of answers in the asked-for tags, before and after;
#   it can grow without any gain in accuracy;
# - **clipped**: share of answers truncated at the length limit; **time**: of
#   training.
#
# Greedy answers are mostly better than the sampled ones that training pays
# for, so accuracy can be well above the share of correctness in the curves.
#
# One caution: the best of several runs is picked by the same questions that
# measure it, so its own figure is a little too good. The more runs and the
# fewer questions, the more so.

# %%
board = results.leaderboard()
figures.leaderboard_table(board)

# %%
figures.leaderboard_figure(board)

# %% [markdown]
# Is the first really better than the second? A leaderboard always has a
# winner; that does not make it the best.

# %%
print(textwrap.fill(results.verdict(), 79))

# %% [markdown]
# The pocket models were made so that a reader without a GPU sees real
# learning. Whether they show it is checked here, not promised.

# %%
from grpo_lab.pocket import target

if all(one.model.startswith("pocket-") for one in settings):
    low, high = target.BASE_RANGE
    print(f"Target: a base accuracy of {low:.0%} to {high:.0%}, a best gain")
    print(f"of at least {target.LEAST_GAIN:.0%}, its interval above 0, and a")
    print(f"worst run at least {target.LEAST_CONTRAST:.0%} behind the best.")
    shares = dict.fromkeys(
        ["base accuracy", "best gain", "best minus worst run"], "{:.1%}"
    )
    figures.show(target.check(board), shares)
else:
    print("The target is for the pocket models only.")

# %% [markdown]
# ## The same questions, before and after
#
# Numbers say how many; text says what. The first row is a question that the
# training turned from wrong to right. If there is one that it turned from
# right to wrong, it comes second.

# %%
best = results.best
print(f"{best.name}, before and after training")
figures.answers_table(best.base, best.evaluation)

# %% [markdown]
# ## Ask the winner something new
#
# A run leaves a small adapter. Load the base model, put the adapter on it, and
# ask. This question is in no training set.

# %%
from peft import PeftModel

from grpo_lab import evaluation

base, tokenizer = models.load_policy(
    best.settings.model, best.settings.load_in_4bit
)
winner = PeftModel.from_pretrained(base, best.adapter)
size = (best.adapter / "adapter_model.safetensors").stat().st_size
question = (
    "Zoe has 26 shells. Zoe loses 11 of them. "
    "How many shells does Zoe have left?"
)
chat = prompts.messages(question, prompts.REASONING_PROMPT)
[(answer, tokens, cut)] = evaluation.generate(
    winner, tokenizer, [chat], best.settings.max_completion_length
)
print(f"{question}\n\n{answer}\n\n{tokens} tokens{', cut' if cut else ''}")
print(f"by an adapter of {size / 1e6:.1f} MB")

# %% [markdown]
# ## TensorBoard
#
# Every run has written the same curves for TensorBoard. In a terminal:

# %%
print(".venv/bin/tensorboard --host localhost --logdir", grid_dir / "runs")

# %% [markdown]
# It shows each run as `<run>/tensorboard`. What the policy wrote at each
# step, with every reward, lies beside it in `completions/` as parquet files.

# %% [markdown]
# ## More settings than a grid can hold
#
# A grid of three settings with five values each has 125 runs. Where only a few
# of the settings matter, as many runs drawn at random find better values,
# since each of them tries a new value of every setting (Bergstra and Bengio,
# [2012](https://jmlr.org/papers/v13/bergstra12a.html)). `grid.sample` draws
# them; the same seed gives the same runs, and `grid.run` trains them like any
# others.

# %%
drawn = grid.sample(
    first,
    n=6,
    seed=SEED,
    learning_rate=grid.log_uniform(1e-5, 1e-3),
    lora_r=[8, 16, 32],
)
columns = ["learning_rate", "lora_r"]
rows = [[getattr(one, name) for name in columns] for one in drawn]
figures.table(pd.DataFrame(rows, columns=columns), {"learning_rate": "{:.1e}"})

# %% [markdown]
# ## Exercises
#
# A solution stands right below each task: cover it and try first.
#
# **1. Advantages by hand** (5 minutes, easy). Four completions of one prompt
# earned 4.0, 4.0, 1.0 and 1.0. TRL subtracts the mean of the group and divides
# by its standard deviation plus 0.0001. What are the four advantages? Then
# compute them for a group that earned 4.0 four times.

# %% tags=["solution"]
import torch


def advantages(rewards: list[float]) -> torch.Tensor:
    rewards = torch.tensor(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


mixed = advantages([4.0, 4.0, 1.0, 1.0])
even = advantages([4.0, 4.0, 4.0, 4.0])
print(mixed, even)

# %%
assert torch.allclose(
    mixed, torch.tensor([0.866, 0.866, -0.866, -0.866]), atol=1e-3
)
assert not even.any(), "a group without spread has nothing to teach"

# %% [markdown]
# **2. How many questions to tell two runs apart?** (10 minutes, medium). Two
# runs answer 10 % of the questions differently, and of those, two thirds in
# favour of the first. How many held-out questions does the exact test need to
# reach p < 0.05, for that number and every larger one? Expect bad news.


# %% tags=["solution"]
def p_value(total: int) -> float:
    differing = total // 10
    gained = round(differing * 2 / 3)
    lost = differing - gained
    return evaluation.Comparison(gained, lost, total).p_value


for total in (100, 200, 300, 400, 800):
    print(f"{total} questions: p = {p_value(total):.3f}")

enough = 10 + max(n for n in range(10, 2000, 10) if p_value(n) >= 0.05)
print(f"from {enough} questions on, p stays below 0.05")

# %%
assert p_value(enough) < 0.05 <= p_value(enough - 10)
print(f"A lead of {0.1 / 3:.1%} needs {enough} questions to be seen.")

# %% [markdown]
# **3. Another grid** (10 minutes, medium). Plan a grid that keeps the winner's
# model and learning rate and varies the rank of the adapter: 4, 16 and 64.
# You need not run it; `grid.run` would, in a directory of its own.

# %% tags=["solution"]
ranks = grid.expand(best.settings, lora_r=[4, 16, 64])
figures.grid_table(grid.estimates(ranks, len(splits.train), longest, pace))

# %%
assert [run.lora_r for run in ranks] == [4, 16, 64]
assert {run.learning_rate for run in ranks} == {best.settings.learning_rate}

# %% [markdown]
# ## Recap
#
# - A grid of GRPO runs is a list of settings; a 4-bit base model with a LoRA
#   adapter makes each of them small.
# - Watch the reward, its spread and the truncation; the loss is no sign of
#   progress.
# - Judge by held-out accuracy, paired, with intervals. A winner that can't be
#   told from the second is no winner.
# - Everything about a run lies in its directory, and a crash costs at most
#   one step.
#
# **Next**: lesson 4 lets a population evolve its learning rate, and serves the
# best policy. Or look into a run's `completions/` to see what its policy was
# paid for. Symptoms and their fixes are in
# [TROUBLESHOOTING.md](../TROUBLESHOOTING.md).

# %% [markdown]
# ## Results
#
# The last cell writes `results.json`, and fails if any run failed, so that a
# batch job notices.

# %%
from grpo_lab.files import write_json

summary = {
    "lesson": "03_grid_search",
    "profile": profile.name,
    "machine": environment.machine(),
    "data": splits.source,
    "leaderboard_text": figures.leaderboard_text(board).to_string(),
    **results.summary(),
}
write_json(output_dir / "results.json", summary)
results.raise_failures()
print(f"{len(results.done)} runs done: {output_dir / 'results.json'}")
