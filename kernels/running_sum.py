"""Running sums of whole numbers, by blocks: a card sums up a row one value after the other."""

import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # divides the vocabularies of Qwen


def running_sum(x: Tensor) -> Tensor:
    """x.cumsum(-1) of whole numbers (r, V): inside of blocks, then what the blocks before sum to.

    A vocabulary took .3 ms of each token.
    """
    missing = -x.shape[1] % BLOCK
    blocks = (F.pad(x, (0, missing)) if missing else x).unflatten(1, (-1, BLOCK)).cumsum(-1)
    totals = blocks[..., -1]  # (r, blocks)
    sums = (blocks + (totals.cumsum(-1) - totals)[..., None]).flatten(1)
    return sums[:, : x.shape[1]].contiguous()
