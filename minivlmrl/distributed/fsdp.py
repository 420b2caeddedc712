"""Shard weights, gradients and optimizer state over ranks with FSDP2, without any code in the models.

An FSDP unit gathers its weights before the forward pass and frees them afterwards. FSDP units: vision blocks, decoder
layers, untied embedding and head, and the root with all other weights.

Ranks gather weights together, so all ranks must run the same units in the same order. All ranks have equal numbers of
prompts and micro-batches, and in_lockstep makes their numbers of decode steps equal. If some ranks have no images but
others do, DummyVisionForward lets them encode a black image.
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
from minivlmrl.kernels.backend import at_least_float32
from minivlmrl.model.attention import GroupAttention, PackedLayout
from minivlmrl.model.build import assign
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import family_of
from minivlmrl.model.lora import copy_adapter_layout


class Sharding:
    """Device mesh, dtypes and CPU offloading for sharded models.

    Args:
        dtype: dtype of trained weights; gradients are reduced in at least float32.
        recompute: whether to use activation checkpointing.
        compute_dtype: dtype of gathered weights and activations, None = `dtype`.
    """

    def __init__(
        self,
        section: ShardingOptions,
        world: World,
        dtype: torch.dtype,
        recompute: bool = False,
        compute_dtype: torch.dtype | None = None,
    ):
        self.world = world
        self.device = torch.device("cpu") if section.cpu_offload else world.device
        n = num_shards(section, world.size)
        device_type = world.device.type
        if n == world.size:
            self.mesh = init_device_mesh(device_type, (n,), mesh_dim_names=("shard",))
        else:
            ranks = torch.arange(world.size).view(-1, n)  # (replicas, shards)
            limit = timedelta(seconds=world.timeout)  # init_device_mesh would use PyTorch's default timeout
            # "replicate" connects ranks with the same shard, "shard" connects ranks of one replica
            groups = [dist.new_subgroups_by_enumeration(x.tolist(), timeout=limit)[0] for x in (ranks.T, ranks)]
            names = "replicate", "shard"
            self.mesh = DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)  # pyright: ignore[reportArgumentType]
        self.recompute = recompute
        self.once_per_step = section.once_per_step
        self.compute_dtype = compute_dtype or dtype
        self.precision = MixedPrecisionPolicy(
            compute_dtype,
            at_least_float32(dtype),
            cast_forward_inputs=False,  # keep inputs such as rotary angles in float32
        )
        self.offload = CPUOffloadPolicy(device_type == "cuda") if section.cpu_offload else OffloadPolicy()

    def shard(self, model: VisionLanguageModel):
        """Shard a model in place, on any device, including meta."""
        # sharding integer parameters fails before torch 2.13 (pytorch 177844)
        if torch.__version__ < "2.13" and not all(p.is_floating_point() for p in model.parameters()):
            raise UserError(
                f"adapter.quantize: torch {torch.__version__} cannot shard the integer weights of "
                "a quantized model; install torch 2.13, or remove sharding and model.compute_dtype"
            )
        if self.recompute:
            recompute_blocks(model)
        blocks = [self.make_unit(block, self.precision) for block in model.blocks()]
        n = len(model.visual.blocks)
        vision_blocks = blocks[:n]
        layers = blocks[n:]
        untied = []
        if model.lm_head.weight is not model.model.embed_tokens.weight:
            untied = [self.make_unit(x, self.precision) for x in (model.model.embed_tokens, model.lm_head)]
        root = self.shard_alone(model, self.precision)
        # by default, FSDP prefetches in the order of earlier forward passes, which may differ between ranks
        root.set_modules_to_backward_prefetch(layers[-1:])
        for blocks in (vision_blocks, layers):
            for previous_block, block in zip([blocks[0], *blocks], blocks, strict=False):
                block.set_modules_to_backward_prefetch([previous_block])
                communication_of(block).is_block = True
        family = family_of(model)
        for i, layer in enumerate(layers):
            communication_of(layer).all_reduces_once = family.uses_every_parameter(model.config, i)
        family.share_counts(model, lambda counts: self.world.sum(*counts))
        for unit in untied:
            unit.set_reshard_after_forward(False)  # keep embedding and head gathered for the next decode step
            communication_of(unit).all_reduces_once = True
        if untied:
            # The model reads embedding and head weights without calling the modules, so hooks on the model gather the
            # weights. FSDP's own hooks, registered earlier, initialize FSDP. One FSDP unit for embedding and head would
            # need 4.4 GB for float32 gradients in a 7B model.
            embedding, head = untied
            model.register_forward_pre_hook(lambda *_: embedding.unshard())
            model.register_forward_hook(lambda *_: head.unshard())
        vision = DummyVisionForward()
        # register after FSDP's hooks, which gather the weights of the vision tower
        model.register_forward_pre_hook(vision.before)
        model.model.register_forward_pre_hook(vision.before_decoder)
        model.sharding = self

    def shard_head(self, head: nn.Module):
        """Shard a value head as an FSDP unit of its own, without mixed precision."""
        self.shard_alone(head, MixedPrecisionPolicy(cast_forward_inputs=False))

    def shard_alone(self, module: nn.Module, precision: MixedPrecisionPolicy) -> FSDPModule:
        """Make one FSDP unit from all parameters not in a unit yet."""
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
        """Copy this rank's rows of a full tensor into a DTensor, sharded like the DTensor `like`."""
        local_rows = tensor[shard_rows(self.mesh, len(tensor))].to(self.device, like.dtype, copy=True)
        # DTensor.from_local would move offloaded weights to the GPU
        return DTensor(local_rows, like._spec, requires_grad=False)  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def gather(self, model: VisionLanguageModel) -> VisionLanguageModel:
        """Gather all weights into an unsharded model; until `reshard`, ranks can run it independently of each other."""
        for unit in units(model):
            unit.unshard()
        unsharded = clone_architecture(model, self.compute_dtype)
        assign(unsharded, {name: x.detach() for name, x in (*model.named_parameters(), *model.named_buffers())})
        return unsharded

    def copy(self, model: VisionLanguageModel, in_compute_dtype: bool) -> VisionLanguageModel:
        """Copy a sharded model, in its own dtype or in compute_dtype; every rank copies only its shard."""
        reshard(model)
        duplicate = clone_architecture(model, self.compute_dtype if in_compute_dtype else model.lm_head.weight.dtype)
        self.shard(duplicate)
        duplicate.save_dtype = model.save_dtype
        copies = dict(duplicate.named_parameters())
        weights = {name: x.detach().to(copies[name].dtype, copy=True) for name, x in model.named_parameters()}
        assign(duplicate, weights | dict(model.named_buffers()))
        return duplicate


