"""One run: every guard must bite, and everything that is logged must hold."""

import csv
import functools
import math

import bitsandbytes as bnb
import pandas as pd
import pytest
import torch
from conftest import four_bit_layers, quick_settings, refusal, resolved
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOTrainer

from grpo_lab import guards, memory, models, training
from grpo_lab.data import load_splits
from grpo_lab.errors import LabError
from rewards.batch import RewardError
from rewards.cookbook import COOKBOOK
from rewards.health import FailureLimit, Outcome, report
from rewards.options import with_options

pytestmark = pytest.mark.numeric


def variety(completions, **kwargs) -> list[float]:
    """Different characters, so that groups have a spread."""
    return [float(len(set(chat[0]["content"]))) for chat in completions]


def constant(completions, **kwargs) -> list[float]:
    return [1.0] * len(completions)


@pytest.fixture
def build(tiny_splits, tmp_path):
    """Build a trainer in a fresh directory, with what the caller changes."""

    def build(
        settings,
        rewards=(variety,),
        run_dir=tmp_path,
        progress=None,
        rows=tiny_splits.train,
        callbacks=(),
    ):
        model, tokenizer = models.load_policy(
            settings.model, settings.load_in_4bit
        )
        return training.build_trainer(
            resolved(settings, tokenizer, rows), rows, rewards, run_dir, model,
            tokenizer, progress, callbacks,
        )  # fmt: skip

    return build


def by_hand(settings, rows, run_dir, model, tokenizer, **changes):
    """A trainer as TRL makes it, without our guards."""
    found = resolved(settings, tokenizer, rows)
    arguments = training.grpo_config(found, run_dir, len(rows))
    for name, value in changes.items():
        setattr(arguments, name, value)
    return GRPOTrainer(
        model=model,
        reward_funcs=[variety],
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=training.lora_config(settings),
    )


def adapters(trainer) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }


# --- What `check` refuses ----------------------------------------------------


def may_repack(trainer) -> None:
    four_bit_layers(trainer.model)[3].support_avx512bf16_for_cpu = True


def trains_the_base(trainer) -> None:
    trainer.model.get_base_model().model.norm.weight.requires_grad_(True)


def evaluates_by_sampling(trainer) -> None:
    trainer.args.eval_strategy = "steps"


def sees_two_gpus(trainer) -> None:
    trainer.args._n_gpu = 2


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (may_repack, "stops passing gradients"),
        (trains_the_base, "not all adapters"),
        (evaluates_by_sampling, "that is no accuracy"),
        (sees_two_gpus, "CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_a_trainer_that_would_not_learn_is_refused(build, quick, spoil, told):
    trainer = build(quick)
    assert len(four_bit_layers(trainer.model)) == 14
    guards.check(trainer, quick)
    spoil(trainer)
    assert told in refusal(guards.check, trainer, quick)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"temperature": 0.5}, "The rollouts would use"),
        ({"top_k": 50}, "The rollouts would use"),
        ({"top_p": 0.9}, "The rollouts would use"),
        ({"max_completion_length": 16}, "The rollouts would use"),
        ({"load_in_4bit": False}, "unquantised, but"),
    ],
)
def test_a_trainer_of_other_settings_is_refused(
    build, quick, tiny_qwen, changed, told
):
    other = quick_settings(tiny_qwen, **changed)
    assert told in refusal(guards.check, build(quick), other)


# --- Trap 1: layers without a backward --------------------------------------


@pytest.mark.skipif(
    not bnb.functional.has_avx512bf16(),
    reason="this CPU has no AVX512-BF16, so nothing is ever repacked",
)
def test_a_repacked_layer_stops_the_run(build, tiny_llama):
    """The real thing: one forward in eval mode, then training."""
    _stops_when_repacked(
        build(quick_settings(tiny_llama, optimizations=())),
        "adapters of 4 layers have no grad",
    )
    _stops_when_repacked(
        build(quick_settings(tiny_llama)), "repacked for inference"
    )


def _stops_when_repacked(trainer, match: str) -> None:
    for module in four_bit_layers(trainer.model):
        module.support_avx512bf16_for_cpu = True
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(input_ids=torch.tensor([[5, 6, 7]]))
    trainer.model.train()
    with pytest.raises(LabError, match=match):
        training.train(trainer)


