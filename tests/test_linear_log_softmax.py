"""Log-probabilities by chunks against log_softmax of whole logits: values, both gradients, peak size of a chunk."""

import pytest
import torch

from minivlmrl.kernels import linear_log_softmax as kernel
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax


def inputs(rows=70, vocab=31, width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_()
    ids = torch.randint(0, vocab, (rows,), generator=generator)
    ids[0], ids[-1] = 0, vocab - 1
    return hidden, weight, ids


def naive(hidden, weight, ids, temperature):
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    return log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_bytes", [64 * 2**20, 1], ids=["one chunk", "chunks of 32 rows"])
def test_values_and_gradients_equal_whole_logits(monkeypatch, temperature, chunk_bytes):
    monkeypatch.setattr(kernel, "CHUNK_BYTES", chunk_bytes)
    hidden, weight, ids = inputs()
    upstream = torch.randn(2, len(ids), dtype=torch.float64)
    results = []
    for function in (linear_log_softmax, naive):
        logps, entropies = function(hidden, weight, ids, temperature)
        gradients = torch.autograd.grad((logps * upstream[0] + entropies * upstream[1]).sum(), (hidden, weight))
        results.append((logps, entropies, *gradients))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_gradcheck():
    hidden, weight, ids = inputs(rows=5, vocab=7)
    assert torch.autograd.gradcheck(lambda h, w: linear_log_softmax(h, w, ids, 0.9), (hidden, weight))


def test_no_chunk_of_logits_exceeds_the_bound(monkeypatch):
    sizes = []
    original = kernel._score
    monkeypatch.setattr(kernel, "_score", lambda *args: (sizes.append(len(args[0])), original(*args))[1])
    hidden, weight, ids = inputs(rows=700)
    linear_log_softmax(hidden, weight, ids)[0].sum().backward()
    assert max(sizes) == 256 and sum(sizes) == 2 * 700  # each row once forward, once again backward


def test_bfloat16_sums_in_float32():
    hidden, weight, ids = inputs(rows=300, dtype=torch.bfloat16)
    logps, entropies = linear_log_softmax(hidden, weight, ids)
    assert logps.dtype == entropies.dtype == torch.float32
    expected, _ = naive(hidden.float(), weight.float(), ids, 1.0)
    assert (logps - expected).square().mean().sqrt() < 0.02
    logps.sum().backward()
    expected_gradient = torch.autograd.grad(expected.sum(), weight)[0]
    assert weight.grad.dtype == torch.bfloat16
    assert (weight.grad - expected_gradient).abs().max() < 0.02 * expected_gradient.abs().max()


def test_no_rows_give_no_numbers():
    hidden, weight, ids = inputs(rows=2)
    logps, entropies = linear_log_softmax(hidden[:0], weight, ids[:0])
    assert logps.shape == entropies.shape == (0,)


def test_the_likeliest_token_by_hand():
    """Logits 0 and log 3 at temperature 1: probabilities 1/4 and 3/4."""
    weight = torch.tensor([[1.0], [3.0]]).log()
    logps, entropies = linear_log_softmax(torch.ones(1, 1), weight, torch.tensor([1]))
    assert logps.exp().item() == pytest.approx(0.75)
    assert entropies.item() == pytest.approx(0.5623351)
