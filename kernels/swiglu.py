"""SwiGLU's activation, silu(g) u of gate g and up u: on a GPU one read of both and one write.

Derivation. With s = 1 / (1 + e^-g) and the gradient d of the result:

    silu(g) u = g s u          dg = d u (s + g s (1 - s))          du = d g s

Only g and u are kept. Kernels compute in float32 and round once; torch rounds silu(g) too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.kernels.backend import backend_for, tl, triton

BLOCK, WARPS = 1024, 4  # numbers of a program: 8 of bfloat16 a thread, 16 bytes
constexpr = tl.constexpr


@triton.jit
def _load(x, size, BLOCK: constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tl.load(x + index, mask=index < size, other=0.0).to(tl.float32)


@triton.jit
def _store(x, values, size, BLOCK: constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + index, values.to(x.dtype.element_ty), mask=index < size)


@triton.jit
def _forward_kernel(gate, up, out, size, BLOCK: constexpr):
    g = _load(gate, size, BLOCK)
    u = _load(up, size, BLOCK)
    _store(out, g / (1.0 + tl.exp(-g)) * u, size, BLOCK)


@triton.jit
def _backward_kernel(grad, gate, up, grad_gate, grad_up, size, BLOCK: constexpr):
    d = _load(grad, size, BLOCK)
    g = _load(gate, size, BLOCK)
    u = _load(up, size, BLOCK)
    s = 1.0 / (1.0 + tl.exp(-g))
    _store(grad_gate, d * u * (s + g * s * (1.0 - s)), size, BLOCK)
    _store(grad_up, d * g * s, size, BLOCK)


def _launch(kernel, *tensors: Tensor) -> None:
    size = tensors[0].numel()
    with torch.cuda.device_of(tensors[0]):  # Triton launches on the current device
        kernel[(triton.cdiv(size, BLOCK),)](*tensors, size, BLOCK=BLOCK, num_warps=WARPS)


@torch.library.custom_op("minivlmrl::swiglu", mutates_args=())
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(_forward_kernel, gate.contiguous(), up.contiguous(), out)
    return out


@torch.library.custom_op("minivlmrl::swiglu_backward", mutates_args=())
def _backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grads = tuple(torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
    _launch(_backward_kernel, grad.contiguous(), gate.contiguous(), up.contiguous(), *grads)
    return grads


_forward.register_fake(lambda gate, up: gate.new_empty(gate.shape))
_backward.register_fake(lambda grad, gate, up: tuple(gate.new_empty(gate.shape) for _ in range(2)))
_forward.register_autograd(
    lambda ctx, grad: _backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up; any shape. Two dtypes are promoted, by torch.

    Source: SwiGLU of arXiv 2002.05202; transformers' Qwen2MLP before down_proj.
    """
    if gate.dtype == up.dtype and backend_for(gate) == "triton":
        return _forward(gate, up)
    gate = F.silu(gate)  # without gradients nobody needs the other, whose memory is free now
    return gate * up
