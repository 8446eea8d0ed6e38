"""Each lever alone gives what plain TRL gives: tokens, or gradients."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from conftest import count_loads, quick_settings, resolved
from killed_grid import variety
from safetensors.torch import load_file
from scipy import stats
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import pad

from grpo_lab import (
    data,
    environment,
    evaluation,
    grid,
    memory,
    models,
    training,
)
from grpo_lab.errors import LabError
from grpo_lab.files import read_json, write_json
from grpo_lab.profiles import ALL_LINEAR, RunSettings
from grpo_lab.speed import decoding, dequantised, levers
from grpo_lab.speed import trainer as speed
from grpo_lab.speed.decoding import Sampling
from rewards import FIVE_PART

POCKET = ("pocket-qwen", "pocket-llama")
ROLLOUT_LEVERS = (
    ("decode_loop",),
    ("decode_loop", "shared_prefill"),
    ("decode_loop", "finished_rows"),
    ("decode_loop", "dequantised_copy"),
    tuple(levers.LEVERS),
)


@pytest.fixture(scope="module")
def questions() -> data.Splits:
    return data.load_splits("pocket", train_rows=24, eval_rows=40, seed=5)


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
        resolved(settings, tokenizer, rows), rows, rewards, run_dir, model,
        tokenizer,
    )  # fmt: skip
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


# --- The switch --------------------------------------------------------------


def test_every_lever_is_on_unless_it_is_switched_off():
    assert RunSettings("pocket-qwen", 1e-3).levers == tuple(levers.LEVERS)
    assert levers.without([]) == tuple(levers.LEVERS)
    assert levers.without(["all"]) == ()
    left = levers.without(["zero_advantage"])
    assert set(levers.LEVERS) - set(left) == {"zero_advantage"}


def test_what_needs_the_loop_goes_with_it():
    left = levers.without(["decode_loop"])
    assert not {"decode_loop", *levers.NEED_THE_LOOP} & set(left)
    assert left
    with pytest.raises(LabError, match="part of 'decode_loop'"):
        RunSettings("pocket-qwen", 1e-3, levers=("dequantised_copy",))


def test_an_unknown_lever_is_named():
    with pytest.raises(LabError, match="no lever 'turbo'.*LEVERS_OFF"):
        levers.without(["turbo"])
    with pytest.raises(LabError, match="no lever 'turbo'"):
        RunSettings("pocket-qwen", 1e-3, levers=("turbo",))


def test_levers_survive_json():
    one = RunSettings("pocket-qwen", 1e-3, levers=("shared_prefix",))
    assert RunSettings(**one.to_dict()) == one
    assert one.to_dict()["levers"] == ["shared_prefix"]


def test_without_levers_it_is_trl_s_own_trainer(
    tiny_qwen, questions, tmp_path
):
    plain = built(
        quick_settings(tiny_qwen, levers=()), questions.train, tmp_path
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


@pytest.mark.parametrize("part", speed.SEAM)
def test_trl_is_the_one_that_the_levers_were_proved_on(part):
    assert speed.fingerprint(part) == speed.SEAM[part], (
        f"TRL has changed {part}. Read what is new in it, see that the other "
        "tests of this file hold, then put the new hash into speed.SEAM."
    )


def test_another_trl_is_refused(tiny_qwen, questions, tmp_path, monkeypatch):
    monkeypatch.setitem(speed.SEAM, "_generate", "0123")
    settings = quick_settings(tiny_qwen)
    with pytest.raises(LabError, match="_generate is not .*LEVERS_OFF"):
        built(settings, questions.train, tmp_path)
    slow = dataclasses.replace(settings, levers=())
    assert built(slow, questions.train, tmp_path)


def test_a_part_that_trl_has_no_more_is_a_change(monkeypatch):
    assert speed.fingerprint("_no_such_part") == ""
    monkeypatch.setitem(speed.SEAM, "_no_such_part", "0123")
    with pytest.raises(LabError, match="_no_such_part"):
        speed.refuse_other_trl()


# --- Rollouts ----------------------------------------------------------------


@pytest.mark.parametrize("chosen", ROLLOUT_LEVERS, ids="+".join)
@pytest.mark.parametrize("model", POCKET)
def test_greedy_rollouts_are_those_of_trl(model, chosen, questions, tmp_path):
    trainer = built(
        pocket_settings(model, levers=chosen), questions.train, tmp_path
    )
    trainer.generation_config.top_k = 1
    prompts = group_prompts(questions.train)
    found = trainer.rollout_func(prompts, trainer)
    assert trainer.model.training
    ids, _, _ = trainer._tokenize_prompts(prompts)
    assert found["prompt_ids"] == ids
    trainer.model.eval()
    expected, _ = trainer._generate_single_turn(ids, None, {}, 4)
    assert found["completion_ids"] == expected
    # Else the test could not see rows that end, and rows that are cut.
    assert len({len(one) for one in expected}) > 1


@pytest.mark.parametrize(
    "top_k, top_p", [(0, 1.0), (3, 1.0), (0, 0.7), (5, 0.8)]
)
def test_tokens_are_drawn_as_transformers_draws_them(top_k, top_p):
    torch.manual_seed(0)
    scores = torch.randn(1, 12) * 2
    count = 40_000
    tokens = decoding.draw(
        scores.expand(count, -1), Sampling(top_k=top_k, top_p=top_p)
    )
    kept = scores.clone()
    if top_k:
        kept[kept < kept.topk(top_k).values[:, -1:]] = -math.inf
    if top_p < 1:
        shares, order = kept.softmax(-1).sort(descending=True)
        before = shares.cumsum(-1) - shares
        kept[0, order[0][before[0] >= top_p]] = -math.inf
    expected = kept.softmax(-1)[0]
    found = torch.bincount(tokens, minlength=12) / count
    assert not found[expected == 0].any()
    # 5 standard errors of the likeliest share
    assert torch.allclose(found, expected, atol=5 * 0.5 / math.sqrt(count))


def test_a_token_of_probability_zero_is_never_drawn(monkeypatch):
    scores = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    for number in (0.0, 0.5, 1.0):
        monkeypatch.setattr(
            torch, "rand_like", lambda like, n=number: torch.full_like(like, n)
        )
        assert int(decoding.draw(scores, Sampling())) in (1, 3)


def test_unlikely_tokens_of_a_large_vocabulary_are_drawn(monkeypatch):
    """In 32 bit their shares would vanish in the cumulated sum."""
    scores = torch.zeros(1, 5_000)
    scores[:, 0] = math.log(4_999 * 9_999)  # the others share 1e-4
    for rest in (0.25, 0.5, 0.75):
        number = 0.9999 + rest * 1e-4
        monkeypatch.setattr(
            torch,
            "rand_like",
            lambda like, n=number: torch.full_like(like, n),
        )
        token = int(decoding.draw(scores, Sampling()))
        assert token == pytest.approx(rest * 5_000, abs=25)


def spied_decode(monkeypatch) -> list:
    """What `decode` is called with, from now on."""
    seen = []
    decode = decoding.decode

    def spy(*args):
        seen.append(args)
        return decode(*args)

    monkeypatch.setattr(decoding, "decode", spy)
    return seen


@pytest.mark.parametrize("off", [None, *levers.NEED_THE_LOOP])
def test_rollouts_sample_as_the_settings_say(
    off, questions, tmp_path, monkeypatch
):
    chosen = levers.without([off] if off else [])
    settings = pocket_settings(
        temperature=0.9, top_p=0.8, top_k=7, levers=chosen
    )
    trainer = built(settings, questions.train, tmp_path)
    calls = spied_decode(monkeypatch)
    trainer.rollout_func(group_prompts(questions.train, 2), trainer)
    [(model, _, limit, _, sampling, in_force)] = calls
    assert (limit, sampling) == (40, Sampling(0.9, 0.8, 7))
    assert in_force == {*chosen} - {"no_checkpointing"}
    has_copies = any(
        isinstance(module, dequantised.DequantisedLinear)
        for module in model.modules()
    )
    assert has_copies == (off != "dequantised_copy")


def test_the_loop_is_used_only_where_it_is_switched_on(
    questions, tmp_path, monkeypatch
):
    calls = spied_decode(monkeypatch)
    off = pocket_settings(levers=levers.without(["decode_loop"]), max_steps=1)
    trainer = built(off, questions.train, tmp_path)
    assert trainer.rollout_func is None
    training.train(trainer)
    some = questions.eval.select(range(4))
    values = (trainer.model, trainer.processing_class, some, 4, 4)
    evaluation.evaluate(*values)
    assert not calls
    evaluation.evaluate(*values, levers=["decode_loop"])
    assert len(calls) == 1


def test_the_temperature_is_in_force(questions, tmp_path):
    settings = pocket_settings(temperature=0.01)
    trainer = built(settings, questions.train, tmp_path)
    prompts = group_prompts(questions.train, groups=2)
    cold = trainer.rollout_func(prompts, trainer)["completion_ids"]
    assert len({tuple(one) for one in cold}) == 2
    trainer.generation_config.temperature = 1.5
    hot = trainer.rollout_func(prompts, trainer)["completion_ids"]
    assert len({tuple(one) for one in hot}) > 4


def test_finished_rows_leave_the_batch(questions, tmp_path):
    trainer = built(pocket_settings(), questions.train, tmp_path)
    policy = trainer.model.eval()
    sizes = []
    policy.register_forward_pre_hook(
        lambda module, args, options: sizes.append(len(options["input_ids"])),
        with_kwargs=True,
    )
    prompts = group_prompts(questions.train)
    ids, _, _ = trainer._tokenize_prompts(prompts)
    ends = trainer.eos_token_ids
    all_along = decoding.decode(
        policy, ids, 40, ends, levers=["shared_prefill"]
    )
    assert set(sizes) == {4, 16}  # the prefill has each prompt once
    sizes.clear()
    decoding.decode(policy, ids, 1, ends, levers=[])
    assert sizes == [16]
    sizes.clear()
    found = decoding.decode(policy, ids, 40, ends)
    assert found.ids == all_along.ids
    assert sizes[-1] < 16 and sizes[1:] == sorted(sizes[1:], reverse=True)


def test_one_token_and_prompts_of_one_token_work(tiny_qwen):
    policy, _ = models.load_policy(str(tiny_qwen))
    found = decoding.decode(policy.eval(), [[5], [6, 7]], 1, {1})
    assert [len(one) for one in found.ids] == [1, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), decoding.GREEDY])
@pytest.mark.parametrize("at", [0, 2])
def test_a_policy_that_is_no_number_any_more_is_told(
    at, sampling, value, tiny_qwen
):
    """All its completions would be equal, and earn nothing, for ever."""
    policy, _ = models.load_policy(str(tiny_qwen))
    calls = []

    def spoil(module, inputs, output):
        calls.append(output)
        return output + value if len(calls) > at else output

    policy.lm_head.register_forward_hook(spoil)
    with pytest.raises(LabError, match="no number any more.*lower it"):
        decoding.decode(policy.eval(), [[5, 6]], 4, {999}, sampling)
    assert len(calls) == at + 1


def test_a_failed_rollout_leaves_the_policy_in_training(questions, tmp_path):
    trainer = built(pocket_settings(), questions.train, tmp_path)
    trainer.rollout_func._writer = lambda policy: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.rollout_func(group_prompts(questions.train), trainer)
    assert trainer.model.training


def test_layers_that_see_a_window_only_get_a_cache_of_their_own():
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        use_sliding_window=True, sliding_window=6, max_window_layers=1,
        eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    cache = decoding._cache(model, 8)
    assert isinstance(cache, DynamicCache)
    prompt = list(range(5, 15))
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False
    )[0, len(prompt) :].tolist()
    found = decoding.decode(model, [prompt] * 2, 12, {1}).ids
    assert found == [expected, expected]


def test_rollouts_log_the_entropy_that_trl_would(questions, tmp_path):
    settings = pocket_settings(temperature=0.8, max_steps=1)
    trainer = built(settings, questions.train, tmp_path)
    seen = {}
    rollouts = trainer.rollout_func

    def spy(prompts, trainer):
        seen.update(rollouts(prompts, trainer))
        return seen

    trainer.rollout_func = spy
    # before the step changes the policy
    state = {
        name: tensor.clone()
        for name, tensor in trainer.model.state_dict().items()
        if "lora_" in name
    }
    training.train(trainer)
    trainer.model.load_state_dict(state, strict=False)
    ids, mask, width = padded(trainer, seen)
    trainer.levers = frozenset()
    with torch.no_grad():
        _, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, width, compute_entropy=True
        )
    tokens = mask[:, -width:]
    expected = (entropies * tokens).sum() / tokens.sum()
    [row] = training.read_metrics(tmp_path / "metrics.csv")
    assert row["entropy"] == pytest.approx(float(expected), rel=1e-4)


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


# --- The dense copy ----------------------------------------------------------


def test_a_dequantised_copy_computes_what_the_policy_does(questions, tmp_path):
    policy = built(pocket_settings(), questions.train, tmp_path).model.eval()
    copied = dequantised.DequantisedCopy(policy)
    ids = torch.randint(5, 400, (3, 12))
    with torch.no_grad():
        assert torch.allclose(
            copied.model(ids).logits, policy(ids).logits, atol=2e-5
        )


def test_a_copy_takes_over_the_adapter_when_it_is_refreshed(
    questions, tmp_path
):
    policy = built(pocket_settings(), questions.train, tmp_path).model.eval()
    copied = dequantised.DequantisedCopy(policy)
    ids = torch.randint(5, 400, (3, 12))
    with torch.no_grad():
        before = copied.model(ids).logits
        for name, tensor in policy.named_parameters():
            if "lora_B" in name:
                tensor.mul_(-1)
        assert torch.equal(copied.model(ids).logits, before)
        copied.refresh()
        after = copied.model(ids).logits
        assert not torch.allclose(after, before, atol=1e-3)
        assert torch.allclose(after, policy(ids).logits, atol=2e-5)


def test_a_copy_leaves_the_policy_as_it_was(questions, tmp_path):
    trainer = built(pocket_settings(), questions.train, tmp_path)
    policy = trainer.model
    kinds = [type(module) for module in policy.modules()]
    state = {k: v.clone() for k, v in policy.state_dict().items()}
    copied = dequantised.DequantisedCopy(policy)
    with torch.no_grad():
        copied.model(torch.randint(5, 400, (2, 6)))
    assert [type(module) for module in policy.modules()] == kinds
    assert all(
        torch.equal(v, state[k]) for k, v in policy.state_dict().items()
    )
    assert policy.training and not copied.model.training
    # what is not a linear layer is there once
    assert (
        copied.model.get_input_embeddings().weight
        is policy.get_base_model().get_input_embeddings().weight
    )
    # and no Python object of the policy's is one of the copy's
    own = {id(module) for module in policy.modules()}
    assert not own & {id(module) for module in copied.model.modules()}


def test_after_the_training_the_copy_is_gone(questions, tmp_path):
    """The evaluation makes one of its own, and two may be too many."""
    trainer = built(pocket_settings(max_steps=1), questions.train, tmp_path)
    seen = []
    write = trainer.rollout_func._writer
    trainer.rollout_func._writer = lambda trainer: (
        seen.append(write(trainer)) or seen[-1]
    )
    training.train(trainer)
    assert seen and seen[0] is not trainer.model.get_base_model()
    assert trainer.rollout_func.copy is None


def test_a_base_model_without_an_adapter_is_copied_too():
    model, _ = models.load_policy("pocket-llama")
    ids = torch.randint(5, 400, (3, 12))
    with torch.no_grad():
        assert torch.allclose(
            dequantised.DequantisedCopy(model).model(ids).logits,
            model.eval()(ids).logits,
            atol=2e-5,
        )


def test_an_adapter_that_is_switched_off_is_not_copied(questions, tmp_path):
    policy = built(pocket_settings(), questions.train, tmp_path).model
    with (
        policy.disable_adapter(),
        pytest.raises(LabError, match="one plain LoRA adapter, switched on"),
    ):
        dequantised.DequantisedCopy(policy)


def test_without_onednn_the_copy_multiplies_as_usual(
    questions, tmp_path, monkeypatch
):
    policy = built(pocket_settings(), questions.train, tmp_path).model.eval()
    monkeypatch.setattr(dequantised, "_has_onednn", lambda: False)
    copied = dequantised.DequantisedCopy(policy)
    ids = torch.randint(5, 400, (3, 12))
    with torch.no_grad():
        assert torch.allclose(
            copied.model(ids).logits, policy(ids).logits, atol=2e-5
        )


# --- Gradients ---------------------------------------------------------------

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


def assert_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        size = tensor.norm()
        assert size > 0, name
        assert (found[name] - tensor).norm() <= 1e-5 * size, name


@pytest.mark.parametrize(
    "chosen", [("shared_prefix",), ("zero_advantage",), tuple(levers.LEVERS)],
    ids="+".join,
)  # fmt: skip
@pytest.mark.parametrize("model", POCKET)
def test_gradients_are_those_of_trl(model, chosen, questions, tmp_path):
    settings = pocket_settings(model, temperature=0.8)
    trainer = built(settings, questions.train, tmp_path)
    batch = batch_of(trainer, questions.train)
    trainer.levers = frozenset()
    loss, expected = gradients(trainer, batch)
    trainer.levers = frozenset(chosen)
    with_levers, found = gradients(trainer, batch)
    assert with_levers == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(found, expected)


def test_with_dropout_each_completion_has_its_own(questions, tmp_path):
    settings = pocket_settings(lora_dropout=0.1)
    trainer = built(settings, questions.train, tmp_path)
    batch = batch_of(trainer, questions.train)
    trainer.levers = frozenset(["shared_prefix"])
    torch.manual_seed(0)
    _, found = gradients(trainer, batch)
    trainer.levers = frozenset()
    torch.manual_seed(0)
    _, expected = gradients(trainer, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_in_16_bit_a_run_works_and_nearly_agrees(
    questions, tmp_path, monkeypatch
):
    """What a GPU does, as far as a CPU can show it: autocast and bfloat16."""
    monkeypatch.setattr(models, "compute_dtype", lambda: torch.bfloat16)
    chosen = levers.without(["dequantised_copy"])
    settings = pocket_settings(levers=chosen, max_steps=2)
    trainer = built(settings, questions.train, tmp_path)
    assert trainer.args.bf16
    batch = batch_of(trainer, questions.train)
    _, found = gradients(trainer, batch)
    trainer.levers = frozenset()
    _, expected = gradients(trainer, batch)
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() < 0.1 * tensor.norm(), name
    trainer.levers = frozenset(chosen)
    training.train(trainer)
    rows = training.read_metrics(tmp_path / "metrics.csv")
    assert len(rows) == 2 and all(row["entropy"] > 0 for row in rows)


def tokens_read(trainer, batch) -> int:
    """Tokens that pass the first layer when a loss is computed."""
    count = []
    embeddings = trainer.model.get_base_model().get_input_embeddings()
    hook = embeddings.register_forward_hook(
        lambda module, inputs, output: count.append(inputs[0].numel())
    )
    gradients(trainer, batch)
    hook.remove()
    return sum(count)


def test_each_lever_of_the_gradient_saves_work(questions, tmp_path):
    trainer = built(pocket_settings(), questions.train, tmp_path)
    batch = batch_of(trainer, questions.train)
    read = {}
    for chosen in ((), ("zero_advantage",), ("shared_prefix",)):
        trainer.levers = frozenset(chosen)
        read[chosen] = tokens_read(trainer, batch)
    assert read["zero_advantage",] <= read[()] / 2
    assert read["shared_prefix",] < 0.6 * read[()]


def test_where_nothing_teaches_the_gradients_are_zeros(questions, tmp_path):
    """No gradient at all would stop the optimiser's decay, and our guard."""
    trainer = built(pocket_settings(), questions.train, tmp_path)
    batch = batch_of(trainer, questions.train, teaches=[False] * 4)
    loss, found = gradients(trainer, batch)
    assert loss == 0
    assert found and not any(tensor.any() for tensor in found.values())
    trainer.levers = frozenset()
    plain_loss, plain = gradients(trainer, batch)
    assert plain_loss == 0
    assert not any(tensor.any() for tensor in plain.values())