class DummyVisionForward:
    """Hooks that make a rank without images encode a black image if other ranks have images.

    Otherwise, ranks with images would wait forever for this rank's shards of the vision tower.
    """

    zero: Tensor | None = None  # vision tower output for the black image, times 0

    def before(self, model: VisionLanguageModel, arguments: tuple):
        batch = arguments[0]
        self.zero = None
        runs_tower = len(batch.image_grid_thw) > 0 and batch.vision_embeds is None
        on_any_rank = torch.tensor(int(runs_tower))  # CPU tensor, so that ranks do not wait for their GPU
        dist.all_reduce(on_any_rank, dist.ReduceOp.MAX)
        if on_any_rank and not runs_tower:
            vision_config = model.config.vision_config
            merge_size = vision_config.spatial_merge_size
            black_patches = torch.zeros(merge_size**2, vision_config.patch_dim, device=batch.input_ids.device)
            self.zero = 0 * model.visual(black_patches, torch.tensor([[1, merge_size, merge_size]])).sum()

    def before_decoder(self, decoder: nn.Module, arguments: tuple) -> tuple | None:
        """Add 0 times the vision tower output to the decoder input, so that backward runs the tower on all ranks."""
        zero, self.zero = self.zero, None  # clear self.zero, to free its autograd graph
        if zero is None:
            return None
        x, *others = arguments
        return x + zero, *others


def in_lockstep(sample_token: Callable, max_new_tokens: int, model: VisionLanguageModel, world: World) -> Callable:
    """Wrap sample_token: ranks that finish early run the decoder on dummy tokens until all ranks have finished."""

    def sample_together(logits: Tensor, rows: Tensor, counts: Tensor):
        ids, logps, ends = sample_token(logits, rows, counts)
        if not (ends | (counts + 1 == max_new_tokens)).all():
            world.sum(1)
            return ids, logps, ends
        device = world.device  # compute device, even if weights are offloaded to the CPU
        zeros = torch.zeros(3, 1, dtype=torch.long, device=device)
        attention = GroupAttention(PackedLayout([1], [[]], device))
        while world.sum(0)[0]:
            model.model(model.model.embed_tokens(zeros[0]), zeros, attention)
        return ids, logps, ends

    return sample_together


def clone_architecture(model: VisionLanguageModel, dtype: torch.dtype) -> VisionLanguageModel:
    """Create a model on the meta device with the same layers and adapters as `model`."""
    with torch.device("meta"):
        clone = family_of(model).build_model(model.config).to(dtype)
    copy_adapter_layout(clone, model)
    return clone
