"""Estimate GPU memory for each phase: sampling in rollouts and evaluations, forward and backward pass.

Activations are measured by a forward and backward pass on the meta device, without data. Weights, gradients and
optimizer state follow from parameter counts, dtypes and sharding.
"""

import copy
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minivlmrl.config.options import RunConfig, SamplingOptions
from minivlmrl.data.download import find_folder
from minivlmrl.data.row_sizes import RowSize
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.distributed.device import GB
from minivlmrl.distributed.micro_batching import split_into_micro_batches
from minivlmrl.distributed.weights import adapter_copies, copy_model, num_shards, recompute_blocks
from minivlmrl.generation.generate import Decode, prefill
from minivlmrl.generation.sampler import find_engine
from minivlmrl.kernels.linear_log_softmax import block_bytes
from minivlmrl.model.checkpoint import DTYPES, read_config
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import find_family
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.lora import inject_adapters
from minivlmrl.model.packing import GroupBatch, pack
from minivlmrl.model.trainable import select_trained, trained_parameters
from minivlmrl.model.value_head import ValueModel
from minivlmrl.model.vision import vision_layout
from minivlmrl.run.evaluate import BATCH_SIZE as EVALUATION_ROWS
from minivlmrl.run.evaluate import evaluation_sampling
from minivlmrl.run.optimizer import begin_state, build_optimizer
from minivlmrl.run.setup import patch_dtype
from minivlmrl.trainers.base import Trainer
from minivlmrl.trainers.registry import find_trainer

RESERVE = 3 * GB  # memory for CUDA context, NCCL buffers and fragmentation
# bytes per logit while sampling: logit, probability and scaled probability in float32, one int64
DRAW_BYTES = 20
FILTER_BYTES = 37  # bytes per logit with filters such as top_p, which sort the logits
TYPICAL_ROWS = (RowSize(),)  # assumed row sizes if there is no dataset


@dataclass(frozen=True)
class BatchShape:
    """Size of a batch to train on or to sample."""

    rows: tuple[RowSize, ...]  # prompt sizes
    num_generations: int  # completions per prompt
    completion_tokens: int  # tokens per completion


class AllocationTracker(TorchDispatchMode):
    """Track allocated tensor bytes in a `with` block, and their peak."""

    def __init__(self, uncounted: list[Tensor]):
        super().__init__()
        # addresses of tensor storages already counted
        self.counted = {tensor.untyped_storage()._cdata for tensor in uncounted}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                address = storage._cdata
                if address not in self.counted:
                    self.counted.add(address)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._forget, address, storage.nbytes())
        return result

    def _forget(self, address: int, size: int):
        self.counted.discard(address)
        self.now -= size


def meta_batch(model_config: ModelConfig, work: BatchShape, patch_dtype: torch.dtype) -> GroupBatch:
    """Pack a batch with given prompt and completion sizes on the meta device, without data."""
    vision_config = model_config.vision_config
    prompts = []
    for row in work.rows:
        frame_tokens = row.image_tokens // row.frames
        height = max(math.isqrt(frame_tokens), 1)
        width = math.ceil(frame_tokens / height)
        merge = vision_config.spatial_merge_size
        grids = [[1, height * merge, width * merge]] * row.frames if frame_tokens else []
        grid = torch.tensor(grids, dtype=torch.long).view(-1, 3)
        image_ids = torch.full((height * width * len(grids),), model_config.image_token_id)
        text_ids = torch.zeros(row.text_tokens, dtype=torch.long)
        ids = torch.cat([image_ids, text_ids])
        num_patches = int(grid.prod(1).sum())
        patches = torch.empty(num_patches, vision_config.patch_dim, dtype=patch_dtype, device="meta")
        prompts.append(Prompt(ids, patches, grid))
    completion_ids = torch.zeros(work.completion_tokens, dtype=torch.long)
    group = [Completion(completion_ids)] * work.num_generations
    return pack(prompts, [group] * len(prompts), model_config, "meta")


def backbones(models: nn.ModuleList) -> list[Any]:
    """Return the language models in the policy and, in PPO, in a separate critic."""
    return [getattr(model, "backbone", model) for model in models]


