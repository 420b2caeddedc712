"""The rotary's kernel against the formula in float64, forward and backward, in Triton's interpreter."""

import pytest
import torch
from interpreter import run_interpreted

from minivlmrl.kernels.backend import INSTALLED, INTERPRETED
from minivlmrl.kernels.rotary import rotary
from minivlmrl.rope import _cos_sin, apply_rotary

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # of the norm
# q of the decoder; q and k of the tower as views of its qkv; a head that is no power of 2
SHAPES = {"q": (7, 4, 32), "tower": (6, 2, 3, 80), "one": (1, 1, 2)}


def make(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    room = torch.randn(shape[0], 3, *shape[2:], generator=generator) if len(shape) == 4 else None
    x = torch.randn(*shape, generator=generator) if room is None else room[:, :2]
    tables = _cos_sin(torch.randn(shape[0], shape[-1] // 2, generator=generator) * 4)
    return x.to(dtype), *(table.unsqueeze(1) if room is not None else table for table in tables)


def turned(x, cos, sin):
    """Each pair as a complex number times e^it."""
    half = x.shape[-1] // 2
    angle = torch.complex(cos[..., :half].double(), sin[..., half:].double())
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * angle
    return torch.cat([z.real, z.imag], dim=-1)


@pytest.mark.parametrize("tables", TOLERANCE, ids=lambda dtype: f"tables {dtype}")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_turn_and_its_gradient(shape, dtype, tables):
    x, cos, sin = make(shape, dtype)
    cos, sin = cos.to(tables), sin.to(tables)
    x, grad = x.requires_grad_(), torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = apply_rotary(x, cos, sin)
    assert not INTERPRETED or y.dtype == dtype
    expected, back = turned(x.detach(), cos, sin), turned(grad, cos, -sin)
    rounded = max(TOLERANCE[dtype], TOLERANCE[tables])
    assert (y.detach().double() - expected).norm() <= rounded * expected.norm()
    (actual,) = torch.autograd.grad(y, x, grad.to(y.dtype))
    assert (actual.double() - back).norm() <= rounded * back.norm()


def test_one_angle_for_all_tokens_and_tables_that_are_views():
    x, cos, sin = make((5, 2, 8), torch.float32)
    torch.testing.assert_close(apply_rotary(x, cos[:1], sin[:1]).double(), turned(x, cos[:1], sin[:1]))
    wide = torch.stack([cos, sin], dim=-1)
    torch.testing.assert_close(apply_rotary(x, wide[..., 0], wide[..., 1]).double(), turned(x, cos, sin))


@pytest.mark.skipif(not INTERPRETED, reason="the kernel's operator")
def test_the_operator():
    x, cos, sin = make(SHAPES["q"], torch.float32)
    torch.library.opcheck(rotary, (x.requires_grad_(), cos, sin, 1.0))


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not INSTALLED, reason="this is the parent, and Triton must be installed")
def test_all_kernels_in_the_interpreter():
    """In one process, which takes long to begin."""
    others = ("nf4_unpack", "decode_attention", "window_attention", "selective_log_softmax", "linear_log_softmax")
    run_interpreted("rotary", *others)
