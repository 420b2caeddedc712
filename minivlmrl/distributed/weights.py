"""Work with weights that may be sharded with FSDP2.

Sharded models have an attribute `sharding` (distributed.fsdp.Sharding). PyTorch's FSDP is not imported here, because
most runs do not shard.
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
from minivlmrl.errors import UserError
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.plain_weights import has_adapters, shared_base

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# activation checkpointing: keep a function's inputs, run it again in the backward pass
compute_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def num_shards(section: ShardingOptions, num_ranks: int) -> int:
    """Return over how many ranks a copy of the weights is sharded.

    Raises:
        UserError: number of ranks not a multiple of sharding.replicas.
    """
    if num_ranks % section.replicas:
        raise UserError(
            f"sharding.replicas is {section.replicas}, but the number of ranks, {num_ranks}, is "
            "not a multiple of it; change one of the two"
        )
    return num_ranks // section.replicas if section.enabled else 1


def is_unit(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """Return True for an FSDP unit, whose weights are gathered and freed together."""
    return hasattr(type(module), "unshard")


def units(module: nn.Module) -> "list[FSDPModule]":
    """Return all FSDP units."""
    return [part for part in module.modules() if is_unit(part)]


def is_sharded(module: nn.Module) -> bool:
    return bool(units(module))


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return True for a DTensor, which holds only some rows on each rank."""
    return hasattr(tensor, "device_mesh")


def reshard(module: nn.Module):
    """Free gathered weights."""
    for unit in units(module):
        unit.reshard()


@dataclass
class Communication:
    """When an FSDP unit gathers weights and sums gradients."""

    once_per_step: bool  # option sharding.once_per_step
    # weights freed after a forward pass: vision blocks and decoder layers
    is_block: bool = False
    # sum gradients over replicas only in a step's last micro-batch; needs a gradient for each parameter in
    # every micro-batch, because FSDP sums a unit's gradients as one tensor
    all_reduces_once: bool = False
    was_gathered: bool = False  # a unit never gathered before cannot postpone its reduction


def communication_of(unit: "FSDPModule") -> Communication:
    return vars(unit)["communication"]


def begin_micro_batch(module: nn.Module, is_last: bool):
    """Set whether FSDP gathers weights and sums gradients in the next micro-batch.

    Default: in all of them. With sharding.once_per_step: gather in the first, sum in the last micro-batch of a step.
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
    """Free gathered weights after a step's last micro-batch, before the optimizer changes them."""
    for unit in units(module):
        if communication_of(unit).once_per_step:
            unit.set_reshard_after_forward(communication_of(unit).is_block, recurse=False)
    reshard(module)


def shard_rows(mesh: "DeviceMesh", num_rows: int) -> slice:
    """Return this rank's slice of rows: 0:3, 3:6, 6:9 or 9:12 for 10 rows on 4 ranks."""
    shards = mesh["shard"]
    rows_per_rank = math.ceil(num_rows / shards.size())
    first_row = shards.get_local_rank() * rows_per_rank
    return slice(first_row, first_row + rows_per_rank)


@contextmanager
def rollout_weights(model: VisionLanguageModel, gather_weights: bool) -> Iterator[VisionLanguageModel]:
    """Context manager: model for sampling, without gradients.

    Args:
        gather_weights: if True, gather full weights first, then ranks run any number of forward passes. If False,
            gather one layer at a time: less memory, but ranks must run the same number of passes (fsdp.in_lockstep).
    """
    if model.sharding is None:
        with adapter_copies(model), torch.inference_mode():
            yield model
        return
    try:
        # not inference_mode: gathered weights could not be trained afterwards
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
    """Context manager that replaces adapters with 16-bit copies on a GPU."""
    if not has_adapters(model):
        return nullcontext([])
    from minivlmrl.model.lora import sampling_copies

    return sampling_copies(model)


def copy_model(model: VisionLanguageModel, in_compute_dtype: bool = False) -> VisionLanguageModel:
    """Copy a model, each rank its own rows; of an unsharded model with adapters, only the adapters.

    Args:
        in_compute_dtype: if True, copy a sharded model in its compute dtype.
    """
    if model.sharding is None:
        return copy.deepcopy(model, shared_base(model))
    return model.sharding.copy(model, in_compute_dtype)


def recompute_blocks(model: VisionLanguageModel):
    """Enable activation checkpointing for vision blocks and decoder layers."""
    for block in model.blocks():
        block.forward = partial(compute_again, block.forward)
