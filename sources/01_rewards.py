# %% [markdown] tags=["any-machine"]
# # 1. What gets rewarded
#
# GRPO trains a language model with nothing but numbers: one for each text
# that it writes. This lesson shows, on four texts that you can check by eye,
# how such a number comes about and what it does to the model. Then you
# attack the rewards, and write your own. No model is trained here.
#
# **What you will learn**
#
# - what the five parts of our reward pay, and for what;
# - how rewards become advantages, and why a group in which all earn the same
#   teaches nothing;
# - why the loss is near 0 while the model learns;
# - how to cheat a reward, and how to find out before training whether yours
#   can be cheated.
#
# **You need** this project, installed, and an idea of what a language model
# and a gradient are. Some words that all lessons use:
#
# - the **policy** is the language model that is being trained;
# - a **completion** is what it writes after a prompt, and writing some is a
#   **rollout**;
# - the **gold** is the answer that the data set gives for a question;
# - a **reward** is the number that a completion earns;
# - **GRPO**, group relative policy optimisation
#   ([Shao et al., 2024](https://arxiv.org/abs/2402.03300)), lets the policy
#   write a *group* of completions for one prompt and makes those likelier
#   that earned more than the group's mean: how much more, measured by the
#   group's spread, is their **advantage**.
#
# | profile | machine | time | memory |
# | --- | --- | --- | --- |
# | all three | any: no GPU and no network needed | under half a minute, measured on 2 CPU cores | 0.7 GiB, measured |

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
# All lessons are called alike, so `PROFILE` is here too. In this one it
# changes nothing.

# %% tags=["parameters"]
PROFILE: str = "lite"  # full, lite or pocket: the same in this lesson
OUTPUT_DIR: str = "runs/01_rewards"  # every file is written below it

# %% [markdown]
# A misspelt name or profile stops here. `full` and `lite` would ask for a
# GPU's memory; here they are told that there is enough, since none is used.

# %%
from pathlib import Path

from grpo_lab import parameters, profiles

globals().update(parameters.check(globals()))
profile = profiles.choose(PROFILE, gpu_memory=float("inf"))
output_dir = Path(OUTPUT_DIR)
print(f"Profile {profile.name}, written to {output_dir}")

# %% [markdown]
# ## One question, four completions
#
# The question is the first one of the training set of GSM8K
# ([Cobbe et al., 2021](https://arxiv.org/abs/2110.14168), MIT licence,
# [openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k) on the Hub).
# Its gold comes with a worked solution. `<<48/2=24>>` are notes for a
# calculator, and what follows `####` is the answer. The policy sees none of
# it, only a prompt and the question.

# %%
from grpo_lab.prompts import REASONING_PROMPT
from rewards import gold_answer

question = (
    "Natalia sold clips to 48 of her friends in April, and then she sold "
    "half as many clips in May. How many clips did Natalia sell altogether "
    "in April and May?"
)
gold = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "Natalia sold 48+24 = <<48+24=72>>72 clips altogether in April and May.\n"
    "#### 72"
)
print("The gold answer:", gold_answer(gold))
print("The prompt:", REASONING_PROMPT)

# %% [markdown]
# In training the policy writes the completions. Here we do: a group of four.
# Not all of them do what the prompt says.

# %%
completions = {
    "right, well tagged": (
        "<reasoning>\n48 / 2 = 24\n48 + 24 = 72\n</reasoning>\n"
        "<answer>\n72\n</answer>"
    ),
    "right, on one line": (
        "<reasoning>48 + 24 = 72</reasoning> <answer>72</answer>"
    ),
    "wrong, well tagged": (
        "<reasoning>\n48 / 2 = 24\n</reasoning>\n<answer>\n24\n</answer>"
    ),
    "right, no tags": "48 + 24 = 72, so the answer is 72.",
}

# %% [markdown]
# ## What the five parts pay
#
# Our reward has five parts, from the shared module `rewards`. Their idea and
# sizes come from William Brown's GRPO demo for GSM8K (2025).
#
# - **correctness**, 2.0: the number in the answer tags equals the gold;
# - **integer**, 0.5: it is a whole number, as the gold is;
# - **strict format**, 0.5: each tag on a line of its own, and nothing else;
# - **soft format**, 0.5: both blocks in order, with text around allowed;
# - **tag count**, up to 0.5: an eighth for each tag that stands once, minus
#   0.001 for each character after the last tag.
#
# The reward of a completion is the sum, between 0 and 4.

