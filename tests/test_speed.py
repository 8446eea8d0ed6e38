"""Optimisations: the switch, the pinned TRL source, and a real model."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from conftest import quick_settings
from scipy import stats
from speed_helpers import (
    POCKET,
    assert_same_tokens,
    built,
    group_prompts,
    pocket_settings,
)
from trl import GRPOTrainer

from grpo_lab import environment, training
from grpo_lab.errors import LabError
from grpo_lab.profiles import RunSettings
from grpo_lab.speed import optimizations
from grpo_lab.speed import trainer as speed
from rewards import FIVE_PART

pytestmark = pytest.mark.numeric

# --- The switch --------------------------------------------------------------


def test_every_optimization_is_on_unless_it_is_switched_off():
    assert RunSettings("pocket-qwen", 1e-3).optimizations == tuple(
        optimizations.OPTIMIZATIONS
    )
    assert optimizations.without([]) == tuple(optimizations.OPTIMIZATIONS)
    assert optimizations.without(["all"]) == ()
    left = optimizations.without(["zero_advantage"])
    assert set(optimizations.OPTIMIZATIONS) - set(left) == {"zero_advantage"}


def test_what_needs_the_loop_goes_with_it():
    left = optimizations.without(["decode_loop"])
    assert not {"decode_loop", *optimizations.NEED_THE_LOOP} & set(left)
    assert left
    with pytest.raises(LabError, match="part of 'decode_loop'"):
        RunSettings("pocket-qwen", 1e-3, optimizations=("dequantised_copy",))


def test_an_unknown_optimization_is_named():
    with pytest.raises(LabError, match="no optimization 'turbo'.*DISABLE"):
        optimizations.without(["turbo"])
    with pytest.raises(LabError, match="no optimization 'turbo'"):
        RunSettings("pocket-qwen", 1e-3, optimizations=("turbo",))


def test_optimizations_survive_json():
    one = RunSettings("pocket-qwen", 1e-3, optimizations=("shared_prefix",))
    assert RunSettings(**one.to_dict()) == one
    assert one.to_dict()["optimizations"] == ["shared_prefix"]


def test_without_optimizations_it_is_trl_s_own_trainer(
    tiny_qwen, questions, tmp_path
):
    plain = built(
        quick_settings(tiny_qwen, optimizations=()), questions.train, tmp_path
    )
    assert type(plain) is GRPOTrainer
    assert plain.rollout_func is None


def test_threads_wait_a_moment_unless_the_reader_says_how(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    environment.prepare()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    environment.prepare()
    assert os.environ["GOMP_SPINCOUNT"] == "3000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    environment.prepare()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


# --- The seam ----------------------------------------------------------------


@pytest.mark.parametrize("part", speed.PINNED_TRL)
def test_trl_is_the_one_that_the_optimizations_were_proved_on(part):
    assert speed.fingerprint(part) == speed.PINNED_TRL[part], (
        f"TRL has changed {part}. Read what is new in it, see that the other "
        "tests of this file hold, then put the new hash into speed.PINNED_TRL."
    )


def test_another_trl_is_refused(tiny_qwen, questions, tmp_path, monkeypatch):
    monkeypatch.setitem(speed.PINNED_TRL, "_generate", "0123")
    settings = quick_settings(tiny_qwen)
    with pytest.raises(LabError, match="_generate is not .*DISABLE"):
        built(settings, questions.train, tmp_path)
    slow = dataclasses.replace(settings, optimizations=())
    assert built(slow, questions.train, tmp_path)


def test_a_part_that_trl_has_no_more_is_a_change(monkeypatch):
    assert speed.fingerprint("_no_such_part") == ""
    monkeypatch.setitem(speed.PINNED_TRL, "_no_such_part", "0123")
    with pytest.raises(LabError, match="_no_such_part"):
        speed.refuse_other_trl()


# --- A model that is no toy --------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", POCKET)
def test_sampled_rollouts_earn_what_trl_s_do(model, questions, tmp_path):
    """By the same policy, from the same prompts: 2,304 completions each."""
    settings = pocket_settings(model, max_steps=12, max_completion_length=64)
    trainer = built(settings, questions.train, tmp_path, moved=False)
    training.train(trainer)  # a policy that is about to learn the form
    prompts = group_prompts(questions.train, groups=24, size=16)
    golds = [row for row in questions.train["answer"] for _ in range(16)]
    ids, _, _ = trainer._tokenize_prompts(prompts)
    trainer.model.eval()
    rewards, lengths = {}, {}
    for way, write in {
        "TRL": lambda: trainer._generate_single_turn(ids, None, {}, 16)[0],
        "ours": lambda: trainer.rollout_func(prompts, trainer)[
            "completion_ids"
        ],
    }.items():
        found = [one for _ in range(6) for one in write()]
        texts = trainer.processing_class.batch_decode(
            found, skip_special_tokens=True
        )
        parts = [reward(texts, answer=golds * 6) for reward in FIVE_PART]
        rewards[way] = [sum(each) for each in zip(*parts, strict=True)]
        lengths[way] = [len(one) for one in found]
    for values in (rewards, lengths):
        difference = stats.ttest_ind(values["ours"], values["TRL"])
        print(model, difference.confidence_interval(), difference.pvalue)
        assert difference.pvalue > 1e-5


@pytest.mark.slow
def test_smollm2_writes_the_same_tokens(questions, tmp_path):
    settings = pocket_settings(
        "smollm2-135m", num_generations=4, completions_per_step=8,
        micro_batch=8, max_completion_length=24,
    )  # fmt: skip
    trainer = built(settings, questions.train, tmp_path)
    trainer.generation_config.top_k = 1
    prompts = group_prompts(questions.train, groups=2)
    found = trainer.rollout_func(prompts, trainer)
    trainer.model.eval()
    expected, _ = trainer._generate_single_turn(
        found["prompt_ids"], None, {}, 4
    )
    assert_same_tokens(
        trainer.model, found["prompt_ids"], found["completion_ids"], expected
    )


@pytest.mark.slow
def test_a_short_grid_is_faster_than_plain_trl(tmp_path):
    """A whole grid of 32 steps for each run is in docs/measurements.md."""
    figures = tmp_path / "figures.json"
    subprocess.run(
        [
            sys.executable, "benchmarks/grid_speed.py", "--only", "grid",
            "--pairs", "1", "--max-steps", "6", "--json", str(figures),
        ],
        check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    [pair] = json.loads(figures.read_text())["pocket grid"]
    plain, ours = pair["plain TRL"], pair["grpo_lab"]
    assert plain["completions"] == ours["completions"] == 4 * 6 * 64
    assert plain["runs"].keys() == ours["runs"].keys()
    assert plain["parts"]["training"] > 1.5 * ours["parts"]["training"]
