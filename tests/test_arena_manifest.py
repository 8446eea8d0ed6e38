"""The manifest: what is accepted, what is refused, and what is said."""

import doctest
import json
import math

import pytest
from conftest import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.arena import lint as lint_module
from grpo_lab.arena import manifest as module
from grpo_lab.arena.lint import lint
from grpo_lab.arena.manifest import (
    EXAMPLE,
    KNOWN,
    NO_MEANING,
    PUBLISHED,
    Manifest,
    completion_limit,
    control,
    load,
)
from grpo_lab.arena.manifest import settings as run_settings
from grpo_lab.errors import LabError
from grpo_lab.profiles import ALL_LINEAR, RunSettings


def place(values: dict, path: str) -> tuple[dict, str]:
    """The section that a path is in, and its last key."""
    *sections, key = path.split(".")
    for section in sections:
        values = values[section]
    return values, key


def changed(path: str, value: object) -> dict:
    """The values of the published manifest with one of them changed."""
    values = load(PUBLISHED).to_dict()
    section, key = place(values, path)
    section[key] = value
    return values


def changes(**by_key: object) -> Manifest:
    """The published manifest with some keys of the section algorithm."""
    values = load(PUBLISHED).to_dict()
    values["algorithm"] |= by_key
    return load(values)


def refused(source: object) -> str:
    with pytest.raises(LabError) as caught:
        load(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


def found(manifest: Manifest, **known: object) -> set[tuple[str, str]]:
    return {(one.level, one.path) for one in lint(manifest, **known)}


def text_of(manifest: Manifest, path: str, **known: object) -> str:
    [text] = [f.text for f in lint(manifest, **known) if f.path == path]
    return text


IGNORED = [
    "algorithm.clip_coef",
    "algorithm.calc_position_embeddings",
    "training.eval_loop",
    "mutation.mutation_sd",
]

# --- The published form -----------------------------------------------------


def test_the_published_manifest_is_accepted_with_its_values():
    manifest = load(PUBLISHED)
    assert manifest.algorithm.lr == 5e-6
    assert manifest.algorithm.batch_size == 6
    assert manifest.training.max_steps == 100_000
    assert manifest.mutation.rl_hp_selection["lr"].min == 1e-7
    assert manifest.mutation.rl_hp_selection["beta"].max == 1e-2
    assert manifest.tournament_selection.elitism is True
    assert manifest.network.lora_config.target_modules == (
        "q_proj", "k_proj", "v_proj", "o_proj",
    )  # fmt: skip


def test_the_published_manifest_gets_the_right_findings():
    assert found(load(PUBLISHED), longest_prompt=300, context=32_768) == {
        ("warning", "algorithm.max_output_tokens"),
        ("warning", "network.lora_config.lora_dropout"),
        ("warning", "environment.system_prompt"),
        ("note", ", ".join(IGNORED)),
    }


def test_what_the_published_numbers_mean():
    manifest = load(PUBLISHED)
    assert manifest.completions_per_step == 48  # 6 prompts
    assert manifest.steps == 100_000 // (48 * 2) == 1041
    assert manifest.generations == 209  # the last has one step
    assert manifest.mutation_rate == pytest.approx(6 / 7)


def test_a_manifest_survives_json():
    [warning] = lint(load(EXAMPLE), 100, 256)
    assert warning.path == "environment.system_prompt"
    assert run_settings(load(EXAMPLE), 64).target_modules == ALL_LINEAR
    for text in (PUBLISHED, EXAMPLE):
        values = load(text).to_dict()
        assert load(json.loads(json.dumps(values))).to_dict() == values


def test_both_names_of_the_selection_work_and_not_together():
    older = PUBLISHED.replace("selection_strategy", "tournament_selection")
    assert load(older).to_dict() == load(PUBLISHED).to_dict()
    wrong = PUBLISHED.replace("elitism: true", "elitism: si")
    assert "selection_strategy.elitism is 'si'" in refused(wrong)
    both = PUBLISHED + "tournament_selection: {tournament_size: 3}\n"
    assert "another name of tournament_selection" in refused(both)


@pytest.mark.parametrize("of", [module, lint_module])
def test_the_examples_in_the_docstrings(of):
    assert not doctest.testmod(of).failed


def test_every_key_without_a_meaning_is_accepted_and_named_once():
    values = load(PUBLISHED).to_dict()
    for path in NO_MEANING:
        section, key = place(values, path)
        section[key] = {"anything": [1, "a", None]}
    values["selection_strategy"] = values.pop("tournament_selection")
    manifest = load(values)
    assert manifest.to_dict() == load(PUBLISHED).to_dict()
    [note] = [f for f in lint(manifest) if f.level == "note"]
    named = set(note.path.split(", "))
    assert named == set(NO_MEANING)
    assert "the clip never acts" in note.text


# --- Files and texts --------------------------------------------------------


def test_a_path_a_text_and_a_dict_read_the_same(tmp_path):
    manifest = load(PUBLISHED)
    path = tmp_path / "manifest.yaml"
    path.write_text("\ufeff" + PUBLISHED, encoding="utf-8")
    as_json = tmp_path / "manifest.json"
    as_json.write_text(json.dumps(manifest.to_dict(), indent=1))
    assert load(path) == load(str(path)) == manifest
    assert load(as_json).to_dict() == manifest.to_dict()


def test_what_is_no_file(tmp_path):
    missing = tmp_path / "manifst.yaml"
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("# é\na: 1\n".encode("latin-1"))
    for path in (missing, tmp_path, latin):
        assert "can't be read" in refused(path)
    assert str(missing) in refused(str(missing))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n b: [\n", "line 2, column 3"),
        ("algorithm:\n\tname: GRPO\n", "line 2, column 1"),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1, column 4"),
        ("a: !!int b\n", "no tags"),
        ("\n", "is None, but it must be sections"),
        ("- GRPO\n", "is ['GRPO'], but it must be sections"),
        ("GRPO\n", "is 'GRPO', but it must be sections"),
    ],
)
def test_what_is_no_manifest(text, said):
    assert said in refused(text)


