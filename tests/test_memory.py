"""Memory: what a run takes, which optimisations it can afford, what fits."""

import dataclasses
import os

import cloudpickle
import pytest
import torch
from conftest import four_bit_layers, pretend_gpu, quick_settings, refusal
from killed_grid import variety
from peft import LoraConfig, get_peft_model

from grpo_lab import grid, memory, models, profiles, training
from grpo_lab.files import read_json
from grpo_lab.grid import execute
from grpo_lab.grid.cluster import Cluster
from grpo_lab.grid.train_run import GridTraining
from grpo_lab.memory import GIB, Device, Share, check_fits, estimate_memory
from grpo_lab.models import MODELS, load_policy
from grpo_lab.profiles import (
    ALL_LINEAR,
    FIRST_RUN,
    FIRST_RUN_VALUES,
    PROFILES,
    RunSettings,
)
from grpo_lab.prompts import longest_prompt
from grpo_lab.speed import optimizations

PACE = grid.Pace(seconds=1.0, layers=2)


# --- Memory -----------------------------------------------------------------


def settings_for(model, **values) -> RunSettings:
    return RunSettings(model=str(model), learning_rate=1e-4, **values)


def test_the_weights_and_adapter_of_a_real_model_fit_the_estimate(tiny_llama):
    settings = settings_for(tiny_llama, lora_r=4, target_modules=ALL_LINEAR)
    estimate = estimate_memory(models.entry(str(tiny_llama)), settings)
    model, _ = load_policy(str(tiny_llama))
    states = [layer.weight.quant_state for layer in four_bit_layers(model)]
    held = sum(p.nbytes for p in model.parameters()) + sum(
        s.absmax.nbytes + s.state2.absmax.nbytes for s in states
    )
    assert estimate.weights * GIB == pytest.approx(held, rel=0.02)
    policy = get_peft_model(
        model, LoraConfig(r=4, target_modules=list(ALL_LINEAR))
    )
    trainable = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert estimate.adapter * GIB == pytest.approx(8 * trainable)
    assert estimate.optimiser * GIB == pytest.approx(8 * trainable)


def test_the_cache_of_a_real_rollout_fits_the_estimate(tiny_llama):
    settings = settings_for(
        tiny_llama,
        num_generations=2,
        completions_per_step=4,
        micro_batch=4,
        max_completion_length=20,
    )
    model, _ = load_policy(str(tiny_llama))
    output = model.generate(
        torch.full((4, 10), 50),
        max_new_tokens=21,  # the last token is never put into the cache
        min_new_tokens=21,
        return_dict_in_generate=True,
    )
    held = sum(
        layer.keys.nbytes + layer.values.nbytes
        for layer in output.past_key_values.layers
    )
    estimate = estimate_memory(
        models.entry(str(tiny_llama)), settings, prompt_tokens=10
    )
    assert estimate.kv_cache * GIB == pytest.approx(held)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_a_forward_pass_keeps_fits_the_estimate(
    tiny_llama, checkpointing
):
    settings = settings_for(
        tiny_llama,
        num_generations=2,
        completions_per_step=2,
        micro_batch=2,
        max_completion_length=32,
        gradient_checkpointing=checkpointing,
    )
    entry = models.entry(str(tiny_llama))
    model, _ = load_policy(str(tiny_llama))
    policy = get_peft_model(model, LoraConfig(target_modules=list(ALL_LINEAR)))
    if checkpointing:
        policy.gradient_checkpointing_enable()
        policy.enable_input_require_grads()
    policy.train()
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.model(input_ids=torch.full((2, 64), 50))
    held = sum(nbytes for nbytes, _ in kept.values())
    tokens, per_layer = 2 * 64, 5 * 64 + 4 * 128 + 2 * 6 * 16
    expected = entry.num_layers * (64 if checkpointing else per_layer)
    # The small rest: rotary tables, norms' statistics, the embeddings.
    assert held == pytest.approx(4 * tokens * expected, rel=0.2, abs=80_000)
    estimate = estimate_memory(entry, settings, prompt_tokens=32)
    assert estimate.activations * GIB > held