def test_evaluation_before_training_does_no_harm(build, quick):
    """The order of the grid: base evaluation first, then training."""
    trainer = build(quick)
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(input_ids=torch.tensor([[5, 6, 7]]))
    trainer.model.train()
    before = adapters(trainer)
    training.train(trainer)
    after = adapters(trainer)
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert before and not still


def test_an_adapter_without_a_gradient_stops_the_run(build, quick):
    trainer = build(quick)
    name = "model.layers.1.self_attn.v_proj"
    layer = trainer.model.get_base_model().get_submodule(name)
    layer.forward = lambda x, *args, **kwargs: layer.base_layer(x)
    with pytest.raises(LabError, match=r"of 1 layers have no grad.*1\.self_a"):
        training.train(trainer)


def test_an_adapter_that_does_not_move_stops_the_run(build, quick):
    trainer = build(quick)

    class Frozen(torch.optim.SGD):
        def step(self, closure=None):
            return None

    trainer.optimizer = Frozen(trainer.model.parameters(), lr=1e-3)
    with pytest.raises(LabError, match="adapters of 4 layers did not change"):
        training.train(trainer)


def guarded_step(gradient: float, rate: float = 1e-3) -> None:
    """One optimiser step that changes nothing, under the guard."""
    model = torch.nn.Module()
    model.register_parameter("q_proj.lora_A".replace(".", "_"), None)
    tensor = torch.nn.Parameter(torch.ones(2))
    tensor.grad = torch.full((2,), gradient)
    model.lora_A = tensor
    guard = guards.AdapterGuard()
    optimizer = torch.optim.SGD([tensor], lr=rate)
    guard.on_pre_optimizer_step(None, None, None, model, optimizer)
    guard.on_optimizer_step(None, None, None, model=model)


def test_the_guard_knows_steps_that_may_change_nothing():
    with pytest.raises(LabError, match="did not change"):
        guarded_step(gradient=0.5)
    guarded_step(gradient=0.0)  # a step of groups without spread
    guarded_step(gradient=0.5, rate=0.0)  # the first step of a warm-up
    guarded_step(gradient=math.inf)  # float16: the scaler skips the step


# --- Trap 2: adapters in 16 bit ---------------------------------------------


def test_trl_still_casts_adapters_and_we_cast_them_back(
    build, quick, tiny_splits, tmp_path
):
    model, tokenizer = models.load_policy(quick.model)
    bare = by_hand(quick, tiny_splits.train, tmp_path, model, tokenizer)
    assert {p.dtype for p in adapters(bare).values()} == {torch.bfloat16}
    with pytest.raises(LabError, match="8 adapter tensors are in 16 bit"):
        guards.check(bare, quick)
    guards.prepare(bare)
    guards.check(bare, quick)
    assert {p.dtype for p in adapters(bare).values()} == {torch.float32}
    assert {p.dtype for p in adapters(build(quick)).values()} == {
        torch.float32
    }


def test_a_tiny_rate_moves_every_weight(build, tiny_qwen):
    """In bfloat16 a rate of 5e-6 changes about one weight in seventy."""
    settings = quick_settings(
        tiny_qwen, learning_rate=5e-6, lr_scheduler="constant", max_steps=2
    )
    trainer = build(settings)
    before = adapters(trainer)
    training.train(trainer)
    after = adapters(trainer)
    changed = [
        (after[name] != before[name]).float().mean().item()
        for name in before
        if "lora_B" in name
    ]
    assert min(changed) > 0.9


def test_no_16_bit_on_a_cpu(quick, tmp_path):
    arguments = training.grpo_config(memory.resolve(quick, 99), tmp_path, 10)
    assert (arguments.bf16, arguments.fp16) == (False, False)


# --- Trap 4: sampling values that a model brings along ----------------------


@pytest.fixture
def opinionated(tiny_qwen, tmp_path):
    """The tiny model with sampling values of its own, as Qwen2.5 has."""
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen)
    model.generation_config.update(
        do_sample=True,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0.3,
        repetition_penalty=1.05,
        no_repeat_ngram_size=3,
    )
    folder = tmp_path / "opinionated"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_qwen / name).read_bytes())
    template = "chat_template.jinja"
    (folder / template).write_bytes((tiny_qwen / template).read_bytes())
    return folder


