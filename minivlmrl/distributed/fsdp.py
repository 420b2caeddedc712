"""Weights, gradients and optimizer state sharded over the ranks (FSDP2), unknown to models.

Each vision block and each decoder layer is a unit: its weights are gathered when it runs and freed
after that. All other weights are one more unit, the root: embeddings and head may be one tensor.

All ranks must run the same units in the same order, or they wait for ever. So they have equal
numbers of prompts and of micro-batches; VisionInStep and in_lockstep make equal whether there are
images, and how many decode steps a rank runs.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minivlmrl.config.options import ShardingOptions
from minivlmrl.distributed.process_group import World
from minivlmrl.model.attention import GroupAttention, GroupLayout
from minivlmrl.model.build import assign
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import family_of
from minivlmrl.model.plain_weights import shared_base

# keeps the inputs of a function, which the backward computes again
compute_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def num_shards(section: ShardingOptions, num_ranks: int) -> int:
    """Count the ranks that share one model (ValueError: the replicas cannot be equally large)."""
    if num_ranks % section.replicas:
        raise ValueError(
            f"sharding.replicas is {section.replicas}, {num_ranks} ranks are no multiple of it"
        )
    return num_ranks // section.replicas if section.enabled else 1


class Sharding:
    """How models are sharded. A sharded model has it as its attribute `sharding`.

    Args:
        dtype: of the weights that the optimizer updates; gradients are added up in it too.
        compute_dtype: of gathered weights and activations, else dtype; also where not enabled.
    """

    def __init__(
        self,
        section: ShardingOptions,
        world: World,
        dtype: torch.dtype,
        recompute=False,
        compute_dtype=None,
    ):
        # here: it takes 40 MiB and half a second of runs that shard nothing
        import torch.distributed.fsdp as fsdp

        self.device = torch.device("cpu") if section.cpu_offload else world.device
        shards = num_shards(section, world.size)
        mesh = {"replicate": world.size // shards, "shard": shards}
        if shards == world.size:
            del mesh["replicate"]
        mesh_shape = tuple(mesh.values())
        mesh_names = tuple(mesh)
        self.mesh = dist.init_device_mesh(world.device.type, mesh_shape, mesh_dim_names=mesh_names)
        self.recompute = recompute
        self.compute_dtype = compute_dtype or dtype
        # inputs keep their dtypes: rotary angles stay float32, and adapters on a base of less
        gradient_dtype = torch.promote_types(dtype, torch.float32)
        precision = fsdp.MixedPrecisionPolicy(
            compute_dtype, gradient_dtype, cast_forward_inputs=False
        )
        self.options = {"mesh": self.mesh, "mp_policy": precision}
        if section.cpu_offload:
            pin_memory = world.device.type == "cuda"
            self.options["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory)

    def shard(self, model: nn.Module):
        """Shard a model on any device, also on the meta device."""
        has_packed_weights = not all(p.is_floating_point() for p in model.parameters())
        if has_packed_weights and torch.__version__ < "2.13":  # pytorch issue 177844
            raise ValueError(
                f"adapter.quantize: torch {torch.__version__} shards no bytes; "
                "leave out sharding and model.compute_dtype, or install torch 2.13"
            )
        if self.recompute:
            recompute_blocks(model)
        for block in family_of(model).blocks(model):
            dist.fsdp.fully_shard(block, **self.options)
        self.shard_alone(model)
        # The backward of a unit gathers the one before it. FSDP's own guess follows the forwards
        # since the last backward, of which a rank may have had more: two ranks would then gather
        # different layers as if they were one.
        model.set_modules_to_backward_prefetch([model.model.layers[-1]])
        for tower in (model.visual.blocks, model.model.layers):
            for previous_block, block in zip([tower[0], *tower], tower, strict=False):
                block.set_modules_to_backward_prefetch([previous_block])
        family_of(model).count_over_ranks(model, sum_counts)
        vision = VisionInStep()
        # runs after FSDP's own, which gathers the root
        model.register_forward_pre_hook(vision.before)
        # runs before FSDP's own, which waits for the gradient
        model.register_forward_hook(vision.after, prepend=True)
        model.sharding = self

    def shard_head(self, head: nn.Module):
        """Shard a value head, which computes in the dtype of its own weights."""
        self.shard_alone(head, mp_policy=dist.fsdp.MixedPrecisionPolicy(cast_forward_inputs=False))

    def shard_alone(self, module: nn.Module, **options):
        """Shard what is not in a unit yet, as one unit."""
        dist.fsdp.fully_shard(module, **self.options | options)
        for unit in units(module):
            # a sum: each loss is divided by the global count already
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        module.set_modules_to_backward_prefetch([module])

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Copy this rank's rows of a full tensor, in the form of a parameter."""
        rows = shard_rows(self.mesh, len(tensor))
        local_rows = tensor[rows].to(self.device, like.dtype, copy=True)
        # from_local would move an offloaded part to the GPU
        return dist.tensor.DTensor(local_rows, like._spec, requires_grad=False)


def shard_rows(mesh: dist.DeviceMesh, num_rows: int) -> slice:
    """Say which rows of a sharded tensor this rank holds; the last ranks may have fewer, or none."""
    shards = mesh["shard"]
    rows_per_rank = math.ceil(num_rows / shards.size())
    first_row = shards.get_local_rank() * rows_per_rank
    return slice(first_row, first_row + rows_per_rank)


