"""Compare attention within segments with masked attention in float64; test_backend.py interprets the kernels."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from minivlmrl.kernels import dense_attention
from minivlmrl.kernels import window_attention as module
from minivlmrl.kernels.window_attention import Segments, window_attention
from tests.helpers.interpreter import INTERPRETED
from tests.helpers.pretend_cuda import CUDA, PretendCuda

# relative errors; the torch path rounds scores and attention weights to bfloat16, the kernels only weights
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 3e-3}
if not INTERPRETED:
    TOLERANCE |= {torch.float16: 3e-3, torch.bfloat16: 3e-2}
EXACT = torch.float32 if INTERPRETED else torch.float64  # the kernels take no float64
CASES = [
    ([4, 4, 4], 3, 8), ([16, 4, 16, 8, 1, 4], 3, 8), ([7], 3, 16), ([24, 32], 2, 64), ([64, 48, 17, 4], 2, 80),
    ([64, 60], 1, 128), ([33, 5], 2, 72),  # head dimensions that are padded to 128 columns
]  # fmt: skip
interpreted = pytest.mark.skipif(not INTERPRETED, reason="calls a kernel: `pytest -m slow` runs it interpreted")


def make(lengths, heads, head_dim, dtype):
    """Return q, k and v with three different strides; their neighboring values in memory are NaN."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for gap in (1, 2, 3):
        room = torch.full((sum(lengths) + 128, heads + gap, head_dim + 16 * gap), torch.nan, dtype=dtype)
        inside = room[64:-64, gap:, :head_dim]
        tensors.append(inside.copy_(torch.randn(inside.shape, generator=generator, dtype=torch.float64)))
    return [x.detach().requires_grad_() for x in tensors]


def masked_weights(q, k, lengths):
    """Return softmax(q k^T D^-1/2) under a block-diagonal mask, of shape (heads, tokens, tokens)."""
    block = torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    return scores.masked_fill(~block, float("-inf")).softmax(-1)


def masked_attention(q, k, v, lengths, upstream=None):
    """Return softmax(q k^T D^-1/2) v in float64 under a block-diagonal mask, and the gradients of q, k and v."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out = torch.einsum("hij,jhd->ihd", masked_weights(q, k, lengths), v)
    upstream = torch.ones_like(out) if upstream is None else upstream.double()
    return out.detach(), torch.autograd.grad(out, (q, k, v), upstream)


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    difference = (actual.double() - expected).norm() / expected.norm()
    assert difference <= TOLERANCE[dtype], f"{difference:.1e}"  # also false for NaN


@pytest.mark.parametrize("dtype", [EXACT, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lengths", "heads", "head_dim"), CASES, ids=str)
def test_equals_a_block_diagonal_mask(lengths, heads, head_dim, dtype, nan_in_new_memory):
    inputs = make(lengths, heads, head_dim, dtype)
    actual = window_attention(*inputs, Segments(lengths))
    upstream = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    expected, exact = masked_attention(*inputs, lengths, upstream)
    assert_close(actual, expected, dtype)
    for gradient, of_formula in zip(torch.autograd.grad(actual, inputs, upstream), exact, strict=True):
        assert_close(gradient, of_formula, dtype)


@pytest.mark.parametrize("scale", [1e-4, 60.0])
def test_flat_and_one_hot_weights(scale):
    """With the scale 60, scores are several hundred, so their exponential is too large for float32."""
    q, k, v = make([16, 30], 2, 16, EXACT)
    q = q.detach() * scale
    assert_close(window_attention(q, k, v, Segments([16, 30])), masked_attention(q, k, v, [16, 30])[0], EXACT)


@pytest.mark.parametrize(("lengths", "head_dim"), [([65, 4], 16), ([4, 4], 144)], ids=str)
def test_what_no_tile_holds_goes_to_torch(lengths, head_dim, monkeypatch):
    monkeypatch.setattr(module, "_WindowAttention", None)
    inputs = make(lengths, 1, head_dim, EXACT)
    assert_close(window_attention(*inputs, Segments(lengths)), masked_attention(*inputs, lengths)[0], EXACT)


def test_short_runs_are_sorted_by_length_and_others_stay(monkeypatch):
    segments = Segments([4, 2, 4])
    assert segments.cu_seqlens.tolist() == [0, 4, 6, 10] and segments.cu_seqlens.dtype == torch.int32
    assert segments.longest == 4
    assert segments.runs == [(2, 2), (4, 8)]
    assert segments.order.tolist() == [4, 5, 0, 1, 2, 3, 6, 7, 8, 9]
    assert segments.order[segments.inverse].tolist() == list(range(10))
    assert Segments([4, 4]).order is None and Segments([4, 2]).order is None  # sorting would save no call
    monkeypatch.setattr(module, "TOKENS_PER_CALL", 3)
    segments = Segments([4, 2, 4])
    assert segments.runs == [(4, 4), (2, 2), (4, 4)]
    assert segments.order is None
    inputs = make([4, 2, 4], 2, 8, EXACT)
    assert_close(window_attention(*inputs, segments), masked_attention(*inputs, [4, 2, 4])[0], EXACT)


@pytest.fixture
def varlen(monkeypatch):
    """Simulate flash attention for segments in float64, and return the list of its calls, "forward" or "backward"."""
    calls = []

    def check(q, k, v, starts, k_starts, longest, k_longest, dropout, is_causal, **options):
        """Check the requirements of the kernel, and return q, k and v in float64 and the segment lengths."""
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert q.shape == k.shape == v.shape and q.shape[2] % 8 == 0
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1
        assert starts.dtype == torch.int32 and starts.equal(k_starts) and starts[-1] == len(q)
        assert longest == k_longest == starts.diff().max()
        assert dropout == 0 and not is_causal
        assert all(value in (None, -1) for value in options.values()), options  # default scale, no sliding window
        return q.double(), k.double(), v.double(), starts.diff().tolist()

    def forward(q, k, v, *call, **options):
        calls.append("forward")
        options.pop("return_debug_mask", None)
        wide_q, wide_k, wide_v, lengths = check(q, k, v, *call[:6], **options)
        out = torch.einsum("hij,jhd->ihd", masked_weights(wide_q, wide_k, lengths), wide_v)
        lse = torch.zeros(q.shape[1], len(q))
        return out.to(q.dtype), lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(0), torch.zeros(0)

    def backward(grad, q, k, v, out, lse, *call, **options):
        calls.append("backward")
        dtype = q.dtype
        grad = grad.double()
        q, k, v, lengths = check(q, k, v, *call[:6], **options)
        P = masked_weights(q, k, lengths)
        dP = torch.einsum("ihd,jhd->hij", grad, v)
        dS = q.shape[2] ** -0.5 * P * (dP - (P * dP).sum(-1, keepdim=True))
        gradients = ("hij,jhd->ihd", dS, k), ("hij,ihd->jhd", dS, q), ("hij,ihd->jhd", P, grad)
        return tuple(torch.einsum(*product).to(dtype) for product in gradients)

    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_flash_attention_forward", forward, "CPU")
    kernels.impl("_flash_attention_backward", backward, "CPU")
    monkeypatch.setattr(dense_attention, "can_use_flash_attention", lambda params: True)
    # as in a run, exclude cuDNN attention, which torch 2.15 would call on the simulated GPU
    with PretendCuda(), sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        yield calls
    kernels._destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lengths", "heads", "head_dim"), [case for case in CASES if len(set(case[0])) > 1], ids=str)
def test_windows_of_different_lengths_take_one_call_on_a_gpu(lengths, heads, head_dim, dtype, varlen):
    """Where no Triton kernel runs, torch's varlen_attn computes windows of different lengths."""
    inputs = [x.detach().to(CUDA).requires_grad_() for x in make(lengths, heads, head_dim, dtype)]
    out = window_attention(*inputs, Segments(lengths, CUDA))
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(out, inputs, upstream.to(CUDA))
    assert varlen == ["forward", "backward"]
    expected, exact = masked_attention(*(x.detach().cpu() for x in inputs), lengths, upstream)
    for ours, of_formula in zip((out, *gradients), (expected, *exact), strict=True):
        assert_close(ours.detach().cpu(), of_formula, dtype)


