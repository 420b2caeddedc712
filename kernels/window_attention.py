"""Attention inside segments: tokens attend to all tokens in their window or video frame.

On an NVIDIA GPU, segments of different lengths take one call to varlen_attn: for the windows in eight photographs,
forward and backward take 1 ms on an H200, and 39 ms in 128 calls to scaled_dot_product_attention.
"""

from itertools import groupby
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import Reorder, dense_attention, has_flash_attention

MAX_TOKENS = 64  # longest segment for varlen_attn, which was measured only up to here
# Adjacent segments of equal length share an attention call, so sorting segments by length saves calls. On a CPU,
# sorting 128 tokens takes as long as a call, so sort only if calls would have fewer tokens on average.
TOKENS_PER_CALL = 128


class Segments:
    """Segment boundaries; tokens attend only to their own segment."""

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        self.longest = max(lengths)
        sizes = torch.tensor(lengths)
        starts = F.pad(sizes.cumsum(0), (1, 0))
        # (segments + 1,) first token per segment, then token count
        self.cu_seqlens = to_device(starts.int(), device)
        # (segment length, tokens) for adjacent segments with equal length: 64, 64, 16 -> [(64, 128), (16, 16)]
        self.runs = [(length, sum(group)) for length, group in groupby(lengths)]
        # (T,) token order by segment length, and its inverse; None = not sorted
        self.order = self.inverse = None
        if len(set(lengths)) < len(self.runs) and sum(lengths) < TOKENS_PER_CALL * len(self.runs):
            self.runs = [(length, sum(group)) for length, group in groupby(sorted(lengths))]
            self.order = to_device(sizes.repeat_interleave(sizes).argsort(stable=True), device)
            self.inverse = self.order.argsort()


def window_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Compute attention (T, H, D) inside segments, with scores scaled by D^-1/2.

    Each series of equally long segments takes one dense_attention call, unless varlen_attn takes them all.

    Args:
        q, k, v: (T, H, D), same dtype.
    Source: transformers' Qwen2_5_VLVisionAttention with cu_seqlens.
    """
    is_mixed = segments.longest <= MAX_TOKENS and len(segments.runs) > 1
    if is_mixed and q.is_cuda and has_flash_attention(*(x.transpose(0, 1)[None] for x in (q, k, v))):
        # lazy import: torch._dynamo takes over a second
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = segments.cu_seqlens, segments.longest
        return cast(Tensor, varlen_attn(q, k, v, starts, starts, longest, longest))
    if segments.order is not None:
        q, k, v = (Reorder.apply(x, segments.order, segments.inverse) for x in (q, k, v))
    lengths, tokens = zip(*segments.runs, strict=True)
    runs = []
    for length, *inputs in zip(lengths, q.split(tokens), k.split(tokens), v.split(tokens), strict=True):
        # (segments, H, L, D)
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in inputs)
        runs.append(dense_attention(q, k, v).transpose(1, 2).flatten(0, 1))
    out = torch.cat(runs) if len(runs) > 1 else runs[0]
    return out if segments.order is None else Reorder.apply(out, segments.inverse, segments.order)
