"""Compare advantages with arithmetic by hand, including completions without a reward."""

import pytest
import torch

from minivlmrl.losses.advantages import combine, group_advantages, leave_one_out, normalize_then_sum

NAN = float("nan")


def test_by_hand():
    """Two groups with the deviations 0.5, -0.5 and 1.5, -1.5; all four rewards have a variance of 2."""
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.0])
    deviations, batch_std = torch.tensor([0.5, -0.5, 1.5, -1.5]), 2.0**0.5
    group_std = torch.tensor([0.5, 0.5, 4.5, 4.5]) ** 0.5
    torch.testing.assert_close(group_advantages(rewards, 2), deviations / (group_std + 1e-4))
    torch.testing.assert_close(group_advantages(rewards, 2, "batch"), deviations / (batch_std + 1e-4))
    torch.testing.assert_close(leave_one_out(torch.tensor([1.0, 0.0, 0.0]), 3), torch.tensor([1.0, -0.5, -0.5]))
    others = torch.tensor([1.0, -1.0, 3.0, -3.0])
    torch.testing.assert_close(leave_one_out(rewards, 2), others)
    torch.testing.assert_close(leave_one_out(rewards, 2, normalize=True), others / ((20 / 3) ** 0.5 + 1e-4))
    # a reward that nobody judged is left out: the group has two completions
    torch.testing.assert_close(leave_one_out(torch.tensor([1.0, NAN, 0.0]), 3), torch.tensor([1.0, 0.0, -1.0]))


def test_a_weight_of_gdpo_counts_after_each_reward_is_normalized():
    rewards = torch.tensor([[0.0, 100.0], [1.0, 0.0], [0.0, 0.0]])
    third = torch.tensor([-1.0, 2.0, -1.0]) / 3 / ((1 / 3) ** 0.5 + 1e-4)
    total = third + 3 * torch.tensor([2.0, -1.0, -1.0]) * 100 / 3 / ((1e4 / 3) ** 0.5 + 1e-4)
    expected = total / (total.std() + 1e-4)
    torch.testing.assert_close(normalize_then_sum(rewards, torch.tensor([1.0, 3.0]), 3), expected)


def test_a_completion_nobody_could_judge_counts_for_nothing():
    combined = combine(torch.tensor([[NAN], [1.0], [0.0], [1.0]]), torch.ones(1))
    assert combined[0].isnan()
    advantages = group_advantages(combined, 4)
    assert advantages[0] == 0
    torch.testing.assert_close(advantages[1:], group_advantages(torch.tensor([1.0, 0.0, 1.0]), 3))


def test_a_completion_that_one_of_two_rewards_judges_keeps_that_reward():
    rewards = torch.tensor([[3.0, NAN], [NAN, NAN], [1.0, 0.5], [NAN, 0.5]])
    weights = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(combine(rewards, weights), torch.tensor([3.0, NAN, 2.0, 1.0]), equal_nan=True)
    # GDPO: the first column has the advantages r and -r in rows 0 and 2, and the second column only zeros
    advantages = normalize_then_sum(rewards, weights, 4)
    assert advantages[1] == 0 == advantages[3]
    assert advantages[0] == pytest.approx(1.0, abs=1e-3) and advantages[2] == pytest.approx(-1.0, abs=1e-3)


@pytest.mark.parametrize("reward", [1.2, 0.7, 0.2, -1e3 / 3])
@pytest.mark.parametrize("advantages", [
    group_advantages,
    lambda rewards, size: group_advantages(rewards, size, "batch"),
    lambda rewards, size: group_advantages(rewards, size, "none"),
    leave_one_out,
    lambda rewards, size: leave_one_out(rewards, size, normalize=True),
    lambda rewards, size: normalize_then_sum(rewards[:, None].expand(-1, 2), torch.tensor([1.0, 0.2]), size),
], ids=["group", "batch", "none", "rloo", "rloo normalized", "gdpo"])  # fmt: skip
def test_equal_rewards_have_advantages_of_exactly_0(reward, advantages):
    """The float32 mean of equal rewards can be off in the last bit, which AdamW turns into a full step."""
    rewards = torch.full((24,), reward)
    rewards[0] = NAN
    assert not advantages(rewards, 8).any()


@pytest.mark.parametrize("rewards, size, scale, expected", [
    ([1.0, 0.0], 1, "group", "num_generations is 1"),
    ([1.0, 0.0, 1.0], 2, "group", "invalid for input of size 3"),  # torch's message
    ([1.0, 0.0], 2, "rows", "scale_rewards must be group, batch or none, but got 'rows'"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(rewards, size, scale, expected):
    with pytest.raises((ValueError, RuntimeError), match=expected):
        group_advantages(torch.tensor(rewards), size, scale)
