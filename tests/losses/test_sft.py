"""Test limits of the SFT loss; tests/parity compares it with TRL."""

from math import log
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.losses.sft import sft_loss
from tests.helpers.by_hand import near, tensor


@pytest.mark.parametrize("normalizer", [None, SimpleNamespace(tokens=1)])
def test_the_loss_of_a_single_token_is_divided_by_one(normalizer):
    logps, mask = tensor([-9.0, log(0.25)]), tensor([0.0, 1.0])
    assert sft_loss(logps, mask, normalizer=normalizer).item() == near(2 * log(2))
    assert sft_loss(logps, 0 * mask, normalizer=normalizer).item() == 0
    assert sft_loss(logps, mask, loss_type="dft", normalizer=normalizer).item() == near(0.5 * log(2))


def test_an_unknown_sft_loss_is_refused():
    with pytest.raises(ValueError, match="loss_type is 'mse', but it must be one of nll, dft"):
        sft_loss(torch.zeros(1, 1), torch.ones(1, 1), loss_type="mse")
