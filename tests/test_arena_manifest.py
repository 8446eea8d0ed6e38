"""The manifest: what is accepted, what is refused, and what is said."""

import doctest
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.arena import lint as lint_module
from grpo_lab.arena import manifest as module
from grpo_lab.arena.lint import lint
from grpo_lab.arena.manifest import (
    EXAMPLE,
    KNOWN,
    MUTABLE,
    NO_MEANING,
    PUBLISHED,
    Manifest,
    completion_limit,
    control,
    load,
)
from grpo_lab.arena.manifest import settings as run_settings
from grpo_lab.errors import LabError
from grpo_lab.profiles import ALL_LINEAR
from grpo_lab.speed.levers import LEVERS


def changed(path: str, value: object, base: str = PUBLISHED) -> dict:
    """The values of a manifest with one of them changed."""
    values = load(base).to_dict()
    *sections, key = path.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[key] = value
    return values


def changes(**by_path: object) -> Manifest:
    """The published manifest with some changes, `__` for each dot."""
    values = load(PUBLISHED).to_dict()
    for path, value in by_path.items():
        *sections, key = path.split("__")
        place = values
        for section in sections:
            place = place[section]
        place[key] = value
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
    assert manifest.without_meaning == {
        "algorithm.clip_coef": 0.2,
        "algorithm.calc_position_embeddings": True,
        "training.eval_loop": 1,
        "mutation.mutation_sd": 0.1,
    }


def test_the_published_manifest_gets_the_right_findings():
    assert found(load(PUBLISHED), longest_prompt=300, context=32_768) == {
        ("warning", "algorithm.max_output_tokens"),
        ("warning", "network.lora_config.lora_dropout"),
        ("warning", "environment.system_prompt"),
        ("note", "algorithm.clip_coef"),
        ("note", "algorithm.calc_position_embeddings"),
        ("note", "training.eval_loop"),
        ("note", "mutation.mutation_sd"),
    }


def test_what_the_published_numbers_mean():
    manifest = load(PUBLISHED)
    assert manifest.completions_per_step == 48  # 6 prompts
    assert manifest.steps == 100_000 // (48 * 2) == 1041
    assert manifest.generations == 209  # the last has one step
    assert manifest.mutation_rate == pytest.approx(6 / 7)


def test_a_manifest_survives_json():
    for text in (PUBLISHED, EXAMPLE):
        manifest = load(text)
        stored = json.loads(json.dumps(manifest.to_dict()))
        assert load(stored) == manifest
        assert load(stored).without_meaning == manifest.without_meaning
    assert load(PUBLISHED).to_dict()["algorithm"]["clip_coef"] == 0.2


def test_both_names_of_the_selection_work_and_not_together():
    older = PUBLISHED.replace("selection_strategy", "tournament_selection")
    assert load(older) == load(PUBLISHED)
    both = PUBLISHED + "tournament_selection: {tournament_size: 3}\n"
    assert "two names of one section" in refused(both)


def test_a_fault_is_named_as_it_was_written():
    text = PUBLISHED.replace("elitism", "elitsm")
    assert "selection_strategy.elitsm; did you mean selection_strategy." in (
        refused(text)
    )


def test_the_example_has_no_error():
    levels = {f.level for f in lint(load(EXAMPLE), 100, 256)}
    assert levels == {"warning"}  # it has no system prompt
    assert run_settings(load(EXAMPLE), 64).target_modules == ALL_LINEAR


@pytest.mark.parametrize("of", [module, lint_module])
def test_the_examples_in_the_docstrings(of):
    result = doctest.testmod(of)
    assert result.attempted and not result.failed


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
    assert manifest.steps == 1
    assert manifest.mutation_rate == 0
    assert manifest.algorithm.top_k == 0
    assert manifest.network.load_in_4bit is True
    assert manifest.environment.fitness_rows == 100
    assert manifest.environment.test_rows == 200
    assert not [f for f in lint(manifest) if f.level == "error"]


