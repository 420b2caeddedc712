"""Compare the numbers that RolloutTrainer computes for a rollout and its steps with arithmetic by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.data.loader import Batches
from minivlmrl.rewards.registry import RewardLog
from minivlmrl.trainers import rollout_metrics
from minivlmrl.trainers.rollout_metrics import group_metrics, reward_metrics, tool_metrics
from tests.distributed.test_process_group import prepare
from tests.helpers.on_ranks import Uneven, launch, trainer_on_rank


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 0, 1]])
def test_means_of_rewards_do_not_depend_on_the_order_of_the_ranks(order):
    """In float32, 1e8 + 1 is 1e8, so the sum in another order would be 0 or 1."""
    rewards = torch.tensor([1e8, 1.0, -1e8])[order]
    metrics = reward_metrics(rewards[:, None], rewards, ["accuracy"])
    assert metrics["reward"] == metrics["rewards/accuracy/mean"] == 1 / 3


def test_rewards_that_differ_by_rounding_are_equal():
    total = torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.4], dtype=torch.float64)
    assert group_metrics(total, 2)["frac_reward_zero_std"] == 0.5


@pytest.mark.parametrize(("calls", "expected"), [  # (calls, failed calls, whether a result did not fit) by completion
    ([(2, 1, False), (0, 0, False), (3, 2, True)], (5 / 3, 2 / 3, 3 / 5, 1 / 3)),
    ([(0, 0, False), (0, 0, False)], (0, 0, 0, 0)),
    ([(1, 1, False), (0, 0, False)], (1 / 2, 0, 1, 0)),
], ids=["several", "no call", "one failed call"])  # fmt: skip
def test_calls_of_tools_by_hand(calls, expected):
    names = ("call_frequency", "answered_frequency", "failure_frequency", "cut_ratio")
    assert tool_metrics(calls) == pytest.approx({f"tools/{n}": x for n, x in zip(names, expected, strict=True)})


def test_values_logged_by_rewards_are_averaged_over_ranks():
    """As in TRL, each logged value has the same weight, whichever rank logged it."""
    log = RewardLog()
    log.log_metric("length", 4)
    world = SimpleNamespace(gather_objects=lambda logged: [logged, {"length": [1.0, 1.0], "other": [5.0]}])
    found = rollout_metrics.logged_metrics(log, world)
    assert found == {"length": 2.0, "other": 5.0} and log.metrics == {}
    for name in ("loss", "rewards/accuracy/mean", "mean_turns", "value_loss"):
        with pytest.raises(ValueError, match=f"log_metric: '{name}' is a name of the run's own metrics; use another"):
            log.log_metric(name, 1)  # the check of rewards calls it before weights are loaded


def test_a_rollout_without_any_reward_ends_the_run():
    nothing = torch.full((4, 2), math.nan)
    with pytest.raises(ValueError, match=r"rewards: format, accuracy returned None for all 4 completions"):
        reward_metrics(nothing, nothing[:, 0], ["format", "accuracy"])


def trial_on_rank(folder, overrides, world):
    """Return the number of samples in each micro-batch that this rank tries before it trains."""
    trainer = trainer_on_rank(folder, overrides, world)
    trainer.steps(Batches(Uneven(), trainer))
    return [len(batch.samples) for batch in trainer.trial_batches([Uneven()[0], Uneven()[1]])]


def test_ranks_try_their_largest_batch_before_the_first_step(tmp_path):
    prepare(tmp_path)
    stages = {stage: [f"--stages=[{stage}]", f"--{stage}.num_generations=3"] for stage in ("grpo", "ppo")}
    for rank in launch(2, tmp_path, stages, trial_on_rank):
        assert rank == {"grpo": [3, 3], "ppo": [3, 3]}