# %%
from grpo_lab import figures
from rewards import FIVE_PART

figures.reward_table(completions, gold, FIVE_PART)

# %% [markdown]
# Read it line by line:
#
# - the first has everything;
# - the second lacks the line breaks, which only the strict part asks for;
# - the third is wrong, and its form still pays: that is the ladder on which a
#   policy climbs before it can solve anything;
# - the fourth is right and earns nothing, because it is not where the prompt
#   asked for it.
#
# A reward function has TRL's signature: a list of completions and the columns
# of the data set go in, one number for each completion comes out.

# %%
import torch

texts = list(completions.values())
golds = [gold] * len(texts)
parts = [part(texts, answer=golds) for part in FIVE_PART]
rewards = torch.tensor(parts).sum(dim=0)
print(rewards)

# %% [markdown]
# ## From rewards to advantages
#
# Is 2.0 much? It depends on what the others got. So GRPO compares with the
# group. First it subtracts the mean.

# %%
deviations = rewards - rewards.mean()
print(f"mean       {rewards.mean():.3f}")
print("deviations", deviations, f"sum {deviations.sum():.3f}")

# %% [markdown]
# Then it divides by the spread, the standard deviation, so that a group with
# small differences counts like one with large ones. There are two standard
# deviations: one divides the sum of squares by the number of completions, the
# other, `torch.std`, by one less. TRL takes the second, and adds 0.0001 so
# that it never divides by 0. (We prove both below.)

# %%
squares = deviations.square().sum()
population = (squares / 4).sqrt()
spread = (squares / 3).sqrt()
assert torch.isclose(spread, rewards.std())
print(f"divided by 4: {population:.3f}, by 3: {spread:.3f}")

advantages = deviations / (spread + 1e-4)
for name, advantage in zip(completions, advantages, strict=True):
    print(f"{advantage:+.3f}  {name}")

# %% [markdown]
# The four advantages add up to 0: some completions get likelier, the others
# less likely. Look at the last two. The wrong answer in tags is pushed down a
# little, and the right answer without tags is pushed down most. **A policy
# learns what is paid, not what you meant.**
#
# What if all four earn the same?


# %%
def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


assert torch.allclose(group_advantages(rewards), advantages)
even = torch.tensor([2.0, 2.0, 2.0, 2.0])
print(group_advantages(even))

# %% [markdown]
# Nothing stands out, all advantages are 0, and the group teaches nothing. It
# does not matter whether all were wrong or all were right: too hard and too
# easy a question are both wasted. In the lessons that train this is the curve
# "groups without spread".

# %% [markdown]
# ## From advantages to a loss
#
# Now the policy has to make the good completions likelier. It writes token by
# token, and each token had some probability. Say these are its logarithms for
# our four completions; 0 would be certain. To keep them short, the completions
# have 6, 3, 5 and 2 tokens.

# %%
logps = [
    torch.tensor([-0.1, -0.3, -0.2, -0.1, -0.2, -0.4]),
    torch.tensor([-0.5, -0.2, -0.3]),
    torch.tensor([-0.2, -0.1, -0.6, -0.3, -0.1]),
    torch.tensor([-0.4, -0.9]),
]
for row in logps:
    row.requires_grad_()
lengths = [len(row) for row in logps]

# %% [markdown]
# For each token GRPO takes the **ratio** of its probability now to that when
# it was written, times the advantage of its completion. The loss is minus the
# sum, divided by the number of all tokens, so that each token weighs the same.
# (Here they are those of one group; in training, of all groups in a step.)
# That division is called DAPO
# ([Yu et al., 2025](https://arxiv.org/abs/2503.14476)).


# %%
def dapo_loss(logps: list, advantages: torch.Tensor) -> torch.Tensor:
    gain = 0.0
    for row, advantage in zip(logps, advantages, strict=True):
        written = row.detach()  # the same numbers, as constants
        ratio = torch.exp(row - written)
        gain = gain + (ratio * advantage).sum()
    return -gain / sum(len(row) for row in logps)


loss = dapo_loss(logps, advantages)
print(f"loss {loss.item():.3f}")

