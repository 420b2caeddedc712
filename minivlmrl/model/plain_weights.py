"""Compute full weights for checkpoints: gather shards, merge LoRA adapters, unpack NF4 layers."""

from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.config.types import Part

# {model part: parameter name prefixes}; a parameter belongs to the first part with a matching prefix
PARTS: dict[Part, str | tuple[str, ...]] = {
    "merger": ("visual.merger.", "visual.deepstack_merger_list."),
    "embeddings": ("model.embed_tokens.", "lm_head."),
    "vision": "visual.",
    "language": "model.",
}


@runtime_checkable
class Stacked(Protocol):
    """Protocol for parameters that weight files store as one stacked tensor."""

    def stack(self, full: Callable) -> Tensor: ...


class ReplacedLinear(nn.Module):
    """Base class for LoRA and NF4 layers, which replace a linear layer."""

    shape: torch.Size  # (out_features, in_features)
    dtype: torch.dtype

    def plain_weight(self) -> Tensor:
        """Compute the full, merged weight; all ranks must call this."""
        raise NotImplementedError


class PackedProduct(torch.autograd.Function):
    """Compute x W^T with a quantized W; backward unpacks W again."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: "PackedLinear") -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight.to(gradient.dtype), None


class PackedLinear(ReplacedLinear):
    """Base class for frozen, quantized linear layers."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.shape = linear.weight.shape
        self.out_features, self.in_features = self.shape
        self.dtype = linear.weight.dtype
        self.bias = linear.bias
        self.pack(linear.weight)

    def pack(self, weight: Tensor, take_shard: Callable | None = None):
        """Quantize and store a weight.

        Args:
            take_shard: (packed weight, old parameter) -> this rank's shard; None = whole weight.
        """
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """Gather and unpack the weight (out_features, in_features), in its original dtype."""
        raise NotImplementedError

    def plain_weight(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        product = PackedProduct.apply(x, self)
        return product if self.bias is None else product + self.bias


Weight = Tensor | ReplacedLinear | Stacked


def gather_full_tensor(weight: Weight) -> Tensor:
    """Compute a full weight without gradients: gather shards, merge adapters, unpack NF4."""
    if isinstance(weight, Stacked):
        return weight.stack(gather_full_tensor)
    if isinstance(weight, ReplacedLinear):
        return weight.plain_weight()
    return gather(weight).detach()


def gather(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is sharded; all ranks must call this."""
    # look for the method instead of the type, because DTensor is slow to import
    return cast(Any, tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2].startswith("lora_")


def has_adapters(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def plain_name(name: str) -> str:
    """Return a parameter name without `.base`, as in a model without adapters."""
    return name.replace(".base.", ".")


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """Return {name: quantized layer}; inside a LoRALinear, the name ends in `.base`."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}


def base_weights(model: nn.Module) -> dict[str, Tensor | PackedLinear]:
    """Return {name: weight without adapter}; a name is the same as in a model without adapters."""
    weights: dict[str, Tensor | PackedLinear] = {
        plain_name(name): parameter
        for name, parameter in model.named_parameters()
        if not is_adapter(name) and parameter.is_floating_point()
    }
    return weights | {plain_name(f"{name}.weight"): layer for name, layer in packed_layers(model).items()}


def plain_weights(model: nn.Module) -> dict[str, Weight]:
    """Return {weight name in a model without adapters: weight, or the layer if it is quantized or has an adapter}."""
    return base_weights(model) | {
        f"{name}.weight": layer
        for name, layer in model.named_modules()
        if isinstance(layer, ReplacedLinear) and not name.endswith(".base")
    }


def shared_weights(model: nn.Module) -> dict[int, Tensor]:
    """Return a memo with which copy.deepcopy shares frozen weights instead of copying them."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return {id(x): x for x in (*frozen, *model.buffers())}


def part_of(name: str) -> Part:
    """Return the model part for a parameter or layer, such as "vision"."""
    return next(part for part, prefixes in PARTS.items() if name.startswith(prefixes))
