"""Triton kernel that rotates a decode step's new queries and keys, and fills the KV cache.

In torch, rotating q and k takes six operations, and the write to the cache two. All eight read and
write very little, so their launches take longer than their work.

The products are rounded in the same order as in apply_rotary (model/rope.py), which the trainer
uses: x * cos is rounded to x's dtype before the second product is added. In 16 bits, both results
are equal to the bit.
"""

import torch
from torch import Tensor

from minivlmrl.kernels.backend import tl, triton

constexpr = tl.constexpr


@triton.jit
def _rotate(x, cos, sin, out, out_stride, heads, HEADS: constexpr, D: constexpr):
    """Rotate one token's heads (heads, D).

    `out_stride` is the distance between two heads of the result. HEADS is the number of heads,
    rounded up to a power of two.
    """
    head = tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, D // 2)[None, :]
    inside = head < heads
    first = tl.load(x + head * D + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + head * D + D // 2 + column, mask=inside, other=0.0).to(tl.float32)
    out += head * out_stride + column
    _store_rotated(first, second, cos + column, sin + column, out, inside)
    half = D // 2
    _store_rotated(second, first, cos + half + column, sin + half + column, out + half, inside)


@triton.jit
def _store_rotated(a, b, cos, sin, out, inside):
    """Store a * cos + b * sin. The first product is rounded to the result's dtype."""
    dtype = out.dtype.element_ty
    product = (a * tl.load(cos).to(tl.float32)).to(dtype).to(tl.float32)
    rotated = tl.fma(b, tl.load(sin).to(tl.float32), product)
    tl.store(out, rotated.to(dtype), mask=inside)


@triton.jit
def _kernel(
    q,
    k,
    v,
    q_stride,
    k_stride,
    v_stride,
    cos,
    sin,
    rotated_q,
    key_cache,
    value_cache,
    newest,
    C,
    H: constexpr,
    K: constexpr,
    D: constexpr,
    H_ROUNDED: constexpr,
    K_ROUNDED: constexpr,
):
    """Process one row's new token. X_ROUNDED is X, rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    cos += row * D
    sin += row * D
    _rotate(q + row * q_stride, cos, sin, rotated_q + row * H * D, D, H, H_ROUNDED, D)
    cell = (row * K * C + tl.load(newest + row)) * D  # the token's position in the cache
    _rotate(k + row * k_stride, cos, sin, key_cache + cell, C * D, K, K_ROUNDED, D)
    head = tl.arange(0, K_ROUNDED)[:, None]
    column = tl.arange(0, D)[None, :]
    inside = head < K
    values = tl.load(v + row * v_stride + head * D + column, mask=inside)
    tl.store(value_cache + cell + head * C * D + column, values, mask=inside)


def rotary_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    newest: Tensor,
) -> Tensor:
    """Rotate q and k for one new token per row, and write k and v to the cache.

    The result equals the result from apply_rotary and DecodeAttention.remember in minivlmrl/model.
    The dtype must be in DTYPES, and D must be a power of two.

    Args:
        q: (R, H, D), queries before the rotation. A row's heads are contiguous.
        k, v: (R, K, D), keys before the rotation, and values, likewise.
        cos, sin: (R, 1, D), from text_rotary; contiguous.
        key_cache, value_cache: (R, K, C, D), contiguous; changed in place.
        newest: (R,) int64, each row's cache index for its new token, from 0 to C - 1.
    Returns:
        The rotated queries (R, H, D), contiguous.
    """
    (R, H, D) = q.shape
    (_, K, C, _) = key_cache.shape
    out = q.new_empty(R, H, D)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        _kernel[(R,)](
            q,
            k,
            v,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            cos,
            sin,
            out,
            key_cache,
            value_cache,
            newest,
            C,
            H=H,
            K=K,
            D=D,
            H_ROUNDED=triton.next_power_of_2(H),
            K_ROUNDED=triton.next_power_of_2(K),
            num_warps=4,
            enable_fp_fusion=False,  # the rounding order is explicit
        )
    return out
