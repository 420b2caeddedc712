"""Rewards -> advantages: how much better a completion, or a token, is than what was to be expected.

Groups (GRPO, RLOO): a completion against the others of its prompt. Values (PPO): a token against a critic's forecast.
"""

import torch
from torch import Tensor

EPSILON = 1e-4  # TRL's
SCALES = ("group", "batch", "none")


def combine(rewards: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over reward functions: (n, K), (K,) -> (n,). NaN (not judged) adds nothing; all NaN stays NaN."""
    total = (rewards * weights).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), float("nan"))


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Centre each reward on its group, then divide by a standard deviation.

    Example: a group with rewards 1, 1, 0, 0 has mean 0.5 and standard deviation 0.5774 (n - 1 in its denominator),
    so "group" gives +0.8659, +0.8659, -0.8659, -0.8659.

    Args:
        rewards: (n,) float32, groups of num_generations in a row; NaN where no reward could judge.
        scale_rewards: divide by the standard deviation of the "group", of the whole "batch", or by nothing ("none").
            Each completion is centred on its own group in all three.
    Returns:
        (n,) advantages; 0 where the reward is NaN.
    Raises:
        ValueError: n is no multiple of num_generations, or num_generations 1 with scaled advantages.
    Source: DeepSeekMath eq. 21 (arXiv 2402.03300); equals TRL's GRPOTrainer (sum_then_normalize).
    """
    if num_generations == 1 and scale_rewards != "none":
        raise ValueError("num_generations is 1: a group of one has no standard deviation; use 2 or more")
    groups = _groups(rewards, num_generations)
    centred = rewards - groups.nanmean(dim=1).repeat_interleave(num_generations)
    if scale_rewards == "group":
        advantages = centred / (group_std(rewards, num_generations).repeat_interleave(num_generations) + EPSILON)
    elif scale_rewards == "batch":
        advantages = centred / (_nanstd(rewards[None])[0] + EPSILON)
    elif scale_rewards == "none":
        advantages = centred
    else:
        raise ValueError(f"scale_rewards is {scale_rewards!r}, it must be 'group', 'batch' or 'none'")
    return advantages.nan_to_num(0.0)


def group_std(rewards: Tensor, num_generations: int) -> Tensor:
    """Standard deviation of each group: (n,) -> (n / num_generations,). 0 means the group teaches nothing."""
    return _nanstd(rewards.view(-1, num_generations))


def _groups(rewards: Tensor, num_generations: int) -> Tensor:
    if len(rewards) % num_generations:
        raise ValueError(f"{len(rewards)} rewards are not groups of num_generations={num_generations}")
    return rewards.view(-1, num_generations)


def _nanstd(x: Tensor) -> Tensor:
    """Over the last axis with n - 1 in the denominator, NaN left out; NaN where fewer than two values remain."""
    count = (~x.isnan()).sum(-1)
    variance = (x - x.nanmean(-1, keepdim=True)).square().nansum(-1) / (count - 1)
    return torch.where(count > 1, variance.sqrt(), float("nan"))
