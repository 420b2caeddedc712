"""Weights, gradients and optimizer state cut into one part a rank (FSDP2), from outside: models know nothing of it.

Each vision block and each decoder layer is a unit: its weights are gathered when it runs and freed behind it. All that
is left (embeddings, patch embedding, merger, last norm, head) is one more unit, the root. Embeddings and head stay in
one unit because they may be one tensor, and because the head's weight is read beside its forward (model/logprobs.py).

A sharded forward or backward is joint work: every rank has to run the same units in the same order, or all wait for
ever. What differs from rank to rank is made equal: images here, the number of micro-batches by Algorithm.in_step.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from minivlmrl.run.config import ShardingSection
from minivlmrl.scale.ranks import World


class Sharding:
    """How models are cut. A model that is cut carries it as its attribute `sharding`.

    Args:
        dtype: of the weights that the optimizer updates; gradients are added up in it too.
        compute_dtype: of gathered weights and of activations.
        activation_checkpointing: see recompute_blocks.
    Raises:
        ValueError: the ranks are no multiple of section.replicas.
    """

    def __init__(
        self,
        section: ShardingSection,
        size: int,
        device: torch.device,
        dtype: torch.dtype,
        compute_dtype: torch.dtype | None,
        activation_checkpointing: bool = False,
    ):
        if size % section.replicas:
            raise ValueError(f"sharding.replicas is {section.replicas}, but {size} ranks are no multiple of it")
        self.device = torch.device("cpu") if section.cpu_offload else device
        self.mesh = _mesh(size, section.replicas, device.type)
        self.activation_checkpointing = activation_checkpointing
        self.options = {
            "mesh": self.mesh,
            # inputs keep their dtypes: rotary angles stay float32, as without sharding
            "mp_policy": MixedPrecisionPolicy(compute_dtype, reduce_dtype=dtype, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy(device.type == "cuda") if section.cpu_offload else OffloadPolicy(),
        }

    def shard(self, model: nn.Module):
        """Cut a Qwen2_5_VL, on any device, the meta device too."""
        if self.activation_checkpointing:
            recompute_blocks(model)
        for block in blocks(model):
            fully_shard(block, **self.options)
        self.shard_alone(model)
        _prefetch_backward(model)
        pace = _VisionPace()
        model.register_forward_pre_hook(pace.before)  # behind FSDP's own, which gathers the root
        model.register_forward_hook(pace.behind, prepend=True)  # before FSDP's own, which waits for the gradient
        model.sharding, model.pace = self, pace

    def shard_alone(self, module: nn.Module):
        """Cut what is not in a unit yet as one unit."""
        fully_shard(module, **self.options)
        for unit in units(module):
            unit.set_gradient_divide_factor(1.0)  # a sum: each loss is divided by the global count already
            unit.set_force_sum_reduction_for_comms(True)
        module.set_modules_to_backward_prefetch([module])

    def part(self, tensor: Tensor, wanted: DTensor) -> DTensor:
        """This rank's rows of a whole tensor, and of nothing else a copy.

        Args:
            wanted: the parameter that they are for.
        """
        shards = self.mesh["shard"]
        rows = -(-len(tensor) // shards.size())  # the last ranks may have fewer, or none
        own = tensor[shards.get_local_rank() * rows :][:rows].to(self.device, wanted.dtype, copy=True)
        return DTensor.from_local(
            own, wanted.device_mesh, wanted.placements, run_check=False, shape=wanted.shape, stride=wanted.stride()
        )


def _prefetch_backward(model: nn.Module):
    """Have the backward of each unit gather the one before it, which is needed next.

    Said explicitly, because FSDP's own guess follows the forwards since the last backward, and of these a rank may have
    had more than another, in a rollout: they would then gather different layers, of equal size, as if they were one.
    """
    model.set_modules_to_backward_prefetch([model.model.layers[-1]])
    for tower in (list(model.visual.blocks), list(model.model.layers)):
        for before, block in zip([tower[0], *tower], tower, strict=False):
            block.set_modules_to_backward_prefetch([before])


class _VisionPace:
    """Lets a rank without images run the vision tower too if another rank has some, on one black image that counts 0.

    Without images on any rank nobody runs it: then its parameters have no gradient, and AdamW does not move them.
    """

    def __init__(self):
        self.joint = True  # False while weights are whole: then each rank works for itself
        self.nothing: Tensor | None = None

    def before(self, model: nn.Module, arguments: tuple):
        images = len(arguments[0].image_grid_thw)
        if not self.joint or not _anyone(images > 0, arguments[0].input_ids.device) or images:
            return
        config, device = model.config.vision_config, arguments[0].input_ids.device
        side, patch = config.spatial_merge_size, config.in_channels * config.temporal_patch_size * config.patch_size**2
        black = torch.zeros(side**2, patch, device=device)
        self.nothing = 0 * model.visual(black, torch.tensor([[1, side, side]])).sum()

    def behind(self, model: nn.Module, arguments: tuple, hidden: Tensor) -> Tensor:
        if self.nothing is None:
            return hidden
        nothing, self.nothing = self.nothing, None
        return hidden + nothing


def _anyone(mine: bool, device: torch.device) -> bool:
    """Whether any rank says yes."""
    if dist.get_world_size() == 1:
        return mine
    flag = torch.tensor(int(mine), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def _mesh(size: int, replicas: int, device: str) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(device, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(device, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def blocks(model: nn.Module) -> list[nn.Module]:
    """The vision blocks and decoder layers of a Qwen2_5_VL."""
    return [*model.visual.blocks, *model.model.layers]


def units(module: nn.Module) -> list[FSDPModule]:
    """What is gathered and freed as one, of a module; of one that is not cut nothing."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def is_sharded(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in module.modules())


