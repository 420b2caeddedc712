"""Compute metrics of rollouts over the completions of all ranks; metrics have TRL's names."""

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from minivlmrl.data.rows import Completion
from minivlmrl.distributed.process_group import World
from minivlmrl.losses.advantages import group_std, nanstd
from minivlmrl.rewards.registry import RewardLog


def reward_metrics(rewards: Tensor, total: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Compute the mean and the standard deviation of rewards.

    Args:
        rewards, total: (n, K) rewards and (n,) weighted sums, over all ranks; NaN for None.
    Raises:
        ValueError: no reward function scored any completion.
    """
    if rewards.isnan().all():
        raise ValueError(
            f"rewards: {', '.join(names)} returned None for all {len(rewards)} completions of a "
            "rollout; check that the rows have values in the columns that these rewards read, for "
            "example solution"
        )
    # in float64, because sums must not depend on the order of the ranks
    metrics = {"reward": total.double().nanmean().item()}
    for name, values in zip(names, rewards.double().unbind(1), strict=True):
        metrics[f"rewards/{name}/mean"] = values.nanmean().item()
        metrics[f"rewards/{name}/std"] = nanstd(values).item()
    return metrics


def completion_metrics(
    completions: Sequence[Sequence[Completion]], has_tools: bool, world: World
) -> dict[str, float]:
    """Compute metrics of the lengths, tool calls and turns of completions, over all ranks."""
    flat = chain(*completions)
    local = [(int(c.policy_mask.sum()), c.stopped, c.calls, len(c.turns)) for c in flat]
    sampled = list(chain(*world.gather_objects(local)))
    lengths = [length for length, *_ in sampled]
    terminated = [length for length, stopped, *_ in sampled if stopped]
    metrics = length_metrics(lengths, terminated)
    if has_tools:
        metrics |= tool_metrics([calls for _, _, calls, _ in sampled])
    num_turns = sum(turns for *_, turns in sampled)
    if num_turns:
        metrics["mean_turns"] = num_turns / len(sampled)
        metrics["completions/mean_turn_length"] = sum(lengths) / num_turns
    return metrics


def group_metrics(total: Tensor, num_generations: int) -> dict[str, float]:
    """Compute how much rewards differ within groups, from the weighted sums (n,) of all ranks.

    Returns:
        `reward_std`, the mean standard deviation of a group, and `frac_reward_zero_std`, the
        fraction of groups whose rewards are all equal.
    """
    std = group_std(total.double(), num_generations)
    return {
        "reward_std": std.nanmean().item(),
        "frac_reward_zero_std": (std < 1e-8).float().mean().item(),
    }


def logged_metrics(log: RewardLog, metrics: dict[str, float], world: World) -> dict[str, float]:
    """Average the metrics that reward functions logged during a rollout, over all ranks.

    The log is emptied.

    Args:
        metrics: the metrics of the rollout itself.
    Raises:
        ValueError: a reward function logged a metric under a name in `metrics`.
    """
    metrics_of_ranks = world.gather_objects(log.metrics)
    log.metrics = {}
    means = {}
    for name in sorted(set(chain(*metrics_of_ranks))):
        if name in metrics:
            raise ValueError(
                f"log_metric: {name!r} is a metric of the trainer itself; use another name"
            )
        values = list(chain(*(logged.get(name, ()) for logged in metrics_of_ranks)))
        means[name] = sum(values) / len(values)
    return means


def length_metrics(lengths: list[int], terminated: list[int]) -> dict[str, float]:
    """Compute mean, minimum and maximum length of all completions and of untruncated completions.

    Args:
        lengths: tokens of each completion.
        terminated: tokens of each completion that ended by itself.
    """
    metrics = {}
    for name, values in (("length", lengths), ("terminated_length", terminated or [0])):
        metrics[f"completions/mean_{name}"] = sum(values) / len(values)
        metrics[f"completions/min_{name}"] = min(values)
        metrics[f"completions/max_{name}"] = max(values)
    metrics["completions/clipped_ratio"] = 1 - len(terminated) / len(lengths)
    return metrics


def tool_metrics(calls: list[tuple[int, int, bool]]) -> dict[str, float]:
    """Compute how often tools are called, how often calls fail, and how often results are cut.

    Args:
        calls: for each completion (number of calls, number of failed calls, True if a result was
            truncated).
    """
    num_calls, num_failed, num_cut = (sum(values) for values in zip(*calls, strict=True))
    return {
        "tools/call_frequency": num_calls / len(calls),
        "tools/answered_frequency": (num_calls - num_failed) / len(calls),
        "tools/failure_frequency": num_failed / max(num_calls, 1),
        "tools/cut_ratio": num_cut / len(calls),
    }
