"""Random numbers that bitsandbytes 0.50.2 has quantised; the results are in tests/recorded/bitsandbytes_0.50.2.json.

This file's script in commit 64c7842 recorded the results. The recorded indices come from bitsandbytes' float64 path,
which takes the nearest number in a table, like its CUDA kernel. The float32 code for CPUs is less exact: its errors
reach 3e-5 of a block's largest value.
"""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

SHAPE = 96, 512


def numbers(signed: bool = True) -> Tensor:
    """Return numbers with many magnitudes that are equal on all processors.

    The sum of the blocks' largest values is also equal on all processors, because it is exact.
    """
    generator = torch.Generator().manual_seed(0)
    values = 2 * torch.rand(SHAPE, generator=generator) - 1
    share = torch.rand(SHAPE, generator=generator)
    for _ in range(6):  # rounding in randn and powers depends on the processor
        values = values * share
    values = torch.where(values.abs() > 0.01, (values * 2**13).round() / 2**13, values)
    return values if signed else values * values


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def recorded() -> dict:
    return json.loads((Path(__file__).parents[1] / "recorded" / "bitsandbytes_0.50.2.json").read_text())
