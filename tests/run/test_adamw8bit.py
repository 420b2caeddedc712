"""AdamW with moments of 8 bits: bitsandbytes' codes, torch's updates, a quarter of the bytes."""

import pytest
import torch
from record_bitsandbytes import digest, numbers, recorded
from torch import nn

from minivlmrl.model.nf4 import dynamic_code, quantize
from minivlmrl.run import adamw8bit
from minivlmrl.run.adamw8bit import AdamW8bit

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_bitsandbytes(signed, fused_linspace):
    theirs = recorded()["signed" if signed else "unsigned"]
    code = dynamic_code.__wrapped__(signed, "cpu")
    assert code.tolist() == theirs["code"]
    indices, scales = quantize(numbers(signed), code)
    assert (digest(indices), digest(scales)) == (theirs["indices"], theirs["scales"])


def trained(optimizer, parameters, steps=20, smallest=-2):
    """The parameters after steps with gradients of sizes from 10^smallest to 1 in each row."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(p.clone()) for p in parameters]
    optimizer = optimizer(parameters, **OPTIONS)
    for _ in range(steps):
        for p in parameters:
            noise = torch.randn(p.shape, generator=generator) + 0.5
            p.grad = (noise * torch.logspace(smallest, 0, p.shape[-1])).to(p.dtype)
        optimizer.step()
    return parameters, optimizer


def test_updates_are_torchs():
    weights = [torch.randn(64, 300), torch.randn(8, 3, 2, 14, 14), torch.randn(5000), torch.randn(40, 40)]
    once, theirs_once = (trained(kind, weights, 1)[0] for kind in (AdamW8bit, torch.optim.AdamW))
    torch.testing.assert_close(once, theirs_once, rtol=1e-6, atol=1e-7)  # nothing is read back yet
    found, optimizer = trained(AdamW8bit, weights)
    theirs, _ = trained(torch.optim.AdamW, weights)
    for number, (mine, other, start) in enumerate(zip(found, theirs, weights, strict=True)):
        small = number > 1  # a vector, and 1,600 values
        assert (optimizer.state[mine]["exp_avg"].dtype == torch.float32) == small
        off = (mine - other).norm() / (other - start).norm()
        assert off < (1e-5 if small else 0.05), off


def test_small_gradients_beside_large_ones_move_no_weight_far():
    """A mean square of 1e-8 of its block's largest would be 0 in 8 bits, and the update divides by its root."""
    weights = [torch.zeros(64, 300)]
    [mine], [theirs] = (trained(kind, weights, smallest=-4)[0] for kind in (AdamW8bit, torch.optim.AdamW))
    assert mine.abs().max() < 1.5 * theirs.abs().max()


def test_rows_are_computed_alone(monkeypatch):
    """So a rank that holds some rows computes what all would, and a piece of a few rows what the whole would."""
    weights = [torch.randn(64, 300)]
    [whole], _ = trained(AdamW8bit, weights)
    monkeypatch.setattr(adamw8bit, "PIECE", 1000)
    [pieces], _ = trained(AdamW8bit, weights)
    assert whole.equal(pieces)


def test_small_updates_of_bfloat16_weights_add_up():
    """A weight of 1 has neighbours at 0.996 and 1.008: steps of 1e-4 are lost in it, unless what is lost is kept."""
    ends = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = kind([weight], 1e-4, betas=(0.9, 0.99), weight_decay=0.0)
        for _ in range(100):
            weight.grad = torch.full_like(weight, -1.0)
            optimizer.step()
        ends.append(weight.float().mean().item())
    assert ends[1] == 1.0 and ends[0] == pytest.approx(1.01, abs=0.004)
