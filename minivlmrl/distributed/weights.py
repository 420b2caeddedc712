"""Functions for models that may be sharded with FSDP2.

PyTorch's FSDP is not imported here, because most runs do not need it.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minivlmrl.config.options import ShardingOptions
from minivlmrl.errors import UserError
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.plain_weights import has_adapters, shared_weights

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def num_shards(section: ShardingOptions, num_ranks: int) -> int:
    """Return over how many ranks the weights are sharded; other groups of ranks hold replicas."""
    if num_ranks % section.replicas:
        raise UserError(
            f"sharding.replicas is {section.replicas}, but the number of ranks, {num_ranks}, is "
            "not a multiple of it; change one of the two"
        )
    return num_ranks // section.replicas if section.enabled else 1


def units(module: nn.Module) -> "list[FSDPModule]":
    """Return all FSDP units in a module."""
    return cast("list[FSDPModule]", [part for part in module.modules() if hasattr(type(part), "unshard")])


def is_sharded(module: nn.Module) -> bool:
    return bool(units(module))


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return True for a DTensor, whose rows are sharded over the ranks."""
    return hasattr(tensor, "device_mesh")


def reshard(module: nn.Module):
    """Free gathered weights."""
    for unit in units(module):
        unit.reshard()


@dataclass
class Communication:
    """Options that decide when an FSDP unit gathers weights and reduces gradients."""

    once_per_step: bool
    # whether the unit is a vision block or decoder layer, whose gathered weights are freed after the forward pass
    is_block: bool = False
    # whether replicas sum gradients only in the last micro-batch. FSDP sums all gradients of a unit as one tensor, so
    # every parameter then needs a gradient in every micro-batch.
    all_reduces_once: bool = False
    # whether the unit has gathered its weights before: only then can FSDP postpone gradient reduction
    was_gathered: bool = False


def communication_of(unit: "FSDPModule") -> Communication:
    return vars(unit)["communication"]


def begin_micro_batch(module: nn.Module, is_last: bool):
    """Set whether FSDP gathers weights and reduces gradients in the next micro-batch.

    With sharding.once_per_step, weights are gathered in the first micro-batch, and gradients are reduced in the last
    one, instead of in every micro-batch.
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
    """Free gathered weights before the optimizer updates the shards."""
    for unit in units(module):
        if communication_of(unit).once_per_step:
            unit.set_reshard_after_forward(communication_of(unit).is_block, recurse=False)
    reshard(module)


def shard_rows(mesh: "DeviceMesh", num_rows: int) -> slice:
    """Return this rank's slice of rows: for 10 rows on 4 ranks, 0:3, 3:6, 6:9 or 9:12 (only row 9)."""
    shards = mesh["shard"]
    rows_per_rank = math.ceil(num_rows / shards.size())
    first_row = shards.get_local_rank() * rows_per_rank
    return slice(first_row, first_row + rows_per_rank)


@contextmanager
def rollout_weights(model: VisionLanguageModel, gather_weights: bool) -> Iterator[VisionLanguageModel]:
    """Yield the model for sampling, without gradients.

    Args:
        gather_weights: whether to gather all weights first, so that ranks can sample independently. If not, forward
            passes gather one layer at a time, and all ranks must run equally many (see fsdp.in_lockstep).
    """
    if not model.sharding:
        with adapter_copies(model), torch.inference_mode():
            yield model
        return
    try:
        # not inference_mode: weights gathered there could not be trained later
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
    """Return a context manager that uses 16-bit copies of adapters on a GPU."""
    if not has_adapters(model):
        return nullcontext([])
    from minivlmrl.model.lora import sampling_copies

    return sampling_copies(model)


def copy_model(model: VisionLanguageModel, in_compute_dtype: bool = False) -> VisionLanguageModel:
    """Copy a model, or this rank's shard; unsharded copies share frozen weights.

    Args:
        in_compute_dtype: if True, copy a sharded model in its compute dtype.
    """
    if not model.sharding:
        return copy.deepcopy(model, shared_weights(model))
    return model.sharding.copy(model, in_compute_dtype)


def recompute_blocks(model: VisionLanguageModel):
    """Enable activation checkpointing for vision blocks and decoder layers."""
    for block in model.blocks():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
