"""What a trainer, or a person, may hand to a reward function."""

import doctest

import numpy as np
import pytest
import torch

from rewards import COOKBOOK, FIVE_PART, RewardError, batch, correctness_reward

TEXT = "<answer>18</answer>"
PARTS = [
    {"type": "image"},
    {"type": "text", "text": "<answer>"},
    {"type": "text", "text": "18</answer>"},
]


def said(content, role="assistant"):
    return [{"role": role, "content": content}]


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        (TEXT, TEXT),
        (said(TEXT), TEXT),
        ([{"content": TEXT}], TEXT),
        ((said("So?", "user") + said(TEXT)), TEXT),
        (said(PARTS), TEXT),
        (said([]), ""),
        (said(None), ""),
        ([{"role": "assistant"}], ""),
        ([], ""),
        (said(TEXT) + said(TEXT, "tool"), ""),
    ],
)
def test_what_the_policy_said(completion, text):
    assert batch.completion_texts([completion]) == [text]


@pytest.mark.parametrize(
    "completion",
    [None, 18, b"18", said(TEXT)[0], [TEXT], said(18), said({"text": TEXT})],
)
@pytest.mark.parametrize("reward", [*FIVE_PART, *COOKBOOK])
def test_what_has_no_text_is_refused(reward, completion):
    with pytest.raises(RewardError, match="is a string or a list of messages"):
        reward([completion], answer=["18"])


@pytest.mark.parametrize("completions", [TEXT, None, 18, said(TEXT)[0]])
@pytest.mark.parametrize("reward", [*FIVE_PART, *COOKBOOK])
def test_what_is_no_list_is_refused(reward, completions):
    # The golds fit, and what is said about the completions comes first.
    with pytest.raises(RewardError, match="scores a list of completions"):
        reward(completions, answer=["18"] * 19)


@pytest.mark.parametrize(
    "golds",
    [
        ["18"],
        ("18",),
        [18],
        np.array([18]),
        np.array(["18"]),
        [np.array([18])],
        [np.int64(18)],
        torch.tensor([18]),
        [torch.tensor(18)],
        [torch.tensor([18.0])],
    ],
    ids=repr,
)
def test_golds_of_any_kind(golds):
    assert correctness_reward([TEXT], answer=golds) == [2.0]


@pytest.mark.parametrize(
    "golds",
    ["18", 18, {"18": 1}, {18}, iter([18]), np.array(18), torch.tensor(18)],
    ids=lambda golds: type(golds).__name__,
)
def test_golds_must_be_a_list(golds):
    with pytest.raises(RewardError, match="must be a list with one gold"):
        correctness_reward([TEXT], answer=golds)


def test_examples_run():
    result = doctest.testmod(batch)
    assert result.attempted and not result.failed
