"""Which model, in which precision, and whether it fits.

A policy is named by its Hub id, by a short name or by a local folder.
`load_policy` brings it into memory in 4 bit, ready for adapters, with a
tokenizer whose chat template was checked.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

import bitsandbytes as bnb
import httpx
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_lab.errors import LabError
from grpo_lab.pocket import WEIGHTS_DIR
from grpo_lab.prompts import messages


@dataclass(frozen=True)
class ModelEntry:
    """What is known of a model before it is loaded.

    Attributes:
        name: what a learner types; `hub_id` works as well.
        hub_id: "owner/name" on the Hub; for an embedded model, its name.
        mirror: an ungated copy on the Hub, or "".
        revision: the commit to load, or "" for the newest.
        mirror_revision: the same for `mirror`.
        parameters: how many, tied ones counted once.
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
)
MODELS = {entry.name: entry for entry in _ENTRIES}
"""The models that the lessons know, by short name."""


# --- Precision --------------------------------------------------------------


def compute_dtype() -> torch.dtype:
    """The type that activations have on this machine.

    Returns:
        bfloat16 on a GPU of compute capability 8.0 (Ampere) or newer,
        float16 on an older one, float32 on a CPU.
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
    where, revision, entry = _locate(name)
    try:
        return _load(where, revision, load_in_4bit)
    except (OSError, httpx.HTTPError) as error:
        if not (entry and entry.mirror and _is_refusal(error)):
            raise _explained(where, error) from error
    print(
        f"The Hub did not give access to {where}, so its ungated mirror "
        f"{entry.mirror} is used."
    )
    try:
        return _load(entry.mirror, entry.mirror_revision, load_in_4bit)
    except (OSError, httpx.HTTPError) as error:
        raise _explained(entry.mirror, error) from error


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


def find_entry(name: str) -> ModelEntry | None:
    """The entry of a short name or Hub id of `MODELS`; None for others."""
    for entry in MODELS.values():
        if name in (entry.name, entry.hub_id):
            return entry
    return None


def _locate(name: str) -> tuple[str, str, ModelEntry | None]:
    """Hub id or folder, revision, and entry of a model.

    Raises:
        LabError: nothing can have that name.
    """
    entry = find_entry(name)
    if entry:
        return entry.hub_id, entry.revision, entry
    if name.startswith("pocket-"):
        folder = WEIGHTS_DIR / name
        if (folder / "config.json").is_file():
            return str(folder), "", None
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise LabError(
                f"The folder {name} holds no config.json, so it is no model "
                "that transformers can load. Type the folder that "
                "save_pretrained wrote, or a name such as 'pocket-qwen'."
            )
        return str(folder), "", None
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name, "", None
    known = [*MODELS, *(entry.hub_id for entry in MODELS.values())]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    raise LabError(
        f"There is no model {name!r}: it is no folder here and no Hub id, "
        "which has the form 'owner/name'. The models of the lessons are "
        f"{', '.join(MODELS)}. Type {near[0] if near else 'pocket-qwen'!r}."
    )


# --- What went wrong --------------------------------------------------------


def _causes(error: BaseException) -> list[BaseException]:
    """The error and everything that led to it; transformers wraps them."""
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    return chain


def _is_refusal(error: BaseException) -> bool:
    """Whether the Hub refused access: gated, or status 401 or 403.

    Without a token, or with a wrong one, the Hub reports a gated model as
    one that does not exist.
    """
    return any(
        isinstance(cause, GatedRepoError)
        or (
            isinstance(cause, HfHubHTTPError)
            and cause.response.status_code in (401, 403, 404)
        )
        for cause in _causes(error)
    )


def _explained(where: str, error: BaseException) -> LabError:
    """What a learner reads instead of `error`."""
    causes = _causes(error)

    def caused_by(*kinds: type) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if caused_by(GatedRepoError):
        return LabError(
            f"The Hub refuses access to {where}, because its licence has to "
            "be accepted first. Accept it on "
            f"https://huggingface.co/{where} and log in with `hf auth "
            "login`, or type an open model such as "
            "'Qwen/Qwen2.5-0.5B-Instruct'."
        )
    if caused_by(RepositoryNotFoundError):
        return LabError(
            f"The Hub has no model {where}, or it is private. Check the "
            f"spelling on https://huggingface.co/models, or type a model of "
            f"the lessons: {', '.join(MODELS)}."
        )
    if caused_by(
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        httpx.TransportError,
        ConnectionError,
    ):
        return LabError(
            f"{where} is not on this machine and the Hub can't be reached to "
            "download it. Connect to the internet and try again, or type a "
            "model that needs none: 'pocket-qwen' or 'pocket-llama'."
        )
    return LabError(
        f"{where} could not be loaded: {error}. Only safetensors weights of "
        "an architecture that transformers knows are loaded. Check the "
        "folder or the model's page, or type a model of the lessons: "
        f"{', '.join(MODELS)}."
    )
