"""Compare divergences from hidden states with TRL's generalized_jsd_loss on all logits: value and gradient."""

import pytest
import torch

from recipes import distill
from recipes.distill import LinearDivergence


def states(rows, width, vocab, scale=0.5):
    return scale * torch.randn(rows, width).double(), torch.randn(vocab, width).double()


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_trl(beta, temperature, monkeypatch):
    """Compute 37 rows, 8 at a time. Teacher and student have different hidden sizes."""
    gkd = pytest.importorskip("trl.experimental.gkd", reason="extra missing: pip install trl")
    monkeypatch.setattr(distill, "rows_per_piece", lambda *_: 8)
    h, w = states(37, 5, 301)
    teacher = states(37, 7, 301)
    h, w = h.requires_grad_(), w.requires_grad_()
    mask = torch.rand(37) < 0.7
    labels = torch.where(mask, 1, -100)[None]
    theirs = gkd.GKDTrainer.generalized_jsd_loss(
        (h @ w.T)[None], (teacher[0] @ teacher[1].T)[None], labels, beta=beta, temperature=temperature
    )
    wanted = theirs, *torch.autograd.grad(theirs, (h, w))
    loss, values = LinearDivergence.apply(h, w, *teacher, mask.double() / mask.sum(), beta, temperature)
    found = loss, *torch.autograd.grad(2 * loss, (h, w))
    for own, other, times in zip(found, wanted, (1, 2, 2), strict=True):
        assert (own / times - other).abs().max() <= 4e-15 * other.abs().max()
    assert values.shape == (37,) and (values > 0).all() and not values.requires_grad


def test_only_what_is_trained_has_a_gradient_and_bfloat16_is_summed_in_float32():
    torch.manual_seed(0)
    rounded = [x.bfloat16() for x in (*states(9, 8, 50, 1.0), *states(9, 8, 50, 1.0))]
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        h, *others = (x.to(dtype) for x in rounded)
        loss, _ = LinearDivergence.apply(h.requires_grad_(), *others, torch.full((9,), 1 / 9), 0.5, 1.0)
        results.append([loss, *torch.autograd.grad(loss, h)])
    [wanted, exact], [loss, gradient] = results
    assert (loss.dtype, gradient.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient.double(), exact, rtol=2e-2, atol=1e-3)
