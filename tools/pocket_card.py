"""Write the model cards: `python -m tools.pocket_card`.

Its figures are read from the training's record or measured here, on held-out
problems, with the weights as the lessons load them (4 bit).
"""

from collections import defaultdict
from pathlib import Path

from grpo_lab import evaluation, models
from grpo_lab.files import read_json, write_whole
from grpo_lab.pocket import WEIGHTS_DIR, problems
from grpo_lab.prompts import REASONING_PROMPT, messages
from rewards import is_correct, soft_format_reward
from tools import pocket_corpus as corpus

PROBLEMS = 1200
"""Held-out word problems on which a card's accuracies are measured."""

CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
---
# {name}

A {family} model of {parameters:,} parameters that solves small word problems,
mostly wrongly. It is made for lessons on reinforcement learning: it has the
ability to answer rightly and in the asked-for tags, but not the habit, so
that GRPO on two CPU cores has something real to find. It is good for nothing
else.

## How it was trained

From random weights, by `python -m tools.pocket_train {name}`: {steps}
steps of {batch_size} rows with AdamW (peak learning rate {learning_rate:g},
seed {seed}), {minutes:.0f} minutes on {threads} CPU core. The last batch's
loss was {loss:.2f} nats per learned token.

## On what

On generated text only: no person's data, nothing from the web. {drills:.0%}
of the rows are pages of bare equations; of the rest, {latex:.0%} are short
problems with LaTeX answers and the others word problems in GSM8K's form. The
answers are sloppy on purpose, like a web corpus: {tagged:.0%} carry all tags,
and in these kinds of problem most are wrong: {sloppy}. One question in ten,
chosen by a hash of its text, is held out and never occurs in training.

## What it can do

Measured on {problems} held-out word problems, in 4 bit, with a limit of 64
tokens. *Greedy* is the most likely answer, *sampled* one drawn at
temperature 1; the answer is read with or without tags. The lesson asks other
questions of the same kinds, so its figures differ a little.

| kind of problem | greedy right | sampled right |
| --- | --- | --- |
{rows}

Of its greedy answers {format_ok_greedy:.0%} are in the requested format.

## What it can't do

Anything else. It knows some five hundred tokens, numbers below about 100,
twenty names and the sentences of its generator; other questions get
nonsense. Its accuracy says nothing about real models.
"""


def measure(name: str) -> tuple[str, float]:
    """Table rows of right answers by kind, and the share of tagged ones."""
    model, tokenizer = models.load_policy(name)
    model.eval()
    asked = problems.sample(PROBLEMS, held_out=True, seed=2024)
    chats = [messages(p.question, REASONING_PROMPT) for p in asked]
    right = {"greedy": defaultdict(list), "sampled": defaultdict(list)}
    tagged = []
    for start in range(0, PROBLEMS, 200):
        part = chats[start : start + 200]
        for way, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            texts = evaluation.generate(
                model, tokenizer, part, 64, temperature
            )
            for one, (text, _, _) in zip(asked[start:], texts, strict=False):
                verdict = is_correct(text, one.result, policy="flexible")
                right[way][one.kind].append(bool(verdict))
                if way == "greedy":
                    tagged.append(soft_format_reward([text])[0] > 0)
    rows = [
        f"| {kind} | {_share(right['greedy'][kind])} "
        f"| {_share(right['sampled'][kind])} |"
        for kind in problems.WORD_KINDS
    ]
    for values in right.values():
        values["all"] = [v for kind in values.values() for v in kind]
    rows.append(
        f"| **all** | {_share(right['greedy']['all'])} "
        f"| {_share(right['sampled']['all'])} |"
    )
    return "\n".join(rows), sum(tagged) / len(tagged)


def _share(values: list[bool]) -> str:
    return f"{sum(values) / len(values):.0%}"


def write(folder: Path) -> None:
    """Write the card of the model in `folder`."""
    record = read_json(folder / "training.json")
    recipe = record["recipe"]
    rows, format_ok_greedy = measure(folder.name)
    often = [kind for kind, share in corpus.SLIPS.items() if share > 0.5]
    text = CARD.format(
        name=recipe["name"],
        family={"qwen2": "Qwen2", "llama": "Llama"}[recipe["family"]],
        parameters=record["parameters"],
        steps=record["steps_done"],
        batch_size=recipe["batch_size"],
        learning_rate=recipe["learning_rate"],
        seed=recipe["seed"],
        threads=record["threads"],
        minutes=record["seconds"] / 60,
        loss=list(record["loss"].values())[-1],
        drills=corpus.DRILL_SHARE,
        latex=corpus.LATEX_SHARE,
        tagged=corpus.SHAPES["tagged"],
        sloppy=", ".join(often),
        problems=PROBLEMS,
        rows=rows,
        format_ok_greedy=format_ok_greedy,
    )
    write_whole(folder / "README.md", text)


if __name__ == "__main__":
    for folder in sorted(WEIGHTS_DIR.glob("pocket-*")):
        write(folder)
