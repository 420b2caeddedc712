"""What a rollout earned, by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.data.rows import Completion
from minivlmrl.rewards.registry import RewardLog
from minivlmrl.trainers.grpo_stage import GRPOStage

from stages import ONE, SECOND


def rollout(*lengths):
    """Completions in groups of two; those of three tokens are cut."""
    made = [Completion(torch.zeros(n), torch.zeros(n), n != 3) for n in lengths]
    return SimpleNamespace(completions=[made[i : i + 2] for i in range(0, len(made), 2)])


def run(**rewards):
    return SimpleNamespace(rewards=rewards, sampling=SimpleNamespace(environment=None))


def stage(**parts):
    """A stage with these parts alone."""
    algorithm = GRPOStage.__new__(GRPOStage)
    vars(algorithm).update({"reward_log": RewardLog(), **parts})
    return algorithm


@pytest.mark.parametrize("world", [ONE, SECOND])
def test_metrics_of_a_rollout_by_hand(world):
    """Groups earn 1, 0 and 1, 1 in all; nothing could judge the last completion's form."""
    algorithm = stage(world=world, run=run(format=0.5, accuracy=1.0), config=SimpleNamespace(num_generations=2))
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [math.nan, 1.0]])
    found = algorithm.metrics(rollout(1, 3, 3, 3), rewards, torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert found == pytest.approx({
        "reward": 0.75, "rewards/format/mean": 2 / 3, "rewards/format/std": (4 / 3) ** 0.5,
        "rewards/accuracy/mean": 0.5, "rewards/accuracy/std": 3**-0.5, "completions/mean_length": 2.5,
        "completions/min_length": 1, "completions/max_length": 3, "completions/mean_terminated_length": 1,
        "completions/min_terminated_length": 1, "completions/max_terminated_length": 1,
        "completions/clipped_ratio": 0.75, "reward_std": 0.5**0.5 / 2, "frac_reward_zero_std": 0.5,
    })  # fmt: skip


def test_what_rewards_log_is_a_mean_over_ranks():
    """As TRL's: each value counts once, whatever rank it is of."""
    log = RewardLog()
    log.log_metric("length", 4)
    world = SimpleNamespace(gather_objects=lambda logged: [logged, {"length": [1.0, 1.0], "other": [5.0]}])
    algorithm = stage(world=world, reward_log=log)
    assert algorithm.logged_metrics({"reward": 0.0}) == {"length": 2.0, "other": 5.0} and log.metrics == {}
    log.log_metric("reward", 1)
    with pytest.raises(ValueError, match="log_metric: the run logs 'reward' itself"):
        algorithm.logged_metrics({"reward": 0.0})


def test_without_groups_nothing_is_said_of_them():
    algorithm = stage(compares_groups=False, world=ONE, run=run(format=1.0))
    found = algorithm.metrics(rollout(1, 3), torch.ones(2, 1), torch.ones(2))
    assert not found.keys() & {"reward_std", "frac_reward_zero_std"} and found["reward"] == 1


def test_a_rollout_that_nothing_could_judge_ends_the_run():
    algorithm = stage(run=SimpleNamespace(rewards={"format": 1.0, "accuracy": 1.0}))
    nothing = torch.full((4, 2), math.nan)
    with pytest.raises(ValueError, match=r"rewards: format, accuracy judged none of 4 completions"):
        algorithm.metrics(rollout(1, 3, 3, 3), nothing, nothing[:, 0])