def reshard(module: nn.Module):
    """Free gathered weights. To be called before the parts are changed: the root's stay whole after a forward."""
    for unit in units(module):
        unit.reshard()


@contextmanager
def layer_by_layer(module: nn.Module) -> Iterator[None]:
    """Run it, without gradient, in step with the other ranks; behind that nothing is left gathered."""
    try:
        yield
    finally:
        reshard(module)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Keep whole weights on every rank meanwhile: ranks then run it, without gradient, as often as each likes."""
    paces = [part.pace for part in module.modules() if isinstance(part, FSDPModule) and hasattr(part, "pace")]
    for unit in units(module):
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
    for pace in paces:
        pace.joint = False
    try:
        yield
    finally:
        for pace in paces:
            pace.joint = True
        for unit in units(module):
            unit.set_reshard_after_forward(not hasattr(unit, "pace"), recurse=False)
            unit.reshard()


@contextmanager
def rollout_weights(model: nn.Module, world: World, gather_weights: bool) -> Iterator["Joint | None"]:
    """Run a model without gradient, to sample or to judge, with full weights or layer by layer.

    Args:
        gather_weights: gather a sharded model's full weights on every rank first; each rank may then run it as often
            as it likes. False: gather layer by layer, which saves memory; all ranks must run it equally often.
    Yields:
        None, or for a model that is gathered layer by layer what makes its decode steps equally many on all ranks.
    """
    if not is_sharded(model):
        with torch.inference_mode():
            yield None
        return
    # no inference mode: what FSDP allocates in it could not be trained later
    with torch.no_grad(), gathered(model) if gather_weights else layer_by_layer(model):
        yield None if gather_weights else Joint(world)


class Joint:
    """Makes all ranks run a decoder equally often, though their completions end after different numbers of tokens."""

    def __init__(self, world: World):
        self.world = world

    def step(self):
        """Say that this rank runs one more decode step; call it before each."""
        self.world.sum(1)

    def finish(self, model: nn.Module):
        """Run decode steps on one meaningless token until all ranks have finished; call it after the last step."""
        device = self.world.device  # a part of the weights may lie elsewhere
        token, position_ids = torch.zeros(1, dtype=torch.long, device=device), torch.zeros(3, 1, device=device)
        while self.world.sum(0)[0]:
            model.model(model.model.embed_tokens(token), position_ids, lambda layer_index, q, k, v: q)


def copy_model(model: nn.Module) -> nn.Module:
    """A deep copy of a Qwen2_5_VL, cut like the original: each rank copies the part it holds."""
    if not is_sharded(model):
        return copy.deepcopy(model)
    reshard(model)
    with torch.device("meta"):
        twin = type(model)(model.config).to(model.lm_head.weight.dtype)
    model.sharding.shard(twin)
    assign(twin, {name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)
    return twin


def assign(model: nn.Module, weights: dict[str, Tensor]):
    """Give a Qwen2_5_VL on the meta device its weights, by name; a tied head has the embedding's."""
    model.load_state_dict(weights, assign=True, strict=False)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def recompute_blocks(model: nn.Module):
    """Keep only what enters each vision block and decoder layer, and run it once more in the backward.

    The head is left out: linear_log_softmax recomputes its logits anyway.
    """
    for block in blocks(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