def test_rollouts_sample_as_the_settings_say(
    build, opinionated, tmp_path, monkeypatch
):
    settings = quick_settings(
        opinionated, max_steps=1, temperature=0.9, optimizations=()
    )
    trainer = build(settings, run_dir=tmp_path / "run")
    seen = []
    policy = trainer.model.get_base_model()
    sample = type(policy)._sample

    def spy(self, *args, generation_config, **kwargs):
        seen.append(generation_config)
        return sample(
            self, *args, generation_config=generation_config, **kwargs
        )

    monkeypatch.setattr(type(policy), "_sample", spy)
    training.train(trainer)
    assert len(seen) == 1
    for name, value in {
        "do_sample": True,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "max_new_tokens": 8,
    }.items():
        assert (getattr(seen[0], name) or 0) == (value or 0), name


def test_check_refuses_what_a_model_would_sample_with(
    opinionated, tiny_splits, tmp_path
):
    settings = quick_settings(opinionated)
    model, tokenizer = models.load_policy(settings.model)
    trainer = by_hand(settings, tiny_splits.train, tmp_path, model, tokenizer)
    guards.prepare(trainer)
    with pytest.raises(LabError, match="keep_sampling_ours"):
        guards.check(trainer, settings)


# --- Traps 5, 6 and 9: configuration ----------------------------------------


def test_no_dropout_unless_asked_for(build, quick, tiny_qwen, tmp_path):
    def dropouts(settings, name):
        trainer = build(settings, run_dir=tmp_path / name)
        trainer.model.train()
        return [
            module.p
            for module in trainer.model.modules()
            if isinstance(module, torch.nn.Dropout) and module.p
        ]

    assert dropouts(quick, "without") == []
    published = quick_settings(tiny_qwen, lora_dropout=0.05)
    assert set(dropouts(published, "with")) == {0.05}


def test_the_configuration_counts_completions_and_steps(tiny_qwen, tmp_path):
    settings = quick_settings(
        tiny_qwen,
        num_generations=4,
        completions_per_step=16,
        micro_batch=8,
        max_steps=0,
        num_epochs=2,
        warmup_share=0.1,
    )
    found = memory.resolve(settings, 99)
    arguments = training.grpo_config(found, tmp_path, 100)
    assert arguments.max_steps == 50  # 100 questions, 4 a step, twice
    assert arguments.warmup_steps == 5
    assert isinstance(arguments.warmup_steps, int)
    assert arguments.per_device_train_batch_size == 8
    assert arguments.gradient_accumulation_steps == 2
    assert arguments.generation_batch_size == 16
    assert arguments.num_generations == 4


def test_a_step_holds_whole_groups(build, tiny_qwen, tmp_path):
    """2 questions x 2 completions, in two forward passes."""
    settings = quick_settings(tiny_qwen, max_steps=1, micro_batch=2)
    training.train(build(settings))
    rolled_out = pd.read_parquet(tmp_path / "completions")
    assert len(rolled_out) == 4
    questions = rolled_out["prompt"].map(lambda chat: chat[-1]["content"])
    assert sorted(questions.value_counts()) == [2, 2]


def test_warm_up_and_schedule_are_in_force(build, tiny_qwen, tmp_path):
    settings = quick_settings(tiny_qwen, max_steps=4, warmup_share=0.5)
    training.train(build(settings))
    rates = [row["learning_rate"] for row in rows_of(tmp_path)]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 5e-4])


def test_facts_are_read_off_the_trainer(build, quick, tiny_qwen):
    facts = training.facts(build(quick)).set_index("what")["value"]
    base = AutoModelForCausalLM.from_pretrained(tiny_qwen).num_parameters()
    assert facts["parameters of the base model"] == f"{base:,}"
    # Rank 4, two layers; q: 64 to 64, v: 64 to 32.
    trainable = 2 * 4 * ((64 + 64) + (64 + 32))
    assert facts["trainable parameters"] == f"{trainable:,}"
    assert facts["layers with an adapter"] == "4"
    assert facts["prompts per optimiser step"] == "2"
    assert facts["stored as, adapters"] == "float32"


# --- Traps 8 and 10, and all that is logged ---------------------------------


def rows_of(run_dir) -> list[dict]:
    return training.read_metrics(run_dir / "metrics.csv")


def test_groups_without_spread_are_counted(build, quick, tmp_path):
    training.train(build(quick, rewards=[constant]))
    rows = rows_of(tmp_path)
    assert [row["frac_reward_zero_std"] for row in rows] == [1.0] * 3
    assert [row["reward_std"] for row in rows] == [0.0] * 3
    assert [row["reward"] for row in rows] == [1.0] * 3


