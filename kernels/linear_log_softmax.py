"""Log-probability of chosen tokens and entropy, straight from hidden states: the (M, V) logits never exist at once.

Derivation. For one row h (D,), head W (V, D), chosen token y and temperature T:

    z = W h                     logp, H and their dz: as in selective_log_softmax.py, from z, y and T
    dh = W^T dz                 dW = sum over rows of dz h^T

Forward and backward go over pieces of the logits. Of each row top, s and H are kept, three numbers; the backward makes
the logits of a piece again, turns them into dz where they lie and multiplies it away: four products of M V D
multiplications in all. Rows whose upstream gradients are both zero (advantage 0, clipped ratio) have dz = 0, and the
backward leaves them out: nothing is approximated.

    torch     a piece is some rows with all of their logits, so few that they stay near the CPU's caches
    Triton    a piece is a tile of 4096 rows by 4096 ids: it stays in the GPU's L2 cache between the product that makes
              it and the kernel that folds it into top, s and t. dW is finished tile by tile, without (V, D) in float32

linear_policy_loss saves the fourth product where the loss is a sum of terms of single tokens: a row's upstream gradient
is then known as soon as the row is scored, so its dz follows at once, from the same logits.

Products of bfloat16 are summed in float32, and so are the pieces' shares of dh and dW.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minivlmrl.kernels.backend import DTYPES, backend_for
from minivlmrl.kernels.selective_log_softmax import (
    differences_,
    differentiate_part_,
    differentiate_rows_,
    fold_,
    score_rows_,
)

CHUNK_BYTES = 16 * 2**20  # of float32 logits of one piece on the torch path, but 32 to 256 rows
GPU_ROWS = 512  # of one piece on the torch path of a GPU
TILE = 4096  # rows, and ids, of one piece on the Triton path: 34 MB of bfloat16
LOSS_ROWS = 2048  # of one piece of linear_policy_loss on the Triton path, all ids: 0.6 GB at Qwen2.5-VL's vocabulary
NONE_IGNORED = -100  # ids of linear_log_softmax are all meant


# ------------------------------------------------------------------------------------------------ reference, in torch


def _score_by_rows(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> list[Tensor]:
    """logp, H, top and s, each (M,)."""
    logits, spare = _buffers(hidden, weight)
    scored = []
    for rows in _chunks(len(hidden), len(logits)):
        z = _product(hidden[rows], weight, logits)
        scored.append(score_rows_(z, ids[rows], temperature, spare[: len(z)]))
    return [torch.cat(parts) for parts in zip(*scored, strict=True)]


def _differentiate_by_rows(
    hidden: Tensor, weight: Tensor, ids: Tensor, saved: list[Tensor], grads: list[Tensor | None], temperature: float,
    grad_hidden: Tensor | None, grad_weight: Tensor | None,
) -> None:  # fmt: skip
    """Add the gradients to grad_hidden (M, D) and grad_weight (V, D), float32 or float64, where they are wanted."""
    logits, spare = _buffers(hidden, weight)
    for rows in _chunks(len(hidden), len(logits)):
        own, upstream = [x[rows] for x in saved], [g if g is None else g[rows] for g in grads]
        d = differences_(_product(hidden[rows], weight, logits), own[1], temperature)
        dz = differentiate_rows_(d, ids[rows], own, *upstream, temperature, spare[: len(d)]).to(hidden.dtype)
        if grad_hidden is not None:
            accumulate_(grad_hidden[rows], dz, weight)
        if grad_weight is not None:
            accumulate_(grad_weight, dz.T, hidden[rows])


def _buffers(hidden: Tensor, weight: Tensor) -> Tensor:
    """Memory for two pieces of logits, (2, rows, V), used again and again: fresh memory costs a page fault a page."""
    rows = _rows(len(hidden), len(weight), hidden.device.type)
    return torch.empty(2, rows, len(weight), dtype=_sum_dtype(hidden), device=hidden.device)


def _rows(rows: int, vocab: int, device_type: str) -> int:
    """How many rows one piece of the torch path has."""
    most = min(max(CHUNK_BYTES // (4 * vocab), 32), 256) if device_type == "cpu" else GPU_ROWS
    return min(most, max(rows, 1))


def _product(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """hidden @ weight.T in the first rows of out."""
    out = out[: len(hidden)]
    return torch.mm(hidden, weight.T, out=out) if out.dtype == hidden.dtype else out.copy_(hidden @ weight.T)


def _chunks(rows: int, size: int) -> list[slice]:
    """Slices of rows, at least one (empty for no rows)."""
    return [slice(i, i + size) for i in range(0, max(rows, 1), size)]


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def accumulate_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's float32 (float64)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # without such a product in PyTorch: that of one piece is rounded, once
        total += a @ b


# ------------------------------------------------------------------------------------------------ kernel, by tiles


def _score_by_tiles(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> list[Tensor]:
    """logp, H, top and s, each (M,), through the kernel of selective_log_softmax.py."""
    memory = hidden.new_empty(min(TILE, len(hidden)) * min(TILE, len(weight)))
    scored = []
    for rows in _chunks(len(hidden), TILE):
        h = hidden[rows]
        parts = torch.empty(4, len(h), dtype=torch.float32, device=hidden.device)
        for first, tile in _tiles(weight):
            z = torch.mm(h, tile.T, out=_shaped(memory, len(h), len(tile)))
            last = first + len(tile) == len(weight)
            out = fold_(z, ids[rows], parts, temperature, NONE_IGNORED, first, last)
        scored.append(out)
    return [torch.cat(parts) for parts in zip(*scored, strict=True)]


def _differentiate_by_tiles(
    hidden: Tensor, weight: Tensor, ids: Tensor, saved: list[Tensor], grads: list[Tensor | None], temperature: float,
    grad_hidden: Tensor | None, grad_weight: Tensor | None,
) -> None:  # fmt: skip
    """Add to grad_hidden (M, D) in float32, write grad_weight (V, D) in the head's dtype, where they are wanted."""
    memory = hidden.new_empty(min(TILE, len(hidden)) * min(TILE, len(weight)))
    for first, tile in _tiles(weight):
        total = torch.zeros_like(tile, dtype=torch.float32)
        for rows in _chunks(len(hidden), TILE):
            h, own = hidden[rows], [x[rows] for x in saved]
            z = torch.mm(h, tile.T, out=_shaped(memory, len(h), len(tile)))
            upstream = [g if g is None else g[rows] for g in grads]
            dz = differentiate_part_(z, ids[rows], own, *upstream, temperature, NONE_IGNORED, z, first)
            if grad_hidden is not None:
                accumulate_(grad_hidden[rows], dz, tile)
            if grad_weight is not None:
                accumulate_(total, dz.T, h)
        if grad_weight is not None:
            grad_weight[first : first + len(tile)] = total


