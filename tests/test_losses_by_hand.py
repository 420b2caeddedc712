"""Each formula once, with numbers that a reader can follow by hand; what only TRL can tell is in test_losses.py."""

import math
from math import exp, log

import pytest
import torch
from torch import nn

from minivlmrl.advantages import group_advantages
from minivlmrl.algorithms.baselines import leave_one_out, normalize_then_sum, token_rewards
from minivlmrl.algorithms.reference import Reference
from minivlmrl.losses import (
    CORRECTION_MODES,
    IMPORTANCE_SAMPLING_LEVELS,
    KL_ESTIMATORS,
    LOSS_TYPES,
    aggregate,
    grpo_loss,
    importance_ratio,
    kl_term,
    rollout_importance_ratio,
    top_entropy_threshold,
)
from minivlmrl.rewards import soft_overlong_punishment
from minivlmrl.run.config import ReferenceConfig

NAN = float("nan")


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def near(*values):
    """For numbers that are written with seven digits or computed with math."""
    return pytest.approx(values[0] if len(values) == 1 else list(values), abs=1e-6)


def sigmoid(x):
    return 1 / (1 + exp(-x))


def softplus(x):
    """-log sigmoid(-x)."""
    return log(1 + exp(x))


def policy(ratios, advantages, **options):
    """grpo_loss of completions with given ratios r_t to the old policy; every token has log-probability -1.

    Returns the loss, its gradient to the log-probabilities of all real tokens in order, and the diagnostics.
    """
    T = max(map(len, ratios))
    mask = tensor(*[[1.0] * len(row) + [0.0] * (T - len(row)) for row in ratios])
    logps = torch.full_like(mask, -1.0).requires_grad_()
    old = logps.detach() - tensor(*[[log(r) for r in row] + [5.0] * (T - len(row)) for row in ratios])
    loss, diagnostics = grpo_loss(logps, tensor(*advantages), mask, **{"old_per_token_logps": old, **options})
    gradient = torch.autograd.grad(loss, logps)[0][mask.bool()].tolist()
    return loss.item(), gradient, {name: value.item() for name, value in diagnostics.items()}


# policy gradients: one token of ratio 1.5 with advantage 1 | ratios 0.5, 1, 1.1 with advantage -1

OFF_POLICY = ([[1.5], [0.5, 1.0, 1.1]], [1.0, -1.0])


@pytest.mark.parametrize(
    "loss_type, divisors",
    [("grpo", (2, 6)), ("bnpo", (4, 4)), ("dapo", (4, 4)), ("dr_grpo", (20, 20)), ("luspo", (2, 2))],
)
def test_clipped_losses(loss_type, divisors):
    """Terms -min(r A, clip(r) A): -1.2 | 0.8, 1, 1.1. What is clipped (the first two) has no gradient.

    grpo divides by 2 rows, then by the row's 1 or 3 tokens; bnpo and dapo by 4 tokens; dr_grpo by 2 rows of 10; luspo
    by 2 rows. The gradient of a term is -r A.
    """
    loss, gradient, diagnostics = policy(*OFF_POLICY, loss_type=loss_type, max_completion_length=10)
    first, second = divisors
    assert loss == near(-1.2 / first + (0.8 + 1.0 + 1.1) / second)
    assert gradient == near(0, 0, 1.0 / second, 1.1 / second)
    shares = {"clip_ratio/low_mean": 1 / 4, "clip_ratio/high_mean": 1 / 4, "clip_ratio/region_mean": 2 / 4}
    assert diagnostics == {name: near(value) for name, value in shares.items()}


def test_the_two_bounds_of_the_clip():
    """Range [0.9, 1.3]: 1.5 becomes 1.3 for a good token, 0.5 becomes 0.9 for a bad one of advantage -2."""
    loss, *_ = policy([[1.5], [0.5]], [1.0, -2.0], loss_type="grpo", epsilon_low=0.1, epsilon_high=0.3)
    assert loss == near((-1.3 + 2 * 0.9) / 2)


