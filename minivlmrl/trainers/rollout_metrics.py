"""Completion metrics over all ranks, named as in TRL."""

from collections.abc import Sequence
from itertools import chain, compress

from torch import Tensor

from minivlmrl.data.rows import Completion
from minivlmrl.distributed.process_group import World
from minivlmrl.errors import UserError
from minivlmrl.losses.advantages import group_std, nanstd
from minivlmrl.rewards.registry import RewardLog

# metrics to sum over micro-batches; see GRPOTrainer.loss
CLIP_RATIOS = "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio"


def reward_metrics(rewards: Tensor, total: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Compute the mean total reward, and mean and standard deviation per reward function.

    Args:
        rewards: (n, K) on all ranks, NaN where a reward function returned None.
        total: (n,) weighted reward sums.
    """
    if rewards.isnan().all():
        raise UserError(
            f"rewards: {', '.join(names)} returned None for all {len(rewards)} completions of a rollout; check that "
            "the rows have values in the columns that these rewards use, for example in the column solution"
        )
    # float64 makes the means independent of the rank order
    metrics = {"reward": total.double().nanmean().item()}
    for name, values in zip(names, rewards.double().unbind(1), strict=True):
        metrics[f"rewards/{name}/mean"] = values.nanmean().item()
        metrics[f"rewards/{name}/std"] = nanstd(values).item()
    return metrics


def completion_metrics(completions: Sequence[Completion], has_tools: bool, world: World) -> dict[str, float]:
    """Compute length, tool call and turn metrics over all ranks."""
    local = [(int(c.policy_mask.sum()), c.stopped, c.tool_use.counts, len(c.turns)) for c in completions]
    lengths, stopped, calls, turns = zip(*chain(*world.gather_objects(local)), strict=True)
    terminated = list(compress(lengths, stopped))
    metrics = {}
    for name, values in (("length", lengths), ("terminated_length", terminated or [0])):
        metrics[f"completions/mean_{name}"] = sum(values) / len(values)
        metrics[f"completions/min_{name}"] = min(values)
        metrics[f"completions/max_{name}"] = max(values)
    metrics["completions/clipped_ratio"] = 1 - len(terminated) / len(lengths)
    if has_tools:
        metrics |= tool_metrics(calls)
    num_turns = sum(turns)
    if num_turns:
        metrics["mean_turns"] = num_turns / len(turns)
        metrics["completions/mean_turn_length"] = sum(lengths) / num_turns
    return metrics


def group_metrics(total: Tensor, num_generations: int) -> dict[str, float]:
    """Compute the reward spread over all completions, as in TRL, and within groups.

    Args:
        total: (n,) weighted reward sums on all ranks.
    Returns:
        reward_std: over all completions; group_reward_std: within groups, averaged; frac_reward_zero_std: share of
        groups with equal rewards.
    """
    std = group_std(total.double(), num_generations)
    return {
        "reward_std": nanstd(total.double()).item(),
        "group_reward_std": std.nanmean().item(),
        "frac_reward_zero_std": (std < 1e-8).float().mean().item(),
    }


def logged_metrics(log: RewardLog, world: World) -> dict[str, float]:
    """Average the metrics that reward functions logged, over all ranks, and clear the log."""
    metrics_of_ranks = world.gather_objects(log.metrics)
    log.metrics = {}
    means = {}
    for name in sorted(set(chain(*metrics_of_ranks))):
        values = list(chain(*(logged.get(name, ()) for logged in metrics_of_ranks)))
        means[name] = sum(values) / len(values)
    return means


def tool_metrics(calls: Sequence[tuple[int, int, bool]]) -> dict[str, float]:
    num_calls, num_failed, num_cut = map(sum, zip(*calls, strict=True))
    return {
        "tools/call_frequency": num_calls / len(calls),
        "tools/answered_frequency": (num_calls - num_failed) / len(calls),
        "tools/failure_frequency": num_failed / max(num_calls, 1),
        "tools/cut_ratio": num_cut / len(calls),
    }