def _tiles(weight: Tensor) -> list[tuple[int, Tensor]]:
    """(first id, rows of the head) of each tile."""
    return [(first, weight[first : first + TILE]) for first in range(0, len(weight), TILE)]


def _shaped(memory: Tensor, rows: int, columns: int) -> Tensor:
    return memory[: rows * columns].view(rows, columns)


# ------------------------------------------------------------------------------------------------ autograd


@torch.library.custom_op("minivlmrl::linear_log_softmax", mutates_args=())
def _op(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    score = _score_by_tiles if backend_for(hidden) == "triton" else _score_by_rows
    return tuple(score(hidden, weight, ids, temperature))


@_op.register_fake
def _(hidden, weight, ids, temperature):
    return tuple(hidden.new_empty(ids.shape, dtype=_sum_dtype(hidden)) for _ in range(4))


@torch.library.custom_op("minivlmrl::linear_log_softmax_backward", mutates_args=())
def _backward_op(
    hidden: Tensor, weight: Tensor, ids: Tensor, saved: list[Tensor], grad_logps: Tensor,
    grad_entropies: Tensor | None, temperature: float, wants_hidden: bool, wants_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of hidden and weight, empty where they are not wanted."""
    by_tiles = backend_for(hidden) == "triton"
    index = _live(grad_logps, grad_entropies).nonzero()[:, 0]
    rows = slice(None) if len(index) == len(ids) else index  # all: no copies
    h, y, *own = (x[rows] for x in (hidden, ids, *saved))
    grads = [g if g is None else g[rows].contiguous() for g in (grad_logps, grad_entropies)]
    grad_h = torch.zeros_like(h, dtype=_sum_dtype(h)) if wants_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=weight.dtype if by_tiles else _sum_dtype(h)) if wants_weight else None
    differentiate = _differentiate_by_tiles if by_tiles else _differentiate_by_rows
    differentiate(h, weight, y, own, grads, temperature, grad_h, grad_weight)
    grad_hidden = None
    if wants_hidden:
        grad_hidden = torch.zeros_like(hidden)
        grad_hidden[rows] = grad_h.to(hidden.dtype)
    return (
        hidden.new_empty(0) if grad_hidden is None else grad_hidden,
        weight.new_empty(0) if grad_weight is None else grad_weight.to(weight.dtype),
    )


@_backward_op.register_fake
def _(hidden, weight, ids, saved, grad_logps, grad_entropies, temperature, wants_hidden, wants_weight):
    return (
        torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0),
        torch.empty_like(weight) if wants_weight else weight.new_empty(0),
    )


def _setup_context(ctx, inputs, output):
    hidden, weight, ids, ctx.temperature = inputs
    ctx.save_for_backward(hidden, weight, ids, *output[1:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # None for an output that no loss uses


def _differentiate(ctx, grad_logps, grad_entropies, *_):
    hidden, weight, ids, *saved = ctx.saved_tensors
    if grad_logps is None:
        grad_logps = torch.zeros_like(saved[0])
    wanted = ctx.needs_input_grad[:2]
    grads = _backward_op(hidden, weight, ids, saved, grad_logps, grad_entropies, ctx.temperature, *wanted)
    return *(g if want else None for g, want in zip(grads, wanted, strict=True)), None, None


_op.register_autograd(_differentiate, setup_context=_setup_context)


class _LinearPolicyLoss(torch.autograd.Function):
    """The loss with its gradients made beside it; the backward only scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, ids, loss_of_rows, temperature):
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_sum_dtype(hidden)) if wants_weight else None
        logits, spare = _loss_buffers(hidden, weight)
        results = []
        for rows in _chunks(len(hidden), len(logits)):
            h, y = hidden[rows], ids[rows]
            z = _product(h, weight, logits)
            logps, *saved = _score_piece(z, y, temperature, spare)
            loss, grads = _loss_of_piece(loss_of_rows, logps, saved[0], rows)
            results.append((loss, logps, saved[0]))
            live = _live(*grads).nonzero()[:, 0]
            if len(live) < len(y):
                h, y, z, *saved = (x[live] for x in (h, y, z, *saved))
                grads = [g if g is None else g[live] for g in grads]
            dz = _differentiate_piece(z, y, saved, grads, temperature, spare).to(hidden.dtype)
            if wants_hidden:
                grad_hidden[rows][live] = dz @ weight
            if wants_weight:
                accumulate_(grad_weight, dz.T, h)
        losses, logps, entropies = zip(*results, strict=True)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(logps := torch.cat(logps), entropies := torch.cat(entropies))
        return sum(losses), logps, entropies

    @staticmethod
    def backward(ctx, upstream, *_):
        grads = (g if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors)
        return *grads, None, None, None


