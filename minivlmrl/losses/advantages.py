"""Compute advantages by comparing each completion's reward with its group's rewards.

ADVANTAGES maps each value of the option grpo.advantages to a function.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EPSILON = 1e-4  # added to standard deviations to avoid a division by 0; TRL has the same value


def combine(rewards: Tensor, weights: Tensor) -> Tensor:
    """Compute each completion's weighted sum of K rewards.

    Args:
        rewards: (n, K) tensor; NaN where a reward function could not score a completion.
        weights: (K,) tensor.
    Returns:
        An (n,) tensor. NaN counts as 0 in the sums, but a sum is NaN if all of its K rewards are NaN.
    """
    total = (rewards * weights).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), float("nan"))


def group_advantages(rewards: Tensor, num_generations: int, scale_rewards: str = "group") -> Tensor:
    """Compute GRPO's advantages: reward minus the group's mean, divided by a standard deviation.

    Example: a group with rewards 1, 1, 0, 0 has mean 0.5 and standard deviation 0.5774 (with n - 1 in its denominator),
    so its advantages are +0.8659, +0.8659, -0.8659, -0.8659 with scale_rewards="group".

    Args:
        rewards: (n,) float32 tensor, with the num_generations completions of each group next to each other; NaN where
            no reward function could score a completion.
        scale_rewards: "group" divides by the group's standard deviation, "batch" divides by the standard deviation of
            all n rewards, and "none" does not divide. All three subtract the group's mean.
    Returns:
        (n,) advantages, which are 0 where the reward is NaN.
    Source: DeepSeekMath eq. 21 (arXiv 2402.03300); TRL's GRPOTrainer (sum_then_normalize).
    """
    if num_generations == 1 and scale_rewards != "none":
        raise ValueError(
            "num_generations is 1, but the standard deviation of a group is not defined for a "
            "single completion; set num_generations to 2 or more"
        )
    centered = center(to_groups(rewards, num_generations)).flatten()  # reward minus the group's mean
    if scale_rewards == "none":
        return centered.nan_to_num(0.0)
    if scale_rewards == "group":
        std = group_std(rewards, num_generations).repeat_interleave(num_generations)
    elif scale_rewards == "batch":
        std = nanstd(rewards)  # one number for the whole batch
    else:
        raise ValueError(f"scale_rewards must be group, batch or none, but got {scale_rewards!r}")
    return (centered / (std + EPSILON)).nan_to_num(0.0)


def normalize_then_sum(rewards: Tensor, weights: Tensor, num_generations: int) -> Tensor:
    """Compute GDPO's advantages: first normalize each reward within its group, then normalize the weighted sums.

    Example: two completions with rewards (0, 0) and (1, 100) have the normalized rewards (-0.71, -0.71) and
    (0.71, 0.71), so the large reward does not dominate the small one.

    Args:
        rewards: (n, K) tensor, with the num_generations completions of each group next to each other.
        weights: (K,) tensor.
    Returns:
        (n,) advantages.
    Source: GDPO (arXiv 2601.05242); TRL's "normalize_then_sum".
    """
    columns = [group_advantages(column, num_generations) for column in rewards.unbind(1)]
    total = (torch.stack(columns, 1) * weights).nansum(1)
    total = total.masked_fill(rewards.isnan().all(1), float("nan"))
    return standardize(total).nan_to_num(0.0)


def leave_one_out(rewards: Tensor, num_generations: int, normalize: bool = False) -> Tensor:
    """Compute RLOO's advantages: reward minus the mean reward in the rest of the group.

    Example: in RLOO, a group with rewards 1, 0, 0 has the advantages 1 - 0 = 1, 0 - 0.5 = -0.5 and -0.5.

    Args:
        rewards: (n,) tensor. A reward that is NaN is excluded from all means, and its advantage is 0.
        normalize: if True, scale the batch's advantages to mean 0 and standard deviation 1.
    Returns:
        (n,) advantages.
    Source: RLOO eq. 6 (arXiv 2402.14740); equals TRL's RLOOTrainer (for NaN, since TRL 1.6).
    """
    groups = to_groups(rewards, num_generations)
    count = (~groups.isnan()).sum(1, keepdim=True)
    # In a group of n, a reward minus the mean of the others is n / (n - 1) times the reward minus the group's mean.
    advantages = (center(groups) * (count / (count - 1))).flatten()
    if normalize:
        advantages = standardize(advantages)
    return advantages.nan_to_num(0.0)


# Maps each grpo.advantages value to a function that computes the advantages, (n,), of n completions; the
# num_generations completions in a group are next to each other. The first argument is the weighted sum of each
# completion's rewards, (n,). A function may have more arguments: rewards_per_func, (n, K); reward_weights, (K,); and
# the options of the `grpo` section, such as num_generations.
ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "grpo": group_advantages,
    "gdpo": lambda _, rewards_per_func, reward_weights, num_generations: normalize_then_sum(
        rewards_per_func, reward_weights, num_generations
    ),
    "rloo": leave_one_out,
}


def standardize(values: Tensor) -> Tensor:
    """Shift and scale values (n,) to mean 0 and standard deviation 1; a NaN stays NaN."""
    return center(values) / (nanstd(values) + EPSILON)


def group_std(rewards: Tensor, num_generations: int) -> Tensor:
    """Compute the standard deviation of each group's rewards: (n,) -> (n / num_generations,).

    A group whose standard deviation is 0 has no gradient, because all its advantages are 0.
    """
    return nanstd(to_groups(rewards, num_generations))


def to_groups(rewards: Tensor, num_generations: int) -> Tensor:
    """Reshape rewards (n,) to (n / num_generations, num_generations), with one row per group."""
    return rewards.view(-1, num_generations)


def center(x: Tensor) -> Tensor:
    """Subtract the mean over the last axis, ignoring NaN.

    Subtracting the largest value first gives exactly 0 for equal rewards. The rounded mean of equal float32 rewards can
    differ from the rewards, and AdamW would train on the difference.
    """
    shifted = x - x.nan_to_num(float("-inf")).amax(-1, keepdim=True)
    return shifted - shifted.nanmean(-1, keepdim=True)


def nanstd(x: Tensor) -> Tensor:
    """Compute the standard deviation over the last axis with denominator n - 1, ignoring NaN.

    The standard deviation of a single value is NaN.
    """
    count = (~x.isnan()).sum(-1)
    variance = center(x).square().nansum(-1) / (count - 1)
    return torch.where(count > 1, variance.sqrt(), float("nan"))