def test_rloo():
    """Ratios of whole rows: 1.5 and 0.5 * 1 * 1.1 = 0.55; terms -1.2 and 0.8, both clipped; their mean is -0.2."""
    loss, gradient, _ = policy(*OFF_POLICY, loss_type="rloo")
    assert loss == near(-0.2) and gradient == near(0, 0, 0, 0)
    # with room for 0.55 the second term is 0.55, and each of its three tokens has the gradient 0.55 / 2
    loss, gradient, _ = policy(*OFF_POLICY, loss_type="rloo", epsilon_low=0.5, epsilon_high=0.5)
    assert loss == near((-1.5 + 0.55) / 2) and gradient == near(-1.5 / 2, 0.55 / 2, 0.55 / 2, 0.55 / 2)


def test_cispo():
    """Weights min(r, 1.2): 1.2 | 0.5, 1, 1.1. Terms -w A log pi with log pi -1: 1.2 | -0.5, -1, -1.1; by 4 tokens.

    The gradient is -w A / 4: the clipped token keeps one, of the size of the bound.
    """
    loss, gradient, diagnostics = policy(*OFF_POLICY, loss_type="cispo", epsilon_high=1.2)
    assert loss == near((1.2 - 0.5 - 1.0 - 1.1) / 4)
    assert gradient == near(-1.2 / 4, 0.5 / 4, 1.0 / 4, 1.1 / 4)
    assert diagnostics == {"cispo_clip_ratio": 0.25}


def test_sapo():
    """tau 1 for the good row, 1.05 for the bad: terms -4 s(0.5) | (4 / 1.05) (s(-0.525), s(0), s(0.105)).

    At r = 1 the gate's slope is 1: the gradient of that token is -A / 3 / 2.
    """
    loss, gradient, _ = policy(*OFF_POLICY, loss_type="sapo")
    bad = 4 / 1.05 * (sigmoid(-0.525) + 0.5 + sigmoid(0.105))
    assert loss == near((-4 * sigmoid(0.5) + bad / 3) / 2)
    assert gradient[2] == near(1 / 6)
    assert gradient[0] == near(-4 * sigmoid(0.5) * sigmoid(-0.5) * 1.5 / 2)  # s' = s(x) s(-x), dr / dlogp = r


def test_sapo_temperatures():
    """Advantage 0 counts as negative (its term is 0 anyway); tau 2 and 4: -(4 / 2) s(2 * 0.5), (4 / 4) s(4 * 0.5)."""
    options = {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 4.0}
    loss, *_ = policy([[1.5], [1.5], [1.5]], [1.0, -1.0, 0.0], **options)
    assert loss == near((-2 * sigmoid(1.0) + sigmoid(2.0)) / 3)


def test_vespo():
    """W = 1.5 and 0.55; phi = 1.5^2 e^(3 (1 - 1.5)) = 0.5020429 and 0.55^3 e^(2 (1 - 0.55)) = 0.4092165.

    Terms -phi A log pi: 0.50204 | three times -0.40922; by 4 tokens. The gradient is -phi A / 4.
    """
    loss, gradient, diagnostics = policy(*OFF_POLICY, loss_type="vespo")
    good, bad = 0.5020429, 0.4092165
    assert (1.5**2 * exp(-1.5), 0.55**3 * exp(0.9)) == (near(good), near(bad))
    assert loss == near((good - 3 * bad) / 4)
    assert gradient == near(-good / 4, bad / 4, bad / 4, bad / 4)
    assert diagnostics == {"vespo/phi_seq_mean": near((good + bad) / 2)}


def test_vespo_parameters():
    """W = 2: with k 1 and lambda 4 phi = 2 e^-4 for A >= 0, with k 2 and lambda 0 (at least 1e-4) 4 for A < 0."""
    shape = {"vespo_k_pos": 1.0, "vespo_lambda_pos": 4.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 0.0}
    _, gradient, _ = policy([[2.0], [2.0]], [1.0, -1.0], loss_type="vespo", **shape)
    assert gradient == near(-2 * exp(-4) / 2, 4 * exp(-1e-4) / 2)


def test_vespo_takes_the_samplers_mismatch_into_its_weight():
    """W = 1.5 * 0.5 * 2 * 2 = 3: phi = 9 e^-6 for both tokens, and nothing is multiplied afterwards."""
    loss, *_ = policy([[1.5, 0.5]], [1.0], loss_type="vespo", importance_sampling_ratio=tensor([2.0, 2.0]))
    assert loss == near(9 * exp(-6))