# %% [markdown]
# Each completion is learned from once, right after it was written. The policy
# has not changed in between, so every ratio is 1. (GRPO also clips ratios
# that leave the range from 0.8 to 1.2. At 1 that does nothing. The paper also
# takes off a penalty, beta times the KL divergence, for moving away from the
# base model. TRL leaves it out.)
#
# All of this is what TRL does by default:

# %%
from trl import GRPOConfig

meanings = {
    "scale_rewards": "divide by the spread of the group",
    "loss_type": "divide by the number of all tokens",
    "num_iterations": "how often each completion is learned from",
    "epsilon": "how far from 1 a ratio may be before it is clipped",
    "beta": "weight of the KL penalty",
}
for name, meaning in meanings.items():
    default = GRPOConfig.__dataclass_fields__[name].default
    print(f"{name:14} = {default!s:5}  {meaning}")

# %% [markdown]
# ## Why the loss is near 0, and learning still happens
#
# With all ratios at 1 the log-probabilities drop out of the *value* of the
# loss. What remains is advantage times length. Our lengths differ a lot, so
# our loss is well off 0. Let us change one thing at a time and look at the
# loss, and at the size of its gradient with respect to the log-probabilities.


# %%
def loss_and_gradient(logps: list) -> tuple[float, float]:
    rows = [row.detach().requires_grad_() for row in logps]
    loss = dapo_loss(rows, advantages)
    gradients = torch.autograd.grad(loss, rows)
    return loss.item(), torch.cat(gradients).norm().item()


cases = {
    "as above": logps,
    "log-probabilities times ten": [10 * row for row in logps],
    "all cut to two tokens": [row[:2] for row in logps],
    "the lengths reversed": logps[::-1],
}

# %% [markdown]
# The last one gives each completion the log-probabilities of another, so that
# the worst one is the longest.

# %%
import pandas as pd

looked_at = pd.DataFrame(
    [(name, *loss_and_gradient(rows)) for name, rows in cases.items()],
    columns=["case", "loss", "size of the gradient"],
)
looked_at["loss"] = looked_at["loss"].round(6) + 0.0  # no -0.000
figures.table(looked_at, {"loss": "{:.3f}", "size of the gradient": "{:.3f}"})

# %% [markdown]
# - The loss does not notice how sure the policy is.
# - With equal lengths it is 0, since the advantages add up to 0. In training
#   good and bad completions are often about equally long, and over many groups
#   the differences even out. So it is near 0.
# - Else its sign tells whether the better completions were the longer ones
#   (below 0) or the shorter ones (above 0). It does not tell how good they
#   were.
# - The gradient is not 0 in any of them. **It is what trains, and the loss
#   is no sign of progress.** Watch the reward.
#
# How can that be, if every ratio is 1? The ratio *is* 1 now, but it grows as
# soon as its token gets likelier: the denominator stays what it was. In the
# code that is `detach`. So the ratio has a slope, and the slope is 1: what is
# left in the gradient is the advantage.
#
# Here is the gradient that autograd finds, for the first token of each
# completion. All its other tokens have the same.

# %%
loss.backward()
tokens = sum(lengths)
for row, advantage in zip(logps, advantages, strict=True):
    by_hand = -advantage / tokens
    assert torch.allclose(row.grad, by_hand.expand(len(row)))
    print(f"{row.grad[0]:+.4f}, and by hand {by_hand:+.4f}")

# %% [markdown]
# Minus the advantage, divided by the number of tokens. A step *against* the
# gradient makes every token of a good completion likelier, and every token of
# a bad one less likely, also the tokens that were not to blame.
#
# To see it learn, take the smallest policy that there is: it can only say our
# four completions, each as one token, and begins with a chance of 1/4 for
# each. To keep it simple its group always holds each completion once.

# %%
scores = torch.zeros(4, requires_grad=True)
history = []
for step in range(11):
    logp = scores.log_softmax(dim=0)
    loss_now = dapo_loss(list(logp[:, None]), advantages)
    chances = logp.exp().detach()
    history.append(
        {
            "step": step,
            "loss": round(loss_now.item(), 6) + 0.0,
            "mean reward": (chances * rewards).sum().item(),
            "chance of the best": chances[0].item(),
        }
    )
    (gradient,) = torch.autograd.grad(loss_now, scores)
    scores = (scores - 2 * gradient).detach().requires_grad_()

# %% [markdown]
# The loss stays at 0 at every step, and the policy learns.

