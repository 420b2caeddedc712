"""Shard weights, gradients and optimizer state over the ranks with FSDP2; models contain no code for it.

FSDP units (weights gathered before the forward pass, freed afterwards): vision blocks, decoder layers, embedding and
head if untied, and the root with all remaining weights.

Ranks must run the same units in the same order, because gathering waits for all ranks. So all ranks get equal numbers
of prompts and micro-batches per step, DummyVisionForward runs the vision tower on ranks without images, and in_lockstep
equalizes the number of decode steps.
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
        dtype: of the weights that the optimizer updates; gradients are reduced in at least float32.
        recompute: activation checkpointing.
        compute_dtype: of gathered weights and activations, also without sharding.enabled; None = `dtype`.
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
        # inputs such as rotary angles stay in float32
        gradient_dtype = torch.promote_types(dtype, torch.float32)
        self.precision = MixedPrecisionPolicy(compute_dtype, gradient_dtype, cast_forward_inputs=False)
        self.offload = OffloadPolicy()
        if section.cpu_offload:
            self.offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")

    def shard(self, model: VisionLanguageModel):
        """Shard a model in place, on any device including meta."""
        has_packed_weights = not all(p.is_floating_point() for p in model.parameters())
        if has_packed_weights and torch.__version__ < "2.13":  # pytorch issue 177844
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
        # explicit prefetching order in the backward pass: FSDP's default depends on the number of forward passes, so
        # ranks with different numbers would gather different layers in one collective
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
        # after FSDP's hooks, which gather the vision tower's weights
        model.register_forward_pre_hook(vision.before)
        model.model.register_forward_pre_hook(vision.before_decoder)
        model.sharding = self

    def shard_head(self, head: nn.Module):
        """Shard a value head, which computes in its weights' dtype."""
        self.shard_alone(head, MixedPrecisionPolicy(cast_forward_inputs=False))

    def shard_alone(self, module: nn.Module, precision: MixedPrecisionPolicy) -> FSDPModule:
        """Make an FSDP unit from all parameters not yet in a unit."""
        root = self.make_unit(module, precision)
        for unit in units(module):
            # sum instead of mean: losses are already divided by counts over all ranks
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            vars(unit)["communication"] = Communication(self.once_per_step)
        root.set_modules_to_backward_prefetch([root])
        return root

    def make_unit(self, module: nn.Module, precision: MixedPrecisionPolicy) -> FSDPModule:
        return fully_shard(module, mesh=self.mesh, mp_policy=precision, offload_policy=self.offload)

    def take_shard(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Copy this rank's rows of a full tensor into a DTensor, with dtype and sharding of the parameter `like`."""
        rows = shard_rows(self.mesh, len(tensor))
        local_rows = tensor[rows].to(self.device, like.dtype, copy=True)
        assert isinstance(like, DTensor)  # fully_shard makes all parameters DTensors
        # not DTensor.from_local, which would move offloaded weights to the GPU
        return DTensor(local_rows, like._spec, requires_grad=False)

    @torch.no_grad()
    def gather(self, model: VisionLanguageModel) -> VisionLanguageModel:
        """Gather the weights into an unsharded model, which runs without waiting for other ranks until `reshard`."""
        for unit in units(model):
            unit.unshard()
        unsharded = clone_architecture(model, self.compute_dtype)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        assign(unsharded, weights | dict(model.named_buffers()))
        return unsharded

    def copy(self, model: VisionLanguageModel, in_compute_dtype: bool) -> VisionLanguageModel:
        """Copy a sharded model, each rank its own rows.

        Args:
            in_compute_dtype: if True, copy in compute_dtype instead of the parameters' dtype.
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
    """Return a device mesh: for 8 ranks (2, 4) with two copies of the weights, or (8,) with one."""
    device = world.device.type
    if num_shards == world.size:
        return init_device_mesh(device, (num_shards,), mesh_dim_names=("shard",))
    # not init_device_mesh, which sets PyTorch's default timeout
    ranks = torch.arange(world.size).view(-1, num_shards)
    limit = timedelta(seconds=world.timeout)
    groups = []
    for ranks_of_groups in (ranks.T, ranks):  # groups with the same shard, then replicas
        group, _ = dist.new_subgroups_by_enumeration(ranks_of_groups.tolist(), timeout=limit)
        groups.append(group)
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def sharded_blocks(tower: nn.ModuleList) -> list[FSDPModule]:
    return [block for block in tower if isinstance(block, FSDPModule)]


def fully_used_layers(model: VisionLanguageModel) -> list[FSDPModule]:
    """Return decoder layers whose parameters all get a gradient in every micro-batch."""
    family = family_of(model)
    layers = enumerate(sharded_blocks(model.model.layers))
    return [layer for i, layer in layers if family.uses_every_parameter(model.config, i)]


def gather_embedding_and_head(model: VisionLanguageModel):
    """Add hooks that gather embedding and head in every forward pass.

    FSDP gathers weights when a module is called, but the model reads `lm_head.weight` without calling `lm_head`. One
    unit for both would need 4.4 GB for a 7B model's float32 gradients.
    """
    embedding, head = model.model.embed_tokens, model.lm_head
    assert isinstance(embedding, FSDPModule) and isinstance(head, FSDPModule)

    def gather_embedding(*_given):
        embedding.unshard()

    def gather_head(*_given):
        head.unshard()

    for unit in (embedding, head):
        unit.set_reshard_after_forward(False)  # stays gathered, because decode steps call the embedding again
        communication_of(unit).all_reduces_once = True
    # after FSDP's own hook, which initializes FSDP
    model.register_forward_pre_hook(gather_embedding)
    model.register_forward_hook(gather_head)


def sum_counts(counts: list[int]) -> list[int]:
    """Sum integers over all ranks on the CPU: a GPU sum would wait for unfinished kernels."""
    total = torch.tensor(counts)
    dist.all_reduce(total)
    return total.tolist()


class DummyVisionForward:
    """Hooks that run the vision tower on a black image on ranks without images, because all ranks must run it together.

    The output times 0 is added to the decoder's input. If no rank has images, no rank runs the tower.
    """

    zero: Tensor | None = None  # 0 * (tower output for the black image), in this forward pass

    def before(self, model: VisionLanguageModel, arguments: tuple):
        batch = arguments[0]
        self.zero = None
        if dist.get_world_size() == 1:
            return
        runs_tower = len(batch.image_grid_thw) > 0 and batch.vision_embeds is None
        on_any_rank = torch.tensor(int(runs_tower))  # on the CPU, so that no rank waits for its GPU
        dist.all_reduce(on_any_rank, dist.ReduceOp.MAX)
        if on_any_rank and not runs_tower:
            self.zero = forward_black_image(model.visual, model.config.vision_config, batch.input_ids.device)

    def before_decoder(self, decoder: nn.Module, arguments: tuple) -> tuple | None:
        """Add the black image's zero to the decoder's input, so that all ranks have the same backward pass."""
        if self.zero is None:
            return None
        x, *others = arguments
        x = x + self.zero
        self.zero = None  # frees the black image's autograd graph
        return (x, *others)


def forward_black_image(tower: nn.Module, vision_config: VisionConfig, device: torch.device) -> Tensor:
    """Run the vision tower on a one-token black image, and return a zero with gradients."""
    merge_size = vision_config.spatial_merge_size
    black_patches = torch.zeros(merge_size**2, vision_config.patch_dim, device=device)
    return 0 * tower(black_patches, torch.tensor([[1, merge_size, merge_size]])).sum()


def in_lockstep(sample_token: Callable, max_new_tokens: int, model: VisionLanguageModel, world: World) -> Callable:
    """Wrap sample_token so that all ranks run a sharded decoder for the same number of steps.

    Before every decode step, each rank tells the others whether it needs another one. A rank with only finished
    completions runs the decoder on a dummy token until all ranks have finished.
    """

    def sample_together(logits: Tensor, rows: Tensor, counts: Tensor):
        ids, logps, ends = sample_token(logits, rows, counts)
        all_end = (ends | (counts + 1 == max_new_tokens)).all()
        if not all_end:
            world.sum(1)
            return ids, logps, ends
        device = world.device  # not the weights' device: they may be offloaded
        token = torch.zeros(1, dtype=torch.long, device=device)
        position_ids = torch.zeros(3, 1, device=device)
        attention = GroupAttention(PackedLayout([1], [[]], device))
        while world.sum(0)[0]:  # another rank still decodes
            model.model(model.model.embed_tokens(token), position_ids, attention)
        return ids, logps, ends

    return sample_together


def clone_architecture(model: VisionLanguageModel, dtype: torch.dtype) -> VisionLanguageModel:
    """Create a model with the layers and adapters of `model` on the meta device."""
    with torch.device("meta"):
        clone = family_of(model).build_model(model.config).to(dtype)
    copy_adapter_layout(clone, model)
    return clone
