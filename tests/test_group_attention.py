"""The attention rule in its other forms, for GPUs: FlexAttention's mask and flash attention's causal bias."""

import random

import pytest
import torch

from minivlmrl.attention import GroupAttention, GroupLayout
from minivlmrl.batch import pack
from minivlmrl.kernels.dense_attention import dense_attention, flash_attention
from minivlmrl.logprobs import per_token_logps

import tiny

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def flex(monkeypatch):
    monkeypatch.setenv("MINIVLMRL_ATTENTION", "flex")


def random_lengths(seed):
    """Up to 4 prompts, up to 3 completions of each, many very short: a completion of 1 has no token in the run."""
    rng = random.Random(seed)
    prompts = [rng.choice([1, 2, 7, rng.randint(1, 150)]) for _ in range(rng.randint(1, 4))]
    return prompts, [[rng.choice([1, 2, rng.randint(1, 90)]) for _ in range(rng.randint(0, 3))] for _ in prompts]


def rule_by_hand(prompts, completions):
    """(N, N) bool, written down from lengths as the rule reads."""
    places = []  # (group, completion or None, place in its span) of each token of the run
    for group, (length, rows) in enumerate(zip(prompts, completions, strict=True)):
        places += [(group, None, t) for t in range(length)]
        for row, n in enumerate(rows):
            places += [(group, row, t) for t in range(n - 1)]
    sees = torch.zeros(len(places), len(places), dtype=torch.bool)
    for i, (group, row, t) in enumerate(places):
        for j, (other, own, s) in enumerate(places):
            before = s <= t
            sees[i, j] = group == other and (before if own == row else own is None)
    return sees


@pytest.mark.parametrize("seed", range(8))
def test_the_mask_is_the_rule(seed, flex):
    prompts, completions = random_lengths(seed)
    block_mask = GroupLayout(prompts, completions).block_mask
    sees = rule_by_hand(prompts, completions)
    places = torch.arange(len(sees))
    assert torch.equal(block_mask.mask_mod(0, 0, places[:, None], places[None, :]), sees)


@pytest.mark.parametrize("seed", range(4))
def test_one_call_equals_two(seed, flex):
    """Random q, k, v, forward only: on CPU FlexAttention has no gradients."""
    layout = GroupLayout(*random_lengths(seed))
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(layout.num_tokens, 4, 16, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(layout.num_tokens, 2, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    rule = GroupAttention(layout)
    torch.testing.assert_close(rule(0, q, k, v), rule.two_calls(q, k, v), atol=1e-12, rtol=1e-12)


@torch.no_grad()
def test_a_model_scores_the_same(monkeypatch):
    model, generator = tiny.model(dtype=torch.float64), torch.Generator().manual_seed(0)
    prompts = [tiny.prompt(generator, [(1, 6, 10)]), tiny.prompt(generator, [])]
    completions = [[tiny.completion(generator, n) for n in (3, 8)], [tiny.completion(generator, 5)]]
    expected, _ = per_token_logps(model, pack(prompts, completions, model.config))
    monkeypatch.setattr(GroupAttention, "two_calls", None)
    monkeypatch.setenv("MINIVLMRL_ATTENTION", "flex")
    actual, _ = per_token_logps(model, pack(prompts, completions, model.config))
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_another_word_is_refused(monkeypatch):
    monkeypatch.setenv("MINIVLMRL_ATTENTION", "flash")
    with pytest.raises(ValueError, match="sdpa or flex"):
        GroupLayout([3], [[2]])


@pytest.mark.parametrize(("L", "T"), [(5, 5), (5, 12), (1, 9), (40, 150)])
def test_causal_attention_sees_up_to_the_lower_right(L, T):
    """Each form against the formula in float64: written out, the fused kernel's (150 keys), flash attention's bias."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, L, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 3, T, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    sees = torch.tensor([[j <= T - L + i for j in range(T)] for i in range(L)])
    heads = torch.arange(6) // 2
    scores = (q @ k[:, heads].mT * 8**-0.5).masked_fill(~sees, float("-inf"))
    expected = scores.softmax(-1) @ v[:, heads]
    for attention in (lambda *qkv: dense_attention(*qkv, is_causal=True), flash_attention):
        torch.testing.assert_close(attention(q, k, v), expected, atol=1e-12, rtol=1e-12)


@gpu
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_gradients_on_a_gpu(attention, monkeypatch):
    """bfloat16 there against float64 here, with GPU kernels of either kind."""
    prompts, completions = [300, 130], [[40, 200, 1], [90]]
    exact = GroupLayout(prompts, completions)
    generator = torch.Generator().manual_seed(0)
    shapes = [(exact.num_tokens, heads, 128) for heads in (16, 2, 2, 16)]
    q, k, v, upstream = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    expected = GroupAttention(exact)(0, *inputs)
    gradients = torch.autograd.grad(expected, inputs, upstream.double())
    monkeypatch.setenv("MINIVLMRL_ATTENTION", attention)
    inputs = [x.cuda().requires_grad_() for x in (q, k, v)]
    actual = GroupAttention(GroupLayout(prompts, completions, "cuda"))(0, *inputs)
    pairs = [(actual, expected), *zip(torch.autograd.grad(actual, inputs, upstream.cuda()), gradients, strict=True)]
    for ours, theirs in pairs:
        assert (ours.cpu().double() - theirs).norm() / theirs.norm() < 1e-2
