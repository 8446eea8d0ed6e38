"""The table of sizes: every row can train, and bad values are refused."""

import dataclasses
import doctest
import json
import math
import pickle

import pytest
from conftest import refusal

from grpo_lab import profiles
from grpo_lab import settings as run_settings
from grpo_lab.data import SOURCES
from grpo_lab.errors import LabError
from grpo_lab.profiles import PROFILES, RunSettings, choose, run_names
from grpo_lab.settings import OPTIMIZERS
from grpo_lab.speed.optimizations import OPTIMIZATIONS


def settings(**changes) -> RunSettings:
    return RunSettings(
        **{"model": "pocket-qwen", "learning_rate": 1e-3, **changes}
    )


def test_the_published_full_grid():
    """Values of the design: 4 runs, 16 completions, r 32, two modules."""
    runs = PROFILES["full"].settings()
    assert [(run.short_model, run.learning_rate) for run in runs] == [
        ("Qwen2.5-3B-Instruct", 5e-6),
        ("Qwen2.5-3B-Instruct", 1e-5),
        ("Llama-3.1-8B-Instruct", 5e-6),
        ("Qwen2.5-7B-Instruct", 5e-6),
    ]
    for run in runs:
        assert run.completions_per_step == 16
        assert run.num_generations == 8
        assert run.max_completion_length == 1024
        assert (run.lora_r, run.lora_alpha) == (32, 64)
        assert run.target_modules == ("q_proj", "v_proj")
        assert run.load_in_4bit
        assert (run.adam_beta1, run.adam_beta2) == (0.9, 0.99)
        assert (run.weight_decay, run.max_grad_norm) == (0.1, 0.1)
        assert (run.warmup_share, run.lr_scheduler) == (0.1, "linear")
        assert run.seed == 42
        assert run.steps(PROFILES["full"].train_rows) == 500  # two passes


@pytest.mark.parametrize("name", PROFILES)
def test_every_row_makes_a_grid_worth_comparing(name):
    row = PROFILES[name]
    runs = row.settings()
    assert len(set(runs)) == len(runs) == 4
    assert len({run.model for run in runs}) >= 2
    assert len({run.learning_rate for run in runs}) >= 2
    assert row.data in SOURCES
    assert row.train_rows == 500
    assert row.eval_rows >= 100
    assert all(run.load_in_4bit for run in runs)
    assert all(run.lora_dropout == 0 for run in runs)
    assert all(run.warmup_share * run.steps(500) >= 1 for run in runs)


def test_a_profile_with_a_learners_own_values():
    row = PROFILES["pocket"]
    assert row.choose_grid([], []) == row.grid
    assert row.choose_grid([], [0.1]) == {
        "pocket-qwen": (0.1,),
        "pocket-llama": (0.1,),
    }
    rates = row.grid["pocket-qwen"]
    assert row.choose_grid(["mine"], []) == {"mine": rates}
    assert row.choose_grid(["pocket-llama"], [0.1, 0.2]) == {
        "pocket-llama": (0.1, 0.2)
    }
    runs = row.settings(grid={"mine": (0.1, 0.2)}, max_steps=3)
    assert [(run.model, run.learning_rate) for run in runs] == [
        ("mine", 0.1),
        ("mine", 0.2),
    ]
    assert {run.max_steps for run in runs} == {3}
    kept = row.run["completions_per_step"]
    assert {run.completions_per_step for run in runs} == {kept}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"learning_rate": 0}, "Type a rate such as"),
        ({"learning_rate": -1e-5}, "must lie above 0"),
        ({"learning_rate": math.nan}, "LEARNING_RATE is nan"),
        ({"learning_rate": 1.0}, "below 1"),
        ({"learning_rate": "1e-3"}, "'1e-3', but it must be a finite number"),
        ({"num_generations": 1}, "NUM_GENERATIONS = 8"),
        ({"num_generations": 3}, "COMPLETIONS_PER_STEP = 6"),
        ({"num_generations": 32}, "COMPLETIONS_PER_STEP = 64"),
        ({"micro_batch": 3}, "MICRO_BATCH = 8"),
        ({"micro_batch": 0}, "MICRO_BATCH"),
        ({"max_completion_length": 0}, "MAX_COMPLETION_LENGTH is 0"),
        ({"max_steps": -1}, "MAX_STEPS is -1"),
        ({"max_steps": 2.5}, "MAX_STEPS is 2.5, but it must be a whole"),
        ({"temperature": 0}, "TEMPERATURE is 0"),
        ({"top_p": 0}, "TOP_P is 0"),
        ({"top_p": 1.5}, "TOP_P is 1.5, but it must lie between 0.01 and 1"),
        ({"beta": -0.1}, "BETA is -0.1"),
        ({"beta": math.nan}, "BETA is nan"),
        ({"beta": math.inf}, "BETA is inf"),
        ({"lora_r": 0}, "LORA_R is 0"),
        ({"lora_r": True}, "LORA_R is True"),
        ({"lora_r": "8"}, "LORA_R is '8', but it must be a whole number"),
        ({"lora_dropout": 1.0}, "LORA_DROPOUT is 1.0"),
        ({"warmup_share": 5}, "WARMUP_SHARE is 5"),
        ({"adam_beta2": 1}, "ADAM_BETA2 is 1, but it must be at least 0"),
        ({"num_epochs": 0}, "NUM_EPOCHS is 0"),
        ({"save_steps": 0}, "SAVE_STEPS is 0"),
        ({"load_in_4bit": "False"}, "'False', but it must be True or False"),
        ({"gradient_checkpointing": 1}, "GRADIENT_CHECKPOINTING is 1"),
        ({"target_modules": "q_proj"}, "all-linear"),
        ({"target_modules": []}, "at least one layer"),
        ({"target_modules": ["q_proj", ""]}, "at least one layer"),
        ({"optimizations": "all"}, "OPTIMIZATIONS is 'all', but it must be"),
        ({"lr_scheduler": "lineal"}, "no scheduler 'lineal'; choose one of"),
        ({"optimizer": "adam"}, "optimiser 'adam'; choose one of adamw_torch"),
        ({"model": None}, "MODEL is None"),
        ({"rank": 8}, "no setting 'rank'. It has model, learning_rate"),
    ],
)  # fmt: skip
def test_what_can_not_train_is_refused(changes, told):
    assert told in refusal(settings, **changes)


