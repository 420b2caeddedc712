"""Log-probability of chosen tokens and entropy from hidden states, without all (M, V) logits.

Derivation. For one row h (D,), head W (V, D), chosen token y and temperature T:

    z = W h                     logp, H and their dz: as in selective_log_softmax.py, from z, y and T
    dh = W^T dz                 dW = sum over rows of dz h^T

Forward and backward compute the logits piece by piece. The forward keeps three numbers of each row:
top, s and H. The backward computes the logits of a piece again, overwrites them with dz and
multiplies: four products of M V D multiplications in all. Rows with both upstream gradients zero
(advantage 0, clipped ratio) have dz = 0, so the backward skips them; nothing is approximated.

    torch     a piece is a few rows with all of their logits, small enough for the CPU's caches
    Triton    a piece is a tile of 4096 rows by 2048 ids: it stays in the GPU's L2 cache between the product that
              computes it and the kernel that adds it to top, s and t. dW is finished tile by tile,
              without (V, D) in float32

Logits are float32 also of bfloat16 states, where they would step by .06 to .125 nats; dz is rounded
to bfloat16 for its products, which are summed in float32, as are the pieces' parts of dh and dW.
"""

import torch
from torch import Tensor

from minivlmrl.kernels.backend import DTYPES, backend_for
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.kernels.selective_log_softmax import (
    differences_,
    differentiate_part_,
    differentiate_rows_,
    fold_,
    has_gradient,
    score_rows_,
    take_rows,
)

# of float32 logits in one piece of the torch path; at least 32 and at most 256 rows
CHUNK_BYTES = 16 * 2**20
GPU_ROWS = 512  # rows of one piece of the torch path on a GPU
TILE = 4096  # rows, and twice the ids, of one piece of the Triton path: 34 MB of float32


class Pieces:
    """Logits of hidden (M, D) and head (V, D) by slices of rows and of ids (tiles of the head).

    mask: see linear_log_softmax; (2, 0) for none.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, temperature: float
    ):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        self.is_triton = backend_for(hidden) == "triton"
        size = rows_of_piece(len(hidden), len(weight), hidden.device.type)
        width = len(weight)
        if self.is_triton:
            size = max(min(TILE, len(hidden)), 1)
            width = min(TILE // 2, len(weight))
        self.rows = slices(len(hidden), size)
        self.tiles = slices(len(weight), width)  # the torch path has one
        self.hidden = hidden
        # a CPU has no float32 products of bfloat16: it converts the head once
        self.weight = weight if weight.is_cuda else weight.to(wide)
        self.ids = ids
        self.mask = mask
        self.temperature = temperature
        # one for all pieces, as page faults cost; so are the torch path's exponentials
        self.memory = hidden.new_empty(size * width, dtype=wide)
        self.scratch = self.memory.new_empty(0 if self.is_triton else size, width)

    def logits(self, rows: slice, tile: slice) -> Tensor:
        """Compute the logits (m, width) of a piece, in memory."""
        h = self.hidden[rows]
        w = self.weight[tile]
        z = self.memory[: len(h) * len(w)].view(len(h), len(w))
        float32_matmul(h, w.T, out=z)
        if self.mask.numel():
            keep_(z, self.mask[0] - rows.start, self.mask[1] - tile.start)
        return z

    def score(self, rows: slice) -> tuple[Tensor, ...]:
        """Score the tokens of some rows: logp, H, top and s, each (m,)."""
        ids = self.ids[rows]
        if not self.is_triton:
            z = self.logits(rows, self.tiles[0])
            return score_rows_(z, ids, self.temperature, self.scratch[: len(z)])
        parts = torch.empty(4, len(ids), dtype=torch.float32, device=ids.device)  # of tiles so far
        *earlier, last = self.tiles
        for tile in earlier:
            z = self.logits(rows, tile)
            fold_(z, ids, parts, self.temperature, tile.start, last=False)
        return fold_(self.logits(rows, last), ids, parts, self.temperature, last.start)

    def differentiate(self, rows: slice, tile: slice, saved: list, upstream: list) -> Tensor:
        """Compute dz (m, width) of a piece, in the dtype of hidden."""
        z = self.logits(rows, tile)
        ids = self.ids[rows]
        dtype = self.hidden.dtype
        if self.is_triton:
            dz = z if z.dtype == dtype else torch.empty_like(z, dtype=dtype)
            return differentiate_part_(z, ids, saved, upstream, self.temperature, dz, tile.start)
        d = differences_(z, saved[1], self.temperature)
        scratch = self.scratch[: len(d)]
        return differentiate_rows_(d, ids, saved, upstream, self.temperature, scratch).to(dtype)


def slices(count: int, size: int) -> list[slice]:
    """Cut 0..count into slices of `size`; an empty one if count is 0."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def keep_(z: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Overwrite logits z (m, width) but for these; what is outside of z is passed over."""
    m, width = z.shape
    inside = (rows >= 0) & (rows < m) & (columns >= 0) & (columns < width)
    cells = torch.where(inside, rows * width + columns, m * width)  # one beyond the last
    dropped = torch.ones(m * width + 1, dtype=torch.bool, device=z.device)
    dropped.index_fill_(0, cells, False)
    z.masked_fill_(dropped[:-1].view(m, width), float("-inf"))