def test_every_key_without_a_meaning_is_accepted_and_named_once():
    values = load(PUBLISHED).to_dict()
    for path in NO_MEANING:
        *sections, key = path.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[key] = {"anything": [1, "a", None]}
    manifest = load(values)
    assert manifest.to_dict() == values
    notes = [f.path for f in lint(manifest) if f.level == "note"]
    assert sorted(notes) == sorted(NO_MEANING)


# --- Files and texts --------------------------------------------------------


def test_a_path_a_text_and_a_dict_read_the_same(tmp_path):
    manifest = load(PUBLISHED)
    path = tmp_path / "manifest.yaml"
    path.write_text("\ufeff" + PUBLISHED, encoding="utf-8")
    as_json = tmp_path / "manifest.json"
    as_json.write_text(json.dumps(manifest.to_dict(), indent="\t"))
    assert load(path) == load(str(path)) == load(as_json) == manifest


def test_json_keeps_characters_outside_the_basic_plane():
    values = changed("environment.system_prompt", "Think \U0001f914")
    prompt = load(json.dumps(values, indent=1)).environment.system_prompt
    assert prompt == "Think \U0001f914"


def test_what_is_no_file(tmp_path):
    missing = tmp_path / "manifst.yaml"
    assert f"There is no manifest {missing}" in refused(missing)
    assert "can't be read: Is a directory" in refused(str(tmp_path))
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("# é\na: 1\n".encode("latin-1"))
    assert "saved as UTF-8" in refused(latin)
    assert "File name too long" in refused("a" * 5000)
    assert "can't be read" in refused("a\0b")
    assert "can't be read" in refused("~no-such-user-here/m.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n b: [\n", "line 2, column 3"),
        ("algorithm:\n\tname: GRPO\n", "line 2, column 1"),
        ("a: 1\nb: \x07\n", "line 2, column 4"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1"),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1, column 4"),
        ("lr: 1\nlr: 2\n", "gives lr twice in one section, in line 1 and in "),
        ('{"lr": 1,\n"lr": 2}', "gives lr twice in one section, in line 1"),
        ("a:\n- {b: 1, b: 2}\n", "gives b twice"),
        ("a: !!int b\n", "without tags"),
        ("a: !!timestamp b\n", "without tags"),
        ("a: 2020-13-45\n", "can't be read"),
        ("[" * 5000 + "\n", "can't be read"),
        ("\n", "is empty, but it must be sections"),
        ("- GRPO\n", "is ['GRPO'], but it must be sections"),
        ("GRPO\n", "is 'GRPO', but it must be sections"),
    ],
)
def test_what_is_no_manifest(text, said):
    assert said in refused(text)


def test_the_place_of_a_fault_names_the_file(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("a: [\n")
    assert f"The manifest {path} is no YAML: line 2" in refused(path)


def test_aliases_are_fine_until_they_make_a_bomb():
    shared = PUBLISHED.replace("    beta:\n", "    beta: &b\n")
    assert load(shared) == load(PUBLISHED)
    lines = ["a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]"]
    for level in range(1, 10):
        items = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} [{items}]")
    bomb = "\n".join([*lines, "algorithm: {vllm_config: *a9, lr: *a9}\n"])
    message = refused(bomb)
    assert "algorithm.vllm_config is " in message
    assert "algorithm.lr is " in message
    assert len(message) < 5000
    assert "must be plain" in refused("algorithm: {use_vllm: &a [*a]}\n")


# --- Unknown keys -----------------------------------------------------------


def misspelt(key: str) -> set[str]:
    """The key with one letter missing, doubled, wrong or swapped."""
    made = set()
    for at in range(len(key)):
        made.add(key[:at] + key[at + 1 :])
        made.add(key[: at + 1] + key[at:])
        made.add(key[:at] + "z" + key[at + 1 :])
        made.add(key[:at] + key[at : at + 2][::-1] + key[at + 2 :])
    return made


