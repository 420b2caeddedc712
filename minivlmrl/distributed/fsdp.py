"""Weights, gradients and optimizer state sharded over the ranks (FSDP2), unknown to models.

Each vision block and each decoder layer is a unit: its weights are gathered when it runs and freed
after that. All other weights are one more unit, the root: embeddings and head may be one tensor.

All ranks must run the same units in the same order, or they wait for ever. So they have equal
numbers of prompts and of micro-batches; VisionInStep and in_lockstep make equal whether there are
images, and how many decode steps a rank runs.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from minivlmrl.config.options import ShardingOptions
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import num_shards, recompute_blocks, reshard, shard_rows, units
from minivlmrl.files import replacing, save_tensors
from minivlmrl.model import checkpoint
from minivlmrl.model.attention import GroupAttention, GroupLayout
from minivlmrl.model.build import assign
from minivlmrl.model.config import VisionConfig
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import family_of
from minivlmrl.model.lora import copy_adapter_layout
from minivlmrl.model.plain_weights import gather_full_tensor


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
        recompute: bool = False,
        compute_dtype: torch.dtype | None = None,
    ):
        self.device = torch.device("cpu") if section.cpu_offload else world.device
        shards = num_shards(section, world.size)
        mesh = {"replicate": world.size // shards, "shard": shards}
        if shards == world.size:
            del mesh["replicate"]
        mesh_shape = tuple(mesh.values())
        mesh_names = tuple(mesh)
        self.mesh = init_device_mesh(world.device.type, mesh_shape, mesh_dim_names=mesh_names)
        self.recompute = recompute
        self.compute_dtype = compute_dtype or dtype
        # inputs keep their dtypes: rotary angles stay float32, and adapters on a base of less
        gradient_dtype = torch.promote_types(dtype, torch.float32)
        self.precision = MixedPrecisionPolicy(
            compute_dtype, gradient_dtype, cast_forward_inputs=False
        )
        self.offload = OffloadPolicy()
        if section.cpu_offload:
            self.offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")

    def shard(self, model: Qwen2_5_VL):
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
            self.make_unit(block, self.precision)
        root = self.shard_alone(model, self.precision)
        # The backward of a unit gathers the one before it. FSDP's own guess follows the forwards
        # since the last backward, of which a rank may have had more: two ranks would then gather
        # different layers as if they were one.
        root.set_modules_to_backward_prefetch(sharded_blocks(model.model.layers)[-1:])
        for tower in (model.visual.blocks, model.model.layers):
            blocks = sharded_blocks(tower)
            for previous_block, block in zip([blocks[0], *blocks], blocks, strict=False):
                block.set_modules_to_backward_prefetch([previous_block])
        family_of(model).count_over_ranks(model, sum_counts)
        vision = DummyVisionForward()
        # runs after FSDP's own, which gathers the root
        model.register_forward_pre_hook(vision.before)
        # runs before FSDP's own, which waits for the gradient
        model.register_forward_hook(vision.after, prepend=True)
        model.sharding = self

    def shard_head(self, head: nn.Module):
        """Shard a value head, which computes in the dtype of its own weights."""
        self.shard_alone(head, MixedPrecisionPolicy(cast_forward_inputs=False))

    def shard_alone(self, module: nn.Module, precision: MixedPrecisionPolicy) -> FSDPModule:
        """Shard what is not in a unit yet, as one unit."""
        root = self.make_unit(module, precision)
        for unit in units(module):
            # a sum: each loss is divided by the global count already
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        root.set_modules_to_backward_prefetch([root])
        return root

    def make_unit(self, module: nn.Module, precision: MixedPrecisionPolicy) -> FSDPModule:
        """Gather and free the weights of a module as one."""
        return fully_shard(module, mesh=self.mesh, mp_policy=precision, offload_policy=self.offload)

    def part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Copy this rank's rows of a full tensor, in the form of a parameter."""
        rows = shard_rows(self.mesh, len(tensor))
        local_rows = tensor[rows].to(self.device, like.dtype, copy=True)
        assert isinstance(like, DTensor)  # as fully_shard has made all parameters
        # from_local would move an offloaded part to the GPU
        return DTensor(local_rows, like._spec, requires_grad=False)

    @torch.no_grad()
    def gather(self, model: Qwen2_5_VL) -> Qwen2_5_VL:
        """Gather a model's weights until it is resharded, and make a plain model on them.

        It has no hooks: a rank may run it alone, and a CUDA graph capture it.
        """
        for unit in units(model):
            unit.unshard()
        twin = clone_architecture(model, self.compute_dtype)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        assign(twin, weights | dict(model.named_buffers()))
        return twin

    def copy(self, model: Qwen2_5_VL, in_compute_dtype: bool) -> Qwen2_5_VL:
        """Copy a model, each rank its part; to_compute: in the dtype that it computes in."""
        reshard(model)
        twin = clone_architecture(
            model, self.compute_dtype if in_compute_dtype else model.lm_head.weight.dtype
        )
        self.shard(twin)
        dtypes = {name: parameter.dtype for name, parameter in twin.named_parameters()}
        weights = {}
        for name, parameter in model.named_parameters():
            weights[name] = parameter.detach().to(dtypes[name], copy=True)
        assign(twin, weights | dict(model.named_buffers()))
        return twin


