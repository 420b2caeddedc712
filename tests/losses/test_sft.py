"""Compare the SFT loss with arithmetic by hand; tests/parity compares with TRL."""

from math import log
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.losses.sft import sft_loss
from tests.helpers.by_hand import near, tensor


def test_nll_with_the_tokens_of_the_step():
    """Probabilities 0.5 and 0.25 in a step with ten tokens give the loss 3 log 2 / 10."""
    logps = tensor([log(0.5), log(0.25), 9.0])
    assert sft_loss(logps, tensor([1.0, 1.0, 0.0]), normalizer=SimpleNamespace(tokens=10)).item() == near(0.3 * log(2))
    assert sft_loss(logps, tensor([0.0, 0.0, 0.0])).item() == 0


@pytest.mark.parametrize("normalizer", [None, SimpleNamespace(tokens=1)])
def test_the_loss_of_a_single_token_is_divided_by_one(normalizer):
    logps, mask = tensor([-9.0, log(0.25)]), tensor([0.0, 1.0])
    assert sft_loss(logps, mask, normalizer=normalizer).item() == near(2 * log(2))
    assert sft_loss(logps, mask, loss_type="dft", normalizer=normalizer).item() == near(0.5 * log(2))


def test_the_weights_of_dft_have_no_gradient():
    logps = tensor([log(0.5), log(0.25)]).requires_grad_()
    loss = sft_loss(logps, torch.ones(1, 2), loss_type="dft")
    assert torch.autograd.grad(loss, logps)[0].flatten().tolist() == near(-0.5 / 2, -0.25 / 2)


def test_an_unknown_sft_loss_is_refused():
    with pytest.raises(ValueError, match="loss_type is 'mse', but it must be one of nll, dft"):
        sft_loss(torch.zeros(1, 1), torch.ones(1, 1), loss_type="mse")