def test_with_a_kl_penalty_every_completion_counts(questions, tmp_path):
    settings = pocket_settings(beta=0.04)
    trainer = built(settings, questions.train, tmp_path)
    # The settings have switched it off, so that it is forced here.
    trainer.levers = frozenset(["zero_advantage", "shared_prefix"])
    batch = batch_of(trainer, questions.train)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    with torch.no_grad(), trainer.model.disable_adapter():
        batch["ref_per_token_logps"] = (
            trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, width
            )[0]
        )
    _, found = gradients(trainer, batch)
    trainer.levers = frozenset()
    _, expected = gradients(trainer, batch)
    assert_same_gradients(found, expected)


def test_other_losses_keep_all_rows(questions, tmp_path):
    """Their divisor counts the rows that they see."""
    trainer = built(pocket_settings(), questions.train, tmp_path)
    batch = batch_of(trainer, questions.train)
    for kind in ("grpo", "bnpo", "dr_grpo"):
        trainer.loss_type = kind
        trainer.levers = frozenset(levers.LEVERS)
        _, found = gradients(trainer, batch)
        trainer.levers = frozenset()
        _, expected = gradients(trainer, batch)
        assert_same_gradients(found, expected)


def weights_after(settings, rows, run_dir) -> dict[str, torch.Tensor]:
    trainer = built(settings, rows, run_dir, moved=False)
    training.train(trainer)
    return {
        name: tensor.detach().clone()
        for name, tensor in trainer.model.named_parameters()
        if tensor.requires_grad
    }


