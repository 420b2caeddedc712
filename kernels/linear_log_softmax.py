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
    setup_context,
    take_rows,
)

# of float32 logits in one piece of the torch path; at least 32 and at most 256 rows
CHUNK_BYTES = 16 * 2**20
GPU_ROWS = 512  # rows of one piece of the torch path on a GPU
TILE = 4096  # rows, and twice the ids, of one piece of the Triton path: 34 MB of float32


def _score_by_rows(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> list[Tensor]:
    """logp, H, top and s, each (M,)."""
    (logits, scratch), head, scored = *_buffers(hidden, weight), []
    for h, y in zip(hidden.split(len(logits)), ids.split(len(logits)), strict=True):
        z = float32_matmul(h, head, out=logits[: len(h)])
        scored.append(score_rows_(z, y, temperature, scratch[: len(h)]))
    return [torch.cat(parts) for parts in zip(*scored, strict=True)]


def _differentiate_by_rows(
    inputs: list[Tensor], saved: list, upstream: list, temperature: float, grads: list
) -> None:
    """Add to the gradients of hidden (M, D) and weight (V, D), in the dtype of sums; or None."""
    (hidden, weight, ids), (grad_hidden, grad_weight) = inputs, grads
    (logits, scratch), head = _buffers(hidden, weight)
    for start in range(0, len(hidden), len(logits)):
        rows = slice(start, start + len(logits))
        h, kept, grads_of_rows = hidden[rows], take_rows(saved, rows), take_rows(upstream, rows)
        d = differences_(float32_matmul(h, head, out=logits[: len(h)]), kept[1], temperature)
        dz = differentiate_rows_(
            d, ids[rows], kept, grads_of_rows, temperature, scratch[: len(d)]
        ).to(h.dtype)
        if grad_hidden is not None:
            accumulate_(grad_hidden[rows], dz, weight)
        if grad_weight is not None:
            accumulate_(grad_weight, dz.T, h)


def _buffers(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for all pieces, as page faults cost: two of logits (2, rows, V), the head (D, V)."""
    rows, dtype = _rows(len(hidden), len(weight), hidden.device.type), _sum_dtype(hidden)
    logits = torch.empty(2, rows, len(weight), dtype=dtype, device=hidden.device)
    # a CPU has no float32 products of bfloat16: it converts the head once
    return logits, (weight if weight.is_cuda else weight.to(dtype)).T


def _rows(rows: int, vocab: int, device_type: str) -> int:
    """Rows of one piece of the torch path."""
    most = min(max(CHUNK_BYTES // (4 * vocab), 32), 256) if device_type == "cpu" else GPU_ROWS
    return min(most, max(rows, 1))


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def accumulate_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's float32 (float64)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # PyTorch has no such product here: that of one piece is rounded, once
        total += a @ b


def _score_by_tiles(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float
) -> list[Tensor]:
    """logp, H, top and s, each (M,), by the kernel of selective_log_softmax.py."""
    (tiles, memory), scored = _tiles(hidden, weight), []
    for h, y in zip(hidden.split(TILE), ids.split(TILE), strict=True):
        parts = torch.empty(4, len(h), dtype=torch.float32, device=hidden.device)
        for first, tile in tiles:
            last = first + len(tile) == len(weight)
            out = fold_(_tile_product(h, tile, memory), y, parts, temperature, first, last)
        scored.append(out)
    return [torch.cat(parts) for parts in zip(*scored, strict=True)]


def _differentiate_by_tiles(
    inputs: list[Tensor], saved: list, upstream: list, temperature: float, grads: list
) -> None:
    """As _differentiate_by_rows, but write the gradient of weight, in weight's dtype."""
    (hidden, weight, ids), (grad_hidden, grad_weight) = inputs, grads
    tiles, memory = _tiles(hidden, weight)
    for first, tile in tiles:
        total = torch.zeros_like(tile, dtype=torch.float32)
        for start in range(0, len(hidden), TILE):
            rows = slice(start, start + TILE)
            h, kept, grads_of_rows = hidden[rows], take_rows(saved, rows), take_rows(upstream, rows)
            z = _tile_product(h, tile, memory)
            out = z if z.dtype == h.dtype else torch.empty_like(z, dtype=h.dtype)
            dz = differentiate_part_(z, ids[rows], kept, grads_of_rows, temperature, out, first)
            if grad_hidden is not None:
                accumulate_(grad_hidden[rows], dz, tile)
            if grad_weight is not None:
                accumulate_(total, dz.T, h)
        if grad_weight is not None:
            grad_weight[first : first + len(tile)] = total


def _tiles(hidden: Tensor, weight: Tensor) -> tuple[list[tuple[int, Tensor]], Tensor]:
    """(first id, rows of the head) of each tile, and memory for the logits of one."""
    tiles = list(zip(range(0, len(weight), TILE // 2), weight.split(TILE // 2), strict=True))
    size = min(TILE, len(hidden)) * min(TILE // 2, len(weight))
    return tiles, hidden.new_empty(size, dtype=torch.float32)


def _tile_product(h: Tensor, tile: Tensor, memory: Tensor) -> Tensor:
    """h @ tile.T at the begin of memory."""
    return float32_matmul(h, tile.T, out=memory[: len(h) * len(tile)].view(len(h), len(tile)))


@torch.library.custom_op("minivlmrl::linear_log_softmax", mutates_args=())
def _op(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, H, top and s, each (M,)."""
    score = _score_by_tiles if backend_for(hidden) == "triton" else _score_by_rows
    return tuple(score(hidden, weight, ids, temperature))


_op.register_fake(
    lambda h, w, ids, t: tuple(h.new_empty(ids.shape, dtype=_sum_dtype(h)) for _ in range(4))
)


@torch.library.custom_op("minivlmrl::linear_log_softmax_backward", mutates_args=())
def _backward_op(
    inputs: list[Tensor],
    saved: list[Tensor],
    g: Tensor,
    e: Tensor | None,
    temperature: float,
    needed: list[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and weight, empty where they are not needed."""
    hidden, weight, ids = inputs
    by_tiles = backend_for(hidden) == "triton"
    # on a GPU the host would wait for the number of these rows; its kernels skip the others
    index = ids if hidden.is_cuda else has_gradient(g, e).nonzero()[:, 0]
    # no copies where all rows have a gradient
    rows = slice(None) if len(index) == len(ids) else index
    h, kept, upstream = hidden[rows], take_rows(saved, rows), take_rows([g, e], rows)
    grad_h = torch.zeros_like(h, dtype=_sum_dtype(h)) if needed[0] else None
    grad_weight, dtype = None, weight.dtype if by_tiles else _sum_dtype(h)
    if needed[1]:
        grad_weight = torch.zeros_like(weight, dtype=dtype)
    differentiate = _differentiate_by_tiles if by_tiles else _differentiate_by_rows
    differentiate([h, weight, ids[rows]], kept, upstream, temperature, [grad_h, grad_weight])
    grad_hidden = hidden.new_empty(0)
    if needed[0]:
        grad_hidden = torch.zeros_like(hidden)
        grad_hidden[rows] = grad_h.to(hidden.dtype)
    return grad_hidden, weight.new_empty(0) if grad_weight is None else grad_weight.to(weight.dtype)


@_backward_op.register_fake
def _(inputs, saved, g, e, temperature, needed):
    return tuple(
        torch.empty_like(x) if need else x.new_empty(0)
        for x, need in zip(inputs[:2], needed, strict=True)
    )


def _differentiate(ctx, g, e, *_):
    inputs, saved = list(ctx.saved_tensors[:3]), list(ctx.saved_tensors[3:])
    g = torch.zeros_like(saved[0]) if g is None else g
    needed = list(ctx.needs_input_grad[:2])
    grads = _backward_op(inputs, saved, g, e, ctx.temperature, needed)
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), None, None


_op.register_autograd(_differentiate, setup_context=setup_context)


def linear_log_softmax(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Score chosen tokens under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: (M, D), the states that predict the M tokens.
        weight: (V, D), the head, of the same dtype.
        ids: (M,) int64, the chosen tokens.
        temperature: divides the logits, > 0.
    Returns:
        logps (M,) and entropies (M,), nats, float32 (float64 for float64 inputs); both are
        differentiable.
    Raises:
        ValueError: shapes or dtypes do not fit, or the temperature is not positive.
    Source: TRL's selective_log_softmax and entropy_from_logits, of logits / temperature.
    """
    fits = ids.dim() == 1 and hidden.shape == (len(ids), weight.shape[1])
    if not fits or hidden.dtype != weight.dtype:
        given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (hidden, weight, ids))
        raise ValueError(f"hidden (M, D), weight (V, D) of its dtype, ids (M,) are needed: {given}")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: it divides the logits and must be above 0")
    logps, entropies, *_ = _op(hidden, weight, ids.contiguous(), temperature)
    return logps, entropies


def piece_bytes(rows: int, vocab: int, dtype: torch.dtype, device_type: str) -> int:
    """Memory for logits that linear_log_softmax of this many rows takes, forward or backward."""
    if device_type == "cuda" and dtype in DTYPES:
        # logits, and dz unless it is float32
        return min(TILE, rows) * min(TILE // 2, vocab) * (4 + dtype.itemsize % 4)
    size = torch.promote_types(dtype, torch.float32).itemsize
    return 2 * _rows(rows, vocab, device_type) * vocab * size


@torch.no_grad()
def linear_log_sum_sq_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    """Compute log sum_j p_j^2 of p = softmax(hidden @ weight.T): (M,) nats, at most 0, no gradient.

    Source: the weight of WPO eq. 2 (arXiv 2406.11827); TRL's log_sum_sq_probs.
    """
    (logits, _), head = _buffers(hidden, weight)
    log_p = (
        float32_matmul(h, head, out=logits[: len(h)]).log_softmax(-1)
        for h in hidden.split(len(logits))
    )
    return torch.cat([piece.mul_(2).logsumexp(-1) for piece in log_p])
