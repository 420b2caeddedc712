"""Rotary position embedding on a GPU: each pair is read once, turned in float32 and written once.

Derivation. Pair (a, b) = (x_i, x_{i+D/2}) and angle t with c = cos t, s = sin t:

    a' = a c - b s          b' = b c + a s          a turn's gradient is the turn back: the same with -s
"""

import torch
from torch import Tensor

from minivlmrl.kernels.backend import tl, triton

constexpr = tl.constexpr


@triton.jit
def _kernel(
    x, cos, sin, out, row_stride, head_stride, H, D, direction, HEADS: constexpr, HALF: constexpr
):
    """Turn all heads of one token; the tables have each angle twice, in their second half +sin."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, HALF)[None, :]
    half = D // 2
    inside = (head < H) & (i < half)
    c = tl.load(cos + row * D + i, mask=i < half, other=0.0).to(tl.float32)
    s = tl.load(sin + row * D + half + i, mask=i < half, other=0.0).to(tl.float32) * direction
    x += row * row_stride + head * head_stride + i
    out += (row * H + head) * D + i
    a = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(out + half, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("minivlmrl::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor, direction: float = 1.0) -> Tensor:
    """Turn x (N, ..., D) by the angles of tables (N, ..., D), one for all heads; -1 turns back."""
    heads = x.flatten(1, -2)  # (N, H, D)
    heads = heads if heads.stride(2) == 1 else heads.contiguous()
    (N, H, D) = heads.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin = (table.expand(N, *table.shape[1:]).contiguous() for table in (cos, sin))
    sizes = {"HEADS": triton.next_power_of_2(H), "HALF": triton.next_power_of_2(D // 2)}
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _kernel[(N,)](heads, cos, sin, out, *heads.stride()[:2], H, D, direction, **sizes)
    return out


def _save(ctx, inputs, output):
    _, *tables, ctx.direction = inputs
    ctx.save_for_backward(*tables)


rotary.register_fake(lambda x, cos, sin, direction=1.0: x.new_empty(x.shape))
rotary.register_autograd(
    lambda ctx, grad: (rotary(grad, *ctx.saved_tensors, -ctx.direction), None, None, None),
    setup_context=_save,
)