@pytest.mark.parametrize("micro_batch", [16, 4])
def test_a_whole_run_ends_where_trl_s_does(micro_batch, questions, tmp_path):
    """With TRL's rollouts, so that both draw the same completions."""
    settings = pocket_settings(micro_batch=micro_batch, levers=())
    expected = weights_after(settings, questions.train, tmp_path / "plain")
    chosen = ("shared_prefix", "zero_advantage")
    found = weights_after(
        dataclasses.replace(settings, levers=chosen),
        questions.train,
        tmp_path / "levers",
    )
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-5), name
    plain, fast = (
        training.read_metrics(tmp_path / way / "metrics.csv")
        for way in ("plain", "levers")
    )
    assert [row["reward"] for row in fast] == [row["reward"] for row in plain]


# --- Memory ------------------------------------------------------------------


def test_levers_that_take_memory_are_left_out_where_there_is_none():
    settings = RunSettings(
        "qwen2.5-0.5b", 1e-5, num_generations=8, completions_per_step=32,
        micro_batch=4, max_completion_length=512, gradient_checkpointing=True,
    )  # fmt: skip
    shape = models.entry("qwen2.5-0.5b")
    tokens = 512
    least = memory.estimate_memory(shape, settings, tokens).total
    without = dataclasses.replace(settings, gradient_checkpointing=False)
    whole = memory.estimate_memory(shape, without, tokens).total
    copied = 494_032_768 * 4 / 2**30

    def gone(gib: float, is_gpu: bool, one=settings) -> set[str]:
        share = memory.Share(memory.Device("here", gib / 0.9, is_gpu))
        return {*one.levers} - {*memory.resolve(one, tokens, share).levers}

    cpu = {"dequantised_copy"}
    checkpointed = {"no_checkpointing", "shared_prefix"}
    assert gone(whole + copied + 0.01, False) == set()
    assert gone(whole + copied - 0.01, False) == checkpointed
    assert gone(least + copied + 0.01, False) == checkpointed
    assert gone(whole + copied + 0.01, False, without) == {"no_checkpointing"}
    assert gone(least, False) == cpu | checkpointed
    # On a GPU there is no copy, so that its memory is free.
    assert gone(whole + 0.01, True) == cpu
    assert gone(whole - 0.01, True) == cpu | checkpointed


