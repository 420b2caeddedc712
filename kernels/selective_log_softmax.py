"""Log-probability of chosen tokens and entropy, from logits: one read forward, one read and one write backward.

Derivation. For one row of logits z (V,), chosen token y and temperature T, with top = max_j z_j:

    d_j = (z_j - top) / T <= 0         s = sum_j exp d_j         t = sum_j d_j exp d_j         p_j = exp(d_j) / s
    logp = log p_y = d_y - log s <= 0
    H = -sum_j p_j log p_j = -sum_j p_j (d_j - log s) = log s - t / s

so top, s and t are all that has to be known of a row. Two parts, 1 and 2, are joined with top = max(top1, top2) and
c1 = (top1 - top) / T, since exp(d + c1) = exp(d) exp(c1):

    s = s1 exp c1 + s2 exp c2          t = (t1 + c1 s1) exp c1 + (t2 + c2 s2) exp c2

which lets a kernel go over a row once, in parts of any size. Backward, from

    d logp / dz_j = ([j = y] - p_j) / T          dH / dz_j = -p_j (log p_j + H) / T

with upstream gradients g (of logp) and e (of H), from the logits again and the saved top, s and H:

    dz_j = g [j = y] / T + exp(d_j) (a + b d_j)        a = -(g + e (H - log s)) / (T s)        b = -e / (T s)

The kernels count in base 2, where the GPU has an exponential: with k = log2(e) / T, d' = k z - k top is one instruction
and d = d' ln 2. A logit of -inf has probability 0, and there d exp d must be 0, not inf * 0: differences are kept above
FLOOR, where the exponential is the smallest normal number. NaN stays NaN.
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.backend import Build, backend_for, tl, triton

FLOOR = -126.0  # of d', base 2
CHUNK_BYTES = 16 * 2**20  # of float32 logits at a time on the torch path: more leaves the CPU's caches
GPU_ROWS = 512  # at a time on the torch path of a GPU

# ------------------------------------------------------------------------------------------------ reference, in torch


def score_rows_(
    z: Tensor, ids: Tensor, temperature: float, spare: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, H, top and s, each (m,), of logits z (m, V) in float32 or float64; leaves d in z.

    Args:
        spare: memory of another (m, V) to use.
    """
    top = z.amax(-1)
    chosen = (z.gather(-1, ids[:, None])[:, 0] - top) / temperature
    d = differences_(z, top, temperature)
    p = torch.exp(d, out=spare)
    s = p.sum(-1)
    log_s = s.log()
    return chosen - log_s, log_s - p.mul_(d).sum(-1) / s, top, s


