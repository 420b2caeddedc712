"""Estimate the memory that a run needs on each GPU, phase by phase, before its weights are read.

To count the activations, a forward and a backward pass run on the meta device, where tensors have a
shape but no values. The sizes of weights, gradients and optimizer state follow from the number of
parameters and their dtypes, and are divided by the number of shards. Evaluations are not counted.
RESERVE stands for the CUDA context, the buffers of NCCL and the gaps between allocations.
"""

import copy
import math
import shutil
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
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
from minivlmrl.generation.cuda_graphs import joined_bytes
from minivlmrl.generation.sampler import can_capture, find_engine
from minivlmrl.kernels.linear_log_softmax import piece_bytes
from minivlmrl.model.checkpoint import DTYPES, read_config
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import FAMILIES, family_of
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.lora import adapter_parameters, dropout, inject_adapters, sampling_copies
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.model.trainable import select_trained, trained_parameters
from minivlmrl.model.value_head import ValueModel
from minivlmrl.model.vision import lay_out
from minivlmrl.run.callbacks import Callback
from minivlmrl.run.checkpoints import NUM_KEPT_STATES
from minivlmrl.run.optimizer import begin_state, build_optimizer
from minivlmrl.run.setup import patch_dtype
from minivlmrl.trainers.reference import freeze_shared_layers
from minivlmrl.trainers.registry import find_trainer

GB = 10**9
RESERVE = 3 * GB
# bytes that a decode step needs for each row and each token of the vocabulary: a logit and a
# probability in float32, the probability as int64, and two copies of the cumulative sum. Filters
# such as top_p need a sixth more.
DRAW_BYTES = 32
TEXT_TOKENS, IMAGE_TOKENS = 200, 1000  # number of text and image tokens of a prompt, by default


