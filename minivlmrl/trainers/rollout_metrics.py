"""Metrics of the completions of a rollout, by TRL's names; over all ranks."""

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from minivlmrl.data.rows import Completion
from minivlmrl.distributed.process_group import World
from minivlmrl.losses.advantages import group_std, nanstd
from minivlmrl.rewards.registry import RewardLog


def reward_metrics(rewards: Tensor, total: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Average the rewards (n, K) of all ranks, and their weighted sums (n,).

    Raises:
        ValueError: no reward could judge any completion.
    """
    if rewards.isnan().all():
        raise ValueError(f"rewards: {', '.join(names)} judged none of {len(rewards)} completions")
    # in float64, because sums must not depend on the order of the ranks
    metrics = {"reward": total.double().nanmean().item()}
    for name, values in zip(names, rewards.double().unbind(1), strict=True):
        metrics[f"rewards/{name}/mean"] = values.nanmean().item()
        metrics[f"rewards/{name}/std"] = nanstd(values).item()
    return metrics


def completion_metrics(
    completions: Sequence[Sequence[Completion]], has_tools: bool, world: World
) -> dict[str, float]:
    """Describe the lengths, tool calls and turns of the completions of all ranks."""
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
    """Measure how much the rewards (n,) of a group differ."""
    std = group_std(total.double(), num_generations)
    return {
        "reward_std": std.nanmean().item(),
        "frac_reward_zero_std": (std < 1e-8).float().mean().item(),
    }


def logged_metrics(log: RewardLog, metrics: dict[str, float], world: World) -> dict[str, float]:
    """Average what rewards have logged of this rollout on all ranks.

    Raises:
        ValueError: a name is that of one of the rollout's own metrics.
    """
    of_ranks = world.gather_objects(log.metrics)
    log.metrics = {}
    means = {}
    for name in sorted(set(chain(*of_ranks))):
        if name in metrics:
            raise ValueError(f"log_metric: the run logs {name!r} itself; take another name")
        values = list(chain(*(logged.get(name, ()) for logged in of_ranks)))
        means[name] = sum(values) / len(values)
    return means


def length_metrics(lengths: list[int], terminated: list[int]) -> dict[str, float]:
    """Describe the lengths of all completions, and of those that were not cut."""
    metrics = {}
    for name, values in (("length", lengths), ("terminated_length", terminated or [0])):
        metrics[f"completions/mean_{name}"] = sum(values) / len(values)
        metrics[f"completions/min_{name}"] = min(values)
        metrics[f"completions/max_{name}"] = max(values)
    metrics["completions/clipped_ratio"] = 1 - len(terminated) / len(lengths)
    return metrics


def tool_metrics(calls: list[tuple[int, int, bool]]) -> dict[str, float]:
    """Describe the calls of tools: of each completion how many were made, failed, and if cut."""
    made, failed, cut = (sum(values) for values in zip(*calls, strict=True))
    return {
        "tools/call_frequency": made / len(calls),
        "tools/answered_frequency": (made - failed) / len(calls),
        "tools/failure_frequency": failed / max(made, 1),
        "tools/cut_ratio": cut / len(calls),
    }