def _loss_buffers(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Memory for the logits of a piece, and for the torch path's second piece."""
    if backend_for(hidden) == "triton":
        return hidden.new_empty(min(LOSS_ROWS, max(len(hidden), 1)), len(weight)), None
    return _buffers(hidden, weight)


def _score_piece(z: Tensor, ids: Tensor, temperature: float, spare: Tensor | None) -> list[Tensor]:
    """logp, H, top and s, each (m,), of whole rows of logits; z becomes what _differentiate_piece reads."""
    if backend_for(z) == "triton":
        return fold_(z, ids, None, temperature, NONE_IGNORED)
    return score_rows_(z, ids, temperature, spare[: len(z)])


def _differentiate_piece(z, ids, saved, grads, temperature, spare):
    """dz (m, V), over z or in spare."""
    if backend_for(z) == "triton":
        return differentiate_part_(z, ids, saved, *grads, temperature, NONE_IGNORED, z)
    return differentiate_rows_(z, ids, saved, *grads, temperature, spare[: len(z)])


def _loss_of_piece(loss_of_rows, logps, entropies, rows):
    """Sum of the rows' losses, and its gradients by logps and entropies (None where the loss does not use them)."""
    inputs = [logps.detach().requires_grad_(), entropies.detach().requires_grad_()]
    with torch.enable_grad():
        loss = loss_of_rows(*inputs, rows).sum()
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    grad_logps, grad_entropies = (g if g is None else g.contiguous() for g in grads)
    return loss.detach(), [torch.zeros_like(logps) if grad_logps is None else grad_logps, grad_entropies]


def _live(grad_logps: Tensor, grad_entropies: Tensor | None) -> Tensor:
    """(M,) bool: rows of which a gradient is not zero (NaN is not)."""
    return grad_logps != 0 if grad_entropies is None else (grad_logps != 0) | (grad_entropies != 0)


# ------------------------------------------------------------------------------------------------ public


def linear_log_softmax(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Score chosen tokens under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: (M, D), the states that predict the M tokens.
        weight: (V, D), the head, of the same dtype.
        ids: (M,) int64, the chosen tokens.
        temperature: divides the logits, > 0.
    Returns:
        logps (M,) and entropies (M,), nats, float32 (float64 for float64 inputs); both are differentiable.
    Raises:
        ValueError: shapes or dtypes that do not fit, or a temperature that is not positive.
    Source: equals TRL's selective_log_softmax and entropy_from_logits applied to logits / temperature.
    """
    _check(hidden, weight, ids, temperature)
    logps, entropies, *_ = _op(hidden, weight, ids.contiguous(), temperature)
    return logps, entropies


def piece_bytes(rows: int, vocab: int, dtype: torch.dtype, device_type: str) -> int:
    """Memory for logits that linear_log_softmax of so many rows takes, forward or backward."""
    if device_type == "cuda" and dtype in DTYPES:
        return min(TILE, rows) * min(TILE, vocab) * dtype.itemsize
    return 2 * _rows(rows, vocab, device_type) * vocab * torch.promote_types(dtype, torch.float32).itemsize


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    loss_of_rows: Callable[[Tensor, Tensor, slice], Tensor],
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum a loss over tokens and make its gradients on the way: three products of M V D instead of four.

    Args:
        hidden, weight, ids, temperature: as for linear_log_softmax.
        loss_of_rows: (logps (m,), entropies (m,), rows) -> (m,) losses, divided by whatever they are averaged over;
            rows is the slice of ids that it is called for. The loss of a token may look at that token alone: the ratio
            of a sequence (GSPO), or a mean over the batch, has to be known beforehand.
    Returns:
        The sum of the losses, differentiable, and logps (M,) and entropies (M,), without gradient. torch.compile leaves
        its graph here: loss_of_rows is differentiated on the spot.
    """
    _check(hidden, weight, ids, temperature)
    return _LinearPolicyLoss.apply(hidden, weight, ids.contiguous(), loss_of_rows, temperature)


@torch.no_grad()
def linear_log_sum_sq_probs(hidden: Tensor, weight: Tensor) -> Tensor:
    """log sum_j p_j^2 of p = softmax(hidden @ weight.T): (M,) nats, at most 0, no gradient.

    Source: the weight of WPO eq. 2 (arXiv 2406.11827); TRL's log_sum_sq_probs.
    """
    logits, _ = _buffers(hidden, weight)
    log_sums = []
    for rows in _chunks(len(hidden), len(logits)):
        log_p = _product(hidden[rows], weight, logits).log_softmax(-1)
        log_sums.append(log_p.mul_(2).logsumexp(-1))
    return torch.cat(log_sums)


def _check(hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float) -> None:
    if hidden.shape != (len(ids), weight.shape[1]) or ids.dim() != 1 or hidden.dtype != weight.dtype:
        given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in (hidden, weight, ids))
        raise ValueError(f"hidden (M, D), weight (V, D) of its dtype and ids (M,) are needed, not {given}")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: it divides the logits and must be above 0")