@dataclass(frozen=True)
class BatchShape:
    """Numbers of prompts, completions and tokens in a micro-batch or in a sampling batch."""

    prompts: int
    num_generations: int  # completions per prompt; 0 stands for a forward pass of the prompts
    text_tokens: int  # number of text tokens per prompt
    image_tokens: int  # number of image tokens per prompt, after patches are merged
    completion_tokens: int  # number of tokens per completion
    frames: int = 1  # number of images of equal size that image_tokens are divided into


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of the tensors that were created in this context, now and at their peak."""

    def __init__(self, uncounted: list[Tensor]):
        super().__init__()
        # storages that are not counted again: those of `uncounted`, and all that were counted
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


def meta_batch(config: ModelConfig, work: BatchShape, patch_dtype: torch.dtype) -> GroupBatch:
    """Build a batch of the given shape on the meta device.

    Only the ids and the image grids have values, because they decide the shapes of other tensors.
    """
    merge = config.vision_config.spatial_merge_size
    frame_tokens = work.image_tokens // work.frames
    rows = max(math.isqrt(frame_tokens), 1)
    columns = math.ceil(frame_tokens / rows)
    grids = [[1, rows * merge, columns * merge]] * work.frames if frame_tokens else []
    grid = torch.tensor(grids, dtype=torch.long).view(-1, 3)
    image_ids = torch.full((columns * rows * len(grids),), config.image_token_id)
    prompt_ids = torch.cat([image_ids, torch.zeros(work.text_tokens, dtype=torch.long)])
    num_patches = int(grid.prod(1).sum())
    patch_dim = config.vision_config.patch_dim
    patches = torch.empty(num_patches, patch_dim, dtype=patch_dtype, device="meta")
    completion = Completion(torch.zeros(work.completion_tokens, dtype=torch.long))
    prompts = [Prompt(prompt_ids, patches, grid)] * work.prompts
    completions = [[completion] * work.num_generations] * work.prompts
    return pack(prompts, completions, config, "meta")


class TrainedModels(nn.Module):
    """The trained models of a stage: the policy, and the critic of PPO if it is separate."""

    def __init__(self, policy: VisionLanguageModel, critic: ValueModel | None = None):
        super().__init__()
        self.policy = policy
        self.critic = critic

    @property
    def backbones(self) -> list[VisionLanguageModel]:
        return [self.policy] if self.critic is None else [self.policy, self.critic.backbone]


class MemoryEstimator:
    """Counts the parameters of a model, and estimates the memory that its computations need."""

    def __init__(self, config: ModelConfig):
        with torch.device("meta"):
            self.config = config
            self.model = FAMILIES[config.model_type].model(config)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.active_parameters = self.parameters  # number of parameters used for one token
        if config.experts is not None:
            idle_share = 1 - config.experts.num_experts_per_tok / config.experts.num_experts
            routed = [p for name, p in self.model.named_parameters() if ".mlp.experts." in name]
            self.active_parameters -= round(idle_share * sum(p.numel() for p in routed))

    def build(self, run: RunConfig, stage: str) -> VisionLanguageModel:
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
        elif run.uses_fsdp:  # FSDP needs a copy of the base model below the adapters too
            backbone = copy.deepcopy(model)
        else:
            backbone = copy_model(model)
        return TrainedModels(model, ValueModel(backbone, run.model.freeze))

    def activations(
        self, run: RunConfig, models: TrainedModels, work: BatchShape, train: bool
    ) -> int:
        """Return the peak memory of a forward pass in bytes, without weights and gradients.

        Args:
            work: shape of the batch.
            train: True to include the backward pass.
        """
        models = copy.deepcopy(models)
        batch = meta_batch(self.config, work, patch_dtype(run))
        if run.model.compute_dtype:
            models.to(DTYPES[run.model.compute_dtype])
        if run.model.activation_checkpointing:
            for backbone in models.backbones:
                recompute_blocks(backbone)
        for parameter in trained_parameters(models):
            parameter.register_post_accumulate_grad_hook(drop_gradient)
        fused_patch = mock.patch.object(F, "scaled_dot_product_attention", fused_attention)
        dropout_on = dropout(models, run.adapter.dropout if train else 0.0, "memory")
        # The layout of an image grid is cached; without clearing the cache, it would not be counted
        # if an earlier forward pass had the same grids.
        lay_out.cache_clear()
        live = AllocationTracker([*models.parameters(), *models.buffers(), batch.pixel_values])
        with torch.set_grad_enabled(train), fused_patch, dropout_on, live:
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
        """Return the size of the KV cache of a rollout in bytes.

        The tokens of a prompt are cached once for all of its completions. Instead of keys and
        values, a recurrent layer caches a state of fixed size for each prompt and each completion.
        """
        rows = torch.empty(work.prompts * (1 + work.num_generations), dtype=dtype, device="meta")
        layer_states = family_of(self.model).initial_states(self.model, rows)
        recurrent_bytes = sum(map(bytes_of, layer_states))
        num_attending = len(self.model.model.layers) - len(layer_states)
        prompt_tokens = work.text_tokens + work.image_tokens
        tokens = work.prompts * (prompt_tokens + work.num_generations * work.completion_tokens)
        values = 2 * num_attending * self.config.num_key_value_heads * self.config.head_dim * tokens
        return recurrent_bytes + values * dtype.itemsize


def trained_outputs(models: TrainedModels, batch: GroupBatch) -> list[Tensor]:
    """Compute the outputs that a loss uses: log-probabilities, values and router probabilities."""
    policy = models.policy
    values = [] if models.critic is None else [models.critic]
    routing = family_of(policy).routing
    if routing is None:
        logps, _ = per_token_logps(policy, batch)
        return [logps, *(critic(batch) for critic in values)]
    with routing.chosen_experts(policy) as chosen:
        logps, _ = per_token_logps(policy, batch)
    outputs = [logps, *(critic(batch) for critic in values)]
    probabilities = [layer_probabilities for layer_probabilities, _ in chosen().values()]
    if probabilities:
        outputs.append(torch.cat(probabilities).mean(0))
    return outputs


def drop_gradient(parameter: nn.Parameter):
    """Free a gradient as soon as it is computed, because gradients are counted separately."""
    parameter.grad = None


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **_options) -> Tensor:
    """Call the fused attention kernel of the CPU.

    On the meta device, scaled_dot_product_attention would use the unfused formula, which needs more
    memory than the kernels of a GPU.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def estimate_phases(
    run: RunConfig,
    stage: str,
    estimator: MemoryEstimator,
    gpus: int,
    text_tokens: int,
    image_tokens: int,
    frames: int = 1,
) -> dict[str, dict[str, float]]:
    """Estimate the memory on one GPU in bytes, for each phase of a stage and each item in it.

    Args:
        text_tokens, image_tokens, frames: size of a prompt, see BatchShape.

    Returns:
        {phase: {item: bytes}}, for example {"train": {"weights": 1e9, "gradients": 1e9}}.
    """
    trainer = find_trainer(stage, run)
    models = estimator.build_trained(run, stage)
    shards = num_shards(run.sharding, gpus)
    # fraction of a sharded tensor that one GPU holds
    share = 0.0 if run.sharding.cpu_offload else 1 / shards
    micro_batch, sampling_batch = batch_shapes(run, stage, gpus, text_tokens, image_tokens, frames)
    gathered = gathered_bytes(run, models.policy)
    rows = micro_batch.prompts * micro_batch.num_generations * micro_batch.completion_tokens
    logits = piece_bytes(rows, estimator.config.vocab_size, compute_dtype(run))
    phases = {}
    if trainer.samples_completions:
        phases["rollout"] = rollout_items(run, estimator, models.policy, sampling_batch, gathered)
    if models.critic is not None:
        gathered += gathered_bytes(run, models.critic.backbone)
    if trainer.samples_completions or has_reference(run, stage):
        forward = estimator.activations(run, models, micro_batch, train=False)
        phases["score"] = {"gathered": gathered, "forward": forward, "logits": logits}
    gradients = bytes_of(trained_parameters(models)) * share
    if gpus > 1 and not run.uses_fsdp:
        gradients *= 2  # because the ranks sum a copy of the gradients
    gathered *= 2  # both the weights and their gradients
    if run.sharding.once_per_step:
        gathered, accumulated = once_per_step_bytes(run, models, gathered)
        gradients += accumulated
    phases["train"] = {
        "gathered": gathered,
        "gradients": gradients,
        "forward and backward": estimator.activations(run, models, micro_batch, train=True),
        "logits": logits,
    }
    always = {
        name: size * share for name, size in persistent_items(run, stage, models, estimator).items()
    }
    return {name: always | items for name, items in phases.items()}


