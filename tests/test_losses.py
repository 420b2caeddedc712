"""grpo_loss by arithmetic done by hand, and what holds for each loss of the family; against TRL: tests/parity."""

from math import exp, log

import pytest
import torch
from by_hand import near, tensor
from parity.policy_cells import policy_batch

from minivlmrl.algorithms import policy_losses
from minivlmrl.losses import Counts, PolicyLoss, grpo_loss, importance_ratio, kl_term

from policy_by_hand import OFF_POLICY, loss_of, policy


def value_and_gradient(batch, **options):
    logps = batch["per_token_logps"].clone().requires_grad_()
    loss, metrics = loss_of(**batch | {"per_token_logps": logps}, **options)
    return loss.detach(), torch.autograd.grad(loss, logps)[0], metrics


@pytest.mark.parametrize(
    "loss_type, divisors",
    [("grpo", (2, 6)), ("bnpo", (4, 4)), ("dapo", (4, 4)), ("dr_grpo", (20, 20)), ("luspo", (2, 2))],
)
def test_clipped_losses(loss_type, divisors):
    """Terms -min(r A, clip(r) A): -1.2 | 0.8, 1, 1.1. What is clipped (the first two) has no gradient.

    grpo divides by 2 rows, then by the row's 1 or 3 tokens; bnpo and dapo by 4 tokens; dr_grpo by 2 rows of 10; luspo
    by 2 rows. The gradient of a term is -r A.
    """
    loss, gradient, metrics = policy(*OFF_POLICY, loss_type=loss_type, max_completion_length=10)
    first, second = divisors
    assert loss == near(-1.2 / first + (0.8 + 1.0 + 1.1) / second)
    assert gradient == near(0, 0, 1.0 / second, 1.1 / second)
    shares = {"clip_ratio/low_mean": 1 / 4, "clip_ratio/high_mean": 1 / 4, "clip_ratio/region_mean": 2 / 4}
    assert metrics == {name: near(value) for name, value in shares.items()}


def test_the_two_bounds_of_the_clip():
    """Range [0.9, 1.3]: 1.5 becomes 1.3 for a good token, 0.5 becomes 0.9 for a bad one of advantage -2."""
    loss, *_ = policy([[1.5], [0.5]], [1.0, -2.0], loss_type="grpo", epsilon_low=0.1, epsilon_high=0.3)
    assert loss == near((-1.3 + 2 * 0.9) / 2)


# KL: the policy says 0.5, the reference 0.25, so log pi / pi_ref = log 2


def kl(estimator):
    """Value and gradient of the term at one on-policy token."""
    logps = tensor([log(0.5)]).requires_grad_()
    value = kl_term(logps, tensor([log(0.25)]), estimator)
    return value.item(), torch.autograd.grad(value.sum(), logps)[0].item()


@pytest.mark.parametrize("estimator, value, gradient", [
    ("k1", log(2), 1.0),  # 0.6931
    ("k2", log(2) ** 2 / 2, log(2)),  # 0.2402; its gradient is log pi / pi_ref
    ("k3", 0.5 + log(2) - 1, 1 - 0.5),  # 0.1931; 1 - pi_ref / pi
])  # fmt: skip
def test_kl_estimators(estimator, value, gradient):
    assert kl(estimator) == (near(value), near(gradient))


def test_bias_correction_in_the_loss():
    """Ratio 2 and k3 0.1931: 2 * 0.1931 with the correction, whose gradient is 2 log 2; 0.1931 without."""
    ref = {"ref_per_token_logps": tensor([-1.0 - log(2)]), "beta": 10.0}
    loss, gradient, metrics = policy([[2.0]], [0.0], **ref)
    k3 = 0.5 + log(2) - 1
    assert (loss, gradient) == (near(10 * 2 * k3), [near(10 * 2 * log(2))])
    assert metrics["kl"] == near(2 * k3)
    loss, gradient, metrics = policy([[2.0]], [0.0], use_bias_correction_kl=False, **ref)
    assert (loss, gradient, metrics["kl"]) == (near(10 * k3), [near(10 * 0.5)], near(k3))


@pytest.mark.parametrize(
    "loss_type, expected", [("grpo", -0.5), ("dr_grpo", -0.2), ("luspo", -1.0), ("dapo", -1.0), ("bnpo", -1.0)]
)
def test_a_truncated_row_teaches_nothing_but_counts_as_a_row(loss_type, expected):
    """Two rows of two tokens, advantages 1; the second is masked: terms -1, -1 by 2 rows, 2 rows of 5, or 2 tokens."""
    mask = tensor([1.0, 1.0], [0.0, 0.0])
    loss, _ = loss_of(torch.zeros(2, 2), torch.ones(2), mask, loss_type=loss_type, max_completion_length=5)
    assert loss.item() == near(expected)


