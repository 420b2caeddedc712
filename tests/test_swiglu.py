"""silu(gate) * up and its gradients against the formula in float64: in torch, and (by test_rotary.py) in Triton's
interpreter."""

import pytest
import torch

from minivlmrl.kernels import swiglu as module
from minivlmrl.kernels.backend import INTERPRETED
from minivlmrl.kernels.swiglu import swiglu

# of the norm; in torch bfloat16 rounds silu(gate) too
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-3 if INTERPRETED else 6e-3}
SHAPES = [(1,), (3, 5), (2, 7, 100), (1024,), (3, 1025)]


def make(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(3, *shape, generator=generator, dtype=torch.float64) * 3
    return [x.to(dtype) for x in numbers]


def by_formula(gate, up, grad):
    """The result and both gradients, by autograd in float64 of g / (1 + e^-g) u."""
    g, u = (x.detach().double().requires_grad_() for x in (gate, up))
    y = g / (1 + torch.exp(-g)) * u
    return y.detach(), *torch.autograd.grad(y, (g, u), grad.double())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_and_both_gradients(shape, dtype):
    gate, up, grad = make(shape, dtype)
    expected = by_formula(gate, up, grad)
    gate, up = gate.requires_grad_(), up.requires_grad_()
    y = swiglu(gate, up)
    for actual, value in zip((y.detach(), *torch.autograd.grad(y, (gate, up), grad)), expected, strict=True):
        assert actual.dtype == dtype and actual.shape == gate.shape
        assert (actual.double() - value).norm() <= TOLERANCE[dtype] * value.norm()


def test_large_numbers_and_other_strides():
    """e^-g overflows below -88, where silu is 0; a transposed gate is read in its own order."""
    gate = torch.tensor([[-200.0, -90.0, 0.0], [90.0, 200.0, -0.5]]).T.requires_grad_()
    up = torch.full((3, 2), 2.0, requires_grad=True)
    y = swiglu(gate, up)
    torch.testing.assert_close(y, 2 * gate * gate.sigmoid())
    y.sum().backward()
    assert gate.grad.isfinite().all() and up.grad.isfinite().all()
    torch.testing.assert_close(up.grad, (gate * gate.sigmoid()).detach())


@pytest.mark.skipif(not INTERPRETED, reason="the kernels' operators")
def test_the_operators():
    gate, up, _ = make((4, 6), torch.float32)
    torch.library.opcheck(module._forward, (gate.requires_grad_(), up.requires_grad_()))