def batch_shapes(
    run: RunConfig, stage: str, gpus: int, text_tokens: int, image_tokens: int, frames: int
) -> tuple[BatchShape, BatchShape]:
    """Return the shapes of a micro-batch and of a sampling batch on one GPU."""
    config = getattr(run, stage)
    max_new_tokens = run.sampling.max_new_tokens
    prompt_tokens = text_tokens + image_tokens
    trainer = find_trainer(stage, run)
    G = config.num_generations if trainer.samples_completions else len(trainer.answers)
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
    """Return the size of the weights in bytes after a cast to `dtype`; NF4 weights stay packed."""
    total = 0
    for parameter in module.parameters():
        used_dtype = dtype if parameter.is_floating_point() else parameter.dtype
        total += parameter.numel() * used_dtype.itemsize
    return total


def gathered_bytes(run: RunConfig, model: VisionLanguageModel) -> int:
    """Return how many bytes of gathered weights FSDP holds at most during a forward pass."""
    if not run.uses_fsdp:
        return 0
    dtype = compute_dtype(run)
    blocks = [computed_bytes(block, dtype) for block in family_of(model).blocks(model)]
    # Two blocks are gathered at a time, because one is gathered while the other is computed.
    return computed_bytes(model, dtype) - sum(blocks) + 2 * max(blocks)


def once_per_step_bytes(run: RunConfig, models: TrainedModels, gathered: int) -> tuple[int, int]:
    """Return the bytes of gathered tensors and of full gradients with sharding.once_per_step.

    All weights stay gathered, and the gradients are added up in float32 or wider. In addition, the
    gradients of the current blocks exist in the dtype of the layers.

    Args:
        gathered: bytes of weights and gradients that are gathered without the option.
    """
    weights = sum(computed_bytes(backbone, compute_dtype(run)) for backbone in models.backbones)
    accumulated = 0
    for parameter in trained_parameters(models):
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        accumulated += parameter.numel() * dtype.itemsize
    return weights + gathered // 2, accumulated