WITH_A_MEANING = [path for path in KNOWN if path not in NO_MEANING]


@pytest.mark.parametrize("path", WITH_A_MEANING)
def test_a_misspelt_key_names_the_right_one(path):
    parent, _, key = path.rpartition(".")
    if parent == "mutation.rl_hp_selection":
        pytest.skip("which names may be mutated is for lint to say")
    beside = {p for p in KNOWN if p.rpartition(".")[0] == parent}
    names = {p.rpartition(".")[2] for p in beside}
    values = changed("algorithm.clip_coef", 0.2)
    place = values
    for section in parent.split(".") if parent else ():
        place = place[section]
    for wrong in misspelt(key) - names - {""}:
        place[wrong] = place.get(key)
        # Top-level nulls are sections that were left empty.
        if place[wrong] is None:
            place[wrong] = 1
        message = refused(values)
        shown = f"{parent}.{wrong}" if parent else wrong
        assert f"There is no key {shown}; did you mean" in message
        assert path in message.partition("did you mean")[2], wrong
        del place[wrong]


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one():
    message = refused(changed("algorithm.max_steps", 5))
    assert "algorithm.max_steps; did you mean training.max_steps?" in message
    assert "did you mean algorithm.lr or" in refused(changed("lr", 5))


def test_a_key_like_no_other_gets_the_list():
    message = refused(changed("training.qqq", 5))
    assert "training.qqq; the keys there are max_steps, evo_steps" in message
    assert "eval_loop" not in message
    assert "no key without_meaning" in refused(changed("without_meaning", {}))
    assert "no key _without_meaning" in (
        refused(changed("_without_meaning", {}))
    )


def test_all_faults_come_in_one_message():
    values = changed("algorithm.lerning_rate", 1)
    values["algorithm"]["group_size"] = "eight"
    del values["network"]["pretrained_model_name_or_path"]
    del values["training"]
    message = refused(values)
    assert "no key algorithm.lerning_rate" in message
    assert "algorithm.group_size is 'eight', but must be a whole" in message
    assert "network.pretrained_model_name_or_path is missing" in message
    assert "training is missing: give it a section with" in message


def test_very_many_faults_are_counted():
    values = changed("algorithm.lr", {})
    values["training"] |= {f"qqq{number}": 1 for number in range(1000)}
    message = refused(values)
    assert "There are 981 more such faults" in message
    assert len(message) < 20_000


