"""Estimate the memory that a run needs on each GPU, phase by phase, before its weights are read.

To count activations, a forward and a backward pass run on the meta device, where tensors have shapes
but no numbers. Weights, gradients and optimizer state are parameters times bytes, divided by the
number of shards. Evaluations are not counted. RESERVE stands for CUDA's context, NCCL's buffers and
gaps between allocations.
"""

import copy
import math
import shutil
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minivlmrl.config.options import RunConfig
from minivlmrl.data.download import find_folder
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.distributed.micro_batching import largest_micro_batch
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import copy_model, num_shards, recompute_blocks
from minivlmrl.generation.sampler import find_engine
from minivlmrl.kernels.linear_log_softmax import piece_bytes
from minivlmrl.model.checkpoint import DTYPES, read_config
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import FAMILIES, family_of
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.lora import adapter_parameters, dropout, inject_adapters
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.model.trainable import select_trained, trained_parameters
from minivlmrl.model.value_head import ValueModel
from minivlmrl.model.vision import lay_out
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.checkpoints import NUM_KEPT_STATES
from minivlmrl.run.optimizer import begin_state, build_optimizer
from minivlmrl.trainers.reference import freeze_shared_layers
from minivlmrl.trainers.registry import find_trainer

GB = 10**9
RESERVE = 3 * GB
# bytes of a decode step for each row and token of the vocabulary: a logit and a probability in
# float32, the probability as int64, and two copies of the cumulative sum; filters need a sixth more
DRAW_BYTES = 32
TEXT_TOKENS, IMAGE_TOKENS = 200, 1000  # default sizes of a prompt


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a micro-batch, or of a sampling batch."""

    prompts: int
    num_generations: int  # completions per prompt; 0 is a forward pass over prompts only
    text_tokens: int  # text tokens per prompt
    image_tokens: int  # image tokens per prompt, after merging
    completion_tokens: int
    frames: int = 1  # number of frames of equal size that image_tokens are divided into


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of live tensors that were created in this context, and their peak."""

    def __init__(self, uncounted: list[Tensor]):  # these tensors and their views are not counted
        super().__init__()
        self.counted = {tensor.untyped_storage()._cdata for tensor in uncounted}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage):
        address = storage._cdata
        if address in self.counted:
            return
        self.counted.add(address)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, address, storage.nbytes())

    def _forget(self, address: int, size: int):
        self.counted.discard(address)
        self.now -= size


def meta_batch(config: ModelConfig, work: BatchShape) -> GroupBatch:
    """Build a batch of the given shape on the meta device; only the image grids have values."""
    merge = config.vision_config.spatial_merge_size
    frame_tokens = work.image_tokens // work.frames
    rows = max(math.isqrt(frame_tokens), 1)
    columns = math.ceil(frame_tokens / rows)
    grids = [[1, rows * merge, columns * merge]] * work.frames if frame_tokens else []
    grid = torch.tensor(grids, dtype=torch.long).view(-1, 3)
    image_ids = torch.full((columns * rows * len(grids),), config.image_token_id)
    prompt_ids = torch.cat([image_ids, torch.zeros(work.text_tokens, dtype=torch.long)])
    num_patches = int(grid.prod(1).sum())
    patches = torch.empty(num_patches, config.vision_config.patch_dim, device="meta")
    completion = Completion(torch.zeros(work.completion_tokens, dtype=torch.long))
    prompts = [Prompt(prompt_ids, patches, grid)] * work.prompts
    completions = [[completion] * work.num_generations] * work.prompts
    return pack(prompts, completions, config, "meta")


class TrainedModels(nn.Module):
    """The trained models of a stage: the policy, and PPO's critic if the critic is a separate model."""

    def __init__(self, policy: Qwen2_5_VL, critic: ValueModel | None = None):
        super().__init__()
        self.policy = policy
        self.critic = critic

    @property
    def backbones(self) -> list[Qwen2_5_VL]:
        return [self.policy] if self.critic is None else [self.policy, self.critic.backbone]


