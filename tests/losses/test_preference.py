"""Compare preference losses with arithmetic by hand; tests/parity compares with TRL."""

from math import exp, log
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.extras.kto import kto_kl, kto_loss
from minivlmrl.losses import preference as losses
from tests.helpers.by_hand import near, tensor


def softplus(x):
    return log(1 + exp(x))


# PAIR has a chosen answer with one token and the log-ratio u = -1 + 1.5 = 0.5, and a rejected answer with two tokens
# and the log-ratio v = -3 + 2 = -1. With beta = 0.5, beta u = 0.25, beta v = -0.5 and z = beta (u - v) = 0.75. Per
# token, u = 0.5 and v = -0.5.

PAIR = tensor([[-1.0, 7.0], [-1.5, -1.5]])
PAIR_REF = tensor([[-1.5, 3.0], [-1.0, -1.0]])
PAIR_MASK = tensor([[1.0, 0.0], [1.0, 1.0]])


def pair_loss(loss_type, **given):
    given = {"beta": 0.5, "mask": PAIR_MASK, "ref_per_token_logps": PAIR_REF, **given}
    return losses.dpo_loss(PAIR, loss_type=loss_type, **given)[0].item()


def pairs(chosen, rejected, ref_chosen, ref_rejected):
    logps = torch.stack([tensor(*chosen), tensor(*rejected)], 1)[..., None]
    ref = torch.stack([tensor(*ref_chosen), tensor(*ref_rejected)], 1)[..., None]
    return {"per_token_logps": logps, "ref_per_token_logps": ref, "mask": torch.ones_like(logps)}


def test_a_divergence_that_grows_too_fast_is_bounded():
    """The divergence bounds its exponent by 80, so a chosen answer that is far more likely has a finite gradient."""
    batch = pairs([0.0], [-1000.0], [-1000.0], [0.0])
    logps = batch.pop("per_token_logps").float().requires_grad_()
    loss, _ = losses.dpo_loss(logps, f_divergence_type="alpha_divergence", f_alpha_divergence_coef=3.0, **batch)
    assert loss.isfinite() and torch.autograd.grad(loss, logps)[0].isfinite().all()


TWO = pairs([-1.0, -2.0], [-3.0, -1.0], [-2.0, -1.0], [-1.0, -4.0])  # u = 1, -1 and v = -2, 3


def sigmoid(x):
    return 1 / (1 + exp(-x))


def cdpo(z):
    return 0.9 * softplus(-z) + 0.1 * softplus(z)


@pytest.mark.parametrize("loss_type, expected, options", [
    ("sigmoid", cdpo(0.75), {"label_smoothing": 0.1}), ("hinge", 0.25, {}), ("hinge", 0.0, {"beta": 2.0}),
    ("ipo", (0.5 + 0.5 - 1 / (2 * 0.5)) ** 2, {}),
    ("exo_pair", sigmoid(0.75) * (log(sigmoid(0.75)) - log(0.9)) + sigmoid(-0.75) * (log(sigmoid(-0.75)) - log(0.1)),
     {"label_smoothing": 0.1}),
    ("nca_pair", softplus(-0.25) + 0.5 * softplus(0.25) + 0.5 * softplus(-0.5), {}),
    ("robust", (0.9 * softplus(-0.75) - 0.1 * softplus(0.75)) / 0.8, {"label_smoothing": 0.1}),
    ("bco_pair", softplus(-0.25) + softplus(-0.5), {}), ("sppo_hard", 0.5**2 + 0.0, {}),
    ("apo_zero", sigmoid(-0.25) + sigmoid(-0.5), {}), ("apo_down", sigmoid(0.25) + sigmoid(-0.75), {}),
    ("discopop", sigmoid(-1.5) * softplus(-0.75) + sigmoid(1.5) * exp(-0.75), {"discopop_tau": 0.5}),
    ("sigmoid_norm", softplus(-0.5), {}), ("sft", 1.0, {}),
    (["sigmoid", "sft"], 0.8 * softplus(-0.75) + 0.2 * 1.0, {"loss_weights": [0.8, 0.2]}),
    (["sigmoid", "sft"], softplus(-0.75) / 4 + 1 / 10, {"normalizer": SimpleNamespace(sequences=8, tokens=10)}),
    ("sigmoid", exp(-0.5 - 0.25) * softplus(-0.75),
     {"use_weighting": True, "log_sum_sq_probs": tensor([[-0.5, 9.0], [-1.0, -1.5]])}),
    ("sigmoid", softplus(-0.5 * (1 - exp(-0.5) - 1 + exp(1.0))), {"f_divergence_type": "forward_kl"}),
    ("sigmoid", softplus(-0.5 * log((1 + exp(1.0)) / (1 + exp(-0.5)))), {"f_divergence_type": "js_divergence"}),
    ("sigmoid", softplus(-0.5 * (exp(-0.5 * 0.5) - exp(-0.5 * -1)) / -0.5), {"f_divergence_type": "alpha_divergence"}),
    ("sigmoid_norm", softplus(-0.5 * (1 - exp(-0.5) - (1 - exp(1.0)) / 2)), {"f_divergence_type": "forward_kl"}),
    ("aot", (cdpo(0.0) + cdpo(-0.5)) / 2, {**TWO, "label_smoothing": 0.1}),  # sorted margins -1, 2 and -1, 3
    ("aot_unpaired", (cdpo(0.5) + cdpo(-1.0)) / 2, {**TWO, "label_smoothing": 0.1}),
])  # fmt: skip
def test_a_preference_loss_by_hand(loss_type, expected, options):
    given = {"per_token_logps": PAIR, "mask": PAIR_MASK, "ref_per_token_logps": PAIR_REF, "beta": 0.5, **options}
    assert losses.dpo_loss(**given, loss_type=loss_type)[0].item() == near(expected)