def join_masks(ids: Tensor, masks: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Number the tokens ids (M,) of completions with masks (counts, kept): (2, K), see below."""
    if not masks:
        return ids.new_empty(2, 0)
    counts = torch.cat([counts for counts, _ in masks])
    kept_ids = torch.cat([kept for _, kept in masks])
    tokens = torch.arange(len(ids))
    tokens_of_kept = tokens.repeat_interleave(counts)
    # each token is kept itself, also a forced one
    return torch.stack([torch.cat([tokens, tokens_of_kept]), torch.cat([ids, kept_ids])])


def rows_of_piece(rows: int, vocab: int, device_type: str) -> int:
    """Rows of one piece of the torch path."""
    most_rows = GPU_ROWS
    if device_type == "cpu":
        most_rows = min(max(CHUNK_BYTES // (4 * vocab), 32), 256)
    return min(most_rows, max(rows, 1))


def accumulate_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's float32 (float64)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # PyTorch has no such product here: that of one piece is rounded, once
        total += a @ b


def differentiate(
    inputs: list[Tensor], saved: list, upstream: list, temperature: float, grads: list
) -> None:
    """Add to the gradients of hidden (M, D), in the dtype of sums, and weight (V, D); or None."""
    hidden, weight, ids, mask = inputs
    grad_hidden, grad_weight = grads
    pieces = Pieces(hidden, weight, ids, mask, temperature)
    for tile in pieces.tiles:
        if grad_weight is not None:
            total = grad_weight[tile].to(pieces.memory.dtype)  # itself in float32
        for rows in pieces.rows:
            kept = take_rows(saved, rows)
            dz = pieces.differentiate(rows, tile, kept, take_rows(upstream, rows))
            if grad_hidden is not None:
                accumulate_(grad_hidden[rows], dz, weight[tile])
            if grad_weight is not None:
                accumulate_(total, dz.T, hidden[rows])
        if grad_weight is not None:
            grad_weight[tile].copy_(total)


# Operators, not an autograd.Function: the plan of diagnostics/memory.py counts their results alone, as the
# fakes give them, and adds piece_bytes.
@torch.library.custom_op("minivlmrl::linear_log_softmax", mutates_args=())
def _linear_log_softmax(
    hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pieces = Pieces(hidden, weight, ids, mask, temperature)
    scored = [pieces.score(rows) for rows in pieces.rows]
    logps, entropies, tops, sums = (torch.cat(column) for column in zip(*scored, strict=True))
    return logps, entropies, tops, sums


@_linear_log_softmax.register_fake
def _(hidden, weight, ids, mask, temperature):
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return tuple(hidden.new_empty(ids.shape, dtype=wide) for _ in range(4))


@torch.library.custom_op("minivlmrl::linear_log_softmax_backward", mutates_args=())
def _linear_log_softmax_backward(
    inputs: list[Tensor],
    saved: list[Tensor],
    g: Tensor,
    e: Tensor | None,
    temperature: float,
    needed: list[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and weight, empty where they are not needed."""
    hidden, weight, ids, mask = inputs
    rows = slice(None)
    # on a GPU the host would wait for the number of rows with a gradient, and its kernels skip the
    # others; a mask counts all rows
    if not hidden.is_cuda and not mask.numel():
        index = has_gradient(g, e).nonzero()[:, 0]
        if len(index) < len(ids):
            rows = index
    h = hidden[rows]
    kept = take_rows(saved, rows)
    upstream = take_rows([g, e], rows)
    grad_h = torch.zeros_like(h, dtype=g.dtype) if needed[0] else None
    grad_weight = torch.zeros_like(weight) if needed[1] else None
    differentiate([h, weight, ids[rows], mask], kept, upstream, temperature, [grad_h, grad_weight])
    grad_hidden = hidden.new_empty(0)
    if grad_h is not None:
        grad_hidden = torch.zeros_like(hidden)
        grad_hidden[rows] = grad_h.to(hidden.dtype)
    return grad_hidden, weight.new_empty(0) if grad_weight is None else grad_weight


@_linear_log_softmax_backward.register_fake
def _(inputs, saved, g, e, temperature, needed):
    return tuple(
        torch.empty_like(x) if need else x.new_empty(0)
        for x, need in zip(inputs[:2], needed, strict=True)
    )


def _setup_context(ctx, inputs, output):
    *tensors, ctx.temperature = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # None for an output that no loss uses


def _differentiate_scores(ctx, g, e, *_):
    inputs = list(ctx.saved_tensors[:4])
    saved = list(ctx.saved_tensors[4:])
    g = torch.zeros_like(saved[0]) if g is None else g
    needed = list(ctx.needs_input_grad[:2])
    grads = _linear_log_softmax_backward(inputs, saved, g, e, ctx.temperature, needed)
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), *[None] * 3


