"""Test how rows are arranged by prompt, and each way of computing the attention of completions."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minivlmrl.kernels import shared_prefix
from minivlmrl.kernels.dense_attention import dense_attention, flash_attention, flash_attention_backward
from minivlmrl.monitor.memory.estimate import AllocationTracker

# prompt of each completion; query heads, key heads, prompt tokens, completion tokens, head dimension
SIZES = [
    ([0, 0, 0], 4, 2, 7, 5, 8),
    ([0, 0, 1], 6, 3, 130, 70, 16),  # prompt 1 has an empty slot
    ([0, 2, 2], 4, 4, 1, 33, 24),  # prompt 1 has no completion
    ([0, 0, 1, 1], 8, 1, 20, 100, 64),
    ([0], 2, 2, 3, 1, 8),
]


def completions_and_prompts(prompt_index, H, K, P, C, D, dtype=torch.float64):
    """Return random q, k, v, prompt_k and prompt_v, the upstream gradient, and the prompt slots of completions."""
    R, B = len(prompt_index), max(prompt_index) + 1
    generator = torch.Generator().manual_seed(0)
    shapes = [(R, C, H, D), (R, C, K, D), (R, C, K, D), (B, P, K, D), (B, P, K, D), (R, C, H, D)]
    *inputs, upstream = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)
    return [x.requires_grad_() for x in inputs], upstream, shared_prefix.PromptSlots(torch.tensor(prompt_index), B)


@pytest.fixture(params=["written out", "joined", "copied"])
def way(request, monkeypatch):
    monkeypatch.setattr(shared_prefix, "MAX_SCORE_BYTES", 2**30 if request.param == "written out" else 0)
    if request.param == "copied":
        monkeypatch.setattr(shared_prefix, "has_flash_attention", lambda q, k, v: False)
    return request.param


def assert_equals_copied_keys(sizes, dtype, tolerance, scale=1):
    """Compare outputs and gradients with float64 attention on copied keys; `scale` multiplies the queries."""
    inputs, upstream, slots = completions_and_prompts(*sizes, dtype=dtype)
    with torch.no_grad():
        inputs[0].mul_(scale)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v, prompt_k, prompt_v = exact
    k, v = (torch.cat([prompt[sizes[0]], own], dim=2) for prompt, own in ((prompt_k, k), (prompt_v, v)))
    expected = dense_attention(q, k, v, is_causal=True)
    actual = shared_prefix.completion_attention(*inputs, slots)
    gradients = torch.autograd.grad(actual, inputs, upstream)
    exact_gradients = torch.autograd.grad(expected, exact, upstream.double())
    for ours, theirs in zip((actual, *gradients), (expected, *exact_gradients), strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_way_equals_attention_with_copied_keys(sizes, way):
    assert_equals_copied_keys(sizes, torch.float64, 1e-12)


@pytest.mark.parametrize("sizes", [*SIZES[:4], ([0] * 8, 4, 1, 40, 600, 16)], ids=str)
def test_each_way_in_bfloat16(sizes, way):
    """The tolerance is a few times the bfloat16 rounding error of 2^-9, even for sums over 4,800 queries."""
    assert_equals_copied_keys(sizes, torch.bfloat16, 6e-3)


@pytest.mark.parametrize("way", ["written out", "joined"], indirect=True)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sharp_scores_lose_no_digits_in_bfloat16(sizes, way):
    """Nearly one-hot attention weights have small gradients, in which rounded outputs would cause errors of 98 %.

    Attention with copied keys is left out, because PyTorch's fused kernel rounds its outputs.
    """
    assert_equals_copied_keys(sizes, torch.bfloat16, 6e-3, scale=30)


def test_the_keys_of_a_prompt_are_not_copied(way):
    inputs, upstream, slots = completions_and_prompts([0] * 8, 2, 2, 1000, 4, 16)
    with AllocationTracker([*inputs, upstream]) as tracker:
        torch.autograd.grad(shared_prefix.completion_attention(*inputs, slots), inputs, upstream)
    copied_bytes = len(slots.prompt_index) * inputs[3].nbytes
    if way == "joined":
        assert tracker.peak < copied_bytes / 2
    elif way == "copied":
        assert tracker.peak > 2 * copied_bytes


def test_the_kernel_of_a_gpu_accepts_the_arguments():
    """Call the GPU kernel with fake tensors, which have shapes but no values."""
    with FakeTensorMode():
        q = torch.empty(6, 8, 50, 64, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(6, 2, 50, 64, device="cuda", dtype=torch.bfloat16)
        out, lse, state = flash_attention(q, k, k, is_causal=True)
        gradients = flash_attention_backward(q, q, k, k, out, lse, state, is_causal=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]
