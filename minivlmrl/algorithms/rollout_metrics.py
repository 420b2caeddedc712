"""What a rollout earned, in the words of TRL's logs."""

from torch import Tensor

from minivlmrl.advantages import group_std, nanstd


def rollout_metrics(algorithm, rollout, rewards: Tensor, total: Tensor) -> dict[str, float]:
    """What a rollout of all ranks earned, (n, K) rewards, (n,) their sums, and its lengths."""
    if rewards.isnan().all():
        names = ", ".join(algorithm.run.rewards)
        raise ValueError(f"rewards: {names} judged none of {len(rewards)} completions")
    local = [(int(c.written.sum()), c.stopped) for group in rollout.completions for c in group]
    drawn = [one for rank in algorithm.world.gather_objects(local) for one in rank]
    lengths = [length for length, _ in drawn]
    ended = [length for length, stopped in drawn if stopped]
    # sums that do not depend on the order of the ranks
    rewards, total = rewards.double(), total.double()
    metrics = {"reward": total.nanmean().item()}
    for name, values in zip(algorithm.run.rewards, rewards.unbind(1), strict=True):
        metrics[f"rewards/{name}/mean"] = values.nanmean().item()
        metrics[f"rewards/{name}/std"] = nanstd(values).item()
    for kind, some in (("length", lengths), ("terminated_length", ended or [0])):
        for of, value in {
            "mean": sum(some) / len(some),
            "min": min(some),
            "max": max(some),
        }.items():
            metrics[f"completions/{of}_{kind}"] = value
    metrics["completions/clipped_ratio"] = 1 - len(ended) / len(drawn)
    if algorithm.compares_groups:
        std = group_std(total, algorithm.config.num_generations)
        metrics["reward_std"] = std.nanmean().item()
        metrics["frac_reward_zero_std"] = (std < 1e-8).float().mean().item()
    return metrics
