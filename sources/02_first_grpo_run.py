# %% [markdown]
# # 2. A first GRPO run, everything visible
#
# One model, one run, in the open: you see the questions, the adapter, the
# rewards, the settings with the reasons for their values, the curves, and
# finally what the policy that you have just trained can do that the base model
# could not. Then you run what goes wrong most often, and see how it looks.
#
# **What you will learn**
#
# - how a run is put together: questions, adapter, rewards, settings, trainer;
# - what the settings do, what values a well-known recipe gives them, and why
#   ours differ;
# - how to judge the policy that was trained, and not another: on held-out
#   questions, against its base model, with intervals;
# - how a run looks that can't learn, and one that learns to cheat.
#
# **You need** this project, installed, and [lesson 1](01_rewards.ipynb) or
# these words:
#
# - the **policy** is the language model that is being trained; a
#   **completion** is what it writes after a prompt, and writing some is a
#   **rollout**;
# - a **reward** is the number that a completion earns; the **gold** is the
#   answer that the data set gives;
# - **GRPO**, group relative policy optimisation, lets the policy write a
#   *group* of completions for one prompt and makes those likelier that earned
#   more than the group's mean: how much more is their **advantage**;
# - **LoRA** trains a small **adapter** beside the frozen model.
#
# | profile | machine | time | memory |
# | --- | --- | --- | --- |
# | `full` | GPU with 80 GB or more | about 5 h, estimated | 25 GB, estimated |
# | `lite` | GPU with 15 GB or more | about 1.5 h on a T4, estimated | 6 GB, estimated |
# | `pocket` | 2 CPU cores, no GPU, no network | 1.5 min, measured | 1.6 GiB, measured |
#
# The story is that of the GRPO recipe in Hugging Face's
# [Open-Source AI Cookbook](https://huggingface.co/learn/cookbook/fine_tuning_llm_grpo_trl)
# (S. Paniego, 2025): its data and its model (full takes the larger sibling;
# pocket's are embedded), a reward for the form and one for the answer. The whole
# recipe stays within reach: `SETTINGS = "published"` takes its values, its prompt
# and its rewards (`rewards.published`), which read less carefully. On pocket that
# is 3 steps, too few to learn.

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
# `PROFILE` sets every size for a kind of machine, `SETTINGS` says whose values
# are trained with. Any other line overrides one value; 0 and "" leave it.
# A misspelt name stops here, before anything is loaded.

# %% tags=["parameters"]
PROFILE: str = "lite"  # full, lite or pocket; lite is pocket without a GPU
SETTINGS: str = "ours"  # or published: the whole recipe of the Cookbook
MODEL: str = ""  # the base model: a name, a Hub id or a local folder
LEARNING_RATE: float = 0.0  # peak rate
DATA: str = ""  # numina_math_tir, or pocket_latex for the embedded problems
DATA_PATH: str = ""  # a folder with train and test files of your own
TRAIN_ROWS: int = 0  # questions to train on
EVAL_ROWS: int = 0  # held-out questions
MAX_STEPS: int = 0  # optimiser steps
SHORT_STEPS: int = 0  # optimiser steps of the run that learns to cheat
NUM_GENERATIONS: int = 0  # completions for each prompt: the group
COMPLETIONS_PER_STEP: int = 0  # completions for each optimiser step
MICRO_BATCH: int = 0  # completions in one forward pass: lower it for memory
TARGET_MODULES: list[str] = []  # layers with an adapter; ["all-linear"]: all
MAX_COMPLETION_LENGTH: int = 0  # tokens that a completion may have
SEED: int = 42  # of the adapter, the rollouts and the choice of questions
OUTPUT_DIR: str = "runs/02_first_grpo_run"  # every file is written below it

# %% [markdown]
# From these few values follows everything else.

# %%
from dataclasses import replace
from pathlib import Path

from grpo_lab import memory, models, parameters, profiles

globals().update(parameters.check(globals()))

