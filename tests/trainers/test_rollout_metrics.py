"""Compare rollout metrics with values computed by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.data.rows import Completion
from minivlmrl.rewards.registry import RewardLog
from minivlmrl.trainers.rollout_metrics import (
    completion_metrics,
    group_metrics,
    logged_metrics,
    reward_metrics,
    tool_metrics,
)
from tests.helpers.stages import ONE, SECOND_RANK


def completions(*lengths):
    """Return completions with these lengths; completions with three tokens are truncated."""
    return [Completion(torch.zeros(n), torch.zeros(n), n != 3) for n in lengths]


def test_rewards_by_hand():
    """Two groups have the total rewards (1, 0) and (1, 1); the last completion's format reward is None."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [math.nan, 1.0]])
    total = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert reward_metrics(rewards, total, ["format", "accuracy"]) | group_metrics(total, 2) == pytest.approx({
        "reward": 0.75, "rewards/format/mean": 2 / 3, "rewards/format/std": (4 / 3) ** 0.5,
        "rewards/accuracy/mean": 0.5, "rewards/accuracy/std": 3**-0.5,
        "reward_std": 0.5**0.5 / 2, "frac_reward_zero_std": 0.5,
    })  # fmt: skip


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 0, 1]])
def test_means_of_rewards_do_not_depend_on_the_order_of_the_ranks(order):
    """In float32, 1e8 + 1 is 1e8, so that the sum would be 0 or 1."""
    rewards = torch.tensor([1e8, 1.0, -1e8])[order]
    metrics = reward_metrics(rewards[:, None], rewards, ["accuracy"])
    assert metrics["reward"] == metrics["rewards/accuracy/mean"] == 1 / 3


@pytest.mark.parametrize("world", [ONE, SECOND_RANK])
def test_lengths_by_hand(world):
    assert completion_metrics(completions(1, 3, 3, 3), False, world) == pytest.approx({
        "completions/mean_length": 2.5,
        "completions/min_length": 1, "completions/max_length": 3, "completions/mean_terminated_length": 1,
        "completions/min_terminated_length": 1, "completions/max_terminated_length": 1,
        "completions/clipped_ratio": 0.75,
    })  # fmt: skip


def test_lengths_of_truncated_completions_only():
    """No completion terminated, so the lengths of terminated completions are 0, as in TRL."""
    assert completion_metrics(completions(3, 3), False, ONE) == {
        "completions/mean_length": 3, "completions/min_length": 3, "completions/max_length": 3,
        "completions/mean_terminated_length": 0, "completions/min_terminated_length": 0,
        "completions/max_terminated_length": 0, "completions/clipped_ratio": 1,
    }  # fmt: skip


def test_a_single_turn_has_a_mean_length():
    """Only the first of two completions has a tool turn."""
    both = completions(4, 2)
    both[0].turns = [(0, 4)]
    metrics = completion_metrics(both, False, ONE)
    assert (metrics["mean_turns"], metrics["completions/mean_turn_length"]) == (0.5, 6)


def test_rewards_that_differ_by_rounding_are_equal():
    total = torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.4], dtype=torch.float64)
    assert group_metrics(total, 2)["frac_reward_zero_std"] == 0.5


def test_tools_without_a_call_have_no_failures():
    names = ("call_frequency", "answered_frequency", "failure_frequency", "cut_ratio")
    assert tool_metrics([(0, 0, False)] * 2) == dict.fromkeys([f"tools/{name}" for name in names], 0)
    assert tool_metrics([(1, 1, False), (0, 0, False)])["tools/failure_frequency"] == 1


def test_calls_of_tools_by_hand():
    """Three completions: two calls, one failed; no call; two failed calls and a result that did not fit."""
    assert tool_metrics([(2, 1, False), (0, 0, False), (3, 2, True)]) == {
        "tools/call_frequency": pytest.approx(5 / 3),
        "tools/answered_frequency": pytest.approx(2 / 3),
        "tools/failure_frequency": pytest.approx(3 / 5),
        "tools/cut_ratio": pytest.approx(1 / 3),
    }


def test_values_logged_by_rewards_are_averaged_over_ranks():
    """As in TRL, each logged value has the same weight, whichever rank logged it."""
    log = RewardLog()
    log.log_metric("length", 4)
    world = SimpleNamespace(gather_objects=lambda logged: [logged, {"length": [1.0, 1.0], "other": [5.0]}])
    assert logged_metrics(log, {"reward": 0.0}, world) == {"length": 2.0, "other": 5.0} and log.metrics == {}
    log.log_metric("reward", 1)
    with pytest.raises(
        ValueError, match="log_metric was called with the name 'reward', which is a metric of the trainer itself"
    ):
        logged_metrics(log, {"reward": 0.0}, world)


def test_without_groups_there_are_no_group_metrics(stage):
    line = stage("ppo").go(1)[0]
    assert not line.keys() & {"reward_std", "frac_reward_zero_std"} and math.isfinite(line["reward"])
    assert line.keys() >= {"rewards/letters/mean", "completions/mean_length"}


def test_a_rollout_without_any_reward_ends_the_run():
    nothing = torch.full((4, 2), math.nan)
    with pytest.raises(ValueError, match=r"rewards: format, accuracy returned None for all 4 completions"):
        reward_metrics(nothing, nothing[:, 0], ["format", "accuracy"])
