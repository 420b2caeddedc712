"""Attention inside segments: each token attends to all tokens of its own window (or of its own frame).

Derivation. For segment s with rows q_s, k_s, v_s (L_s, H, D) and scale D^-1/2:

    S = q_s k_s^T D^-1/2        (H, L_s, L_s)
    P = softmax(S)              over the last axis
    o_s = P v_s                 (L_s, H, D)

Nothing couples two segments, so segments of equal length are one batched call and no mask is needed. The torch path
below does just that; it is also the reference for a fused kernel behind the same signature (not written yet).
"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.kernels.dense_attention import dense_attention


class Segments:
    """Consecutive runs of tokens that attend within themselves; built once per batch, used by every block.

    Args:
        lengths: tokens of each segment, in order; they sum to T.
        device: where the index tensors live.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        self.lengths = lengths
        starts, begin = defaultdict(list), 0
        for length in lengths:
            starts[length].append(begin)
            begin += length
        # (length, rows (segments of that length, length)), one entry per distinct length
        self.buckets = [
            (length, (torch.tensor(first)[:, None] + torch.arange(length)).to(device))
            for length, first in starts.items()
        ]
        order = torch.cat([rows.flatten() for _, rows in self.buckets])
        self.inverse = order.argsort()


def window_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Attend within each segment, scale D^-1/2.

    Args:
        q, k, v: (T, H, D), one dtype.
        segments: which rows belong together.
    Returns:
        (T, H, D).
    Source: what transformers' Qwen2_5_VLVisionAttention computes with cu_seqlens.
    """
    if len(segments.buckets) == 1:  # all of one length: already in order, no copies
        return _bucket(q, k, v, segments.buckets[0][0]).flatten(0, 1)
    out = [
        _bucket(*(gather_rows(x, rows.flatten()) for x in (q, k, v)), n).flatten(0, 1) for n, rows in segments.buckets
    ]
    return gather_rows(torch.cat(out), segments.inverse)


def _bucket(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Batched attention over runs of equal length. (S*L, H, D) -> (S, L, H, D)."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))  # (S, H, L, D)
    return dense_attention(q, k, v).transpose(1, 2)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] along the first axis. x (T, ...), index any shape -> (*index.shape, ...).

    An embedding look-up: its backward adds whole rows, measured 17 times faster on CPU than that of x[index].
    """
    return F.embedding(index, x.flatten(1)).unflatten(-1, x.shape[1:])
