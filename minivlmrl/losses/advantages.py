"""Rewards -> advantages: how much better a completion is than the others of its group."""

import torch
from torch import Tensor

EPSILON = 1e-4  # TRL's, added to a standard deviation


def combine(rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over rewards: (n, K), (K,) -> (n,). NaN adds nothing; NaN if all are NaN."""
    total = (rewards * weights).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), float("nan"))


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Subtract the mean of the group, then divide by a standard deviation.

    Example: a group with rewards 1, 1, 0, 0 has mean 0.5 and standard deviation 0.5774 (with n - 1
    in its denominator), so "group" gives +0.8659, +0.8659, -0.8659, -0.8659.

    Args:
        rewards: (n,) float32, groups of num_generations in order; NaN where nothing could judge.
        scale_rewards: divide by the standard deviation of the "group", of the whole "batch", or
            by nothing ("none"); the mean is the group's in all three.
    Returns:
        (n,) advantages; 0 where the reward is NaN.
    Source: DeepSeekMath eq. 21 (arXiv 2402.03300); TRL's GRPOTrainer (sum_then_normalize).
    """
    if num_generations == 1 and scale_rewards != "none":
        raise ValueError("num_generations is 1: one completion has no standard deviation; use 2")
    group_mean = to_groups(rewards, num_generations).nanmean(1)  # (n / num_generations,)
    centred = rewards - group_mean.repeat_interleave(num_generations)  # (n,)
    if scale_rewards == "none":
        return centred.nan_to_num(0.0)
    if scale_rewards == "group":
        std = group_std(rewards, num_generations).repeat_interleave(num_generations)  # (n,)
    elif scale_rewards == "batch":
        std = nanstd(rewards)  # one number
    else:
        raise ValueError(f"scale_rewards is {scale_rewards!r}; known are group, batch, none")
    return (centred / (std + EPSILON)).nan_to_num(0.0)


def normalize_then_sum(rewards: Tensor, weights: Tensor, num_generations: int) -> Tensor:
    """Normalise each of (n, K) rewards within its group, add them, normalise over the batch: (n,).

    Example: rewards (0, 0), (1, 100) of a group of two become (-0.71, -0.71), (0.71, 0.71) before
    they are added. Source: GDPO (arXiv 2601.05242); TRL's "normalize_then_sum".
    """
    columns = [group_advantages(column, num_generations) for column in rewards.unbind(1)]
    total = (torch.stack(columns, 1) * weights).nansum(1)
    total = total.masked_fill(rewards.isnan().all(1), float("nan"))
    return standardize(total).nan_to_num(0.0)


def leave_one_out(rewards: Tensor, num_generations: int, normalize: bool = False) -> Tensor:
    """Measure (n,) rewards against the mean of a group's others; `normalize` over the batch.

    Example: a group with rewards 1, 0, 0: 1 - 0 = 1, 0 - 0.5 = -0.5 and -0.5. NaN counts in no
    mean. Source: RLOO eq. 6 (arXiv 2402.14740); equals TRL's RLOOTrainer (since 1.6 also for NaN).
    """
    groups = to_groups(rewards, num_generations)
    others = (~groups.isnan()).sum(1, keepdim=True) - 1
    advantages = (groups - (groups.nansum(1, keepdim=True) - groups) / others).flatten()
    if normalize:
        advantages = standardize(advantages)
    return advantages.nan_to_num(0.0)


def standardize(values: Tensor) -> Tensor:
    """Bring (n,) values to mean 0 and standard deviation 1; NaN counts in neither and stays."""
    return (values - values.nanmean()) / (nanstd(values) + EPSILON)


def group_std(rewards: Tensor, num_generations: int) -> Tensor:
    """Standard deviation of each group, (n,) -> (n / num_generations,); 0: it teaches nothing."""
    return nanstd(to_groups(rewards, num_generations))


def to_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """(n,) -> (n / num_generations, num_generations)."""
    if len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards are no groups of {num_generations}")
    return rewards.view(-1, num_generations)


def nanstd(x: Tensor) -> Tensor:
    """Standard deviation over the last axis, with n - 1, without NaN; of one value it is NaN."""
    count = (~x.isnan()).sum(-1)
    variance = (x - x.nanmean(-1, keepdim=True)).square().nansum(-1) / (count - 1)
    return torch.where(count > 1, variance.sqrt(), float("nan"))