@pytest.mark.parametrize(
    ("changed", "gone"),
    [
        ({}, {"no_checkpointing"}),
        ({"beta": 0.04}, {"no_checkpointing", "zero_advantage"}),
        ({"micro_batch": 1}, {"no_checkpointing", "shared_prefix"}),
        ({"gradient_checkpointing": True}, set()),
        (
            {"lora_dropout": 0.1},
            {
                "no_checkpointing", "decode_loop", "shared_prefix",
                *levers.NEED_THE_LOOP,
            },
        ),
    ],
    ids=str,
)  # fmt: skip
def test_levers_that_would_do_nothing_are_not_in_force(changed, gone):
    settings = RunSettings("pocket-qwen", 1e-3, **changed)
    in_force = memory.resolve(settings, 512).levers
    assert {*settings.levers} - {*in_force} == gone


def test_with_checkpointing_a_prefix_has_no_cache():
    chosen = levers.without(["no_checkpointing"])
    settings = RunSettings(
        "pocket-qwen", 1e-3, gradient_checkpointing=True, levers=chosen
    )
    in_force = memory.resolve(settings, 512).levers
    assert {*chosen} - {*in_force} == {"shared_prefix"}


def test_nothing_is_looked_up_for_a_run_without_levers():
    unknown = RunSettings("no/such-model", 1e-3, levers=())
    assert memory.resolve(unknown, 512).levers == ()


