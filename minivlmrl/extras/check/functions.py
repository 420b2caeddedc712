"""Call a user's loss and advantage functions with made-up tensors before training."""

import inspect
from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

from minivlmrl.config.options import GRPOOptions
from minivlmrl.errors import did_you_mean
from minivlmrl.extras.check.effects import is_set
from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
from minivlmrl.trainers.functions import call_advantages, checked_loss, find_advantages, find_loss, loss_arguments


def try_functions(config: GRPOOptions, num_rewards: int):
    if ":" in config.loss_type:
        try_loss(find_loss(config), config)
    if ":" in config.advantages_name:
        try_advantages(find_advantages(config), config, num_rewards)


def try_loss(loss: Callable, config: GRPOOptions):
    """Call a custom loss with made-up log-probabilities, and check that each option of the recipe changes the loss."""
    value, slopes = loss_and_gradient(loss, config, torch.full((2, 2), -1.0), None)
    if slopes is None or not (value.isfinite() and slopes.isfinite().all()):
        raise ValueError(
            f"grpo.loss_type {config.loss_type}: for two completions with "
            f"log-probabilities of -1, the loss is {value.item()}, and its gradient with respect to "
            f"the log-probabilities, its first argument, is {slopes}; both must be finite"
        )
    logps = torch.linspace(-2.0, -0.5, 64).view(2, 32)
    # Ratios of new to old probabilities range from 0.1 to 10, so that clipping at 0.8 and 1.2 changes the loss.
    old_logps = logps + torch.linspace(-1.6, 1.6, 32) + torch.tensor([[-0.7], [0.7]])
    for name in loss_arguments(config, grpo_loss):
        if name == "loss_type" or not is_set(name, config):
            continue
        other = copy(config)
        if name in ("epsilon_low", "epsilon_high"):  # both change, so that epsilon_low stays below epsilon_high
            other.epsilon_low = other.epsilon_high = 0.0 if config.epsilon_high else 0.2
        else:
            setattr(other, name, getattr(type(config)(), name))
        results = (loss_and_gradient(loss, section, logps, old_logps) for section in (config, other))
        if all(torch.equal(*pair) for pair in zip(*results, strict=True)):
            raise ValueError(
                f"grpo.{name} is {getattr(config, name)!r} and has no effect: grpo.loss_type {config.loss_type} "
                "computes the same loss without it"
            )


def loss_and_gradient(loss: Callable, config: GRPOOptions, logps: Tensor, old_logps: Tensor | None) -> tuple:
    """Call a custom loss for two completions; return the loss and its gradient with respect to log-probabilities."""
    logps = logps.clone().requires_grad_()
    # Changing beta must change the loss, even if the loss reads the reference but not beta itself.
    tensors = {"old_per_token_logps": old_logps, "ref_per_token_logps": logps.detach().flip(1) - config.beta}
    options = loss_arguments(config, grpo_loss, loss) | tensors
    normalizer = LossNormalizer(2, logps.numel(), logps.shape[1])
    advantages = torch.tensor([1.0, -1.0])
    arguments = (logps, advantages, torch.ones_like(logps))
    try:
        inspect.signature(loss).bind(*arguments, **options, normalizer=normalizer)
        known = options.keys() | inspect.signature(grpo_loss).parameters.keys()
        for name, parameter in inspect.signature(loss).parameters.items():
            if parameter.default is None and name not in known:
                raise TypeError(f"its parameter {name!r} would always be None{did_you_mean(name, known)}")
    except TypeError as error:
        raise ValueError(
            f"grpo.loss_type {config.loss_type}: the function cannot be called: {error}. Its parameters must be "
            "(logps, advantages, mask, *, normalizer, **others), see docs/developer_guide.md#a-file-of-your-own"
        ) from error
    returned = loss(*arguments, **options, normalizer=normalizer)
    value, _ = checked_loss(f"grpo.loss_type {config.loss_type}", returned)
    if value.requires_grad:
        value.backward()
    return value.detach(), logps.grad


def try_advantages(function: Callable[..., Tensor], config: GRPOOptions, num_rewards: int):
    """Test a custom advantage function on two groups, one with different rewards and one with equal rewards."""
    totals = torch.arange(2.0 * config.num_generations).clamp(max=config.num_generations)
    rewards, weights = totals[:, None].repeat(1, num_rewards), torch.ones(num_rewards)
    tensors = {"rewards_per_func": rewards, "reward_weights": weights}
    arguments = loss_arguments(config, function, **tensors)
    if is_set("scale_rewards", config) and "scale_rewards" not in arguments:
        raise ValueError(
            f"grpo.scale_rewards is {config.scale_rewards!r} and has no effect: grpo.advantages "
            f"{config.advantages_name} has no argument scale_rewards"
        )
    call_advantages(function, config, totals, **arguments)