# --- Mistyped values --------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "needed"),
    [
        ("algorithm.group_size", 8.5, "8.5, but must be a whole number"),
        ("algorithm.group_size", True, "true, but must be a whole number"),
        ("algorithm.group_size", 0, "0, but must be 1 or more"),
        ("algorithm.group_size", None, "empty, but must be a whole number"),
        ("algorithm.lr", "fast", "'fast', but must be a number"),
        ("algorithm.lr", math.nan, "nan, but must be a number"),
        ("algorithm.lr", "inf", "'inf', but must be a number"),
        ("algorithm.lr", [1], "[1], but must be a number"),
        ("algorithm.lr", 10**400, "must be a number"),
        pytest.param(
            "algorithm.lr", 10**5000, "too long to show, but must", id="long"
        ),
        ("algorithm.name", 7, "7, but must be text"),
        ("algorithm.name", " ", "' ', but must be a text with something in"),
        ("algorithm.top_p", 2, "2, but must be 1 or less"),
        ("algorithm.temperature", 0, "0, but must be 0.01 or more"),
        ("algorithm.max_output_tokens", "x", "'x', but must be a whole"),
        ("algorithm.max_output_tokens", 0, "0, but must be 1 or more"),
        ("environment.system_prompt", "\ud800", "'\\ud800', but must be text"),
        ("tournament_selection.elitism", 1, "1, but must be true or false"),
        ("tournament_selection.elitism", "si", "'si', but must be true or"),
        ("mutation", 3, "3, but must be a section of keys with values"),
        ("mutation.rl_hp_selection", [1], "[1], but must be a section"),
        ("mutation.rl_hp_selection.lr", 3, "3, but must be a section"),
        ("mutation.rl_hp_selection.lr.min", "x", "'x', but must be a number"),
        ("mutation.rl_hp_selection.lr", {"min": 1}, "max is missing"),
        ("mutation.probabilities.no_mut", 2, "2, but must be 1 or less"),
        ("mutation.rand_seed", -1, "-1, but must be 0 or more"),
        ("network.lora_config", None, "empty, but must be a section"),
        ("network.lora_config.task_type", "SEQ", "'SEQ', but must be CAUSAL_"),
        ("network.lora_config.target_modules", [], "[], but must be a list"),
        ("network.lora_config.target_modules", "q_proj", "a list of names"),
        ("network.lora_config.target_modules", ["q", 1], "a list of names"),
        ("algorithm.use_vllm", {1, 2}, "{1, 2}, but must be plain"),
        ("algorithm.use_vllm", math.inf, "inf, but must be plain"),
        ("algorithm.use_vllm", "\ud800", "must be plain"),
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
        ("algorithm.lr", "0.00_1", 0.001),
        ("algorithm.group_size", "8", 8),
        ("algorithm.group_size", 8.0, 8),
        ("training.max_steps", "1e5", 100_000),
        ("training.max_steps", "100_000", 100_000),
        ("algorithm.gradient_checkpointing", "True", True),
        ("network.lora_config.target_modules", "all-linear", list(ALL_LINEAR)),
    ],
)
def test_what_stands_for_a_value_is_taken_for_it(path, value, read):
    values = load(changed(path, value)).to_dict()
    *sections, key = path.split(".")
    for section in sections:
        values = values[section]
    assert values[key] == read
    assert type(values[key]) is type(read)


def test_a_manifest_does_not_change():
    manifest = load(PUBLISHED)
    with pytest.raises(ValueError):
        manifest.algorithm.lr = 1.0
    values = changed("algorithm.vllm_config", {"a": [1]})
    kept = load(values)
    values["algorithm"]["vllm_config"]["a"].append(2)
    assert kept.without_meaning["algorithm.vllm_config"] == {"a": [1]}


def test_reading_leaves_the_given_dict_alone():
    values = changed("algorithm.use_vllm", True)
    values["selection_strategy"] = values.pop("tournament_selection")
    before = json.dumps(values)
    load(values)
    assert json.dumps(values) == before


KEYS = sorted({part for path in KNOWN for part in path.split(".")})
ANY_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["1e-5", "8", "GRPO", "all-linear", "CAUSAL_LM"])
    | st.binary(max_size=3)
    | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS) | st.text(max_size=3) | st.integers(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(KEYS) | st.text(max_size=3) | st.none(), ANY_VALUE
    )
)
@settings(max_examples=150, deadline=None)
def test_any_dict_is_read_or_refused_in_words(values):
    try:
        load(values)
    except LabError as error:
        assert str(error).isprintable() or "\n" not in str(error)


@given(st.sampled_from(KNOWN), ANY_VALUE)
@settings(max_examples=300, deadline=None)
def test_any_value_anywhere_is_read_or_refused_and_judged(path, value):
    values = load(PUBLISHED).to_dict()
    place = values
    *sections, key = path.split(".")
    for section in sections:
        place = place[section]
    place[key] = value
    try:
        manifest = load(values)
    except LabError:
        return
    findings = lint(manifest, longest_prompt=100, context=512)
    assert load(json.loads(json.dumps(manifest.to_dict()))) == manifest
    if not [f for f in findings if f.level == "error"]:
        run_settings(manifest, 64)  # what lint lets through can train


