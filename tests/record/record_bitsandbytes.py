"""Numbers drawn from a seed, of which bitsandbytes 0.50.2 was asked: tests/recorded/bitsandbytes_0.50.2.json.

This file's script of commit 64c7842 wrote it. Indices are those of its path for float64, which takes the nearest number
of a table, as its CUDA kernel does: its C++ code for float32 on a CPU is off by up to 3e-5 of a block's largest value.
"""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

SHAPE = 96, 512


def numbers(signed: bool = True) -> Tensor:
    """Numbers of many sizes, the same on any processor, and so is the sum of their blocks' largest: it is exact."""
    generator = torch.Generator().manual_seed(0)
    values = 2 * torch.rand(SHAPE, generator=generator) - 1
    share = torch.rand(SHAPE, generator=generator)
    for _ in range(6):  # randn and powers are rounded otherwise by other processors
        values = values * share
    values = torch.where(values.abs() > 0.01, (values * 2**13).round() / 2**13, values)
    return values if signed else values * values


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def recorded() -> dict:
    return json.loads((Path(__file__).parents[1] / "recorded" / "bitsandbytes_0.50.2.json").read_text())
