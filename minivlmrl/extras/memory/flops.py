"""Count floating-point operations (FLOPs) in forward and backward passes.

Per token, a weight costs 2 FLOPs in the forward pass, 2 for input gradients and 2 for weight gradients. Attention,
recurrence, norms, activation functions and recomputation are not counted.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from torch import nn

from minivlmrl.model.config import ModelConfig
from minivlmrl.model.plain_weights import PackedLinear


@runtime_checkable
class HasExperts(Protocol):
    num_experts: int
    num_experts_per_tok: int


class Card(NamedTuple):
    """GPU data sheet."""

    flops: float  # FLOPs per second, for dense bfloat16 matrix products
    bandwidth: float  # memory bandwidth, in bytes per second
    memory: float  # memory size, in bytes
    before_ampere: bool = False  # compute capability below 8.0


# from NVIDIA data sheets; float32 speed for T4 and V100, which lack bfloat16
CARDS = {
    "B200": (2.25e15, 8.0e12, 180e9),
    "GH200": (9.89e14, 4.0e12, 96e9),
    "H200": (9.89e14, 4.8e12, 141e9),
    "H100 PCIe": (7.56e14, 2.0e12, 80e9),
    "H100 NVL": (8.35e14, 3.9e12, 94e9),
    "H100": (9.89e14, 3.35e12, 80e9),
    "A100 40GB": (3.12e14, 1.555e12, 40e9),
    "A100": (3.12e14, 2.0e12, 80e9),
    "L40S": (3.62e14, 8.64e11, 48e9),
    "L4": (1.21e14, 3.0e11, 24e9),
    "A40": (1.5e14, 6.96e11, 48e9),
    "A10G": (7.0e13, 6.0e11, 24e9),
    "A10": (1.25e14, 6.0e11, 24e9),
    "RTX PRO 6000": (5.04e14, 1.79e12, 96e9),
    "RTX 6000 Ada": (3.64e14, 9.6e11, 48e9),
    "A6000": (1.55e14, 7.68e11, 48e9),
    "A5000": (1.11e14, 7.68e11, 24e9),
    "A4000": (7.67e13, 4.48e11, 16e9),
    "RTX 5090 Laptop": (1.14e14, 8.96e11, 24e9),
    "RTX 5090": (2.095e14, 1.79e12, 32e9),
    "RTX 5080": (1.126e14, 9.6e11, 16e9),
    "RTX 5070 Ti": (8.79e13, 8.96e11, 16e9),
    "RTX 5070": (6.17e13, 6.72e11, 12e9),
    "RTX 5060 Ti 8GB": (4.74e13, 4.48e11, 8e9),
    "RTX 5060 Ti": (4.74e13, 4.48e11, 16e9),
    "RTX 4090 Laptop": (8.6e13, 5.76e11, 16e9),
    "RTX 4090": (1.65e14, 1.01e12, 24e9),
    "RTX 4080 SUPER": (1.044e14, 7.36e11, 16e9),
    "RTX 4080": (9.75e13, 7.17e11, 16e9),
    "RTX 4070 Ti SUPER": (8.82e13, 6.72e11, 16e9),
    "RTX 4070 Ti": (8.02e13, 5.04e11, 12e9),
    "RTX 4070 SUPER": (7.1e13, 5.04e11, 12e9),
    "RTX 4070": (5.83e13, 5.04e11, 12e9),
    "RTX 4060 Ti 8GB": (4.41e13, 2.88e11, 8e9),
    "RTX 4060 Ti": (4.41e13, 2.88e11, 16e9),
    "RTX 3090 Ti": (8.0e13, 1.008e12, 24e9),
    "RTX 3090": (7.1e13, 9.36e11, 24e9),
    "RTX 3080 Ti": (6.82e13, 9.12e11, 12e9),
    "RTX 3080 12GB": (6.13e13, 9.12e11, 12e9),
    "RTX 3080": (5.95e13, 7.6e11, 10e9),
    "RTX 3060": (2.54e13, 3.6e11, 12e9),
    "T4": (8.1e12, 3.2e11, 16e9, True),
    "V100 32GB": (1.57e13, 9.0e11, 32e9, True),
    "V100": (1.57e13, 9.0e11, 16e9, True),
}
VARIANTS = {"Laptop", "Ti", "SUPER", "Max", "D"}  # a 4090 Laptop is not a 4090


def find_card(name: str) -> Card | None:
    """Look up a card such as "4090" or "NVIDIA GeForce RTX 4090"; return None if unknown."""
    words = {*name.replace("-", " ").split()}
    for known, values in CARDS.items():
        own = {*known.split()}
        is_variant = words & VARIANTS != own & VARIANTS
        if not is_variant and own - {"RTX"} <= words:
            return Card(*values)
    return None


def matrices(model: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield (module name, number of values, is trained) for weight matrices except embeddings."""
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield name, module.shape.numel(), False
        elif not isinstance(module, nn.Embedding):
            for parameter in module.parameters(recurse=False):
                if parameter.dim() > 1:
                    yield name, parameter.numel(), parameter.requires_grad


def active_share(model_config: ModelConfig) -> float:
    """Return the fraction of experts that a token uses."""
    assert isinstance(model_config, HasExperts)
    return model_config.num_experts_per_tok / model_config.num_experts


def flops_by_input(model: nn.Module, model_config: ModelConfig, backward: bool = True) -> dict[str, float]:
    """Return FLOPs per image patch and per token, under these keys:

    patches: per image patch
    merged: per merged image patch
    tokens: per token
    scored: extra per token that needs logits
    """
    found = list(matrices(model))
    trains_merger = any(trained for name, _, trained in found if "visual." in name)
    trains_tower = any(trained for name, _, trained in found if "visual." in name and "merger" not in name)
    # layers before the first trained one need no input gradients
    has_input_gradient = {"patches": trains_tower, "merged": trains_merger, "tokens": True, "scored": True}
    flops: dict[str, float] = dict.fromkeys(has_input_gradient, 0.0)
    for name, size, trained in found:
        kind = "tokens"
        if "visual." in name:
            kind = "merged" if "merger" in name else "patches"
        elif "lm_head" in name or f"layers.{model_config.num_hidden_layers - 1}.mlp" in name:
            kind = "scored"  # the last MLP runs only on tokens that need logits
        if ".experts." in name:
            size *= active_share(model_config)
        passes_back = has_input_gradient[kind] and "patch_embed" not in name  # pixels need no gradient
        flops[kind] += 2 * size * (1 + backward * (passes_back + trained))
    return flops
