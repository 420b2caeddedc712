"""torch.linspace as processors with a fused multiply-add have it, where tests/recorded was made.

There start + step * i is one instruction and rounded once; without AVX2 the product is rounded first. So on such a
processor qwen-vl-utils takes other frames and bitsandbytes has other tables, and so have we: with the same linspace as
they had, ours equal what was recorded on any processor.
"""

import pytest
import torch
from torch import Tensor


def linspace(start: float, end: float, steps: int) -> Tensor:
    """float32 from both ends to the middle; float64 holds each product and sum, so each is rounded once."""
    first, last = torch.tensor([start, end], dtype=torch.float32)
    step = ((last - first) / max(1, steps - 1)).double()
    index = torch.arange(steps, dtype=torch.float64)
    return torch.where(index < steps // 2, first + step * index, last - step * (steps - 1 - index)).float()


@pytest.fixture
def fused_linspace(monkeypatch):
    monkeypatch.setattr(torch, "linspace", linspace)
