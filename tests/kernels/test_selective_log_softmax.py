"""Compare log-probabilities and entropies of logits with float64; test_backend.py interprets the kernels."""

import math

import pytest
import torch

from minivlmrl.kernels import selective_log_softmax as kernel
from tests.helpers.interpreter import INTERPRETED

only_interpreted = pytest.mark.skipif(not INTERPRETED, reason="calls a kernel: `pytest -m slow` runs it interpreted")
# relative errors; bfloat16 gradients are rounded once
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 3e-3}
DTYPES = [torch.float32, torch.bfloat16] + ([] if INTERPRETED else [torch.float64])


def inputs(rows, vocab, dtype=torch.float32, seed=0):
    """Return random logits of standard deviation 3, ids that include the first and the last, and upstream gradients."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    ids = torch.randint(0, vocab, (rows,), generator=generator)
    if rows:
        ids[0], ids[-1] = 0, vocab - 1
    return logits, ids, torch.randn(2, rows, generator=generator)


def exact(logits, ids, temperature, upstream):
    z = logits.detach().double().requires_grad_()
    log_p = (z / temperature).log_softmax(-1)
    logps = log_p.gather(-1, ids[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p.clamp(min=-1e6)).sum(-1)
    [gradient] = torch.autograd.grad((upstream.double() * torch.stack([logps, entropies])).sum(), z)
    return logps, entropies, gradient


def ours(logits, ids, temperature, upstream):
    z = logits.detach().requires_grad_()
    scored = kernel.selective_log_softmax(z, ids, temperature)
    loss = sum((x * weight).sum() for x, weight in zip(scored, upstream, strict=True) if weight is not None)
    return *(x.detach() for x in scored), torch.autograd.grad(loss, z)[0]


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def equal(found, expected):
    for actual, value in zip(found, expected, strict=True):
        assert error(actual, value) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "vocab", "temperature"), [(5, 1000, 1.0), (5, 5003, 0.7), (2, 151936, 0.7), (1, 1, 1.0)]
)
def test_values_and_gradient_are_those_of_float64(rows, vocab, temperature, dtype, nan_in_new_memory):
    logits, ids, upstream = inputs(rows, vocab, dtype)
    actual = ours(logits, ids, temperature, upstream)
    assert actual[0].dtype == actual[1].dtype == torch.promote_types(dtype, torch.float32)
    assert actual[2].dtype == dtype
    # in float64, the sum in the formula also has rounding errors
    tolerance = TOLERANCE.get(dtype, (64 + vocab**0.5) * torch.finfo(torch.float64).eps)
    for mine, expected in zip(actual, exact(logits, ids, temperature, upstream), strict=True):
        assert error(mine, expected) < tolerance or expected.norm() == 0
    assert (actual[0] <= 0).all()


@pytest.mark.parametrize("which", ["logps", "entropies"])
def test_an_output_that_no_loss_uses_has_no_gradient(which):
    logits, ids, upstream = inputs(3, 100)
    upstream[1 if which == "logps" else 0] = 0
    given = [upstream[0], None] if which == "logps" else upstream
    equal([ours(logits, ids, 1.0, given)[2]], [exact(logits, ids, 1.0, upstream)[2]])


def test_forbidden_ids_have_no_probability_and_no_gradient():
    """Samplers forbid a token by the logit -inf."""
    logits, ids, upstream = inputs(3, 9000)
    logits.data[:, 10:9000:2] = float("-inf")
    ids[:] = torch.tensor([3, 8999, 12])
    logps, entropies, gradient = ours(logits, ids, 0.7, upstream)
    expected = exact(logits[:2], ids[:2], 0.7, upstream[:, :2])
    assert logps[2] == float("-inf")
    equal((logps[:2], entropies[:2]), expected[:2])
    assert gradient[:2, 10:9000:2].abs().max() < 1e-30 and gradient.isfinite().all()


def test_the_floor_is_a_normal_number():
    """On a CPU, exp is 30 times as slow if the result rounds to a subnormal number."""
    floor = torch.tensor(kernel.FLOOR * math.log(2)).exp()
    assert floor >= 2 * torch.finfo(torch.float32).tiny


def test_nan_is_not_hidden():
    logits, ids, upstream = inputs(2, 2000)
    logits.data[0, 1500] = float("nan")
    logps, entropies, gradient = ours(logits, ids, 1.0, upstream)
    assert logps[0].isnan() and entropies[0].isnan() and gradient[0].isnan().all()
    assert logps[1].isfinite() and gradient[1].isfinite().all()


def test_rows_beyond_32_bit_offsets():
    """Three rows lie 2^30 + 8 elements apart, so the last row begins after element 2^31."""
    apart, vocab = 2**30 + 8, 600
    memory = torch.empty(2 * apart + vocab, dtype=torch.bfloat16)  # takes 4 GB of address space, but no memory
    logits, ids, upstream = inputs(3, vocab, torch.bfloat16)
    far = memory.as_strided((3, vocab), (apart, 1))
    far.copy_(logits.detach())
    far.requires_grad_()
    expected = ours(logits, ids, 1.0, upstream)
    logps, entropies, gradient = ours(far, ids, 1.0, upstream)
    assert torch.equal(logps, expected[0]) and torch.equal(entropies, expected[1])
    assert torch.equal(gradient, expected[2])
    if INTERPRETED:  # the kernel may also write its gradient over the logits
        saved = kernel.score_part_(far.detach(), ids, None, 1.0)[1:]
        assert torch.equal(kernel.differentiate_part_(far.detach(), ids, saved, upstream, 1.0, far.detach()), gradient)


@only_interpreted
@pytest.mark.parametrize("widths", [[128, 128, 44], [1, 299]], ids=str)
def test_parts_of_a_row_join_to_the_whole(widths):
    logits, ids, upstream = inputs(4, 300)
    whole = kernel.score_part_(logits.detach(), ids, None, 0.7)
    parts, first = torch.full((4, 4), float("nan")), 0
    gradient = torch.full((4, 300), float("nan"))
    for width in widths:
        piece = logits.detach()[:, first : first + width]
        out = kernel.score_part_(piece, ids, parts, 0.7, first, first + width == 300)
        kernel.differentiate_part_(piece, ids, whole[1:], upstream, 0.7, gradient[:, first : first + width], first)
        first += width
    torch.testing.assert_close(torch.stack(out), torch.stack(whole), rtol=1e-6, atol=1e-6)
    assert error(gradient, exact(logits, ids, 0.7, upstream)[2]) < 1e-6


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"logits have the shape \(3, 5\), which does not fit ids \(2,\)"):
        kernel.selective_log_softmax(torch.zeros(3, 5), torch.zeros(2, dtype=torch.long))
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"the temperature is {temperature}, but it must be greater than 0"):
            kernel.selective_log_softmax(torch.zeros(3, 5), torch.zeros(3, dtype=torch.long), temperature)