class MemoryEstimator:
    """Measure a model's activations on the meta device, and count its parameters."""

    def __init__(self, model_config: ModelConfig):
        with torch.device("meta"):
            self.config = model_config
            self.model = find_family(model_config.model_type).build_model(model_config)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    @classmethod
    def from_folder(cls, path: str) -> "MemoryEstimator":
        """Read the model sizes from the config.json in a folder or Hub repository."""
        return cls(read_config(find_folder(path)))

    def build(self, config: RunConfig) -> VisionLanguageModel:
        """Build the policy on the meta device, with adapters and frozen parts."""
        model = copy.deepcopy(self.model).to(DTYPES[config.model.dtype])
        inject_adapters(model, config.adapter)
        select_trained(model, config.model.freeze)
        return model

    def activations(self, config: RunConfig, models: nn.ModuleList, work: BatchShape) -> int:
        """Return peak activation bytes in a forward and backward pass."""
        batch = meta_batch(self.config, work, patch_dtype(config))
        with self.tracked(config, models, batch, train=True) as ((policy, *critics), live):
            logps, _ = per_token_logps(policy, batch)
            torch.autograd.backward([logps.sum(), *(critic(batch).sum() for critic in critics)])
        return live.peak + batch.pixel_values.nbytes

    def prefill(self, config: RunConfig, policy: VisionLanguageModel, work: BatchShape) -> tuple[int, int]:
        """Return peak bytes while prefilling prompts, and bytes for KV cache and recurrent states."""
        batch = meta_batch(self.config, replace(work, num_generations=0), patch_dtype(config))
        prompt_index = torch.arange(len(work.rows)).repeat_interleave(work.num_generations)
        with self.tracked(config, nn.ModuleList([policy]), batch, train=False) as ((model,), live):
            logits, cache = prefill(model, batch, prompt_index, work.completion_tokens, Decode())
            cache_bytes = live.now - logits.nbytes
        del cache
        return live.peak + batch.pixel_values.nbytes, cache_bytes

    @contextmanager
    def tracked(
        self, config: RunConfig, models: nn.ModuleList, batch: GroupBatch, train: bool
    ) -> Iterator[tuple[list[Any], AllocationTracker]]:
        """Yield model copies, and a tracker for the memory they allocate."""
        models = copy.deepcopy(models)
        if config.model.compute_dtype:
            models.to(DTYPES[config.model.compute_dtype])
        if config.model.activation_checkpointing:
            for backbone in backbones(models):
                recompute_blocks(backbone)
        for parameter in trained_parameters(models):
            parameter.register_post_accumulate_grad_hook(drop_gradient)
        fused_patch = mock.patch.object(F, "scaled_dot_product_attention", fused_attention)
        # clear the cache, because the tracker counts only newly created tensors
        vision_layout.cache_clear()
        live = AllocationTracker([*models.parameters(), *models.buffers(), batch.pixel_values])
        with torch.set_grad_enabled(train), fused_patch, live:
            yield [*models], live


def drop_gradient(parameter: nn.Parameter):
    # free the gradient at once: activations are measured here, and gradients are counted elsewhere
    parameter.grad = None


def fused_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_options) -> Tensor:
    # flash attention, as on GPUs: no (T, T) attention scores in memory
    mask = attn_mask if q.dtype == torch.float32 else None  # 16-bit GPU kernels allocate no mask
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, attn_mask=mask)[0]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Sum up tensor sizes in bytes."""
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class MemoryQuestion:
    """Inputs for a memory estimate: recipe, stage, model, number of GPUs and row sizes."""

    config: RunConfig
    stage: str
    estimator: MemoryEstimator
    gpus: int = 1
    # largest training row sizes, in descending order
    rows: Sequence[RowSize] = TYPICAL_ROWS
    # largest evaluation row sizes, empty without evaluations
    held_out: Sequence[RowSize] = TYPICAL_ROWS

    @property
    def options(self) -> Any:
        """Stage options, such as config.grpo."""
        return getattr(self.config, self.stage)

    @cached_property
    def trainer(self) -> type[Trainer]:
        """Trainer class for the stage."""
        return find_trainer(self.stage, self.config)

    @cached_property
    def models(self) -> nn.ModuleList:
        """Trained models on the meta device: the policy and, in PPO, a separate critic."""
        model = self.estimator.build(self.config)
        if getattr(self.options, "critic", "shared") == "shared":
            return nn.ModuleList([model])
        # with FSDP, policy and critic do not share base weights
        backbone = copy.deepcopy(model) if self.config.uses_fsdp else copy_model(model)
        return nn.ModuleList([model, ValueModel(backbone, self.config.model.freeze)])

    @property
    def policy(self) -> VisionLanguageModel:
        return cast(VisionLanguageModel, self.models[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in forward and backward passes."""
        return DTYPES[self.config.model.compute_dtype or self.config.model.dtype]

    @property
    def has_reference(self) -> bool:
        """Whether the stage has a reference model."""
        return self.trainer.has_reference(self.options)

    @property
    def micro_batch_prompts(self) -> int:
        """Prompts per micro-batch on one GPU."""
        return min(self.options.micro_batch_size, math.ceil(self.options.prompts_per_step / self.gpus))

    @property
    def share(self) -> float:
        """Fraction of a sharded tensor stored on one GPU, such as 0.25; 0 with CPU offload."""
        sharding = self.config.sharding
        return 0.0 if sharding.cpu_offload else 1 / num_shards(sharding, self.gpus)


