"""Names and values of the weights that a model has without adapters and quantisation.

LoRA (model/lora.py) and NF4 (model/nf4.py) replace linear layers. Checkpoints need the weights of
the plain linear layers, so the functions here map between the two. The file also defines the parts
of a model that options such as model.freeze can name.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.config.types import Part

# part of a model, as named in recipes -> prefixes of its weights; the first match counts
PARTS: dict[Part, str | tuple[str, ...]] = {
    "merger": ("visual.merger.", "visual.deepstack_merger_list."),
    "embeddings": ("model.embed_tokens.", "lm_head."),  # the head is often the same matrix
    "vision": "visual.",
    "language": "model.",
}


@runtime_checkable
class Stacked(Protocol):
    """Several weights that are one tensor in files, see model/families/experts.py."""

    def stack(self, full: Callable) -> Tensor: ...


class ReplacedLinear(nn.Module):
    """Base class of layers that replace a linear layer and can compute its plain weight."""

    shape: torch.Size  # shape of the plain weight
    dtype: torch.dtype

    def plain_weight(self) -> Tensor:
        """Compute the plain layer's full weight, without gradient. All ranks must call this."""
        raise NotImplementedError


class PackedProduct(torch.autograd.Function):
    """Product x W^T with a packed W, which saves neither x nor the unpacked W for the backward.

    x is not needed because W is not trained; the backward unpacks W again.
    """

    @staticmethod
    def forward(ctx, x: Tensor, layer: "PackedLinear") -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight.to(gradient.dtype), None


class PackedLinear(ReplacedLinear):
    """Base class of frozen linear layers whose weight is packed into fewer bits.

    A packed layer can also be the base of a LoRALinear. Subclasses such as model/nf4.NF4Linear
    implement packing in `read` and unpacking in `weight`.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.shape = linear.weight.shape
        self.out_features, self.in_features = self.shape
        self.dtype = linear.weight.dtype  # dtype of the weight before packing and after unpacking
        self.bias = linear.bias
        self.read(linear.weight)

    def read(self, weight: Tensor, part: Callable | None = None):
        """Pack a weight into this layer; part(packed, old parameter) returns this rank's shard."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """Gather and unpack the weight (out_features, in_features), in its original dtype."""
        raise NotImplementedError

    def plain_weight(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        product = PackedProduct.apply(x, self)
        if self.bias is None:
            return product
        return product + self.bias


Weight = (
    Tensor | ReplacedLinear | Stacked
)  # sources from which gather_full_tensor computes a weight


@runtime_checkable
class Sharded(Protocol):
    """Interface of torch's DTensor, a sharded tensor, whose module is slow to import."""

    def full_tensor(self) -> Tensor: ...

    def to_local(self) -> Tensor: ...


def gather_full_tensor(weight: Weight) -> Tensor:
    """Compute a full weight, without gradient: gather shards, merge adapters, unpack NF4."""
    if isinstance(weight, Stacked):
        return weight.stack(gather_full_tensor)
    if isinstance(weight, ReplacedLinear):
        return weight.plain_weight()
    return gather(weight).detach()


def gather(tensor: Tensor) -> Tensor:
    """Gather a tensor if it is sharded. All ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2].startswith("lora_")


def has_adapters(model: nn.Module) -> bool:
    """Return whether any layer of a model has an adapter."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def plain_name(name: str) -> str:
    """Return the name that a parameter has in a model without adapters, without `.base`."""
    return name.replace(".base.", ".")


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """Return the packed layers by name; the name of a layer under an adapter ends in `.base`."""
    return {name: part for name, part in model.named_modules() if isinstance(part, PackedLinear)}


def base_weights(model: nn.Module) -> dict[str, Tensor | PackedLinear]:
    """Return the weights without adapters: plain name -> parameter or quantised layer."""
    weights: dict[str, Tensor | PackedLinear] = {}
    for name, parameter in model.named_parameters():
        if not is_adapter(name) and parameter.is_floating_point():
            weights[plain_name(name)] = parameter
    for name, layer in packed_layers(model).items():
        weights[plain_name(f"{name}.weight")] = layer
    return weights


def plain_weights(model: nn.Module) -> dict[str, Weight]:
    """Return the weights with merged adapters: plain name -> source for gather_full_tensor."""
    weights: dict[str, Weight] = {**base_weights(model)}
    for name, layer in model.named_modules():
        if isinstance(layer, ReplacedLinear) and not name.endswith(".base"):
            weights[f"{name}.weight"] = layer
    return weights


def shared_base(model: nn.Module) -> dict[int, Tensor]:
    """Return a memo for copy.deepcopy, with which a copy shares all weights except the adapters.

    It is empty for a model without adapters.
    """
    if not has_adapters(model):
        return {}
    base = [p for name, p in model.named_parameters() if not is_adapter(name)]
    return {id(x): x for x in (*base, *model.buffers())}


def part_of(name: str) -> Part:
    """Return the part of the model that a parameter or layer of this name belongs to."""
    return next(part for part, beginnings in PARTS.items() if name.startswith(beginnings))
