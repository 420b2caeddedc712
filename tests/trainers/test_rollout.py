"""Compare the numbers that RolloutTrainer computes for a rollout and its steps with arithmetic by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.data.rows import Completion
from minivlmrl.rewards.registry import RewardLog
from minivlmrl.trainers import base, rollout, rollout_metrics
from minivlmrl.trainers.rollout_metrics import completion_metrics, group_metrics, reward_metrics, tool_metrics
from tests.helpers.stages import ONE, SECOND_RANK


def completions(*lengths):
    """Return completions of these lengths; a completion of three tokens is truncated."""
    return [Completion(torch.zeros(n), torch.zeros(n), n != 3) for n in lengths]


def test_rewards_by_hand():
    """Two groups have the total rewards (1, 0) and (1, 1); the format reward of the last completion is None."""
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [math.nan, 1.0]])
    total = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert reward_metrics(rewards, total, ["format", "accuracy"]) | group_metrics(total, 2) == pytest.approx({
        "reward": 0.75, "rewards/format/mean": 2 / 3, "rewards/format/std": (4 / 3) ** 0.5,
        "rewards/accuracy/mean": 0.5, "rewards/accuracy/std": 3**-0.5,
        "reward_std": 0.5, "group_reward_std": 0.5**0.5 / 2, "frac_reward_zero_std": 0.5,
    })  # fmt: skip


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 0, 1]])
def test_means_of_rewards_do_not_depend_on_the_order_of_the_ranks(order):
    """In float32, 1e8 + 1 is 1e8, so the sum in another order would be 0 or 1."""
    rewards = torch.tensor([1e8, 1.0, -1e8])[order]
    metrics = reward_metrics(rewards[:, None], rewards, ["accuracy"])
    assert metrics["reward"] == metrics["rewards/accuracy/mean"] == 1 / 3


@pytest.mark.parametrize("world", [ONE, SECOND_RANK])
@pytest.mark.parametrize(("lengths", "every", "terminated", "clipped"), [
    ((1, 3, 3, 3), (2.5, 1, 3), (1, 1, 1), 0.75),
    ((3, 3), (3, 3, 3), (0, 0, 0), 1),  # as in TRL
], ids=["one terminated", "none terminated"])  # fmt: skip
def test_lengths_by_hand(lengths, every, terminated, clipped, world):
    found = completion_metrics(completions(*lengths), False, world)
    names = [f"completions/{kind}_{of}length" for of in ("", "terminated_") for kind in ("mean", "min", "max")]
    expected = dict(zip([*names, "completions/clipped_ratio"], (*every, *terminated, clipped), strict=True))
    assert found == pytest.approx(expected)


def test_a_single_turn_has_a_mean_length():
    both = completions(4, 2)
    both[0].turns = [(0, 4)]
    metrics = completion_metrics(both, False, ONE)
    assert (metrics["mean_turns"], metrics["completions/mean_turn_length"]) == (0.5, 6)


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
    found = rollout_metrics.logged_metrics(log, {"reward": 0.0}, world)
    assert found == {"length": 2.0, "other": 5.0} and log.metrics == {}
    for name in ("reward", "loss"):
        log.log_metric(name, 1)
        message = f"log_metric was called with the name '{name}', which the trainer uses for a metric of its own"
        with pytest.raises(ValueError, match=message):
            rollout_metrics.logged_metrics(log, {"reward": 0.0}, world)


def test_without_groups_there_are_no_group_metrics(stage):
    line = stage("ppo").go(1)[0]
    assert not line.keys() & {"reward_std", "frac_reward_zero_std"} and math.isfinite(line["reward"])
    assert line.keys() >= {"rewards/letters/mean", "completions/mean_length"}


def test_a_rollout_without_any_reward_ends_the_run():
    nothing = torch.full((4, 2), math.nan)
    with pytest.raises(ValueError, match=r"rewards: format, accuracy returned None for all 4 completions"):
        reward_metrics(nothing, nothing[:, 0], ["format", "accuracy"])


@pytest.mark.parametrize("mask", [[[0.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]], [[0.0, 1.0], [1.0, 1.0]]])
def test_the_mismatch_is_that_of_the_tokens_that_are_trained_on(mask):
    """Without tokens the root mean square is 0, and for a single token the divisor is one."""
    mask = torch.tensor(mask)
    group = SimpleNamespace(pad=lambda flat: flat.view(2, 2), completion_mask=torch.ones(2, 2))
    logps = torch.tensor([[4.0, 5.0], [6.0, 7.0]])
    batch = base.SampledBatch(group, mask, None, samples=[], sampler_logps=logps)
    differences = torch.tensor([[9.0, 2.0], [3.0, 4.0]]) * mask
    metrics = rollout.RolloutTrainer.token_metrics(None, batch, logps + differences, torch.zeros(4))
    expected = (differences.square().sum() / max(mask.sum().item(), 1)).sqrt()
    torch.testing.assert_close(metrics["rollout/logp_mismatch_rms"], expected)
    assert metrics["rollout/logp_mismatch"] == differences.max()


@pytest.mark.parametrize(("lengths", "tokens"), [([0, 0], 1), ([0, 1], 1), ([2, 1], 3)])
def test_the_tokens_of_a_step_are_at_least_one(lengths, tokens):
    """A step without tokens divides its loss of 0 by 1."""
    samples = [SimpleNamespace(completion=SimpleNamespace(policy_mask=torch.ones(n))) for n in lengths]
    config = SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=7))
    trainer = SimpleNamespace(is_trained=lambda sample: True, world=ONE, config=config)
    normalizer = rollout.RolloutTrainer.count_tokens(trainer, [samples])
    assert (normalizer.sequences, normalizer.tokens, normalizer.max_completion_length) == (2, tokens, 7)
