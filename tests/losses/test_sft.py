"""Test limits of the SFT loss; tests/parity compares it with TRL."""

from math import log
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.losses.sft import sft_loss
from tests.helpers.by_hand import near, tensor


@pytest.mark.parametrize("normalizer, tokens", [(None, 1), (SimpleNamespace(tokens=3), 3)])
def test_the_loss_is_divided_by_the_tokens_of_the_step(normalizer, tokens):
    logps, mask = tensor([-9.0, log(0.25)]).requires_grad_(), tensor([0.0, 1.0])
    assert sft_loss(logps, mask, normalizer=normalizer).item() == near(2 * log(2) / tokens)
    assert sft_loss(logps, 0 * mask, normalizer=normalizer).item() == 0
    loss = sft_loss(logps, mask, loss_type="dft", normalizer=normalizer)
    assert loss.item() == near(0.5 * log(2) / tokens)
    assert torch.autograd.grad(loss, logps)[0].tolist() == [near(0, -0.25 / tokens)]


def test_an_unknown_sft_loss_is_refused():
    with pytest.raises(ValueError, match="loss_type is 'mse', but it must be one of nll, dft"):
        sft_loss(torch.zeros(1, 1), torch.ones(1, 1), loss_type="mse")
