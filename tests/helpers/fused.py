"""torch.linspace with results as on a processor with fused multiply-add, such as the one used for tests/recorded.

With fused multiply-add, start + step * i is one instruction and rounded once. Without AVX2, the product is rounded
first, so qwen-vl-utils selects other frames and bitsandbytes has other tables, and so does our code. With this file's
linspace, our results equal the recorded ones on every processor.
"""

import pytest
import torch
from torch import Tensor


def linspace(start: float, end: float, steps: int) -> Tensor:
    """Compute float32 values from both ends to the middle. The float64 products and sums are rounded only once."""
    first, last = torch.tensor([start, end], dtype=torch.float32)
    step = ((last - first) / max(1, steps - 1)).double()
    index = torch.arange(steps, dtype=torch.float64)
    return torch.where(index < steps // 2, first + step * index, last - step * (steps - 1 - index)).float()


@pytest.fixture
def fused_linspace(monkeypatch):
    monkeypatch.setattr(torch, "linspace", linspace)
