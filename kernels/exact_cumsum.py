"""Cumulative sums of integers in blocks, because a GPU sums a long row value by value."""

import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # divides the vocabulary sizes of Qwen


def running_sum(x: Tensor) -> Tensor:
    """Compute x.cumsum(-1) of integers (r, V): sum inside blocks, then add the preceding blocks.

    With torch's cumsum over a whole vocabulary, this step took 0.3 ms for each token.
    """
    vocab = x.shape[1]
    missing = -vocab % BLOCK
    if missing:
        x = F.pad(x, (0, missing))
    blocks = x.unflatten(1, (-1, BLOCK)).cumsum(-1)  # (r, blocks, BLOCK)
    totals = blocks[..., -1]  # (r, blocks)
    before = totals.cumsum(-1) - totals
    sums = (blocks + before[..., None]).flatten(1)
    return sums[:, :vocab].contiguous()