device = memory.device_memory()
profile = profiles.choose(
    PROFILE, device.memory if device.is_gpu else 0, profiles.FIRST_RUN
)
overrides = {
    "learning_rate": LEARNING_RATE,
    "max_steps": MAX_STEPS,
    "num_generations": NUM_GENERATIONS,
    "completions_per_step": COMPLETIONS_PER_STEP,
    "micro_batch": MICRO_BATCH,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "target_modules": TARGET_MODULES,
}
given = {name: value for name, value in overrides.items() if value}
settings = profiles.first_run(profile, SETTINGS, MODEL, seed=SEED, **given)
short_steps = SHORT_STEPS or profile.short_steps
cheat_settings = replace(settings, max_steps=short_steps)
output_dir = Path(OUTPUT_DIR)
print(f"Profile {profile.name}, settings {SETTINGS}: {settings.short_model}")

# %% [markdown]
# ## The questions
#
# The answers are formulas, in LaTeX, so a plain comparison of numbers can't
# grade them. Full and lite take 5 % of the train split of
# [NuminaMath-TIR](https://huggingface.co/datasets/AI-MO/NuminaMath-TIR), and
# hold out rows of its test split. Pocket makes short problems of the same form.

# %%
from grpo_lab import data, figures, prompts

as_published = SETTINGS == "published"
system_prompt = (
    prompts.PUBLISHED_THINK_PROMPT if as_published else prompts.THINK_PROMPT
)
splits = data.load_splits(
    DATA or profile.data,
    path=DATA_PATH,
    system_prompt=system_prompt,
    train_rows=TRAIN_ROWS or profile.train_rows,
    eval_rows=EVAL_ROWS or profile.eval_rows,
    seed=SEED,
)
print(splits.source)
print(f"{len(splits.train)} to train on, {len(splits.eval)} held out")
rows = splits.train.to_pandas()[["question", "answer"]]
figures.table(rows.head(2))

# %% [markdown]
# The gold is what stands in `\boxed{}`. The policy never sees it, nor the
# solution around it: only the rewards read it.
#
# Enough held-out rows matter. The recipe holds out 5 % of a test split of 99,
# which is 5 rows; exercise 1 shows how little 5 rows can say.
#
# What the policy sees is a *prompt*: a system message in the manner of
# [DeepSeek-R1](https://arxiv.org/abs/2501.12948), which asks for thoughts and
# answer in tags of their own, then the question.

# %%
for message in splits.train[0]["prompt"]:
    print(f"{message['role']}: {message['content']}")

# %% [markdown]
# Our prompt names the tags and stops there. Many prompts go on with a
# filled-in example, and a policy learns fast that copying it pays. See what
# the format reward makes of such a copy:

# %%
from rewards import COOKBOOK, think_format_reward

copied = (
    "<think> reasoning process here </think><answer> answer here </answer>"
)
print(think_format_reward([copied]))

# %% [markdown]
# 1.0 is all that this reward pays, here for nothing. A reward for form can't
# tell; a prompt without such an example gives nothing to copy.
#
# ## The rewards
#
# Two rewards, 1.0 each, added up:
#
# - **think format**: one `<think>` block, then one `<answer>` block, and
#   nothing outside;
# - **accuracy**: what stands in the answer tags equals the gold, as maths and
#   not as text.
#
# Score completions that you can check by eye. The gold is ½.

# %%
from rewards.published import COOKBOOK_AS_PUBLISHED

pair = COOKBOOK_AS_PUBLISHED if as_published else COOKBOOK
completions = {
    "right, in the form": "<think>\n2 : 4\n</think>\n<answer>$0.5$</answer>",
    "wrong, in the form": "<think>\n4 : 2\n</think>\n<answer>$2$</answer>",
    "right, without form": r"2 : 4, so the answer is $\frac{2}{4}$.",
    "right, with chatter": (
        r"Sure!<think>2 : 4</think><answer>\frac{2}{4}</answer>"
    ),
    "cut before the answer": "<think>\nFirst we look at the two numbers",
}
figures.reward_table(completions, r"So $\boxed{\frac{1}{2}}$.", pair)

# %% [markdown]
# - A wrong answer in the form earns 1.0: half of all that can be had, without
#   any maths. Remember that when a reward curve looks good.
# - Whatever is cut off before its answer earns nothing at all.
#
# ## The base model
#
# It stays frozen, and with our settings it is loaded in 4 bit. Before any
# training it answers the held-out questions: without that there is nothing to
# compare with.