class MemoryEstimator:
    """Counts the parameters of a model and estimates the memory of its computations."""

    def __init__(self, config: ModelConfig):
        with torch.device("meta"):
            self.config = config
            self.model = FAMILIES[config.model_type].model(config)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.active_parameters = self.parameters  # parameters that one token uses
        if config.experts is not None:
            idle_share = 1 - config.experts.num_experts_per_tok / config.experts.num_experts
            routed = [p for name, p in self.model.named_parameters() if ".mlp.experts." in name]
            self.active_parameters -= round(idle_share * sum(p.numel() for p in routed))

    def build(self, run: RunConfig, stage: str) -> Qwen2_5_VL:
        """Build the policy of a stage on the meta device."""
        model = copy.deepcopy(self.model).to(DTYPES[run.model.dtype])
        inject_adapters(model, run.adapter)
        select_trained(model, run.model.freeze)
        if has_reference(run, stage):
            freeze_shared_layers(model, run.reference)
        return model

    def build_trained(self, run: RunConfig, stage: str) -> TrainedModels:
        """Build all trained models of a stage on the meta device."""
        model = self.build(run, stage)
        section = getattr(run, stage)
        if getattr(section, "critic", "shared") == "shared":
            return TrainedModels(model)
        if section.critic_path is not None:
            backbone = MemoryEstimator(read_config(find_folder(section.critic_path))).build(
                run, stage
            )
        elif run.uses_fsdp:  # the base model below the adapters is copied too
            backbone = copy.deepcopy(model)
        else:
            backbone = copy_model(model)
        return TrainedModels(model, ValueModel(backbone, run.model.freeze))

    def activations(
        self, run: RunConfig, models: TrainedModels, work: BatchShape, train: bool
    ) -> int:
        """Return the peak bytes of a forward pass, without weights and gradients.

        Args:
            train: include the backward pass.
        """
        models = copy.deepcopy(models)
        batch = meta_batch(self.config, work)
        if run.model.compute_dtype:
            models.to(DTYPES[run.model.compute_dtype])
        if run.model.activation_checkpointing:
            for backbone in models.backbones:
                recompute_blocks(backbone)
        for parameter in trained_parameters(models):
            parameter.register_post_accumulate_grad_hook(drop_gradient)
        fused = mock.patch.object(F, "scaled_dot_product_attention", fused_attention)
        dropped = dropout(models, run.adapter.dropout if train else 0.0, "plan")
        lay_out.cache_clear()  # the cached layout of the grids of an earlier forward must be counted again
        live = AllocationTracker([*models.parameters(), *models.buffers(), batch.pixel_values])
        with torch.set_grad_enabled(train), fused, dropped, live:
            if work.num_generations == 0:
                models.policy(batch, select=batch.layout.last_index)
            elif train:
                sums = [output.sum() for output in trained_outputs(models, batch)]
                torch.autograd.backward(sums)
            else:
                per_token_logps(models.policy, batch)
                if models.critic is not None:
                    models.critic(batch)
        return live.peak + batch.pixel_values.nbytes

    def keys_and_values(self, dtype: torch.dtype, work: BatchShape) -> int:
        """Return the bytes of the KV cache of a rollout.

        Each prompt is cached once, and each completion has its own tokens. A recurrent layer has a
        state of fixed size for each prompt and completion instead.
        """
        rows = torch.empty(work.prompts * (1 + work.num_generations), dtype=dtype, device="meta")
        memories = family_of(self.model).empty_memories(self.model, rows)
        recurrent_bytes = sum(map(bytes_of, memories))
        num_attending = len(self.model.model.layers) - len(memories)
        prompt_tokens = work.text_tokens + work.image_tokens
        tokens = work.prompts * (prompt_tokens + work.num_generations * work.completion_tokens)
        values = 2 * num_attending * self.config.num_key_value_heads * self.config.head_dim * tokens
        return recurrent_bytes + values * dtype.itemsize


def trained_outputs(models: TrainedModels, batch: GroupBatch) -> list[Tensor]:
    """Compute the outputs that a loss uses: log-probabilities, values, and mean router probabilities."""
    policy = models.policy
    values = [] if models.critic is None else [models.critic]
    routing = family_of(policy).routing
    if routing is None:
        logps, _ = per_token_logps(policy, batch)
        return [logps, *(critic(batch) for critic in values)]
    with routing.chosen_experts(policy) as chosen:
        logps, _ = per_token_logps(policy, batch)
    outputs = [logps, *(critic(batch) for critic in values)]
    probabilities = [of_layer for of_layer, _ in chosen().values()]
    if probabilities:
        outputs.append(torch.cat(probabilities).mean(0))
    return outputs


