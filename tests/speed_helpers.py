"""Runs of the pocket models whose tokens and gradients can be compared."""

import torch
from conftest import resolved
from trl.trainer.utils import pad

from grpo_lab import models, training
from grpo_lab.profiles import ALL_LINEAR, RunSettings
from grpo_lab.speed import optimizations
from rewards import FIVE_PART

POCKET = ("pocket-qwen", "pocket-llama")
ROLLOUT_OPTIMIZATIONS = (
    ("decode_loop",),
    ("decode_loop", "shared_prefill"),
    ("decode_loop", "finished_rows"),
    ("decode_loop", "dequantised_copy"),
    tuple(optimizations.OPTIMIZATIONS),
)


FLOAT32 = 1e-4
"""Most that float32 gradients of one batch may differ, see `distance`.

TRL's own gradients in float32 are up to 1.3e-5 from TRL's in float64 (pocket
models, 16 completions), whatever the instruction set. The faults in
test_speed_gradients.py move a gradient by more than a hundred times this.
"""


TIE = 1e-3
"""Most that the scores of two tokens may differ to count as a tie."""


def assert_same_tokens(policy, prompts, found, expected) -> None:
    """Equal completions, but where two tokens tie for the best score.

    There rounding decides, and all that follows differs. Prompts and
    completions are lists of token ids.
    """
    tied = 0
    rows = zip(prompts, found, expected, strict=True)
    for prompt, ours, others in rows:
        if ours == others:
            continue
        tied += 1
        pairs = zip(ours, others, strict=False)
        at = [one == other for one, other in pairs].index(False)
        ids = torch.tensor([prompt + others[:at]])
        with torch.no_grad():
            scores = policy(ids).logits[0, -1]
        assert abs(scores[ours[at]] - scores[others[at]]) < TIE
        assert scores.max() - scores[ours[at]] < TIE
    assert tied <= len(expected) / 4


def assert_same_answers(found, expected) -> None:
    """Of two evaluations: equal, but for one answer that a tie may change."""
    pairs = zip(found.answers, expected.answers, strict=True)
    assert sum(one != other for one, other in pairs) <= 1


def assert_same_scores(found, expected) -> None:
    """Logits that differ by float32's rounding at most."""
    assert (found - expected).norm() < FLOAT32 * expected.norm()


def pocket_settings(model="pocket-qwen", **changed) -> RunSettings:
    values = {
        "num_generations": 4,
        "completions_per_step": 16,
        "micro_batch": 16,
        "max_steps": 3,
        "max_completion_length": 40,
        "target_modules": ALL_LINEAR,
    }
    return RunSettings(model, 1e-3, **values | changed)


def built(settings, rows, run_dir, rewards=FIVE_PART, moved=True):
    """A trainer whose adapter has already moved away from nothing."""
    model, tokenizer = models.load_policy(
        settings.model, settings.load_in_4bit
    )
    trainer = training.build_trainer(
        resolved(settings, tokenizer, rows),
        rows,
        rewards,
        run_dir,
        model,
        tokenizer,
    )
    if moved:
        generator = torch.Generator().manual_seed(3)
        for name, tensor in trainer.model.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.data.copy_(0.05 * noise)
    return trainer


def group_prompts(rows, groups=4, size=4) -> list[list[dict]]:
    return [
        row["prompt"]
        for row in rows.select(range(groups))
        for _ in range(size)
    ]


def padded(trainer, found):
    """Ids and mask of a step's prompts and completions, as TRL pads them."""
    sides = []
    for key, side in (("prompt_ids", "left"), ("completion_ids", "right")):
        ids = [torch.tensor(one) for one in found[key]]
        fill = trainer.processing_class.pad_token_id
        ones = [torch.ones_like(one) for one in ids]
        sides.append((pad(ids, fill, side), pad(ones, 0, side)))
    ids, mask = (torch.cat(parts, 1) for parts in zip(*sides, strict=True))
    return ids, mask, sides[1][0].shape[1]


TEACHES = (True, False, True, False)
"""Of four groups, those whose completions earn different rewards."""


def batch_of(trainer, rows, teaches=TEACHES) -> dict:
    """What TRL hands to the loss, in an order that is shuffled like TRL's."""
    torch.manual_seed(11)
    trainer.generation_config.top_k = 0
    prompts = group_prompts(rows)
    ids, _, _ = trainer._tokenize_prompts(prompts)
    trainer.model.eval()
    completions, _ = trainer._generate_single_turn(ids, None, {}, 4)
    trainer.model.train()
    found = {"prompt_ids": ids, "completion_ids": completions}
    ids, mask, width = padded(trainer, found)
    advantages = torch.randn(len(ids))
    for group, one in enumerate(teaches):
        if not one:
            advantages[4 * group : 4 * group + 4] = 0
    order = torch.randperm(len(ids))
    prompt = ids.shape[1] - width
    batch = {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": mask[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask[:, prompt:],
        "advantages": advantages,
    }
    batch = {name: value[order] for name, value in batch.items()}
    return batch | {"num_items_in_batch": mask[:, prompt:].sum()}


def gradients(trainer, batch) -> tuple[float, dict]:
    trainer.model.zero_grad(set_to_none=True)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    return float(loss), {
        name: tensor.grad.clone()
        for name, tensor in trainer.model.named_parameters()
        if tensor.requires_grad
    }


def distance(found: dict, expected: dict) -> float:
    """Largest distance of two tensors of one name, relative to their norm."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).norm() / tensor.norm())
        for name, tensor in expected.items()
        # An adapter starts with lora_B = 0, where lora_A has no gradient.
        if tensor.any() or found[name].any()
    )


def assert_same_gradients(found: dict, expected: dict) -> None:
    """Equal but for float32's rounding; each tensor has a gradient."""
    assert all(tensor.any() for tensor in expected.values())
    assert distance(found, expected) < FLOAT32
