"""Weights of a model that every rank holds, or of which each rank holds a part: one call for both.

A model that is sharded has a distributed/fsdp.Sharding as its attribute `sharding`. This file does
not import FSDP, so that a run that shards nothing does not load it.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minivlmrl.config.options import ShardingOptions
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.model import checkpoint as model_checkpoint
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import family_of
from minivlmrl.model.plain_weights import shared_base

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# keeps the inputs of a function, which the backward computes again
compute_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def num_shards(section: ShardingOptions, num_ranks: int) -> int:
    """Count the ranks that share one model (ValueError: the replicas cannot be equally large)."""
    if num_ranks % section.replicas:
        raise ValueError(
            f"sharding.replicas is {section.replicas}, {num_ranks} ranks are no multiple of it"
        )
    return num_ranks // section.replicas if section.enabled else 1


def is_unit(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """Tell whether FSDP gathers and frees the weights of this module as one."""
    return hasattr(type(module), "unshard")


def units(module: nn.Module) -> "list[FSDPModule]":
    """List the units of a module, each gathered and freed as one; none if it is not sharded."""
    return [part for part in module.modules() if is_unit(part)]


def is_sharded(module: nn.Module) -> bool:
    return bool(units(module))


def is_part(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Tell whether a tensor holds only the rows of this rank."""
    return hasattr(tensor, "device_mesh")


def reshard(module: nn.Module):
    """Free gathered weights, before they are changed: the root's stay gathered after a forward."""
    for unit in units(module):
        unit.reshard()


def shard_rows(mesh: "DeviceMesh", num_rows: int) -> slice:
    """Say which rows of a sharded tensor this rank holds; the last ranks may have fewer, or none."""
    shards = mesh["shard"]
    rows_per_rank = math.ceil(num_rows / shards.size())
    first_row = shards.get_local_rank() * rows_per_rank
    return slice(first_row, first_row + rows_per_rank)


@contextmanager
def rollout_weights(model: Qwen2_5_VL, gather_weights: bool) -> Iterator[Qwen2_5_VL]:
    """Yield the model to sample with, without gradient.

    Args:
        gather_weights: gather a sharded model's full weights on every rank first; each rank may
            then run it as often as it likes. False: gather layer by layer, which saves memory; all
            ranks must run it equally often, see fsdp.in_lockstep.
    """
    if model.sharding is None:
        with torch.inference_mode():
            yield model
        return
    try:
        # not inference mode: what FSDP allocates in it could not be trained later
        with torch.no_grad():
            yield model.sharding.gather(model) if gather_weights else model
    finally:
        reshard(model)


def copy_model(model: Qwen2_5_VL, in_compute_dtype: bool = False) -> Qwen2_5_VL:
    """Copy a model, each rank its part; a model with adapters shares their base with its copy.

    Args:
        to_compute: copy a sharded model in the dtype that it computes in.
    """
    if model.sharding is None:
        return copy.deepcopy(model, shared_base(model))
    return model.sharding.copy(model, in_compute_dtype)


def recompute_blocks(model: Qwen2_5_VL):
    """Keep only the input of each block, and compute the block again in the backward."""
    for block in family_of(model).blocks(model):
        block.forward = partial(compute_again, block.forward)


def gather_and_save_model(
    folder: str | Path,
    model: Qwen2_5_VL,
    processor: Processor,
    world: World,
    base: str | None = None,
    more: Callable[[Path], None] | None = None,
):
    """Write the folder that model/checkpoint.save_model writes; all ranks call this.

    An error of the first rank, which writes, is raised on all ranks.
    """
    if model.sharding is None:
        save = partial(model_checkpoint.save_model, folder, model, processor, base, more)
        world.run_on_rank_zero(save)
        return
    from minivlmrl.distributed.fsdp import save_sharded

    save_sharded(folder, model, processor, world, base, more)