@pytest.mark.parametrize("loss_type, expected", [
    ("grpo", 5 / 8), ("sapo", 5 / 8), ("rloo", 5 / 8), ("luspo", 11 / 8), ("dr_grpo", 11 / (8 * 10)),
    ("dapo", 11 / 20), ("cispo", 11 / 20), ("vespo", 11 / 20), ("bnpo", 11 / 4 * 2 / 8),
])  # fmt: skip
def test_divisors(loss_type, expected):
    """Terms 2 | 1, 1, 7 (means 2 and 3, sum 11) are two rows of a step of 8 rows and 20 tokens."""
    terms, mask = tensor([2.0, 5.0, 5.0], [1.0, 1.0, 7.0]), tensor([1.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    assert policy_losses.AVERAGES[loss_type](terms * mask, mask, Counts(8, 20, 10)).item() == near(expected)


def test_what_is_clipped_of_sequences_is_a_share_of_rows():
    """Ratios 2 (of 2 tokens) and 1 (of 1): half of the rows, not two thirds of the tokens."""
    given = {"old_per_token_logps": -tensor([log(2), log(2)], [0.0, 0.0]), "importance_sampling_level": "sequence"}
    _, metrics = loss_of(torch.zeros(2, 2).double(), torch.ones(2), tensor([1.0, 1.0], [1.0, 0.0]), **given)
    assert metrics["clip_ratio/high_mean"] == near(1 / 2)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_of_one_token_alone_the_means_are_that_token(level):
    """Beside it is padding. Its ratio 1.3 is the row's, clipped to 1.2; that is the loss, and all is clipped."""
    given = {"old_per_token_logps": -tensor([log(1.3), 0.0]), "importance_sampling_level": level, "loss_type": "dapo"}
    loss, metrics = loss_of(torch.zeros(1, 2).double(), torch.ones(1), tensor([1.0, 0.0]), **given)
    assert (loss.item(), metrics["clip_ratio/high_mean"]) == (near(-1.2), near(1.0))


def test_a_token_without_advantage_is_never_clipped():
    """Its gradient is 0 wherever its ratio is."""
    *_, metrics = policy([[5.0], [0.2]], [0.0, 0.0])
    assert set(metrics.values()) == {0.0}


def test_a_batch_with_nothing_to_learn_gives_zero_and_finite_gradients():
    batch = policy_batch(0)
    batch["mask"] = torch.zeros_like(batch["mask"])
    for loss_type in set(policy_losses.AVERAGES) - {"rloo"}:
        loss, gradient, _ = value_and_gradient(batch, loss_type=loss_type, max_completion_length=9, beta=0.1)
        assert loss == 0 and gradient.abs().max() == 0


@pytest.mark.parametrize(
    "level, expected, gradient",
    [  # log ratios 0.3 and -0.1; gradient of the first ratio to the two log-probabilities
        ("token", [exp(0.3), exp(-0.1), exp(9.0)], [exp(0.3), 0.0]),
        ("sequence", [exp(0.1)], [exp(0.1) / 2, exp(0.1) / 2]),
    ],
)
def test_importance_ratio(level, expected, gradient):
    """Two tokens and one of padding, which counts for nothing in a sequence."""
    log_ratio = tensor([0.3, -0.1, 9.0]).requires_grad_()
    ratio = importance_ratio(log_ratio, tensor([1.0, 1.0, 0.0]), level)
    assert ratio[0].tolist() == pytest.approx(expected)
    assert torch.autograd.grad(ratio[0, 0], log_ratio)[0].tolist()[0] == near(*gradient, 0.0)


def test_the_docstring_example():
    examples = {"grpo": -0.5, "bnpo": -0.5, "dapo": -0.5, "dr_grpo": -0.25, "luspo": -1.0}
    for loss_type, expected in examples.items():
        assert policy([[1.0, 1.0]], [0.5], loss_type=loss_type, max_completion_length=4)[0] == expected


def test_mistakes_are_refused():
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"epsilon_high is 0\.2, it must be at least 0\.3"):
        PolicyLoss(epsilon_low=0.3, epsilon_high=0.2)
    for name, value in (("beta", -0.1), ("beta", float("nan")), ("epsilon_low", -0.3), ("epsilon_low", float("nan"))):
        with pytest.raises(ValueError, match=f"{name} is {value}, it must be at least 0"):
            PolicyLoss(**{name: value})
    with pytest.raises(ValueError, match="2 advantages for 1 rows"):
        grpo_loss(one, torch.ones(2), one)
    with pytest.raises(ValueError, match="with beta over 0 the KL term needs ref_per_token_logps"):
        grpo_loss(one, one[0], one, PolicyLoss(beta=0.1))
    with pytest.raises(ValueError, match=r"loss_type dr_grpo divides by .*max_completion_length; give it"):
        grpo_loss(one, one[0], one, PolicyLoss("dr_grpo"))


@pytest.mark.parametrize("options, says", [
    ({"loss_type": "sapo"}, "loss_type is 'sapo'; known are grpo, dapo, dr_grpo"),
    ({"importance_sampling_level": "row"}, "importance_sampling_level is 'row'; known are token, sequence"),
    ({"loss_type": "gspo"},
     "loss_type is 'gspo'; known are grpo, dapo, dr_grpo; GSPO is importance_sampling_level='sequence'"),
    ({"kl_estimator": "k4"}, "kl_estimator is 'k4'; known are k1, k2, k3"),
])  # fmt: skip
def test_an_unknown_name_is_refused_with_the_known_ones(options, says):
    with pytest.raises(ValueError, match=f"^{says}$"):
        PolicyLoss(**options)
