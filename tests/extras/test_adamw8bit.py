"""Compare 8-bit AdamW with the codes of bitsandbytes and the updates of torch."""

import pytest
import torch
from torch import nn

from minivlmrl.extras import adamw8bit
from minivlmrl.model.nf4 import dynamic_code, quantize
from tests.record.record_bitsandbytes import digest, numbers, recorded

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_bitsandbytes(signed, fused_linspace):
    theirs = recorded()["signed" if signed else "unsigned"]
    code = dynamic_code.__wrapped__(signed, "cpu")
    assert code.tolist() == theirs["code"]
    indices, scales = quantize(numbers(signed), code)
    assert (digest(indices), digest(scales)) == (theirs["indices"], theirs["scales"])


def trained(optimizer, parameters, steps=20, smallest=-2):
    """Return parameters and optimizer after some updates; in a row, gradients grow from 10^smallest to 1."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(p.clone()) for p in parameters]
    optimizer = optimizer(parameters, **OPTIONS)
    for _ in range(steps):
        for p in parameters:
            noise = torch.randn(p.shape, generator=generator) + 0.5
            p.grad = (noise * torch.logspace(smallest, 0, p.shape[-1])).to(p.dtype)
        optimizer.step()
    return parameters, optimizer


def test_updates_match_torch():
    weights = [torch.randn(64, 300), torch.randn(8, 3, 2, 14, 14), torch.randn(5000), torch.randn(40, 40)]
    once, theirs_once = (trained(kind, weights, 1)[0] for kind in (adamw8bit.AdamW8bit, torch.optim.AdamW))
    # the first update does not read stored moments yet
    torch.testing.assert_close(once, theirs_once, rtol=1e-6, atol=1e-7)
    found, optimizer = trained(adamw8bit.AdamW8bit, weights)
    theirs, _ = trained(torch.optim.AdamW, weights)
    for number, (mine, other, start) in enumerate(zip(found, theirs, weights, strict=True)):
        small = number > 1  # vectors and tensors with few values keep float32 moments
        assert (optimizer.state[mine]["exp_avg"].dtype == torch.float32) == small
        off = (mine - other).norm() / (other - start).norm()
        assert off < (1e-5 if small else 0.05), off


def test_small_gradients_next_to_large_ones_move_no_weight_far():
    """A second moment that is too small for 8 bits must not become 0, because the update divides by its root."""
    weights = [torch.zeros(64, 300)]
    [mine], [theirs] = (trained(kind, weights, smallest=-4)[0] for kind in (adamw8bit.AdamW8bit, torch.optim.AdamW))
    assert mine.abs().max() < 1.5 * theirs.abs().max()


def test_rows_are_updated_independently(monkeypatch):
    """Ranks that hold some rows, or parts of rows, must compute the same values as one process."""
    weights = [torch.randn(64, 300)]
    [whole], _ = trained(adamw8bit.AdamW8bit, weights)
    monkeypatch.setattr(adamw8bit, "PIECE", 1000)
    [pieces], _ = trained(adamw8bit.AdamW8bit, weights)
    assert whole.equal(pieces)


def test_small_updates_of_bfloat16_weights_add_up():
    """Steps of bfloat16 near 1 are larger than 1e-4, so rounding errors must be carried over."""
    ends = []
    for kind in (adamw8bit.AdamW8bit, torch.optim.AdamW):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = kind([weight], 1e-4, betas=(0.9, 0.99), weight_decay=0.0)
        for _ in range(100):
            weight.grad = torch.full_like(weight, -1.0)
            optimizer.step()
        ends.append(weight.float().mean().item())
    assert ends[1] == 1.0 and ends[0] == pytest.approx(1.01, abs=0.004)