# --- Unknown keys -----------------------------------------------------------


@pytest.mark.parametrize("path", KNOWN)
def test_a_misspelt_key_names_the_right_one(path):
    values = load(PUBLISHED).to_dict()
    section, key = place(values, path)
    section[key + "z"] = section.get(key, 1)
    assert f"key {path}z; did you mean {path}?" in refused(values)


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one():
    message = refused(changed("algorithm.max_steps", 5))
    assert "algorithm.max_steps; did you mean training.max_steps?" in message
    assert "did you mean algorithm.lr or" in refused(changed("lr", 5))
    message = refused(changed("training.qqq", 5))
    assert "training.qqq; the keys there are max_steps, evo_steps" in message
    assert "no key _without" in refused(changed("_without_meaning", {}))


def test_all_faults_come_in_one_message():
    values = changed("algorithm.lerning_rate", 1)
    values["algorithm"]["group_size"] = "eight"
    del values["network"]["pretrained_model_name_or_path"]
    del values["training"]
    message = refused(values)
    assert "no key algorithm.lerning_rate" in message
    assert (
        "algorithm.group_size is 'eight', but must be a valid integer"
        in message
    )
    assert "network.pretrained_model_name_or_path is missing" in message
    assert "training is missing" in message


# --- Mistyped values --------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "needed"),
    [
        ("algorithm.group_size", 8.5, "8.5, but must be a valid integer"),
        ("algorithm.group_size", 1, "equal to 2. GRPO compares"),
        ("algorithm.group_size", None, "None, but must be a valid integer"),
        ("algorithm.update_epochs", 2, "Each completion is learned from once"),
        ("algorithm.lr", "fast", "'fast', but must be a valid number"),
        ("algorithm.lr", math.nan, "nan, but must be a finite number"),
        ("algorithm.lr", 0, "0, but must be greater than 0"),
        ("algorithm.lr", 1, "1, but must be less than 1"),
        ("algorithm.name", "DPO", "'DPO', but must be 'GRPO'"),
        ("algorithm.top_p", 2, "2, but must be less than or equal to 1"),
        ("algorithm.temperature", 0, "greater than or equal to 0.01"),
        ("environment.name", " ", "should have at least 1 character"),
        ("tournament_selection.elitism", "si", "'si', but must be a valid bo"),
        ("mutation", 3, "3, but must be a section of keys with values"),
        ("mutation.rl_hp_selection.lr", {"min": 1}, "max is missing"),
        ("mutation.probabilities.no_mut", 2, "less than or equal to 1"),
        ("mutation.probabilities.arch_mut", 0.1, "destroys what it knows"),
        ("network.lora_config", None, "None, but must be a section"),
        ("network.lora_config.task_type", "SEQ", "but must be 'CAUSAL_LM'"),
        ("network.lora_config.target_modules", [], "at least 1 item"),
        ("network.lora_config.target_modules", "q_proj", "Write a list"),
    ],
)
def test_a_mistyped_value_is_named_with_what_is_needed(path, value, needed):
    message = refused(changed(path, value))
    assert f"{path} is " in message or f"{path}.max is missing" in message
    assert needed in message


