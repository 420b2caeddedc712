"""Log-probabilities for given tokens, and entropies, without storing all logits.

Derivation. A hidden state h (D,) and the LM head W (V, D) give the logits z = W h. selective_log_softmax.py derives
log-probability, entropy and the logit gradient dz. From dz follow the gradients dh for h and dW for W:

    dh = W^T dz        dW = sum over hidden states of dz h^T

Logits (M, V) are computed in blocks. Forward keeps three numbers per token: largest logit, sum of exponentials,
entropy. Backward recomputes a block, overwrites it with its gradient, and skips tokens without gradient (zero
advantage, clipped ratio).

Blocks are small, to fit into the cache. A block on a CPU has the logits of 32 to 256 tokens for the whole vocabulary. A
Triton block has those of up to 4,096 tokens, for part of the vocabulary: at least 2,048 ids. With Triton, only one
block of the head gradient is in float32 at a time.

Logits are float32 even for bfloat16 hidden states, because bfloat16 rounds 20.05 to 20. Logit gradients are rounded to
bfloat16, but gradients for hidden states and head are summed in float32.
"""

from typing import cast

import torch
from torch import Tensor

from minivlmrl.kernels.backend import DTYPES, at_least_float32, backend_for
from minivlmrl.kernels.float32_matmul import float32_matmul, has_float32_products
from minivlmrl.kernels.selective_log_softmax import (
    differences_,
    differentiate_part_,
    differentiate_rows_,
    has_gradient,
    score_part_,
    score_rows_,
    select_rows,
)

# bytes of float32 logits per block on a CPU, with 32 to 256 rows
BLOCK_BYTES = 16 * 2**20
GPU_ROWS = 512  # maximum rows per block on a GPU without Triton
# maximum tokens per Triton block: 4,096 x 2,048 float32 logits take 34 MB
MAX_ROWS = 4096