# %%
learned = pd.DataFrame(history)
formats = dict.fromkeys(learned.columns[1:], "{:.3f}")
figures.table(learned[::2], formats)

# %% [markdown]
# ## Does TRL compute the same?
#
# Formulas in a lesson are easily wrong. So we let TRL do it. A real
# `GRPOTrainer` with a small embedded model rolls out four completions of a
# few tokens, and a reward function pays them our four numbers, whatever they
# say. Which advantages does it give?

# %%
from grpo_lab import trl_reference

theirs = torch.tensor(trl_reference.advantages(rewards.tolist()))
print("TRL ", theirs)
print("ours", advantages)

advantage_gap = (theirs - advantages).abs().max().item()
assert advantage_gap < 1e-6
assert (theirs - deviations / (population + 1e-4)).abs().max() > 0.1
assert trl_reference.advantages(even.tolist()) == [0.0, 0.0, 0.0, 0.0]

# %% [markdown]
# They differ by less than a millionth, and the other standard deviation would
# have been off by more than a tenth. Now TRL's own loss code, on our
# log-probabilities and advantages.

# %%
their_loss = trl_reference.loss(
    [row.tolist() for row in logps], advantages.tolist()
)
loss_gap = abs(their_loss.value - loss.item())
gradient_gap = max(
    (torch.tensor(their_row) - row.grad).abs().max().item()
    for their_row, row in zip(their_loss.gradients, logps, strict=True)
)
assert loss_gap < 1e-6 and gradient_gap < 1e-6
print(f"TRL {their_loss.value:.6f}, ours {loss.item():.6f}")
print("The gradients agree to 1e-6, too.")

# %% [markdown]
# ## Attack the reward
#
# Whatever is paid gets likelier, and a cheat is no exception. So look for
# them first. Here are completions that cheat, behind three honest ones to
# compare with. All are for the same question.

# %%
from rewards.published import FIVE_PART_AS_PUBLISHED


def tagged(reasoning: str, answer: str) -> str:
    return (
        f"<reasoning>\n{reasoning}\n</reasoning>\n"
        f"<answer>\n{answer}\n</answer>\n"
    )


steps = "48 / 2 = 24\n48 + 24 = 72"
right = tagged(steps, "72")
honest = {
    "honest, two lines": right,
    "honest, one line": tagged("48 + 48 / 2 = 72", "72"),
    "honest, but wrong": tagged("48 / 2 = 24\n48 - 24 = 24", "24"),
}

# %% [markdown]
# The cheats. Some have the right answer and some do not. None is what the
# prompt asked for.

# %%
cheats = {
    "empty reasoning": tagged("", "72"),
    "tag spam": "<reasoning></reasoning><answer></answer>\n" * 4,
    "hedged answer": tagged(steps, "24 or 72 or 96"),
    "copied placeholder": tagged("...", "..."),
    "bare number": "72",
    "answer stuffing": (
        "<reasoning>\nI guess.\n</reasoning>\n<answer>\n24\n</answer>\n"
        "<answer>\n96\n</answer>\n<answer>\n72\n</answer>\n"
    ),
    "swapped tags": (
        f"<answer>\n72\n</answer>\n<reasoning>\n{steps}\n</reasoning>\n"
    ),
    "very long tail": right + "Is that all? " * 250,
    "unclosed reasoning": (f"<reasoning>\n{steps}\n<answer>\n72\n</answer>\n"),
}

# %% [markdown]
# They are judged by two sets of five parts. *As published* computes what the
# set of 2025 does, faults and all, and is kept in `rewards.published` to
# compare with. *Ours* is meant for the same and reads more carefully. Each
# text that has tags ends with a newline, because the published set wants one.

# %%
sets = {"as published": FIVE_PART_AS_PUBLISHED, "ours": FIVE_PART}
totals = figures.reward_totals(honest | cheats, gold, sets)
figures.reward_totals_table(totals)

# %% [markdown]
# In the figure, a mark to the right of the dotted line of its colour is paid
# more than the honest solution in two lines.

# %%
figures.reward_totals_figure(totals)