def test_everything_is_logged_once(build, quick, tmp_path):
    seen = []
    training.train(
        build(
            quick,
            rewards=[variety, constant],
            progress=lambda *told: seen.append(told),
        )
    )
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["reward"] == pytest.approx(row["variety"] + 1)
        assert row["constant"] == 1
        # 8 tokens are hardly ever enough for an untrained model
        assert 0.5 <= row["clipped_ratio"] <= 1
        assert 4 < row["mean_length"] <= 8
        assert row["seconds"] > 0
        assert 0.1 < row["memory_gib"] < 100
        assert row["kl"] is None  # beta is 0
        assert row["entropy"] > 0
        assert 0 <= row["frac_reward_zero_std"] <= 1
    assert min(row["frac_reward_zero_std"] for row in rows) < 1
    assert rows[0]["learning_rate"] == 1e-3
    told = [(step, total, row["reward"]) for step, total, row in seen]
    assert told == [(row["step"], 3, row["reward"]) for row in rows]
    assert board_of(tmp_path, "train/reward") == [
        (row["step"], pytest.approx(row["reward"])) for row in rows
    ]
    files = sorted(path.name for path in (tmp_path / "completions").iterdir())
    assert files == [f"completions_0000{n}.parquet" for n in (1, 2, 3)]
    table = pd.read_parquet(tmp_path / "completions" / files[0])
    assert len(table) == 4
    assert table["variety"].mean() == pytest.approx(rows[0]["variety"])


def board_of(run_dir, tag: str) -> list[tuple[int, float]]:
    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(tag)]


def test_kl_is_logged_when_it_is_paid(build, tiny_qwen, tmp_path):
    training.train(build(quick_settings(tiny_qwen, beta=0.04, max_steps=2)))
    rows = rows_of(tmp_path)
    # The adapter starts as nothing, so the first step has no distance.
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert rows[1]["kl"] is not None


def test_each_step_is_written_at_once(build, quick, tmp_path):
    """A kill at any time must find all finished steps on the disk."""
    found = []

    def look(step, total, row):
        board = board_of(tmp_path, "train/memory_gib")
        found.append((len(rows_of(tmp_path)), len(board)))

    training.train(build(quick, progress=look))
    assert found == [(1, 1), (2, 2), (3, 3)]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.csv"
    whole = "step,reward,kl,seconds\r\n1,0.5,,0.25\r\n2,0.75,,0.125\r\n"
    for end in range(len("2,0.75,,0.125\r\n")):
        start = whole.index("2,0.75")
        path.write_text(whole[: start + end], newline="")
        assert training.read_metrics(path) == [
            {"step": 1, "reward": 0.5, "kl": None, "seconds": 0.25}
        ], end
    path.write_text(whole, newline="")
    assert [row["step"] for row in training.read_metrics(path)] == [1, 2]
    assert training.read_metrics(tmp_path / "none.csv") == []


# --- What stops a run -------------------------------------------------------


def test_nan_stops_a_run(build, tiny_qwen, tmp_path):
    def infinite(completions, **kwargs):
        values = [1.0] * len(completions)
        values[0] = math.inf
        return values

    settings = quick_settings(tiny_qwen)
    with pytest.raises(LabError, match="of step 1 is"):
        training.train(build(settings, rewards=[infinite]))
    assert training.last_checkpoint(tmp_path) is None


def test_a_policy_that_broke_stops_the_run(build, quick, tmp_path):
    """The loss itself must show it, not a 0 that stands for NaN."""
    trainer = build(quick)
    loss = trainer.compute_loss
    trainer.compute_loss = lambda *a, **k: loss(*a, **k) * math.nan
    with pytest.raises(LabError, match="The loss of step 1 is nan"):
        training.train(trainer)
    assert rows_of(tmp_path) == []


def test_a_reward_that_raises_is_not_hidden(build, quick):
    def broken(completions, **kwargs):
        raise ZeroDivisionError("in the reward")

    with pytest.raises(ZeroDivisionError, match="in the reward"):
        training.train(build(quick, rewards=[broken]))


def test_a_prompt_and_completion_too_long_are_refused(build, tiny_qwen):
    longest = 512 - 80
    with pytest.raises(LabError, match=r"MAX_COMPLETION_LENGTH = \d+ or less"):
        build(quick_settings(tiny_qwen, max_completion_length=500))
    build(quick_settings(tiny_qwen, max_completion_length=longest - 100))


