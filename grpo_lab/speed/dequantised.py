"""A copy of a policy on a CPU that need not unpack 4-bit weights.

bitsandbytes unpacks every weight of a 4-bit layer on a CPU for every token
that is decoded. `DequantisedCopy` does so once, and takes over the adapter,
added to the weights, whenever it is refreshed. All that is not a linear layer
it shares with the policy.

It is for float32, in which policies compute on a CPU: in 16 bit, adding the
adapter would round most of a small update away. On a GPU, where bitsandbytes
has kernels that multiply 4-bit weights as they are, nobody has measured it.
"""

import copy
from collections.abc import Collection
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from grpo_lab.errors import LabError

ADAPTER = "default"
"""PEFT's name for the one adapter of a policy."""


def generation_model(
    policy: nn.Module, optimizations: Collection[str]
) -> nn.Module:
    """The model that writes a policy's completions, as the policy is now.

    Args:
        policy: a causal model, with a LoRA adapter or none.
        optimizations: those in force.
    """
    if "dequantised_copy" in optimizations:
        return DequantisedCopy(policy).model
    return _without_wrapper(policy)


def _without_wrapper(policy: nn.Module) -> PreTrainedModel:
    """The model itself, its adapter included.

    `generate` calls that one too, and not the forward pass of PEFT's wrapper,
    on which accelerate puts another one.
    """
    return getattr(policy, "get_base_model", lambda: policy)()


class DequantisedCopy:
    """The copy of one policy, or of a base model.

    Args:
        policy: a causal model of transformers that computes in float32, with
            a LoRA adapter or none. It stays as it is.

    Attributes:
        model: the copy, in evaluation mode. It can't be trained.

    Raises:
        LabError: the adapter is of a kind that can't be copied so.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.model, self.layers = _copied(policy)
        self.refresh()

    def refresh(self) -> None:
        """Take over the adapter as it is now."""
        for layer in self.layers:
            layer.refresh()


class DequantisedLinear(nn.Module):
    """What a linear layer computes, with its adapter added to the weights.

    Args:
        source: the layer, with or without an adapter, quantised or not.
    """

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.has_adapter = isinstance(source, LoraLayer)
        if self.has_adapter:
            _refuse_other_adapters(source)
        base: Any = source.base_layer if self.has_adapter else source
        # In a list, so that the policy does not become a part of the copy.
        self.source_and_base: list[Any] = [source, base]
        self.bias = base.bias
        self.weight: torch.Tensor | None = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Unpack the weights and add the adapter."""
        if self.weight is not None and not self.has_adapter:
            return
        source, base = self.source_and_base
        weight = _unpacked(base)
        if self.has_adapter:
            weight = torch.addmm(
                weight,
                source.lora_B[ADAPTER].weight,
                source.lora_A[ADAPTER].weight,
                alpha=source.scaling[ADAPTER],
            )
        self.multiply, self.weight = _fastest(weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As the layer's own."""
        return self.multiply(inputs, self.weight, self.bias)


def _refuse_other_adapters(layer: LoraLayer) -> None:
    is_plain = (
        layer.active_adapters == [ADAPTER]
        and not layer.disable_adapters
        and not layer.merged
        and not layer.lora_variant
        and not layer.lora_bias[ADAPTER]
        and isinstance(layer.base_layer, nn.Linear)
    )
    if not is_plain:
        raise LabError(
            "Completions can come from a copy of a policy only if it has one "
            "plain LoRA adapter, switched on. Take optimizations.without("
            "['dequantised_copy']) for this policy."
        )


def _copied(
    policy: nn.Module,
) -> tuple[PreTrainedModel, list[DequantisedLinear]]:
    """The model with other linear layers, all else shared with the policy."""
    base = _without_wrapper(policy)
    sources: dict[str, nn.Module] = {}
    for name, module in base.named_modules():
        inside = any(name.startswith(f"{other}.") for other in sources)
        if not inside and isinstance(module, LoraLayer | nn.Linear):
            sources[name] = module
    # What the memo names is not copied: tensors, and the layers to replace.
    shared = {
        id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())
    }
    shared |= {id(module): module for module in sources.values()}
    model = copy.deepcopy(base, shared)
    layers = []
    for name, source in sources.items():
        layer = DequantisedLinear(source)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer)
        layers.append(layer)
    # TRL and accelerate put a forward of their own on a module, which would
    # lead back to the policy.
    for module in model.modules():
        module.__dict__.pop("forward", None)
    return model.eval(), layers


def _unpacked(layer: nn.Linear) -> torch.Tensor:
    """A layer's weights as its forward pass uses them, out x in."""
    if not isinstance(layer, bnb.nn.Linear4bit):
        return layer.weight.data
    weight: Any = layer.weight
    state = weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        raise LabError(
            "The 4-bit weights of this policy were repacked for inference, "
            "so that it can't be trained any more. Load it with "
            "models.load_policy, which forbids that."
        )
    return dequantize_4bit(layer.weight.data, state)


def _fastest(weight: torch.Tensor) -> tuple:
    """How to multiply with a weight, and the weight as that needs it.

    oneDNN, which is part of PyTorch, multiplies a few rows with weights that
    it has rearranged once about twice as fast as with those that it has to
    rearrange each time. PyTorch's compiler calls it in the same way.
    """
    if not _has_onednn():
        return functional.linear, weight
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return _packed_linear, packed


def _has_onednn() -> bool:
    """Whether PyTorch was built with it, and still names it so."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name)
        for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def _packed_linear(
    inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(
        inputs, packed, bias, "none", [], ""
    )
