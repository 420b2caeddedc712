"""Count a model's floating-point operations (FLOPs), to compare a run with its GPU's peak.

A token takes 2 FLOPs for each value in a weight matrix in the forward pass. The backward pass takes as many for the
input gradient, and as many for the weight gradient. Attention,
recurrence, norms and activation functions are not counted, and neither are activations that are computed again in the
backward pass.
"""

from collections.abc import Iterator

import torch
from torch import nn

from minivlmrl.model.config import ModelConfig
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.plain_weights import PackedLinear

# FLOPs per second for dense products in bfloat16 with float32 sums, from NVIDIA's data sheets. The first entry whose
# words all occur in the GPU's name counts.
BFLOAT16_PEAKS = {
    "B200": 2.25e15,
    "H200": 9.89e14,
    "H100 PCIe": 7.56e14,
    "H100 NVL": 8.35e14,
    "H100": 9.89e14,
    "A100": 3.12e14,
    "L40S": 3.62e14,
    "L4": 1.21e14,
    "A10": 1.25e14,
    "RTX 5090": 2.095e14,
    "RTX 4090": 1.65e14,
    "RTX 3090": 7.1e13,
}


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Return a GPU's peak in FLOPs per second; None on other devices and in other dtypes."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    for name, peak in BFLOAT16_PEAKS.items():
        if set(name.split()) <= set(words):
            return peak
    return None


def matrices(model: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield each weight matrix's name, number of values, and whether it is trained.

    Embeddings are left out, because they are looked up. A tied head counts under its own name.
    """
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield name, module.shape.numel(), False
        elif not isinstance(module, nn.Embedding):
            for parameter in module.parameters(recurse=False):
                if parameter.dim() > 1:
                    yield name, parameter.numel(), parameter.requires_grad


def flops_by_input(model: nn.Module, config: ModelConfig) -> dict[str, float]:
    """Return the forward and backward FLOPs for each patch, merged patch, token and score.

    Args:
        model: module with one or more vision-language models, for example policy and value model.
    """
    found = list(matrices(model))
    trains_merger = any(trained for name, _, trained in found if "visual." in name)
    trains_tower = any(trained for name, _, trained in found if "visual." in name and "merger" not in name)
    # A matrix's input gradient is needed if something before it is trained.
    has_input_gradient = {
        "patches": trains_tower, "merged": trains_merger, "tokens": True, "scored": True
    }  # fmt: skip
    flops: dict[str, float] = dict.fromkeys(has_input_gradient, 0.0)
    for name, size, trained in found:
        kind = "tokens"
        if "visual." in name:
            kind = "merged" if "merger" in name else "patches"
        elif "lm_head" in name or f"layers.{config.num_hidden_layers - 1}.mlp" in name:
            kind = "scored"  # the last MLP only computes the tokens whose logits are needed
        if ".experts." in name and config.experts is not None:
            size *= config.experts.num_experts_per_tok / config.experts.num_experts
        passes_back = has_input_gradient[kind] and "patch_embed" not in name  # not to the pixels
        flops[kind] += 2 * size * (1 + passes_back + trained)
    return flops


def batch_flops(flops: dict[str, float], batch: GroupBatch) -> float:
    """Return the forward and backward FLOPs for a packed batch.

    Args:
        flops: flops_by_input's result.
    """
    runs_tower = batch.vision_embeds is None  # False if image embeddings are cached
    return (
        flops["tokens"] * len(batch.input_ids)
        + flops["scored"] * len(batch.completion_ids)
        + flops["patches"] * len(batch.pixel_values) * runs_tower
        + flops["merged"] * len(batch.vision_index) * runs_tower
    )
