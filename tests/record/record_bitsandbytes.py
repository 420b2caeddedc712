"""Random numbers that bitsandbytes 0.50.2 has quantized; the results are in tests/recorded/bitsandbytes_0.50.2.json.

In commit 64c7842, a script in this file recorded the results. The recorded indices come from the float64 path of
bitsandbytes, which takes the nearest number in a table, like its CUDA kernel. The float32 path of bitsandbytes for CPUs
is less exact, with errors up to 3e-5 of the largest value in a block.
"""

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

SHAPE = 96, 512


def numbers(signed: bool = True) -> Tensor:
    """Return numbers with many magnitudes that are equal on all processors, as is the sum of largest block values."""
    generator = torch.Generator().manual_seed(0)
    values = 2 * torch.rand(SHAPE, generator=generator) - 1
    share = torch.rand(SHAPE, generator=generator)
    for _ in range(6):  # rounding in randn and in powers would depend on the processor
        values = values * share
    values = torch.where(values.abs() > 0.01, (values * 2**13).round() / 2**13, values)
    return values if signed else values * values


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def recorded() -> dict:
    return json.loads((Path(__file__).parents[1] / "recorded" / "bitsandbytes_0.50.2.json").read_text())
