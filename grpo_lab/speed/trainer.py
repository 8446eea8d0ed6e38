"""Everything of `trl.GRPOTrainer` that the optimizations touch.

Three places. Completions come through TRL's `rollout_func`. Rows whose
advantage is 0 are left out in `compute_loss`. And the log-probabilities of a
group are computed with one pass over its prompt, in a method that TRL keeps
to itself. `PINNED_TRL` notes what was read there, and another TRL is refused.
"""

import copy
import hashlib
import inspect
import warnings
from collections.abc import Sequence
from typing import cast

import torch
import trl
from torch import nn
from torch.nn.functional import pad
from transformers import DynamicCache
from trl import GRPOTrainer
from trl.trainer import utils

from grpo_lab.errors import LabError
from grpo_lab.speed import decoding
from grpo_lab.speed.dequantised import DequantisedCopy, generation_model

ENTROPY = "rollouts/entropy"
"""Name under which rollouts log the entropy of all completions.

TRL computes it from the rows of the gradient, of which some may be left out.
"""

PER_TOKEN = ("completion_ids", "completion_mask", "old_per_token_logps")
"""What TRL hands to the loss as completions x their tokens."""

PER_ROW = ("prompt_ids", "prompt_mask", "advantages", *PER_TOKEN)
"""What it hands over with a row for each completion."""

WHOLE_BATCH = ("num_items_in_batch",)
"""What it hands over for the batch as a whole."""


ROWS_TOGETHER = 16
"""Completions of about one length that pass the policy together."""

PINNED_TRL = {
    "_prepare_inputs": "f824e7fb07147956",
    "_generate": "2a27fdf8f5e6f356",
    "_generate_and_score_completions": "1fa48922792dcd5c",
    "_log_metric": "bcd19b9ca1016e3a",
    "_get_per_token_logps_and_entropies": "ea73c3909275851d",
    "_compute_loss": "80295546bbdbf6f7",
    "add_fused_lm_head": "422d009f04b66659",
}
"""The parts of TRL that the optimizations rest on, and a hash of each.

What they take from transformers, its cache, is held by its version alone.
"""


class FastTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with optimizations.

    Args:
        optimizations: names of `optimizations.OPTIMIZATIONS`, those in force.
        options: everything that `trl.GRPOTrainer` takes by name.

    Raises:
        LabError: the installed TRL is not the one that they are for.
    """

    def __init__(self, *, optimizations: Sequence[str], **options) -> None:
        refuse_other_trl()
        self.optimizations = frozenset(optimizations)
        rollouts = Rollouts() if "decode_loop" in optimizations else None
        with warnings.catch_warnings():
            # It may change, so its version is pinned.
            warnings.filterwarnings("ignore", ".*rollout_func")
            super().__init__(rollout_func=rollouts, **options)

    def train(self, *args, **kwargs):
        """TRL's training; the memory of the copy is free after it."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.rollout_func:
                self.rollout_func.copy = None

    def compute_loss(self, model, inputs, *args, **kwargs) -> torch.Tensor:
        """TRL's loss, from the rows that have a gradient."""
        if self._can_omit_rows(inputs):
            used = inputs["advantages"] != 0
            if not used.any():
                return _zero_loss(model)
            inputs = _trimmed(_rows(inputs, used))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _can_omit_rows(self, inputs: dict) -> bool:
        """Whether a row of advantage 0 adds nothing, to the divisor neither.

        The loss called DAPO is divided by the tokens of the whole batch,
        which TRL has counted before; others by those of the rows they see.
        """
        return (
            "zero_advantage" in self.optimizations
            and self.beta == 0
            and self.loss_type == "dapo"
            and self.top_entropy_quantile == 1
            and not self._entropy_bonus_enabled
            and not self.aux_loss_enabled
            and inputs.keys() <= {*PER_ROW, *WHOLE_BATCH}
        )

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        **others,
    ) -> tuple:
        """As TRL's, with one pass over each different prompt."""
        rows, prompt = len(input_ids), input_ids.shape[1] - logits_to_keep
        if self._can_share_prefix(batch_size or rows, rows, prompt, others):
            unique, prompt_index = torch.unique(
                torch.stack([input_ids, attention_mask], -1)[:, :prompt],
                dim=0,
                return_inverse=True,
            )
            if len(unique) < rows:
                with self.accelerator.autocast():
                    log_probs, entropies = _scored(
                        model, input_ids, attention_mask, unique, prompt_index
                    )
                return log_probs, entropies if compute_entropy else None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size,
            compute_entropy, **others,
        )  # fmt: skip

    def _can_share_prefix(
        self, batch_size: int, rows: int, prompt: int, others: dict
    ) -> bool:
        """Whether one pass over a prompt is what TRL's many would be."""
        return (
            "shared_prefix" in self.optimizations
            and batch_size >= rows
            and prompt > 1
            # With it there is no cache.
            and not self.model.is_activation_checkpointing
            # It would strike out the same for the whole group.
            and not any(
                a.lora_dropout for a in self.model.peft_config.values()
            )
            # images and other things that only some models take
            and all(v is None or v is False for v in others.values())
        )