def rollout_items(
    run: RunConfig,
    estimator: MemoryEstimator,
    policy: VisionLanguageModel,
    sampling_batch: BatchShape,
    gathered: int,
) -> dict[str, int]:
    """Return the size in bytes of each item that is in memory only during a rollout.

    Args:
        sampling_batch: shape of the sampling batch.
        gathered: bytes of gathered weights that FSDP holds during a forward pass.
    """
    dtype = compute_dtype(run)
    if run.uses_fsdp and run.rollout.gather_weights:
        gathered = computed_bytes(policy, dtype)
    prompts_only = replace(sampling_batch, num_generations=0)
    by_layer = run.uses_fsdp and not run.rollout.gather_weights
    with nullcontext([]) if by_layer else sampling_copies(policy) as copies:
        forward = estimator.activations(run, TrainedModels(policy), prompts_only, False)
    rows = sampling_batch.prompts * sampling_batch.num_generations
    items = {
        "gathered": gathered,
        **({"16-bit adapters": bytes_of(copies)} if copies else {}),
        "keys and values": estimator.keys_and_values(dtype, sampling_batch),
        "prompts' forward": forward,
        "logits": DRAW_BYTES * rows * estimator.config.vocab_size,
    }
    by_layer = run.uses_fsdp and not run.rollout.gather_weights
    is_captured = run.sampling.engine == "native" and can_capture(policy, run.sampling, by_layer)
    if is_captured and joined_bytes(policy, dtype):
        items["joined weights"] = joined_bytes(policy, dtype)
    # An engine of vLLM uses memory only in this phase, because it sleeps in the other phases.
    return items | find_engine(run.sampling).engine_bytes(run.sampling, estimator.parameters, dtype)


def persistent_items(
    run: RunConfig, stage: str, models: TrainedModels, estimator: MemoryEstimator
) -> dict[str, int]:
    """Return the size in bytes of each item that is in memory in all phases, before sharding."""
    trainer = find_trainer(stage, run)
    policy = models.policy
    weights = bytes_of([*policy.parameters(), *policy.buffers()])
    # With adapters, a second model shares the base weights and needs only adapters of its own.
    adapters = bytes_of(adapter_parameters(policy))
    items = {"weights": weights, "optimizer": optimizer_bytes(run, stage, models)}
    if models.critic is not None:
        items["critic"] = bytes_of([*models.parameters(), *models.buffers()]) - weights
    if has_reference(run, stage):
        items["reference"] = reference_bytes(run, policy)
    if not trainer.trains_policy:  # the policy is in memory in addition to the trained model
        items["policy"] = adapters or weights
    if trainer.samples_completions and "reward_model" in run.rewards:
        path = run.reward_model.path
        judge = estimator if path is None else MemoryEstimator(read_config(find_folder(path)))
        items["reward model"] = judge.parameters * DTYPES[run.model.dtype].itemsize
    return items


def has_reference(run: RunConfig, stage: str) -> bool:
    return find_trainer(stage, run).has_reference(getattr(run, stage))


def reference_bytes(run: RunConfig, policy: nn.Module) -> int:
    """Return the size of a reference model in bytes, before sharding.

    Weights that the reference model shares with the policy are not counted.
    """
    reference = run.reference
    dtype = DTYPES[run.model.dtype] if reference.sync_ref_model else compute_dtype(run)
    if reference.path is not None:
        estimator = MemoryEstimator(read_config(find_folder(reference.path)))
        return estimator.parameters * dtype.itemsize
    if run.adapter.r or reference.num_shared_layers is not None:
        return bytes_of(trained_parameters(policy))
    return computed_bytes(policy, dtype)


def optimizer_bytes(run: RunConfig, stage: str, model: nn.Module) -> int:
    """Return the size of the optimizer state in bytes, before sharding."""
    optimizer = build_optimizer(model, getattr(run, stage), run.optimizer)
    begin_state(optimizer, trained_parameters(model))
    return sum(bytes_of(state.values()) for state in optimizer.state.values())


def compute_dtype(run: RunConfig) -> torch.dtype:
    return DTYPES[run.model.compute_dtype or run.model.dtype]


def peak_bytes(phases: dict[str, dict]) -> float:
    """Return the memory in bytes that the largest phase needs, including RESERVE."""
    return RESERVE + max(sum(items.values()) for items in phases.values())


def state_bytes(run: RunConfig, stage: str, estimator: MemoryEstimator) -> int:
    """Return the size of one saved training state on disk in bytes."""
    models = estimator.build_trained(run, stage)
    items = persistent_items(run, stage, models, estimator)
    items["weights"] = bytes_of(adapter_parameters(models.policy)) or items["weights"]
    saved = ("weights", "optimizer", "critic", "reference", "policy")
    return sum(items.get(name, 0) for name in saved)


