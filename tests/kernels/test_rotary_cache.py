"""Compare new tokens' rotation and cache writes, interpreted by test_backend.py, with apply_rotary in torch."""

from dataclasses import replace

import pytest
import torch
from interpreter import INTERPRETED

from minivlmrl.data.rows import uniform_numbers
from minivlmrl.generation import cuda_graphs
from minivlmrl.generation.cuda_graphs import CapturedDecode, StaticDecodeAttention
from minivlmrl.generation.generate import Decode, sample_by_uniforms
from minivlmrl.kernels.rotary_cache import rotary_cache
from minivlmrl.model.attention import DecodeAttention, GroupAttention, GroupLayout
from minivlmrl.model.rope import apply_rotary

import tiny
from draws import options, prompts, sample

DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.usefixtures() if INTERPRETED else pytest.mark.gpu  # a compiled kernel needs a GPU


def numbers(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def rotation(R, D, dtype):
    """Return cos and sin (R, 1, D) as text_rotary does."""
    angles = numbers(R, 1, D // 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(DEVICE, dtype), torch.cat([-sin, sin], -1).to(DEVICE, dtype)


def heads(R, H, K, D, dtype, joined):
    """Return q, k and v (R, heads, D) as views into one product, or as separate tensors."""
    sizes = [H * D, K * D, K * D]
    parts = numbers(R, sum(sizes), dtype=dtype).to(DEVICE).split(sizes, -1)
    return [(x if joined else x.clone()).unflatten(-1, (-1, D)) for x in parts]


@runs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("H", "K", "D"), [(16, 2, 128), (28, 4, 128), (6, 3, 16), (1, 1, 256)], ids=str)  # 3B, 7B
def test_on_a_gpu_or_interpreted_it_is_the_rotation_of_the_trainer(H, K, D, dtype):
    """In 16 bits the results are equal to the bit. The other cache cells do not change."""
    R, C = 5, 7
    newest = torch.tensor([0, 6, 3, 3, 1], device=DEVICE)
    for joined in (True, False):
        q, k, v = heads(R, H, K, D, dtype, joined)
        cos, sin = rotation(R, D, dtype)
        caches = [numbers(R, K, C, D, dtype=dtype).to(DEVICE) for _ in range(2)]
        expected = [cache.clone() for cache in caches]
        for cache, new in zip(expected, (apply_rotary(k, cos, sin), v), strict=True):
            cache[torch.arange(R), :, newest] = new
        rotated = rotary_cache(q, k, v, cos, sin, *caches, newest)
        # A GPU and a CPU may round a sum of two products once or twice in float32.
        close = {"atol": 1e-6, "rtol": 0} if dtype == torch.float32 else {"atol": 0, "rtol": 0}
        torch.testing.assert_close(rotated, apply_rotary(q, cos, sin), **close)
        torch.testing.assert_close(caches[0], expected[0], **close)
        assert torch.equal(caches[1], expected[1])
        exact = apply_rotary(q.double(), cos.double(), sin.double())
        assert (rotated - exact).norm() <= {2: 4e-3, 4: 1e-7}[dtype.itemsize] * exact.norm()


@runs
def test_on_a_gpu_or_interpreted_rows_get_different_numbers_of_tokens(monkeypatch):
    """Tool responses advance only some rows. The cache buffers grow."""
    monkeypatch.setattr(cuda_graphs, "KEYS", 3)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    prefill = GroupAttention(GroupLayout([5, 9, 2], [[]] * 3, DEVICE), keep_keys=True)
    prefill(0, *(numbers(16, count, 16, dtype=dtype).to(DEVICE) for count in (4, 2, 2)))
    fused, formula = (
        kind(prefill, torch.arange(3).repeat_interleave(2), 9, torch.zeros(3, device=DEVICE))
        for kind in (StaticDecodeAttention, DecodeAttention)
    )
    for step in range(1, 6):
        # in step 3, a tool response with two tokens precedes each second row's new token
        extra = [0, 2 * (step == 3)] * 3
        for attention in (fused, formula):
            if step == 3:
                attention.advance(torch.tensor(extra, device=DEVICE), 2)
                for layer in attention.row_kv[0]:
                    layer[1::2, :, 2:4] = 0.5
            attention.advance()
        q, k, v = (x * step for x in heads(6, 4, 2, 16, dtype, joined=True))
        cos, sin = rotation(6, 16, dtype)
        expected = formula(0, apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        off = (fused.rotate_and_attend(0, q, k, v, cos, sin) - expected).double().norm()
        assert off <= (1e-6 if INTERPRETED else 1e-2) * expected.double().norm()
    assert fused.newest.tolist() == [4, 6] * 3 and fused.num_row_keys == 9


@runs
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_on_a_gpu_or_interpreted_a_rollout_samples_the_same_tokens(monkeypatch, model_type):
    """The decode step is captured on a GPU. Qwen3 normalises q's and k's heads before the rotation."""
    calls = []
    monkeypatch.setattr(cuda_graphs, "rotary_cache", lambda *given: calls.append(1) or rotary_cache(*given))
    # the kernel needs a power of two as head_dim
    config = replace(tiny.config(model_type=model_type), head_dim=16, mrope_section=(2, 3, 3))
    model = tiny.model_of(config).to(DEVICE)
    draw = sample_by_uniforms(uniform_numbers(list("abc"), 2, 5), DEVICE)
    arguments = model, prompts(3), 2, options(max_new_tokens=5), (), draw
    sampled = []
    for choice, decode in (("triton", CapturedDecode()), ("torch", Decode())):
        monkeypatch.setenv("MINIVLMRL_KERNELS", choice)
        sampled.append(sample(*arguments, decode=decode))
    assert len(calls) == len(model.model.layers) * (4 if INTERPRETED else 2)  # a GPU replays two steps out of four
    for group, expected_group in zip(*sampled, strict=True):
        for a, b in zip(group, expected_group, strict=True):
            assert a.ids.tolist() == b.ids.tolist()
            torch.testing.assert_close(a.logps, b.logps, atol=1e-5 if INTERPRETED else 1e-4, rtol=0)
