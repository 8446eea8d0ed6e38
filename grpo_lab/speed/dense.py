"""A copy of a policy that multiplies without unpacking 4-bit weights.

bitsandbytes unpacks every weight of a 4-bit layer for every token that is
decoded in a batch. `DenseCopy` unpacks them once. All that is not quantised it
shares with the policy, and it takes over the adapter whenever it is refreshed.

In float32 the adapter is added to the weights, and what is left of a layer is
one product. In 16 bit that would round most of a small update away, so there
the adapter stays a product of its own.
"""

import copy

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import dequantize_4bit
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

ADAPTER = "default"


class DenseCopy:
    """The copy of one policy, or of a base model.

    Args:
        policy: a causal model of transformers, with a LoRA adapter or none.
            It stays as it is.

    Attributes:
        model: the copy, in evaluation mode. It can't be trained.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.model, self.layers = _copied(policy)
        self.refresh()

    def refresh(self) -> None:
        """Take over the adapter as it is now."""
        for layer in self.layers:
            layer.refresh()


class DenseLinear(nn.Module):
    """What a linear layer computes, its adapter included, from dense weights.

    Args:
        source: the layer, with or without an adapter, quantised or not.
    """

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        has_adapter = isinstance(source, LoraLayer)
        base = source.base_layer if has_adapter else source
        # In a list, so that the policy does not become a part of the copy.
        self.parts = [source, base]
        self.bias = base.bias
        self.has_adapter = has_adapter and ADAPTER in source.lora_A
        self.weight = None

    @property
    def source(self) -> nn.Module:
        """The layer that is copied."""
        return self.parts[0]

    @torch.no_grad()
    def refresh(self) -> None:
        """Unpack the weights, and add the adapter where that is exact."""
        if self.weight is not None and not self.has_adapter:
            return
        weight = _unpacked(self.parts[1])
        self.apart = self.has_adapter and weight.dtype != torch.float32
        if self.weight is not None and self.apart:
            return
        if self.has_adapter and not self.apart:
            down, up, scale = self._adapter()
            weight = torch.addmm(weight, up, down, alpha=scale)
        self.multiply, self.weight = _fastest(weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As the layer's own."""
        outputs = self.multiply(inputs, self.weight, self.bias)
        if self.apart:
            down, up, scale = self._adapter()
            low = functional.linear(inputs.to(down.dtype), down)
            extra = scale * functional.linear(low, up)
            outputs = outputs + extra.to(outputs.dtype)
        return outputs

    def _adapter(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        return (
            self.source.lora_A[ADAPTER].weight,
            self.source.lora_B[ADAPTER].weight,
            self.source.scaling[ADAPTER],
        )


def _copied(policy: nn.Module) -> tuple[PreTrainedModel, list[DenseLinear]]:
    """The model with other linear layers, all else shared with the policy."""
    base = getattr(policy, "get_base_model", lambda: policy)()
    sources = {}
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
    # TRL and accelerate put a forward of their own on a module, which would
    # lead back to the policy.
    for module in model.modules():
        module.__dict__.pop("forward", None)
    layers = []
    for name, source in sources.items():
        layer = DenseLinear(source)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer)
        layers.append(layer)
    return model.eval(), layers


def _unpacked(layer: nn.Linear) -> torch.Tensor:
    """A layer's weights as its forward pass uses them, out x in."""
    if isinstance(layer, bnb.nn.Linear4bit):
        state = layer.weight.quant_state
        weight = dequantize_4bit(layer.weight.data, state)
        return weight.to(layer.compute_dtype or weight.dtype)
    return layer.weight.data


def _fastest(weight: torch.Tensor) -> tuple:
    """How to multiply with a weight, and the weight as that needs it.

    On a CPU oneDNN, which is part of PyTorch, multiplies a few rows with
    weights that it has rearranged once about twice as fast as with those that
    it has to rearrange each time. PyTorch's compiler calls it in the same way.
    """
    packs = (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and weight.dtype == torch.float32
    )
    if not packs:
        return functional.linear, weight
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return _packed_linear, packed


def _packed_linear(
    inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(
        inputs, packed, bias, "none", [], ""
    )
