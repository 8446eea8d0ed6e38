"""TRL, driven from outside, still computes what the lessons say it does.

The expected numbers are worked out here in plain Python, so that a release of
TRL that changes a formula, a default or a name fails in this file.
"""

import doctest
import math
import statistics

import pytest
import torch

from grpo_lab import trl_reference
from grpo_lab.errors import LabError

pytestmark = pytest.mark.numeric

REWARDS = [4.0, 3.5, 2.0, 0.0]
ADVANTAGES = [0.9, 0.6, -0.2, -1.3]
LOGPS = [[-0.1, -0.2, -0.3], [-0.5], [-0.4, -0.1], [-0.2, -0.7, -0.3, -0.1]]


def by_hand(rewards):
    """The sample standard deviation, one less than the group's size."""
    mean, spread = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (spread + 1e-4) for reward in rewards]


@pytest.mark.parametrize(
    "rewards", [REWARDS, [1.0, 0.0], [-3.0, 0.25, 0.3], [0.1] + [0.0] * 7]
)
def test_advantages_are_those_of_the_group(rewards):
    found = trl_reference.advantages(rewards)
    assert found == pytest.approx(by_hand(rewards), rel=1e-5, abs=1e-6)


def test_advantages_keep_the_order_of_the_rewards():
    turned = trl_reference.advantages(REWARDS[::-1])
    assert turned == pytest.approx(by_hand(REWARDS)[::-1], rel=1e-5, abs=1e-6)


def test_a_group_without_spread_has_no_advantages():
    assert trl_reference.advantages([2.0] * 4) == [0.0] * 4


def test_each_token_weighs_the_same_by_default():
    tokens = sum(map(len, LOGPS))
    found = trl_reference.loss(LOGPS, ADVANTAGES)
    pairs = list(zip(ADVANTAGES, LOGPS, strict=True))
    value = -sum(a * len(row) for a, row in pairs) / tokens
    assert found.value == pytest.approx(value, rel=1e-5, abs=1e-6)
    for row, (advantage, logps) in zip(found.gradients, pairs, strict=True):
        expected = [-advantage / tokens] * len(logps)
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_each_completion_weighs_the_same_in_the_loss_of_the_paper():
    found = trl_reference.loss(LOGPS, ADVANTAGES, loss_type="grpo")
    assert found.value == pytest.approx(
        -sum(ADVANTAGES) / 4, rel=1e-5, abs=1e-6
    )
    for row, advantage, logps in zip(
        found.gradients, ADVANTAGES, LOGPS, strict=True
    ):
        expected = [-advantage / 4 / len(logps)] * len(logps)
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_loss_does_not_depend_on_the_log_probabilities():
    surer = [[logp / 10 for logp in row] for row in LOGPS]
    once, again = (trl_reference.loss(x, ADVANTAGES) for x in (LOGPS, surer))
    assert once.value == pytest.approx(again.value, abs=1e-7)


def test_it_is_trl_that_computes(monkeypatch):
    """Not a copy of its formulas: what TRL's methods give comes back."""
    trainer = trl_reference.GRPOTrainer
    monkeypatch.setattr(
        trainer,
        "_generate_and_score_completions",
        lambda self, inputs: {"advantages": torch.tensor([7.0, 8.0])},
    )
    monkeypatch.setattr(
        trainer,
        "_compute_loss",
        lambda self, model, inputs: (5 * model().log_probs).sum(),
    )
    assert trl_reference.advantages([1.0, 2.0]) == [7.0, 8.0]
    found = trl_reference.loss([[-1.0], [-2.0, -3.0]], [1.0, -1.0])
    assert found == trl_reference.Loss(-30.0, [[5.0], [5.0, 5.0]])


def test_the_examples_of_the_module():
    result = doctest.testmod(trl_reference)
    assert result.attempted and not result.failed


def test_too_small_a_group_is_refused():
    for call in (
        lambda: trl_reference.advantages([1.0]),
        lambda: trl_reference.loss([[-0.1]], [1.0]),
    ):
        with pytest.raises(LabError, match="at least 2"):
            call()


def test_an_advantage_for_each_completion_is_asked_for():
    with pytest.raises(LabError, match="4 completions and 3 advantages"):
        trl_reference.loss(LOGPS, ADVANTAGES[:3])


def test_nothing_is_left_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert math.isfinite(sum(trl_reference.advantages(REWARDS)))
    assert list(tmp_path.iterdir()) == []
