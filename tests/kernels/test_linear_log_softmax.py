"""Compare log-probabilities computed in blocks with log_softmax; test_backend.py runs the kernels interpreted."""

import math

import pytest
import torch

from minivlmrl.kernels import linear_log_softmax as kernel
from minivlmrl.kernels.linear_log_softmax import join_masks, linear_log_softmax
from tests.helpers.interpreter import INTERPRETED

only_torch = pytest.mark.skipif(INTERPRETED, reason="looks at PyTorch, not at the kernel")
# the kernels compute in float32, the torch path in float64 for float64 inputs
EXACT = torch.float32 if INTERPRETED else torch.float64
ROWS, MAX_ROWS = (26, 12) if INTERPRETED else (70, 24)  # the interpreter takes some milliseconds for each row and block
# relative errors; a float32 product by blocks is rounded at other places than a whole product
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3e-3}


def inputs(rows=ROWS, vocab=31, width=8, dtype=EXACT):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    ids = torch.randint(0, vocab, (rows,), generator=generator)
    if rows:
        ids[0] = 0
        ids[-1] = vocab - 1
    return hidden, weight, ids, torch.randn(2, rows, generator=generator, dtype=torch.float64)


def exact(hidden, weight, ids, upstream, temperature, kept=None):
    z = (hidden.detach().double() @ weight.detach().double().T).requires_grad_()
    log_p = (z / temperature if kept is None else (z / temperature).masked_fill(~kept, -1e30)).log_softmax(-1)
    logps = log_p.gather(-1, ids[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(-1)
    [dz] = torch.autograd.grad((upstream * torch.stack([logps, entropies])).sum(), z)
    return logps, entropies, dz @ weight.detach().double(), dz.T @ hidden.detach().double()


def scored(hidden, weight, ids, upstream, temperature, *mask):
    outputs = linear_log_softmax(hidden, weight, ids, temperature, *mask)
    upstream = upstream.to(outputs[0].dtype)
    return *outputs, *torch.autograd.grad(outputs, (hidden, weight), list(upstream))


def assert_exact(actual, expected, tolerance):
    for mine, reference in zip(actual, expected, strict=True):
        assert ((mine.double() - reference).norm() / reference.norm()).item() < tolerance


@pytest.fixture
def small_blocks(monkeypatch):
    """Divide the rows and the 31 ids into several blocks, of which the last is smaller."""
    monkeypatch.setattr(kernel, "BLOCK_BYTES", 1)
    monkeypatch.setattr(kernel, "MAX_ROWS", MAX_ROWS)


def test_blocks_of_few_rows_have_more_ids():
    """No block has more logits than a block of 4,096 rows and 2,048 ids."""
    widths = {rows: kernel.block_width(rows, 151936) for rows in (1, 1024, 1500, 2048, 3000, 4096)}
    assert widths == {1: 8192, 1024: 8192, 1500: 5120, 2048: 4096, 3000: 2048, 4096: 2048}
    assert kernel.block_width(1024, 5000) == 5000
    for rows in range(1, 5000, 7):
        size = kernel.block_bytes(rows, 151936, torch.float32)
        assert size == 4 * min(rows, 4096) * kernel.block_width(min(rows, 4096), 151936) <= 4 * 4096 * 2048
        assert kernel.block_bytes(rows, 151936, torch.bfloat16) == 1.5 * size


@pytest.mark.skipif(not INTERPRETED, reason="looks at the blocks of Triton's path")
@pytest.mark.parametrize("rows", [2, 7, 30])
def test_the_estimate_knows_the_memory_of_a_block(small_blocks, rows):
    hidden, weight, ids, _ = inputs(rows=rows, dtype=torch.float32)
    blocks = kernel.LogitBlocks(hidden, weight, ids, ids.new_empty(2, 0), 1.0)
    assert blocks.memory.nbytes == kernel.block_bytes(rows, len(weight), torch.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", list(dict.fromkeys([EXACT, torch.float32, torch.bfloat16])), ids=str)
def test_values_and_gradients_equal_whole_logits(small_blocks, temperature, dtype):
    arguments = inputs(dtype=dtype)
    actual = scored(*arguments, temperature)
    assert actual[0].dtype == actual[1].dtype == torch.promote_types(dtype, torch.float32)
    assert actual[2].dtype == actual[3].dtype == dtype
    assert_exact(actual[:2], exact(*arguments, temperature)[:2], min(TOLERANCE[dtype], 2e-6))
    assert_exact(actual[2:], exact(*arguments, temperature)[2:], 2 * TOLERANCE[dtype])
    assert (actual[0] <= 0).all()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_a_sampling_mask_leaves_out_ids(small_blocks, share):
    """With a share of 0, the sampling mask allows only the chosen id."""
    hidden, weight, ids, upstream = inputs()
    upstream[:, ::3] = 0
    kept = torch.rand(ROWS, 31, generator=torch.Generator().manual_seed(1)) < share
    mask = join_masks(ids, [(part.sum(1), part.nonzero()[:, 1]) for part in kept.split(5)])
    kept[torch.arange(ROWS), ids] = True
    expected = exact(hidden, weight, ids, upstream, 0.7, kept)
    actual = scored(hidden, weight, ids, upstream, 0.7, mask)
    torch.testing.assert_close([x.double() for x in actual], list(expected), atol=10 * TOLERANCE[EXACT], rtol=0)


@pytest.mark.parametrize("every", [2, 70], ids="every {}th left".format)
def test_rows_without_gradient_are_left_out_and_missed_by_nobody(small_blocks, every):
    arguments = inputs()
    arguments[3][:] *= torch.arange(ROWS) % every == 0
    assert_exact(scored(*arguments, 0.7), exact(*arguments, 0.7), TOLERANCE[EXACT])


def test_no_row_has_a_gradient_and_there_are_no_rows():
    hidden, weight, ids, upstream = inputs(rows=5)
    *_, grad_hidden, grad_weight = scored(hidden, weight, ids, 0 * upstream, 1.0)
    assert not grad_hidden.any() and not grad_weight.any()
    logps, entropies, grad_hidden, grad_weight = scored(hidden[:0], weight, ids[:0], upstream[:, :0], 1.0)[:4]
    assert logps.shape == entropies.shape == (0,) and not grad_weight.any()


@pytest.mark.parametrize("frozen", [0, 1], ids=["states", "head"])
def test_what_needs_no_gradient_gets_none(frozen):
    hidden, weight, ids, upstream = inputs(rows=5)
    expected = exact(hidden, weight, ids, upstream, 1.0)[3 - frozen]
    pair = [hidden, weight]
    pair[frozen].requires_grad_(False)
    outputs = linear_log_softmax(hidden, weight, ids)
    [actual] = torch.autograd.grad(outputs, pair[1 - frozen], list(upstream.to(EXACT)))
    assert_exact([actual], [expected], TOLERANCE[EXACT])


@only_torch
def test_no_block_of_logits_exceeds_the_bound(monkeypatch):
    """A block has 256 rows of 31 logits, or 32 rows with Qwen2.5-VL's vocabulary, which take 19 MB in float32."""
    sizes = []
    original = kernel.float32_matmul
    product = lambda h, *x, **out: (sizes.append(len(h)), original(h, *x, **out))[1]  # noqa: E731
    monkeypatch.setattr(kernel, "float32_matmul", product)
    hidden, weight, ids, _ = inputs(rows=700)
    linear_log_softmax(hidden, weight, ids)[0].sum().backward()
    assert max(sizes) == 256 and sum(sizes) == 2 * 700  # each row once forward, once again backward
    assert kernel.block_rows(4096, 151936, "cpu") == 32


def test_what_does_not_fit_is_said():
    hidden, weight, ids, _ = inputs(rows=3)
    with pytest.raises(ValueError, match=r"hidden has the shape \(3, \d+\), which does not fit ids \(2,\)"):
        linear_log_softmax(hidden, weight, ids[1:])
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"the temperature is {temperature}, but it must be greater than 0"):
            linear_log_softmax(hidden, weight, ids, temperature)


@only_torch
def test_the_operators_keep_pytorchs_rules():
    hidden, weight, ids, upstream = inputs(rows=4, dtype=torch.float32)
    mask = torch.stack([torch.arange(4), ids])
    rules = {"test_utils": ("test_schema", "test_autograd_registration", "test_faketensor")}
    torch.library.opcheck(kernel._linear_log_softmax, (hidden, weight, ids, mask, 0.7), **rules)
    saved = list(kernel._linear_log_softmax(hidden.detach(), weight.detach(), ids, mask, 0.7)[1:])
    arguments = ([hidden.detach(), weight.detach(), ids, mask], saved, upstream[0].float(), None, 0.7, False)
    torch.library.opcheck(kernel._linear_log_softmax_backward, arguments, **rules)
