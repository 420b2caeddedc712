"""Advantages from rewards, relative to the completion's group.

ADVANTAGES maps values of the option grpo.advantages to functions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = 1e-4  # avoids a division by 0, as in TRL


def combine(rewards: Tensor, weights: Tensor) -> Tensor:
    """Compute weighted reward sums: (n,).

    Args:
        rewards: (n, K), NaN where a reward function returned None.
        weights: (K,)
    Returns:
        (n,) sums. NaN counts as 0; a sum is NaN only if all K rewards are.
    """
    total = (rewards * weights).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), float("nan"))


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Compute GRPO's advantages: reward minus the group mean, divided by a standard deviation.

    Example: with scale_rewards="group", rewards 1, 1, 0, 0 (mean 0.5, standard deviation 0.5774, with n - 1 in the
    denominator) give +0.8659, +0.8659, -0.8659, -0.8659.

    Args:
        rewards: (n,) float32, groups of num_generations in a row, NaN for unscored completions.
        scale_rewards: standard deviation to divide by: "group", "batch" (over all n rewards), or "none".
    Returns:
        (n,) advantages, 0 for NaN rewards.
    Source: DeepSeekMath eq. 21 (arXiv 2402.03300); TRL's GRPOTrainer (sum_then_normalize).
    """
    if num_generations == 1 and scale_rewards != "none":
        raise ValueError(
            "num_generations is 1, but the standard deviation of a group is not defined for a "
            "single completion; set num_generations to 2 or more"
        )
    centered = center(to_groups(rewards, num_generations)).flatten()
    if scale_rewards == "none":
        return centered.nan_to_num(0.0)
    if scale_rewards == "group":
        std = group_std(rewards, num_generations).repeat_interleave(num_generations)
    elif scale_rewards == "batch":
        std = nanstd(rewards)  # scalar, over the whole batch
    else:
        raise ValueError(f"scale_rewards must be group, batch or none, but got {scale_rewards!r}")
    return (centered / (std + EPSILON)).nan_to_num(0.0)


def normalize_then_sum(rewards: Tensor, weights: Tensor, num_generations: int) -> Tensor:
    """Compute GDPO's advantages: normalize each reward within its group, then the weighted sums over the batch.

    Example: rewards (0, 0) and (1, 100) become (-0.71, -0.71) and (0.71, 0.71), so the large reward does not dominate.

    Args:
        rewards: (n, K), groups of num_generations in a row.
        weights: (K,)
    Returns:
        (n,) advantages.
    Source: GDPO (arXiv 2601.05242); TRL's "normalize_then_sum".
    """
    columns = [group_advantages(column, num_generations) for column in rewards.unbind(1)]
    total = (torch.stack(columns, 1) * weights).nansum(1)
    total = total.masked_fill(rewards.isnan().all(1), float("nan"))
    return standardize(total).nan_to_num(0.0)


def leave_one_out(rewards: Tensor, num_generations: int, normalize: bool = False) -> Tensor:
    """Compute RLOO's advantages: reward minus the mean of the group's other rewards.

    Example: rewards 1, 0, 0 give 1 - 0 = 1, 0 - 0.5 = -0.5 and -0.5.

    Args:
        rewards: (n,); NaN is left out of all means and has advantage 0.
        normalize: if True, scale the batch to mean 0 and standard deviation 1.
    Returns:
        (n,) advantages.
    Source: RLOO eq. 6 (arXiv 2402.14740); equals TRL's RLOOTrainer (for NaN, since TRL 1.6).
    """
    groups = to_groups(rewards, num_generations)
    count = (~groups.isnan()).sum(1, keepdim=True)
    # reward - mean(others) = n / (n - 1) * (reward - mean(group))
    advantages = (center(groups) * (count / (count - 1))).flatten()
    if normalize:
        advantages = standardize(advantages)
    return advantages.nan_to_num(0.0)


# {grpo.advantages: function}. First argument: weighted reward sums (n,), groups of num_generations in a row. Further
# arguments by name: rewards_per_func (n, K), reward_weights (K,), and options of the `grpo` section.
ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": group_advantages,
    "gdpo": lambda _, rewards_per_func, reward_weights, num_generations: normalize_then_sum(
        rewards_per_func, reward_weights, num_generations
    ),
    "rloo": leave_one_out,
}


def standardize(values: Tensor) -> Tensor:
    """Shift and scale (n,) to mean 0 and standard deviation 1; NaN stays NaN."""
    return center(values) / (nanstd(values) + EPSILON)


def group_std(rewards: Tensor, num_generations: int) -> Tensor:
    """Compute standard deviations within groups: (n,) -> (n / num_generations,).

    A group with standard deviation 0 has no gradient, because its advantages are 0.
    """
    return nanstd(to_groups(rewards, num_generations))


def to_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Reshape rewards to one row per group: (n,) -> (n / num_generations, num_generations)."""
    return rewards.view(-1, num_generations)


def center(x: Tensor) -> Tensor:
    """Subtract the mean over the last axis, ignoring NaN.

    Subtracting the maximum first gives exactly 0 for equal rewards. Otherwise AdamW could train on
    the mean's rounding error.
    """
    shifted = x - x.nan_to_num(float("-inf")).amax(-1, keepdim=True)
    return shifted - shifted.nanmean(-1, keepdim=True)


def nanstd(x: Tensor) -> Tensor:
    """Compute the standard deviation over the last axis, with n - 1, ignoring NaN; NaN for a single value."""
    count = (~x.isnan()).sum(-1)
    variance = center(x).square().nansum(-1) / (count - 1)
    return torch.where(count > 1, variance.sqrt(), float("nan"))