@given(st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_or_refused_in_words(text):
    with pytest.raises(LabError):
        load(text + "\n")


# --- Lint -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "level", "at"),
    [
        ("algorithm.name", "DPO", "error", ""),
        ("algorithm.group_size", 1, "error", ""),
        ("algorithm.update_epochs", 2, "error", ""),
        ("algorithm.micro_batch_size_per_gpu", 7, "error", ""),
        ("algorithm.lr", 0, "error", ""),
        ("algorithm.lr", 1, "error", ""),
        ("algorithm.lr", 1e-4, "error", ""),
        ("algorithm.lr", 1e-8, "error", ""),
        ("algorithm.beta", 0.1, "error", ""),
        ("mutation.rl_hp_selection.lr.min", 1e-4, "error", "@"),
        ("mutation.rl_hp_selection.lr.max", 1.5, "error", "@"),
        ("mutation.rl_hp_selection.beta.max", 11, "error", "@"),
        (
            "mutation.rl_hp_selection.group_size",
            {"min": 2, "max": 8},
            "error",
            "",
        ),
        ("mutation.probabilities.arch_mut", 0.1, "error", ""),
        ("mutation.probabilities.new_layer", 0.1, "error", ""),
        ("mutation.probabilities.act_mut", 0.1, "error", ""),
        ("mutation.probabilities.params_mut", 0.1, "error", ""),
        ("training.max_steps", 95, "error", ""),
        ("tournament_selection.tournament_size", 3, "warning", ""),
        ("tournament_selection.tournament_size", 0, "error", ""),
        ("training.max_steps", 96 * 5, "warning", "training.evo_steps"),
        ("training.evo_steps", 4, "warning", "training.evaluation_interval"),
        ("training.evaluation_interval", 1, "warning", ""),
        ("training.pop_size", 1, "warning", ""),
        ("mutation.rl_hp_selection", {}, "warning", ""),
        (
            "mutation.probabilities",
            {"no_mut": 0, "rl_hp_mut": 0},
            "warning",
            "",
        ),
        (
            "mutation.rl_hp_selection.lr",
            {"min": 5e-6, "max": 5.5e-6},
            "warning",
            "",
        ),
    ],
)
def test_one_change_gives_one_more_finding(path, value, level, at):
    at = {"": path, "@": path.rpartition(".")[0]}.get(at, at)
    before, after = load(PUBLISHED), load(changed(path, value))
    assert found(after) - found(before) == {(level, at)}
    assert text_of(after, at).startswith(at)
    assert text_of(after, at).endswith((".", "?"))


def test_the_values_at_the_edge_are_fine():
    for path, value in [
        ("algorithm.lr", 1e-5),
        ("algorithm.lr", 1e-7),
        ("algorithm.group_size", 2),
        ("algorithm.micro_batch_size_per_gpu", 24),
        ("training.max_steps", 96 * 6),
        ("tournament_selection.tournament_size", 1),
    ]:
        assert found(load(changed(path, value))) == found(load(PUBLISHED))


def test_a_single_member_may_keep_its_tournament():
    manifest = changes(training__pop_size=1)
    assert manifest.tournament_selection.tournament_size == 2
    assert "error" not in {f.level for f in lint(manifest)}


def test_a_beta_of_zero_never_mutates():
    manifest = changes(
        algorithm__beta=0, mutation__rl_hp_selection__beta__min=0
    )
    assert ("warning", "algorithm.beta") in found(manifest)


def test_errors_come_first_and_notes_last():
    levels = [f.level for f in lint(changes(algorithm__group_size=1))]
    assert levels == sorted(levels, key=lint_module.LEVELS.index)
    assert levels[0] == "error" and levels[-1] == "note"


def test_the_numbers_in_the_text_can_be_typed():
    text = text_of(changes(training__max_steps=50), "training.max_steps")
    assert "6 prompts x 8 completions x 2 members" in text
    assert "max_steps: 96" in text
    assert not [
        f for f in lint(changes(training__max_steps=96)) if f.level == "error"
    ]
    assert "the clip never acts" in text_of(
        load(PUBLISHED), "algorithm.clip_coef"
    )