def test_too_few_questions_for_a_step_are_refused(
    build, tiny_qwen, tiny_splits
):
    rows = tiny_splits.train.select(range(3))
    settings = quick_settings(tiny_qwen, completions_per_step=8)
    with pytest.raises(LabError, match="Type TRAIN_ROWS = 4"):
        build(settings, rows=rows)


# --- Going on after a stop (trap 7) -----------------------------------------


class Stop(Exception):
    """Ends a run where a test wants it."""


def stop_after(step: int):
    def progress(at, total, row):
        if at == step:
            raise Stop

    return progress


SAME = ["reward", "reward_std", "loss", "grad_norm", "entropy", "variety"]


@pytest.mark.check
def test_a_resumed_run_is_bit_identical(
    build, tiny_qwen, tiny_splits, tmp_path
):
    """In the first pass over the questions, at its end, and in the second.

    Four questions, two a step, make two steps a pass; a stop after step 3
    leaves checkpoint 2. The last run stops between its last step and its end.
    """
    settings = quick_settings(
        tiny_qwen, max_steps=5, micro_batch=2, lr_scheduler="constant"
    )
    rows = tiny_splits.train.select(range(4))
    whole = build(settings, run_dir=tmp_path / "whole", rows=rows)
    training.train(whole)
    expected = pd.DataFrame(rows_of(tmp_path / "whole"))
    assert expected["step"].tolist() == [1, 2, 3, 4, 5]
    for stops in ([2, 4], [3], [99]):
        run_dir = tmp_path / f"stopped-{stops}"
        for stop in stops:
            try:
                training.train(
                    build(
                        settings,
                        run_dir=run_dir,
                        progress=stop_after(stop),
                        rows=rows,
                    )
                )
            except Stop:
                assert len(rows_of(run_dir)) == stop
        made = []
        trainer = build(
            settings,
            run_dir=run_dir,
            rows=rows,
            progress=lambda at, total, row, made=made: made.append(at),
        )
        training.train(trainer)
        # The step that was being made is made again, and no other one.
        assert made == [at for at in (1, 2, 3, 4, 5) if at >= stops[-1]]
        found = pd.DataFrame(rows_of(run_dir))
        assert found["step"].tolist() == [1, 2, 3, 4, 5]
        pd.testing.assert_frame_equal(found[SAME], expected[SAME])
        steps = [step for step, _ in board_of(run_dir, "train/reward")]
        assert steps == [1, 2, 3, 4, 5], stops
        for name, tensor in adapters(whole).items():
            assert torch.equal(tensor, adapters(trainer)[name]), (stops, name)


def test_seeds_decide_whatever_ran_before(build, quick, tmp_path):
    torch.manual_seed(1)
    first = build(quick, run_dir=tmp_path / "first")
    training.train(first)
    torch.manual_seed(2)
    torch.rand(1000)
    second = build(quick, run_dir=tmp_path / "second")
    training.train(second)
    for name, tensor in adapters(first).items():
        assert torch.equal(tensor, adapters(second)[name]), name


def test_half_a_checkpoint_is_not_gone_on_from(build, quick, tmp_path):
    with pytest.raises(Stop):
        training.train(build(quick, progress=stop_after(3)))
    newest = training.last_checkpoint(tmp_path)
    assert newest.name == "checkpoint-2"
    half = tmp_path / "checkpoint-3"
    half.mkdir()
    weights = (newest / "adapter_model.safetensors").read_bytes()
    (half / "adapter_model.safetensors").write_bytes(weights[:100])
    assert training.last_checkpoint(tmp_path) == newest
    training.train(build(quick))
    assert training.last_checkpoint(tmp_path) == half
    assert (half / "adapter_model.safetensors").stat().st_size == len(weights)


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "trainer_state.json",
        "rng_state.pth",
    ],
)
def test_a_checkpoint_that_was_cut_later_is_passed_over(
    build, quick, tmp_path, name
):
    """The one before it is gone on from, which costs a step."""
    with pytest.raises(Stop):
        training.train(build(quick, progress=stop_after(3)))
    assert training.last_checkpoint(tmp_path).name == "checkpoint-2"
    cut = tmp_path / "checkpoint-2" / name
    cut.write_bytes(cut.read_bytes()[:100])
    assert training.last_checkpoint(tmp_path).name == "checkpoint-1"
    if name != "rng_state.pth":  # a warm clone begins without one
        cut.unlink()
        assert training.last_checkpoint(tmp_path).name == "checkpoint-1"


