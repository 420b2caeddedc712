"""Test which tokens attend to which in a packed batch, and which prompts decoding keeps."""

import pytest
import torch

from minivlmrl.model.attention import DecodeAttention, GroupAttention, PackedLayout


def qkv(tokens, seed=0, heads=(4, 2, 2), dim=16):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, h, dim, generator=generator, dtype=torch.float64) for h in heads]


def test_a_prompt_is_dropped_from_decoding_with_its_last_row():
    prefill = GroupAttention(PackedLayout([5, 9], [[], []]), keep_keys=True)
    prefill(0, *qkv(14))
    decoding = DecodeAttention(prefill, torch.tensor([0, 0, 1]), 3, torch.zeros(2))
    for unfinished, rows, prompts in (([True, False, True], [0, 2], 2), ([False, True], [2], 1)):
        decoding.select(torch.tensor(unfinished))
        assert decoding.rows.tolist() == rows
        assert len(decoding.prompt_kv[0][0]) == prompts


def test_a_long_completion_pads_no_short_ones():
    layout = PackedLayout([1000], [[2048, *[100] * 7]])
    assert sum(shape.numel() for shape in layout.shapes) == layout.num_tokens


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