OTHERS = {  # lengths, head_dim, dtype
    "a single run": ([16, 16], 16, torch.bfloat16), "long segments": ([65, 4], 16, torch.bfloat16),
    "float32": ([16, 4], 16, torch.float32), "a head dimension of the wrong size": ([16, 4], 12, torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_segments_take_one_call_for_each_run(name, varlen):
    lengths, head_dim, dtype = OTHERS[name]
    inputs = [x.detach() for x in make(lengths, 2, head_dim, dtype)]
    out = window_attention(*(x.to(CUDA) for x in inputs), Segments(lengths, CUDA)).cpu()
    assert_close(out, masked_attention(*inputs, lengths)[0], dtype)
    assert varlen == []


@interpreted
def test_rows_may_lie_beyond_2_to_the_31():
    """Only the last 8 of 2^27 rows are used, so all other rows take no memory."""
    T = 2**27 + 8
    segments = SimpleNamespace(cu_seqlens=torch.tensor([T - 8, T], dtype=torch.int32), longest=8)
    q, k, v, grad = (torch.empty(T, 1, 16, dtype=torch.bfloat16) for _ in range(4))
    for x, values in zip((q, k, v, grad), make([8] * 4, 1, 16, torch.bfloat16)[0].split(8), strict=True):
        x[-8:] = values.detach()
    expected, exact = masked_attention(q[-8:], k[-8:], v[-8:], [8], grad[-8:])
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = module._WindowAttention.apply(*inputs, segments)
    assert_close(out.detach()[-8:], expected, torch.bfloat16)
    gradients = torch.autograd.grad(out, inputs, grad)
    for gradient, of_formula in zip(gradients, exact, strict=True):
        assert_close(gradient[-8:], of_formula, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lengths", "heads", "head_dim"), CASES, ids=str)
def test_on_a_gpu(lengths, heads, head_dim, dtype, nan_in_new_memory):
    inputs = make(lengths, heads, head_dim, dtype)
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, exact = masked_attention(*inputs, lengths, upstream)
    there = [x.cuda().detach().requires_grad_() for x in inputs]
    actual = window_attention(*there, Segments(lengths, "cuda"))
    gradients = torch.autograd.grad(actual, there, upstream.cuda())
    for ours, of_formula in zip((actual, *gradients), (expected, *exact), strict=True):
        assert (ours.cpu().double() - of_formula).norm() <= 3e-3 * of_formula.norm()
