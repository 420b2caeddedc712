"""Cumulative sums of integers over a whole vocabulary, computed in blocks.

On a GPU, torch.cumsum adds the values of a row one after the other, which would take 0.3 ms per generated token.
"""

import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # values in a block; 128 divides Qwen's vocabulary sizes


def running_sum(x: Tensor) -> Tensor:
    """Compute x.cumsum(-1) for integers x (r, V)."""
    vocab = x.shape[1]
    missing = -vocab % BLOCK
    if missing:
        x = F.pad(x, (0, missing))
    blocks = x.unflatten(1, (-1, BLOCK)).cumsum(-1)  # (r, blocks, BLOCK): sums inside each block
    totals = blocks[..., -1]  # (r, blocks): each block's total
    before = totals.cumsum(-1) - totals
    sums = (blocks + before[..., None]).flatten(1)
    return sums[:, :vocab].contiguous()
