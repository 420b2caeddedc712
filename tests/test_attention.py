"""Who sees whom: the layout of a packed run, the mask, the two calls of a group and the decoding of rows."""

import random

import pytest
import torch

from minivlmrl.attention import DecodeAttention, GroupAttention, GroupLayout, visible
from minivlmrl.environments.tool_sampler import AnswerAttention


def random_lengths(seed):
    """Up to 4 prompts, up to 3 completions of each, many very short: a completion of 1 has no token in the run."""
    rng = random.Random(seed)
    prompts = [rng.choice([1, 2, 7, rng.randint(1, 150)]) for _ in range(rng.randint(1, 4))]
    return prompts, [[rng.choice([1, 2, rng.randint(1, 90)]) for _ in range(rng.randint(0, 3))] for _ in prompts]


def qkv(tokens, seed=0, heads=(4, 2, 2), dim=16):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, h, dim, generator=generator, dtype=torch.float64) for h in heads]


def masked_softmax(q, k, v, mask):
    """Attention by its formula, (N, H, D): every query against every key, those it does not see at -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize("seed", range(4))
def test_the_mask_is_the_rule(seed):
    """Against the rule written down from lengths, pair by pair."""
    prompts, completions = random_lengths(seed)
    tokens = []  # (group, completion or None, index in its span) of each token of the run
    for group, (length, rows) in enumerate(zip(prompts, completions, strict=True)):
        tokens += [(group, None, t) for t in range(length)]
        for row, n in enumerate(rows):
            tokens += [(group, row, t) for t in range(n - 1)]
    expected = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for i, (group, row, t) in enumerate(tokens):
        for j, (other, own, s) in enumerate(tokens):
            expected[i, j] = group == other and (s <= t if own == row else own is None)
    assert torch.equal(visible(GroupLayout(prompts, completions)), expected)


@pytest.mark.parametrize("seed", range(4))
def test_the_two_calls_are_the_masked_softmax(seed):
    """Values and gradients."""
    layout = GroupLayout(*random_lengths(seed))
    inputs = [x.requires_grad_() for x in qkv(layout.num_tokens, seed)]
    upstream = qkv(layout.num_tokens, seed + 100)[0]
    expected = masked_softmax(*inputs, visible(layout))
    actual = GroupAttention(layout)(0, *inputs)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)
    gradients = (torch.autograd.grad(out, inputs, upstream) for out in (actual, expected))
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_decoding_token_by_token_is_the_masked_softmax_of_the_whole_run(seed):
    """Rows of different lengths, two layers; a row leaves when its tokens end, and its prompt with its last row. After
    some tokens a row reads several at once, so that rows are at different steps."""
    rng = random.Random(seed)
    prompts = [rng.randint(1, 9) for _ in range(3)]
    spans = [[rng.randint(1, 6) for _ in range(3)] for _ in prompts]
    layout = GroupLayout(prompts, [[n + 1 for n in group] for group in spans])
    layers = [qkv(layout.num_tokens, seed + layer) for layer in range(2)]
    expected = [masked_softmax(*layer, visible(layout)) for layer in layers]

    # where each span is in the run
    start = 0
    prompt_index = []
    rows = []
    for prompt, group in zip(prompts, spans, strict=True):
        prompt_index += range(start, start + prompt)
        start += prompt
        for n in group:
            rows.append(list(range(start, start + n)))
            start += n
    prefill = GroupAttention(GroupLayout(prompts, [[]] * 3), keep_keys=True)
    for index, layer in enumerate(layers):
        found = prefill(index, *(x[prompt_index] for x in layer))
        torch.testing.assert_close(found, expected[index][prompt_index], atol=1e-12, rtol=1e-12)
    owner = torch.arange(3).repeat_interleave(3)
    decode = DecodeAttention(prefill, owner, 6, torch.tensor(prompts))
    running = list(range(9))

    def compare(attention, index):
        for number, layer in enumerate(layers):
            found = attention(number, *(x[index] for x in layer))
            torch.testing.assert_close(found, expected[number][index], atol=1e-12, rtol=1e-12)

    for _ in range(6):
        decode.advance()
        compare(decode, [rows[row].pop(0) for row in running])
        reads = {i: rng.randint(1, 3) for i, row in enumerate(running) if len(rows[row]) > 3 and rng.random() < 0.5}
        if reads:
            answers = AnswerAttention(decode, list(reads), list(reads.values()))
            compare(answers, [rows[running[i]].pop(0) for i, count in reads.items() for _ in range(count)])
        rest = [i for i, row in enumerate(running) if rows[row]]
        if not rest:
            break
        if len(rest) < len(running):
            decode.select(torch.isin(torch.arange(len(running)), torch.tensor(rest)))
            running = [running[i] for i in rest]
        assert len(decode.prompt_kv[0][0]) == len({row // 3 for row in running})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_on_a_gpu():
    """bfloat16 there against float64 here."""
    prompts = [300, 130]
    completions = [[40, 200, 1], [90]]
    exact = GroupLayout(prompts, completions)
    *halves, upstream = (x.bfloat16() for x in qkv(exact.num_tokens, heads=(16, 2, 2, 16), dim=128))
    inputs = [x.double().requires_grad_() for x in halves]
    expected = GroupAttention(exact)(0, *inputs)
    gradients = torch.autograd.grad(expected, inputs, upstream.double())
    inputs = [x.cuda().requires_grad_() for x in halves]
    actual = GroupAttention(GroupLayout(prompts, completions, "cuda"))(0, *inputs)
    pairs = [(actual, expected), *zip(torch.autograd.grad(actual, inputs, upstream.cuda()), gradients, strict=True)]
    for ours, theirs in pairs:
        assert (ours.cpu().double() - theirs).norm() / theirs.norm() < 1e-2
