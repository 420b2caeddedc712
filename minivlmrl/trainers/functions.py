"""Find and check the loss and advantage functions that a recipe names, built-in ones or a user's own."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from minivlmrl.config.import_utils import resolve_object, with_options
from minivlmrl.config.options import GRPOOptions, TrainingOptions
from minivlmrl.errors import error_context
from minivlmrl.losses.advantages import ADVANTAGES
from minivlmrl.losses.grpo import AVERAGES, grpo_loss


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
