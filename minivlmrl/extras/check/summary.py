"""Describe the device and the trained parameters."""

import re
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch import nn

from minivlmrl.distributed.device import GB, hides_gpus
from minivlmrl.model.plain_weights import base_weights, is_adapter, part_of


def describe_device(device: torch.device) -> str:
    """Describe the device: CPU threads, or GPU name, compute capability, driver and free memory."""
    if device.type != "cuda":
        # nvidia-smi comes with the driver, even on Windows and in WSL
        unused = not torch.backends.cuda.is_built() and not hides_gpus() and shutil.which("nvidia-smi")
        note = ", because this PyTorch is built for CPUs only: see docs/memory.md" if unused else ""
        return f"CPU (threads: {torch.get_num_threads()}){note}"
    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    # example: "NVRM version: NVIDIA UNIX x86_64 Kernel Module 580.65"
    number = re.search(r"\b\d+(\.\d+)+\b", driver_version())
    driver = number.group() if number else "unknown"
    return (
        f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}, driver {driver}, "
        f"{free / GB:.1f} of {total / GB:.1f} GB free)"
    )


def trainable_summary(model: nn.Module) -> str:
    """Return a table of trained parameters, with a line per model part or type of adapted layer."""
    kinds = defaultdict(Counter)  # {(model part, LoRA rank): {layer: number of trained parameters}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer_name = name.rpartition(".")[0]
        kind_name = part_of(name)
        rank_text = ""
        if is_adapter(name):
            # group blocks.0.mlp, blocks.1.mlp, ... as blocks.*.mlp
            kind_name = re.sub(r"\.\d+\.(?=.*\.)", ".*.", layer_name)
            r = parameter.shape[0 if name.endswith("lora_A") else 1]
            rank_text = f" x r {r}"
        kinds[kind_name, rank_text][layer_name] += parameter.numel()
    base_count = sum(weight.shape.numel() for weight in base_weights(model).values())
    trained_count = sum(counts.total() for counts in kinds.values())
    lines = [f"trained: {trained_count:,} parameters, {trained_count / base_count:.3%} of the base's {base_count:,}"]
    for (kind_name, rank_text), counts in kinds.items():
        count = counts.total()
        share = f"{count / base_count:.3%}"
        lines.append(f"  {kind_name:<40} {len(counts):>4}{rank_text:<9}{count:>14,} {share:>8}")
    return "\n".join(lines)


def driver_version() -> str:
    for path in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if path.exists():
            return path.read_text().partition("\n")[0]
    return "unknown"
