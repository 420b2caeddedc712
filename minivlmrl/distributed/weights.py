"""Functions for the weights of a model that may be sharded with FSDP2.

A sharded model has an attribute `sharding`, an object of the class distributed.fsdp.Sharding. The module weights.py
does not import PyTorch's FSDP, because most runs do not shard their models.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minivlmrl.config.options import ShardingOptions
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.plain_weights import has_adapters, shared_base

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# Activation checkpointing stores only the inputs of a function, and runs the function again in the backward pass.
compute_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def num_shards(section: ShardingOptions, num_ranks: int) -> int:
    """Return the number of ranks over which one copy of the weights is sharded.

    Raises:
        ValueError: the number of ranks is not a multiple of sharding.replicas.
    """
    if num_ranks % section.replicas:
        raise ValueError(
            f"sharding.replicas is {section.replicas}, but the number of ranks, {num_ranks}, is "
            "not a multiple of it; change one of the two"
        )
    return num_ranks // section.replicas if section.enabled else 1


def is_unit(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """Return True if a module is an FSDP unit, whose weights are gathered and freed together."""
    return hasattr(type(module), "unshard")


def units(module: nn.Module) -> "list[FSDPModule]":
    """Return all FSDP units in a module."""
    return [part for part in module.modules() if is_unit(part)]


def is_sharded(module: nn.Module) -> bool:
    return bool(units(module))


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return True for a DTensor, because each rank stores only some of its rows."""
    return hasattr(tensor, "device_mesh")


def reshard(module: nn.Module):
    """Free the gathered weights of a sharded module."""
    for unit in units(module):
        unit.reshard()


@dataclass
class Communication:
    """Settings that decide when an FSDP unit gathers weights and sums gradients over the ranks."""

    once_per_step: bool  # the option sharding.once_per_step
    # whether gathered weights are freed after a forward pass; True for vision blocks and decoder layers
    is_block: bool = False
    # whether gradients are summed over replicas only in a step's last micro-batch. This requires a gradient for each
    # parameter in every micro-batch, because FSDP sums a unit's gradients as one tensor.
    all_reduces_once: bool = False
    was_gathered: bool = False  # only a unit that was gathered before can postpone its reduction


def communication_of(unit: "FSDPModule") -> Communication:
    return vars(unit)["communication"]


def begin_micro_batch(module: nn.Module, is_last: bool):
    """Set whether FSDP gathers weights and sums gradients in the next micro-batch.

    With sharding.once_per_step, a step's first micro-batch gathers the weights, and its last micro-batch sums the
    gradients. By default, every micro-batch gathers weights and sums gradients.
    """
    for unit in units(module):
        communication = communication_of(unit)
        if communication.once_per_step:
            if not communication.was_gathered:
                unit.unshard()
                unit.reshard()
                communication.was_gathered = True
            unit.set_requires_gradient_sync(is_last, recurse=False)
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(is_last, recurse=False)
        elif communication.all_reduces_once:
            unit.set_requires_all_reduce(is_last, recurse=False)


def end_micro_batches(module: nn.Module):
    """Free the gathered weights after the last micro-batch of a step, because the optimizer will change the weights."""
    for unit in units(module):
        if communication_of(unit).once_per_step:
            unit.set_reshard_after_forward(communication_of(unit).is_block, recurse=False)
    reshard(module)


def shard_rows(mesh: "DeviceMesh", num_rows: int) -> slice:
    """Return the slice of a tensor's rows on this rank: 0:3, 3:6, 6:9 or 9:12 for 10 rows on 4 ranks."""
    shards = mesh["shard"]
    rows_per_rank = math.ceil(num_rows / shards.size())
    first_row = shards.get_local_rank() * rows_per_rank
    return slice(first_row, first_row + rows_per_rank)


@contextmanager
def rollout_weights(model: VisionLanguageModel, gather_weights: bool) -> Iterator[VisionLanguageModel]:
    """Context manager that yields a model for sampling, without gradients.

    Args:
        gather_weights: True gathers a sharded model's full weights on every rank first, so that each rank can run any
            number of forward passes. False gathers one layer at a time, which saves memory; all ranks must then run the
            same number of passes (see fsdp.in_lockstep).
    """
    if model.sharding is None:
        with adapter_copies(model), torch.inference_mode():
            yield model
        return
    try:
        # torch.inference_mode would make the gathered weights unusable for training.
        with torch.no_grad():
            if not gather_weights:
                yield model
                return
            gathered = model.sharding.gather(model)
            with adapter_copies(gathered):
                yield gathered
    finally:
        reshard(model)


def adapter_copies(model: VisionLanguageModel) -> AbstractContextManager[list[nn.Parameter]]:
    """Context manager that replaces a model's adapters with 16-bit copies on a GPU."""
    if not has_adapters(model):
        return nullcontext([])
    from minivlmrl.model.lora import sampling_copies

    return sampling_copies(model)


def copy_model(model: VisionLanguageModel, in_compute_dtype: bool = False) -> VisionLanguageModel:
    """Copy a model. Each rank of a sharded model copies only its own rows of the weights.

    If an unsharded model has adapters, only the adapters are copied, and the base weights are shared.

    Args:
        in_compute_dtype: True copies a sharded model in the dtype that it computes in.
    """
    if model.sharding is None:
        return copy.deepcopy(model, shared_base(model))
    return model.sharding.copy(model, in_compute_dtype)


def recompute_blocks(model: VisionLanguageModel):
    """Enable activation checkpointing for each vision block and decoder layer in a model."""
    for block in model.blocks():
        block.forward = partial(compute_again, block.forward)