# %%
from grpo_lab import evaluation, grid, guards, training

by_hand = replace(settings, optimizations=())  # the trainer below is TRL's own
run = grid.open_run(
    by_hand, grid.Task(splits, pair, evaluation.LATEX), output_dir / "run"
)
policy, tokenizer = models.load_policy(settings.model, settings.load_in_4bit)
longest = prompts.longest_prompt(tokenizer, splits.train["prompt"])
guards.check_context(policy, longest, settings.max_completion_length)
grid.check_memory([settings], longest)
resolved = memory.resolve(settings, longest)
print(f"{run.directory} can be used, and the run fits into memory.")

# %% [markdown]
# Greedily, through the chat template, with the limit of the training: so it
# will be asked again at the end.

# %%
judging = {
    "max_new_tokens": settings.max_completion_length,
    "batch_size": profile.eval_batch_size,
    "grader": evaluation.LATEX,
    # the same answers in less time
    "optimizations": resolved.optimizations,
}
base_file = run.directory / "base.json"
before = evaluation.Evaluation.load(base_file)
if before is None:
    before = evaluation.evaluate(policy, tokenizer, splits.eval, **judging)
    before.save(base_file)
low, high = before.interval
print(f"Right: {before.accuracy:.1%}, 95 % interval {low:.0%} to {high:.0%}")
print(f"In the form: {before.format_ok_share:.1%}")

# %% [markdown]
# The final answer counts here, in tags or not: learning
# the form alone is no gain in accuracy. *In the form* is the format reward,
# on the same answers.
#
# ## The adapter
#
# Only two small matrices beside each chosen layer are trained. How small the
# whole is, PEFT says itself, as soon as the trainer has put them in place.

# %%
from peft import LoraConfig

adapter = LoraConfig(
    r=settings.lora_r,
    lora_alpha=settings.lora_alpha,
    lora_dropout=settings.lora_dropout,
    target_modules=list(settings.target_modules),
    bias="none",
    task_type="CAUSAL_LM",
)
assert adapter == training.lora_config(settings)

# %% [markdown]
# ## Every setting
#
# First what is only about the machine and the log. TRL counts *completions*
# in a batch, not prompts. Every step is logged and saved, so a crash costs one
# step at most.

# %%
steps = settings.steps(len(splits.train))
keeping = {
    "output_dir": str(run.directory),
    # how it fits into memory
    "per_device_train_batch_size": settings.micro_batch,
    "gradient_accumulation_steps": settings.accumulation_steps,
    "gradient_checkpointing": settings.gradient_checkpointing,
    **models.precision_flags(),
    "use_cpu": not device.is_gpu,
    # what is kept
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "log_completions": True,
    "num_completions_to_print": 0,
    "save_steps": settings.save_steps,
    "save_total_limit": 2,
    "report_to": "none",
    "disable_tqdm": True,
}

# %% [markdown]
# Then what decides what is learned. What TRL leaves open is set here too, for
# a default can change with a release, and some values a model brings along.

# %%
from trl import GRPOConfig

arguments = GRPOConfig(
    **keeping,
    # what is rolled out
    num_generations=settings.num_generations,
    max_completion_length=settings.max_completion_length,
    temperature=settings.temperature,
    top_p=settings.top_p,
    top_k=settings.top_k,
    chat_template_kwargs=prompts.TEMPLATE_VALUES,
    min_p=None,
    repetition_penalty=1.0,
    # what is learned from it
    learning_rate=settings.learning_rate,
    lr_scheduler_type=profiles.SCHEDULERS[settings.lr_scheduler],
    warmup_steps=round(settings.warmup_share * steps),
    optim=settings.optimizer,
    weight_decay=settings.weight_decay,
    max_grad_norm=settings.max_grad_norm,
    adam_beta1=settings.adam_beta1,
    adam_beta2=settings.adam_beta2,
    beta=settings.beta,
    loss_type="dapo",
    scale_rewards="group",
    num_iterations=1,
    max_steps=steps,
    seed=settings.seed,
)

# %% [markdown]
# The package builds its runs with the same values; if the two ever differed,
# this lesson would stop here.

