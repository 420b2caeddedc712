"""Describe a run's device and trained parameters, to print them at the start."""

import shutil
from collections import Counter

import torch
from torch import nn

from minivlmrl.distributed.device import GB, hides_gpus
from minivlmrl.model.plain_weights import base_weights, is_adapter, part_of


def describe_device(device: torch.device) -> str:
    """Describe the device: CPU threads, or GPU name, compute capability and free memory."""
    if device.type != "cuda":
        # nvidia-smi comes with the GPU driver, even on Windows and in WSL
        unused = not torch.backends.cuda.is_built() and not hides_gpus() and shutil.which("nvidia-smi")
        note = ", because this PyTorch is built for CPUs only: see docs/memory.md" if unused else ""
        return f"CPU (threads: {torch.get_num_threads()}){note}"
    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}, {free / GB:.1f} of "
        f"{total / GB:.1f} GB free)"
    )


def trainable_summary(model: nn.Module) -> str:
    """Describe how many parameters are trained, in total and per model part."""
    counts = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            counts[part_of(name) + " (LoRA)" * is_adapter(name)] += parameter.numel()
    base_count = sum(weight.shape.numel() for weight in base_weights(model).values())
    parts = ", ".join(f"{count:,} of {part}" for part, count in counts.items())
    share = f"{counts.total() / base_count:.3%} of the base's {base_count:,}"
    return f"trained: {counts.total():,} parameters, {share}: {parts or 'none'}"