def test_the_estimate_counts_what_levers_take():
    settings = pocket_settings(gradient_checkpointing=True)
    shape = models.entry(settings.model)
    least = memory.estimate_memory(shape, settings, 100).total
    without = dataclasses.replace(settings, gradient_checkpointing=False)
    whole = memory.estimate_memory(shape, without, 100).total
    copied = shape.parameters * 4 / 2**30
    takes = memory.resolve(settings, 100).memory
    assert takes == pytest.approx(whole + copied)
    plain = dataclasses.replace(settings, levers=())
    assert memory.resolve(plain, 100).memory == least < whole


def test_checkpointing_goes_where_memory_allows(
    tiny_qwen, tmp_path, monkeypatch
):
    settings = quick_settings(tiny_qwen, gradient_checkpointing=True)

    def checkpoints(one) -> bool:
        found = memory.resolve(one, 100)
        return training.grpo_config(found, tmp_path, 12).gradient_checkpointing

    assert not checkpoints(settings)
    off = dataclasses.replace(
        settings, levers=levers.without(["no_checkpointing"])
    )
    assert checkpoints(off)
    small = memory.Device("CPU", 0.1, is_gpu=False)
    monkeypatch.setattr(memory, "device_memory", lambda: small)
    assert checkpoints(settings)


