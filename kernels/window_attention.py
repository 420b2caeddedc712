"""Attention inside segments: tokens attend to all tokens in their window or video frame.

Derivation. For one head and segment, let q_s, k_s and v_s (L, D) be queries, keys and values. With c = D^-1/2,

    S = c q_s k_s^T (L, L)      P = softmax(S) over the last axis      o_s = P v_s (L, D)

Let do_s be the gradient of o_s. The softmax of a row has the Jacobian diag(p) - p p^T, so the gradients are

    dv_s = P^T do_s              dP = do_s v_s^T
    dS = P * (dP - sum_j P_ij dP_ij)
    dq_s = c dS k_s              dk_s = c dS^T q_s

Triton's backward recomputes attention weights in registers, so only q, k and v are saved. A program computes one head
in one segment with at most 64 tokens. Head dimension 80 is padded to 128, not to 64 + 16, because of a compiler bug in
Triton 3.6 and 3.7 (triton-lang/triton#11366).

Time for the windows in eight photographs without Triton, forward and backward on an H200: 1 ms in one call to
varlen_attn, 39 ms in 128 calls to scaled_dot_product_attention.
"""

import math
from itertools import groupby
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.kernels.backend import INTERPRETED, backend_for, tl, to_device, triton
from minivlmrl.kernels.dense_attention import Reorder, dense_attention, has_flash_attention

# maximum sizes for the Triton kernel, limited by registers; float32 inputs use torch
MAX_TOKENS, MAX_HEAD_DIM = 64, 128
TILE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)[: 3 if INTERPRETED else 2]

# Adjacent segments of equal length share an attention call, so sorting segments by length saves calls. On a CPU,
# sorting 128 tokens takes as long as a call, so sort only if calls would have fewer tokens on average.
TOKENS_PER_CALL = 128


class Segments:
    """Segment boundaries; tokens attend only to their own segment."""

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        self.longest = max(lengths)
        sizes = torch.tensor(lengths)
        starts = F.pad(sizes.cumsum(0), (1, 0))
        # (segments + 1,) first token index per segment, then the token count
        self.cu_seqlens = to_device(starts.int(), device)
        # (segment length, tokens) for adjacent segments with equal length: 64, 64, 16 -> [(64, 128), (16, 16)]
        self.runs = [(length, sum(group)) for length, group in groupby(lengths)]
        # (T,) token indices sorted by segment length, and the inverse permutation; None = not sorted
        self.order = self.inverse = None
        if len(set(lengths)) < len(self.runs) and sum(lengths) < TOKENS_PER_CALL * len(self.runs):
            self.runs = [(length, sum(group)) for length, group in groupby(sorted(lengths))]
            self.order = to_device(sizes.repeat_interleave(sizes).argsort(stable=True), device)
            self.inverse = self.order.argsort()