def test_memory_follows_the_settings():
    entry = MODELS["qwen2.5-0.5b"]
    base = estimate_memory(entry, settings_for("qwen2.5-0.5b"))

    def changed(**values):
        return estimate_memory(entry, settings_for("qwen2.5-0.5b", **values))

    assert changed(lora_r=32).adapter == 2 * base.adapter
    assert changed(optimizer="adamw_bnb_8bit").optimiser == base.optimiser / 4
    assert changed(completions_per_step=32).kv_cache == 2 * base.kv_cache
    assert changed(micro_batch=8).activations < base.activations
    assert changed(max_completion_length=64).kv_cache < base.kv_cache
    checkpointed = changed(gradient_checkpointing=True)
    assert checkpointed.activations < base.activations / 2
    sixteen = changed(load_in_4bit=False).weights
    assert sixteen > 2 * base.weights
    assert base.total == pytest.approx(
        base.weights
        + base.adapter
        + base.optimiser
        + max(base.kv_cache, base.activations)
        + base.overhead
    )


def test_a_gpu_holds_values_in_two_bytes(monkeypatch):
    entry, settings = MODELS["qwen2.5-0.5b"], settings_for("qwen2.5-0.5b")
    on_cpu = estimate_memory(entry, settings)
    pretend_gpu(monkeypatch, (8, 0))
    on_gpu = estimate_memory(entry, settings)
    assert on_gpu.kv_cache == on_cpu.kv_cache / 2


def test_published_sizes_fit_the_machines_they_are_for(monkeypatch):
    pretend_gpu(monkeypatch, (8, 0))
    for name, gib in (("full", 79), ("lite", 14)):
        first_run = FIRST_RUN[name]
        for settings in (
            *PROFILES[name].settings(),
            *(profiles.first_run(first_run, v) for v in FIRST_RUN_VALUES),
        ):
            estimate = estimate_memory(models.entry(settings.model), settings)
            share = Share(Device("a GPU", gib, is_gpu=True))
            check_fits(estimate, settings, share)


@pytest.mark.parametrize(
    ("gib", "changed", "advice"),
    [
        (
            16.0,
            {"max_completion_length": 1024},
            "Lower MICRO_BATCH (now 16); if that is not enough, lower "
            "MAX_COMPLETION_LENGTH (now 1024); if that is not enough, choose",
        ),
        (
            10.0,
            {
                "completions_per_step": 64,
                "micro_batch": 1,
                "gradient_checkpointing": True,
            },
            "Lower COMPLETIONS_PER_STEP (now 64)",
        ),
        (4.0, {}, "The model alone takes"),
    ],
)
def test_too_large_says_by_how_much_and_what_to_lower(gib, changed, advice):
    settings = settings_for("llama-3.1-8b", **changed)
    estimate = estimate_memory(MODELS["llama-3.1-8b"], settings)
    share = Share(Device("a small GPU", 2 * gib, is_gpu=True), part=0.5)
    message = refusal(check_fits, estimate, settings, share)
    assert f"{estimate.total - gib:.1f} GiB too little" in message
    assert f"50% of a small GPU has {gib:.1f}" in message
    assert advice in message


def test_a_run_that_fits_is_let_through():
    settings = settings_for("pocket-qwen")
    check_fits(estimate_memory(MODELS["pocket-qwen"], settings), settings)


def test_the_device_is_this_machine(monkeypatch):
    here = memory.device_memory()
    page = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not torch.cuda.is_available():
        assert here.memory == pytest.approx(page / GIB, rel=0.01)
        assert not here.is_gpu

    class Properties:
        name = "Tesla T4"
        total_memory = 15 * GIB

    pretend_gpu(monkeypatch, (7, 5))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: Properties
    )
    assert memory.device_memory() == Device("Tesla T4", 15.0, True)


# --- One decision for the plan and for the run -------------------------------


def pretend_device(monkeypatch, gib: float, is_gpu: bool) -> None:
    device = Device("pretended", gib, is_gpu)
    monkeypatch.setattr(memory, "device_memory", lambda: device)


