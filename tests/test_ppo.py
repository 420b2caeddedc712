"""What PPO makes of rewards and values, by hand; with the loss they are held against TRL in test_ppo_loss.py."""

import pytest
import torch

from minivlmrl.algorithms.baselines import gae, masked_moments, token_rewards, whiten


def test_docstring_example():
    advantages, returns = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]]), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[0.5, 0.5]] and returns.tolist() == [[1.0, 1.0]]


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
    assert [moment.item() for moment in masked_moments(x, mask)] == [2.0, 1.0]
    torch.testing.assert_close(whiten(x, mask), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    torch.testing.assert_close(whiten(x, mask, shift_mean=False), torch.tensor([[1.0, 2.0], [3.0, 0.0]]))


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k1 and k3"):
        token_rewards(torch.ones(1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), kl_estimator="k2")