class LogitBlocks:
    """Compute logits from hidden states (M, D) and LM head (V, D), in blocks.

    Args:
        mask: sampling mask as in linear_log_softmax; an empty mask (2, 0) allows all ids.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, temperature: float):
        sum_dtype = at_least_float32(hidden.dtype)
        self.is_triton = backend_for(hidden, "linear_log_softmax") == "triton"
        size = block_rows(len(hidden), len(weight), hidden.device.type)
        width = len(weight)
        if self.is_triton:
            size = max(min(MAX_ROWS, len(hidden)), 1)
            width = block_width(size, len(weight))
        self.rows = slices(len(hidden), size)
        self.columns = slices(len(weight), width)  # vocabulary slices; without Triton, only one slice
        self.hidden = hidden
        # convert the weight on a CPU, where PyTorch has no bfloat16 product with a float32 result
        self.weight = weight if weight.is_cuda else weight.to(sum_dtype)
        self.ids = ids
        self.mask = mask
        self.temperature = temperature
        # memory for one block's logits; allocated only once, to avoid page faults
        self.memory = hidden.new_empty(size * width, dtype=sum_dtype)
        self.scratch = self.memory.new_empty(0 if self.is_triton else size, width)

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """Compute a block of logits (m, width) in memory that the next block overwrites."""
        h = self.hidden[rows]
        w = self.weight[columns]
        z = self.memory[: len(h) * len(w)].view(len(h), len(w))
        float32_matmul(h, w.T, out=z)
        if self.mask.numel():
            m, width = z.shape
            row, column = self.mask[0] - rows.start, self.mask[1] - columns.start
            inside = (row >= 0) & (row < m) & (column >= 0) & (column < width)
            # for ids outside this block, write to one extra element, which is not used
            cells = torch.where(inside, row * width + column, m * width)
            dropped = torch.ones(m * width + 1, dtype=torch.bool, device=z.device)
            dropped.index_fill_(0, cells, False)
            z.masked_fill_(dropped[:-1].view(m, width), float("-inf"))
        return z

    def score(self, rows: slice) -> tuple[Tensor, ...]:
        """Compute log-probabilities, entropies, largest logits and sums of exponentials, all (m,)."""
        ids = self.ids[rows]
        if not self.is_triton:
            z = self.logits(rows, self.columns[0])
            return score_rows_(z, ids, self.temperature, self.scratch[: len(z)])
        parts = torch.empty(4, len(ids), dtype=torch.float32, device=ids.device)
        *earlier, last = self.columns
        for columns in earlier:
            score_part_(self.logits(rows, columns), ids, parts, self.temperature, columns.start, last=False)
        return tuple(score_part_(self.logits(rows, last), ids, parts, self.temperature, last.start))

    def differentiate(self, rows: slice, columns: slice, saved: list, upstream: list) -> Tensor:
        """Compute the gradient (m, width) for a block of logits, in the dtype of the hidden states."""
        z = self.logits(rows, columns)
        ids = self.ids[rows]
        dtype = self.hidden.dtype
        if self.is_triton:
            dz = z if z.dtype == dtype else torch.empty_like(z, dtype=dtype)
            return differentiate_part_(z, ids, saved, upstream, self.temperature, dz, columns.start)
        d = differences_(z, saved[1], self.temperature)
        return differentiate_rows_(d, ids, saved, upstream, self.temperature, self.scratch[: len(d)]).to(dtype)


def block_width(rows: int, vocab: int) -> int:
    """Return the number of vocabulary ids per Triton block: 2,048 for 4,096 rows, 8,192 for at most 1,024 rows."""
    # Smaller matrix products do not keep a GPU busy. With more than 8,192 vocabulary ids per block, the block's float32
    # gradient for the LM head takes too much memory.
    step = MAX_ROWS // 4  # 1,024, a multiple of GPU tile sizes
    ids = MAX_ROWS**2 // 2 // max(rows, step)
    return min(ids // step * step, vocab)


def slices(count: int, size: int) -> list[slice]:
    """Divide range(count) into slices of at most `size` elements; range(0) gives one empty slice."""
    return [slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)]


def join_masks(ids: Tensor, masks: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Join the sampling masks of completions.

    Args:
        ids: (M,) tokens in all completions.
        masks: per completion, (number of allowed ids per token, concatenated allowed ids).
    Returns:
        (2, K), pairs (token index 0..M-1, allowed id).
    """
    if not masks:
        return ids.new_empty(2, 0)
    counts, allowed = zip(*masks, strict=True)
    tokens = torch.arange(len(ids))
    # also allow every token's own id, because masks have no ids for tokens from tools
    return torch.stack([torch.cat([tokens, tokens.repeat_interleave(torch.cat(counts))]), torch.cat([ids, *allowed])])


