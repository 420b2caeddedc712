"""Compute full weights from shards, LoRA adapters and NF4 layers.

LoRA (model/lora.py) and NF4 (model/nf4.py) replace linear layers, but checkpoints store plain linear layers.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.config.types import Part

# maps each model part to prefixes of weight names; a weight belongs to the first part with a matching prefix
PARTS: dict[Part, str | tuple[str, ...]] = {
    "merger": ("visual.merger.", "visual.deepstack_merger_list."),
    "embeddings": ("model.embed_tokens.", "lm_head."),  # the LM head is often tied to the embedding
    "vision": "visual.",
    "language": "model.",
}


@runtime_checkable
class Stacked(Protocol):
    """Interface for several weights that files store as one tensor."""

    def stack(self, full: Callable) -> Tensor: ...


class ReplacedLinear(nn.Module):
    """Base class for LoRA and NF4 layers, which replace a linear layer and can compute its full weight."""

    shape: torch.Size  # the plain weight's shape
    dtype: torch.dtype

    def plain_weight(self) -> Tensor:
        """Compute the full weight of the linear layer, without gradients. All ranks must call plain_weight."""
        raise NotImplementedError


class PackedProduct(torch.autograd.Function):
    """Compute x W^T with a packed, frozen weight W, which the backward pass unpacks again."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: "PackedLinear") -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight.to(gradient.dtype), None


class PackedLinear(ReplacedLinear):
    """Base class for frozen linear layers whose weight is packed into fewer bits."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.shape = linear.weight.shape
        self.out_features, self.in_features = self.shape
        self.dtype = linear.weight.dtype  # the weight's dtype before packing and after unpacking
        self.bias = linear.bias
        self.pack(linear.weight)

    def pack(self, weight: Tensor, take_shard: Callable | None = None):
        """Pack a weight into this layer.

        Args:
            take_shard: function (packed weight, old parameter) -> this rank's shard of the packed weight. None keeps
                the whole packed weight.
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


# objects that hold a model's weight: a parameter, a LoRA or NF4 layer, or several stacked weights
Weight = Tensor | ReplacedLinear | Stacked


@runtime_checkable
class Sharded(Protocol):
    """Interface for torch's DTensor, a sharded tensor. DTensor itself would be slow to import."""

    def full_tensor(self) -> Tensor: ...

    def to_local(self) -> Tensor: ...


def gather_full_tensor(weight: Weight) -> Tensor:
    """Compute a full weight without gradients: gather shards, merge adapters and unpack NF4."""
    if isinstance(weight, Stacked):
        return weight.stack(gather_full_tensor)
    if isinstance(weight, ReplacedLinear):
        return weight.plain_weight()
    return gather(weight).detach()


def gather(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor, or return an unsharded tensor unchanged. All ranks must call this function."""
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2].startswith("lora_")


def has_adapters(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def plain_name(name: str) -> str:
    """Return the name that a parameter has in a model without adapters, by removing `.base` from the name."""
    return name.replace(".base.", ".")


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """Return the packed layers by name. The name of a base layer with an adapter ends in `.base`."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}


def base_weights(model: nn.Module) -> dict[str, Tensor | PackedLinear]:
    """Return the base weights of a model with adapters, by their names in the model without adapters."""
    weights: dict[str, Tensor | PackedLinear] = {}
    for name, parameter in model.named_parameters():
        if not is_adapter(name) and parameter.is_floating_point():
            weights[plain_name(name)] = parameter
    for name, layer in packed_layers(model).items():
        weights[plain_name(f"{name}.weight")] = layer
    return weights


def plain_weights(model: nn.Module) -> dict[str, Weight]:
    """Return a model's weights by their names in the model without adapters."""
    weights: dict[str, Weight] = {**base_weights(model)}
    for name, layer in model.named_modules():
        if isinstance(layer, ReplacedLinear) and not name.endswith(".base"):
            weights[f"{name}.weight"] = layer
    return weights


def shared_base(model: nn.Module) -> dict[int, Tensor]:
    """Return a `memo` for copy.deepcopy, with which the copy gets its own adapters but shares all other weights."""
    if not has_adapters(model):
        return {}
    base = [p for name, p in model.named_parameters() if not is_adapter(name)]
    return {id(x): x for x in (*base, *model.buffers())}


def part_of(name: str) -> Part:
    """Return the model part, such as "vision", to which the parameter or layer `name` belongs."""
    return next(part for part, prefixes in PARTS.items() if name.startswith(prefixes))