# %%
built = training.grpo_config(resolved, run.directory, len(splits.train))
in_force = training.values_in_force(arguments)
assert in_force.equals(training.values_in_force(built))

# %% [markdown]
# What the most important of them do, and why ours are not the published ones.
# First those about the rollouts and the step:

# %%
REASONS = {
    "learning_rate": (
        "size of a step of the optimiser",
        "a short run has to move faster, a tiny model much faster "
        "(not tuned on a GPU)",
    ),
    "num_generations": (
        "completions per prompt: the group that is compared",
        "in a larger group some completion is right more often",
    ),
    "completions_per_step": (
        "completions that one step learns from",
        "more steps, each from fewer completions",
    ),
    "max_completion_length": (
        "tokens that a completion may have",
        "in 64 tokens real problems can't be thought through and answered: "
        "the first fault below",
    ),
    "temperature": (
        "how varied the completions are",
        "1 is the policy itself, neither sharpened nor flattened",
    ),
    "top_k": (
        "how many of the likeliest tokens are sampled from; 0: all",
        "what is never sampled is never learned",
    ),
    "beta": (
        "weight of a penalty for moving away from the base model",
        "the run is short, and the base model's forward pass costs time",
    ),
}

# %% [markdown]
# Then those about the adapter and the course of the run:

# %%
REASONS |= {
    "max_steps": (
        "optimiser steps; 0: until num_epochs are over",
        "what fits into the time of this profile",
    ),
    "lora_r": ("rank of the adapter's matrices", "the same"),
    "lora_dropout": (
        "share of the adapter's inputs that is dropped at random",
        "TRL drops while it rolls out, too: then text and gradient come "
        "from different policies",
    ),
    "target_modules": (
        "layers that get an adapter",
        "only pocket differs: two projections of so small a model learn "
        "the form, and no maths",
    ),
    "load_in_4bit": (
        "whether the base model is stored in 4 bit",
        "the weights shrink to less than half of their 16 bit",
    ),
    "warmup_share": (
        "share of the steps in which the rate grows",
        "Adam's first steps know little of the gradient",
    ),
    "weight_decay": (
        "pull of the adapter's weights towards 0",
        "hardly felt in so few steps",
    ),
    "adam_beta2": (
        "how long Adam remembers the size of gradients",
        "0.999 looks back about 1000 steps, 0.99 about 100",
    ),
    "max_grad_norm": (
        "longest gradient that is taken as it is",
        "so that one odd group can't throw the policy off",
    ),
}

# %% [markdown]
# Side by side, with the values in force:

# %%
import pandas as pd

published = profiles.COOKBOOK_AS_PUBLISHED


def shown(value):
    return ", ".join(value) if isinstance(value, tuple) else str(value)


explained = pd.DataFrame(
    [
        {
            "setting": name,
            "what it does": what,
            "here": shown(getattr(settings, name)),
            "as published": shown(published[name]),
            "why ours differs": why,
        }
        for name, (what, why) in REASONS.items()
    ]
)
same = explained["here"] == explained["as published"]
explained.loc[same, "why ours differs"] = "the same"
figures.table(explained)

# %% [markdown]
# Some of the published values are defaults of TRL 0.14.0, the release that
# the recipe names. To train with them, set `SETTINGS = "published"` and
# another `OUTPUT_DIR`, and compare the two executed notebooks. The limit on tokens
# and the precision are also those of the evaluation, so compare the gains, not
# the accuracies. Two things differ from the recipe all the same: it cuts prompts
# at 128 tokens, and in its loss each completion weighs the same (TRL's
# `loss_type="grpo"`), where ours lets each token do so.
#
# ## The trainer

# %%
from trl import GRPOTrainer

from rewards import FailureLimit

guards.keep_sampling_ours(policy)
trainer = GRPOTrainer(
    model=policy,
    reward_funcs=list(pair),
    args=arguments,
    train_dataset=splits.train,
    processing_class=tokenizer,
    peft_config=adapter,
)
guards.prepare(trainer)
trainer.model.print_trainable_parameters()

