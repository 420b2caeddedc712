"""AdamW and its schedule."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from minivlmrl.adapters import adamw8bit
from minivlmrl.adapters.adamw8bit import AdamW8bit
from minivlmrl.adapters.lora import full
from minivlmrl.adapters.trained import trained_parameters
from minivlmrl.algorithms.base import TrainingConfig
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import is_sharded, reshard


@dataclass
class OptimizerSection:
    """AdamW as all stages have it; learning rate and adam_beta2 are each stage's own."""

    # with moments of the weights' dtype, or of 8 bits a value
    name: Literal["adamw", "adamw_8bit"] = "adamw"
    weight_decay: Annotated[float, "[0, inf)"] = 0.0  # for all weights
    max_grad_norm: Annotated[float, "> 0; .inf does not clip"] = 1.0  # scale gradients to this norm


def build_optimizer(
    model: nn.Module, config: TrainingConfig, section: OptimizerSection
) -> torch.optim.Optimizer:
    """Make AdamW over all parameters that require gradients, fused or with moments of 8 bits."""
    reshard(model)  # gathered weights are other parameters, and none to train
    parameters = trained_parameters(model)
    options = {"betas": (0.9, config.adam_beta2), "weight_decay": section.weight_decay}
    if section.name == "adamw_8bit":
        return AdamW8bit(parameters, config.learning_rate, **options)
    return torch.optim.AdamW(parameters, config.learning_rate, **options, fused=True)


def empty_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Make what the optimizer keeps of a parameter before its first update."""
    if isinstance(optimizer, AdamW8bit):
        return adamw8bit.empty_state(parameter)
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def finish_gradients(model: nn.Module, world: World, max_grad_norm: float) -> float:
    """Add up the gradients of all ranks unless sharded, and clip them; return the norm before."""
    if not is_sharded(model):
        world.sum_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    return full(norm).item()


def learning_rate(step: int, config: TrainingConfig) -> float:
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