def _scored(
    model: nn.Module,
    ids: torch.Tensor,
    mask: torch.Tensor,
    unique: torch.Tensor,
    prompt_index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of completions, their prompts read once each.

    All tokens of a prompt but the last are read first. Their keys and values
    serve every completion of it, and gradients come back through them.
    Completions of about one length go together, so that there is little
    padding to compute.

    Args:
        model: the policy, with TRL's output layer.
        ids, mask: rows x tokens, prompts padded on the left.
        unique: the different prompts x tokens x (id, mask).
        prompt_index: for each row, which of them is its prompt.

    Returns:
        Log-probabilities and entropies, rows x completion tokens; 0 for
        padding.
    """
    prompt = unique.shape[1]
    read = DynamicCache(config=model.config)
    model(
        input_ids=unique[:, :-1, 0],
        attention_mask=unique[:, :-1, 1],
        cache=read,
        use_cache=True,
        logits_to_keep=1,
    )
    if read.get_seq_length() != prompt - 1:
        raise RuntimeError("The prompts are not in the cache.")
    width = ids.shape[1] - prompt
    lengths = mask[:, prompt:].sum(1)
    order = lengths.argsort(stable=True)
    parts = []
    for rows in order.split(ROWS_TOGETHER):
        end = prompt + int(lengths[rows].max())
        labels = ids[rows, prompt:end].masked_fill(
            mask[rows, prompt:end] == 0, -100
        )
        outputs = model(
            input_ids=ids[rows, prompt - 1 : end - 1],
            attention_mask=mask[rows, : end - 1],
            cache=_selected(read, prompt_index[rows]),
            shift_labels=labels,
            fused_lm_head=True,
        )
        missing = (0, prompt + width - end)
        parts.append(
            [pad(x, missing) for x in (outputs.log_probs, outputs.entropy)]
        )
    back = order.argsort()
    log_probs, entropies = (
        torch.cat(x)[back] for x in zip(*parts, strict=True)
    )
    return log_probs, entropies


def _selected(cache: DynamicCache, indices: torch.Tensor) -> DynamicCache:
    """Some rows of a cache, as a cache of their own."""
    selected = copy.copy(cache)
    selected.layers = [copy.copy(layer) for layer in cache.layers]
    selected.batch_select_indices(indices)
    return selected


def _rows(inputs: dict, which: torch.Tensor) -> dict:
    """Some rows of a batch; what is counted for the whole of it stays."""
    return {
        name: value[which] if name in PER_ROW else value
        for name, value in inputs.items()
    }


def _trimmed(inputs: dict) -> dict:
    """Without the last columns, in which every completion has padding.

    Those before the prompts stay: without them each token would get another
    position, and rounding another result.
    """
    width = int(inputs["completion_mask"].sum(1).max())
    return {
        name: value[:, :width] if name in PER_TOKEN else value
        for name, value in inputs.items()
    }


def _zero_loss(model: nn.Module) -> torch.Tensor:
    """0, whose gradients are zeros too: no gradient would be something else.

    An optimiser passes over a tensor without a gradient, but for one of zeros
    its moments and its weight decay go on.
    """
    trainable = (p for p in model.parameters() if p.requires_grad)
    return cast(torch.Tensor, sum(one.sum() for one in trainable)) * 0.0


class Rollouts:
    """TRL's `rollout_func`: the completions of a step, by our own loop."""

    def __init__(self) -> None:
        self.copy: DequantisedCopy | None = None

    def __call__(
        self, prompts: list[list[dict]], trainer: FastTrainer
    ) -> dict:
        """Completions for some prompts, each group's prompts repeated.

        Returns:
            Token ids of prompts and completions, as TRL asks for them.
        """
        prompt_ids = trainer.processing_class.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            return_dict=True,
            **trainer.args.chat_template_kwargs or {},
        )["input_ids"]
        values = trainer.generation_config
        was_training = trainer.model.training
        trainer.model.eval()
        try:
            found = decoding.decode(
                self._generation_model(trainer),
                prompt_ids,
                values.max_new_tokens,
                trainer.eos_token_ids,
                decoding.Sampling(
                    values.temperature, values.top_p, values.top_k
                ),
                trainer.optimizations,
            )
        finally:
            trainer.model.train(was_training)
        if found.entropy is not None:
            trainer._log_metric(ENTROPY, found.entropy)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": found.ids,
            # They would be asked for only to correct another policy's.
            "logprobs": None,
        }

    def _generation_model(self, trainer: FastTrainer) -> nn.Module:
        """Who writes; of a copy there is one for the whole training."""
        if "dequantised_copy" not in trainer.optimizations:
            return generation_model(trainer.model, trainer.optimizations)
        if self.copy is None:
            self.copy = DequantisedCopy(trainer.model)
        else:
            self.copy.refresh()
        return self.copy.model


def refuse_other_trl() -> None:
    """Refuse a TRL other than the one that the optimizations were proved on.

    Raises:
        LabError: says what differs, and how to go on.
    """
    for part, known in PINNED_TRL.items():
        if fingerprint(part) != known:
            raise LabError(
                f"TRL {trl.__version__} is installed, and its {part} "
                "is not the one that the faster rollouts and gradients of "
                "this project were checked against. Install the version that "
                "requirements.txt names; or take TRL's own, slower ones: "
                "DISABLE = ['all'] in lesson 03, optimizations=() in the "
                "settings of a run."
            )


def fingerprint(part: str) -> str:
    """Hash of the source of a part of TRL; "" if there is no such part."""
    owner = GRPOTrainer if part.startswith("_") else utils
    if not hasattr(owner, part):
        return ""
    text = inspect.getsource(getattr(owner, part))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