def test_two_runs_on_one_gpu_plan_with_half_of_it_each(
    monkeypatch, tiny_qwen, tiny_splits
):
    """With the whole of it each of them would keep 46 GiB."""
    pretend_gpu(monkeypatch, (8, 0))
    pretend_device(monkeypatch, 79.2, is_gpu=True)
    tokenizer = models.AutoTokenizer.from_pretrained(tiny_qwen)
    for settings in PROFILES["full"].settings()[2:]:  # of 7B and 8B
        task = grid.Task(tiny_splits, [])
        alone = GridTraining(task, 50, tiny_qwen)
        assert alone.resolve(settings, tokenizer).memory > 79.2 / 2
        one_of_two = GridTraining(task, 50, tiny_qwen, gpus=0.5)
        found = one_of_two.resolve(settings, tokenizer)
        assert found.memory < 79.2 / 2
        assert found.gradient_checkpointing
        plan = grid.estimates([settings], 500, 100, PACE, gpus=0.5)
        assert list(plan["there are GiB"]) == [79.2 / 2]
        longest = found.prompt_tokens
        plan = grid.estimates([settings], 500, longest, PACE, gpus=0.5)
        assert list(plan["needs GiB"]) == [found.memory]


def test_a_cpu_is_not_divided(monkeypatch):
    """Else the runs of several workers would differ from those of one."""
    pretend_device(monkeypatch, 24.0, is_gpu=False)
    for gpus in (0, 0.5, 1, 2):
        assert Share.of_gpus(gpus).memory == 24.0


@pytest.mark.parametrize(("gpus", "gib"), [(0.25, 20), (1, 80), (2, 80)])
def test_a_run_has_the_memory_of_its_gpus(monkeypatch, gpus, gib):
    pretend_device(monkeypatch, 80.0, is_gpu=True)
    assert Share.of_gpus(gpus).memory == gib


def test_the_gpus_of_a_run_reach_the_workers(tmp_path, tiny_splits):
    context = GridTraining(grid.Task(tiny_splits, []), 50, tmp_path)
    work = execute.GridWork(tmp_path, [], None, None)
    pool = execute._pool(context, work, Cluster(gpus=0.5))
    assert cloudpickle.loads(pool.payload).gpus == 0.5


def test_the_plan_that_is_shown_is_the_run_that_is_trained(
    monkeypatch, tiny_qwen, tiny_splits, tmp_path
):
    """Memory for the real prompts, and not for prompts of 512 tokens."""
    settings = quick_settings(
        tiny_qwen, gradient_checkpointing=True, micro_batch=4, max_steps=1,
        optimizations=optimizations.without(["dequantised_copy"]),
    )  # fmt: skip
    _, tokenizer = load_policy(str(tiny_qwen))
    longest = longest_prompt(tokenizer, tiny_splits.train["prompt"])
    kept = dataclasses.replace(settings, gradient_checkpointing=False)
    shape = models.entry(settings.model)
    needed, for_longer = (
        estimate_memory(shape, kept, tokens).total for tokens in (longest, 512)
    )
    assert needed < for_longer
    gib = (needed + for_longer) / 2 / (1 - memory.SPARE_SHARE)
    pretend_device(monkeypatch, gib, is_gpu=False)

    plan = grid.estimates([settings], 12, longest, PACE)
    assert list(plan["needs GiB"]) == [pytest.approx(needed)]
    trained = []
    build = training.build_trainer

    def seen(resolved, *args, **kwargs):
        trainer = build(resolved, *args, **kwargs)
        trained.append((resolved.memory, trainer.args, trainer.optimizations))
        return trainer

    monkeypatch.setattr(training, "build_trainer", seen)
    found = grid.run(
        [settings], grid.Task(tiny_splits, [variety]), tmp_path, 10
    )
    found.raise_failures()
    [(gib, arguments, active)] = trained
    assert list(plan["needs GiB"]) == [gib]
    assert not arguments.gradient_checkpointing
    assert {"no_checkpointing", "shared_prefix"} <= active
    [start] = read_json(found.runs[0].directory / "environment.json")
    assert {*start["optimizations"]} == active
