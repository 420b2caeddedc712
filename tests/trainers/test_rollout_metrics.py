"""Tests of rollout metrics against values computed by hand."""

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

from stages import ONE, SECOND_RANK


def completions(*lengths):
    """Return completions, of which those of three tokens are truncated."""
    return [Completion(torch.zeros(n), torch.zeros(n), n != 3) for n in lengths]


def test_rewards_by_hand():
    """The total rewards of two groups are (1, 0) and (1, 1); the format reward of the last completion is None."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [math.nan, 1.0]])
    total = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert reward_metrics(rewards, total, ["format", "accuracy"]) | group_metrics(total, 2) == pytest.approx({
        "reward": 0.75, "rewards/format/mean": 2 / 3, "rewards/format/std": (4 / 3) ** 0.5,
        "rewards/accuracy/mean": 0.5, "rewards/accuracy/std": 3**-0.5,
        "reward_std": 0.5**0.5 / 2, "frac_reward_zero_std": 0.5,
    })  # fmt: skip


@pytest.mark.parametrize("world", [ONE, SECOND_RANK])
def test_lengths_by_hand(world):
    assert completion_metrics(completions(1, 3, 3, 3), False, world) == pytest.approx({
        "completions/mean_length": 2.5,
        "completions/min_length": 1, "completions/max_length": 3, "completions/mean_terminated_length": 1,
        "completions/min_terminated_length": 1, "completions/max_terminated_length": 1,
        "completions/clipped_ratio": 0.75,
    })  # fmt: skip


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
