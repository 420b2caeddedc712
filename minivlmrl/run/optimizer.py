"""Build the optimizer, clip gradients and compute the learning-rate schedule."""

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
    """Build torch.optim.AdamW, fused except on the meta device.

    The memory estimate runs on the meta device, which has no fused implementation.
    """
    return torch.optim.AdamW(parameters, learning_rate, fused=not parameters[0].is_meta, **options)


OPTIMIZERS = {"adamw": adamw, "adamw_8bit": "minivlmrl.run.adamw8bit:AdamW8bit"}


def build_optimizer(
    model: nn.Module, config: TrainingOptions, section: OptimizerOptions
) -> Optimizer:
    """Build the optimizer of all parameters of a model that require gradients.

    Raises:
        ValueError: if the recipe's optimizer cannot be built.
    """
    reshard(model)  # because weights that FSDP has gathered are not the trainable parameters
    return make_optimizer(trained_parameters(model), config, section)


def make_optimizer(
    parameters: list, config: TrainingOptions, section: OptimizerOptions
) -> Optimizer:
    """Build the recipe's optimizer for a list of parameters (ValueError if it cannot be built)."""
    with error_context(f"optimizer.name {section.name}"):
        factory = with_options(*resolve_object("optimizer", section.name, OPTIMIZERS))
        return call_user_code(
            "it",
            factory,
            parameters,
            config.learning_rate,
            betas=(0.9, config.adam_beta2),
            weight_decay=section.weight_decay,
        )


def begin_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter]):
    """Initialise the optimizer state of parameters with a step whose gradients are 0.

    The step can still change weights, for example by weight decay, so load the checkpoint's
    weights afterwards. torch.distributed.checkpoint initialises states in the same way.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def check_optimizer(section: OptimizerOptions):
    """Raise ValueError if a custom optimizer fails in a step or has a state that cannot be saved.

    The optimizer takes one step on a 2 x 2 weight. It must have a learning rate `lr` in each
    parameter group, and only tensors in its state.
    """
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer([weight], TrainingOptions(), section)
    with error_context(f"optimizer.name {section.name}"):
        call_user_code("its step", begin_state, optimizer, [weight])
        for group in optimizer.param_groups:
            check_field("lr" in group, "a group", sorted(group), 'with "lr", which a schedule sets')
        for name, value in optimizer.state[weight].items():
            check_field(isinstance(value, Tensor), f"state {name}", value, "a tensor, to be saved")


def finish_gradients(model: nn.Module, world: World, max_grad_norm: float) -> float:
    """Sum the gradients over ranks, clip them to max_grad_norm, and return the norm before that.

    FSDP has already reduced the gradients of a sharded model, so these are only clipped.
    """
    if not is_sharded(model):
        world.sum_gradients(trained_parameters(model))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    return gather_full_tensor(norm).item()


def learning_rate(step: int, config: TrainingOptions) -> float:
    """Compute the learning rate of a step, counted from 0.

    The rate rises linearly over warmup_steps, one step earlier than in TRL, so that step 0 does
    not have rate 0. Then it decays to min_lr_ratio * learning_rate at max_steps. For example, the
    rates of 6 steps are 0.5, 1, 1, 0.75, 0.5, 0.25 with learning_rate 1, warmup_steps 2,
    max_steps 6 and a linear schedule.
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