def test_vespo_counts_a_masked_token_as_one_in_a_hundred_million():
    """A ratio of 0 has no logarithm: W = 1e-8, and with k 0.5 phi = 1e-4 e^3."""
    loss, *_ = policy([[1.0]], [1.0], loss_type="vespo", vespo_k_pos=0.5, importance_sampling_ratio=tensor([0.0]))
    assert loss == pytest.approx(1e-4 * exp(3), rel=1e-6)


@pytest.mark.parametrize(
    "level, expected, gradient",
    [  # log ratios 0.3 and -0.1; gradient of the first ratio to the two log-probabilities
        ("token", [exp(0.3), exp(-0.1)], [exp(0.3), 0.0]),
        ("sequence", [exp(0.1)], [exp(0.1) / 2, exp(0.1) / 2]),
        ("sequence_token", [exp(0.1), exp(0.1)], [exp(0.1), 0.0]),
        ("sequence_sum", [exp(0.2)], [exp(0.2), exp(0.2)]),
    ],
)
def test_importance_ratio(level, expected, gradient):
    """Two tokens and one of padding, which counts for nothing."""
    log_ratio = tensor([0.3, -0.1, 9.0]).requires_grad_()
    ratio = importance_ratio(log_ratio, tensor([1.0, 1.0, 0.0]), level)
    assert (
        ratio[0, : len(expected)].tolist() == near(*expected)
        if len(expected) > 1
        else ratio.item() == near(expected[0])
    )
    assert torch.autograd.grad(ratio[0, 0], log_ratio)[0].tolist()[0] == near(*gradient, 0.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gspo_token_is_gspo_where_a_row_has_one_advantage(advantage):
    """Row means of the gradient: s (1/n) sum_t grad log pi_t both ways; clipped rows (the last) have none in both."""
    ratios = [[1.1, 0.9, 1.3], [1.05], [2.0, 1.5]]
    both = [
        policy(ratios, [advantage, 0.5, 1.0], loss_type="grpo", importance_sampling_level=level, beta=0.0)
        for level in ("sequence", "sequence_token")
    ]
    assert both[0][0] == near(both[1][0]) and both[0][1] == near(*both[1][1])
    assert both[0][1][-1] == 0 and both[0][1][0] != 0


def test_gspo_token_gives_each_token_its_own_advantage():
    """Sequence ratio e^0.1 for both tokens, advantages 1 and -0.5: the gradients are -e^0.1 A_t / 2."""
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence_token"}
    loss, gradient, _ = policy([[exp(0.3), exp(-0.1)]], [[1.0, -0.5]], **options)
    assert loss == near(-exp(0.1) * 0.5 / 2) and gradient == near(-exp(0.1) / 2, 0.5 * exp(0.1) / 2)


@pytest.mark.parametrize(
    "ratio, advantage, delta, loss, gradient",
    [
        (2.0, -1.0, None, 2.0, 2.0),
        (2.0, -1.0, 1.6, 1.6, 0.0),  # bounded above: no gradient either
        (1.5, -1.0, 1.6, 1.5, 1.5),  # below delta: as without
        (2.0, 1.0, 1.6, -1.2, 0.0),  # a good one is clipped at 1.2 before delta matters
    ],
)
def test_delta(ratio, advantage, delta, loss, gradient):
    assert policy([[ratio]], [advantage], delta=delta)[:2] == (near(loss), [near(gradient)])


# KL: the policy says 0.5, the reference 0.25, so log pi / pi_ref = log 2


def kl(estimator, straight_through=False, weighted=False):
    """Value and gradient of the term at one on-policy token."""
    logps = tensor([log(0.5)]).requires_grad_()
    value = kl_term(logps, tensor([log(0.25)]), estimator, straight_through)
    value = value * (logps - logps.detach()).exp() if weighted else value
    return value.item(), torch.autograd.grad(value.sum(), logps)[0].item()


@pytest.mark.parametrize(
    "estimator, value, gradient",
    [
        ("k1", log(2), 1.0),  # 0.6931
        ("k2", log(2) ** 2 / 2, log(2)),  # 0.2402; its gradient is log pi / pi_ref
        ("k3", 0.5 + log(2) - 1, 1 - 0.5),  # 0.1931; 1 - pi_ref / pi
    ],
)
def test_kl_estimators(estimator, value, gradient):
    assert kl(estimator) == (near(value), near(gradient))
    assert kl(estimator, straight_through=True) == (near(value), near(log(2)))  # k2's gradient, whatever the value


def test_bias_correction_gives_k3_the_gradient_of_k2():
    """(w k3)' = k3 + k3' = (0.5 + log 2 - 1) + (1 - 0.5) = log 2; the value stays k3's, as w = 1."""
    assert kl("k3", weighted=True) == (near(0.5 + log(2) - 1), near(log(2)))


def test_bias_correction_in_the_loss():
    """Ratio 2 and k3 0.1931: 2 * 0.1931 with the correction, whose gradient is 2 log 2; 0.1931 without."""
    ref = {"ref_per_token_logps": tensor([-1.0 - log(2)]), "beta": 10.0}
    loss, gradient, diagnostics = policy([[2.0]], [0.0], **ref)
    k3 = 0.5 + log(2) - 1
    assert (loss, gradient) == (near(10 * 2 * k3), [near(10 * 2 * log(2))])
    assert diagnostics["kl"] == near(2 * k3)
    loss, gradient, diagnostics = policy([[2.0]], [0.0], use_bias_correction_kl=False, **ref)
    assert (loss, gradient, diagnostics["kl"]) == (near(10 * k3), [near(10 * 0.5)], near(k3))


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_loss_takes_the_estimator_that_is_asked_for(estimator):
    ref = {"ref_per_token_logps": tensor([-1.0 - log(2)]), "beta": 1.0, "use_bias_correction_kl": False}
    for straight_through in (False, True):
        value, gradient = kl(estimator, straight_through)
        loss = policy([[1.0]], [0.0], kl_estimator=estimator, kl_straight_through=straight_through, **ref)
        assert loss[:2] == (near(value), [near(gradient)])


def expected_kl_gradients():
    """Expected gradients over a vocabulary of three, every token drawn with its own probability, to the logits."""
    logits, ref = tensor(0.3, -0.5, 1.1).requires_grad_(), tensor(0.2, 0.5, 0.3).log()
    logps = logits.log_softmax(0)
    p, ratio = logps.detach().exp(), (logps - logps.detach()).exp()

    def gradient(x):
        return torch.autograd.grad(x, logits, retain_graph=True)[0]

    found = {
        "KL(pi, ref)": gradient((logps.exp() * (logps - ref)).sum()),
        "KL(ref, pi)": gradient((ref.exp() * (ref - logps)).sum()),
    }
    for estimator in KL_ESTIMATORS:
        for straight_through in (False, True):
            term = kl_term(logps, ref, estimator, straight_through)
            name = estimator + " straight-through" * straight_through
            found[name], found[name + " weighted"] = gradient((p * term).sum()), gradient((p * ratio * term).sum())
    return found


@pytest.mark.parametrize(
    "term, is_the_gradient_of",
    [
        ("k2", "KL(pi, ref)"),
        ("k1 straight-through", "KL(pi, ref)"),
        ("k2 straight-through", "KL(pi, ref)"),
        ("k3 straight-through", "KL(pi, ref)"),
        ("k1 weighted", "KL(pi, ref)"),
        ("k3 weighted", "KL(pi, ref)"),
        ("k3", "KL(ref, pi)"),  # the other direction
    ],
)
def test_expected_gradients_of_kl(term, is_the_gradient_of):
    found = expected_kl_gradients()
    assert found["KL(pi, ref)"].tolist() != near(*found["KL(ref, pi)"].tolist())
    assert found[term].tolist() == near(*found[is_the_gradient_of].tolist())


def test_k1_alone_has_no_expected_gradient():
    assert expected_kl_gradients()["k1"].tolist() == near(0, 0, 0)


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_correction_gives_every_estimator_the_gradient_of_the_kl_off_policy_too(estimator, straight_through):
    """Every token of a vocabulary of three, drawn with the old policy's probability, as a row of its own."""
    logits, ref = tensor(0.3, -0.5, 1.1).requires_grad_(), tensor(0.2, 0.5, 0.3).log()
    logps, old = logits.log_softmax(0), tensor(0.5, 0.3, 0.2).log()
    losses = [
        grpo_loss(
            logps[i].view(1, 1), torch.zeros(1), torch.ones(1, 1), old_per_token_logps=old[i].view(1, 1),
            ref_per_token_logps=ref[i].view(1, 1), beta=1.0, kl_estimator=estimator,
            kl_straight_through=straight_through,
        )[0]
        for i in range(3)
    ]  # fmt: skip
    kl = (logps.exp() * (logps - ref)).sum()
    expected, found = (
        torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (kl, (old.exp() * torch.stack(losses)).sum())
    )
    assert found.tolist() == near(*expected.tolist())


# masks, weights and the entropy bonus: ratio 1, advantage 1, so each term is -1 and its gradient -1 / tokens

ENTROPIES = tensor([0.1, 0.2, 0.3, 0.4])


def test_top_entropy_quantile():
    """The upper fifth of 0.1, 0.2, 0.3, 0.4 begins at 0.1 + 0.8 * 0.3 = 0.34: one term stays, and the divisor 4."""
    assert top_entropy_threshold(ENTROPIES, torch.ones(1, 4), 0.2).item() == near(0.34)
    loss, gradient, _ = policy([[1.0] * 4], [1.0], top_entropy_quantile=0.2, entropies=ENTROPIES)
    assert loss == -1 / 4 and gradient == [0.0, 0.0, 0.0, -0.25]


def test_a_given_entropy_threshold_goes_before_the_batchs_own():
    options = {"top_entropy_quantile": 0.5, "entropies": ENTROPIES, "entropy_threshold": 0.15}
    assert policy([[1.0] * 4], [1.0], **options)[0] == -3 / 4


def test_the_entropy_mask_leaves_the_kl_alone():
    """No term is left, but all four tokens keep their KL log 2 (k1)."""
    options = {"top_entropy_quantile": 0.5, "entropies": ENTROPIES, "entropy_threshold": 9.0, "kl_estimator": "k1"}
    loss, *_ = policy([[1.0] * 4], [1.0], beta=1.0, ref_per_token_logps=torch.full((1, 4), -1 - log(2)), **options)
    assert loss == near(log(2))


def test_no_tokens_have_an_infinite_entropy_threshold():
    assert top_entropy_threshold(ENTROPIES, torch.zeros(1, 4), 0.5).item() == math.inf


@pytest.mark.parametrize(
    "options, bonus",
    [
        ({}, 0.25),  # the mean of 0.1, 0.2, 0.3, 0.4
        ({"top_entropy_quantile": 0.5}, 0.35),  # of the tokens that are left: 0.3, 0.4
        ({"num_sequences": 4}, 0.25 / 4),  # this batch is one row of four
        ({"num_sequences": 4, "num_entropy_tokens": 10}, 1.0 / 10),  # the sum by the tokens of the whole step
    ],
)
@pytest.mark.parametrize("loss_type", ["dapo", "luspo"])
def test_entropy_bonus(options, bonus, loss_type):
    """loss - 0.5 * mean entropy, for every loss type alike; more entropy is less loss."""
    entropies = ENTROPIES.clone().requires_grad_()
    loss, _ = grpo_loss(
        torch.zeros(1, 4, dtype=torch.float64), tensor(0.0), torch.ones(1, 4), entropies=entropies, entropy_coef=0.5,
        loss_type=loss_type, **options,
    )  # fmt: skip
    assert loss.item() == near(-0.5 * bonus)
    assert torch.autograd.grad(loss, entropies)[0][0, 3].item() < 0


@pytest.mark.parametrize(
    "advantage, drift, kept",
    [(-1.0, [0.3, 0.2], False), (-1.0, [0.3, 0.1], True), (1.0, [9.0, 9.0], True), (-1.0, [0.3, NAN], True)],
)
def test_off_policy_mask(advantage, drift, kept):
    """Threshold 0.2: mean drifts 0.25, 0.2, 9 and (0.3 + 0) / 2 = 0.15; only a bad row that is over it goes."""
    sampling = tensor([d - 1.0 for d in drift])
    options = {"sampling_per_token_logps": sampling, "off_policy_mask_threshold": 0.2 + 1e-9}
    assert policy([[1.0, 1.0]], [advantage], **options)[0] == (-advantage if kept else 0.0)


def test_off_policy_mask_takes_the_old_policy_where_the_sampler_is_not_recorded():
    """Ratio e^-0.3: the old policy made the tokens likelier by 0.3 nats."""
    for threshold, loss in ((0.2, 0.0), (0.4, 0.8)):  # 0.8: e^-0.3 = 0.74 is clipped
        assert policy([[exp(-0.3)]], [-1.0], off_policy_mask_threshold=threshold)[0] == near(loss)


def test_importance_sampling_ratio_weighs_the_term_and_not_the_kl():
    """Terms -1 * 0.5 and -1 * 3, KL log 2 each."""
    options = {"beta": 1.0, "kl_estimator": "k1", "ref_per_token_logps": torch.full((1, 2), -1 - log(2))}
    loss, *_ = policy([[1.0, 1.0]], [1.0], importance_sampling_ratio=tensor([0.5, 3.0]), **options)
    assert loss == near((-0.5 - 3.0) / 2 + log(2))


@pytest.mark.parametrize(
    "mode, clip, expected",
    [
        ("token_truncate", (1.5, 0.6), [1.5, 0.6, 1.0]),
        ("token_mask", (1.5, 0.6), [0.0, 0.0, 1.0]),
        ("sequence_truncate", (1.5, 0.6), [0.6]),
        ("sequence_mask", (1.5, 0.6), [0.0]),
        ("token_truncate", (None, None), [2.0, 0.25, 1.0]),
        ("token_mask", (1.5, None), [0.0, 0.25, 1.0]),
        ("sequence_truncate", (0.4, None), [0.4]),
        ("sequence_mask", (3.0, None), [0.5]),
    ],
)
def test_rollout_importance_ratio(mode, clip, expected):
    """Old / sampler: 2, 0.25, not recorded (1), padding (1); the row's product is 0.5."""
    old = tensor([-1.0, -1.0, -1.0, 7.0])
    sampling = old - tensor([log(2), log(0.25), NAN, 9.0])
    mask = tensor([1.0, 1.0, 1.0, 0.0])
    ratio = rollout_importance_ratio(old, sampling, mask, mode=mode, clip_max=clip[0], clip_min=clip[1])
    assert ratio.shape == ((1, 4) if mode.startswith("token") else (1, 1))
    assert ratio[0, :3].tolist() == pytest.approx(expected)


def test_the_default_correction_masks_rows_over_three():
    """Products 4 and 2.9 of two tokens each."""
    ratio = rollout_importance_ratio(tensor([log(2), log(2)], [log(2.9), 0.0]), torch.zeros(2, 2), torch.ones(2, 2))
    assert ratio.flatten().tolist() == near(0.0, 2.9)


@pytest.mark.parametrize(
    "loss_type, expected", [("grpo", -0.5), ("dr_grpo", -0.2), ("luspo", -1.0), ("dapo", -1.0), ("bnpo", -1.0)]
)
def test_a_truncated_row_teaches_nothing_but_counts_as_a_row(loss_type, expected):
    """Two rows of two tokens, advantages 1; the second is masked: terms -1, -1 by 2 rows, 2 rows of 5, or 2 tokens."""
    mask = tensor([1.0, 1.0], [0.0, 0.0])
    loss, _ = grpo_loss(torch.zeros(2, 2), torch.ones(2), mask, loss_type=loss_type, max_completion_length=5)
    assert loss.item() == near(expected)


@pytest.mark.parametrize(
    "loss_type, expected",
    [
        ("grpo", 5 / 8), ("sapo", 5 / 8), ("rloo", 5 / 8), ("luspo", 11 / 8), ("dr_grpo", 11 / (8 * 10)),
        ("dapo", 11 / 20), ("cispo", 11 / 20), ("vespo", 11 / 20), ("bnpo", 11 / 4 * 2 / 8),
    ],
)  # fmt: skip
def test_divisors(loss_type, expected):
    """Terms 2 | 1, 1, 7 (means 2 and 3, sum 11) are two rows of a step of 8 rows and 20 tokens."""
    terms, mask = tensor([2.0, 5.0, 5.0], [1.0, 1.0, 7.0]), tensor([1.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    counts = {"max_completion_length": 10, "num_sequences": 8, "num_tokens": 20}
    assert aggregate(terms, mask, loss_type, **counts).item() == near(expected)


def test_the_entropy_bonus_without_its_count_depends_on_how_a_step_is_split():
    """Entropies 1 | 0, 0, 0 in rows of 1 and 3 tokens: their mean is 1 / 4, but that of the rows' means 1 / 2."""
    rows, mask = tensor([1.0, 0.0, 0.0], [0.0, 0.0, 0.0]), tensor([1.0, 0.0, 0.0], [1.0, 1.0, 1.0])

    def bonus(part, **counts):
        zeros = torch.zeros_like(rows[part])
        return -grpo_loss(zeros, zeros[:, 0], mask[part], entropies=rows[part], entropy_coef=1.0, **counts)[0].item()

    first, second = slice(0, 1), slice(1, 2)
    assert bonus(slice(0, 2)) == 1 / 4
    assert bonus(first, num_sequences=2) + bonus(second, num_sequences=2) == 1 / 2
    assert bonus(first, num_entropy_tokens=4) + bonus(second, num_entropy_tokens=4) == 1 / 4


# advantages and rewards


def test_centring_alone():
    """Groups 3, 1 and 0, 0: less their means 2 and 0."""
    assert group_advantages(tensor(3.0, 1.0, 0.0, 0.0), 2, "none").tolist() == [1.0, -1.0, 0.0, 0.0]


def test_normalize_then_sum():
    """One group of two, weights 1 and 3. Columns (0, 2) and (10, 0): both become -1, 1 and 1, -1 times 0.7071.

    Their sums with the weights: 2 * 0.7071 and -2 * 0.7071; normalised over the batch of two once more: 0.7071, -0.7071
    (each time 1e-4 is added to the standard deviation, which the comparison forgives).
    """
    advantages = normalize_then_sum(tensor([0.0, 10.0], [2.0, 0.0]), tensor(1.0, 3.0), 2)
    assert advantages.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)


def test_normalize_then_sum_is_centred_by_group_and_scaled_by_batch():
    """Groups (0, 1) and (5, 9) both become -0.7071, 0.7071: how far rewards spread in a group is forgotten.

    Over the batch the standard deviation is sqrt(4 * 0.5 / 3) = 0.8165, so +-0.7071 / 0.8165 = +-0.8660.
    """
    advantages = normalize_then_sum(tensor([0.0], [1.0], [5.0], [9.0]), tensor(1.0), 2)
    assert advantages.tolist() == pytest.approx([-0.8660, 0.8660, -0.8660, 0.8660], abs=1e-3)


def test_normalize_then_sum_leaves_out_what_was_not_judged():
    """Group (0, 1, not judged): the first two are as in a group of two, the third gets nothing.

    Where the second function judges nobody it adds nothing.
    """
    advantages = normalize_then_sum(tensor([0.0, NAN], [1.0, NAN], [NAN, NAN]), tensor(1.0, 1.0), 3)
    assert advantages.tolist() == pytest.approx([-0.7071, 0.7071, 0.0], abs=1e-3)


def test_leave_one_out():
    """1, 0, 0: 1 - 0, 0 - 1/2, 0 - 1/2. And 3, 1, 2: 3 - 3/2, 1 - 5/2, 2 - 4/2."""
    advantages = leave_one_out(tensor(1.0, 0.0, 0.0, 3.0, 1.0, 2.0), 3)
    assert advantages.tolist() == [1.0, -0.5, -0.5, 1.5, -1.5, 0.0]


def test_leave_one_out_without_what_was_not_judged():
    """(1, NaN, 0): each against the one other; (NaN, 4, NaN): no other one; (NaN, NaN, NaN): nobody."""
    advantages = leave_one_out(tensor(1.0, NAN, 0.0, NAN, 4.0, NAN, NAN, NAN, NAN), 3)
    assert advantages.tolist() == [1.0, 0.0, -1.0] + 6 * [0.0]


def test_leave_one_out_normalised():
    """Groups (1, 0) and (2, 0): 1, -1, 2, -2, mean 0, standard deviation sqrt(10 / 3) = 1.8257."""
    advantages = leave_one_out(tensor(1.0, 0.0, 2.0, 0.0), 2, normalize=True)
    assert advantages.tolist() == pytest.approx([0.5477, -0.5477, 1.0954, -1.0954], abs=1e-3)


def test_token_rewards_with_k3():
    """pi 0.5, reference 0.25: k3 = 0.5 - 1 + log 2 = 0.1931; -0.1 times that, and the score 2 at the index given."""
    logps, ref = torch.full((1, 2), log(0.5)).double(), torch.full((1, 2), log(0.25)).double()
    rewards = token_rewards(tensor(2.0), logps, ref, torch.ones(1, 2), 0.1, "k3", torch.tensor([0]))
    assert rewards[0].tolist() == near(2 - 0.01931472, -0.01931472)


@pytest.mark.parametrize(
    "length, cache, expected",
    [(80, 20, 0.0), (81, 20, -0.05), (90, 20, -0.5), (100, 20, -1.0), (120, 20, -1.0), (100, 0, 0.0), (101, 0, -1.0)],
)
def test_soft_overlong_punishment(length, cache, expected):
    """100 tokens, of which the last 20 cost 1/20 each."""
    assert soft_overlong_punishment(length, 100, cache) == expected


# the reference that moves


class Layers(nn.Module):
    """What Reference knows of a policy, with one weight, which is 1."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Linear(1, 1, bias=False)])
        nn.init.ones_(self.model.layers[0].weight)


def test_sync_ref_model():
    """Every second step reference = 0.4 reference + 0.6 policy; with a policy at 2: 1, 1.6, 1.6, 0.64 + 1.2 = 1.84."""
    policy = Layers()
    reference = Reference(policy, ReferenceConfig(sync_ref_model=True, ref_model_sync_steps=2))
    nn.init.constant_(policy.model.layers[0].weight, 2.0)
    seen = []
    for _ in range(4):
        reference.after_step()
        seen.append(reference.model.model.layers[0].weight.item())
    assert seen == near(1.0, 1.6, 1.6, 1.84)


# the examples of the docstrings; those of ppo_loss and gae are in test_ppo.py, group_advantages in test_advantages.py


def test_docstring_examples_of_policy_losses():
    examples = {"grpo": -0.5, "bnpo": -0.5, "dapo": -0.5, "dr_grpo": -0.25, "luspo": -1.0}
    for loss_type, expected in examples.items():
        assert policy([[1.0, 1.0]], [0.5], loss_type=loss_type, max_completion_length=4)[0] == expected


def test_docstring_examples_of_advantages_and_rewards():
    assert leave_one_out(tensor(1.0, 0.0, 0.0), 3).tolist() == [1.0, -0.5, -0.5]
    total = normalize_then_sum(tensor([0.0, 0.0], [1.0, 100.0]), tensor(1.0, 0.0), 2)
    assert total.tolist() == pytest.approx([-0.71, 0.71], abs=5e-3)
    assert [soft_overlong_punishment(n, 100, 20) for n in (80, 90, 100, 120)] == [0.0, -0.5, -1.0, -1.0]


# mistakes say what to do


@pytest.mark.parametrize(
    "options, says",
    [
        ({"epsilon_low": 0.3, "epsilon_high": 0.2}, "epsilon_high 0.2 is below epsilon_low 0.3; give at least"),
        ({"beta": 0.1}, "beta is 0.1: the KL term needs ref_per_token_logps"),
        ({"entropy_coef": 0.1}, "need entropies"),
        ({"top_entropy_quantile": 0.2}, "need entropies"),
        ({"loss_type": "gspo"}, "loss_type is 'gspo'; known are " + ", ".join(LOSS_TYPES)),
        ({"loss_type": "dr_grpo"}, "divides by max_completion_length; give it"),
        ({"importance_sampling_level": "row"}, "'row'; known are " + ", ".join(IMPORTANCE_SAMPLING_LEVELS)),
        (
            {"kl_estimator": "k4", "beta": 0.1, "ref_per_token_logps": torch.zeros(1, 1)},
            "kl_estimator is 'k4'; known are " + ", ".join(KL_ESTIMATORS),
        ),
    ],
)
def test_a_policy_loss_that_cannot_be_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        policy([[1.0]], [1.0], **options)


def test_an_unknown_average_or_correction_is_refused():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="'mean'; known are " + ", ".join(LOSS_TYPES)):
        aggregate(one, one, "mean")
    with pytest.raises(ValueError, match="mode is 'mask'; known are " + ", ".join(CORRECTION_MODES)):
        rollout_importance_ratio(one, one, one, mode="mask")


def test_leave_one_out_needs_whole_groups():
    with pytest.raises(ValueError, match="3 rewards are not groups of num_generations=2"):
        leave_one_out(tensor(1.0, 0.0, 1.0), 2)
