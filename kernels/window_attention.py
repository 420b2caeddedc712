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
    if len(segments.runs) == 1:  # nothing to split and to join
        [(length, _)] = segments.runs
        out = _equal_segments(q, k, v, length)
    else:
        tokens = [count for _, count in segments.runs]
        pieces = zip(segments.runs, q.split(tokens), k.split(tokens), v.split(tokens), strict=True)
        out = torch.cat([_equal_segments(q, k, v, length) for (length, _), q, k, v in pieces])
    return out if segments.order is None else Reorder.apply(out, segments.inverse, segments.order)


def _equal_segments(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Attend within each of consecutive segments of one length, (S * length, H, D)."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))  # (S, H, L, D)
    return dense_attention(q, k, v).transpose(1, 2).flatten(0, 1)


# A head's columns are one block of COLUMNS, or two, the second of MORE: 64 and 16 of 80. ROWS holds
# a segment's tokens. All three are powers of two; MORE may be 0.
constexpr = tl.constexpr
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _load_block(x, row_stride, length, D, FIRST: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """COLUMNS columns of a segment's rows from FIRST on; zeros outside of it."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = FIRST + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < length) & (columns < D)
    return tl.load(x + rows * row_stride + columns, mask=inside, other=0.0)


@triton.jit
def _load(x, row_stride, length, D, ROWS: constexpr, COLUMNS: constexpr, MORE: constexpr):
    """A segment's rows in two blocks of columns; without MORE the second is never used."""
    first = _load_block(x, row_stride, length, D, 0, ROWS, COLUMNS)
    second = first
    if MORE > 0:
        second = _load_block(x, row_stride, length, D, COLUMNS, ROWS, MORE)
    return first, second


@triton.jit
def _store_block(x, block, length, D, row_stride, FIRST: constexpr):
    rows = tl.arange(0, block.shape[0])[:, None]
    columns = FIRST + tl.arange(0, block.shape[1])[None, :]
    inside = (rows < length) & (columns < D)
    tl.store(x + rows * row_stride + columns, block.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _row_products(a, b, MORE: constexpr):
    """a b^T (ROWS, ROWS), summed in float32 over both blocks of columns."""
    products = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    if MORE > 0:
        products = tl.dot(a[1], tl.trans(b[1]), products, input_precision="ieee")
    return products


@triton.jit
def _store_product(out, a, b, length, H: constexpr, D: constexpr, MORE: constexpr):
    """Write a b, of a (ROWS, ROWS), to a segment of a contiguous tensor."""
    product = tl.dot(a, b[0], input_precision="ieee")
    _store_block(out, product, length, D, H * D, 0)
    if MORE > 0:
        product = tl.dot(a, b[1], input_precision="ieee")
        _store_block(out, product, length, D, H * D, b[0].shape[1])


@triton.jit
def _softmax(scores, length, D: constexpr, ROWS: constexpr):
    """P from q k^T. Rows outside of the segment get weights too, which are never read."""
    inside = tl.arange(0, ROWS)[None, :] < length
    scores = tl.where(inside, scores * (D**-0.5 * LOG2E), float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _segment(cu_seqlens, H: constexpr):
    """A program's head, the first token of its segment, in 64 bits for offsets, and its length."""
    segment = tl.program_id(0) // H
    start = tl.load(cu_seqlens + segment)
    length = tl.load(cu_seqlens + segment + 1) - start
    return tl.program_id(0) % H, start.to(tl.int64), length


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    cu_seqlens,
    out,
    H: constexpr,
    D: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    MORE: constexpr,
):
    """Compute out = softmax(q k^T) v for one segment and one head; q_row and so on are strides."""
    head, start, length = _segment(cu_seqlens, H)
    q += start * q_row + head * q_head
    k += start * k_row + head * k_head
    v += start * v_row + head * v_head
    out += (start * H + head) * D

    queries = _load(q, q_row, length, D, ROWS, COLUMNS, MORE)
    keys = _load(k, k_row, length, D, ROWS, COLUMNS, MORE)
    P = _softmax(_row_products(queries, keys, MORE), length, D, ROWS)
    values = _load(v, v_row, length, D, ROWS, COLUMNS, MORE)
    _store_product(out, P.to(v.dtype.element_ty), values, length, H, D, MORE)


@triton.jit
def _backward_kernel(
    q,
    k,
    v,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    cu_seqlens,
    grad,
    grad_q,
    grad_k,
    grad_v,
    H: constexpr,
    D: constexpr,
    ROWS: constexpr,
    COLUMNS: constexpr,
    MORE: constexpr,
):
    """Compute the gradients for one segment and one head, as derived above."""
    head, start, length = _segment(cu_seqlens, H)
    q += start * q_row + head * q_head
    k += start * k_row + head * k_head
    v += start * v_row + head * v_head
    offset = (start * H + head) * D  # grad and the three results are contiguous

    queries = _load(q, q_row, length, D, ROWS, COLUMNS, MORE)
    keys = _load(k, k_row, length, D, ROWS, COLUMNS, MORE)
    grads = _load(grad + offset, H * D, length, D, ROWS, COLUMNS, MORE)
    values = _load(v, v_row, length, D, ROWS, COLUMNS, MORE)
    P = _softmax(_row_products(queries, keys, MORE), length, D, ROWS)
    dP = _row_products(grads, values, MORE)
    # rows outside of the segment: dP = 0, so dS = 0
    dS = (D**-0.5 * P * (dP - tl.sum(P * dP, 1)[:, None])).to(v.dtype.element_ty)
    P_t = tl.trans(P.to(v.dtype.element_ty))
    _store_product(grad_v + offset, P_t, grads, length, H, D, MORE)
    _store_product(grad_q + offset, dS, keys, length, H, D, MORE)
    _store_product(grad_k + offset, tl.trans(dS), queries, length, H, D, MORE)


def block_sizes(longest: int, head_dim: int) -> tuple[int, int, int]:
    """ROWS, COLUMNS, MORE for segments of `longest` tokens: 64, 64, 16 for 60 of head size 80.

    At least 16, the smallest that a matrix instruction takes.
    """
    rows = max(16, 1 << (longest - 1).bit_length())
    columns = max(16, 1 << head_dim.bit_length() - 1)
    if head_dim <= columns:
        return rows, columns, 0
    return rows, columns, max(16, 1 << (head_dim - columns - 1).bit_length())


def _launch(
    kernel, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, **others: Tensor
) -> None:
    """Start one program for each segment and head; others: what only one of the kernels takes."""
    # the kernels take any strides of rows and heads, but a head's numbers one after the other
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    (_, H, D) = q.shape
    (rows, columns, more) = block_sizes(longest, D)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        kernel[((len(cu_seqlens) - 1) * H,)](
            q,
            k,
            v,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            cu_seqlens,
            **others,
            H=H,
            D=D,
            ROWS=rows,
            COLUMNS=columns,
            MORE=more,
            num_warps=rows // 16,  # of 64 tokens 4 warps, one group of Hopper's matrix unit
            num_stages=1,
        )


@torch.library.custom_op("minivlmrl::window_attention", mutates_args=())
def _window_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(_forward_kernel, q, k, v, cu_seqlens, longest, out=out)
    return out


@torch.library.custom_op("minivlmrl::window_attention_backward", mutates_args=())
def _window_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (
        torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)
    )
    grads = {"grad": grad.contiguous(), "grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}
    _launch(_backward_kernel, q, k, v, cu_seqlens, longest, **grads)
    return grad_q, grad_k, grad_v


_window_attention.register_fake(lambda q, *_: q.new_empty(q.shape))
_window_attention_backward.register_fake(
    lambda grad, q, *_: tuple(q.new_empty(q.shape) for _ in range(3))
)


def _save(ctx, inputs, output):
    *tensors, ctx.longest = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad: Tensor):
    return *_window_attention_backward(grad, *ctx.saved_tensors, ctx.longest), None, None


_window_attention.register_autograd(_differentiate, setup_context=_save)


def window_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Attend within each segment, scale D^-1/2: q, k, v (T, H, D) of one dtype -> (T, H, D).

    Triton runs where backend_for chooses it and a segment fits into one program: at most 64 tokens,
    D <= 128, float16 or bfloat16. Otherwise torch, with dense_attention for each length.
    Source: what transformers' Qwen2_5_VLVisionAttention computes with cu_seqlens.
    """
    fits = segments.longest <= MOST_TOKENS and q.shape[-1] <= MOST_HEAD_DIM and q.dtype in DTYPES
    if fits and backend_for(q) == "triton":
        return _window_attention(q, k, v, segments.cu_seqlens, segments.longest)
    return batched_attention(q, k, v, segments)
