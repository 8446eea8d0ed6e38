"""Train the pocket models from nothing: `python -m tools.pocket_train`.

Supervised training on the endless corpus of `pocket_corpus.py`, with the loss
on completions and on the right sides of bare equations. Writes weights
(safetensors, 16 bit), tokenizer, chat template and a `training.json` with
the settings, the losses and the time.
"""

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grpo_lab.pocket import WEIGHTS_DIR
from grpo_lab.prompts import messages
from tools import pocket_corpus as corpus

TAGS = (
    "<reasoning>", "</reasoning>", "<think>", "</think>",
    "<answer>", "</answer>",
)  # fmt: skip

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_TEMPLATE = (
    "<|begin_of_text|>{% for message in messages %}<|start_header_id|>"
    "{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant"
    "<|end_header_id|>\n\n{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """What it takes to make one pocket model.

    Sizes are in tokens and hidden units; `warmup` and `steps` in optimiser
    steps of `batch_size` examples.
    """

    name: str
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    seed: int
    vocab_size: int = 512
    batch_size: int = 64
    steps: int = 1000
    warmup: int = 60
    learning_rate: float = 3e-3
    weight_decay: float = 0.05


RECIPES = {
    "pocket-qwen": Recipe(
        name="pocket-qwen",
        family="qwen2",
        hidden_size=192,
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        intermediate_size=512,
        seed=11,
    ),
    "pocket-llama": Recipe(
        name="pocket-llama",
        family="llama",
        hidden_size=256,
        num_layers=3,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=640,
        seed=12,
    ),
}


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that splits numbers into digits.

    The tags are one token each but not special, so that decoding keeps
    them. The special tokens are those of the model family's chat template.
    """
    special = {
        "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "llama": [
            "<|pad|>",
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ],
    }[recipe.family]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size - len(TAGS),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        text
        for example in islice(corpus.examples(recipe.seed), 4000)
        for text in (
            example.system_prompt,
            example.question,
            example.completion,
            "system user assistant",
        )
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens(list(TAGS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|begin_of_text|>" if recipe.family == "llama" else None,
        eos_token=special[-1],
        pad_token=special[0],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = (
        LLAMA_TEMPLATE if recipe.family == "llama" else CHATML_TEMPLATE
    )
    return tokenizer


def build_model(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    """A freshly initialised model, float32, of the recipe's shape."""
    torch.manual_seed(recipe.seed)
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[recipe.family]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model_class(config)


Row = tuple[list[int], list[int]]
"""Token ids, and labels: the same ids, or -100 where nothing is learned."""


def encode(example: corpus.Example, tokenizer: PreTrainedTokenizerFast) -> Row:
    """A conversation; only its completion is learned."""
    prompt = tokenizer.apply_chat_template(
        messages(example.question, example.system_prompt),
        tokenize=False,
        add_generation_prompt=True,
    )
    completion = example.completion + tokenizer.eos_token
    return _row([(prompt, completion)], tokenizer)


def encode_drill(
    page: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> Row:
    """A page of equations; only their right sides are learned."""
    return _row([(left, f"{right}\n") for left, right in page], tokenizer)


def _row(
    parts: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast
) -> Row:
    ids, labels = [], []
    for given, learned in parts:
        before = tokenizer.encode(given, add_special_tokens=False)
        after = tokenizer.encode(learned, add_special_tokens=False)
        ids += before + after
        labels += [-100] * len(before) + after
    return ids, labels


def rows(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[Row]:
    """Endless rows of the corpus: conversations and pages of equations."""
    rng = random.Random(recipe.seed)
    conversations = corpus.examples(recipe.seed + 1000)
    pages = corpus.drills(recipe.seed + 2000)
    while True:
        if rng.random() < corpus.DRILL_SHARE:
            yield encode_drill(next(pages), tokenizer)
        else:
            yield encode(next(conversations), tokenizer)


def batches(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast
) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches, right-padded; labels are -100 on padding too."""
    stream = rows(recipe, tokenizer)
    while True:
        batch = list(islice(stream, recipe.batch_size))
        width = max(len(ids) for ids, _ in batch)
        shape = (recipe.batch_size, width)
        input_ids = torch.full(shape, tokenizer.pad_token_id)
        labels = torch.full(shape, -100)
        for at, (ids, targets) in enumerate(batch):
            input_ids[at, : len(ids)] = torch.tensor(ids)
            labels[at, : len(ids)] = torch.tensor(targets)
        # Padding stands behind the text, so causal attention never sees it.
        yield {"input_ids": input_ids, "labels": labels}


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    wave = 0.5 * (1 + math.cos(math.pi * done))
    return recipe.learning_rate * (0.05 + 0.95 * wave)


def train(recipe: Recipe, output_dir: Path) -> dict:
    """Train one pocket model and save it.

    Args:
        recipe: which model, and how long.
        output_dir: a directory to write to; made if missing.

    Returns:
        The record that is also written to `training.json`: the recipe, the
        number of parameters, `seconds`, and the loss in nats per token every
        hundred steps.
    """
    tokenizer = build_tokenizer(recipe)
    model = build_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(0.9, 0.98),
        weight_decay=recipe.weight_decay,
    )
    losses, started = {}, time.monotonic()
    for step, batch in enumerate(
        islice(batches(recipe, tokenizer), recipe.steps)
    ):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = step == recipe.steps - 1
        if step % 100 == 0 or last:
            losses[step] = round(loss.item(), 4)
            seconds = round(time.monotonic() - started)
            print(f"{recipe.name} {step:5d} {loss:.4f} {seconds:6d} s")
        if step % 200 == 199 or last:
            record = {
                "recipe": asdict(recipe),
                "parameters": model.num_parameters(),
                "steps_done": step + 1,
                "threads": torch.get_num_threads(),
                "seconds": seconds,
                "loss": losses,
            }
            save(model, tokenizer, record, output_dir)
    return record


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    record: dict,
    output_dir: Path,
) -> None:
    """Write weights in 16 bit, tokenizer and record to `output_dir`."""
    tokenizer.save_pretrained(output_dir)
    half = copy.deepcopy(model).to(torch.float16)
    half.save_pretrained(output_dir)
    text = json.dumps(record, indent=1) + "\n"
    (output_dir / "training.json").write_text(text)


def main() -> None:
    """Command line: which models, how many steps, where to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(RECIPES))
    parser.add_argument("--output", type=Path, default=WEIGHTS_DIR)
    arguments = parser.parse_args()
    for name in arguments.models:
        train(RECIPES[name], arguments.output / name)


if __name__ == "__main__":
    main()