# %% [markdown]
# What the numbers say:
#
# - **Empty reasoning** is paid by both sets like the best honest solution: no
#   part of either reads the reasoning. The published set even pays it more
#   than the solution in two lines.
# - **Swapped tags** and **unclosed reasoning** get nearly as much from the
#   published set as the honest solution, and the **bare number** not much
#   less. That set takes an answer block wherever it stands, and the whole
#   text where there is none. Ours takes the answer only where the prompt
#   wants it, and pays these three less than half a point.
# - **Hedged answer** and **copied placeholder** fool neither. Ours still pays
#   1.5 for their form, and the published set less: here it does better.
# - **Tag spam** gets nothing from ours, and a third of a point from the
#   published set.
# - **Answer stuffing** gets 2.75 from both, because both take the last block.
#   That is no free guess: only one block counts, and most of what the form
#   pays is lost.
# - The **very long tail** makes a right answer worth less than nothing in the
#   published set. In ours it costs one point and no more, so it says "stop
#   here" less loudly to a policy that already talks too long.
#
# Why does the published set pay two lines of reasoning less than one?

# %%
some = ["honest, two lines", "honest, one line", "empty reasoning"]
figures.reward_table(
    {name: (honest | cheats)[name] for name in some},
    gold,
    FIVE_PART_AS_PUBLISHED,
)

# %% [markdown]
# Its strict pattern allows one line of reasoning, full or empty, and its soft
# pattern allows no line break at all. So one completion can't earn both, and
# reasoning over two lines earns neither. In ours all five parts can be earned
# at once.

# %% [markdown]
# ## Ask for reasoning
#
# Empty reasoning earns the form like any other. The recipe that
# [lesson 2](02_first_grpo_run.ipynb) follows advises to reward the format only
# where something is thought. The format rewards have an option for that,
# `min_reasoning`, the least number of characters between the tags; it is off
# unless you set it.

# %%
from rewards import soft_format_reward, strict_format_reward, with_options

formats = (strict_format_reward, soft_format_reward)
asking = [
    with_options(part, min_reasoning=10) if part in formats else part
    for part in FIVE_PART
]
asked = figures.reward_totals(
    {name: (honest | cheats)[name] for name in some},
    gold,
    {"ours": FIVE_PART, "ours, 10 characters": asking},
)
figures.reward_totals_table(asked)

# %% [markdown]
# Empty reasoning loses the whole point of the two format rewards, and the
# honest solutions lose nothing. It is a bar for laziness and no more: ten
# characters of anything pass it.

# %% [markdown]
# ## Your own cheat
#
# Change the text, run the cells again, and try to beat the honest solution
# without solving anything. The example lets the reward do the sum.

# %%
my_cheat = tagged("Clips from April, clips from May.", "48 + 24")

mine = figures.reward_totals({"my cheat": my_cheat}, gold, sets)
figures.reward_totals_table(mine)

# %%
honesty = totals.set_index("completion").loc["honest, two lines"]
for name in sets:
    more = mine[name].item() - honesty[name]
    print(f"{name}: your cheat gets {more:+.2f} against the honest solution")

# %% [markdown]
# An unsolved sum is no number, so both sets pay its form only. Above 0 you
# have won. In the figure you saw a text that does in the published set, the
# one with empty reasoning. In ours 4 is the most, so a cheat can draw level
# and not win.

# %% [markdown]
# ## Your own reward
#
# A reward of yours is one function with three arguments: the question, the
# gold as it stands in the data, and one completion. This one pays 1 for the
# right answer in tags and takes a little off for each character, so that
# short solutions win.


# %%
def reward(question, answer, completion):
    gold = answer.split("####")[-1].strip()
    _, opened, rest = completion.rpartition("<answer>")
    given, closed, _ = rest.partition("</answer>")
    if not (opened and closed) or given.strip() != gold:
        return 0.0
    return max(0.0, 1.0 - 0.0002 * len(completion))


for name, text in completions.items():
    print(f"{reward(question, gold, text):.3f}  {name}")

# %% [markdown]
# Two more that people ask for, here with TRL's own signature: a list of
# completions in, a list of numbers out. The first counts the steps of the
# reasoning, the second wants the unit to be named.


# %%
def number_of_steps(completions, **kwargs):
    """0.1 for each line that computes something, 0.3 at most."""
    counts = [text.partition("<answer>")[0].count("=") for text in completions]
    return [0.1 * min(3, count) for count in counts]


def names_the_unit(completions, unit="clips", **kwargs):
    """0.25 where the answer names the unit."""
    answers = [text.partition("<answer>")[2] for text in completions]
    return [0.25 * (unit in answer) for answer in answers]