def drop_gradient(parameter: nn.Parameter):
    """Free a gradient at once, because the estimate counts gradients separately."""
    parameter.grad = None


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **_options) -> Tensor:
    """Call a fused attention kernel, because the meta device would compute the unfused formula."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def plan(
    run: RunConfig, stage: str, costs: MemoryEstimator, gpus: int,
    text_tokens: int, image_tokens: int, frames: int = 1,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Estimate the bytes on one GPU for each phase and item: {"train": {"weights": 1}}.

    Args:
        text_tokens, image_tokens, frames: sizes of a prompt, see BatchShape.
    """
    trainer = find_trainer(stage, run)
    models = costs.build_trained(run, stage)
    shards = num_shards(run.sharding, gpus)
    share = (
        0.0 if run.sharding.cpu_offload else 1 / shards
    )  # fraction of sharded tensors on one GPU
    micro_batch, drawn = sizes(run, stage, gpus, text_tokens, image_tokens, frames)
    samples = not trainer.answers
    gathered = gathered_bytes(run, models.policy)
    rows = micro_batch.prompts * micro_batch.num_generations * micro_batch.completion_tokens
    logits = piece_bytes(rows, costs.config.vocab_size, compute_dtype(run))
    phases = {}
    if samples:
        phases["rollout"] = rollout_items(run, costs, models.policy, drawn, gathered)
    if models.critic is not None:
        gathered += gathered_bytes(run, models.critic.backbone)
    if samples or has_reference(run, stage):
        forward = costs.activations(run, models, micro_batch, train=False)
        phases["score"] = {"gathered": gathered, "forward": forward, "logits": logits}
    gradients = bytes_of(trained_parameters(models)) * share
    if gpus > 1 and not run.uses_fsdp:
        gradients *= 2  # the ranks sum a copy of the gradients
    phases["train"] = {
        "gathered": 2 * gathered,  # weights and their gradients
        "gradients": gradients,
        "forward and backward": costs.activations(run, models, micro_batch, train=True),
        "logits": logits,
    }
    always = {name: size * share for name, size in held(run, stage, models, costs).items()}
    return {name: always | items for name, items in phases.items()}


def sizes(
    run: RunConfig, stage: str, gpus: int, text_tokens: int, image_tokens: int, frames: int
) -> tuple[BatchShape, BatchShape]:
    """Return the shapes of a micro-batch and of a sampling batch on one GPU."""
    config = getattr(run, stage)
    max_new_tokens = run.sampling.max_new_tokens
    prompt_tokens = text_tokens + image_tokens
    G = len(find_trainer(stage, run).answers) or config.num_generations
    max_tokens = getattr(config, "max_tokens_per_micro_batch", None)
    prompts = min(config.micro_batch_size, math.ceil(config.prompts_per_step / gpus))
    prompts, completions = largest_micro_batch(
        prompts, prompt_tokens, [max_new_tokens] * G, max_tokens
    )
    micro_batch = BatchShape(
        prompts, completions, text_tokens, image_tokens, max_new_tokens, frames
    )
    steps = getattr(config, "steps_per_generation", 1)
    prompts = math.ceil(config.prompts_per_step * steps / gpus)
    max_tokens = run.sampling.max_batch_tokens
    prompts, _ = largest_micro_batch(prompts, prompt_tokens, [G * max_new_tokens], max_tokens)
    return micro_batch, replace(micro_batch, prompts=prompts, num_generations=G)


