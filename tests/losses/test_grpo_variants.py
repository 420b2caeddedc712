"""Test what TRL lacks of variants of the policy-gradient loss; tests/parity compares the rest with TRL."""

import inspect
import math
from dataclasses import fields
from math import exp, log

import pytest
import torch

from minivlmrl.config.options import DPOOptions, GRPOOptions, PPOOptions, RewardModelOptions, SFTOptions
from minivlmrl.losses import grpo, grpo_variants, ppo, preference, sft
from tests.helpers.by_hand import loss_of, loss_options, near, policy, tensor


def test_options_have_the_names_and_defaults_of_trl(trl):
    """TRL names epsilon_low epsilon, and has no option for the KL estimator."""
    tensors = {"old_per_token_logps", "ref_per_token_logps", "token_weights", "normalizer"}
    theirs = {field.name: field.default for field in fields(trl.GRPOConfig)}
    theirs |= {"epsilon_low": theirs["epsilon"]}
    ours = {name: value for name, value in grpo.grpo_loss.__kwdefaults__.items() if name not in tensors}
    for term in grpo.TERMS.values():
        ours |= term.__kwdefaults__ or {}
    assert ours.keys() - theirs.keys() == {"kl_estimator", "importance_sampling_ratio"}
    assert all(theirs[name] == ours[name] for name in ours.keys() & theirs.keys())


@pytest.mark.parametrize("section, loss, number", [
    (GRPOOptions, grpo.grpo_loss, 7), (DPOOptions, preference.dpo_loss, 7), (PPOOptions, ppo.ppo_loss, 2),
    (SFTOptions, sft.sft_loss, 1), (RewardModelOptions, preference.reward_loss, 1),
])  # fmt: skip
def test_a_recipe_and_a_call_from_python_have_the_same_defaults(section, loss, number):
    options = loss_options(section(), loss)
    assert len(options) == number
    defaults = {name: p.default for name, p in inspect.signature(loss).parameters.items() if name in options}
    if loss is grpo.grpo_loss:
        defaults["epsilon_high"] = 0.2  # None
    if loss is preference.dpo_loss:
        defaults["loss_type"] = [defaults["loss_type"]]  # a recipe has a list with names
    assert options == defaults


def sigmoid(x):
    return 1 / (1 + exp(-x))


def gate(x):
    """Return the slope of 4 sigmoid(x) at x."""
    return 4 * sigmoid(x) * sigmoid(-x)


# two completions with the ratios 1.5 and 0.9, and 0.5; padding has the ratio e^5. Bounds 0.8 and 1.28
RATIO_ROWS, ROW_ADVANTAGES = [[1.5, 0.9], [0.5]], [1.0, -2.0]
TOTALS = {"tokens": 6, "sequences": 5, "max_completion_length": 4, "epsilon_low": 0.2, "epsilon_high": 0.28}
CLIPPED = -1.28 - 0.9 + 1.6  # the first and the last token are clipped, so only the second has a gradient
S = 1.35**0.5  # geometric mean of the first completion's ratios
PHI = 1.35**2 * exp(3 * (1 - 1.35)), 0.5**3 * exp(2 * (1 - 0.5))  # of products of ratios
TAU = 1.05


@pytest.mark.parametrize("options, loss, gradient", [
    ({"loss_type": "grpo"}, ((-1.28 - 0.9) / 2 + 1.6) / 5, [0, -0.9 / 10, 0]),  # completions of the step
    ({"loss_type": "dapo"}, CLIPPED / 6, [0, -0.9 / 6, 0]),  # tokens of the step, not of this batch
    ({"loss_type": "dr_grpo"}, CLIPPED / (5 * 4), [0, -0.9 / 20, 0]),
    ({"loss_type": "bnpo"}, CLIPPED / 3 * 2 / 5, [0, -0.9 / 3 * 2 / 5, 0]),
    ({"loss_type": "luspo"}, CLIPPED / 5, [0, -0.9 / 5, 0]),
    ({"loss_type": "rloo"}, (-1.28 + 1.6) / 5, [0, 0, 0]),  # products 1.35 and 0.5
    ({"loss_type": "cispo", "epsilon_high": 1.2}, (1.2 + 0.9 - 1.0) / 6, [-1.2 / 6, -0.9 / 6, 1.0 / 6]),
    ({"loss_type": "sapo"}, ((-4 * sigmoid(0.5) - 4 * sigmoid(-0.1)) / 2 + 8 / TAU * sigmoid(-0.5 * TAU)) / 5,
     [-gate(0.5) * 1.5 / 10, -gate(-0.1) * 0.9 / 10, gate(-0.5 * TAU) * 0.5 * 2 / 5]),
    ({"loss_type": "vespo"}, 2 * (PHI[0] - PHI[1]) / 6, [-PHI[0] / 6, -PHI[0] / 6, 2 * PHI[1] / 6]),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, (-S + 1.6) / 5, [-S / 10, -S / 10, 0]),
])  # fmt: skip
def test_losses_by_hand(options, loss, gradient):
    found = policy(RATIO_ROWS, ROW_ADVANTAGES, **{**TOTALS, **options})
    assert (found[0], found[1]) == (near(loss), near(*gradient))


