"""Advantages: rewards relative to the other completions for the same prompt."""

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = 1e-4  # added to standard deviations to avoid division by 0, as in TRL


def combine(rewards: Tensor, weights: Tensor) -> Tensor:
    """Compute a weighted sum of rewards per completion.

    Args:
        rewards: (n, K), NaN where a reward function returned None.
        weights: (K,)
    Returns:
        (n,) sums that ignore NaN, or NaN if all K rewards are NaN.
    """
    total = (rewards * weights).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), float("nan"))


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Compute GRPO's advantages: reward minus the group mean, divided by a standard deviation.

    Example: with scale_rewards="group", rewards 1, 1, 0, 0 (mean 0.5, sample standard deviation 0.5774) give 0.8659,
    0.8659, -0.8659, -0.8659.

    Args:
        rewards: (n,) float32, num_generations consecutive rewards per group, NaN for unscored completions.
        scale_rewards: standard deviation to divide by: "group", "batch" (over all n rewards), or "none".
    Returns:
        (n,) advantages, 0 for NaN rewards.
    Source: DeepSeekMath eq. 21 (arXiv 2402.03300); TRL's GRPOTrainer (sum_then_normalize).
    """
    centered = center(to_groups(rewards, num_generations)).flatten()
    if scale_rewards == "none":
        return centered.nan_to_num(0.0)
    if scale_rewards == "group":
        std = group_std(rewards, num_generations).repeat_interleave(num_generations)
    elif scale_rewards == "batch":
        std = nanstd(rewards)
    else:
        raise ValueError(f"scale_rewards must be group, batch or none, but got {scale_rewards!r}")
    return (centered / (std + EPSILON)).nan_to_num(0.0)


def normalize_then_sum(rewards: Tensor, weights: Tensor, num_generations: int) -> Tensor:
    """Compute GDPO's advantages (n,): normalize rewards within groups, sum with weights, normalize over the batch.

    Example: completions with rewards (0, 0) and (1, 100) get (-0.71, -0.71) and (0.71, 0.71) before the sum, so the
    large reward does not dominate.

    Args:
        rewards: (n, K), num_generations consecutive rows per group.
        weights: (K,)
    Source: GDPO (arXiv 2601.05242); TRL's "normalize_then_sum".
    """
    columns = [group_advantages(column, num_generations) for column in rewards.unbind(1)]
    total = (torch.stack(columns, 1) * weights).nansum(1)
    total = total.masked_fill(rewards.isnan().all(1), float("nan"))
    return standardize(total).nan_to_num(0.0)


def leave_one_out(rewards: Tensor, num_generations: int, normalize: bool = False) -> Tensor:
    """Compute RLOO's advantages (n,): reward minus the mean reward of the other completions in the group.

    Example: rewards 1, 0, 0 give 1 - 0 = 1, 0 - 0.5 = -0.5 and -0.5.

    Args:
        rewards: (n,). NaN rewards are ignored in the means and get advantage 0.
        normalize: whether to normalize the batch to mean 0 and standard deviation 1.
    Source: RLOO eq. 6 (arXiv 2402.14740); TRL's RLOOTrainer, which handles NaN since TRL 1.6.
    """
    groups = to_groups(rewards, num_generations)
    count = (~groups.isnan()).sum(1, keepdim=True)
    # reward - mean(others) = n / (n - 1) * (reward - mean(group))
    advantages = (center(groups) * (count / (count - 1))).flatten()
    if normalize:
        advantages = standardize(advantages)
    return advantages.nan_to_num(0.0)


# {value of the option grpo.advantages: advantage function}. Functions take weighted reward sums (n,), ordered in groups
# of num_generations. Keyword arguments are rewards_per_func (n, K), reward_weights (K,), and the options in the recipe
# section `grpo`.
ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": group_advantages,
    "gdpo": lambda _, rewards_per_func, reward_weights, num_generations: normalize_then_sum(
        rewards_per_func, reward_weights, num_generations
    ),
    "rloo": leave_one_out,
}


def standardize(values: Tensor) -> Tensor:
    """Scale values (n,) to mean 0 and standard deviation 1; NaN stays NaN."""
    return center(values) / (nanstd(values) + EPSILON)


def group_std(rewards: Tensor, num_generations: int) -> Tensor:
    """Compute standard deviations within groups: (n,) -> (n / num_generations,)."""
    return nanstd(to_groups(rewards, num_generations))


def to_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Reshape rewards to one row per group: (n,) -> (n / num_generations, num_generations)."""
    if num_generations == 1:
        raise ValueError(
            "num_generations is 1, but advantages compare the completions of a group; set num_generations to 2 or more"
        )
    return rewards.view(-1, num_generations)


def center(x: Tensor) -> Tensor:
    """Subtract the mean over the last axis, ignoring NaN.

    The maximum is subtracted first, so that equal rewards give exactly 0. A rounding error would be scaled up by AdamW.
    """
    shifted = x - x.nan_to_num(float("-inf")).amax(-1, keepdim=True)
    return shifted - shifted.nanmean(-1, keepdim=True)


def nanstd(x: Tensor) -> Tensor:
    """Compute the sample standard deviation (n - 1) over the last axis, ignoring NaN; NaN for a single value."""
    count = (~x.isnan()).sum(-1)
    variance = center(x).square().nansum(-1) / (count - 1)
    return torch.where(count > 1, variance.sqrt(), float("nan"))
