"""Log-probabilities for given tokens, and entropies, in one pass over the logits.

Derivation. For one row's logits z (V,), chosen token y and temperature T, with top = max_j z_j:

    d_j = (z_j - top) / T <= 0      s = sum_j exp d_j      t = sum_j d_j exp d_j
    p_j = exp(d_j) / s
    logp = log p_y = d_y - log s <= 0
    H = -sum_j p_j log p_j = -sum_j p_j (d_j - log s) = log s - t / s

Logits can also be processed in parts, whose sums are then combined. Two parts have the maxima top1 and top2, and the
sums s1, t1 and s2, t2. With top = max(top1, top2), c1 = (top1 - top) / T and c2 = (top2 - top) / T, the sums over both
parts are

    s = s1 exp c1 + s2 exp c2
    t = (t1 + c1 s1) exp c1 + (t2 + c2 s2) exp c2

Backward pass. The derivatives are

    d logp / dz_j = ([j = y] - p_j) / T          dH / dz_j = -p_j (log p_j + H) / T

With upstream gradients g (for logp) and e (for H), the logit gradient is

    dz_j = g [j = y] / T + exp(d_j) (a + b d_j)
    a = -(g + e (H - log s)) / (T s)        b = -e / (T s)

The Triton kernels compute 2^x instead of e^x, because GPUs have an instruction for 2^x:

    k = log2(e) / T        d' = k z_j - k top        exp(d_j) = 2^d'

For a logit of -inf, d' 2^d' would be -inf * 0 = NaN, so d' is clamped to at least -125. Results for NaN logits are NaN.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minivlmrl.kernels.backend import at_least_float32, backend_for, tl, triton

# lower limit for (logit - row maximum) in base 2; below 2^-126, float32 numbers are subnormal, and exp is slow
FLOOR = -125.0
LOG2E = 1 / math.log(2)


def score_rows_(z: Tensor, ids: Tensor, temperature: float, scratch: Tensor | None = None) -> tuple[Tensor, ...]:
    """Compute log-probability, entropy, largest logit and sum of exponentials per token, all (m,).

    Args:
        z: (m, V) logits, overwritten.
        ids: (m,) chosen tokens.
        scratch: (m, V) tensor for exponentials; None = allocate one.
    """
    top = z.amax(-1)
    chosen = (z.gather(-1, ids[:, None])[:, 0] - top) / temperature
    d = differences_(z, top, temperature)
    p = torch.exp(d, out=scratch)
    s = p.sum(-1)
    t = p.mul_(d).sum(-1)
    log_s = s.log()
    return chosen - log_s, log_s - t / s, top, s


def differentiate_rows_(
    d: Tensor, ids: Tensor, saved: list, upstream: list, temperature: float, scratch=None
) -> Tensor:
    """Compute the logit gradient (m, V) from d = (logits - row maximum) / temperature.

    Args:
        d: (m, V), overwritten.
        ids: (m,) chosen tokens.
        saved: entropies, largest logits and sums of exponentials from score_rows_.
        upstream: gradients (m,) for log-probabilities and for entropies; the second may be None.
        scratch: (m, V) tensor for the result; None = allocate one.
    """
    (entropies, _, s), (g, e) = saved, upstream
    scale = -1 / (temperature * s)
    dz = torch.exp(d, out=scratch)
    if e is None:
        dz.mul_((scale * g)[:, None])
    else:
        a = scale * (g + e * (entropies - s.log()))
        dz.mul_(d.mul_((scale * e)[:, None]).add_(a[:, None]))
    return dz.scatter_add_(-1, ids[:, None], (g / temperature)[:, None])


def differences_(z: Tensor, top: Tensor, temperature: float) -> Tensor:
    """Convert logits (m, V), in place, to (logits - row maximum) / temperature, clamped to at least log(2^-125)."""
    z.sub_(top[:, None])
    if temperature != 1:
        z.div_(temperature)
    return z.clamp_(min=FLOOR * math.log(2))


def has_gradient(g: Tensor, e: Tensor | None) -> Tensor:
    """Return (m,) bool, True for tokens with a nonzero upstream gradient."""
    return g != 0 if e is None else (g != 0) | (e != 0)


def select_rows(tensors: Sequence[Tensor | None], rows: slice | Tensor) -> list[Tensor | None]:
    """Copy rows to contiguous tensors; None stays None."""
    return [x if x is None else x[rows].contiguous() for x in tensors]


# Programs read a row in blocks of 8 x 1,024 logits. Maxima and sums per block column are combined only after the loop,
# because combining makes threads wait.
STEPS = tl.constexpr(8)
COLUMNS = tl.constexpr(1024)
FORWARD_WARPS = 4
BLOCK = tl.constexpr(8192)  # logits per iteration of the backward loop
BACKWARD_WARPS = 8
constexpr = tl.constexpr
# a finite initial maximum, because -inf - (-inf) is NaN
LOWEST_TOP = tl.constexpr(-1e30)
LOWEST_DIFFERENCE = tl.constexpr(FLOOR)
LN2 = tl.constexpr(math.log(2))


@triton.jit
def _add_logits(z, top, s, t, k):
    """Add a block of logits z (STEPS, COLUMNS) to running maxima and sums per block column."""
    new_top = tl.maximum(top, tl.max(z, 0) * k)
    c = top - new_top
    w = tl.exp2(c)
    d = z * k - new_top[None, :]
    d = tl.maximum(d, LOWEST_DIFFERENCE, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(d)
    return new_top, s * w + tl.sum(p, 0), (t + c * s) * w + tl.sum(p * d, 0)


@triton.jit
def _describe_row(row_logits, width, k):
    """Return a row's largest logit, sum_j 2^d_j and sum_j d_j 2^d_j for d_j = logit j - largest logit, in base 2."""
    offsets = tl.arange(0, STEPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tops = tl.full((COLUMNS,), LOWEST_TOP, tl.float32)
    s = tl.zeros((COLUMNS,), tl.float32)
    t = tl.zeros((COLUMNS,), tl.float32)
    whole = width // (STEPS * COLUMNS) * (STEPS * COLUMNS)
    for start in range(0, whole, STEPS * COLUMNS):
        z = tl.load(row_logits + start + offsets).to(tl.float32)
        tops, s, t = _add_logits(z, tops, s, t, k)
    if whole < width:
        inside = whole + offsets < width
        z = tl.load(row_logits + whole + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        tops, s, t = _add_logits(z, tops, s, t, k)
    top = tl.max(tops, 0)
    c = tops - top
    w = tl.exp2(c)
    return top, tl.sum(s * w, 0), tl.sum((t + c * s) * w, 0)


@triton.jit
def _join(top1, s1, t1, top2, s2, t2):
    top = tl.maximum(top1, top2)
    c1 = top1 - top
    c2 = top2 - top
    w1 = tl.exp2(c1)
    w2 = tl.exp2(c2)
    return top, s1 * w1 + s2 * w2, (t1 + c1 * s1) * w1 + (t2 + c2 * s2) * w2


@triton.jit
def _score_kernel(
    logits, ids, parts, logps, entropies, tops, totals, stride, rows, width, first, k, FIRST: constexpr, LAST: constexpr
):
    """Add one part of the vocabulary to a row's sums; after the last part, store log-probability and entropy."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    top, s, t = _describe_row(row_logits, width, k)
    column = tl.load(ids + row) - first  # chosen token's column, perhaps in another vocabulary part
    inside = (column >= 0) & (column < width)
    chosen = tl.load(row_logits + column, mask=inside, other=float("nan")).to(tl.float32) * k
    if not FIRST:
        chosen = tl.where(inside, chosen, tl.load(parts + 3 * rows + row))
        s_before = tl.load(parts + rows + row)
        t_before = tl.load(parts + 2 * rows + row)
        top, s, t = _join(tl.load(parts + row), s_before, t_before, top, s, t)
    if LAST:
        log_s = tl.log2(s)
        logp = (chosen - top - log_s) * LN2
        # not above 0: rounding can make log-probabilities slightly positive
        tl.store(logps + row, tl.where(logp > 0, 0.0, logp))
        tl.store(entropies + row, (log_s - t / s) * LN2)
        tl.store(tops + row, top)
        tl.store(totals + row, s)
    else:
        tl.store(parts + row, top)
        tl.store(parts + rows + row, s)
        tl.store(parts + 2 * rows + row, t)
        tl.store(parts + 3 * rows + row, chosen)


@triton.jit
def _differentiate_kernel(
    logits, ids, entropies, tops, totals, grad_logps, grad_entropies, out, stride, out_stride, width, first, k
):
    """Write a row's logit gradient to `out`, which may overwrite `logits`."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.load(totals + row)
    g = tl.load(grad_logps + row)
    scale = -k * LN2 / s  # -1 / (T s)
    a = scale * g
    b = 0.0
    is_needed = g != 0
    if grad_entropies is not None:
        e = tl.load(grad_entropies + row)
        a += scale * e * (tl.load(entropies + row) - tl.log2(s) * LN2)
        b = scale * e * LN2
        is_needed = is_needed | (e != 0)
    # if the upstream gradients are 0, write zeros without reading logits
    a = tl.where(is_needed, a, 0.0)
    b = tl.where(is_needed, b, 0.0)
    grad_chosen = tl.where(is_needed, g * k * LN2, 0.0)
    top = tl.where(is_needed, tl.load(tops + row), 0.0)
    width_to_read = tl.where(is_needed, width, 0)
    chosen_column = tl.load(ids + row) - first
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width_to_read
        z = tl.load(logits + row * stride + columns, mask=inside, other=float("-inf"))
        # tl.maximum drops NaN, but for a row with a NaN logit the saved sum s is NaN, and so the gradient is NaN
        d = tl.maximum(z.to(tl.float32) * k - top, LOWEST_DIFFERENCE)
        dz = tl.exp2(d) * (a + b * d)
        dz = tl.where(columns == chosen_column, dz + grad_chosen, dz)
        row_out = out + row * out_stride
        tl.store(row_out + columns, dz.to(out.dtype.element_ty), mask=columns < width)


def score_part_(
    z: Tensor, ids: Tensor, parts: Tensor | None, temperature: float, first_id: int = 0, last: bool = True
) -> list[Tensor]:
    """Compute log-probabilities and entropies in Triton, one part of the vocabulary per call.

    Args:
        z: (N, width) logits for ids first_id..first_id+width-1.
        ids: (N,) chosen tokens.
        parts: (4, N) float32, kept between calls: largest logit, sums s and t as in the derivation, chosen logit. None
            if z has the whole vocabulary.
        last: whether this is the last part of the vocabulary.
    Returns:
        (N,) float32 tensors: log-probabilities, entropies, largest logits times log2(e) / temperature, sums of
        exponentials. Empty list before the last part of the vocabulary.
    """
    rows, width = z.shape
    results = [z.new_empty(rows, dtype=torch.float32) for _ in range(4 if last else 0)]
    if rows:
        with torch.cuda.device_of(z):  # launch on the tensors' GPU, which may not be the current one
            _score_kernel[(rows,)](
                z, ids, parts, *(results or [None] * 4),
                stride=z.stride(0), rows=rows, width=width, first=first_id, k=LOG2E / temperature,
                FIRST=first_id == 0, LAST=last,
                num_warps=FORWARD_WARPS, enable_fp_fusion=True,
            )  # fmt: skip
    return results


def differentiate_part_(
    z: Tensor, ids: Tensor, saved: list, upstream: list, temperature: float, out: Tensor, first_id: int = 0
) -> Tensor:
    """Compute the logit gradient in Triton, for one part of the vocabulary.

    Args:
        z, first_id: as in score_part_.
        ids: (N,) chosen tokens.
        saved: results of score_part_ except log-probabilities.
        upstream: gradients (N,) for log-probabilities and entropies; the second may be None.
        out: (N, width) memory for the gradient; may be z.
    """
    rows, width = z.shape
    if rows:
        with torch.cuda.device_of(z):
            _differentiate_kernel[(rows,)](
                z, ids, *saved, *upstream, out,
                stride=z.stride(0), out_stride=out.stride(0), width=width, first=first_id, k=LOG2E / temperature,
                num_warps=BACKWARD_WARPS, enable_fp_fusion=True,
            )  # fmt: skip
    return out


class _SelectiveLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if backend_for(z, "selective_log_softmax") == "triton":
            logps, *saved = score_part_(z, ids, None, temperature)
        else:
            logps, *saved = score_rows_(z.to(at_least_float32(z.dtype), copy=True), ids, temperature)
        ctx.save_for_backward(z, ids, *saved)
        ctx.temperature = temperature
        return logps, saved[0]

    @staticmethod
    def backward(ctx, g: Tensor, e: Tensor) -> tuple[Tensor, None, None]:
        z, ids, *saved = ctx.saved_tensors
        upstream = [g.contiguous(), e.contiguous()]
        if backend_for(z, "selective_log_softmax") == "triton":
            return differentiate_part_(z, ids, saved, upstream, ctx.temperature, torch.empty_like(z)), None, None
        d = differences_(z.to(g.dtype, copy=True), saved[1], ctx.temperature)
        dz = differentiate_rows_(d, ids, saved, upstream, ctx.temperature).to(z.dtype)
        return dz.masked_fill_(~has_gradient(g, e)[:, None], 0.0), None, None


def selective_log_softmax(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities for given tokens, and entropies, from logits.

    Args:
        logits: (..., V), float32, float16, bfloat16, or float64 (torch only).
        ids: (...) int64 tokens to score.
        temperature: logit divisor, above 0.
    Returns:
        Log-probabilities and entropies under softmax(logits / temperature), both (...), in nats, float32 (float64 for
        float64 logits), differentiable.
    Source: TRL's selective_log_softmax and entropy_from_logits, applied to logits / temperature.
    """
    if logits.shape[:-1] != ids.shape:
        raise ValueError(f"logits have the shape {tuple(logits.shape)}, which does not fit ids {tuple(ids.shape)}")
    if not temperature > 0:
        raise ValueError(f"the temperature is {temperature}, but it must be greater than 0")
    logps, entropies = _SelectiveLogSoftmax.apply(
        logits.reshape(-1, logits.shape[-1]).contiguous(), ids.flatten(), temperature
    )
    return logps.view(ids.shape), entropies.view(ids.shape)