@pytest.mark.parametrize(
    ("path", "value", "read"),
    [
        ("algorithm.lr", "1e-5", 1e-5),
        ("algorithm.lr", "0.000_005", 5e-6),
        ("algorithm.group_size", "8", 8),
        ("algorithm.group_size", 8.0, 8),
        ("training.max_steps", "100_000", 100_000),
        ("algorithm.gradient_checkpointing", "True", True),
        ("network.lora_config.target_modules", "all-linear", list(ALL_LINEAR)),
    ],
)
def test_what_stands_for_a_value_is_taken_for_it(path, value, read):
    section, key = place(load(changed(path, value)).to_dict(), path)
    assert section[key] == read
    assert type(section[key]) is type(read)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("algorithm.micro_batch_size_per_gpu", 7, "micro_batch_size_per_gpu"),
        ("algorithm.lr", 1e-4, "algorithm.lr is 0.0001, outside"),
        ("algorithm.lr", 1e-8, "algorithm.lr is 1e-08, outside"),
        ("algorithm.beta", 0.1, "algorithm.beta is 0.1, outside"),
        ("mutation.rl_hp_selection.lr.min", 1e-4, "min must not be above"),
        ("mutation.rl_hp_selection.lr.max", 1.5, "within 0 and 0.99"),
        ("mutation.rl_hp_selection.beta.max", 11, "within 0 and 10"),
        ("training.max_steps", 95, "Write max_steps: 96 or more"),
    ],
)
def test_values_that_contradict_each_other(path, value, said):
    message = refused(changed(path, value))
    assert said in message
    assert path.removesuffix(".min").removesuffix(".max") in message


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
ANY_VALUE = PLAIN | st.lists(PLAIN) | st.dictionaries(st.text(), PLAIN)


@given(st.sampled_from(KNOWN), ANY_VALUE)
@settings(max_examples=150, deadline=None)
def test_any_value_anywhere_is_read_or_refused_and_judged(path, value):
    try:
        manifest = load(changed(path, value))
        run_settings(manifest, 64)
    except LabError:
        return
    lint(manifest, longest_prompt=100, context=512)
    stored = json.loads(json.dumps(manifest.to_dict()))
    assert load(stored).to_dict() == manifest.to_dict()


# --- Lint -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "at"),
    [
        ("tournament_selection.tournament_size", 3, ""),
        ("training.max_steps", 96 * 5, "training.evo_steps"),
        ("training.evo_steps", 4, "training.evaluation_interval"),
        ("training.evaluation_interval", 1, ""),
        ("training.pop_size", 1, ""),
        ("mutation.rl_hp_selection", {}, "mutation"),
        ("mutation.probabilities", {"no_mut": 0, "rl_hp_mut": 0}, "mutation"),
    ],
)
def test_one_change_gives_one_more_finding(path, value, at):
    at = at or path
    before, after = load(PUBLISHED), load(changed(path, value))
    before._without_meaning.clear()  # `to_dict` leaves them out
    assert found(after) - found(before) == {("warning", at)}
    assert text_of(after, at).startswith(at)
    assert text_of(after, at).endswith(".")


