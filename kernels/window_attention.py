"""Attention inside segments: each token attends to all tokens of its own window (or its own frame).

Derivation. For a segment with rows q_s, k_s, v_s (L, H, D), c = D^-1/2 and each head separately:

    S = c q_s k_s^T      (L, L)        P = softmax(S) over the last axis        o_s = P v_s      (L, D)

The softmax is computed as 2^(S log2 e), after the row's largest entry is subtracted. With do_s the
gradient of o_s, and since a row's softmax has the Jacobian diag(p) - p p^T:

    dv_s = P^T do_s              dP = do_s v_s^T
    dS = P * (dP - sum_j P_ij dP_ij)
    dq_s = c dS k_s              dk_s = c dS^T q_s

so the backward needs q, k and v alone: it computes S and P, 64 x 64 numbers, again on the chip.

Segments are independent. In torch, consecutive segments of equal length are one batched call
without a mask; where such runs are too short for a call each, the segments are sorted by length
first. In Triton one program computes one segment of at most 64 tokens and one head, forward or
backward: one read of its inputs, one write of its outputs. A head of D = 80 is two blocks of
columns, 64 and 16: with one of 128 the backward needs a third more registers (sm_90).
"""

import math
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.kernels.backend import INTERPRETED, backend_for, tl, to_device, triton
from minivlmrl.kernels.dense_attention import Reorder, dense_attention

# Bounds of what a Triton program keeps in registers. float32 does not fit: IEEE products spill 8 KB
# a thread, and three passes of tf32 still spill in the backward. So float32 on a GPU goes to torch;
# the interpreter has no registers.
MOST_TOKENS, MOST_HEAD_DIM = 64, 128
DTYPES = (torch.float16, torch.bfloat16, torch.float32)[: 3 if INTERPRETED else 2]

TOKENS_PER_CALL = 128  # on a CPU a call costs as much as sorting these: shorter segments are sorted


class Segments:
    """Lengths of the segments, in order, and how batched_attention calls them, for all blocks."""

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        self.longest = max(lengths)
        begins = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
        # (segments + 1,): the begin of each, and the end of the last
        self.cu_seqlens = to_device(begins.int(), device)
        # one call each: (length, tokens) of consecutive segments of one length
        self.runs = [(length, sum(group)) for length, group in groupby(lengths)]
        self.order = self.inverse = None  # (T,) permutations of the tokens, if these are sorted
        if len(set(lengths)) < len(self.runs) and sum(lengths) < TOKENS_PER_CALL * len(self.runs):
            self.runs = [(length, sum(group)) for length, group in groupby(sorted(lengths))]
            length_of_token = begins.diff().repeat_interleave(begins.diff())  # (T,)
            self.order = to_device(length_of_token.argsort(stable=True), device)
            self.inverse = self.order.argsort()


def batched_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Compute window_attention with one call for each run of segments of equal length."""
    if segments.order is not None:
        q, k, v = (Reorder.apply(x, segments.order, segments.inverse) for x in (q, k, v))
    lengths, tokens = zip(*segments.runs, strict=True)
    split = (x.split(tokens) if tokens[1:] else [x] for x in (q, k, v))
    out = []
    for length, *qkv in zip(lengths, *split, strict=True):
        qkv = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in qkv)  # (S, H, L, D)
        out.append(dense_attention(*qkv).transpose(1, 2).flatten(0, 1))
    out = torch.cat(out) if out[1:] else out[0]
    return out if segments.order is None else Reorder.apply(out, segments.inverse, segments.order)


# Of the kernels L, D0 and D1 are block sizes, powers of two; D1 = 0: one block of columns will do.
constexpr = tl.constexpr


@triton.jit
def _load(x, row_stride, length, D, FIRST: constexpr, L: constexpr, COLUMNS: constexpr):
    """COLUMNS columns of a segment's rows from FIRST on, (L, COLUMNS); zeros outside of it."""
    rows = tl.arange(0, L)[:, None]
    columns = FIRST + tl.arange(0, COLUMNS)[None, :]
    return tl.load(x + rows * row_stride + columns, mask=(rows < length) & (columns < D), other=0.0)


