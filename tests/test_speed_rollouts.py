"""Rollouts: each optimisation alone writes the tokens of plain TRL."""

import math

import pytest
import torch
from speed_helpers import (
    FLOAT32,
    POCKET,
    ROLLOUT_OPTIMIZATIONS,
    assert_same_answers,
    assert_same_scores,
    assert_same_tokens,
    built,
    group_prompts,
    padded,
    pocket_settings,
)
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from grpo_lab import evaluation, models, training
from grpo_lab.errors import LabError
from grpo_lab.speed import decoding, dequantised, optimizations
from grpo_lab.speed.decoding import Sampling

pytestmark = pytest.mark.numeric

# --- Rollouts ----------------------------------------------------------------


@pytest.mark.parametrize("chosen", ROLLOUT_OPTIMIZATIONS, ids="+".join)
@pytest.mark.parametrize("model", POCKET)
@pytest.mark.check
def test_greedy_rollouts_are_those_of_trl(model, chosen, questions, tmp_path):
    trainer = built(
        pocket_settings(model, optimizations=chosen), questions.train, tmp_path
    )
    trainer.generation_config.top_k = 1
    prompts = group_prompts(questions.train)
    found = trainer.rollout_func(prompts, trainer)
    assert trainer.model.training
    ids, _, _ = trainer._tokenize_prompts(prompts)
    assert found["prompt_ids"] == ids
    trainer.model.eval()
    expected, _ = trainer._generate_single_turn(ids, None, {}, 4)
    assert_same_tokens(trainer.model, ids, found["completion_ids"], expected)
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


@pytest.mark.parametrize("off", [None, *optimizations.NEED_THE_LOOP])
def test_rollouts_sample_as_the_settings_say(
    off, questions, tmp_path, monkeypatch
):
    chosen = optimizations.without([off] if off else [])
    settings = pocket_settings(
        temperature=0.9, top_p=0.8, top_k=7, optimizations=chosen
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
    off = pocket_settings(
        optimizations=optimizations.without(["decode_loop"]), max_steps=1
    )
    trainer = built(off, questions.train, tmp_path)
    assert trainer.rollout_func is None
    training.train(trainer)
    some = questions.eval.select(range(4))
    values = (trainer.model, trainer.processing_class, some, 4, 4)
    evaluation.evaluate(*values)
    assert not calls
    evaluation.evaluate(*values, optimizations=["decode_loop"])
    assert len(calls) == 1


def test_the_temperature_is_in_force(questions, tmp_path):
    settings = pocket_settings(temperature=0.01)
    trainer = built(settings, questions.train, tmp_path)
    prompts = group_prompts(questions.train, groups=2)
    cold = trainer.rollout_func(prompts, trainer)["completion_ids"]
    trainer.generation_config.temperature = 1.5
    hot = trainer.rollout_func(prompts, trainer)["completion_ids"]
    different = [len({tuple(one) for one in each}) for each in (cold, hot)]
    assert 2 <= different[0] <= 4 < different[1]


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
        policy, ids, 40, ends, optimizations=["shared_prefill"]
    )
    assert set(sizes) == {4, 16}  # the prefill has each prompt once
    sizes.clear()
    decoding.decode(policy, ids, 1, ends, optimizations=[])
    assert sizes == [16]
    sizes.clear()
    found = decoding.decode(policy, ids, 40, ends)
    assert_same_tokens(policy, ids, found.ids, all_along.ids)
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
    trainer.rollout_func._generation_model = lambda policy: 1 / 0
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
    assert_same_tokens(model, [prompt] * 2, found, [expected] * 2)


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
    trainer.optimizations = frozenset()
    with torch.no_grad():
        _, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, width, compute_entropy=True
        )
    tokens = mask[:, -width:]
    expected = (entropies * tokens).sum() / tokens.sum()
    [row] = training.read_metrics(tmp_path / "metrics.csv")
    assert row["entropy"] == pytest.approx(float(expected), rel=1e-4)


# --- The dense copy ----------------------------------------------------------


def test_a_dequantised_copy_computes_what_the_policy_does(questions, tmp_path):
    policy = built(pocket_settings(), questions.train, tmp_path).model.eval()
    copied = dequantised.DequantisedCopy(policy)
    ids = torch.randint(5, 400, (3, 12))
    with torch.no_grad():
        assert_same_scores(copied.model(ids).logits, policy(ids).logits)


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
        assert (after - before).norm() > 100 * FLOAT32 * before.norm()
        assert_same_scores(after, policy(ids).logits)


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
    write = trainer.rollout_func._generation_model
    trainer.rollout_func._generation_model = lambda trainer: (
        seen.append(write(trainer)) or seen[-1]
    )
    training.train(trainer)
    assert seen and seen[0] is not trainer.model.get_base_model()
    assert trainer.rollout_func.copy is None


def test_a_base_model_without_an_adapter_is_copied_too():
    model, _ = models.load_policy("pocket-llama")
    ids = torch.randint(5, 400, (3, 12))
    with torch.no_grad():
        assert_same_scores(
            dequantised.DequantisedCopy(model).model(ids).logits,
            model.eval()(ids).logits,
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
        assert_same_scores(copied.model(ids).logits, policy(ids).logits)


# --- Evaluation --------------------------------------------------------------


@pytest.mark.parametrize("model", POCKET)
def test_held_out_answers_are_the_same_with_optimizations(model, questions):
    policy, tokenizer = models.load_policy(model)
    values = (policy, tokenizer, questions.eval, 48, 16)
    plain = evaluation.evaluate(*values)
    for chosen in ROLLOUT_OPTIMIZATIONS:
        found = evaluation.evaluate(*values, optimizations=chosen)
        assert_same_answers(found, plain)
    assert len({answer.tokens for answer in plain.answers}) > 1


def test_the_copy_for_an_evaluation_has_the_adapter(questions, tmp_path):
    trainer = built(pocket_settings(), questions.train, tmp_path)
    values = (trainer.model, trainer.processing_class, questions.eval, 40, 40)
    plain = evaluation.evaluate(*values)
    found = evaluation.evaluate(
        *values, optimizations=optimizations.OPTIMIZATIONS
    )
    assert_same_answers(found, plain)
    base = training.detach_adapter(trainer)
    before = evaluation.evaluate(
        base, *values[1:], optimizations=optimizations.OPTIMIZATIONS
    )
    pairs = zip(before.answers, found.answers, strict=True)
    assert sum(one != other for one, other in pairs) > 4
