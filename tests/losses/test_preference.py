"""Test digits and limits of preference losses; tests/parity compares them with TRL."""

import math
from math import exp, log
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.extras.kto import kto_kl, kto_loss
from minivlmrl.losses import preference as losses
from tests.helpers.by_hand import tensor

# a chosen answer with one token, and a rejected answer with two tokens
PAIR = tensor([[-1.0, 7.0], [-1.5, -1.5]])
PAIR_REF = tensor([[-1.5, 3.0], [-1.0, -1.0]])
PAIR_MASK = tensor([[1.0, 0.0], [1.0, 1.0]])


def softplus(x):
    return log(1 + exp(x))


def sigmoid(x):
    return 1 / (1 + exp(-x))


# log-ratios 0.5 (chosen, one token) and -1 (rejected, two tokens); beta 0.25 and label_smoothing 0.1
Z = 0.25 * 1.5
BY_HAND = {
    "sigmoid": 0.9 * softplus(-Z) + 0.1 * softplus(Z),
    "hinge": 1 - Z,
    "ipo": (0.5 - -1 / 2 - 1 / (2 * 0.25)) ** 2,
    "exo_pair": sigmoid(Z) * log(sigmoid(Z) / 0.9) + sigmoid(-Z) * log(sigmoid(-Z) / 0.1),
    "nca_pair": softplus(-0.125) + softplus(0.125) / 2 + softplus(-0.25) / 2,
    "robust": (0.9 * softplus(-Z) - 0.1 * softplus(Z)) / 0.8,
    "bco_pair": softplus(-0.125) + softplus(-0.25),
    "sppo_hard": (0.5 - 2) ** 2 + (-1 + 2) ** 2,
    "aot": 0.9 * softplus(-Z) + 0.1 * softplus(Z),
    "aot_unpaired": 0.9 * softplus(-Z) + 0.1 * softplus(Z),
    "apo_zero": sigmoid(-0.125) + sigmoid(-0.25),
    "apo_down": sigmoid(0.125) + sigmoid(-Z),
    "discopop": sigmoid(-Z / 0.05) * softplus(-Z) + sigmoid(Z / 0.05) * exp(-Z),
    "sft": 1.0,
    "sigmoid_norm": softplus(-0.25 * (0.5 - -1 / 2)),
}


@pytest.mark.parametrize("loss_type", losses.DPO_LOSSES)
def test_losses_by_hand(loss_type):
    options = {"loss_type": loss_type, "beta": 0.25, "label_smoothing": 0.1}
    loss, _ = losses.dpo_loss(PAIR, PAIR_MASK, ref_per_token_logps=PAIR_REF, **options)
    assert loss.item() == pytest.approx(BY_HAND[loss_type], abs=1e-12)


def test_two_pairs_in_a_step_of_four():
    """Log-ratios are 2 and -1 in the first pair, 3 and 2 in the second; the reference has 0 and 3, 0 and 0 nats."""
    ref = tensor([[0.0], [3.0]], [[0.0], [0.0]])
    logps, mask = ref + tensor([[2.0], [-1.0]], [[3.0], [2.0]]), torch.ones(2, 2, 1)
    given = {"ref_per_token_logps": ref, "beta": 0.5, "normalizer": SimpleNamespace(sequences=8, tokens=10)}
    expected = {"sigmoid": softplus(-1.5) + softplus(-0.5), "hinge": 0.5, "sft": -5 / 10 * 4}
    for name, total in expected.items():
        assert losses.dpo_loss(logps, mask, loss_type=name, **given)[0].item() == pytest.approx(total / 4), name
    both, _ = losses.dpo_loss(logps, mask, loss_type=["hinge", "sft"], loss_weights=[2.0, 3.0], **given)
    assert both.item() == pytest.approx((2 * 0.5 + 3 * expected["sft"]) / 4)


def test_a_divergence_that_grows_too_fast_is_bounded():
    """The divergence bounds its exponent by 80, so a chosen answer that is far more likely has a finite gradient."""
    logps = torch.tensor([[[0.0], [-1000.0]]], requires_grad=True)
    options = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 3.0}
    loss, _ = losses.dpo_loss(logps, torch.ones(1, 2, 1), ref_per_token_logps=logps.detach().flip(1), **options)
    assert loss.isfinite() and torch.autograd.grad(loss, logps)[0].isfinite().all()


def test_equal_rewards_are_no_success():
    _, metrics = losses.reward_loss(tensor(1.0), tensor(1.0))
    assert metrics["rewards/accuracies"].item() == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.float64], ids=str)
