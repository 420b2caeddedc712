"""The weights of a plain model: their parts, names and values, whatever layers hold them.

Adapters and 4 bits replace linear layers (model/lora.py, model/nf4.py). Files and other models have
the weights of the plain layers.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.config.types import Part

# part of a model, as recipes name it -> prefixes of its weights; the first part that fits counts
PARTS: dict[Part, str | tuple[str, ...]] = {
    "merger": ("visual.merger.", "visual.deepstack_merger_list."),
    "embeddings": ("model.embed_tokens.", "lm_head."),  # the head is often the same matrix
    "vision": "visual.",
    "language": "model.",
}


@runtime_checkable
class Stacked(Protocol):
    """Weights that a file has as one tensor, see model/families/experts.py."""

    def stack(self, full: Callable) -> Tensor: ...


class ReplacedLinear(nn.Module):
    """A layer in place of a linear layer, whose weight is computed from what this layer holds."""

    shape: torch.Size  # of the plain weight
    dtype: torch.dtype

    def plain_weight(self) -> Tensor:
        """Compute the plain layer's weight, gathered and without gradient; all ranks call this."""
        raise NotImplementedError


class PackedProduct(torch.autograd.Function):
    """x W^T that remembers neither x, as W is not trained, nor W in full."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: "PackedLinear") -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight.to(gradient.dtype), None


class PackedLinear(ReplacedLinear):
    """A frozen linear layer whose weight is packed into fewer bits, alone or as a LoRALinear's base.

    A subclass packs in `read` and unpacks in `weight`: model/nf4.NF4Linear.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.shape = linear.weight.shape
        self.out_features, self.in_features = self.shape
        self.dtype = linear.weight.dtype  # of the weight before it was packed, and when unpacked
        self.bias = linear.bias
        self.read(linear.weight)

    def read(self, weight: Tensor, part: Callable | None = None):
        """Pack a weight; part(packed, the parameter so far) is what this rank keeps of it."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """Unpack (out_features, in_features) in the dtype that it was packed from, gathered."""
        raise NotImplementedError

    def plain_weight(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        product = PackedProduct.apply(x, self)
        if self.bias is None:
            return product
        return product + self.bias


Weight = Tensor | ReplacedLinear | Stacked  # what `full` computes a weight of the plain model from


@runtime_checkable
class Sharded(Protocol):
    """A sharded tensor, torch's DTensor, whose module takes long to import."""

    def full_tensor(self) -> Tensor: ...

    def to_local(self) -> Tensor: ...


def gather_full_tensor(weight: Weight) -> Tensor:
    """Compute a weight without gradient: gathered if it is sharded, merged or unpacked."""
    if isinstance(weight, Stacked):
        return weight.stack(gather_full_tensor)
    if isinstance(weight, ReplacedLinear):
        return weight.plain_weight()
    return gather(weight).detach()


def gather(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is sharded; all ranks call this."""
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def is_adapter(name: str) -> bool:
    """Tell whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2].startswith("lora_")


def has_adapters(model: nn.Module) -> bool:
    """Tell whether some layer of a model has an adapter."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def plain_name(name: str) -> str:
    """Name a parameter as the model without adapters does: files and states know no `base`."""
    return name.replace(".base.", ".")


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """List the layers that are packed, by name; one under an adapter is its `base`."""
    return {name: part for name, part in model.named_modules() if isinstance(part, PackedLinear)}


def base_weights(model: nn.Module) -> dict[str, Tensor | PackedLinear]:
    """Name each weight of the plain model and the parameter or quantized layer that holds it."""
    weights: dict[str, Tensor | PackedLinear] = {}
    for name, parameter in model.named_parameters():
        if not is_adapter(name) and parameter.is_floating_point():
            weights[plain_name(name)] = parameter
    for name, layer in packed_layers(model).items():
        weights[plain_name(f"{name}.weight")] = layer
    return weights


def plain_weights(model: nn.Module) -> dict[str, Weight]:
    """Name each weight of the plain model and what `full` computes it from."""
    weights: dict[str, Weight] = {**base_weights(model)}
    for name, layer in model.named_modules():
        if isinstance(layer, ReplacedLinear) and not name.endswith(".base"):
            weights[f"{name}.weight"] = layer
    return weights


def shared_base(model: nn.Module) -> dict[int, Tensor]:
    """Collect the base of a model's adapters, as a memo for deepcopy; empty without any."""
    if not has_adapters(model):
        return {}
    base = [p for name, p in model.named_parameters() if not is_adapter(name)]
    return {id(x): x for x in (*base, *model.buffers())}


def part_of(name: str) -> Part:
    """Tell which part a parameter or layer of this name belongs to."""
    return next(part for part, beginnings in PARTS.items() if name.startswith(beginnings))