def computed_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the weights in the compute dtype; NF4 weights stay packed."""
    total = 0
    for parameter in module.parameters():
        kept_dtype = dtype if parameter.is_floating_point() else parameter.dtype
        total += parameter.numel() * kept_dtype.itemsize
    return total


def gathered_bytes(run: RunConfig, model: Qwen2_5_VL) -> int:
    """Return the bytes of full weights that FSDP holds at a time during a forward pass."""
    if not run.uses_fsdp:
        return 0
    dtype = compute_dtype(run)
    blocks = [computed_bytes(block, dtype) for block in family_of(model).blocks(model)]
    # one block is computed while the next block is gathered
    return computed_bytes(model, dtype) - sum(blocks) + 2 * max(blocks)


def rollout_items(
    run: RunConfig, costs: MemoryEstimator, policy: Qwen2_5_VL, drawn: BatchShape, gathered: int
) -> dict[str, int]:
    """Return the bytes of the items that exist only in a rollout.

    Args:
        gathered: bytes of full weights that FSDP holds during a forward pass.
    """
    dtype = compute_dtype(run)
    if run.uses_fsdp and run.rollout.gather_weights:
        gathered = computed_bytes(policy, dtype)
    prompts_alone = replace(drawn, num_generations=0)
    rows = drawn.prompts * drawn.num_generations
    items = {
        "gathered": gathered,
        "keys and values": costs.keys_and_values(dtype, drawn),
        "prompts' forward": costs.activations(run, TrainedModels(policy), prompts_alone, False),
        "logits": DRAW_BYTES * rows * costs.config.vocab_size,
    }
    # a vLLM engine sleeps in the other phases
    return items | find_engine(run.sampling).engine_bytes(run.sampling, costs.parameters, dtype)


def held(
    run: RunConfig, stage: str, models: TrainedModels, costs: MemoryEstimator
) -> dict[str, int]:
    """Return the bytes of the items that exist in all phases, before sharding."""
    trainer = find_trainer(stage, run)
    policy = models.policy
    weights = bytes_of([*policy.parameters(), *policy.buffers()])
    adapters = bytes_of(
        adapter_parameters(policy)
    )  # a second model shares the base and only adds its adapters
    items = {"weights": weights, "optimizer": optimizer_bytes(run, stage, models)}
    if models.critic is not None:
        items["critic"] = bytes_of([*models.parameters(), *models.buffers()]) - weights
    if has_reference(run, stage):
        items["reference"] = reference_bytes(run, policy)
    if not trainer.trains_policy:  # the policy exists beside the trained copy
        items["policy"] = adapters or weights
    if not trainer.answers and "reward_model" in run.rewards:
        path = run.reward_model.path
        judge = costs if path is None else MemoryEstimator(read_config(find_folder(path)))
        items["reward model"] = judge.parameters * DTYPES[run.model.dtype].itemsize
    return items


def has_reference(run: RunConfig, stage: str) -> bool:
    return find_trainer(stage, run).has_reference(getattr(run, stage))


def reference_bytes(run: RunConfig, policy: nn.Module) -> int:
    """Return the bytes of a reference model beyond the weights shared with the policy, before sharding."""
    reference = run.reference
    dtype = DTYPES[run.model.dtype] if reference.sync_ref_model else compute_dtype(run)
    if reference.path is not None:
        costs = MemoryEstimator(read_config(find_folder(reference.path)))
        return costs.parameters * dtype.itemsize
    if run.adapter.r or reference.num_shared_layers is not None:
        return bytes_of(trained_parameters(policy))
    return computed_bytes(policy, dtype)


def optimizer_bytes(run: RunConfig, stage: str, model: nn.Module) -> int:
    """Return the bytes of the optimizer state."""
    optimizer = build_optimizer(model, getattr(run, stage), run.optimizer)
    begin_state(optimizer, trained_parameters(model))
    return sum(bytes_of(state.values()) for state in optimizer.state.values())


def compute_dtype(run: RunConfig) -> torch.dtype:
    return DTYPES[run.model.compute_dtype or run.model.dtype]


def peak_bytes(phases: dict[str, dict]) -> float:
    """Return the bytes of the largest phase, RESERVE included."""
    return RESERVE + max(sum(items.values()) for items in phases.values())


def state_bytes(run: RunConfig, stage: str, costs: MemoryEstimator) -> int:
    """Return the size in bytes of a training state on disk."""
    models = costs.build_trained(run, stage)
    items = held(run, stage, models, costs)
    items["weights"] = bytes_of(adapter_parameters(models.policy)) or items["weights"]
    saved = ("weights", "optimizer", "critic", "reference", "policy")
    return sum(items.get(name, 0) for name in saved)


def check_disk(run: RunConfig, stage: str, costs: MemoryEstimator):
    """Raise ValueError if the training states of a run do not fit on the disk.

    The space of earlier states counts as free, because the run deletes them.
    """
    if not run.checkpoint_steps and not run.checkpoint_minutes:
        return
    folder = Path(run.output_dir).absolute()
    earlier = sum(path.stat().st_size for path in folder.glob("states/*/*"))
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free + earlier
    size = state_bytes(run, stage, costs)
    if (NUM_KEPT_STATES + 1) * size > free:
        raise ValueError(
            f"{stage} saves {NUM_KEPT_STATES + 1} states of {size / GB:.2g} GB, but only {free / GB:.2g} GB are "
            f"free for {run.output_dir}; free some space or choose another output_dir, or skip this "
            "check with --check_memory=false"
        )


class MemoryCheck(Callback):
    """Refuses to start a run that does not fit the disk or the GPUs, with images of data.max_pixels."""

    def on_setup(self, config: RunConfig, world: World):
        if config.model.path is None:  # models with random weights are small
            return
        costs = MemoryEstimator(read_config(find_folder(config.model.path)))
        for stage in config.stage_names:
            check_disk(config, stage, costs)
        if world.device.type == "cuda":
            check_gpus(config, world, costs)


def check_gpus(run: RunConfig, world: World, costs: MemoryEstimator):
    """Raise ValueError if a stage needs more memory than a GPU has."""
    gpu_bytes = torch.cuda.get_device_properties(world.device).total_memory
    vision = costs.config.vision_config
    token_pixels = (vision.patch_size * vision.spatial_merge_size) ** 2
    image_tokens = IMAGE_TOKENS
    if run.data.max_pixels:
        image_tokens = min(IMAGE_TOKENS, run.data.max_pixels // token_pixels)
    for stage in run.stage_names:
        needed_bytes = peak_bytes(plan(run, stage, costs, world.size, TEXT_TOKENS, image_tokens))
        if needed_bytes > gpu_bytes:
            raise ValueError(
                f"{stage} needs about {needed_bytes / GB:.1f} GB on each of {world.size} GPUs, "
                f"but a GPU has {gpu_bytes / GB:.1f} GB; docs/memory.md lists options that save memory, "
                "`python -m minivlmrl memory` prints the estimate, and --check_memory=false skips "
                "this check"
            )
