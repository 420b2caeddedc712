"""Functions for the weights of a model, sharded or not.

A sharded model has a distributed.fsdp.Sharding as its attribute `sharding`. This file does not import FSDP, so that
runs without sharding do not load it.
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

# activation checkpointing, which stores only the inputs of a function and recomputes the rest in the backward pass
compute_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def num_shards(section: ShardingOptions, num_ranks: int) -> int:
    """Return the number of ranks that share one model's weights."""
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
    """Return the FSDP units in a module; the list is empty if the module is not sharded."""
    return [part for part in module.modules() if is_unit(part)]


def is_sharded(module: nn.Module) -> bool:
    return bool(units(module))


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return True if a tensor is a DTensor, which stores only this rank's rows."""
    return hasattr(tensor, "device_mesh")


def reshard(module: nn.Module):
    """Free a sharded module's gathered weights.

    Call this function before parameters are changed, because the root unit's weights stay gathered after a forward
    pass.
    """
    for unit in units(module):
        unit.reshard()


@dataclass
class Communication:
    """Settings for when an FSDP unit gathers weights and reduces gradients, see begin_micro_batch."""

    once_per_step: bool  # the option sharding.once_per_step
    # True for vision blocks and decoder layers, whose weights are freed after a forward pass
    is_block: bool = False
    # True if the same parameters have gradients in every micro-batch of a step. Only then can the sum over replicas be
    # postponed, because FSDP keeps one tensor with all gradients until that sum.
    all_reduces_once: bool = False
    was_gathered: bool = False  # only a unit that was gathered before can postpone its reduction


def communication_of(unit: "FSDPModule") -> Communication:
    """Return the Communication of an FSDP unit, which distributed.fsdp.Sharding has set."""
    return vars(unit)["communication"]


def begin_micro_batch(module: nn.Module, is_last: bool):
    """Postpone a sharded module's communication to the last micro-batch of an optimizer step.

    With sharding.once_per_step, gathered weights are kept, and gradients are added up on each rank. The last
    micro-batch reduces all gradients, also those of a unit that it does not run, such as the vision tower if no rank
    has an image. Without the option, only the sum over replicas is postponed.
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
    """Free all gathered weights after the last micro-batch of an optimizer step."""
    for unit in units(module):
        if communication_of(unit).once_per_step:
            unit.set_reshard_after_forward(communication_of(unit).is_block, recurse=False)
    reshard(module)


def shard_rows(mesh: "DeviceMesh", num_rows: int) -> slice:
    """Return the rows of a sharded tensor that this rank stores.

    The last ranks may have fewer rows than the first, or none.
    """
    shards = mesh["shard"]
    rows_per_rank = math.ceil(num_rows / shards.size())
    first_row = shards.get_local_rank() * rows_per_rank
    return slice(first_row, first_row + rows_per_rank)


@contextmanager
def rollout_weights(model: VisionLanguageModel, gather_weights: bool) -> Iterator[VisionLanguageModel]:
    """Yield the model to sample with, without gradients.

    On a GPU, the adapters are 16-bit copies (see model/lora.py), unless layers are gathered one at a time.

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
        # inference_mode is not used, because tensors that FSDP allocates in inference_mode cannot be trained later
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
    """Replace a model's adapters by 16-bit copies in a `with` block, see sampling_copies in model/lora.py."""
    if not has_adapters(model):
        return nullcontext([])
    # imported here, because few runs have adapters
    from minivlmrl.model.lora import sampling_copies

    return sampling_copies(model)


def copy_model(model: VisionLanguageModel, in_compute_dtype: bool = False) -> VisionLanguageModel:
    """Copy a model. Each rank copies its own part.

    An unsharded model with adapters shares its base weights with the copy.

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
