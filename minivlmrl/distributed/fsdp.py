"""Shard weights, gradients and optimizer state over ranks with FSDP2, without any code in the models.

An FSDP unit gathers its weights before the forward pass and frees them afterwards. Units: vision blocks, decoder
layers, untied embedding and head, and the root with all other weights.

Gathering waits for all ranks, so ranks must run the same units in the same order. Therefore all ranks have equal
numbers of prompts, micro-batches and decode steps (in_lockstep), and ranks without images encode a black image
(DummyVisionForward).
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from minivlmrl.config.options import ShardingOptions
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import (
    Communication,
    communication_of,
    num_shards,
    recompute_blocks,
    reshard,
    shard_rows,
    units,
)
from minivlmrl.errors import UserError
from minivlmrl.model.attention import GroupAttention, PackedLayout
from minivlmrl.model.build import assign
from minivlmrl.model.config import VisionConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import family_of
from minivlmrl.model.lora import copy_adapter_layout


class Sharding:
    """Device mesh, dtypes and CPU offloading for sharded models.

    Args:
        dtype: dtype of trained weights; gradients are reduced in at least float32.
        recompute: whether to use activation checkpointing.
        compute_dtype: dtype of gathered weights and activations, even if sharding.enabled is False; None = `dtype`.
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
        self.mesh = make_mesh(num_shards(section, world.size), world)
        self.recompute = recompute
        self.once_per_step = section.once_per_step
        self.compute_dtype = compute_dtype or dtype
        # keep inputs such as rotary angles in float32
        gradient_dtype = torch.promote_types(dtype, torch.float32)
        self.precision = MixedPrecisionPolicy(compute_dtype, gradient_dtype, cast_forward_inputs=False)
        self.offload = OffloadPolicy()
        if section.cpu_offload:
            self.offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")

    def shard(self, model: VisionLanguageModel):
        """Shard a model in place, on any device, including meta."""
        has_packed_weights = not all(p.is_floating_point() for p in model.parameters())
        if has_packed_weights and torch.__version__ < "2.13":  # pytorch 177844: integer shards fail
            raise UserError(
                f"adapter.quantize: torch {torch.__version__} cannot shard the integer weights of "
                "a quantized model; install torch 2.13, or remove sharding and model.compute_dtype"
            )
        if self.recompute:
            recompute_blocks(model)
        for block in model.blocks():
            self.make_unit(block, self.precision)
        is_untied = model.lm_head.weight is not model.model.embed_tokens.weight
        if is_untied:
            self.make_unit(model.model.embed_tokens, self.precision)
            self.make_unit(model.lm_head, self.precision)
        root = self.shard_alone(model, self.precision)
        # set the prefetching order: FSDP's default depends on the number of forward passes, which may differ between
        # ranks
        root.set_modules_to_backward_prefetch(sharded_blocks(model.model.layers)[-1:])
        for tower in (model.visual.blocks, model.model.layers):
            blocks = sharded_blocks(tower)
            for previous_block, block in zip([blocks[0], *blocks], blocks, strict=False):
                block.set_modules_to_backward_prefetch([previous_block])
                communication_of(block).is_block = True
        for layer in fully_used_layers(model):
            communication_of(layer).all_reduces_once = True
        family_of(model).share_counts(model, sum_counts)
        if is_untied:
            gather_embedding_and_head(model)
        vision = DummyVisionForward()
        # these hooks must run after FSDP's, which gather the vision tower weights
        model.register_forward_pre_hook(vision.before)
        model.model.register_forward_pre_hook(vision.before_decoder)
        model.sharding = self

    def shard_head(self, head: nn.Module):
        """Shard a value head without mixed precision."""
        self.shard_alone(head, MixedPrecisionPolicy(cast_forward_inputs=False))

    def shard_alone(self, module: nn.Module, precision: MixedPrecisionPolicy) -> FSDPModule:
        """Make one FSDP unit from all parameters that are not in a unit yet."""
        root = self.make_unit(module, precision)
        for unit in units(module):
            # sum, not mean: losses are already divided by counts over all ranks
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            vars(unit)["communication"] = Communication(self.once_per_step)
        root.set_modules_to_backward_prefetch([root])
        return root

    def make_unit(self, module: nn.Module, precision: MixedPrecisionPolicy) -> FSDPModule:
        return fully_shard(module, mesh=self.mesh, mp_policy=precision, offload_policy=self.offload)

    def take_shard(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Copy this rank's rows of a full tensor into a DTensor with the dtype and sharding of `like`."""
        rows = shard_rows(self.mesh, len(tensor))
        local_rows = tensor[rows].to(self.device, like.dtype, copy=True)
        assert isinstance(like, DTensor)  # fully_shard converts all parameters to DTensor
        # DTensor.from_local would move offloaded weights to the GPU
        return DTensor(local_rows, like._spec, requires_grad=False)

    @torch.no_grad()
    def gather(self, model: VisionLanguageModel) -> VisionLanguageModel:
        """Gather all weights into an unsharded model, which runs independently of other ranks until `reshard`."""
        for unit in units(model):
            unit.unshard()
        unsharded = clone_architecture(model, self.compute_dtype)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        assign(unsharded, weights | dict(model.named_buffers()))
        return unsharded

    def copy(self, model: VisionLanguageModel, in_compute_dtype: bool) -> VisionLanguageModel:
        """Copy a sharded model; each rank copies its own shard.

        Args:
            in_compute_dtype: whether to copy weights in compute_dtype instead of their own dtype.
        """
        reshard(model)
        duplicate = clone_architecture(model, self.compute_dtype if in_compute_dtype else model.lm_head.weight.dtype)
        self.shard(duplicate)
        duplicate.save_dtype = model.save_dtype
        dtypes = {name: parameter.dtype for name, parameter in duplicate.named_parameters()}
        weights = {}
        for name, parameter in model.named_parameters():
            weights[name] = parameter.detach().to(dtypes[name], copy=True)
        assign(duplicate, weights | dict(model.named_buffers()))
        return duplicate


def make_mesh(num_shards: int, world: World) -> DeviceMesh:
    """Return a device mesh: 8 ranks form (2, 4) with two replicas, or (8,) with one."""
    device = world.device.type
    if num_shards == world.size:
        return init_device_mesh(device, (num_shards,), mesh_dim_names=("shard",))
    # not init_device_mesh, which uses PyTorch's default timeout
    ranks = torch.arange(world.size).view(-1, num_shards)
    limit = timedelta(seconds=world.timeout)
    groups = []
    for ranks_of_groups in (ranks.T, ranks):  # replicate groups (ranks with the same shard), then shard groups
        group, _ = dist.new_subgroups_by_enumeration(ranks_of_groups.tolist(), timeout=limit)
        groups.append(group)
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def sharded_blocks(tower: nn.ModuleList) -> list[FSDPModule]:
    return [block for block in tower if isinstance(block, FSDPModule)]


def fully_used_layers(model: VisionLanguageModel) -> list[FSDPModule]:
    """Return decoder layers in which every parameter gets a gradient in every micro-batch."""
    family = family_of(model)
    layers = enumerate(sharded_blocks(model.model.layers))
    return [layer for i, layer in layers if family.uses_every_parameter(model.config, i)]


def gather_embedding_and_head(model: VisionLanguageModel):
    """Add hooks that gather the embedding and head weights in every forward pass.

    FSDP gathers weights when a module is called, but the model reads `lm_head.weight` without calling `lm_head`. A
    single FSDP unit for embedding and head would need 4.4 GB for float32 gradients of a 7B model.
    """
    embedding, head = model.model.embed_tokens, model.lm_head
    assert isinstance(embedding, FSDPModule) and isinstance(head, FSDPModule)

    def gather_embedding(*_given):
        embedding.unshard()

    def gather_head(*_given):
        head.unshard()

    for unit in (embedding, head):
        unit.set_reshard_after_forward(False)  # keep weights gathered, because decode steps use them again
        communication_of(unit).all_reduces_once = True
    # these hooks must run after FSDP's, which initialize FSDP
    model.register_forward_pre_hook(gather_embedding)
    model.register_forward_hook(gather_head)


def sum_counts(counts: list[int]) -> list[int]:
    """Sum integers over all ranks, on the CPU because a GPU sum would wait for unfinished kernels."""
    total = torch.tensor(counts)
    dist.all_reduce(total)
    return total.tolist()


class DummyVisionForward:
    """Hooks that run the vision tower on a black image if only other ranks have images.

    The tower output, multiplied by 0, is added to the decoder input.
    """

    zero: Tensor | None = None  # vision tower output for the black image, times 0

    def before(self, model: VisionLanguageModel, arguments: tuple):
        batch = arguments[0]
        self.zero = None
        if dist.get_world_size() == 1:
            return
        runs_tower = len(batch.image_grid_thw) > 0 and batch.vision_embeds is None
        on_any_rank = torch.tensor(int(runs_tower))  # CPU tensor, so that ranks do not wait for their GPU
        dist.all_reduce(on_any_rank, dist.ReduceOp.MAX)
        if on_any_rank and not runs_tower:
            self.zero = forward_black_image(model.visual, model.config.vision_config, batch.input_ids.device)

    def before_decoder(self, decoder: nn.Module, arguments: tuple) -> tuple | None:
        """Add the tower output, times 0, to the decoder input, so that all ranks run the same backward pass."""
        if self.zero is None:
            return None
        x, *others = arguments
        x = x + self.zero
        self.zero = None  # free the autograd graph of the black image
        return (x, *others)


def forward_black_image(tower: nn.Module, vision_config: VisionConfig, device: torch.device) -> Tensor:
    """Run the vision tower on a one-token black image; return 0 * output."""
    merge_size = vision_config.spatial_merge_size
    black_patches = torch.zeros(merge_size**2, vision_config.patch_dim, device=device)
    return 0 * tower(black_patches, torch.tensor([[1, merge_size, merge_size]])).sum()


def in_lockstep(sample_token: Callable, max_new_tokens: int, model: VisionLanguageModel, world: World) -> Callable:
    """Wrap sample_token so that all ranks run a sharded decoder for the same number of steps.

    A rank whose completions are all finished runs the decoder on a dummy token until all ranks have finished.
    """

    def sample_together(logits: Tensor, rows: Tensor, counts: Tensor):
        ids, logps, ends = sample_token(logits, rows, counts)
        all_end = (ends | (counts + 1 == max_new_tokens)).all()
        if not all_end:
            world.sum(1)
            return ids, logps, ends
        device = world.device  # not the device of the weights, which may be the CPU
        token = torch.zeros(1, dtype=torch.long, device=device)
        position_ids = torch.zeros(3, 1, device=device)
        attention = GroupAttention(PackedLayout([1], [[]], device))
        while world.sum(0)[0]:
            model.model(model.model.embed_tokens(token), position_ids, attention)
        return ids, logps, ends

    return sample_together


def clone_architecture(model: VisionLanguageModel, dtype: torch.dtype) -> VisionLanguageModel:
    """Create a model on the meta device with the same layers and adapters as `model`."""
    with torch.device("meta"):
        clone = family_of(model).build_model(model.config).to(dtype)
    copy_adapter_layout(clone, model)
    return clone