def sum_counts(counts: list[int]) -> list[int]:
    """Add up counts of all ranks; on the host: nobody waits for a GPU."""
    total = torch.tensor(counts)
    dist.all_reduce(total)
    return total.tolist()


class VisionInStep:
    """Makes a rank without images run the tower if another has some, on a black image times 0.

    If no rank has images, none runs the tower, and AdamW skips its parameters.
    """

    def before(self, model: nn.Module, arguments: tuple):
        batch = arguments[0]
        self.zero = None
        if dist.get_world_size() == 1:
            return
        runs_tower = len(batch.image_grid_thw) > 0 and batch.vision_embeds is None
        on_any_rank = torch.tensor(int(runs_tower))  # on the host: nobody waits for a GPU
        dist.all_reduce(on_any_rank, dist.ReduceOp.MAX)
        if on_any_rank and not runs_tower:
            self.zero = see_black(model.visual, model.config.vision_config, batch.input_ids.device)

    def after(self, model: nn.Module, arguments: tuple, hidden: Tensor) -> Tensor:
        if self.zero is None:
            return hidden
        hidden = hidden + self.zero
        self.zero = None  # frees its graph
        return hidden


def see_black(tower: Callable, config, device) -> Tensor:
    """Run a vision tower on one black token, times 0: a number that depends on all its weights."""
    merge_size = config.spatial_merge_size
    black_patches = torch.zeros(merge_size**2, config.patch_dim, device=device)
    return 0 * tower(black_patches, torch.tensor([[1, merge_size, merge_size]])).sum()


def units(module: nn.Module) -> list[nn.Module]:
    """List the units of a module, each gathered and freed as one; none if it is not sharded."""
    return [part for part in module.modules() if hasattr(type(part), "unshard")]


def is_sharded(module: nn.Module) -> bool:
    return bool(units(module))


def reshard(module: nn.Module):
    """Free gathered weights, before they are changed: the root's stay gathered after a forward."""
    for unit in units(module):
        unit.reshard()


@contextmanager
def rollout_weights(model: Qwen2_5_VL, gather_weights: bool) -> Iterator[Qwen2_5_VL]:
    """Yield what to run without gradient, to sample.

    gather_weights: gather a sharded model's full weights on every rank first; each rank may then
    run it as often as it likes. False: gather layer by layer, which saves memory; all ranks must
    run it equally often, see in_lockstep.
    """
    if not is_sharded(model):
        with torch.inference_mode():
            yield model
        return
    try:
        # not inference mode: what FSDP allocates in it could not be trained later
        with torch.no_grad():
            yield gathered(model) if gather_weights else model
    finally:
        reshard(model)


def in_lockstep(
    sample_token: Callable, max_new_tokens: int, model: nn.Module, world: World
) -> Callable:
    """Make all ranks run a sharded decoder equally often, though completions end at different steps.

    Returns a `sample_token` for `generate` that tells the other ranks of each further decode step,
    and after the last one runs steps on a meaningless token until all ranks have finished.
    """

    def sample_together(logits: Tensor, rows: Tensor, counts: Tensor):
        ids, logps, ends = sample_token(logits, rows, counts)
        all_end = (ends | (counts + 1 == max_new_tokens)).all()
        if not all_end:
            world.sum(1)
            return ids, logps, ends
        device = world.device  # weights may be offloaded
        token = torch.zeros(1, dtype=torch.long, device=device)
        position_ids = torch.zeros(3, 1, device=device)
        attention = GroupAttention(GroupLayout([1], [[]], device))
        while world.sum(0)[0]:  # some rank decodes another step
            model.model(model.model.embed_tokens(token), position_ids, attention)
        return ids, logps, ends

    return sample_together


@torch.no_grad()
def gathered(model: Qwen2_5_VL) -> Qwen2_5_VL:
    """Gather a sharded model's weights until it is resharded, and make a plain model on them.

    It has no hooks: a rank may run it alone, and a CUDA graph capture it.
    """
    for unit in units(model):
        unit.unshard()
    twin = twin_of(model, model.sharding.compute_dtype)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assign(twin, weights | dict(model.named_buffers()))
    return twin


def copy_model(model: Qwen2_5_VL, to_compute: bool = False) -> Qwen2_5_VL:
    """Copy a model but the base of adapters, each rank its part; to_compute: in that dtype."""
    if not is_sharded(model):
        return copy.deepcopy(model, shared_base(model))
    reshard(model)
    dtype = model.sharding.compute_dtype if to_compute else model.lm_head.weight.dtype
    twin = twin_of(model, dtype)
    model.sharding.shard(twin)
    dtypes = {name: parameter.dtype for name, parameter in twin.named_parameters()}
    weights = {name: p.detach().to(dtypes[name], copy=True) for name, p in model.named_parameters()}
    assign(twin, weights | dict(model.named_buffers()))
    return twin


def twin_of(model: Qwen2_5_VL, dtype: torch.dtype) -> Qwen2_5_VL:
    """Build a model of the same layers on the meta device."""
    with torch.device("meta"):
        twin = family_of(model).model(model.config).to(dtype)
    from minivlmrl.model.lora import place_like  # here, because few runs shard the weights

    place_like(twin, model)
    return twin


def recompute_blocks(model: nn.Module):
    """Keep only the input of each block, and compute the block again in the backward."""
    for block in family_of(model).blocks(model):
        block.forward = partial(compute_again, block.forward)