def sharded_blocks(tower: nn.ModuleList) -> list[FSDPModule]:
    """List the blocks of a tower, which are units."""
    return [block for block in tower if isinstance(block, FSDPModule)]


def sum_counts(counts: list[int]) -> list[int]:
    """Add up counts of all ranks; on the host: nobody waits for a GPU."""
    total = torch.tensor(counts)
    dist.all_reduce(total)
    return total.tolist()


class DummyVisionForward:
    """Makes a rank without images run the tower if another has some, on a black image times 0.

    If no rank has images, none runs the tower, and AdamW skips its parameters.
    """

    zero: Tensor | None = None  # result of the black image in this forward, times 0

    def before(self, model: Qwen2_5_VL, arguments: tuple):
        batch = arguments[0]
        self.zero = None
        if dist.get_world_size() == 1:
            return
        runs_tower = len(batch.image_grid_thw) > 0 and batch.vision_embeds is None
        on_any_rank = torch.tensor(int(runs_tower))  # on the host: nobody waits for a GPU
        dist.all_reduce(on_any_rank, dist.ReduceOp.MAX)
        if on_any_rank and not runs_tower:
            self.zero = forward_black_image(
                model.visual, model.config.vision_config, batch.input_ids.device
            )

    def after(self, model: Qwen2_5_VL, arguments: tuple, hidden: Tensor) -> Tensor:
        if self.zero is None:
            return hidden
        hidden = hidden + self.zero
        self.zero = None  # frees its graph
        return hidden


def forward_black_image(tower: nn.Module, config: VisionConfig, device: torch.device) -> Tensor:
    """Run a vision tower on one black token, times 0: a number that depends on all its weights."""
    merge_size = config.spatial_merge_size
    black_patches = torch.zeros(merge_size**2, config.patch_dim, device=device)
    return 0 * tower(black_patches, torch.tensor([[1, merge_size, merge_size]])).sum()


def in_lockstep(
    sample_token: Callable, max_new_tokens: int, model: Qwen2_5_VL, world: World
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


def clone_architecture(model: Qwen2_5_VL, dtype: torch.dtype) -> Qwen2_5_VL:
    """Build a model of the same layers on the meta device."""
    with torch.device("meta"):
        twin = family_of(model).model(model.config).to(dtype)
    copy_adapter_layout(twin, model)
    return twin


def save_sharded(
    folder: str | Path,
    model: Qwen2_5_VL,
    processor: Processor,
    world: World,
    base: str | None = None,
    more: Callable[[Path], None] | None = None,
    max_shard_size: int = checkpoint.MAX_SHARD_SIZE,
):
    """Write the folder of a sharded model, see weights.gather_and_save_model.

    The ranks gather the tensors of one file after the other, because the first rank could not hold
    all of them.
    """
    reshard(model)
    weights = checkpoint.file_weights(model)
    write_adapter = checkpoint.adapter_writer(model, base)
    unread = world.run_on_rank_zero(lambda: checkpoint.unread_tensors(model)) or {}
    # only the first rank has the unread tensors, so the others take its split into files
    files = world.gather_objects(checkpoint.split_weights(weights | unread, max_shard_size))[0]
    with ExitStack() as saving:
        # the other ranks write nothing
        new_folder = world.run_on_rank_zero(
            lambda: saving.enter_context(replacing(folder))
        ) or Path(folder)

        def write_tensors(file: str, tensors: dict[str, Tensor]):
            for name, tensor in tensors.items():
                if name in weights:
                    checkpoint.check_finite(name, tensor, folder)
            save_tensors(tensors, new_folder / file)

        def finish():
            checkpoint.write_settings(new_folder, model, processor)
            checkpoint.write_index(new_folder, files)
            checkpoint.write_extras(new_folder, write_adapter, more)
            saving.pop_all().close()  # in this function, so that all ranks raise its errors

        for file, names in files.filename_to_tensors.items():
            tensors = {}
            for name in names:
                if name in weights:
                    weight = gather_full_tensor(weights[name])  # gathered by all ranks
                    if world.is_main:
                        tensors[name] = weight.cpu().contiguous()
                elif world.is_main:
                    tensors[name] = unread[name]
            world.run_on_rank_zero(partial(write_tensors, file, tensors))
        world.run_on_rank_zero(finish)