def test_gradients_are_the_same_without_checkpointing(questions, tmp_path):
    settings = pocket_settings(
        gradient_checkpointing=True, levers=("no_checkpointing",)
    )
    kept = built(settings, questions.train, tmp_path / "kept")
    assert not kept.args.gradient_checkpointing
    batch = batch_of(kept, questions.train)
    _, found = gradients(kept, batch)
    plain = dataclasses.replace(settings, levers=())
    again = built(plain, questions.train, tmp_path / "again")
    assert again.args.gradient_checkpointing
    _, expected = gradients(again, batch)
    assert_same_gradients(found, expected)


# --- One base model for a grid -----------------------------------------------


def grid_of(settings, questions, folder, monkeypatch):
    loaded = count_loads(monkeypatch)
    found = grid.run(settings, questions, [variety], folder, 10)
    found.raise_failures()
    monkeypatch.undo()
    return found, loaded


def test_runs_of_a_grid_share_a_base_model(
    tiny_qwen, tiny_llama, questions, tmp_path, monkeypatch
):
    quick = quick_settings(tiny_qwen, max_steps=2)
    settings = [
        dataclasses.replace(quick, model=str(model), learning_rate=rate)
        for model in (tiny_qwen, tiny_llama)
        for rate in (1e-3, 1e-2)
    ]
    chosen = list(levers.LEVERS)
    together, loaded = grid_of(
        settings, questions, tmp_path / "1", monkeypatch
    )
    assert [
        Counter(loaded)[str(m), True] for m in (tiny_qwen, tiny_llama)
    ] == [1, 1]
    first = together.runs[0].directory
    assert read_json(first / "settings.json")["settings"]["levers"] == chosen
    [start] = read_json(first / "environment.json")
    assert start["levers"] == [n for n in chosen if n != "no_checkpointing"]
    alone = levers.without(["one_base"])
    single, loaded = grid_of(
        [dataclasses.replace(one, levers=alone) for one in settings],
        questions,
        tmp_path / "4",
        monkeypatch,
    )
    assert len(loaded) == 4
    for one, other in zip(together.runs, single.runs, strict=True):
        weights = [
            load_file(run.adapter / "adapter_model.safetensors")
            for run in (one, other)
        ]
        for name in weights[0]:
            assert torch.equal(*(each[name] for each in weights)), name
        assert one.evaluation.answers == other.evaluation.answers