@triton.jit
def _store(x, tile, row_stride, length, D, FIRST: constexpr, L: constexpr, COLUMNS: constexpr):
    rows = tl.arange(0, L)[:, None]
    columns = FIRST + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < length) & (columns < D)
    tl.store(x + rows * row_stride + columns, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _dot(a, b, acc):
    """acc + a b, summed in float32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _softmax(scores, length, log2_scale, L: constexpr):
    """P from q k^T. Rows outside of the segment get weights too, which are never read."""
    scores = tl.where(tl.arange(0, L)[None, :] < length, scores * log2_scale, float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _forward_kernel(
    q, k, v, out, cu_seqlens, q_row, q_head, k_row, k_head, v_row, v_head, log2_scale,
    H: constexpr, D: constexpr, L: constexpr, D0: constexpr, D1: constexpr,
):  # fmt: skip
    """Compute out = softmax(q k^T) v for one segment and one head."""
    segment = tl.program_id(0) // H
    head = tl.program_id(0) % H
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    first = start.to(tl.int64)  # first * stride may exceed 2^31
    q += first * q_row + head * q_head
    k += first * k_row + head * k_head
    v += first * v_row + head * v_head
    out += first * H * D + head * D

    q0 = _load(q, q_row, length, D, 0, L, D0)
    k0 = _load(k, k_row, length, D, 0, L, D0)
    scores = _dot(q0, tl.trans(k0), tl.zeros((L, L), tl.float32))
    if D1 > 0:
        q1 = _load(q, q_row, length, D, D0, L, D1)
        k1 = _load(k, k_row, length, D, D0, L, D1)
        scores = _dot(q1, tl.trans(k1), scores)
    P = _softmax(scores, length, log2_scale, L).to(v.dtype.element_ty)
    o0 = _dot(P, _load(v, v_row, length, D, 0, L, D0), tl.zeros((L, D0), tl.float32))
    _store(out, o0, H * D, length, D, 0, L, D0)
    if D1 > 0:
        o1 = _dot(P, _load(v, v_row, length, D, D0, L, D1), tl.zeros((L, D1), tl.float32))
        _store(out, o1, H * D, length, D, D0, L, D1)


@triton.jit
def _backward_kernel(
    grad, q, k, v, grad_q, grad_k, grad_v, cu_seqlens, q_row, q_head, k_row, k_head, v_row, v_head, scale, log2_scale,
    H: constexpr, D: constexpr, L: constexpr, D0: constexpr, D1: constexpr,
):  # fmt: skip
    """Compute the gradients for one segment and one head, as derived above."""
    segment = tl.program_id(0) // H
    head = tl.program_id(0) % H
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    first = start.to(tl.int64)
    q += first * q_row + head * q_head
    k += first * k_row + head * k_head
    v += first * v_row + head * v_head
    begin = first * H * D + head * D  # of grad and of the three outputs, which are all contiguous

    q0 = _load(q, q_row, length, D, 0, L, D0)
    k0 = _load(k, k_row, length, D, 0, L, D0)
    do0 = _load(grad + begin, H * D, length, D, 0, L, D0)
    v0 = _load(v, v_row, length, D, 0, L, D0)
    scores = _dot(q0, tl.trans(k0), tl.zeros((L, L), tl.float32))
    dP = _dot(do0, tl.trans(v0), tl.zeros((L, L), tl.float32))
    if D1 > 0:
        q1 = _load(q, q_row, length, D, D0, L, D1)
        k1 = _load(k, k_row, length, D, D0, L, D1)
        do1 = _load(grad + begin, H * D, length, D, D0, L, D1)
        v1 = _load(v, v_row, length, D, D0, L, D1)
        scores = _dot(q1, tl.trans(k1), scores)
        dP = _dot(do1, tl.trans(v1), dP)
    P = _softmax(scores, length, log2_scale, L)
    # rows outside of the segment: dP = 0, so dS = 0
    dS = scale * P * (dP - tl.sum(P * dP, 1)[:, None])
    P_t, dS = tl.trans(P.to(v0.dtype)), dS.to(v0.dtype)
    dS_t = tl.trans(dS)

    zeros = tl.zeros((L, D0), tl.float32)
    _store(grad_v + begin, _dot(P_t, do0, zeros), H * D, length, D, 0, L, D0)
    _store(grad_q + begin, _dot(dS, k0, zeros), H * D, length, D, 0, L, D0)
    _store(grad_k + begin, _dot(dS_t, q0, zeros), H * D, length, D, 0, L, D0)
    if D1 > 0:
        rest = tl.zeros((L, D1), tl.float32)
        _store(grad_v + begin, _dot(P_t, do1, rest), H * D, length, D, D0, L, D1)
        _store(grad_q + begin, _dot(dS, k1, rest), H * D, length, D, D0, L, D1)
        _store(grad_k + begin, _dot(dS_t, q1, rest), H * D, length, D, D0, L, D1)


def blocks(longest: int, head_dim: int) -> tuple[int, int, int]:
    """Block sizes L, D0, D1 for segments of `longest` tokens: 64, 64, 16 for 60 of head size 80.

    At least 16, the smallest that a matrix instruction takes.
    """
    D0 = max(16, 1 << head_dim.bit_length() - 1)
    D1 = 0 if head_dim <= D0 else max(16, 1 << (head_dim - D0 - 1).bit_length())
    return max(16, 1 << (longest - 1).bit_length()), D0, D1


def _launch(kernel, grad: list, qkv: tuple, results: tuple, cu_seqlens: Tensor, longest: int):
    """Start one program for each segment and head; the backward takes scale as well."""
    # the kernels take any strides of rows and heads, but a head's numbers one after the other
    qkv = [x if x.stride(2) == 1 else x.contiguous() for x in qkv]
    (_, H, D) = qkv[0].shape
    (L, D0, D1) = blocks(longest, qkv[0].shape[2])
    numbers = [stride for x in qkv for stride in x.stride()[:2]]
    numbers += [D**-0.5] if grad else []
    numbers.append(D**-0.5 * math.log2(math.e))
    sizes = {"H": H, "D": D, "L": L, "D0": D0, "D1": D1}
    # of 64 tokens 4 warps, one group of Hopper's matrix unit
    grid = ((len(cu_seqlens) - 1) * H,)
    options = {"num_warps": L // 16, "num_stages": 1}
    with torch.cuda.device_of(cu_seqlens):  # Triton launches on the current device
        kernel[grid](*grad, *qkv, *results, cu_seqlens, *numbers, **sizes, **options)


@torch.library.custom_op("minivlmrl::window_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(_forward_kernel, [], (q, k, v), (out,), cu_seqlens, longest)
    return out


@torch.library.custom_op("minivlmrl::window_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    grads = tuple(torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    _launch(_backward_kernel, [grad.contiguous()], (q, k, v), grads, cu_seqlens, longest)
    return grads


_forward.register_fake(lambda q, *_: q.new_empty(q.shape))
_backward.register_fake(lambda grad, q, *_: tuple(q.new_empty(q.shape) for _ in range(3)))


def _save(ctx, inputs, output):
    *tensors, ctx.longest = inputs
    ctx.save_for_backward(*tensors)


_forward.register_autograd(
    lambda ctx, grad: (*_backward(grad, *ctx.saved_tensors, ctx.longest), None, None),
    setup_context=_save,
)


def window_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Attend within each segment, scale D^-1/2: q, k, v (T, H, D) of one dtype -> (T, H, D).

    Triton runs where backend_for chooses it and a segment fits into one program: at most 64 tokens,
    D <= 128, float16 or bfloat16. Otherwise torch, with dense_attention for each length.
    Source: what transformers' Qwen2_5_VLVisionAttention computes with cu_seqlens.
    """
    fits = segments.longest <= MOST_TOKENS and q.shape[-1] <= MOST_HEAD_DIM and q.dtype in DTYPES
    if fits and backend_for(q) == "triton":
        return _forward(q, k, v, segments.cu_seqlens, segments.longest)
    return batched_attention(q, k, v, segments)