def test_gspo_token_gives_each_token_its_own_advantage():
    """Both tokens have the sequence ratio e^0.1, so the gradient of a token with advantage A is -e^0.1 A / 2."""
    options = {"loss_type": "grpo", "importance_sampling_level": "sequence_token"}
    loss, gradient, _ = policy([[exp(0.3), exp(-0.1)]], [[1.0, -0.5]], **options)
    assert loss == near(-exp(0.1) * 0.5 / 2) and gradient == near(-exp(0.1) / 2, 0.5 * exp(0.1) / 2)


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", ("k1", "k2", "k3"))
def test_the_correction_gives_every_estimator_the_gradient_of_the_kl_off_policy_too(estimator, straight_through):
    """Each token of a vocabulary of three is a row, weighted with its probability under the old policy."""
    logits, ref = tensor(0.3, -0.5, 1.1).requires_grad_(), tensor(0.2, 0.5, 0.3).log()
    logps, old = logits.log_softmax(0), tensor(0.5, 0.3, 0.2).log()
    losses = [
        loss_of(
            logps[i].view(1, 1), torch.zeros(1), torch.ones(1, 1), old_per_token_logps=old[i].view(1, 1),
            ref_per_token_logps=ref[i].view(1, 1), beta=1.0, kl_estimator=estimator,
            kl_straight_through=straight_through,
        )[0]
        for i in range(3)
    ]  # fmt: skip
    both = (logps.exp() * (logps - ref)).sum(), (old.exp() * torch.stack(losses)).sum()
    expected, found = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in both)
    assert found.tolist() == near(*expected.tolist())


def test_a_completion_at_the_off_policy_threshold_is_kept():
    """Each token is 0.5 nats less likely under the policy than under the sampler; the second advantage is 0."""
    logps, sampler = torch.full((2, 2), -1.0), torch.full((2, 2), -0.5)
    for threshold, kept in ((0.5, 1), (0.4375, 0)):
        mask = grpo_variants.off_policy_mask(logps, sampler, tensor(-1.0, 0.0), torch.ones(2, 2), threshold)
        assert mask.flatten().tolist() == [kept, 1]


def test_no_tokens_have_an_infinite_entropy_threshold():
    assert grpo_variants.top_entropy_threshold(torch.zeros(0), 0.5).item() == math.inf


def test_the_entropy_is_that_of_kept_tokens():
    """The third quartile of 0.1, 0.2 and 0.3 is 0.25; the last token is padding."""
    entropies, mask = tensor([0.1, 0.2, 0.3, 0.9]), tensor([1.0, 1.0, 1.0, 0.0])
    kept = grpo_variants.kept_tokens(entropies, mask, 0.25)
    assert kept.tolist() == [[0, 0, 1, 0]]
    step = grpo.LossNormalizer(4, 9)  # four completions in the step, one in this batch
    assert grpo_variants.mean_entropy(entropies, kept, step).item() == near(0.3 / 4)
    assert grpo_variants.mean_entropy(entropies, kept, step, 6).item() == near(0.3 / 6)


def test_the_default_correction_masks_rows_over_three():
    """The token ratios of two rows multiply to 4 and 2.9, and the default bound is 3."""
    ratio = grpo_variants.rollout_importance_ratio(
        tensor([log(2), log(2)], [log(2.9), 0.0]), torch.zeros(2, 2), torch.ones(2, 2)
    )
    assert ratio.flatten().tolist() == near(0.0, 2.9)


ONE = torch.ones(1, 1)


@pytest.mark.parametrize("call, expected", [
    (lambda: policy([[1.0]], [1.0], top_entropy_quantile=0.2), "quantile below 1 needs the tokens' entropies"),
    (lambda: grpo_variants.rollout_importance_ratio(ONE, ONE, ONE, mode="mask"),
     "mode is 'mask', but it must be one of " + ", ".join(grpo_variants.CORRECTION_MODES)),
])  # fmt: skip
def test_mistakes_are_refused(call, expected):
    with pytest.raises(ValueError, match=expected):
        call()