def test_a_run_from_before_the_levers_had_none(
    tiny_qwen, questions, tmp_path, monkeypatch
):
    quick = quick_settings(tiny_qwen, max_steps=1)
    found, _ = grid_of([quick], questions, tmp_path, monkeypatch)
    path = found.runs[0].directory / "settings.json"
    record = read_json(path)
    del record["settings"]["levers"]
    write_json(path, record)
    assert grid.load(tmp_path).runs[0].settings.levers == ()


def test_after_a_failure_the_base_model_is_loaded_anew(
    tiny_qwen, questions, tmp_path, monkeypatch
):
    quick = quick_settings(tiny_qwen, max_steps=2)
    settings = [
        dataclasses.replace(quick, learning_rate=rate)
        for rate in (1e-3, 1e-2, 1e-4)
    ]
    train, calls = training.train, []

    def fails_once(trainer, until=None):
        calls.append(trainer)
        if len(calls) == 2:
            raise RuntimeError("broken on purpose")
        return train(trainer, until)

    monkeypatch.setattr(training, "train", fails_once)
    loads = count_loads(monkeypatch)
    found = grid.run(settings, questions, [variety], tmp_path / "grid", 10)
    assert [run.status for run in found.runs] == ["done", "failed", "done"]
    assert len(loads) == 2