# %% [markdown]
# `keep_sampling_ours` forgets the temperature that a model brings along, and
# `prepare` puts the adapter back to 32 bit, where TRL has it in 16.
#
# Three more things: a snapshot of the adapter from time to time, to be judged
# later; a record of every step; and a check that refuses a trainer which would
# run without learning. The record also stops a run in which a reward can't
# grade what it gets.

# %%
live = figures.LiveTable([settings], pair)
recorder = training.Recorder(
    run.directory,
    pair,
    progress=lambda *step: live.update(settings, *step),
    limit=FailureLimit(settings.max_failed_share),
)
trainer.add_callback(training.Snapshots(every=max(1, steps // 4)))
trainer.add_callback(recorder)
guards.check(trainer, settings)

# %% [markdown]
# ## Train
#
# The table above fills in while the next cell runs. (Where a finished run is
# opened again, it stays empty.)
#
# **What you should see** (on pocket; full and lite were not run): the format is
# learned first, since a few tokens decide it. The accuracy reward rises with it,
# because a right answer is paid only inside the tags. Solving rises more slowly,
# and only where the policy samples a right answer at least sometimes; the
# held-out accuracy below tells the two apart.
#
# > **"The loss is about 0, is it broken?"** No: advantages add up to 0 in each
# > group, so the loss says only whether the better completions were longer (below
# > 0) or shorter. The gradient is what trains. Watch the reward.
#
# Out of memory? Lower `MICRO_BATCH` first, then `MAX_COMPLETION_LENGTH`, and
# take another `OUTPUT_DIR`, since that is another run. You may interrupt at any
# time: run the notebook again as it is, and it goes on from the last step.

# %%
training.train(trainer)
trainer.model.save_pretrained(run.adapter)
print(f"{len(run.metrics)} steps in {run.seconds:.0f} s")
print(f"{run.peak_memory_gib:.1f} GiB of memory at most")

# %% [markdown]
# ## What the run earned, and how
#
# Faint lines are single steps, strong ones the mean of the last five.

# %%
figures.run_curves(run, pair)

# %% [markdown]
# - **Reward** and its two parts first: what was the gain made of?
# - The **standard deviation** of the rewards in a group is what GRPO learns
#   from. A group with equal rewards teaches nothing.
# - **Truncated** completions never reach their answer: above 20 % raise
#   `MAX_COMPLETION_LENGTH`.
# - **Entropy** falls as the policy gets sure; near 0 it explores no more.
# - The **loss** comes last: it is no sign of progress.
#
# The same curves are in TensorBoard. In a terminal:

# %%
print(".venv/bin/tensorboard --host localhost --logdir", run.directory)

# %% [markdown]
# ## Judge the policy that was just trained
#
# Not the one in memory, and not one that somebody uploaded: the adapter is
# loaded from the files that the run has left, onto a fresh base model. It
# answers the held-out questions through the chat template, greedily.

# %%
from peft import PeftModel

trainer = policy = None  # their memory can be used again
memory.free_memory()
base, tokenizer = models.load_policy(settings.model, settings.load_in_4bit)
trained = PeftModel.from_pretrained(base, run.adapter)
after = evaluation.evaluate(trained, tokenizer, splits.eval, **judging)
after.save(run.directory / "evaluation.json")
figures.comparison_table(before, after)

# %% [markdown]
# Square brackets are 95 % intervals: Wilson's for a share, that of the paired
# comparison for a difference. A difference whose interval holds 0 may be
# chance.
#
# *Answers in the requested format* can rise without any gain in maths, so look at
# *right answers* before you say that the policy got better at it. Time per
# answer is for answers in batches.
#
# Numbers say how many; text says what. First comes a question that the training
# turned from wrong to right, if there is one, then one that it turned from
# right to wrong, if there is one.

# %%
figures.answers_table(before, after)

# %% [markdown]
# The pocket model was made so that a reader without a GPU sees real learning.
# Whether it shows it is checked here, not promised. (What it learned in
# our runs is narrow: mostly the sign in equations such as $x + 3 = 22$.)

# %%
from grpo_lab.pocket import target

on_target = settings.model == "pocket-qwen" and SETTINGS == "ours"
if on_target:
    print("Target: neither form nor accuracy falls on held-out questions, and")
    print("at least one of them rises with its interval above 0.")
    shares = dict.fromkeys(["gain", "gain_low", "gain_high"], "{:+.1%}")
    figures.show(target.check_first_run(before, after), shares)
else:
    print("The target is for the pocket model with our settings.")

# %% [markdown]
# ## Keep it, or share it
#
# The adapter is a folder of small files, the weights as safetensors. It needs
# its base model and nothing else.

# %%
for file in sorted(run.adapter.glob("adapter*")):
    print(f"{file.name}: {file.stat().st_size / 1e3:.1f} kB")

# %% [markdown]
# To push it to the Hub, log in once in a terminal (`.venv/bin/hf auth login`;
# a token never belongs into a notebook), write the name below and run the
# cell. It is no parameter, so no batch job ever pushes anything. (The adapter of
# a pocket model is of no use elsewhere: its base model is not on the Hub.)

# %%
from huggingface_hub import HfApi

hub_name = ""  # such as "your-name/my-first-grpo-run"
if hub_name:
    HfApi().create_repo(hub_name, private=True, exist_ok=True)
    HfApi().upload_folder(repo_id=hub_name, folder_path=run.adapter)
    print(f"Pushed to {hub_name}, private.")
else:
    print("Nothing was pushed.")

# %% [markdown]
# ## What to watch out for
#
# Four faults, each shown. First a helper: it trains the run once
# more from the base model, with something changed.


# %%
def train_variant(name, rewards, changed, callbacks=()):
    memory.free_memory()
    folder = output_dir / "variants" / name
    variant = grid.open_run(
        changed, grid.Task(splits, rewards, evaluation.LATEX), folder
    )
    policy, tokenizer = models.load_policy(changed.model, changed.load_in_4bit)
    trainer = training.build_trainer(
        memory.resolve(changed, longest), splits.train, rewards, folder,
        policy, tokenizer, callbacks=callbacks,
    )  # fmt: skip
    training.train(trainer)
    return variant


# %% [markdown]
# ### 1. A limit that is too short
#
# The recipe cuts completions at 64 tokens. Real problems need more for thoughts
# and answer, so the answer is hardly ever reached, and what is cut before it
# earns nothing. Where answers are shorter than that (pocket), the limit is put
# at half the shortest answer in the form.

# %%
lengths = [answer.tokens for answer in after.answers if answer.format_ok]
shortest = min([64, settings.max_completion_length, *lengths])
limit = 64 if shortest == 64 else max(1, shortest // 2)
too_short = replace(settings, max_completion_length=limit, max_steps=3)
short = train_variant("too_short", pair, too_short)
columns = ["step", "clipped_ratio", *(one.__name__ for one in pair)]
columns += ["frac_reward_zero_std"]
print(f"Limit: {limit} tokens")
figures.table(short.metrics[columns], dict.fromkeys(columns[1:], "{:.2f}"))

# %% [markdown]
# **What you should see**: nearly all completions are truncated, none is
# rewarded, and every group has equal rewards. Nothing in this run says "error",
# and nothing is learned.
#
# ### 2. One completion per prompt
#
# A group of one has nothing to compare. TRL refuses it, and so do our
# settings, before anything is loaded.

# %%
import textwrap

from grpo_lab.errors import LabError

refusals = {}
try:
    GRPOConfig(num_generations=1, bf16=False, use_cpu=True)
except ValueError as error:
    refusals["TRL"] = str(error)
try:
    replace(settings, num_generations=1)
except LabError as error:
    refusals["grpo_lab"] = str(error)
for who, words in refusals.items():
    print(textwrap.fill(f"{who}: {words}", 79))

# %% [markdown]
# ### 3. A column that was dropped
#
# The trainers of transformers drop the columns that the model can't take. The
# gold is such a column, and a reward needs it. For GRPO the switch is off; here
# it is on. (The recipe has to switch it off by hand.)

# %%
from rewards import RewardError

policy, tokenizer = models.load_policy(settings.model, settings.load_in_4bit)
dropping = training.grpo_config(
    resolved, output_dir / "variants" / "dropped", len(splits.train)
)
dropping.remove_unused_columns = True
guards.keep_sampling_ours(policy)
trainer = GRPOTrainer(
    model=policy,
    reward_funcs=list(pair),
    args=dropping,
    train_dataset=splits.train,
    processing_class=tokenizer,
    peft_config=adapter,
)
try:
    trainer.train()
except RewardError as error:
    refusals["rewards"] = str(error)
    print(textwrap.fill(str(error), 79))

# %% [markdown]
# Our rewards stop at the first step, and say which columns there are.
#
# ### 4. A reward that can be cheated
#
# It sounds reasonable: good answers need thought, so pay for thoughts. Here is
# such a reward: a hundredth for each character after `<think>`, up to
# `</think>` or the end, 1.0 at most.

# %%
trainer = policy = None  # their memory can be used again


def effort_reward(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    thoughts = [
        text.partition("<think>")[2].partition("</think>")[0] for text in texts
    ]
    return [min(1.0, len(thought) / 100) for thought in thoughts]


snapshots = training.Snapshots(every=max(1, short_steps // 4))
cheat = train_variant("effort", [effort_reward], cheat_settings, [snapshots])

# %% [markdown]
# Now the reward of this run and that of ours, each as a multiple of what it was
# in its first five steps, beside what really counts: held-out accuracy,
# measured on the snapshots of both.

# %%
base, tokenizer = models.load_policy(settings.model, settings.load_in_4bit)
batch = min(len(splits.eval), profile.eval_batch_size)
some = splits.eval.select(range(batch))
judged = {
    name: (
        one,
        evaluation.evaluate_snapshots(
            base, training.snapshots(one.directory), tokenizer, some, **judging
        ),
    )
    for name, one in (("cookbook pair", run), ("paid for effort", cheat))
}
figures.reward_and_accuracy(judged)

# %% [markdown]
# In numbers: the mean reward of the first and of the last quarter of the steps,
# and the accuracy of the base model and of the last snapshot, on one batch of
# held-out questions.

# %%
rises = {}
for name, (one, along) in judged.items():
    reward = one.metrics["reward"]
    quarter = max(1, len(reward) // 4)
    paid = reward.head(quarter).mean(), reward.tail(quarter).mean()
    able = along[0].accuracy, list(along.values())[-1].accuracy
    rises[name] = {"reward": paid, "accuracy": able}
    print(f"{name}: reward {paid[0]:.2f} to {paid[1]:.2f}, ", end="")
    print(f"accuracy {able[0]:.0%} to {able[1]:.0%}")

# %% [markdown]
# **What you should see** (on pocket; larger models were not run): both rewards
# climb, and only one of them takes accuracy along. And this is what better paid
# thoughts look like:

# %%
_, along = judged["paid for effort"]
figures.answers_table(along[0], list(along.values())[-1], lost_first=True)

# %% [markdown]
# Look at the tags: in our runs `<think>` again and again, which is paid like
# thought. The reward does not show this. Held-out accuracy does, and reading a few
# completions does. It could have been known before: `check_reward` of
# [lesson 1](01_rewards.ipynb) writes right and wrong answers to some questions,
# and looks at what they are paid.

# %%
from rewards import check_reward

few = splits.train.select(range(min(5, len(splits.train))))
faults = {}
for name, rewards in (
    ("cookbook pair", list(pair)),
    ("paid for effort", effort_reward),
):
    found = check_reward(rewards, few)
    faults[name] = [verdict.name for verdict in found.failures]
    print(f"{name}: {len(found.rows)} checks, failed: {faults[name]}")

# %% [markdown]
# *Rewards right answers* fails: a wrong answer gets as much as a right one, and
# rewards whose sum does that can't teach what is right.
#
# ## Exercises
#
# A solution stands right below each task: cover it and try first.
#
# **1. How much do 5 rows say?** (5 minutes, easy). A policy answers 3 of 5
# held-out questions rightly. Between which accuracies does the 95 % interval
# lie? How many questions, answered with the same share of right answers, bring
# its width below 10 points?

# %% tags=["solution"]
low, high = evaluation.wilson_interval(3, 5)
print(f"3 of 5: between {low:.0%} and {high:.0%}")


def width(total):
    low, high = evaluation.wilson_interval(round(0.6 * total), total)
    return high - low


enough = next(total for total in range(5, 1000, 5) if width(total) < 0.1)
print(f"{enough} questions")

# %% [markdown]
# Check yours:

# %%
assert high - low > 0.5, "five rows tell next to nothing"
assert width(enough) < 0.1 <= width(enough - 5)

# %% [markdown]
# **2. When does a group teach?** (10 minutes, medium). A policy answers a
# question rightly with probability p, and the reward is 1 or 0. How likely is a
# group of 8 to have any spread, for p = 0.01, 0.1, 0.5 and 0.99? And with 4, as
# published?


# %% tags=["solution"]
def has_spread(p, size):
    return 1 - p**size - (1 - p) ** size


for p in (0.01, 0.1, 0.5, 0.99):
    print(f"p = {p}: {has_spread(p, 8):.0%} of 8, {has_spread(p, 4):.0%} of 4")

# %% [markdown]
# Check yours. Hard questions teach as seldom as easy ones:

# %%
assert has_spread(0.5, 8) > 0.99
assert abs(has_spread(0.01, 8) - has_spread(0.99, 8)) < 1e-9

# %% [markdown]
# **3. Mend the reward for effort** (15 minutes, medium). Pay for long thoughts
# only where the answer is right, so that effort alone earns nothing. Try it
# on the four texts below before you would train on it. (Is it a good idea? A
# right answer in few words would still earn less than one in many.)

# %% tags=["solution"]
from rewards import accuracy_reward


def effort_if_right(completions, **kwargs):
    right = accuracy_reward(completions, **kwargs)
    effort = effort_reward(completions)
    # None: the gold can't be read, so there is nothing to say.
    return [r and r * e for r, e in zip(right, effort, strict=True)]


# %% [markdown]
# Check yours, on two right answers and two wrong ones:

# %%
texts = [
    "<think>4 - 1</think><answer>3</answer>",
    "<think>4 - 1 is 3 since 3 + 1 is 4</think><answer>3</answer>",
    "<think>4 - 1 is 5 since 5 + 1 is 4</think><answer>5</answer>",
    "<think>" + "hm " * 50 + "</think><answer>5</answer>",
]
chats = [[{"role": "assistant", "content": text}] for text in texts]
paid = effort_if_right(chats, solution=["$3$"] * 4)
print(paid)
assert 0 < paid[0] < paid[1] and paid[2:] == [0, 0]

# %% [markdown]
# ## Recap
#
# - A run is questions, an adapter, rewards and settings; each setting has a
#   reason, and a published value is not one.
# - Judge the policy that you trained, from its files, on questions that it has
#   not seen, against its base model, with intervals.
# - A reward curve can climb while the policy gets worse. Held-out accuracy and
#   reading tell; `check_reward` would have told before.
# - A limit that is too short gives no error and no learning: look at the first
#   steps.
#
# **Next**: which model, which learning rate?
# [3. A grid search](03_grid_search.ipynb) tries several. Symptoms and their
# fixes are in [TROUBLESHOOTING.md](../TROUBLESHOOTING.md).

# %% [markdown]
# ## Results
#
# The last cell writes the numbers that this text relies on to
# `results.json`, where the tests read them.

# %%
from grpo_lab.files import write_json


def figures_of(one):
    return {
        "accuracy": one.accuracy,
        "in_form": one.format_ok_share,
        "clipped": one.clipped_ratio,
        "tokens": one.mean_tokens,
        "seconds": one.seconds_per_answer,
        "questions": len(one.answers),
    }


summary = {
    "lesson": "02_first_grpo_run",
    "profile": profile.name,
    "settings_of": SETTINGS,
    "machine": environment.machine(),
    "data": splits.source,
    "settings": settings.to_dict(),
    "before": figures_of(before),
    "after": figures_of(after),
    "target": (
        target.check_first_run(before, after).to_dict("records")
        if on_target
        else []
    ),
    "training_seconds": run.seconds,
    "peak_memory_gib": run.peak_memory_gib,
    "too_short": short.metrics[columns].to_dict("records"),
    "refusals": refusals,
    "rises": rises,
    "faults": faults,
}
write_json(output_dir / "results.json", summary)
print(f"Written: {output_dir / 'results.json'}")