def test_ld_alpha_is_as_exact_as_the_log_probabilities(dtype):
    """A weight of 0.3 in float32 is off by 1e-8, so that -1 - 0.3 would not be -1.3."""
    assert losses.answer_logps(PAIR_REF, PAIR_MASK.to(dtype), 0.3).tolist() == [[-1.5, -1.3]]


@pytest.mark.parametrize("label", [True, False])
def test_a_kto_loss_near_zero_keeps_its_digits(label):
    """In float32, 1 - sigmoid(20) is 0, but the equal sigmoid(-20) is e^-20."""
    sign = 1 if label else -1
    logps, zero = torch.tensor([[20.0 * sign]], requires_grad=True), torch.zeros(1, 1)
    options = {"loss_type": "apo_zero_unpaired", "beta": 1.0, "ref_per_token_logps": zero}
    loss, _ = kto_loss(logps, torch.ones(1, 1), torch.tensor([label]), **options)
    assert loss.item() == pytest.approx(exp(-20), rel=1e-5)
    assert torch.autograd.grad(loss, logps)[0].item() == pytest.approx(-sign * exp(-20), rel=1e-5)


@pytest.mark.parametrize("loss_type, u, v, gradient", [
    ("apo_zero", 20.0, 0.0, (-exp(-20), 0.25)), ("apo_down", 0.0, -20.0, (0.25 - exp(-20), exp(-20))),
])  # fmt: skip
def test_the_gradient_of_an_apo_loss_keeps_its_digits(loss_type, u, v, gradient):
    """The slope of 1 - sigmoid(x) at x = 20 is -e^-20."""
    logps = torch.tensor([[[u], [v]]], requires_grad=True)
    options = {"loss_type": loss_type, "beta": 1.0, "ref_per_token_logps": torch.zeros(1, 2, 1)}
    loss, _ = losses.dpo_loss(logps, torch.ones(1, 2, 1), **options)
    assert torch.autograd.grad(loss, logps)[0].flatten().tolist() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "alpha_divergence"])
def test_the_score_of_a_policy_near_its_reference_keeps_its_digits(divergence):
    """Near the reference, f' of each divergence is the log-ratio itself, of order 1e-6 when a run starts."""
    log_ratio = torch.tensor([1e-6, -3e-6])
    assert losses.f_score(log_ratio, divergence).tolist() == pytest.approx([1e-6, -3e-6], rel=1e-5)


def test_kto_kl():
    """The KL estimate is the mean log-ratio of the rows, clamped to at least 0, and has no gradient."""
    assert kto_kl(PAIR[0], PAIR_REF[0], PAIR_MASK[0]).item() == 0
    kl = kto_kl(tensor([0.5], [1.0]).requires_grad_(), torch.zeros(2, 1), torch.ones(2, 1))
    assert kl.item() == 0.75 and not kl.requires_grad


@pytest.mark.parametrize("options, expected", [
    ({"loss_type": "dpo"}, "loss_type is 'dpo', but it must be one of " + ", ".join(losses.DPO_LOSSES)),
    ({"loss_type": []}, "name at least one loss"),
    ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "give one weight for each"),
    ({"loss_type": "exo_pair"}, "takes the logarithm of label_smoothing; set it above 0"),
    ({"beta": 0.0}, "beta is 0.0, but it must be greater than 0"), ({"beta": math.nan}, "beta is nan"),
    ({"label_smoothing": 0.5}, r"label_smoothing is 0.5, but it must be in \[0, 0.5\)"),
    ({"ref_per_token_logps": None}, "pass ref_per_token_logps or ref_logps"),
    ({"f_divergence_type": "kl"}, "'kl', but it must be one of reverse_kl, forward_kl, js_divergence, alpha"),
    ({"loss_type": "bco_pair", "f_divergence_type": "js_divergence"},
     r"\['bco_pair'\] is only defined for .* reverse_kl; with js_divergence use one of " + ", ".join(losses.F_LOSSES)),
    ({"mask": tensor([[1.0, 0.0], [0.0, 0.0]])}, "At least one answer has no tokens"),
])  # fmt: skip
def test_a_preference_loss_that_cannot_be_is_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        losses.dpo_loss(PAIR, **{"mask": PAIR_MASK, "ref_per_token_logps": PAIR_REF, **options})


@pytest.mark.parametrize(
    "loss_type, expected", [("kto", "loss_type kto needs kl"), ("bco", "must be one of kto, apo_zero")]
)
def test_a_kto_loss_that_cannot_be_is_refused(loss_type, expected):
    with pytest.raises(ValueError, match=expected):
        kto_loss(PAIR[0], PAIR_MASK[0], torch.ones(2), loss_type=loss_type, ref_per_token_logps=PAIR_REF[0])
