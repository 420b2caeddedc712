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
