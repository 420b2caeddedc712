"""The optimizer, by name or by file, and its schedule."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from minivlmrl.config.import_utils import call_user_code, resolve_object, with_options
from minivlmrl.config.options import OptimizerOptions, TrainingOptions
from minivlmrl.config.parsing import check_field, error_context
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import is_sharded, reshard
from minivlmrl.model.plain_weights import gather_full_tensor
from minivlmrl.model.trainable import trained_parameters


def adamw(parameters: list, learning_rate: float, **options) -> Optimizer:
    """Make torch's AdamW, fused where there are numbers: the plan of memory has none."""
    return torch.optim.AdamW(parameters, learning_rate, fused=not parameters[0].is_meta, **options)


OPTIMIZERS = {"adamw": adamw, "adamw_8bit": "minivlmrl.run.adamw8bit:AdamW8bit"}


def build_optimizer(
    model: nn.Module, config: TrainingOptions, section: OptimizerOptions
) -> Optimizer:
    """Make the optimizer of all parameters that require gradients (ValueError: it cannot be made)."""
    reshard(model)  # gathered weights are other parameters, and none to train
    return make_optimizer(trained_parameters(model), config, section)


def make_optimizer(
    parameters: list, config: TrainingOptions, section: OptimizerOptions
) -> Optimizer:
    """Make an optimizer of these parameters (ValueError: it cannot be made)."""
    with error_context(f"optimizer.name {section.name}"):
        make = with_options(*resolve_object("optimizer", section.name, OPTIMIZERS))
        return call_user_code(
            "it",
            make,
            parameters,
            config.learning_rate,
            betas=(0.9, config.adam_beta2),
            weight_decay=section.weight_decay,
        )


def begin_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter]):
    """Have an optimizer make what it keeps of parameters, by a step with gradients of 0.

    So does torch.distributed.checkpoint: a state that is read afterwards puts the weights back.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def check_optimizer(section: OptimizerOptions):
    """Refuse a user's optimizer (ValueError) that fails in a step, or that no state can hold."""
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer([weight], TrainingOptions(), section)
    with error_context(f"optimizer.name {section.name}"):
        call_user_code("its step", begin_state, optimizer, [weight])
        for group in optimizer.param_groups:
            check_field("lr" in group, "a group", sorted(group), 'with "lr", which a schedule sets')
        for name, value in optimizer.state[weight].items():
            check_field(isinstance(value, Tensor), f"state {name}", value, "a tensor, to be saved")


def finish_gradients(model: nn.Module, world: World, max_grad_norm: float) -> float:
    """Add up the gradients of all ranks unless sharded, and clip them; return the norm before."""
    if not is_sharded(model):
        world.sum_gradients(trained_parameters(model))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    return gather_full_tensor(norm).item()


def learning_rate(step: int, config: TrainingOptions) -> float:
    """Rise over warmup_steps, one step ahead of TRL, then fall to min_lr_ratio at max_steps.

    Example: learning_rate 1, warmup_steps 2, max_steps 6, linear: 0.5, 1, 1, 0.75, 0.5, 0.25.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    remaining = 1 - progress
    if config.lr_scheduler_type == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