def test_a_run_after_one_with_checkpointing_sees_its_prompts(
    questions, tmp_path
):
    """Layers that still checkpoint have no cache, and so no prompt."""
    first = pocket_settings(
        gradient_checkpointing=True,
        levers=levers.without(["no_checkpointing"]),
    )
    first = dataclasses.replace(first, max_steps=1)
    trainer = built(first, questions.train, tmp_path / "first", moved=False)
    training.train(trainer)
    assert trainer.model.is_activation_checkpointing
    base, tokenizer = (
        training.detach_adapter(trainer),
        trainer.processing_class,
    )
    again = training.build_trainer(
        resolved(pocket_settings(), tokenizer, questions.train),
        questions.train, FIVE_PART, tmp_path / "second", base, tokenizer,
    )  # fmt: skip
    batch = batch_of(again, questions.train)
    for name, tensor in again.model.named_parameters():
        if "lora_B" in name:
            tensor.data.normal_(std=0.05)
    _, found = gradients(again, batch)
    again.levers = frozenset()
    _, expected = gradients(again, batch)
    assert_same_gradients(found, expected)
    assert not again.model.is_activation_checkpointing


def test_a_released_base_model_is_as_it_was(tiny_qwen, questions, tmp_path):
    settings = quick_settings(
        tiny_qwen, gradient_checkpointing=True,
        levers=levers.without(["no_checkpointing"]),
    )  # fmt: skip
    model, tokenizer = models.load_policy(settings.model)
    ids = torch.randint(5, 60, (2, 8))
    with torch.no_grad():
        before = model.eval()(ids).logits
    for turn in range(3):
        trainer = training.build_trainer(
            resolved(settings, tokenizer, questions.train),
            questions.train, [variety], tmp_path / str(turn), model,
            tokenizer,
        )  # fmt: skip
        model = training.detach_adapter(trainer)
        assert "forward" not in model.__dict__
        assert not model.is_activation_checkpointing
        assert not model.get_input_embeddings()._forward_hooks
        assert not any("lora_" in name for name, _ in model.named_modules())
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, before)


# --- Evaluation --------------------------------------------------------------


@pytest.mark.parametrize("model", POCKET)
def test_held_out_answers_are_the_same_with_levers(model, questions):
    policy, tokenizer = models.load_policy(model)
    values = (policy, tokenizer, questions.eval, 48, 16)
    plain = evaluation.evaluate(*values)
    for chosen in ROLLOUT_LEVERS:
        found = evaluation.evaluate(*values, levers=chosen)
        assert found.answers == plain.answers
    assert len({answer.tokens for answer in plain.answers}) > 1


def test_the_copy_for_an_evaluation_has_the_adapter(questions, tmp_path):
    trainer = built(pocket_settings(), questions.train, tmp_path)
    values = (trainer.model, trainer.processing_class, questions.eval, 40, 40)
    plain = evaluation.evaluate(*values)
    found = evaluation.evaluate(*values, levers=levers.LEVERS)
    assert found.answers == plain.answers
    base = training.detach_adapter(trainer)
    before = evaluation.evaluate(base, *values[1:], levers=levers.LEVERS)
    assert before.answers != found.answers


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
        assert difference.pvalue > 0.001


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
    assert found["completion_ids"] == expected


@pytest.mark.slow
def test_a_short_grid_is_faster_than_plain_trl(tmp_path):
    """A whole grid of 32 steps for each run is in the README."""
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
