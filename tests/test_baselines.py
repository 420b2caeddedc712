"""Other advantages than GRPO's, and what PPO makes of rewards and values, by arithmetic done by hand."""

from math import log

import pytest
import torch
from by_hand import near, tensor

from minivlmrl.algorithms.baselines import gae, leave_one_out, normalize_then_sum, token_rewards, whiten

NAN = float("nan")


def test_normalize_then_sum():
    """One group of two, weights 1 and 3. Columns (0, 2) and (10, 0): both become -1, 1 and 1, -1 times 0.7071.

    Their sums with the weights: 2 * 0.7071 and -2 * 0.7071; normalised over the batch of two once more: 0.7071, -0.7071
    (each time 1e-4 is added to the standard deviation, which the comparison forgives).
    """
    advantages = normalize_then_sum(tensor([0.0, 10.0], [2.0, 0.0]), tensor(1.0, 3.0), 2)
    assert advantages.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)


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


def test_gae_by_hand():
    """deltas 1 + 0.5 * 3 - 2 = 0.5 and 2 - 3 = -1; A_1 = -1, A_0 = 0.5 + 0.5 * 0.5 * -1 = 0.25."""
    advantages, returns = gae(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 3.0]]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.25, -1.0]]
    assert returns.tolist() == [[2.25, 2.0]]


def test_lambda_one_is_the_return_minus_the_forecast_and_lambda_zero_one_step():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.4, 0.7]])
    torch.testing.assert_close(gae(rewards, values, 1.0, 1.0)[0], torch.tensor([[0.8, 0.6, 0.3]]))
    torch.testing.assert_close(gae(rewards, values, 1.0, 0.0)[0], torch.tensor([[0.2, 0.3, 0.3]]))


def test_token_rewards_by_hand():
    """Rows of 2 and 1 tokens: -0.1 * (log pi - log ref), and the score on the last token."""
    logps, ref = torch.tensor([[-1.0, -2.0], [-1.0, 9.0]]), torch.tensor([[-1.5, -2.0], [-3.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    rewards = token_rewards(torch.tensor([5.0, 7.0]), logps, ref, mask, kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 5.0], [6.8, 0.0]]))


def test_whiten_by_hand():
    """Entries 1, 2, 3 (the 50 is padding): mean 2, variance 1."""
    x, mask = torch.tensor([[1.0, 2.0], [3.0, 50.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    torch.testing.assert_close(whiten([x], [mask])[0], torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    torch.testing.assert_close(whiten([x], [mask], shift_mean=False)[0], torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
