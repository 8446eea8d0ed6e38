"""What TRL itself computes from given numbers, to check a lesson against.

A real `trl.GRPOTrainer` around a pocket model is handed rewards, or
log-probabilities, that somebody wrote down, and says which advantages, which
loss and which gradient follow. It runs on the CPU, also where there is a GPU,
so that the numbers are the same everywhere, and never takes a step.

Two things here are no public part of TRL: the method that rolls out and
scores, and an attribute that its training loop sets. If a release changes
them, tests/test_trl_reference.py fails.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from grpo_lab.errors import LabError
from grpo_lab.pocket import WEIGHTS_DIR

MODEL = WEIGHTS_DIR / "pocket-qwen"
PROMPT = {"prompt": "1 + 1 ="}
TOKENS = 4  # of each completion that is rolled out


@dataclass(frozen=True)
class Loss:
    """A loss, and what it teaches.

    Attributes:
        value: the number that TRL logs as `loss`.
        gradients: for each completion, the derivative of the loss with
            respect to the log-probability of each of its tokens.
    """

    value: float
    gradients: list[list[float]]


def advantages(rewards: Sequence[float]) -> list[float]:
    """The advantages that TRL gives to one group with these rewards.

    A trainer with TRL's defaults rolls out as many completions of one
    prompt, and a reward function pays them the given numbers, in order.

    Args:
        rewards: of the completions of the group, at least 2.

    Raises:
        LabError: there are fewer.

    >>> [round(number, 3) for number in advantages([1.0, 0.0])]
    [0.707, -0.707]
    """
    rewards = list(rewards)
    _refuse_small_group(len(rewards))

    def given_reward(completions, **columns):
        return rewards

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(folder, given_reward, size=len(rewards))
        scored = trainer._generate_and_score_completions(
            [PROMPT] * len(rewards)
        )
    return scored["advantages"].tolist()


def loss(
    logps: Sequence[Sequence[float]],
    advantages: Sequence[float],
    loss_type: str = "dapo",
) -> Loss:
    """The loss that TRL computes for one group, and its gradient.

    Args:
        logps: for each completion of the group, at least 2, the
            log-probability of each of its tokens.
        advantages: one for each completion.
        loss_type: as in `GRPOConfig`; "dapo" is TRL's default.

    Raises:
        LabError: there are fewer, or not one advantage for each.

    >>> result = loss([[-0.1], [-0.2, -0.3]], [1.0, -1.0])
    >>> round(result.value, 3)
    0.333
    >>> [[round(d, 3) for d in row] for row in result.gradients]
    [[-0.333], [0.333, 0.333]]
    """
    _refuse_small_group(len(logps))
    if len(advantages) != len(logps):
        raise LabError(
            f"There are {len(logps)} completions and {len(advantages)} "
            "advantages: give one for each completion."
        )
    lengths = [len(row) for row in logps]
    rows = [torch.tensor(row, dtype=torch.float32) for row in logps]
    padded = pad_sequence(rows, batch_first=True).requires_grad_()
    mask = pad_sequence([torch.ones(n) for n in lengths], batch_first=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(folder, _unused, len(logps), loss_type=loss_type)
        # The training loop sets it; one batch is one step here.
        trainer.current_gradient_accumulation_steps = 1
        value = trainer.compute_loss(
            _policy_with(padded), _batch(mask, list(advantages))
        )
    value.backward()
    assert padded.grad is not None
    gradients = [
        row[:length].tolist()
        for row, length in zip(padded.grad, lengths, strict=True)
    ]
    return Loss(value.item(), gradients)


def _trainer(folder, reward, size, **settings) -> GRPOTrainer:
    arguments = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=size,
        num_generations=size,
        max_completion_length=TOKENS,
        use_cpu=True,
        bf16=False,
        report_to="none",
        **settings,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([PROMPT]),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )


def _policy_with(logps: torch.Tensor):
    """A model that gives these log-probabilities, whatever the tokens."""

    def policy(**inputs):
        entropy = torch.zeros_like(logps)
        return SimpleNamespace(log_probs=logps, entropy=entropy)

    return policy


def _batch(mask: torch.Tensor, advantages: list[float]) -> dict:
    """The batch that a rollout with such completions would give."""
    one = torch.ones(len(mask), 1, dtype=torch.long)
    return {
        "prompt_ids": one,
        "prompt_mask": one,
        "completion_ids": torch.zeros_like(mask, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": mask.sum(),
    }


def _unused(completions, **columns):
    raise AssertionError("nothing is rolled out for a loss")


def _refuse_small_group(size: int) -> None:
    if size < 2:
        raise LabError(
            f"A group of {size} has nothing to compare: give the numbers of "
            "at least 2 completions."
        )
