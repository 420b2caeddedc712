"""Cumulative sums of integers over a vocabulary, in blocks.

On a GPU, torch.cumsum adds integers in a row one by one, which takes 0.3 ms per generated token.
"""

import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # values per block, a divisor of Qwen's vocabulary sizes


def running_sum(x: Tensor) -> Tensor:
    """Compute x.cumsum(-1) for integers x (r, V), faster on a GPU."""
    vocab = x.shape[1]
    missing = -vocab % BLOCK
    if missing:
        x = F.pad(x, (0, missing))
    blocks = x.unflatten(1, (-1, BLOCK)).cumsum(-1)  # (r, blocks, BLOCK) sums within blocks
    totals = blocks[..., -1]  # (r, blocks) block sums
    before = totals.cumsum(-1) - totals
    return (blocks + before[..., None]).flatten(1)[:, :vocab].contiguous()