def differentiate_rows_(
    d: Tensor, ids: Tensor, saved: list[Tensor], grad_logps: Tensor, grad_entropies: Tensor | None,
    temperature: float, spare: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """dz (m, V) from d, which it overwrites.

    Args:
        saved: H, top and s of the rows.
    """
    entropies, _, s = saved
    scale = -1 / (temperature * s)
    dz = torch.exp(d, out=spare)
    if grad_entropies is None:
        dz.mul_((scale * grad_logps)[:, None])
    else:
        a = scale * (grad_logps + grad_entropies * (entropies - s.log()))
        dz.mul_(d.mul_((scale * grad_entropies)[:, None]).add_(a[:, None]))
    return dz.scatter_add_(-1, ids[:, None], (grad_logps / temperature)[:, None])


def differences_(z: Tensor, top: Tensor, temperature: float) -> Tensor:
    """d (m, V) in place of z."""
    z.sub_(top[:, None])
    if temperature != 1:
        z.div_(temperature)
    return z.clamp_(min=FLOOR * math.log(2))


# ------------------------------------------------------------------------------------------------ kernels, in Triton

# One program, one row. One turn of the forward's loop takes TURNS x COLUMNS logits, and every column keeps a top, an s
# and a t of its own: a thread holds whole columns (8 neighbours, one 16-byte load of bfloat16, in each of the TURNS
# rows), so threads exchange nothing before the end of the row.
TURNS, COLUMNS, FORWARD_WARPS = 8, 1024, 4
BLOCK, BACKWARD_WARPS = 8192, 8
LOWEST = tl.constexpr(-1e30)  # a top below all others, but finite: its difference to them is no NaN
LEAST = tl.constexpr(FLOOR)
LN2 = tl.constexpr(math.log(2))


@triton.jit
def _absorb(z, top, s, t, k):
    """Column-wise top, s and t (in base 2) after another z (TURNS, COLUMNS)."""
    new = tl.maximum(top, tl.max(z, 0) * k)
    c = top - new
    w = tl.exp2(c)
    d = tl.maximum(z * k - new[None, :], LEAST, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(d)
    return new, s * w + tl.sum(p, 0), (t + c * s) * w + tl.sum(p * d, 0)


@triton.jit
def _forward(
    logits_ptr, ids_ptr, parts_ptr, logps_ptr, entropies_ptr, tops_ptr, totals_ptr,
    stride, rows, width, first_id, k, ignore_index,
    FIRST: tl.constexpr, LAST: tl.constexpr, TURNS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row of `width` logits, the ids first_id and up: all of the vocabulary, or a part that joins those before it.

    parts (4, rows): top, s, t and d_y + top of the parts before, read unless FIRST and written unless LAST.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + row)
    if token == ignore_index:
        if LAST:
            tl.store(logps_ptr + row, 0.0)
            tl.store(entropies_ptr + row, 0.0)
            tl.store(tops_ptr + row, 0.0)
            tl.store(totals_ptr + row, 1.0)
        return
    z_ptr = logits_ptr + row * stride
    offsets = tl.arange(0, TURNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tops = tl.full((COLUMNS,), LOWEST, tl.float32)
    s = tl.zeros((COLUMNS,), tl.float32)
    t = tl.zeros((COLUMNS,), tl.float32)
    whole = width // (TURNS * COLUMNS) * (TURNS * COLUMNS)
    for start in range(0, whole, TURNS * COLUMNS):
        z = tl.load(z_ptr + start + offsets).to(tl.float32)
        tops, s, t = _absorb(z, tops, s, t, k)
    if whole < width:
        inside = whole + offsets < width
        z = tl.load(z_ptr + whole + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        tops, s, t = _absorb(z, tops, s, t, k)

    top = tl.max(tops, 0)
    c = tops - top
    w = tl.exp2(c)
    t = tl.sum((t + c * s) * w, 0)
    s = tl.sum(s * w, 0)
    own = token - first_id
    mine = (own >= 0) & (own < width)
    chosen = tl.load(z_ptr + own, mask=mine, other=float("nan")).to(tl.float32) * k
    if not FIRST:
        before = tl.load(parts_ptr + row)
        s_before = tl.load(parts_ptr + rows + row)
        t_before = tl.load(parts_ptr + 2 * rows + row)
        chosen = tl.where(mine, chosen, tl.load(parts_ptr + 3 * rows + row))
        joined = tl.maximum(before, top)
        c1, c2 = before - joined, top - joined
        w1, w2 = tl.exp2(c1), tl.exp2(c2)
        t = (t_before + c1 * s_before) * w1 + (t + c2 * s) * w2
        s = s_before * w1 + s * w2
        top = joined
    if LAST:
        log_s = tl.log2(s)
        logp = (chosen - top - log_s) * LN2
        tl.store(logps_ptr + row, tl.where(logp > 0, 0.0, logp))  # k z - k top may round to a hair above 0
        tl.store(entropies_ptr + row, (log_s - t / s) * LN2)
        tl.store(tops_ptr + row, top)
        tl.store(totals_ptr + row, s)
    else:
        tl.store(parts_ptr + row, top)
        tl.store(parts_ptr + rows + row, s)
        tl.store(parts_ptr + 2 * rows + row, t)
        tl.store(parts_ptr + 3 * rows + row, chosen)


@triton.jit
def _backward(
    logits_ptr, ids_ptr, entropies_ptr, tops_ptr, totals_ptr, grad_logps_ptr, grad_entropies_ptr, out_ptr,
    stride, out_stride, width, first_id, k, ignore_index,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dz of one row of `width` logits, the ids first_id and up; out may be the logits. Zeros if both gradients are."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + row)
    top = tl.load(tops_ptr + row)
    s = tl.load(totals_ptr + row)
    g = tl.load(grad_logps_ptr + row)
    scale = -k * LN2 / s  # -1 / (T s)
    a = scale * g
    b = 0.0
    live = g != 0
    if grad_entropies_ptr is not None:
        e = tl.load(grad_entropies_ptr + row)
        a += scale * e * (tl.load(entropies_ptr + row) - tl.log2(s) * LN2)
        b = scale * e * LN2
        live = live | (e != 0)
    live = live & (token != ignore_index)
    a = tl.where(live, a, 0.0)
    b = tl.where(live, b, 0.0)
    one = tl.where(live, g * k * LN2, 0.0)
    top = tl.where(live, top, 0.0)
    read = tl.where(live, width, 0)  # nothing of a row whose gradient is zero
    own = token - first_id
    z_ptr = logits_ptr + row * stride
    dz_ptr = out_ptr + row * out_stride
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + offsets, mask=offsets < read, other=float("-inf")).to(tl.float32)
        d = tl.maximum(z * k - top, LEAST)  # a NaN among the logits is in s, and so in a and b
        dz = tl.exp2(d) * (a + b * d)
        dz = tl.where(offsets == own, dz + one, dz)
        tl.store(dz_ptr + offsets, dz.to(out_ptr.dtype.element_ty), mask=offsets < width)


LOG2E = 1 / math.log(2)


def fold_(
    logits: Tensor, ids: Tensor, parts: Tensor | None, temperature: float, ignore_index: int, first_id=0, last=True
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Take logits (N, width), the ids first_id and up of each row, into parts (4, N).

    Args:
        parts: what was taken so far, written unless this is the last part; None where the first part is the last.
    Returns:
        logp, H, top (in base 2) and s, each (N,) float32, after the last part.
    """
    rows, width = logits.shape
    out = [logits.new_empty(rows, dtype=torch.float32) for _ in range(4)] if last else [None] * 4
    if rows:
        with torch.cuda.device_of(logits):
            _forward[(rows,)](
                logits, ids, parts, *out, logits.stride(0), rows, width, first_id, LOG2E / temperature, ignore_index,
                FIRST=first_id == 0, LAST=last, TURNS=TURNS, COLUMNS=COLUMNS, num_warps=FORWARD_WARPS,
            )  # fmt: skip
    return tuple(out) if last else None


def differentiate_part_(
    logits: Tensor, ids: Tensor, saved: list[Tensor], grad_logps: Tensor, grad_entropies: Tensor | None,
    temperature: float, ignore_index: int, out: Tensor, first_id: int = 0,
) -> Tensor:  # fmt: skip
    """Write dz of logits (N, width), the ids first_id and up of each row, to out, which may be the logits.

    Args:
        saved: H, top (in base 2) and s that fold_ returned.
    """
    rows, width = logits.shape
    if rows:
        with torch.cuda.device_of(logits):
            _backward[(rows,)](
                logits, ids, *saved, grad_logps, grad_entropies, out, logits.stride(0), out.stride(0), width, first_id,
                LOG2E / temperature, ignore_index, BLOCK=BLOCK, num_warps=BACKWARD_WARPS,
            )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------------ autograd


@torch.library.custom_op("minivlmrl::selective_log_softmax", mutates_args=())
def _op(
    logits: Tensor, ids: Tensor, temperature: float, ignore_index: int, inplace_backward: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, H, top and s, each (N,), of logits (N, V)."""
    if backend_for(logits) == "triton":
        return fold_(logits, ids, None, temperature, ignore_index)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    out = torch.zeros(4, len(ids), dtype=dtype, device=logits.device)
    for rows in _chunks(ids != ignore_index, logits):
        out[:, rows] = torch.stack(score_rows_(logits[rows].to(dtype), ids[rows], temperature))
    return tuple(row.clone() for row in out)


@_op.register_fake
def _(logits, ids, temperature, ignore_index, inplace_backward):
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return tuple(logits.new_empty(ids.shape, dtype=dtype) for _ in range(4))


def _gradient(out, logits, ids, saved, grad_logps, grad_entropies, temperature, ignore_index):
    if backend_for(logits) == "triton":
        grads = (g if g is None else g.contiguous() for g in (grad_logps, grad_entropies))
        return differentiate_part_(logits, ids, saved, *grads, temperature, ignore_index, out)
    live = grad_logps != 0 if grad_entropies is None else (grad_logps != 0) | (grad_entropies != 0)
    live &= ids != ignore_index
    for rows in _chunks(live, logits):
        *own, g, e = (None if x is None else x[rows] for x in (*saved, grad_logps, grad_entropies))
        d = differences_(logits[rows].to(grad_logps.dtype), own[1], temperature)
        out[rows] = differentiate_rows_(d, ids[rows], own, g, e, temperature).to(out.dtype)
    out[~live] = 0
    return out


@torch.library.custom_op("minivlmrl::selective_log_softmax_backward", mutates_args=())
def _backward_op(
    logits: Tensor, ids: Tensor, saved: list[Tensor], grad_logps: Tensor, grad_entropies: Tensor | None,
    temperature: float, ignore_index: int,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return _gradient(out, logits, ids, saved, grad_logps, grad_entropies, temperature, ignore_index)


@_backward_op.register_fake
def _(logits, ids, saved, grad_logps, grad_entropies, temperature, ignore_index):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("minivlmrl::selective_log_softmax_backward_", mutates_args=("logits",))
def _backward_inplace_op(
    logits: Tensor, ids: Tensor, saved: list[Tensor], grad_logps: Tensor, grad_entropies: Tensor | None,
    temperature: float, ignore_index: int,
) -> None:  # fmt: skip
    _gradient(logits, logits, ids, saved, grad_logps, grad_entropies, temperature, ignore_index)


def _setup_context(ctx, inputs, output):
    logits, ids, *ctx.constants, ctx.inplace_backward = inputs
    _, entropies, tops, totals = output
    ctx.save_for_backward(logits, ids, entropies, tops, totals)
    ctx.mark_non_differentiable(tops, totals)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, grad_logps, grad_entropies, *_):
    logits, ids, *saved = ctx.saved_tensors
    if grad_logps is None:
        grad_logps = torch.zeros_like(saved[0])
    arguments = (logits, ids, saved, grad_logps, grad_entropies, *ctx.constants)
    if ctx.inplace_backward:
        _backward_inplace_op(*arguments)
        grad = logits.detach()
    else:
        grad = _backward_op(*arguments)
    return grad, None, None, None, None


_op.register_autograd(_differentiate, setup_context=_setup_context)


def _chunks(wanted: Tensor, logits: Tensor):
    """Indices of the wanted rows, a chunk at a time."""
    size = max(CHUNK_BYTES // (4 * logits.shape[-1]), 1) if logits.device.type == "cpu" else GPU_ROWS
    return wanted.nonzero()[:, 0].split(size) if wanted.any() else []


# ------------------------------------------------------------------------------------------------ public


def selective_log_softmax(
    logits: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    ignore_index: int = -100,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Score chosen tokens under softmax(logits / temperature).

    Args:
        logits: (..., V), float32, float16, bfloat16 or (torch path alone) float64.
        ids: (...) int64, the chosen tokens.
        temperature: divides the logits, > 0.
        entropy: return the entropies too.
        ignore_index: where ids hold it, log-probability, entropy and gradient are 0.
        inplace_backward: write the gradient over the logits, which saves their size in memory. They can then be used
            for nothing else, and a second backward raises a RuntimeError.
    Returns:
        logps (...) and entropies (...) or None, nats, float32 (float64 for float64 logits); both are differentiable.
    Raises:
        ValueError: shapes that do not fit, or a temperature that is not positive.
    Source: TRL's selective_log_softmax and entropy_from_logits, of logits / temperature.
    """
    if logits.shape[:-1] != ids.shape:
        raise ValueError(f"logits {tuple(logits.shape)} need ids {tuple(logits.shape[:-1])}, not {tuple(ids.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: it divides the logits and must be above 0")
    rows = logits.flatten(0, -2) if logits.dim() > 1 else logits[None]
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    logps, entropies, *_ = _op(rows, ids.flatten().contiguous(), temperature, ignore_index, inplace_backward)
    return logps.view(ids.shape), entropies.view(ids.shape) if entropy else None


# ------------------------------------------------------------------------------------------------ real sizes

LOOSE = ("ignore_index",)  # -100 is not divisible by 16


def _builds() -> list[Build]:
    """Rows of the hub's vocabularies, whole and as the tiles that linear_log_softmax makes of them."""
    loose = {"stride": "i32", "width": "i32", "first_id": "i32", "k": "fp32", "ignore_index": "i32", "ids_ptr": "*i64"}
    results = dict.fromkeys(["logps_ptr", "entropies_ptr", "tops_ptr", "totals_ptr"], "*fp32")
    parts, sizes = {"parts_ptr": "*fp32"}, {"TURNS": TURNS, "COLUMNS": COLUMNS}
    builds = []
    for dtype in ("bf16", "fp32"):
        given = loose | {"logits_ptr": f"*{dtype}", "rows": "i32"}
        whole = dict.fromkeys(parts) | {"FIRST": True, "LAST": True} | sizes
        middle = dict.fromkeys(results) | {"FIRST": False, "LAST": False} | sizes
        for name, signature, constants in (
            ("forward", given | results, whole),
            ("forward, middle part", given | parts, middle),
        ):
            name = f"log-softmax {name} {dtype}"
            builds.append(Build(name, _forward, signature, constants, FORWARD_WARPS, 1, TURNS * COLUMNS, LOOSE))
    given = loose | {"logits_ptr": "*bf16", "out_ptr": "*bf16", "out_stride": "i32", "grad_logps_ptr": "*fp32"}
    given |= {name: kind for name, kind in results.items() if name != "logps_ptr"}
    upstream = {"grad_entropies_ptr": "*fp32"}
    for name, signature, absent in (("", given, dict.fromkeys(upstream)), (" with entropy", given | upstream, {})):
        name, constants = f"log-softmax backward{name} bf16", absent | {"BLOCK": BLOCK}
        builds.append(Build(name, _backward, signature, constants, BACKWARD_WARPS, 1, BLOCK, LOOSE))
    return builds


BUILDS = _builds()
