"""Cumulative sums of integers over long rows.

They are computed in blocks, because torch's cumsum on a GPU adds the values of a row one by one.
"""

import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # number of values in a block; 128 divides the vocabulary sizes of Qwen


def running_sum(x: Tensor) -> Tensor:
    """Compute x.cumsum(-1) of integers x (r, V).

    The function sums inside each block and then adds the totals of the preceding blocks. torch's
    cumsum over a whole vocabulary took 0.3 ms for each generated token.
    """
    vocab = x.shape[1]
    missing = -vocab % BLOCK
    if missing:
        x = F.pad(x, (0, missing))
    blocks = x.unflatten(1, (-1, BLOCK)).cumsum(-1)  # (r, blocks, BLOCK): sums inside each block
    totals = blocks[..., -1]  # (r, blocks): the total of each block
    before = totals.cumsum(-1) - totals
    sums = (blocks + before[..., None]).flatten(1)
    return sums[:, :vocab].contiguous()