def written_bytes(run: RunConfig, stage: str, estimator: MemoryEstimator) -> dict[str, float]:
    """Return the bytes that a stage writes to the disk at most at one time, by the kind of files.

    A new state or checkpoint is complete before an old one is deleted, so both count.
    """
    sizes = {}
    if run.checkpoint_steps or run.checkpoint_minutes:
        sizes["training states"] = (NUM_KEPT_STATES + 1) * state_bytes(run, stage, estimator)
    dtype = run.model.save_dtype or estimator.config.torch_dtype
    weights = estimator.parameters * DTYPES[dtype].itemsize
    adapter = bytes_of(adapter_parameters(estimator.build(run, stage)))
    saved = adapter if run.save == "adapter" else weights
    folder = Path(run.output_dir)
    sizes["weights"] = weights
    if run.save_steps or (folder / "checkpoint").is_dir():
        sizes["weights"] += saved
    if run.best_metric is not None:
        sizes["weights"] += 2 * saved
    return sizes


def check_disk(run: RunConfig, stage: str, estimator: MemoryEstimator):
    """Raise ValueError if the training states and the weights of a run do not fit on the disk.

    Training states and checkpoints that the output folder already contains count as free space,
    because the run deletes them.
    """
    folder = Path(run.output_dir).absolute()
    earlier = 0
    for pattern in ("states/*/*", "checkpoint/**/*", "best/**/*"):
        earlier += sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free + earlier
    sizes = written_bytes(run, stage, estimator)
    if sum(sizes.values()) > free:
        texts = [f"{size / GB:.2g} GB of {name}" for name, size in sizes.items()]
        hint = "set save to adapter, " if run.adapter.r and run.save == "merged" else ""
        raise ValueError(
            f"{stage} writes {' and '.join(texts)}, but only {free / GB:.2g} GB are free for "
            f"{run.output_dir}. Free some space, choose another output_dir, {hint}or skip this "
            "check with --check_memory=false."
        )


class MemoryCheck(Callback):
    """Raises an error before training if a run does not fit on the disk or on the GPUs."""

    def on_setup(self, config: RunConfig, world: World):
        if config.model.path is None:  # models with random weights are so small that they fit
            return
        estimator = MemoryEstimator(read_config(find_folder(config.model.path)))
        self.config, self.estimator, self.gpus = config, estimator, world.size
        for stage in config.stage_names:
            check_disk(config, stage, estimator)
        if world.device.type == "cuda":
            check_gpus(config, world, estimator)

    def memory_plan(self, stage: str) -> dict[str, dict[str, float]]:
        return estimate_phases(
            self.config, stage, self.estimator, self.gpus, TEXT_TOKENS, IMAGE_TOKENS
        )


def check_gpus(run: RunConfig, world: World, estimator: MemoryEstimator):
    """Raise ValueError if a stage needs more memory than a GPU has.

    Prompts are assumed to have TEXT_TOKENS tokens of text and one image of IMAGE_TOKENS tokens, or
    of fewer tokens if data.max_pixels requires that.
    """
    gpu_bytes = torch.cuda.get_device_properties(world.device).total_memory
    vision = estimator.config.vision_config
    token_pixels = (vision.patch_size * vision.spatial_merge_size) ** 2
    image_tokens = IMAGE_TOKENS
    if run.data.max_pixels:
        image_tokens = min(IMAGE_TOKENS, run.data.max_pixels // token_pixels)
    for stage in run.stage_names:
        needed_bytes = peak_bytes(
            estimate_phases(run, stage, estimator, world.size, TEXT_TOKENS, image_tokens)
        )
        if needed_bytes > gpu_bytes:
            raise ValueError(
                f"{stage} needs about {needed_bytes / GB:.1f} GB on each of {world.size} GPUs, "
                f"but a GPU has only {gpu_bytes / GB:.1f} GB. Set options that save memory (see "
                "docs/memory.md and `python -m minivlmrl memory`), begin with "
                "recipes/own_data_one_card.yaml, which trains LoRA on a card of 24 GB, or skip "
                "this check with --check_memory=false."
            )
