"""What a run takes of a machine's memory, and what it does with the rest.

`resolve` decides once, before a run, which optimisations it can afford on its
share of the memory. The plan that is shown and the run that is trained both
come from it.
"""

import gc
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from grpo_lab import environment
from grpo_lab.errors import LabError
from grpo_lab.models import ModelEntry, compute_dtype, entry
from grpo_lab.settings import RunSettings
from grpo_lab.speed.optimizations import NEED_THE_LOOP

GIB = 2**30
OVERHEAD_GIB = 0.75
"""The CUDA context with its workspaces; on a CPU, Python and its libraries."""

LOGITS_TILE = (4096, 32_768)
"""Tokens and vocabulary entries of the buffer that TRL computes logits in."""

SPARE_SHARE = 0.1
"""Share of its memory that no optimisation may take from a run."""


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
    ram = environment.usable_memory() / GIB
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
class Share:
    """The part of a device that one run may use.

    Attributes:
        device: what it computes on.
        part: share of the device's memory, above 0 and at most 1.
    """

    device: Device
    part: float = 1.0

    @classmethod
    def of_gpus(cls, gpus: float = 1.0) -> "Share":
        """The share of a run that has that many GPUs.

        Args:
            gpus: 0.5 is half of one. A CPU is not divided, so that runs on
                several workers equal those of one process bit for bit.
        """
        device = device_memory()
        is_divided = device.is_gpu and 0 < gpus < 1
        return cls(device, gpus if is_divided else 1.0)

    @property
    def memory(self) -> float:
        """GiB that the run may use."""
        return self.device.memory * self.part

    def __str__(self) -> str:
        """The device by name, with the part if it is not all of it."""
        part = "" if self.part == 1 else f"{self.part:.0%} of "
        return f"{part}{self.device.name}"


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
        model: from `models.entry`.
        settings: the run.
        prompt_tokens: length of the longest prompt, with its template.
    """
    value_bytes = torch.finfo(compute_dtype()).bits // 8
    shapes = _linear_shapes(model)
    tokens = prompt_tokens + settings.max_completion_length
    adapted = model.num_layers * sum(
        settings.lora_r * sum(shapes.get(name, (model.hidden_size,) * 2))
        for name in settings.target_modules
    )
    weights: float = model.parameters * value_bytes
    if settings.load_in_4bit:
        linear = model.num_layers * sum(a * b for a, b in shapes.values())
        weights += linear * ((4 + 0.127) / 8 - value_bytes)
    moment_bytes = 2 if "8bit" in settings.optimizer else 8
    kv_size = model.num_kv_heads * model.head_dim
    kv_values = 2 * model.num_layers * kv_size * tokens
    activations = _activation_bytes(model, settings, tokens, value_bytes)
    return MemoryEstimate(
        weights=weights / GIB,
        adapter=8 * adapted / GIB,
        optimiser=moment_bytes * adapted / GIB,
        kv_cache=settings.completions_per_step * kv_values * value_bytes / GIB,
        activations=activations / GIB,
    )


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


@dataclass(frozen=True)
class Resolved:
    """A run's settings, and what was decided for it on its machine.

    Attributes:
        settings: the run.
        prompt_tokens: length of its longest prompt, with the template.
        share: what it may use.
        optimizations: those of its optimisations that are active.
    """

    settings: RunSettings
    prompt_tokens: int
    share: Share
    optimizations: tuple[str, ...]

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether activations are computed twice, to save memory."""
        wanted = self.settings.gradient_checkpointing
        return wanted and "no_checkpointing" not in self.optimizations

    @property
    def least(self) -> MemoryEstimate:
        """What it takes without any optimisation."""
        shape = entry(self.settings.model)
        return estimate_memory(shape, self.settings, self.prompt_tokens)

    @property
    def memory(self) -> float:
        """GiB that it takes at its peak, the optimisations included."""
        takes = _optimization_memory(self.settings, self.prompt_tokens)
        used = sum(takes[name] for name in self.optimizations if name in takes)
        return self.least.total + used


def resolve(
    settings: RunSettings, prompt_tokens: int, share: Share | None = None
) -> Resolved:
    """Decide how a run trains with the memory that it has.

    Left out are optimisations that would do nothing for this run, or not
    what TRL does. Two take memory, and are left out where it is short: first
    comes the copy of the policy, which is for CPUs only, then what the
    gradient keeps.

    Args:
        settings: the run.
        prompt_tokens: length of the longest prompt, with its template; see
            `prompts.longest_prompt`.
        share: what the run may use; by default the whole device.

    Raises:
        LabError: nothing is known of the model; see `models.entry`.
    """
    share = share or Share.of_gpus()
    left_out = _without_effect(settings)
    if share.device.is_gpu:
        left_out.add("dequantised_copy")
    active = [name for name in settings.optimizations if name not in left_out]
    if {"dequantised_copy", "no_checkpointing"} & {*active}:
        plain = Resolved(settings, prompt_tokens, share, ())
        room = (1 - SPARE_SHARE) * share.memory - plain.least.total
        takes = _optimization_memory(settings, prompt_tokens)
        for name in [name for name in takes if name in active]:
            if takes[name] > room:
                active.remove(name)
            else:
                room -= takes[name]
    found = Resolved(settings, prompt_tokens, share, tuple(active))
    if found.gradient_checkpointing:
        # With checkpointing there is no cache that a prefix could be in.
        active = [name for name in active if name != "shared_prefix"]
    return replace(found, optimizations=tuple(active))


def _without_effect(settings: RunSettings) -> set[str]:
    """Optimisations that do nothing for a run, or not what TRL does."""
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


def _optimization_memory(
    settings: RunSettings, prompt_tokens: int
) -> dict[str, float]:
    """GiB of each optimisation that takes memory, the first choice first."""
    shape = entry(settings.model)
    kept = replace(settings, gradient_checkpointing=False)
    whole, least = (
        estimate_memory(shape, one, prompt_tokens).total
        for one in (kept, settings)
    )
    return {
        "dequantised_copy": shape.parameters * 4 / GIB,  # float32
        "no_checkpointing": whole - least,
    }


def check_fits(
    estimate: MemoryEstimate, settings: RunSettings, share: Share | None = None
) -> None:
    """Refuse a run that would end out of memory, before it starts.

    Args:
        estimate: from `estimate_memory`.
        settings: the run.
        share: what the run may use; by default the whole device.

    Raises:
        LabError: says by how much it is too large and what to lower first.
    """
    share = share or Share.of_gpus()
    missing = estimate.total - share.memory
    if missing <= 0:
        return
    raise LabError(
        f"A run of {settings.model} needs about {estimate.total:.1f} GiB of "
        f"memory and {share} has {share.memory:.1f}: {missing:.1f} "
        f"GiB too little. {_what_to_lower(estimate, settings, share)}"
    )


def _what_to_lower(
    estimate: MemoryEstimate, settings: RunSettings, share: Share
) -> str:
    smaller = "choose a smaller model, such as 'qwen2.5-0.5b' or 'pocket-qwen'"
    if estimate.fixed >= share.memory:
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
