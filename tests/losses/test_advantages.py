"""Test advantages of equal, missing and invalid rewards; tests/parity compares advantages with TRL."""

import pytest
import torch

from minivlmrl.losses.advantages import combine, group_advantages, leave_one_out, normalize_then_sum

NAN = float("nan")


def test_a_completion_nobody_could_judge_counts_for_nothing():
    combined = combine(torch.tensor([[NAN], [1.0], [0.0], [1.0]]), torch.ones(1))
    assert combined[0].isnan()
    advantages = group_advantages(combined, 4)
    assert advantages[0] == 0
    torch.testing.assert_close(advantages[1:], group_advantages(torch.tensor([1.0, 0.0, 1.0]), 3))


ESTIMATORS = {
    "group": group_advantages,
    "batch": lambda rewards, size: group_advantages(rewards, size, "batch"),
    "none": lambda rewards, size: group_advantages(rewards, size, "none"),
    "rloo": leave_one_out,
    "rloo normalized": lambda rewards, size: leave_one_out(rewards, size, normalize=True),
    "gdpo": lambda rewards, size: normalize_then_sum(rewards[:, None].expand(-1, 2), torch.tensor([1.0, 0.2]), size),
}


@pytest.mark.parametrize("reward", [1.2, 0.7, 0.2, -1e3 / 3])
@pytest.mark.parametrize("advantages", [*ESTIMATORS.values()], ids=[*ESTIMATORS])
def test_equal_rewards_have_advantages_of_exactly_0(reward, advantages):
    """The float32 mean of equal rewards can be off in the last bit, which AdamW turns into a full step."""
    rewards = torch.full((24,), reward)
    rewards[0] = NAN
    assert not advantages(rewards, 8).any()


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="scale_rewards must be group, batch or none, but got 'rows'"):
        group_advantages(torch.tensor([1.0, 0.0]), 2, "rows")


@pytest.mark.parametrize("advantages", [*ESTIMATORS.values()], ids=[*ESTIMATORS])
def test_a_group_of_one_is_refused(advantages):
    """Its advantage would be 0 or NaN, and nothing would be trained."""
    with pytest.raises(ValueError, match="num_generations is 1, but advantages compare the completions of a group"):
        advantages(torch.tensor([1.0, 0.0]), 1)