def test_a_run_needs_a_model_and_a_rate():
    assert "needs a model" in refusal(RunSettings)
    assert "needs a learning_rate" in refusal(RunSettings, "pocket-qwen")
    assert "LEARNING_RATE is 0" in refusal(RunSettings, "pocket-qwen", 0)


def test_every_optimiser_and_scheduler_is_one_of_transformers():
    from transformers.trainer_utils import SchedulerType
    from transformers.training_args import OptimizerNames

    assert {*OPTIMIZERS} <= {name.value for name in OptimizerNames}
    known = {name.value for name in SchedulerType}
    assert {*profiles.SCHEDULERS.values()} <= known
    for name in OPTIMIZERS:
        assert settings(optimizer=name).optimizer == name


def test_sizes_follow_from_each_other():
    one = settings(num_generations=8, completions_per_step=32, micro_batch=4)
    assert one.prompts_per_step == 4
    assert one.accumulation_steps == 8
    assert one.steps(500) == 125
    assert dataclasses.replace(one, num_epochs=2).steps(501) == 250
    assert dataclasses.replace(one, num_epochs=0.5).steps(500) == 62
    assert dataclasses.replace(one, max_steps=7).steps(500) == 7
    assert one.steps(3) == 1


def test_settings_there_and_back():
    one = settings(target_modules=["q_proj"], beta=0, lora_r=8.0)
    assert one.target_modules == ("q_proj",)
    assert type(one.beta) is float and type(one.lora_r) is int
    for again in (
        RunSettings(**json.loads(json.dumps(one.to_dict()))),
        pickle.loads(pickle.dumps(one)),
        dataclasses.replace(one, lora_r=8),
        RunSettings("pocket-qwen", 1e-3, target_modules=("q_proj",), lora_r=8),
    ):
        assert again == one and hash(again) == hash(one)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.lora_r = 4
    with pytest.raises(LabError, match="LORA_R is 0"):
        dataclasses.replace(one, lora_r=0)


def test_a_record_of_an_older_version_still_loads():
    """Whole numbers where a rate may have a fraction, no optimizations."""
    record = settings(beta=0, top_p=1).to_dict()
    record["max_grad_norm"], record["num_epochs"] = 1, 2
    del record["optimizations"]
    found = RunSettings(**record)
    assert (found.max_grad_norm, found.num_epochs) == (1.0, 2.0)
    assert found.optimizations == tuple(OPTIMIZATIONS)