with_unit = {
    "two steps": right,
    "two steps, with the unit": right.replace("\n72\n", "\n72 clips\n"),
    "a cheat": tagged("1 = 1 = 1 = 1", "clips"),
}
figures.reward_table(
    with_unit, gold, [number_of_steps, names_the_unit, FIVE_PART[0]]
)

# %% [markdown]
# The last row shows the weakness of both: they look at the surface, and the
# surface can be had for nothing. Keep such rewards small beside the one for
# being right. (`72 clips` is right, too: the grader reads the unit.)
#
# Four texts prove little. `check_reward` takes rows of the data, builds right
# and wrong completions from their golds, and judges what the reward makes of
# them. Each line that it prints is one check: its name, yes or NO, and what
# it saw. It writes the right answers in several forms (our tags, other tags,
# a box, plain text) and judges by the form that the reward pays best, which
# it names at the top. Our rows are the question above and eleven problems in
# GSM8K's form from the embedded generator.

# %%
from grpo_lab import data
from rewards import check_reward

splits = data.load_splits("pocket", train_rows=11, eval_rows=1)
rows = [{"question": question, "answer": gold}]
rows += splits.train.select_columns(["question", "answer"]).to_list()

verdicts = check_reward(reward, rows)
assert verdicts.passed
print(verdicts)

# %% [markdown]
# Nothing fails. The best paid form is the shortest with an answer block: its
# opening `<think>` stands in the prompt, as some models want it. But how would
# you attack this reward?

# %%
print(f"{reward(question, gold, '<answer>72</answer>'):.3f}")

# %% [markdown]
# No reasoning at all pays more than any of our four. We paid for short, and
# would get it. Now a sloppy reward that looks reasonable: the right number has
# to be in the text.


# %%
def sloppy(question, answer, completion):
    return float(answer.split("####")[-1].strip() in completion)


for name, text in completions.items():
    print(f"{sloppy(question, gold, text):.3f}  {name}")

# %% [markdown]
# On our four it is perfect, also for the right answer without tags. And on
# the check?

# %%
verdicts = check_reward(sloppy, rows)
failed = [verdict.name for verdict in verdicts.failures]
assert not verdicts.passed
print(verdicts)

# %% [markdown]
# Four verdicts are NO, each with a completion that shows it and what to do:
#
# - **not for wrong**: in every row a wrong number such as 172 is paid, since
#   72 stands in it;
# - **not for swapped**: in one row the answer of another row is paid, for the
#   same reason: 72 where 7 is right;
# - **not for truncated**: a text that breaks off in the middle of the reasoning
#   is paid, if the number has come up by then;
# - **not for a hedge**: a list of answers is paid if it holds the right one,
#   so the longest list pays best.
#
# The rest is fine: it returns numbers, the same ones each time, and fast.
#
# Last, the two sets that you attacked. A list of functions is judged by its
# sum, as a trainer adds it up.

# %%
set_failures = {}
for name, parts in sets.items():
    found = check_reward(list(parts), rows)
    set_failures[name] = [verdict.name for verdict in found.failures]
    print(f"{name}: {len(found.rows)} checks, failed: {set_failures[name]}")

# %% [markdown]
# Both pass, also the one that pays empty reasoning more than an honest
# solution. The check asks for the form that a reward likes best, and there
# the published set does tell right from wrong. It can't know what *you* would
# call a cheat. **Check first, then attack by hand.**

# %% [markdown]
# ## Exercises
#
# A solution stands right below each task: cover it and try first. The cell
# after it checks yours too, if you take the same names.
#
# **1. Does the size of a reward matter?** (5 minutes, easy). In a group of
# eight, one completion earns 4.0 and seven earn 2.0. What are their advantages
# (`large`)? And if the one earns 0.1 and the seven nothing (`small`)? Guess
# first.

# %% tags=["solution"]
large = group_advantages(torch.tensor([4.0] + [2.0] * 7))
small = group_advantages(torch.tensor([0.1] + [0.0] * 7))
print(f"large: {large[0]:+.3f} for the one, {large[1]:+.3f} for the others")
print(f"small: {small[0]:+.3f} for the one, {small[1]:+.3f} for the others")

# %%
assert torch.allclose(large, small, atol=0.01)
assert large[0] > 6 * large[1].abs(), "the rare success counts most"