# the kernels pad segments to ROWS tokens, and heads to COLUMNS elements
constexpr = tl.constexpr
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _load(x, row_stride, length, D, ROWS: constexpr, COLUMNS: constexpr):
    """Load a segment's q, k or v, zero-padded to (ROWS, COLUMNS)."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (rows < length) & (columns < D)
    return tl.load(x + rows * row_stride + columns, mask=inside, other=0.0)


@triton.jit
def _row_products(a, b):
    return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.jit
def _store_product(out, a, b, length, H: constexpr, D: constexpr):
    """Write the first `length` rows and D columns of a padded product a @ b to `out`."""
    product = tl.dot(a, b, input_precision="ieee")
    rows = tl.arange(0, product.shape[0])[:, None]
    columns = tl.arange(0, product.shape[1])[None, :]
    inside = (rows < length) & (columns < D)
    tl.store(out + rows * (H * D) + columns, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _softmax(scores, length, D: constexpr, ROWS: constexpr):
    """Compute attention weights from scores, each (ROWS queries, ROWS keys)."""
    inside = tl.arange(0, ROWS)[None, :] < length
    scores = tl.where(inside, scores * (D**-0.5 * LOG2E), float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _segment(cu_seqlens, H: constexpr):
    """Return attention head, first token and segment length for this Triton program."""
    segment = tl.program_id(0) // H
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    # start in int64, because start * H * D may exceed 32 bits
    return tl.program_id(0) % H, start.to(tl.int64), length


@triton.jit
def _forward_kernel(
    q, k, v, q_row, q_head, k_row, k_head, v_row, v_head, cu_seqlens, out,
    H: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    head, start, length = _segment(cu_seqlens, H)
    q += start * q_row + head * q_head
    k += start * k_row + head * k_head
    v += start * v_row + head * v_head
    out += (start * H + head) * D

    queries = _load(q, q_row, length, D, ROWS, COLUMNS)
    keys = _load(k, k_row, length, D, ROWS, COLUMNS)
    P = _softmax(_row_products(queries, keys), length, D, ROWS)
    values = _load(v, v_row, length, D, ROWS, COLUMNS)
    _store_product(out, P.to(v.dtype.element_ty), values, length, H, D)


@triton.jit
def _backward_kernel(
    q, k, v, q_row, q_head, k_row, k_head, v_row, v_head, cu_seqlens, grad, grad_q, grad_k, grad_v,
    H: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):  # fmt: skip
    head, start, length = _segment(cu_seqlens, H)
    q += start * q_row + head * q_head
    k += start * k_row + head * k_head
    v += start * v_row + head * v_head
    offset = (start * H + head) * D  # offset into the contiguous gradient tensors

    queries = _load(q, q_row, length, D, ROWS, COLUMNS)
    keys = _load(k, k_row, length, D, ROWS, COLUMNS)
    grads = _load(grad + offset, H * D, length, D, ROWS, COLUMNS)
    values = _load(v, v_row, length, D, ROWS, COLUMNS)
    P = _softmax(_row_products(queries, keys), length, D, ROWS)
    dP = _row_products(grads, values)
    # padding queries add nothing here, because their upstream gradients are 0
    dS = (D**-0.5 * P * (dP - tl.sum(P * dP, 1)[:, None])).to(v.dtype.element_ty)
    P_t = tl.trans(P.to(v.dtype.element_ty))
    _store_product(grad_v + offset, P_t, grads, length, H, D)
    _store_product(grad_q + offset, dS, keys, length, H, D)
    _store_product(grad_k + offset, tl.trans(dS), queries, length, H, D)


def block_sizes(longest: int, head_dim: int) -> tuple[int, int]:
    """Round segment length and head dimension up to powers of two: (60, 80) -> (64, 128)."""
    # at least 16 rows and columns, as tl.dot requires
    return max(16, triton.next_power_of_2(longest)), max(16, triton.next_power_of_2(head_dim))


def _launch(kernel, q: Tensor, k: Tensor, v: Tensor, segments: Segments, **tensors: Tensor) -> None:
    # rows and heads may have any stride, columns must be contiguous
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    _, H, D = q.shape
    cu_seqlens = segments.cu_seqlens
    rows, columns = block_sizes(segments.longest, D)
    with torch.cuda.device_of(q):  # launch on the tensors' GPU, which may not be the current one
        kernel[((len(cu_seqlens) - 1) * H,)](
            q, k, v, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cu_seqlens, **tensors,
            H=H, D=D, ROWS=rows, COLUMNS=columns,
            # 4 warps for 64 rows, as Hopper's matrix instruction needs
            num_warps=rows // 16,
            num_stages=1,
            # set explicitly, because the default differs between Triton versions
            enable_fp_fusion=True,
        )  # fmt: skip


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.segments = segments
        out = q.new_empty(q.shape)
        _launch(_forward_kernel, q, k, v, segments, out=out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        grad_q, grad_k, grad_v = (q.new_empty(q.shape) for _ in range(3))
        _launch(
            _backward_kernel, q, k, v, ctx.segments,
            grad=grad.contiguous(), grad_q=grad_q, grad_k=grad_k, grad_v=grad_v,
        )  # fmt: skip
        return grad_q, grad_k, grad_v, None


def window_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Compute attention (T, H, D) inside segments, with scores scaled by D^-1/2.

    The Triton kernel supports float16 and bfloat16, up to 64 tokens per segment and 128 elements per head. Without
    Triton, segments of different lengths, up to 64 tokens, take one varlen_attn call on NVIDIA GPUs. Other
    inputs take one dense_attention call for every run of adjacent segments with equal length.

    Args:
        q, k, v: (T, H, D), same dtype.
    Source: transformers' Qwen2_5_VLVisionAttention with cu_seqlens.
    """
    is_short = segments.longest <= MAX_TOKENS
    fits = is_short and q.shape[-1] <= MAX_HEAD_DIM and q.dtype in TILE_DTYPES
    if fits and backend_for(q, "window_attention") == "triton":
        return _WindowAttention.apply(q, k, v, segments)
    # use varlen_attn only for up to 64 tokens per segment, because it was not measured for more
    is_mixed = is_short and len(segments.runs) > 1
    if is_mixed and q.is_cuda and has_flash_attention(*(x.transpose(0, 1)[None] for x in (q, k, v))):
        # lazy import, because importing torch._dynamo takes over a second
        from torch.nn.attention.varlen import varlen_attn

        starts, longest = segments.cu_seqlens, segments.longest
        return cast(Tensor, varlen_attn(q, k, v, starts, starts, longest, longest))
    if segments.order is not None:
        q, k, v = (Reorder.apply(x, segments.order, segments.inverse) for x in (q, k, v))
    lengths, tokens = zip(*segments.runs, strict=True)
    runs = []
    for length, *inputs in zip(lengths, q.split(tokens), k.split(tokens), v.split(tokens), strict=True):
        # (segments, heads, tokens, head dimension)
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in inputs)
        runs.append(dense_attention(q, k, v).transpose(1, 2).flatten(0, 1))
    out = torch.cat(runs) if len(runs) > 1 else runs[0]
    return out if segments.order is None else Reorder.apply(out, segments.inverse, segments.order)
