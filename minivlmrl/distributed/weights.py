"""Functions for the weights of a model that may be sharded with FSDP2.

A sharded model stores an object of the class distributed.fsdp.Sharding in its attribute `sharding`. This module does
not import FSDP, so that runs without sharding do not load FSDP.
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

# activation checkpointing: store only the inputs of a function, and run the function again in the backward pass
compute_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def num_shards(section: ShardingOptions, num_ranks: int) -> int:
    """Return over how many ranks the weights of a model are sharded; raise ValueError if replicas do not divide the
    ranks."""
    if num_ranks % section.replicas:
        raise ValueError(
            f"sharding.replicas is {section.replicas}, but the number of ranks, {num_ranks}, is "
            "not a multiple of it; change one of the two"
        )
    return num_ranks // section.replicas if section.enabled else 1


def is_unit(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """Return True if FSDP has wrapped this module as a unit, whose weights are gathered and freed together."""
    return hasattr(type(module), "unshard")


def units(module: nn.Module) -> "list[FSDPModule]":
    """Return all FSDP units in a module; a module that is not sharded has none."""
    return [part for part in module.modules() if is_unit(part)]


def is_sharded(module: nn.Module) -> bool:
    return bool(units(module))


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return True if a tensor is a DTensor, of which this rank stores only some rows."""
    return hasattr(tensor, "device_mesh")


def reshard(module: nn.Module):
    """Free the gathered weights of a sharded module, which is necessary before its parameters are changed."""
    for unit in units(module):
        unit.reshard()


@dataclass
class Communication:
    """When an FSDP unit gathers its weights and reduces its gradients, see begin_micro_batch."""

    once_per_step: bool  # the option sharding.once_per_step
    # True for vision blocks and decoder layers, whose gathered weights are freed after their forward pass
    is_block: bool = False
    # True if the same parameters have gradients in every micro-batch of a step. Otherwise the sum over replicas cannot
    # be postponed, because FSDP sums all gradients of a unit as one tensor.
    all_reduces_once: bool = False
    was_gathered: bool = False  # only a unit that was gathered before can postpone its reduction


def communication_of(unit: "FSDPModule") -> Communication:
    return vars(unit)["communication"]


def begin_micro_batch(module: nn.Module, is_last: bool):
    """Postpone the communication of a sharded module until the last micro-batch of an optimizer step.

    With the option sharding.once_per_step, gathered weights are kept, and each rank adds up its own gradients. The last
    micro-batch sums the gradients over the ranks, also for units that it does not run, such as the vision tower.
    Without sharding.once_per_step, only the sum of gradients over replicas is postponed.
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
    """Free all gathered weights of a module after the last micro-batch of an optimizer step."""
    for unit in units(module):
        if communication_of(unit).once_per_step:
            unit.set_reshard_after_forward(communication_of(unit).is_block, recurse=False)
    reshard(module)


def shard_rows(mesh: "DeviceMesh", num_rows: int) -> slice:
    """Return which rows of a sharded tensor this rank stores; the last ranks may store fewer rows, or none."""
    shards = mesh["shard"]
    rows_per_rank = math.ceil(num_rows / shards.size())
    first_row = shards.get_local_rank() * rows_per_rank
    return slice(first_row, first_row + rows_per_rank)


@contextmanager
def rollout_weights(model: VisionLanguageModel, gather_weights: bool) -> Iterator[VisionLanguageModel]:
    """Yield a model for sampling, in a block without gradients.

    On a GPU, sampling uses 16-bit copies of the adapters (see model/lora.py), unless weights are gathered layer by
    layer.

    Args:
        gather_weights: True gathers a sharded model's full weights on every rank first, so
            that each rank can run any number of forward passes. False gathers one layer at a time, which saves memory;
            all ranks must then run equally many passes, see fsdp.in_lockstep.
    """
    if model.sharding is None:
        with adapter_copies(model), torch.inference_mode():
            yield model
        return
    try:
        # torch.inference_mode is avoided, because tensors that FSDP allocates in it cannot be trained later
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
    """Replace the adapters of a model by 16-bit copies in a `with` block, see sampling_copies in model/lora.py."""
    if not has_adapters(model):
        return nullcontext([])
    # The code for adapters is imported only if a model has adapters, because few runs have them.
    from minivlmrl.model.lora import sampling_copies

    return sampling_copies(model)


def copy_model(model: VisionLanguageModel, in_compute_dtype: bool = False) -> VisionLanguageModel:
    """Copy a model. Each rank copies its own part.

    With adapters and without sharding, the copy shares the base weights of the model.

    Args:
        in_compute_dtype: copy a sharded model into the dtype in which it computes.
    """
    if model.sharding is None:
        return copy.deepcopy(model, shared_base(model))
    return model.sharding.copy(model, in_compute_dtype)


def recompute_blocks(model: VisionLanguageModel):
    """Enable activation checkpointing for each vision block and decoder layer in a model."""
    for block in model.blocks():
        block.forward = partial(compute_again, block.forward)
