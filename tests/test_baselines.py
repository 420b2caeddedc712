"""Other advantages than GRPO's, and what PPO makes of rewards and values, by arithmetic done by hand."""

import pytest
import torch
from by_hand import tensor

from minivlmrl.objectives.baselines import gae, leave_one_out, normalize_then_sum, token_rewards, whiten

NAN = float("nan")


def test_normalize_then_sum():
    """One group of two, weights 1 and 3. Columns (0, 2) and (10, 0): both become -1, 1 and 1, -1 times 0.7071.

    Their sums with the weights: 2 * 0.7071 and -2 * 0.7071; normalised over the batch of two once more: 0.7071, -0.7071
    (each time 1e-4 is added to the standard deviation, which the comparison forgives).
    """
    advantages = normalize_then_sum(tensor([0.0, 10.0], [2.0, 0.0]), tensor(1.0, 3.0), 2)
    assert advantages.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)


def test_leave_one_out():
    """1, 0, 0: 1 - 0, 0 - 1/2, 0 - 1/2. And 3, 1, 2: 3 - 3/2, 1 - 5/2, 2 - 4/2."""
    advantages = leave_one_out(tensor(1.0, 0.0, 0.0, 3.0, 1.0, 2.0), 3)
    assert advantages.tolist() == [1.0, -0.5, -0.5, 1.5, -1.5, 0.0]


def test_gae_by_hand():
    """deltas 1 + 0.5 * 3 - 2 = 0.5 and 2 - 3 = -1; A_1 = -1, A_0 = 0.5 + 0.5 * 0.5 * -1 = 0.25."""
    advantages, returns = gae(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 3.0]]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.25, -1.0]]
    assert returns.tolist() == [[2.25, 2.0]]


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
