"""Running sums of whole numbers, by blocks: a card sums up a row one value after the other."""

import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # divides the vocabularies of Qwen


def running_sum(x: Tensor) -> Tensor:
    """x.cumsum(-1) of whole numbers (r, V): inside of blocks, then what the blocks before sum to.

    A vocabulary took .3 ms of each token.
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
