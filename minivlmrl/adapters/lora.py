"""LoRA (arXiv 2106.09685): a linear layer computes x W^T + scaling x A^T B^T, and only A and B are trained.

Layers are exchanged in a model that is built already: the decoder, the sampler and the losses know nothing of it. W
keeps its name and its place, so checkpoints, states and sharding see the base as before, and two more names.

Dimension letters: N tokens, r rank.
"""

import math
import re
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.generate import random_numbers

TARGETS = {  # what a recipe calls parts of the model, as names of linear layers
    "language": r"model\.layers\..+",
    "vision": r"visual\.blocks\..+",
    "merger": r"visual\.merger\..+",
}


@dataclass
class LoRAConfig:
    """Which layers get an adapter, and of what size."""

    r: int = 16  # rank of the matrices
    alpha: float = 32.0  # what an adapter adds is scaled by alpha / r
    target: list[str] = field(default_factory=lambda: ["language"])  # also vision, merger, or a regex of layers' names
    rslora: bool = False  # scaled by alpha / sqrt(r) instead (arXiv 2312.03732)


class LoRALinear(nn.Linear):
    """A linear layer with an adapter; weight and bias are the ones that it was made of.

    The adapter is in float32 on a base of less, as PEFT's. With B = 0, as at first, it changes nothing.
    """

    def __init__(self, base: nn.Linear, r: int, scaling: float):
        nn.Module.__init__(self)  # nn.Linear's would allocate a second weight
        self.in_features, self.out_features, self.scaling = base.in_features, base.out_features, scaling
        self.weight, self.bias = base.weight, base.bias
        options = {"device": base.weight.device, "dtype": torch.promote_types(base.weight.dtype, torch.float32)}
        self.lora_A = nn.Parameter(torch.zeros(r, self.in_features, **options))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, r, **options))

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_features) -> (N, out_features) in the dtype of the base."""
        result = super().forward(x)
        added = F.linear(F.linear(x.to(self.lora_A.dtype), self.lora_A), self.lora_B) * self.scaling
        return (result + added).to(result.dtype)

    def merged(self) -> Tensor:
        """W + scaling B A, without gradient, rounded to the dtype of W."""
        with torch.no_grad():
            return (self.weight + self.scaling * (self.lora_B @ self.lora_A)).to(self.weight.dtype)


def scaling(alpha: float, r: int, rslora: bool) -> float:
    """What B A is multiplied by."""
    return alpha / (math.sqrt(r) if rslora else r)


def adapters(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers that have an adapter, by name; empty without any."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((".lora_A", ".lora_B"))


def add_adapters(model: nn.Module, config: LoRAConfig, seed: int):
    """Put new adapters on all linear layers that the config names, and freeze the rest (ValueError: it names none)."""
    chosen = [target_layers(model, target) for target in config.target]
    for name in {name: None for names in chosen for name in names}:
        layer = wrap(model, name, config.r, scaling(config.alpha, config.r, config.rslora))
        bound = 1 / math.sqrt(layer.in_features)  # nn.Linear's own: kaiming_uniform with a = sqrt(5)
        numbers = random_numbers(f"{seed}/{name}").uniform(-bound, bound, layer.lora_A.shape)
        with torch.no_grad():
            layer.lora_A.copy_(torch.from_numpy(numbers))
    freeze_base(model)


def target_layers(model: nn.Module, target: str) -> list[str]:
    """Names of the linear layers that one entry of target means; the head and the embeddings are none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    try:
        found = [name for name in names if re.fullmatch(TARGETS.get(target, target), name)]
    except re.error as error:
        raise ValueError(f"target is {target!r}, it must be a regular expression ({error})") from error
    if not found:
        words = f"{', '.join(TARGETS)} or a regular expression of whole names of linear layers, such as {names[-1]}"
        raise ValueError(f"target is {target!r}, which fits no layer; it must be {words}")
    return found


def wrap(model: nn.Module, name: str, r: int, scaling: float) -> LoRALinear:
    """Exchange the linear layer of this name for one with an adapter that adds nothing yet."""
    layer = LoRALinear(model.get_submodule(name), r, scaling)
    _exchange(model, name, layer)
    return layer


def merge_adapters(model: nn.Module):
    """Add the adapters to the weights and take them off: a plain model again."""
    for name, layer in adapters(model).items():
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain.weight, plain.bias = nn.Parameter(layer.merged()), layer.bias
        _exchange(model, name, plain)


def _exchange(model: nn.Module, name: str, layer: nn.Module):
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, layer)


def freeze_base(model: nn.Module):
    """Leave only the adapters to be trained; an optimizer takes the parameters that require gradients."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def table(model: nn.Module) -> str:
    """What is trained, a line for each kind of layer: name without its number, layers, rank, parameters, share."""
    kinds, total = {}, sum(p.numel() for name, p in model.named_parameters() if not is_adapter(name))
    for name, layer in adapters(model).items():
        kind = re.sub(r"\.\d+\.(?=.*\.)", ".*.", name), layer.lora_A.shape[0]
        kinds.setdefault(kind, []).append(layer.lora_A.numel() + layer.lora_B.numel())
    rows = [(name, len(sizes), r, sum(sizes)) for (name, r), sizes in kinds.items()]
    width = max(len(name) for name, *_ in rows)
    lines = [
        f"  {name:<{width}} {layers:>4} x r {r:<4}{size:>14,} {size / total:>8.3%}" for name, layers, r, size in rows
    ]
    trained = sum(size for *_, size in rows)
    return "\n".join([f"adapters: {trained:,} parameters, {trained / total:.3%} of the base's {total:,}", *lines])