_linear_log_softmax.register_autograd(_differentiate_scores, setup_context=_setup_context)


def linear_log_softmax(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float = 1.0,
    sampling_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Score chosen tokens under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: (M, D), the states that predict the M tokens.
        weight: (V, D), the head, of the same dtype.
        ids: (M,) int64, the chosen tokens.
        temperature: divides the logits, > 0.
        sampling_mask: (2, K) int64, a token and an id that it was drawn from, its own among them:
            the softmax of each token is over its ids alone. Without, over the vocabulary.
    Returns:
        logps (M,) and entropies (M,), nats, float32 (float64 for float64 inputs); both are
        differentiable.
    Raises:
        ValueError: shapes or dtypes do not fit, or the temperature is not positive.
    Source: TRL's selective_log_softmax and entropy_from_logits, of logits / temperature; the mask
    is DeepSeek-V3.2's Keep Sampling Mask (arXiv 2512.02556) and vLLM's SamplingMask.
    """
    fits = ids.dim() == 1 and hidden.shape == (len(ids), weight.shape[1])
    if not fits or hidden.dtype != weight.dtype:
        given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (hidden, weight, ids))
        raise ValueError(f"hidden (M, D), weight (V, D) of its dtype, ids (M,) are needed: {given}")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: it divides the logits and must be above 0")
    mask = ids.new_empty(2, 0) if sampling_mask is None else sampling_mask
    logps, entropies, *_ = _linear_log_softmax(hidden, weight, ids.contiguous(), mask, temperature)
    return logps, entropies


def piece_bytes(rows: int, vocab: int, dtype: torch.dtype) -> int:
    """Memory for logits that linear_log_softmax of this many rows takes on a GPU, in each pass."""
    if dtype in DTYPES:  # logits, and dz unless it is float32
        return min(TILE, rows) * min(TILE // 2, vocab) * (4 + dtype.itemsize % 4)
    return 2 * rows_of_piece(rows, vocab, "cuda") * vocab * dtype.itemsize


@torch.no_grad()
def linear_log_sum_sq_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute log sum_j p_j^2 of p = softmax(hidden @ weight.T): (M,) nats, at most 0, no gradient.

    Source: the weight of WPO eq. 2 (arXiv 2406.11827); TRL's log_sum_sq_probs.
    """
    rows = rows_of_piece(len(hidden), len(weight), hidden.device.type)
    log_p = (float32_matmul(h, weight.T).log_softmax(-1) for h in hidden.split(rows))
    return torch.cat([piece.mul_(2).logsumexp(-1) for piece in log_p])