# %% [markdown]
# Nearly the same. Within a group only the proportions count, and a rare
# success gets a strong push. So does a rare accident: if the one differs only
# by 0.1 for a tag, it is pushed as hard as for a right answer.
#
# **2. The loss of the GRPO paper** (10 minutes, medium). The paper divides
# differently: first each completion's sum by its own length, then the mean
# over the completions. Write it as `grpo_loss(logps, advantages)`. What is its
# value for our group (`paper`), and why? And its gradient? Take it for
# `again`, a fresh copy of `logps`. TRL has this loss as `loss_type="grpo"`.


# %% tags=["solution"]
def grpo_loss(logps: list, advantages: torch.Tensor) -> torch.Tensor:
    gains = [
        (torch.exp(row - row.detach()) * advantage).mean()
        for row, advantage in zip(logps, advantages, strict=True)
    ]
    return -torch.stack(gains).mean()


again = [row.detach().requires_grad_() for row in logps]
paper = grpo_loss(again, advantages)
paper.backward()
print(f"loss {round(paper.item(), 6) + 0.0:.3f}; for each token:")
for new, old, name in zip(again, logps, completions, strict=True):
    print(f"{new.grad[0]:+.4f}, above {old.grad[0]:+.4f}  {name}")

# %%
their_paper = trl_reference.loss(
    [row.tolist() for row in logps], advantages.tolist(), loss_type="grpo"
)
assert abs(paper.item()) < 1e-6
assert abs(their_paper.value - paper.item()) < 1e-6
for their_row, row in zip(their_paper.gradients, again, strict=True):
    assert torch.allclose(torch.tensor(their_row), row.grad, atol=1e-6)

# %% [markdown]
# It is 0, whatever the lengths: each completion weighs the same, and the
# advantages add up to 0. But with the same advantage a token of a short
# completion now gets a larger push than one of a long completion. Compare the
# last one, which has two tokens, with its gradient above, and the first, which
# has six.
#
# **3. Mend the sloppy reward** (10 minutes, medium). Change `sloppy` so that
# nothing fails and the right answer without tags is still paid, and call it
# `mended`. The module `rewards` helps: `extract_answer(text,
# policy="flexible")` is the answer in a text, with or without tags, or None
# (its *policy* is a rule, not a model); `parse_number(text)` and
# `gold_number(gold)` are the numbers in an answer and in a gold.

# %% tags=["solution"]
from rewards import extract_answer, gold_number, parse_number


def mended(question, answer, completion):
    given = extract_answer(completion, policy="flexible")
    number = parse_number(given or "")
    # Without the first half two that can't be read would be equal: both None.
    return float(number is not None and number == gold_number(answer))


# %%
assert check_reward(mended, rows).passed
paid = [mended(question, gold, text) for text in completions.values()]
assert paid == [1.0, 1.0, 0.0, 1.0]
print("Nothing fails, and the right answer without tags is paid.")

# %% [markdown]
# ## Recap
#
# - A reward is a number for each completion; ours has five parts, up to 4.
# - Advantages compare within the group. A group without spread teaches
#   nothing.
# - The loss says whether the better completions were longer. What trains is
#   its gradient.
# - Attack a reward by hand, and check it on your data, before you train on
#   it.
#
# **Next**: a policy learns from two rewards, everything visible, in
# [2. A first GRPO run](02_first_grpo_run.ipynb); from these five parts in
# [3. A grid search](03_grid_search.ipynb). Symptoms and their fixes are in
# [TROUBLESHOOTING.md](../TROUBLESHOOTING.md).

# %% [markdown]
# ## Results
#
# The last cell writes the numbers that this text relies on to
# `results.json`, where the tests read them.

# %%
from grpo_lab.files import write_json

summary = {
    "lesson": "01_rewards",
    "profile": profile.name,
    "machine": environment.machine(),
    "rewards": dict(zip(completions, rewards.tolist(), strict=True)),
    "advantages": dict(zip(completions, advantages.tolist(), strict=True)),
    "losses": looked_at.to_dict("records"),
    "learning": history,
    "difference_from_trl": {
        "advantages": advantage_gap,
        "loss": loss_gap,
        "gradient": gradient_gap,
    },
    "totals": totals.drop(columns="text").to_dict("records"),
    "failed_checks": {"sloppy": failed, **set_failures},
}
write_json(output_dir / "results.json", summary)
print(f"Written: {output_dir / 'results.json'}")
