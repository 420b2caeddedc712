"""AdamW and its schedule."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from minivlmrl.adapters import adamw8bit
from minivlmrl.adapters.adamw8bit import AdamW8bit
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import is_sharded, reshard


@dataclass
class TrainingConfig:
    """What every stage has: its length, its batch and its optimizer."""

    data: str | None = None  # a file of this stage's own rows; None: those of section data
    max_steps: Annotated[int, ">= 0"] = 100  # optimizer steps
    max_epochs: Annotated[float, "(0, 1e6]"] | None = None  # passes over the rows; where they end before max_steps
    prompts_per_step: Annotated[int, ">= 1"] = 32  # prompts in one optimizer step, over all ranks
    micro_batch_size: Annotated[int, ">= 1"] = 32  # prompts (with all completions) in one forward and backward
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"  # with moments of the weights' dtype, or of 8 bits a value
    learning_rate: Annotated[float, "(0, inf)"] = 1e-6  # of AdamW, after the warmup
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"  # after the warmup
    min_lr_ratio: Annotated[float, "[0, 1]"] = 0.0  # the schedule ends at this share of learning_rate
    warmup_steps: Annotated[int, ">= 0"] = 0  # steps over which the learning rate rises
    adam_beta1: Annotated[float, "[0, 1)"] = 0.9  # decay of the mean gradient
    adam_beta2: Annotated[float, "[0, 1)"] = 0.99  # decay of the mean squared gradient
    weight_decay: Annotated[float, "[0, inf)"] = 0.0  # of AdamW, for all weights
    max_grad_norm: Annotated[float, "> 0; .inf does not clip"] = 1.0  # gradients are scaled down to this norm
    eval_steps: Annotated[int, ">= 0"] = 0  # evaluate held-out rows every this many steps too; 0: between stages only
    save_steps: Annotated[int, ">= 0"] = 0  # steps between two checkpoints; 0: at the end of the stage only
    save_total_limit: Annotated[int, ">= 1"] | None = None  # keep so many, in checkpoints/; None: replace one


def build_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW over all parameters that require gradients; moments of the weights' dtype have one fused update a step."""
    reshard(model)  # gathered weights are other parameters, and none to train
    parameters = [p for p in model.parameters() if p.requires_grad]
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "adamw_8bit":
        return AdamW8bit(parameters, config.learning_rate, betas, weight_decay=config.weight_decay)
    return torch.optim.AdamW(parameters, config.learning_rate, betas, weight_decay=config.weight_decay, fused=True)


def empty_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What the optimizer keeps of a parameter, as before its first update."""
    if isinstance(optimizer, AdamW8bit):
        return adamw8bit.empty_state(parameter)
    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=parameter.device), **moments}


def finish_gradients(model: nn.Module, world: World, max_grad_norm: float) -> float:
    """Add up the gradients of all ranks (a sharded backward has done so), and clip them; returns the norm before."""
    if not is_sharded(model):
        world.sum_gradients(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Rise over warmup_steps, one step ahead of TRL, which begins at 0; then fall to min_lr_ratio at max_steps.

    Example: learning_rate 1, warmup_steps 2, max_steps 6, linear to 0: 0.5, 1, 1, 0.75, 0.5, 0.25 from step 0 on.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.max_steps - config.warmup_steps)
    if config.lr_scheduler_type == "constant":
        return config.learning_rate
    remaining = 1 - progress if config.lr_scheduler_type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
