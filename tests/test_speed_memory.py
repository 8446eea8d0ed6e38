"""What optimisations take in memory, and what they leave behind."""

import dataclasses
from collections import Counter

import pytest
import torch
from conftest import count_loads, quick_settings, resolved
from killed_grid import variety
from safetensors.torch import load_file
from speed_helpers import (
    assert_same_gradients,
    batch_of,
    built,
    gradients,
    pocket_settings,
)

from grpo_lab import grid, memory, models, training
from grpo_lab.files import read_json, write_json
from grpo_lab.profiles import RunSettings
from grpo_lab.speed import optimizations
from rewards import FIVE_PART

pytestmark = pytest.mark.numeric

ROOMY = memory.Share(memory.Device("CPU", 64, is_gpu=False))
"""A machine on which every optimisation has room."""

# --- Memory ------------------------------------------------------------------


def test_optimizations_that_take_memory_are_left_out_where_there_is_none():
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
        return {*one.optimizations} - {
            *memory.resolve(one, tokens, share).optimizations
        }

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
                *optimizations.NEED_THE_LOOP,
            },
        ),
    ],
    ids=lambda changed: str(sorted(changed)),
)  # fmt: skip
def test_optimizations_that_would_do_nothing_are_not_in_force(changed, gone):
    settings = RunSettings("pocket-qwen", 1e-3, **changed)
    in_force = memory.resolve(settings, 512, ROOMY).optimizations
    assert {*settings.optimizations} - {*in_force} == gone


def test_with_checkpointing_a_prefix_has_no_cache():
    chosen = optimizations.without(["no_checkpointing"])
    settings = RunSettings(
        "pocket-qwen", 1e-3, gradient_checkpointing=True, optimizations=chosen
    )
    in_force = memory.resolve(settings, 512, ROOMY).optimizations
    assert {*chosen} - {*in_force} == {"shared_prefix"}


def test_nothing_is_looked_up_for_a_run_without_optimizations():
    unknown = RunSettings("no/such-model", 1e-3, optimizations=())
    assert memory.resolve(unknown, 512).optimizations == ()


def test_the_estimate_counts_what_optimizations_take():
    settings = pocket_settings(gradient_checkpointing=True)
    shape = models.entry(settings.model)
    least = memory.estimate_memory(shape, settings, 100).total
    without = dataclasses.replace(settings, gradient_checkpointing=False)
    whole = memory.estimate_memory(shape, without, 100).total
    copied = shape.parameters * 4 / 2**30
    takes = memory.resolve(settings, 100).memory
    assert takes == pytest.approx(whole + copied)
    plain = dataclasses.replace(settings, optimizations=())
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
        settings, optimizations=optimizations.without(["no_checkpointing"])
    )
    assert checkpoints(off)
    small = memory.Device("CPU", 0.1, is_gpu=False)
    monkeypatch.setattr(memory, "device_memory", lambda: small)
    assert checkpoints(settings)


def test_gradients_are_the_same_without_checkpointing(questions, tmp_path):
    settings = pocket_settings(
        gradient_checkpointing=True, optimizations=("no_checkpointing",)
    )
    kept = built(settings, questions.train, tmp_path / "kept")
    assert not kept.args.gradient_checkpointing
    batch = batch_of(kept, questions.train)
    _, found = gradients(kept, batch)
    plain = dataclasses.replace(settings, optimizations=())
    again = built(plain, questions.train, tmp_path / "again")
    assert again.args.gradient_checkpointing
    _, expected = gradients(again, batch)
    assert_same_gradients(found, expected)


# --- One base model for a grid -----------------------------------------------


def grid_of(settings, questions, folder, monkeypatch):
    with monkeypatch.context() as counted:
        loaded = count_loads(counted)
        task = grid.Task(questions, [variety])
        found = grid.run(settings, task, folder, 10)
    found.raise_failures()
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
    chosen = list(optimizations.OPTIMIZATIONS)
    together, loaded = grid_of(
        settings, questions, tmp_path / "1", monkeypatch
    )
    assert [
        Counter(loaded)[str(m), True] for m in (tiny_qwen, tiny_llama)
    ] == [1, 1]
    first = together.runs[0].directory
    assert (
        read_json(first / "settings.json")["settings"]["optimizations"]
        == chosen
    )
    [start] = read_json(first / "environment.json")
    assert start["optimizations"] == [
        n for n in chosen if n != "no_checkpointing"
    ]
    alone = optimizations.without(["one_base"])
    single, loaded = grid_of(
        [dataclasses.replace(one, optimizations=alone) for one in settings],
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


def test_a_run_from_before_the_optimizations_had_none(
    tiny_qwen, questions, tmp_path, monkeypatch
):
    quick = quick_settings(tiny_qwen, max_steps=1)
    found, _ = grid_of([quick], questions, tmp_path, monkeypatch)
    path = found.runs[0].directory / "settings.json"
    record = read_json(path)
    del record["settings"]["optimizations"]
    write_json(path, record)
    assert grid.load(tmp_path).runs[0].settings.optimizations == ()


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
    found = grid.run(
        settings, grid.Task(questions, [variety]), tmp_path / "grid", 10
    )
    assert [run.status for run in found.runs] == ["done", "failed", "done"]
    assert len(loads) == 2


def test_a_run_after_one_with_checkpointing_sees_its_prompts(
    questions, tmp_path
):
    """Layers that still checkpoint have no cache, and so no prompt."""
    first = pocket_settings(
        gradient_checkpointing=True,
        optimizations=optimizations.without(["no_checkpointing"]),
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
    again.optimizations = frozenset()
    _, expected = gradients(again, batch)
    assert_same_gradients(found, expected)
    assert not again.model.is_activation_checkpointing


def test_a_released_base_model_is_as_it_was(tiny_qwen, questions, tmp_path):
    settings = quick_settings(
        tiny_qwen, gradient_checkpointing=True,
        optimizations=optimizations.without(["no_checkpointing"]),
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