def test_the_supplied_prompt_is_shown():
    manifest = load(PUBLISHED)
    path = "environment.system_prompt"
    assert "'Use tags.'" in text_of(manifest, path, forced_prompt="Use tags.")
    own = changes(environment__system_prompt="Mine.")
    assert ("warning", path) not in found(own, forced_prompt="Use tags.")


def test_an_answer_must_fit_the_context():
    manifest = load(PUBLISHED)
    length, cap = "network.max_context_length", "algorithm.max_output_tokens"
    assert ("error", length) in found(manifest, longest_prompt=512)
    assert ("error", length) in found(
        manifest, longest_prompt=300, context=300
    )
    assert ("error", length) not in found(manifest, longest_prompt=511)
    assert ("warning", length) in found(manifest, context=511)
    assert ("warning", length) not in found(manifest, context=512)
    near = changes(algorithm__max_output_tokens=361)
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
    capped = changes(algorithm__max_output_tokens=200)
    assert completion_limit(capped, 212, 512) == 200
    assert completion_limit(capped, 412, 512) == 100
    with pytest.raises(LabError, match="no room for an answer"):
        completion_limit(capped, 512, 512)


def test_the_settings_of_a_member_are_the_manifests():
    chosen = run_settings(load(PUBLISHED), 200)
    assert chosen.to_dict() == {
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "learning_rate": 5e-6,
        "num_generations": 8,
        "completions_per_step": 48,
        "micro_batch": 48,
        "max_steps": 1041,
        "num_epochs": 1.0,
        "max_completion_length": 200,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.001,
        "lora_r": 16,
        "lora_alpha": 64,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "load_in_4bit": True,
        "lr_scheduler": "constant",
        "warmup_share": 0.0,
        "weight_decay": 0.1,
        "max_grad_norm": 0.1,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "optimizer": "adamw_torch",
        "gradient_checkpointing": False,
        "save_steps": 1,
        "max_failed_share": 0.5,
        "levers": list(LEVERS),
        "seed": 42,
    }


def test_what_differs_from_the_defaults_reaches_the_settings():
    manifest = changes(
        algorithm__top_p=0.5,
        algorithm__top_k=50,
        algorithm__micro_batch_size_per_gpu=12,
        algorithm__gradient_checkpointing=True,
        network__load_in_4bit=False,
        mutation__rand_seed=7,
    )
    chosen = run_settings(manifest, 200)
    assert (chosen.top_p, chosen.top_k, chosen.micro_batch) == (0.5, 50, 12)
    assert chosen.gradient_checkpointing and not chosen.load_in_4bit
    assert chosen.seed == 7


def test_a_budget_of_no_step_is_not_taken_for_one_of_epochs():
    manifest = changes(training__max_steps=95)
    assert manifest.steps == manifest.generations == 0
    with pytest.raises(LabError, match="max_steps: 96"):
        run_settings(manifest, 200)


def test_the_control_has_the_same_completions_and_no_evolution():
    manifest = changes(training__max_steps=100_000, training__pop_size=3)
    alone = control(manifest)
    assert alone.training.pop_size == 1
    assert alone.steps == 3 * manifest.steps
    assert alone.training.max_steps == 3 * manifest.steps * 48 <= 100_000
    assert alone.mutation_rate == 0
    assert alone.tournament_selection.elitism
    assert found(alone) - found(manifest) == {("warning", "training.pop_size")}
    assert alone.algorithm == manifest.algorithm
    assert alone.without_meaning == manifest.without_meaning
    assert load(alone.to_dict()) == alone


def test_a_control_of_nothing_is_nothing():
    assert control(changes(training__max_steps=10)).training.max_steps == 10


def test_only_what_can_change_in_a_run_is_mutable():
    assert set(MUTABLE) == {"lr", "beta"}
