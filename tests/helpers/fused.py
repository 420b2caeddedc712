"""torch.linspace as on a processor with fused multiply-add, such as the one that made tests/recorded.

Fused multiply-add rounds start + step * i once. Without AVX2, the product is rounded first, which changes frames in
qwen-vl-utils, tables in bitsandbytes, and ours. With this linspace, results equal the recorded ones everywhere.
"""

import pytest
import torch
from torch import Tensor


def linspace(start: float, end: float, steps: int) -> Tensor:
    """Compute linspace from both ends to the middle; float64 products and sums are rounded once, to float32."""
    first, last = torch.tensor([start, end], dtype=torch.float32)
    step = ((last - first) / max(1, steps - 1)).double()
    index = torch.arange(steps, dtype=torch.float64)
    return torch.where(index < steps // 2, first + step * index, last - step * (steps - 1 - index)).float()


@pytest.fixture
def fused_linspace(monkeypatch):
    monkeypatch.setattr(torch, "linspace", linspace)