def test_the_supplied_prompt_is_shown():
    manifest = load(PUBLISHED)
    path = "environment.system_prompt"
    assert "'Use tags.'" in text_of(manifest, path, forced_prompt="Use tags.")
    own = load(changed("environment.system_prompt", "Mine."))
    assert ("warning", path) not in found(own, forced_prompt="Use tags.")


def test_an_answer_must_fit_the_context():
    manifest = load(PUBLISHED)
    length, cap = "network.max_context_length", "algorithm.max_output_tokens"
    assert ("warning", length) in found(manifest, context=511)
    assert ("warning", length) not in found(manifest, context=512)
    near = changes(max_output_tokens=361)
    assert ("warning", cap) in found(near, longest_prompt=100)
    assert ("warning", cap) not in found(near, longest_prompt=99)
    assert ("warning", cap) not in found(near)
    over = text_of(near, cap, longest_prompt=200)
    assert "a completion is cut at 312" in over


# --- Settings ---------------------------------------------------------------


def test_a_completion_has_what_is_asked_or_left():
    manifest = load(PUBLISHED)
    assert completion_limit(manifest, 212, 32_768) == 300
    assert completion_limit(manifest, 212, 256) == 44
    assert completion_limit(manifest, 511, 512) == 1
    capped = changes(max_output_tokens=200)
    assert completion_limit(capped, 212, 512) == 200
    assert completion_limit(capped, 412, 512) == 100
    for prompt, context in ((512, 512), (300, 300)):
        with pytest.raises(LabError, match="no room for an answer"):
            completion_limit(capped, prompt, context)


def test_what_may_be_left_out():
    manifest = load(
        {
            "algorithm": {"name": "GRPO"},
            "environment": {"name": "gsm8k"},
            "training": {"max_steps": 96},
            "mutation": None,  # every line of it commented out
            "network": {"pretrained_model_name_or_path": "pocket-qwen"},
        }
    )
    assert (manifest.steps, manifest.mutation_rate) == (1, 0)
    assert manifest.network.load_in_4bit is True
    assert manifest.environment.fitness_rows == 100


def test_the_settings_of_a_member_are_the_manifests():
    chosen = run_settings(load(PUBLISHED), 200)
    assert chosen == RunSettings(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        learning_rate=5e-6,
        num_generations=8,
        completions_per_step=48,
        micro_batch=48,
        max_steps=1041,
        max_completion_length=200,
        temperature=0.9,
        beta=0.001,
        lora_alpha=64,
        lora_dropout=0.05,
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
        lr_scheduler="constant",
        warmup_share=0.0,
        max_grad_norm=0.1,
        save_steps=1,
        seed=42,
    )


def test_what_differs_from_the_defaults_reaches_the_settings():
    manifest = changes(
        top_p=0.5,
        top_k=50,
        micro_batch_size_per_gpu=12,
        gradient_checkpointing=True,
    )
    chosen = run_settings(manifest, 200)
    assert (chosen.top_p, chosen.top_k, chosen.micro_batch) == (0.5, 50, 12)
    assert chosen.gradient_checkpointing


def test_the_control_has_the_same_completions_and_no_evolution():
    manifest = load(changed("training.pop_size", 3))
    alone = control(manifest)
    assert alone.training.pop_size == 1
    assert alone.steps == 3 * manifest.steps
    assert alone.training.max_steps == 3 * manifest.steps * 48 <= 100_000
    assert alone.mutation_rate == 0
    assert alone.tournament_selection.elitism
    assert found(alone) - found(manifest) == {
        ("warning", "mutation"),
        ("warning", "training.pop_size"),
    }
    assert alone.algorithm == manifest.algorithm
    assert load(alone.to_dict()) == alone


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("lora_r: 16", "lora_r: yes", "lora_r is True, but must be a number"),
        ("lora_r: 16", "lora_r: 16\n    lora_r: 8", "lora_r is given twice"),
        ("lora_r: 16", "? [lora_r]\n    : 16", "is no YAML"),
    ],
)
def test_what_yaml_would_read_otherwise_is_refused(old, new, words):
    text = module.manifest_text(EXAMPLE)
    assert old in text
    assert words in refusal(load, text.replace(old, new))