def test_names_tell_runs_apart():
    runs = [
        settings(learning_rate=rate, beta=beta)
        for rate in (1e-3, 1e-4)
        for beta in (0, 0.04)
    ]
    names = run_names(runs)
    assert names[1] == "pocket-qwen lr=0.001 beta=0.04"
    assert len(set(names)) == 4
    owners = [settings(model="a/model"), settings(model="b/model")]
    assert len(set(run_names(owners))) == 2
    assert run_names([]) == []
    assert run_names([settings(model="Qwen/Qwen2.5-3B-Instruct")]) == [
        "Qwen2.5-3B-Instruct lr=0.001"
    ]
    assert doctest.testmod(run_settings).failed == 0


@pytest.mark.parametrize(
    ("name", "memory", "chosen"),
    [
        ("full", 79.2, "full"),
        ("full", 139.8, "full"),
        ("lite", 14.6, "lite"),
        ("lite", 0, "pocket"),
        ("pocket", 0, "pocket"),
        ("pocket", 79.2, "pocket"),
    ],
)
def test_a_machine_gets_its_profile(name, memory, chosen):
    assert choose(name, memory).name == chosen


@pytest.mark.parametrize(
    ("name", "memory", "told"),
    [
        ("ful", 0, "Type PROFILE = 'full'"),
        ("LITE", 0, "Type PROFILE = 'lite'"),
        ("anything", 0, "full, lite, pocket"),
        ("full", 0, r"no GPU: 79\.\d GiB too little.*PROFILE = 'pocket'"),
        ("full", 24, r"24\.\d GiB: 55\.\d GiB too little.*PROFILE = 'lite'"),
        ("lite", 8, r"8\.\d GiB: 6\.\d GiB too little.*PROFILE = 'pocket'"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(name, memory, told):
    with pytest.raises(LabError, match=told):
        choose(name, memory)


# --- The first run ----------------------------------------------------------


@pytest.mark.parametrize("name", profiles.FIRST_RUN)
def test_every_row_of_the_first_run_is_the_cookbooks_story(name):
    row = profiles.FIRST_RUN[name]
    run = profiles.first_run(row, "ours")
    assert SOURCES[row.data].latex
    assert (run.lora_r, run.lora_alpha, run.lora_dropout) == (8, 32, 0)
    assert run.load_in_4bit
    assert run.max_completion_length >= 64
    assert run.warmup_share * run.steps(row.train_rows) >= 1
    assert row.eval_rows >= 80
    assert 4 <= row.short_steps <= run.steps(row.train_rows)
    assert row.needs == PROFILES[name].needs
    if name != "pocket":
        assert run.target_modules == profiles.ATTENTION_QV
        assert row.train_rows == 3622
    sizes = {"full": "1.5B", "lite": "0.5B", "pocket": "pocket-qwen"}
    assert sizes[name] in run.model


def test_the_cookbooks_values_as_published():
    """S. Paniego (2025); the rest are defaults of what it was tested with."""
    run = profiles.first_run(profiles.FIRST_RUN["lite"], "published")
    assert run.learning_rate == 1e-5
    assert (run.num_generations, run.max_completion_length) == (4, 64)
    assert (run.prompts_per_step, run.accumulation_steps) == (8 * 16, 16)
    assert (run.num_epochs, run.steps(3622)) == (1, 28)
    assert (run.lora_r, run.lora_alpha, run.lora_dropout) == (8, 32, 0.1)
    assert run.target_modules == ("q_proj", "v_proj")
    assert (run.temperature, run.top_k, run.beta) == (0.9, 50, 0.04)
    assert (run.load_in_4bit, run.warmup_share) == (False, 0)
    assert run.model == "Qwen/Qwen2-0.5B-Instruct"


def test_a_learners_own_values_come_last():
    row = profiles.FIRST_RUN["pocket"]
    for values in profiles.FIRST_RUN_VALUES:
        run = profiles.first_run(
            row, values, "mine", learning_rate=0.5, max_steps=3
        )
        assert (run.model, run.learning_rate, run.max_steps) == (
            "mine", 0.5, 3,
        )  # fmt: skip
    with pytest.raises(LabError, match="ours, published. Type SETTINGS"):
        profiles.first_run(row, "publishd")


def test_a_lesson_chooses_from_its_own_table():
    rows = profiles.FIRST_RUN
    assert choose("lite", 0, rows) is rows["pocket"]
    assert choose("lite", 15, rows) is rows["lite"]
    assert choose("full", 80, rows) is rows["full"]
