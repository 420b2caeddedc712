"""Build the optimizer, sum and clip gradients, and compute the learning rate."""

import math
from collections.abc import Iterable

import torch
from safetensors.torch import save
from torch import nn
from torch.optim import Optimizer

from minivlmrl.config.import_utils import parameters_of, resolve_object, with_options
from minivlmrl.config.options import OptimizerOptions, TrainingOptions
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import is_sharded, reshard
from minivlmrl.errors import error_context, require
from minivlmrl.model.plain_weights import gather_full_tensor
from minivlmrl.model.trainable import trained_parameters


def adamw(parameters: list, learning_rate: float, **options) -> Optimizer:
    return torch.optim.AdamW(parameters, learning_rate, fused=not parameters[0].is_meta, **options)


OPTIMIZERS = {"adamw": adamw, "adamw_8bit": "minivlmrl.extras.adamw8bit:AdamW8bit"}


def build_optimizer(model: nn.Module, options: TrainingOptions, section: OptimizerOptions) -> Optimizer:
    # free gathered weights that FSDP may keep after a forward pass
    reshard(model)
    with error_context(f"optimizer.name {section.name}"):
        factory = with_options(*resolve_object("optimizer", section.name, OPTIMIZERS))
        named = {"betas": (0.9, options.adam_beta2), "weight_decay": section.weight_decay}
        if "names" in parameters_of(factory):  # the optimizer needs names, for example to exclude embeddings from Muon
            named["names"] = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        return factory(trained_parameters(model), options.learning_rate, **named)


def begin_state(optimizer: Optimizer, parameters: Iterable[nn.Parameter]):
    """Run a step with zero gradients, which creates optimizer state such as AdamW moments.

    Call it before loading state weights, because weight decay changes weights even with zero gradients.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def check_optimizer(section: OptimizerOptions):
    """Check on a small matrix and vector that the optimizer runs and its state can be saved."""
    weights = nn.ParameterList([torch.ones(2, 2), torch.ones(2)])
    optimizer = build_optimizer(weights, TrainingOptions(), section)
    begin_state(optimizer, weights)
    state = {}
    for i, weight in enumerate(weights):
        state |= {f"{i}/{name}": value for name, value in optimizer.state[weight].items()}
    with error_context(f"optimizer.name {section.name}"):
        for group in optimizer.param_groups:
            # the training loop sets group["lr"]
            require("lr" in group, "a parameter group", sorted(group), 'a dictionary with "lr"')
    with error_context(f"optimizer.name {section.name}: its state cannot be saved"):
        save(state)  # saving fails if two tensors share memory, or if a value is not a tensor


def group_numbers(optimizer: Optimizer) -> list[dict[str, float]]:
    """Return numbers in parameter groups that must be saved in a state, such as a step count.

    Numbers equal to optimizer.defaults are left out.
    """
    defaults = optimizer.defaults
    return [
        {n: value for n, value in group.items() if isinstance(value, int | float) and value != defaults.get(n)}
        for group in optimizer.param_groups
    ]


def finish_gradients(model: nn.Module, world: World, max_grad_norm: float) -> float:
    """Sum gradients over ranks, clip them, and return the norm before clipping."""
    if not is_sharded(model):  # for a sharded model, FSDP has already summed the gradients
        world.sum_gradients(trained_parameters(model))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    return gather_full_tensor(norm).item()


def learning_rate(step: int, options: TrainingOptions) -> float:
    """Return the learning rate for a step, counted from 0.

    The rate rises linearly over warmup_steps, then decays to min_lr_ratio * learning_rate at max_steps. In warmup, step
    k has the rate of TRL's step k + 1, because TRL's first rate is 0. After warmup, learning rates equal TRL's.

    Example: learning_rate 1, warmup_steps 2, max_steps 6 and linear decay give 0.5, 1, 1, 0.75, 0.5 and 0.25.
    """
    if step < options.warmup_steps:
        return options.learning_rate * (step + 1) / options.warmup_steps
    if options.lr_scheduler_type == "constant":
        return options.learning_rate
    progress = (step - options.warmup_steps) / max(1, options.max_steps - options.warmup_steps)
    remaining = 1 - progress
    if options.lr_scheduler_type == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    return options.learning_rate * (options.min_lr_ratio + (1 - options.min_lr_ratio) * remaining)