def test_metrics_of_a_pair():
    _, metrics = losses.dpo_loss(PAIR, PAIR_MASK, ref_per_token_logps=PAIR_REF, beta=0.5)
    assert {name.split("/", 1)[1] if name.startswith("rewards") else name: x.item() for name, x in metrics.items()} == {
        "chosen": 0.25, "rejected": -0.5, "margins": 0.75, "accuracies": 1.0, "logps/chosen": -1.0,
        "logps/rejected": -3.0,
    }  # fmt: skip


def test_a_reward_loss_with_all_options():
    chosen, rejected, margin = tensor(2.0, 1.0), tensor(1.0, 1.0), tensor(0.5, 0.0)
    options = {"margin": margin, "center_rewards_coefficient": 0.1}
    total = softplus(-0.5) + 0.9 + softplus(0.0) + 0.4
    for normalizer, num_pairs in ((None, 2), (SimpleNamespace(sequences=8), 4)):
        loss, metrics = losses.reward_loss(chosen, rejected, **options, normalizer=normalizer)
        assert loss.item() == near(total / num_pairs)
        assert metrics["rewards/accuracies"].item() == 0.5  # equal rewards are no success


def test_reference_sums_stand_for_those_of_tokens():
    """With ld_alpha 0.5, the second token of the rejected answer counts half, so its sum is -1.5 instead of -2."""
    for ld_alpha, rejected in ((None, -2.0), (0.5, -1.5)):
        sums = losses.answer_logps(PAIR_REF, PAIR_MASK, ld_alpha)
        assert sums.tolist() == [[-1.5, rejected]]
        given = {"ref_per_token_logps": None, "ref_logps": sums}
        assert pair_loss("ipo", ld_alpha=ld_alpha, **given) == pair_loss("ipo", ld_alpha=ld_alpha)


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
    ({"label_smoothing": 0.5}, r"label_smoothing is 0.5, but it must be in \[0, 0.5\)"),
    ({"ref_per_token_logps": None}, "pass ref_per_token_logps or ref_logps"),
    ({"f_divergence_type": "kl"}, "'kl', but it must be one of reverse_kl, forward_kl, js_divergence, alpha"),
    ({"loss_type": "bco_pair", "f_divergence_type": "js_divergence"},
     r"\['bco_pair'\] is only defined for .* reverse_kl; with js_divergence use one of " + ", ".join(losses.F_LOSSES)),
    ({"loss_type": "aot", "use_weighting": True}, r"does not work with loss_type \['aot'\], which sorts the pairs"),
    ({"use_weighting": True}, "use_weighting needs log_sum_sq_probs"),
    ({"mask": tensor([[1.0, 0.0], [0.0, 0.0]])}, "At least one answer has no tokens"),
])  # fmt: skip
def test_a_preference_loss_that_cannot_be_is_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        pair_loss(**{"loss_type": "sigmoid", **options})


@pytest.mark.parametrize(
    "loss_type, expected", [("kto", "loss_type kto needs kl"), ("bco", "must be one of kto, apo_zero")]
)
def test_a_kto_loss_that_cannot_be_is_refused(loss_type, expected):
    with pytest.raises(ValueError, match=expected):
        kto_loss(PAIR[0], PAIR_MASK[0], torch.ones(2), loss_type=loss_type, ref_per_token_logps=PAIR_REF[0])