def estimate_phases(question: MemoryQuestion) -> dict[str, dict[str, float]]:
    """Estimate memory per phase on one GPU.

    Returns:
        {phase: {item: bytes}}, such as {"training": {"weights": 1e9, "gradients": 1e9}}
    """
    sampling = question.config.sampling
    options = question.options
    phases: dict[str, dict[str, float]] = {}
    if question.held_out:
        work = evaluation_batch(question)
        phases["evaluation"] = sampling_items(question, evaluation_sampling(sampling), work)
    if question.trainer.samples_completions:
        phases["sampling"] = sampling_items(question, sampling, sampling_batch(question))
        lengths = [sampling.max_new_tokens] * options.num_generations
        limit = options.max_tokens_per_micro_batch
    else:
        given = [row.answer_tokens for row in question.rows if row.answer_tokens is not None]
        lengths = [max(given, default=sampling.max_new_tokens)] * len(question.trainer.answers)
        limit = None
    work = largest_batch(question.rows, question.micro_batch_prompts, lengths, limit)
    phases["training"] = training_items(question, work)
    always = {name: size * question.share for name, size in persistent_items(question).items()}
    return {name: always | items for name, items in phases.items()}


def sampling_batch(question: MemoryQuestion) -> BatchShape:
    """Return the largest batch that a rollout samples at once."""
    options = question.options
    sampling = question.config.sampling
    steps = getattr(options, "steps_per_generation", 1)
    prompts = math.ceil(options.prompts_per_step * steps / question.gpus)
    completions = [sampling.max_new_tokens] * options.num_generations
    return largest_batch(question.rows, prompts, completions, sampling.max_batch_tokens, whole=True)


def evaluation_batch(question: MemoryQuestion) -> BatchShape:
    """Return the largest batch that an evaluation samples at once."""
    sampling = evaluation_sampling(question.config.sampling)
    return largest_batch(question.held_out, EVALUATION_ROWS, [sampling.max_new_tokens], sampling.max_batch_tokens)


def largest_batch(
    rows: Sequence[RowSize], prompts: int, completions: list[int], max_tokens: int | None, whole: bool = False
) -> BatchShape:
    """Split rows into batches as training does, and return the one with most tokens.

    Args:
        prompts: number of prompts.
        completions: completion lengths per prompt, in tokens.
        max_tokens: maximum tokens per batch, None = no limit.
        whole: keep a prompt's completions in one batch.
    """
    sizes = [rows[min(number, len(rows) - 1)] for number in range(prompts)]
    parts = [sum(completions)] if whole else completions
    batches = split_into_micro_batches([(size.prompt_tokens, parts) for size in sizes], prompts, max_tokens)

    def num_tokens(batch: list[tuple[int, int]]) -> int:
        prompt_tokens = sum(sizes[i].prompt_tokens for i in {i for i, _ in batch})
        return prompt_tokens + sum(parts[j] for _, j in batch)

    batch = max(batches, key=num_tokens)
    members = tuple(sizes[i] for i in sorted({i for i, _ in batch}))
    num_generations = len(completions) if whole else math.ceil(len(batch) / len(members))
    return BatchShape(members, num_generations, max(completions))


def computed_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return a module's weight bytes in the compute dtype; NF4 weights stay in 4 bits."""
    size = 0
    for parameter in module.parameters():
        used = dtype if parameter.is_floating_point() else parameter.dtype
        size += parameter.numel() * used.itemsize
    return size


def gathered_bytes(question: MemoryQuestion, model: VisionLanguageModel) -> int:
    """Return peak bytes for weights that FSDP gathers in a forward pass."""
    if not question.config.uses_fsdp:
        return 0
    blocks = [computed_bytes(block, question.dtype) for block in model.blocks()]
    # FSDP gathers two blocks at once, because it prefetches the next one
    return computed_bytes(model, question.dtype) - sum(blocks) + 2 * max(blocks)