def block_rows(rows: int, vocab: int, device_type: str) -> int:
    """Return the maximum rows per block without Triton."""
    max_rows = GPU_ROWS
    if device_type == "cpu":
        max_rows = min(max(BLOCK_BYTES // (4 * vocab), 32), 256)
    return min(max_rows, max(rows, 1))


def accumulate_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, possibly in 16 bits, to `total` in float32 or float64."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif has_float32_products(a.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


# memory estimates cannot see tensors inside a custom operator, so monitor/memory/estimate.py adds block_bytes
@torch.library.custom_op("minivlmrl::linear_log_softmax", mutates_args=())
def _linear_log_softmax(
    hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = LogitBlocks(hidden, weight, ids, mask, temperature)
    scored = map(blocks.score, blocks.rows)
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], tuple(map(torch.cat, zip(*scored, strict=True))))


@_linear_log_softmax.register_fake
def _(hidden, weight, ids, mask, temperature):
    sum_dtype = at_least_float32(hidden.dtype)
    return tuple(hidden.new_empty(ids.shape, dtype=sum_dtype) for _ in range(4))


@torch.library.custom_op("minivlmrl::linear_log_softmax_backward", mutates_args=())
def _linear_log_softmax_backward(
    inputs: list[Tensor], saved: list[Tensor], g: Tensor, e: Tensor | None, temperature: float, trains_head: bool
) -> tuple[Tensor, Tensor]:
    """Return gradients for hidden states and LM head. The head gradient is empty if the head is frozen."""
    hidden, weight, ids, mask = inputs
    rows = slice(None)
    # Skip tokens without gradient. This is not possible on a GPU, where nonzero() would make the CPU wait, or with a
    # sampling mask, whose token indices would become wrong.
    if not hidden.is_cuda and not mask.numel():
        rows = has_gradient(g, e).nonzero()[:, 0]
    h = hidden[rows]
    saved_rows = select_rows(saved, rows)
    upstream = select_rows([g, e], rows)
    grad_h = torch.zeros_like(h, dtype=g.dtype)
    grad_weight = torch.zeros_like(weight) if trains_head else weight.new_empty(0)
    blocks = LogitBlocks(h, weight, ids[rows], mask, temperature)
    for columns in blocks.columns:
        total = grad_weight[columns].to(g.dtype)  # if the dtypes are equal, a view of grad_weight
        for part in blocks.rows:
            dz = blocks.differentiate(part, columns, select_rows(saved_rows, part), select_rows(upstream, part))
            accumulate_(grad_h[part], dz, weight[columns])
            if trains_head:
                accumulate_(total, dz.T, h[part])
        grad_weight[columns] = total
    grad_hidden = torch.zeros_like(hidden)
    grad_hidden[rows] = grad_h.to(hidden.dtype)
    return grad_hidden, grad_weight


@_linear_log_softmax_backward.register_fake
def _(inputs, saved, g, e, temperature, trains_head):
    hidden, weight, *_ = inputs
    return torch.empty_like(hidden), torch.empty_like(weight) if trains_head else weight.new_empty(0)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.temperature = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # for an unused output, the gradient is None instead of zeros


def _differentiate_scores(ctx, g, e, *_):
    inputs = list(ctx.saved_tensors[:4])
    saved = list(ctx.saved_tensors[4:])
    g = torch.zeros_like(saved[0]) if g is None else g
    trains_head = ctx.needs_input_grad[1]
    grad_hidden, grad_weight = _linear_log_softmax_backward(inputs, saved, g, e, ctx.temperature, trains_head)
    return grad_hidden, grad_weight if trains_head else None, None, None, None


_linear_log_softmax.register_autograd(_differentiate_scores, setup_context=_setup_context)


def linear_log_softmax(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float = 1.0, sampling_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities for given tokens, and entropies, under softmax(hidden @ weight.T / temperature).

    Args:
        hidden: (M, D) hidden states that predict the tokens.
        weight: (V, D) LM head, same dtype as `hidden`.
        ids: (M,) int64 tokens to score.
        temperature: logit divisor, above 0.
        sampling_mask: (2, K) int64, pairs (token index i = 0..M-1, id that the sampler could choose, for example
            after top-k). The softmax for token i is over the ids in pairs (i, id), which must include ids[i]. None =
            whole vocabulary.
    Returns:
        Log-probabilities and entropies, both (M,), in nats, float32 (float64 for float64 inputs), differentiable.
    Source: see selective_log_softmax; the mask is DeepSeek-V3.2's Keep Sampling Mask (arXiv 2512.02556) and vLLM's
        SamplingMask.
    """
    if hidden.shape[:-1] != ids.shape:
        raise ValueError(f"hidden has the shape {tuple(hidden.shape)}, which does not fit ids {tuple(ids.shape)}")
    if not temperature > 0:
        raise ValueError(f"the temperature is {temperature}, but it must be greater than 0")
    mask = ids.new_empty(2, 0) if sampling_mask is None else sampling_mask
    logps, entropies, *_ = _linear_log_softmax(hidden, weight, ids.contiguous(), mask, temperature)
    return logps, entropies


def block_bytes(rows: int, vocab: int, dtype: torch.dtype) -> int:
    """Return the bytes for a block of logits and its gradient on a GPU."""
    # With Triton, a logit takes 4 bytes, which a float32 gradient overwrites; a 16-bit gradient takes 2 more bytes.
    if dtype in DTYPES:
        rows = min(MAX_ROWS, rows)
        return rows * block_width(rows, vocab) * (4 + dtype.itemsize % 4)
    return 2 * block_rows(rows, vocab, "cuda") * vocab * dtype.itemsize
