"""Test KL estimators, limits and errors of grpo_loss; tests/parity compares it with TRL."""

import math
from math import exp, log

import pytest
import torch

from minivlmrl.losses.grpo import AVERAGES, RATIOS, grpo_loss, kl_term
from minivlmrl.losses.ppo import token_rewards
from tests.helpers.by_hand import loss_of, near, policy, tensor

K3 = 0.5 + log(2) - 1  # of a token with probability 0.5 under the policy and 0.25 under the reference


@pytest.mark.parametrize("estimator, value, gradient", [
    ("k1", log(2), 1.0),  # 0.6931
    ("k2", log(2) ** 2 / 2, log(2)),  # 0.2402; its gradient is log pi / pi_ref
    ("k3", K3, 1 - 0.5),  # 0.1931; 1 - pi_ref / pi
    ("k1+", log(2), log(2)),  # with a plus, the gradient of k2
    ("k2+", log(2) ** 2 / 2, log(2)),
    ("k3+", K3, log(2)),
])  # fmt: skip
def test_kl_estimators(estimator, value, gradient):
    logps = tensor(log(0.5), log(0.25)).requires_grad_()
    found = kl_term(logps, torch.full_like(logps, log(0.25)), estimator)
    assert found.tolist() == near(value, 0.0)
    assert torch.autograd.grad(found[0], logps)[0][0].item() == near(gradient)


@pytest.mark.parametrize("scale", [1e-2, 1e-3, 1e-4, 1e-5])
def test_k3_is_exact_in_float32(scale):
    """For log-ratios d near 1e-4, exp(d) - d - 1 in float32 would have a negative mean."""
    d = scale * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    k3 = kl_term(torch.zeros_like(d), d, "k3")
    exact = kl_term(torch.zeros_like(d).double(), d.double(), "k3")
    assert k3.double().mean().item() == pytest.approx(exact.mean().item(), rel=1e-2)
    assert k3.min() >= -1e-7 * scale
    reward = token_rewards(torch.zeros(1), torch.zeros(1, len(d)), d[None], torch.ones(1, len(d)), 1.0, "k3")
    assert torch.equal(reward[0], -k3)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", AVERAGES)
def test_a_batch_without_tokens_has_the_loss_0(loss_type, level):
    """All metrics are finite, because NaN in one micro-batch would end a run."""
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    logps = torch.full_like(zeros, -1.0).requires_grad_()
    options = {"loss_type": loss_type, "importance_sampling_level": level, "max_completion_length": 3, "beta": 0.1}
    options |= {"entropies": zeros + 0.7, "top_entropy_quantile": 0.5, "entropy_coef": 0.2}
    given = {"old_per_token_logps": zeros, "ref_per_token_logps": zeros, **options}
    loss, metrics = loss_of(logps, zeros[:, 0] + 1, zeros, **given)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, logps)[0].any()
    assert all(value.isfinite() for value in metrics.values())


@pytest.mark.parametrize("level", RATIOS)
@pytest.mark.parametrize("loss_type", AVERAGES)
def test_padding_tokens_change_nothing(loss_type, level):
    """exp(9000) is infinite, and infinity times the mask 0 is NaN."""
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    options = {"loss_type": loss_type, "importance_sampling_level": level, "max_completion_length": 3, "beta": 0.1}
    results = []
    for padding in (0.0, 9000.0):
        old = torch.tensor([[-0.5, -2.0, padding], [-1.5, -padding, padding]])
        logps = torch.where(mask > 0, -1.0, -padding).requires_grad_()
        loss, metrics = loss_of(
            logps, torch.tensor([1.0, -1.0]), mask, old_per_token_logps=old, ref_per_token_logps=-2 * old, **options
        )
        [gradient] = torch.autograd.grad(loss, logps)
        results.append(torch.cat([loss[None], gradient.flatten(), torch.stack([*metrics.values()])]))
    assert results[0].isfinite().all()
    assert torch.equal(*results)


def test_beta_weights_the_kl_and_token_weights_the_policy_term():
    """The reference has 0.5 nats more; the ratio of 1 weights the KL and adds it to its gradient."""
    given = {"beta": 0.4, "ref_per_token_logps": tensor([-0.5]), "importance_sampling_ratio": 3.0}
    loss, gradient, metrics = policy([[1.0]], [2.0], **given)
    k3 = exp(0.5) - 1.5
    assert (loss, gradient, metrics["kl"]) == (near(-6 + 0.4 * k3), [near(-6 + 0.4 * (1 - exp(0.5) + k3))], near(k3))
    assert policy([[1.0]], [2.0], **given, use_bias_correction_kl=False)[1] == [near(-6 + 0.4 * (1 - exp(0.5)))]


def test_bounds_may_be_zero_equal_or_infinite():
    """Ratios 1.5 and 0.5 are clipped to 1 by an epsilon of 0, and not clipped by an infinite epsilon."""
    ratios, advantages = [[1.5], [0.5]], [1.0, -1.0]
    for low, high, expected in ((0.0, 0.0, 0.0), (0.0, 0.3, (-1.3 + 1.0) / 2), (0.3, 0.3, (-1.3 + 0.7) / 2)):
        assert policy(ratios, advantages, epsilon_low=low, epsilon_high=high)[0] == near(expected)
    metrics = policy([[1.0], [1.0]], advantages, epsilon_low=0.0, epsilon_high=0.0)[2]
    assert not any(metrics.values())  # a ratio at the bound is not clipped
    infinite = {"epsilon_low": math.inf, "epsilon_high": math.inf}
    loss, gradient, metrics = policy(ratios, advantages, **infinite)
    assert (loss, gradient) == (near((-1.5 + 0.5) / 2), near(-1.5 / 2, 0.5 / 2))
    assert not any(metrics.values())


@pytest.mark.parametrize("options, expected", [
    ({"epsilon_low": 0.3, "epsilon_high": 0.2}, r"epsilon_low is 0.3, but it must be between 0 and epsilon_high"),
    ({"epsilon_low": -0.3}, "epsilon_low is -0.3, but it must be "),
    ({"epsilon_low": math.nan}, "epsilon_low is nan, but it must be "),
    ({"beta": -0.1}, "beta is -0.1, but it must be "),
    ({"beta": math.nan}, "beta is nan, but it must be "),
    ({"beta": math.inf}, "beta is inf, but it must be "),
    ({"loss_type": "cispo"}, "cispo needs epsilon_high, the largest weight of a token; pass 5.0"),
    ({"loss_type": "gspo"}, "loss_type is 'gspo', but it must be one of grpo, dapo, dr_grpo, bnpo"),
    ({"importance_sampling_level": "row"}, "level is 'row', but it must be one of token, sequence, sequence_token"),
    ({"advantages": torch.ones(2)}, "grpo_loss got 2 advantages for 1 completions"),
    ({"beta": 0.1}, "beta is not 0, so grpo_loss needs ref_per_token_logps"),
    ({"loss_type": "dr_grpo"}, "dr_grpo needs a normalizer with max_completion_length"),
])  # fmt: skip
def test_mistakes_are_refused(options, expected):
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=expected):
        grpo_loss(one, mask=one, **{"advantages": one[0], **options})


@pytest.mark.parametrize("loss_type", ["dapo", "sapo"])
def test_an_unknown_option_is_told_with_the_name_of_the_loss(loss_type):
    logps = torch.zeros(1, 2)
    with pytest.raises(TypeError, match=r"^grpo_loss has no option 'epsilon' .*; epsilon is epsilon_low"):
        grpo_loss(logps, torch.ones(1), torch.ones(1, 2), loss_type=loss_type, epsilon=0.2)