def test_another_learning_rate_does_not_go_on(build, quick, tiny_qwen):
    """The optimiser in the checkpoint would quietly keep the old rate."""
    with pytest.raises(Stop):
        training.train(build(quick, progress=stop_after(2)))
    changed = quick_settings(tiny_qwen, learning_rate=1e-4)
    with pytest.raises(LabError, match="learning_rate was 0.001 and is now"):
        training.train(build(changed))
    training.train(build(quick))


def test_a_run_in_parts_equals_a_whole_one(build, tiny_qwen, tmp_path):
    """Two steps, prolonged to three, then to five: bit for bit the same."""
    values = {"micro_batch": 2, "lr_scheduler": "constant"}
    values["warmup_share"] = 0.0
    whole = build(
        quick_settings(tiny_qwen, max_steps=5, **values),
        run_dir=tmp_path / "whole",
    )
    training.train(whole)
    for steps in (2, 3, 5):
        settings = quick_settings(tiny_qwen, max_steps=steps, **values)
        part = build(settings, run_dir=tmp_path / "parts")
        training.extend(part)
        training.train(part)
    found = pd.DataFrame(rows_of(tmp_path / "parts"))
    expected = pd.DataFrame(rows_of(tmp_path / "whole"))
    pd.testing.assert_frame_equal(found[SAME], expected[SAME])
    for name, tensor in adapters(whole).items():
        assert torch.equal(tensor, adapters(part)[name]), name


def test_a_rate_that_depends_on_the_length_is_not_prolonged(
    build, quick, tiny_qwen
):
    training.train(build(quick))
    longer = build(quick_settings(tiny_qwen, max_steps=4))
    with pytest.raises(LabError, match="constant learning rate"):
        training.extend(longer)


class Rates(TrainerCallback):
    """Notes the rate that each step is really taken with."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(
        self, args, state, control, optimizer=None, **kwargs
    ):
        self.seen.append(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("scheduler", ["constant", "linear"])
def test_a_taken_over_run_trains_at_its_own_rate(
    build, tiny_qwen, tmp_path, scheduler
):
    """Trap 7: in the optimiser and in the schedule, at every step."""
    values = {"max_steps": 6, "warmup_share": 0.0, "lr_scheduler": scheduler}
    parent = build(
        quick_settings(tiny_qwen, **values),
        run_dir=tmp_path / "parent",
        progress=stop_after(3),
    )
    with pytest.raises(Stop):
        training.train(parent)
    checkpoint = training.last_checkpoint(tmp_path / "parent")
    other = {"learning_rate": 3e-4, "beta": 0.02, "seed": 7}
    rates = Rates()
    child = build(
        quick_settings(tiny_qwen, **values, **other),
        run_dir=tmp_path / "child",
        callbacks=[rates],
    )
    training.warm_start(checkpoint, child.args)
    copied = training.last_checkpoint(tmp_path / "child")
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        assert (copied / name).read_bytes() == (checkpoint / name).read_bytes()
    training.train(child)
    factors = {"constant": [1, 1, 1, 1], "linear": [4, 3, 2, 1]}[scheduler]
    least = 1 if scheduler == "constant" else 6
    expected = [3e-4 * factor / least for factor in factors]
    assert rates.seen == pytest.approx(expected)
    rows = rows_of(tmp_path / "child")
    assert [row["step"] for row in rows] == [3, 4, 5, 6]
    assert all(row["kl"] is not None for row in rows)
    # and the moments of the optimiser came along: six steps, not four
    [step] = {int(state["step"]) for state in child.optimizer.state.values()}
    assert step == 6


def test_a_child_writes_other_completions_than_its_parent(
    build, tiny_qwen, tmp_path
):
    """Else a copy would repeat its parent's steps to the bit."""
    values = {"lr_scheduler": "constant", "warmup_share": 0.0}
    training.train(
        build(
            quick_settings(tiny_qwen, max_steps=2, **values),
            run_dir=tmp_path / "parent",
        )
    )
    checkpoint = training.last_checkpoint(tmp_path / "parent")
    rewards = {}
    for name, seed in (("child", 43), ("again", 43), ("parent", 42)):
        trainer = build(
            quick_settings(tiny_qwen, max_steps=5, seed=seed, **values),
            run_dir=tmp_path / name,
        )
        if name == "parent":
            training.extend(trainer)
        else:
            training.warm_start(checkpoint, trainer.args)
        training.train(trainer)
        rows = rows_of(tmp_path / name)
        rewards[name] = [r["reward"] for r in rows if r["step"] > 2]
    assert rewards["parent"] != rewards["child"] == rewards["again"]


