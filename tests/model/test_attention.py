"""Test which tokens attend to which in a packed batch, and which prompts decoding keeps."""

import random

import pytest
import torch

from minivlmrl.model.attention import DecodeAttention, GroupAttention, PackedLayout
from tests.helpers.attention_mask import attention_mask


def random_lengths(seed):
    """Return lengths of up to 4 prompts with up to 3 completions each; a completion of length 1 has no input token."""
    rng = random.Random(seed)
    prompts = [rng.choice([1, 2, 7, rng.randint(1, 150)]) for _ in range(rng.randint(1, 4))]
    return prompts, [[rng.choice([1, 2, rng.randint(1, 90)]) for _ in range(rng.randint(0, 3))] for _ in prompts]


def qkv(tokens, seed=0, heads=(4, 2, 2), dim=16):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, h, dim, generator=generator, dtype=torch.float64) for h in heads]


def masked_softmax(q, k, v, mask):
    """Compute attention (N, H, D) by its formula, where masked scores are -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("max_score_bytes", [2**30, 0], ids=["written out", "fused"])
@pytest.mark.parametrize("seed", range(4))
def test_group_attention_equals_masked_attention(seed, max_score_bytes, monkeypatch):
    monkeypatch.setattr("minivlmrl.kernels.shared_prefix.MAX_SCORE_BYTES", max_score_bytes)
    layout = PackedLayout(*random_lengths(seed))
    inputs = [x.requires_grad_() for x in qkv(layout.num_tokens, seed)]
    upstream = qkv(layout.num_tokens, seed + 100)[0]
    expected = masked_softmax(*inputs, attention_mask(layout))
    actual = GroupAttention(layout)(0, *inputs)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    gradients = (torch.autograd.grad(out, inputs, upstream) for out in (actual, expected))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


def test_a_prompt_is_dropped_from_decoding_with_its_last_row():
    prefill = GroupAttention(PackedLayout([5, 9], [[], []]), keep_keys=True)
    prefill(0, *qkv(14))
    decoding = DecodeAttention(prefill, torch.tensor([0, 0, 1]), 3, torch.zeros(2))
    for unfinished, rows, prompts in (([True, False, True], [0, 2], 2), ([False, True], [2], 1)):
        decoding.select(torch.tensor(unfinished))
        assert decoding.rows.tolist() == rows
        assert len(decoding.prompt_kv[0][0]) == prompts


@pytest.mark.gpu
def test_gradients_on_a_gpu():
    prompts = [300, 130]
    completions = [[40, 200, 1], [90]]
    exact = PackedLayout(prompts, completions)
    *halves, upstream = (x.bfloat16() for x in qkv(exact.num_tokens, heads=(16, 2, 2, 16), dim=128))
    inputs = [x.double().requires_grad_() for x in halves]
    expected = GroupAttention(exact)(0, *inputs)
    gradients = torch.autograd.grad(expected, inputs, upstream.double())
    inputs = [x.cuda().requires_grad_() for x in halves]
    actual = GroupAttention(PackedLayout(prompts, completions, "cuda"))(0, *inputs)
    pairs = [(actual, expected), *zip(torch.autograd.grad(actual, inputs, upstream.cuda()), gradients, strict=True)]
    for ours, theirs in pairs:
        assert (ours.cpu().double() - theirs).norm() / theirs.norm() < 1e-2