def sampling_items(question: MemoryQuestion, sampling: SamplingOptions, work: BatchShape) -> dict[str, float]:
    """Estimate memory needed only for sampling, as {item: bytes}."""
    config = question.config
    estimator = question.estimator
    dtype = question.dtype
    policy = question.policy
    by_layer = config.uses_fsdp and not config.rollout.gather_weights
    gathered = gathered_bytes(question, policy)
    if config.uses_fsdp and not by_layer:
        gathered = computed_bytes(policy, dtype)
    with nullcontext([]) if by_layer else adapter_copies(policy) as copies:
        peak, cache = estimator.prefill(config, policy, work)
    rows = len(work.rows) * work.num_generations
    bytes_per_logit = FILTER_BYTES if sampling.filtered else DRAW_BYTES
    logits = bytes_per_logit * rows * estimator.config.vocab_size
    return {
        "gathered": gathered,
        "16-bit adapters": bytes_of(copies),
        "keys and values": cache,
        # prompt activations are freed before completion logits are computed, so the larger one counts
        "activations": max(peak - cache, logits),
        # vLLM sleeps during training, so its weights take memory only while sampling
        **find_engine(sampling).engine_bytes(sampling, estimator.parameters, dtype),
    }


def training_items(question: MemoryQuestion, work: BatchShape) -> dict[str, float]:
    """Estimate memory needed only for forward and backward passes, as {item: bytes}."""
    config = question.config
    models = question.models
    trained = trained_parameters(models)
    gradients = bytes_of(trained) * question.share
    if question.gpus > 1 and not config.uses_fsdp:
        gradients *= 2  # all-reduce copies the gradients into buffers
    per_block = sum(gathered_bytes(question, backbone) for backbone in backbones(models))
    gathered = 2 * per_block  # weights and gradients
    if config.sharding.once_per_step:
        # in memory: all weights, all float32 gradients, and two blocks' gradients in the weight dtype
        all_weights = sum(computed_bytes(backbone, question.dtype) for backbone in backbones(models))
        gathered = per_block + all_weights
        for parameter in trained:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            gradients += parameter.numel() * wide.itemsize
    rows = len(work.rows) * work.num_generations * work.completion_tokens
    return {
        "gathered": gathered,
        "gradients": gradients,
        "activations": question.estimator.activations(config, models, work),
        "logits": block_bytes(rows, question.estimator.config.vocab_size, question.dtype),
    }


def persistent_items(question: MemoryQuestion) -> dict[str, int]:
    """Estimate memory needed in all phases, such as for weights, as {item: bytes before sharding}."""
    config = question.config
    models = question.models
    policy = question.policy
    weights = bytes_of([*policy.parameters(), *policy.buffers()])
    optimizer = build_optimizer(models, question.options, config.optimizer)
    begin_state(optimizer, trained_parameters(models))
    moments = sum(bytes_of(state.values()) for state in optimizer.state.values())
    items = {"weights": weights, "optimizer": moments}
    if len(models) > 1:
        items["critic"] = bytes_of([*models.parameters(), *models.buffers()]) - weights
    if question.has_reference:
        shares_frozen = config.reference.path is None and (config.adapter.r or not config.uses_fsdp)
        if shares_frozen:  # frozen weights are shared with the policy
            items["reference"] = bytes_of(trained_parameters(policy))
        else:  # a separate model, in the compute dtype
            items["reference"] = computed_bytes(policy, question.dtype)
    if not question.trainer.trains_policy:  # policy and reward adapters share one base
        items["policy"] = bytes_of(trained_parameters(policy)) if config.adapter.r else weights
    if question.trainer.samples_completions and "reward_model" in config.rewards:
        path = config.reward_model.path
        judge = question.estimator if path is None else MemoryEstimator.from_folder(path)
        items["reward model"] = judge.parameters * DTYPES[config.model.dtype].itemsize
    return items


def peak_bytes(phases: dict[str, dict]) -> float:
    """Return bytes needed in the largest phase, including the reserve."""
    return RESERVE + max(sum(items.values()) for items in phases.values())


def state_bytes(question: MemoryQuestion) -> int:
    """Return bytes per training state on disk."""
    items = persistent_items(question)
    items["weights"] = bytes_of(trained_parameters(question.policy))  # training states contain no frozen weights
    saved = ("weights", "optimizer", "critic", "reference", "policy")
    return sum(items.get(name, 0) for name in saved)


def optimizer_bytes(question: MemoryQuestion) -> int:
    """Return optimizer state bytes on one GPU."""
    return int(persistent_items(question)["optimizer"] * question.share)
