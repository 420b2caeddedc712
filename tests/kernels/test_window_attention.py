"""Attention inside segments against one masked attention over everything, in float64: in torch, and (by
test_backend.py) through the Triton kernels in the interpreter."""

import pytest
import torch
from interpreter import INTERPRETED

from minivlmrl.kernels import window_attention as module
from minivlmrl.kernels.window_attention import Segments, window_attention

# of the norm. The torch path rounds scores and weights to bfloat16, the kernels only weights.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 3e-3}
if not INTERPRETED:
    TOLERANCE |= {torch.float16: 3e-3, torch.bfloat16: 3e-2}
EXACT = torch.float32 if INTERPRETED else torch.float64  # the kernels take no float64
CASES = [
    ([4, 4, 4], 3, 8), ([16, 4, 16, 8, 1, 4], 3, 8), ([7], 3, 16), ([24, 32], 2, 64), ([64, 48, 17, 4], 2, 80),
    ([64, 60], 1, 128), ([33, 5], 2, 72),  # columns of the second block that no head has
]  # fmt: skip
interpreted = pytest.mark.skipif(not INTERPRETED, reason="calls a kernel: `pytest -m slow` runs it interpreted")


def make(lengths, heads, head_dim, dtype):
    """Create q, k and v with three different strides. All adjacent values in memory are NaN."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for gap in (1, 2, 3):
        room = torch.full((sum(lengths) + 128, heads + gap, head_dim + 16 * gap), torch.nan, dtype=dtype)
        inside = room[64:-64, gap:, :head_dim]
        tensors.append(inside.copy_(torch.randn(inside.shape, generator=generator, dtype=torch.float64)))
    return [x.detach().requires_grad_() for x in tensors]


def masked_attention(q, k, v, lengths, upstream=None):
    """softmax(q k^T D^-1/2) v in float64 with a block-diagonal mask over all T tokens, and the three gradients."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    block = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    out = torch.einsum("hij,jhd->ihd", scores.masked_fill(~block, float("-inf")).softmax(-1), v)
    upstream = torch.ones_like(out) if upstream is None else upstream.double()
    return out.detach(), torch.autograd.grad(out, (q, k, v), upstream)


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    difference = (actual.double() - expected).norm() / expected.norm()
    assert difference <= TOLERANCE[dtype], f"{difference:.1e}"  # false for NaN too


@pytest.mark.parametrize("dtype", [EXACT, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lengths", "heads", "head_dim"), CASES, ids=str)
def test_equals_a_block_diagonal_mask(lengths, heads, head_dim, dtype, poisoned):
    inputs = make(lengths, heads, head_dim, dtype)
    actual = window_attention(*inputs, Segments(lengths))
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    expected, exact = masked_attention(*inputs, lengths, upstream)
    assert_close(actual, expected, dtype)
    for gradient, of_formula in zip(torch.autograd.grad(actual, inputs, upstream), exact, strict=True):
        assert_close(gradient, of_formula, dtype)


@pytest.mark.parametrize("scale", [1e-4, 60.0])
def test_flat_and_one_hot_weights(scale):
    """All scores alike, and scores up to several hundred, where e^S itself is too large for float32."""
    q, k, v = make([16, 30], 2, 16, EXACT)
    q = q.detach() * scale
    assert_close(window_attention(q, k, v, Segments([16, 30])), masked_attention(q, k, v, [16, 30])[0], EXACT)


@pytest.mark.parametrize(("lengths", "head_dim"), [([65, 4], 16), ([4, 4], 144)], ids=str)
def test_what_no_tile_holds_goes_to_torch(lengths, head_dim, monkeypatch):
    monkeypatch.setattr(module, "_window_attention", None)
    inputs = make(lengths, 1, head_dim, EXACT)
    assert_close(window_attention(*inputs, Segments(lengths)), masked_attention(*inputs, lengths)[0], EXACT)


def test_short_runs_are_sorted_by_length_and_others_stay(monkeypatch):
    segments = Segments([4, 2, 4])
    assert segments.cu_seqlens.tolist() == [0, 4, 6, 10] and segments.cu_seqlens.dtype == torch.int32
    assert segments.longest == 4
    assert segments.runs == [(2, 2), (4, 8)]
    assert segments.order.tolist() == [4, 5, 0, 1, 2, 3, 6, 7, 8, 9]
    assert segments.order[segments.inverse].tolist() == list(range(10))
    assert Segments([4, 4]).order is None and Segments([4, 2]).order is None  # nothing to gain
    monkeypatch.setattr(module, "TOKENS_PER_CALL", 3)
    segments = Segments([4, 2, 4])
    assert segments.runs == [(4, 4), (2, 2), (4, 4)]
    assert segments.order is None
    inputs = make([4, 2, 4], 2, 8, EXACT)
    assert_close(window_attention(*inputs, segments), masked_attention(*inputs, [4, 2, 4])[0], EXACT)


@interpreted
def test_the_operator_keeps_its_promises():
    """Run torch's opcheck: schema, fake tensors, autograd registration and tracing."""
    inputs = make([16, 3], 2, 16, torch.float32)
    cu_seqlens = Segments([16, 3]).cu_seqlens
    torch.library.opcheck(torch.ops.minivlmrl.window_attention.default, (*inputs, cu_seqlens, 16))
    inputs = [x.detach() for x in inputs]
    grad = torch.randn_like(inputs[0])
    torch.library.opcheck(torch.ops.minivlmrl.window_attention_backward.default, (grad, *inputs, cu_seqlens, 16))


@interpreted
def test_rows_may_lie_beyond_2_to_the_31():
    """The last rows of 2^27 of 16 numbers each. Nothing touches the others, so 4 GiB tensors cost no memory."""
    T = 2**27 + 8
    cu_seqlens = torch.tensor([T - 8, T], dtype=torch.int32)
    q, k, v, grad = (torch.empty(T, 1, 16, dtype=torch.bfloat16) for _ in range(4))
    for x, values in zip((q, k, v, grad), make([8] * 4, 1, 16, torch.bfloat16)[0].split(8), strict=True):
        x[-8:] = values.detach()
    expected, exact = masked_attention(q[-8:], k[-8:], v[-8:], [8], grad[-8:])
    assert_close(torch.ops.minivlmrl.window_attention(q, k, v, cu_seqlens, 8)[-8:], expected, torch.bfloat16)
    gradients = torch.ops.minivlmrl.window_attention_backward(grad, q, k, v, cu_seqlens, 8)
    for gradient, of_formula in zip(gradients, exact, strict=True):
        assert_close(gradient[-8:], of_formula, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lengths", "heads", "head_dim"), CASES, ids=str)
def test_on_a_gpu(lengths, heads, head_dim, dtype, poisoned):
    inputs = make(lengths, heads, head_dim, dtype)
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, exact = masked_attention(*inputs, lengths, upstream)
    there = [x.cuda().detach().requires_grad_() for x in inputs]
    actual = window_attention(*there, Segments(lengths, "cuda"))
    gradients = torch.autograd.grad(actual, there, upstream.cuda())
    for ours, of_formula in zip((actual, *gradients), (expected, *exact), strict=True):
        assert (ours.cpu().double() - of_formula).norm() <= 3e-3 * of_formula.norm()