def test_metrics_keep_their_columns(build, quick, tmp_path):
    training.train(build(quick))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        header = next(csv.reader(file))
    assert header == [
        "step", *training.METRICS, "variety", "failed_share", "seconds",
        "memory_gib",
    ]  # fmt: skip


def test_the_latex_pair_trains_and_says_what_it_read(build, quick, tmp_path):
    rows = load_splits("pocket_latex", train_rows=10, eval_rows=1).train
    training.train(build(quick, rewards=[*COOKBOOK, variety], rows=rows))
    said = pd.concat(map(pd.read_parquet, tmp_path.rglob("*.parquet")))
    assert len(said) == 3 * quick.completions_per_step
    # an untrained model gives no answer, which is no failure to grade one
    assert set(said["accuracy_reward/outcome"]) == {"no_answer"}
    assert set(said["accuracy_reward/answer"]) == {""}
    shares = training.read_metrics(tmp_path / "metrics.csv")
    assert [row["failed_share"] for row in shares] == [0, 0, 0]


def test_two_rewards_of_one_name_are_refused(build, quick):
    with pytest.raises(LabError, match="Two rewards have the name variety"):
        build(quick, rewards=[variety, constant, with_options(variety)])
    other = with_options(variety)
    other.__name__ = "other"
    training.train(build(quick, rewards=[variety, other]))


def half_graded(completions, log_metric=None, **columns):
    """Pays for variety, and says that it could not grade every other one."""
    outcomes = [Outcome.TIMEOUT, Outcome.RIGHT] * (len(completions) // 2)
    report("half_graded", outcomes, {}, log_metric=log_metric)
    return variety(completions, **columns)


def test_what_a_reward_could_not_grade_is_logged(build, quick, tmp_path):
    training.train(build(quick, rewards=[variety, half_graded]))
    rows = training.read_metrics(tmp_path / "metrics.csv")
    assert [row["failed_share"] for row in rows] == [0.5] * len(rows)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    shares = board.Scalars("train/half_graded/timeout")
    assert [event.value for event in shares] == [0.5] * len(rows)


def test_a_run_that_can_grade_little_is_stopped(
    build, tiny_qwen, tmp_path, monkeypatch
):
    soon = functools.partial(FailureLimit, window=10)
    monkeypatch.setattr(training, "FailureLimit", soon)
    strict = quick_settings(tiny_qwen, max_failed_share=0.4, max_steps=9)
    with pytest.raises(RewardError, match="50 % could not be graded"):
        training.train(build(strict, rewards=[half_graded]))
    assert 1 <= len(training.read_metrics(tmp_path / "metrics.csv")) < 9
    patient = quick_settings(tiny_qwen, max_failed_share=0.5, max_steps=9)
    training.train(build(patient, [half_graded], tmp_path / "patient"))


def test_snapshots_keep_the_adapter_of_their_step(build, quick, tmp_path):
    """Of every second step, whole, and as it was then."""
    trainer = build(quick, callbacks=[training.Snapshots(every=2)])
    names = [type(one).__name__ for one in trainer.callback_handler.callbacks]
    # A step that is marked complete must have its snapshot.
    assert names.index("Snapshots") < names.index("Recorder")
    seen = {}

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen[state.global_step] = adapters(trainer)

    trainer.add_callback(Look())
    folder = tmp_path / training.SNAPSHOTS
    (folder / "2.part").mkdir(parents=True)  # a kill left it
    (folder / "2.part" / "half").write_text("")
    training.train(trainer)
    kept = training.snapshots(tmp_path)
    assert list(kept) == [2]
    assert not (kept[2] / "half").exists()
    weights = load_file(kept[2] / "adapter_model.safetensors")
    then = {name.replace(".default", ""): w for name, w in seen[2].items()}
    assert weights.keys() == then.keys()
    assert all(torch.equal(weights[name], then[name]) for name in weights)
    assert any(
        not torch.equal(seen[2][name], seen[3][name]) for name in seen[3]
    )
    assert training.snapshots(tmp_path / "none") == {}
