"""Find and check the loss and advantage functions that a recipe names, built-in ones or a user's own."""

import inspect
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from torch import Tensor

from minivlmrl.config.import_utils import resolve_object, with_options
from minivlmrl.config.options import GRPOOptions, TrainingOptions
from minivlmrl.config.validation import is_set
from minivlmrl.errors import did_you_mean, error_context
from minivlmrl.losses.advantages import ADVANTAGES
from minivlmrl.losses.grpo import AVERAGES, LossNormalizer, grpo_loss


def loss_arguments(config: TrainingOptions, *losses: Callable, **others: Any) -> dict[str, Any]:
    """Collect the arguments that loss functions accept, from a section of the recipe and from `others`."""
    names = set().union(*(inspect.signature(loss).parameters for loss in losses))
    names.discard("advantages")  # the option `advantages` is a name, but the argument of losses is a tensor
    return {name: value for name, value in (vars(config) | others).items() if name in names}


def find_loss(config: GRPOOptions) -> Callable:
    """Return the loss function that grpo.loss_type names: grpo_loss or a custom function."""
    return load_function("loss_type", config.loss_type, dict.fromkeys(AVERAGES, grpo_loss), config)


def find_advantages(config: GRPOOptions) -> Callable[..., Tensor]:
    """Return the advantage function that the option `advantages` names: a built-in or a custom function."""
    return load_function("advantages", config.advantages_name, ADVANTAGES, config)


def load_function(option: str, text: str, table: dict[str, Any], config: GRPOOptions) -> Callable:
    """Import a function; "file.py:name(option=2)" gives the function `name` with its parameter `option` set to 2."""
    with error_context(f"grpo.{option} {text}"):
        function, bound = resolve_object(option, text, table)
        for name in bound.keys() & vars(config).keys():
            raise ValueError(f"{name} is an option of the section grpo; set grpo.{name} instead")
        return with_options(function, bound)


def checked_loss(name: str, result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result of a loss function; raise ValueError unless it is a scalar loss and a dictionary of metrics."""
    is_pair = isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], dict)
    values = [result[0], *result[1].values()] if is_pair else [None]
    is_scalar = all(isinstance(value, Tensor) and value.dim() == 0 for value in values)
    # No metric may be named stage, step or loss, because each line of metrics.jsonl has these fields.
    if not is_scalar or result[1].keys() & {"stage", "step", "loss"}:
        raise ValueError(
            f"{name} returned {result!r:.200}, but it must return the loss, a "
            "tensor without dimensions, and a dictionary of metrics, which are such tensors and have "
            "other names than stage, step and loss: return loss, {}"
        )
    loss, metrics = result
    return loss, metrics


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


def call_advantages(function: Callable[..., Tensor], config: GRPOOptions, rewards: Tensor, **arguments) -> Tensor:
    """Call an advantage function, and check that the result has a finite advantage for each completion."""
    found = function(rewards, **arguments)
    is_float = isinstance(found, Tensor) and found.is_floating_point()
    if not is_float or found.shape != rewards.shape or not found.isfinite().all():
        raise ValueError(
            f"grpo.advantages {config.advantages_name} returned {found!r:.200}, but it must return a float tensor of "
            f"shape ({len(rewards)},) with one finite advantage for each completion, also if their rewards are equal"
        )
    return found


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
