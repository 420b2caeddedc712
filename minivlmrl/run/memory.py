"""What a run needs of each GPU's memory, phase by phase, before its weights are read.

Activations are counted: forward and backward run on the meta device, where tensors have shapes but
no numbers. The rest is parameters times bytes, divided by the shards of the recipe. Not counted:
evaluations, and what RESERVE is for (CUDA's context, nccl's buffers, gaps between allocations).
"""

import copy
import math
import shutil
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minivlmrl.adapters.adamw8bit import empty_state
from minivlmrl.adapters.lora import adapter_parameters, dropout
from minivlmrl.adapters.trained import select_trained
from minivlmrl.algorithms.table import find_algorithm
from minivlmrl.batch import GroupBatch, pack
from minivlmrl.generate import draw_by, make_choose
from minivlmrl.hub.family import FAMILIES, family_of
from minivlmrl.hub.folder import find_folder, read_json
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.kernels.linear_log_softmax import piece_bytes
from minivlmrl.logprobs import per_token_logps
from minivlmrl.rows import Prompt
from minivlmrl.run.config import RunConfig
from minivlmrl.run.resume import KEPT
from minivlmrl.sampling.filters import SamplingOptions, filter_logits
from minivlmrl.sampling.pieces import largest_piece
from minivlmrl.scale.checkpoint import DTYPES
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import recompute_blocks

GB = 10**9
RESERVE = 3 * GB
TEXT_TOKENS, IMAGE_TOKENS = 200, 1000  # of a prompt, where nothing else is said


@dataclass(frozen=True)
class Work:
    """Sizes of one micro-batch, or of the prompts of a rollout."""

    prompts: int
    num_generations: int  # completions of each prompt; 0: prompts alone
    text_tokens: int  # of a prompt, without its image
    image_tokens: int  # of a prompt's image, after merging
    completion_tokens: int
    frames: int = 1  # of equal size that share image_tokens


class LiveBytes(TorchDispatchMode):
    """Count the bytes of tensors created in this context that still exist, and the most (.most)."""

    def __init__(self, known: list[Tensor]):  # they and their views are not counted
        super().__init__()
        self.counted = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for storage in [x.untyped_storage() for x in tree_leaves(result) if isinstance(x, Tensor)]:
            if storage._cdata not in self.counted:
                self.counted.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return result

    def _forget(self, storage: int, size: int):
        self.counted.discard(storage)
        self.now -= size


def meta_batch(config: ModelConfig, work: Work) -> GroupBatch:
    """A batch of these sizes, on the meta device except for its grids."""
    merge = config.vision_config.spatial_merge_size
    of_frame = work.image_tokens // work.frames
    rows = max(math.isqrt(of_frame), 1)
    columns = math.ceil(of_frame / rows)
    grids = [[1, rows * merge, columns * merge]] * work.frames if of_frame else []
    grid = torch.tensor(grids, dtype=torch.long).view(-1, 3)
    image = torch.full((columns * rows * len(grids),), config.image_token_id)
    ids = torch.cat([image, torch.zeros(work.text_tokens, dtype=torch.long)])
    patches = torch.empty(int(grid.prod(1).sum()), config.vision_config.patch_dim, device="meta")
    completion = torch.zeros(work.completion_tokens, dtype=torch.long)
    prompts = [Prompt(ids, patches, grid)] * work.prompts
    return pack(prompts, [[completion] * work.num_generations] * work.prompts, config, "meta")


class Costs:
    """Numbers of parameters of a model, and bytes of what its computations hold."""

    def __init__(self, config: ModelConfig):
        with torch.device("meta"):
            self.config = config
            self.model = FAMILIES[config.model_type].model(config)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        head = 0 if config.tie_word_embeddings else self.model.lm_head.weight.numel()
        self.backbone = self.parameters - head
        self.known = {}

    def build(self, run: RunConfig) -> nn.Module:
        """Make the model of a run on the meta device."""
        model = copy.deepcopy(self.model).to(DTYPES[run.model.dtype])
        run.adapter.place(model)
        select_trained(model, run.model.freeze)
        return model

    def activations(self, run: RunConfig, work: Work, train: bool) -> int:
        """Most bytes of a forward, with or without its backward, besides weights and gradients."""
        key = repr((run.model, run.adapter, work, train))
        if key in self.known:
            return self.known[key]
        model = self.build(run)
        batch = meta_batch(self.config, work)
        if run.model.compute_dtype:
            model = model.to(DTYPES[run.model.compute_dtype])
        if run.model.activation_checkpointing:
            recompute_blocks(model)
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            # gradients have a row of their own in the plan
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        # the memory of a fused kernel: the meta device would write the formula out
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        name = "scaled_dot_product_attention"

        def kernel(q, k, v, **_):
            return attention(q, k, v)[0]

        fused = mock.patch.object(F, name, kernel)
        dropped = dropout(model, run.adapter.dropout if train else 0.0, "plan")
        live = LiveBytes([*model.parameters(), *model.buffers(), batch.pixel_values])
        with torch.set_grad_enabled(train), fused, dropped, live:
            if work.num_generations == 0:
                model(batch, select=batch.layout.last_index)
            else:
                logps, _ = per_token_logps(model, batch)
                if train:
                    logps.sum().backward()
        self.known[key] = live.most + batch.pixel_values.nbytes
        return self.known[key]

    def keys_and_values(self, dtype: torch.dtype, work: Work) -> int:
        """Bytes of a rollout's cache: a prompt's keys once, and those of each completion; of a
        recurrent layer a memory for each, whatever their lengths."""
        rows = torch.empty(work.prompts * (1 + work.num_generations), dtype=dtype, device="meta")
        layers = self.model.model.layers
        recurrent = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
        memory = bytes_of(x for layer in recurrent for x in layer.empty(rows))
        heads = self.config.num_key_value_heads
        attending = len(layers) - len(recurrent)
        prompt = work.text_tokens + work.image_tokens
        tokens = work.prompts * (prompt + work.num_generations * work.completion_tokens)
        return memory + 2 * attending * heads * self.config.head_dim * dtype.itemsize * tokens

    def one_draw(self, dtype: torch.dtype, sampling: SamplingOptions, rows: int) -> int:
        """Bytes of a decode step's logits, float32 or wider, and what the sampler makes of them."""
        dtype = torch.promote_types(dtype, torch.float32)
        logits = torch.empty(rows, self.config.vocab_size, dtype=dtype, device="meta")
        index = torch.empty(rows, dtype=torch.long, device="meta")
        uniforms = torch.empty(rows, 1, dtype=torch.float64, device="meta")
        choose = make_choose(sampling, [], draw_by(uniforms, "meta"), device="meta")
        with LiveBytes([]) as live:
            if sampling.filtered:
                filter_logits(logits.float(), sampling, torch.empty_like(logits, dtype=torch.bool))
            choose(logits, index, 0)
        return live.most + logits.nbytes


def bytes_of(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def held(run: RunConfig, stage: str, model: nn.Module, costs: Costs) -> dict[str, float]:
    """Bytes of what is there all the time, before sharding."""
    algorithm = find_algorithm(stage, run)
    dtype = DTYPES[run.model.dtype]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = bytes_of([*model.parameters(), *model.buffers()])
    items = {"weights": whole, "optimizer": 2 * bytes_of(trained)}
    if run.optimizer.name == "adamw_8bit":
        items["optimizer"] = bytes_of(x for p in trained for x in empty_state(p).values())
    adapters = bytes_of(adapter_parameters(model))  # all that another model adds to one with them
    if algorithm.has_reference(getattr(run, stage)):
        items["reference"] = adapters or whole * compute_dtype(run).itemsize / dtype.itemsize
    if not algorithm.trains_policy:  # in addition to the copy that is trained
        items["policy"] = adapters or whole
    if not algorithm.answers and "reward_model" in run.rewards:
        items["reward model"] = costs.backbone * dtype.itemsize
    return items


def sizes(run: RunConfig, stage: str, gpus: int, lengths: tuple[int, ...]) -> tuple[Work, Work]:
    """Sizes of a micro-batch and of what one GPU draws together in a rollout.

    Args:
        lengths: tokens of a prompt's text and of its image, and of how many frames.
    """
    config = getattr(run, stage)
    new = run.sampling.max_new_tokens
    text, image, *frames = lengths
    of = text, image, new, *frames
    G = len(find_algorithm(stage, run).answers) or config.num_generations
    budget = getattr(config, "max_tokens_per_micro_batch", None)
    prompts = min(config.micro_batch_size, math.ceil(config.prompts_per_step / gpus))
    micro = largest_piece(prompts, text + image, [new] * G, budget)
    steps = getattr(config, "steps_per_generation", 1)
    prompts = math.ceil(config.prompts_per_step * steps / gpus)
    prompts, _ = largest_piece(prompts, text + image, [G * new], run.sampling.max_tokens_at_once)
    return Work(*micro, *of), Work(prompts, G, *of)


def plan(
    run: RunConfig, stage: str, costs: Costs, gpus: int, *lengths: int
) -> dict[str, dict[str, float]]:
    """Bytes on one GPU in each phase, for prompts of these `sizes`: {"train": {"weights": 1}}."""
    sharding = run.sharding
    algorithm = find_algorithm(stage, run)
    if gpus % sharding.replicas:
        count = f"sharding.replicas is {sharding.replicas}"
        raise ValueError(f"{count}, of which {gpus} is no multiple")
    part = 0 if sharding.cpu_offload else 1 / (gpus // sharding.replicas if sharding.enabled else 1)
    model = costs.build(run)
    dtype = compute_dtype(run)
    fsdp = run.uses_fsdp
    micro, drawn = sizes(run, stage, gpus, lengths)

    def in_use(module: nn.Module) -> int:
        kinds = {p: dtype if p.is_floating_point() else p.dtype for p in module.parameters()}
        return sum(p.numel() * kind.itemsize for p, kind in kinds.items())

    every = in_use(model)
    blocks = [in_use(block) for block in family_of(model).blocks(model)]
    # one block runs while the next arrives
    gathered = every - sum(blocks) + 2 * max(blocks) if fsdp else 0
    rows = micro.prompts * micro.num_generations * micro.completion_tokens
    logits = piece_bytes(rows, costs.config.vocab_size, dtype, "cuda")
    phases = {}
    if not algorithm.answers:
        phases["rollout"] = {
            "gathered": every if fsdp and run.rollout.gather_weights else gathered,
            "keys and values": costs.keys_and_values(dtype, drawn),
            "prompts' forward": costs.activations(run, replace(drawn, num_generations=0), False),
            "logits": costs.one_draw(dtype, run.sampling, drawn.prompts * drawn.num_generations),
        }
        if run.sampling.engine != "own":  # it sleeps in the other phases
            engine_dtype = run.sampling.engine_dtype(dtype)
            phases["rollout"]["vLLM's weights"] = costs.parameters * engine_dtype.itemsize
    if not algorithm.answers or algorithm.has_reference(getattr(run, stage)):
        forward = costs.activations(run, micro, False)
        phases["score"] = {"gathered": gathered, "forward": forward, "logits": logits}
    gradients = bytes_of(parameter for parameter in model.parameters() if parameter.requires_grad)
    phases["train"] = {
        "gathered": 2 * gathered,  # weights and their gradients
        # without FSDP ranks sum a copy of them
        "gradients": gradients * part * (1 + (gpus > 1 and not fsdp)),
        "forward and backward": costs.activations(run, micro, True),
        "logits": logits,
    }
    always = {name: size * part for name, size in held(run, stage, model, costs).items()}
    return {name: always | items for name, items in phases.items()}


def compute_dtype(run: RunConfig) -> torch.dtype:
    return DTYPES[run.model.compute_dtype or run.model.dtype]


def most(phases: dict[str, dict]) -> float:
    """Bytes of the largest phase."""
    return RESERVE + max(sum(items.values()) for items in phases.values())


def state_bytes(run: RunConfig, stage: str, costs: Costs) -> int:
    """Bytes of a state on the disk."""
    model = costs.build(run)
    items = held(run, stage, model, costs)
    items["weights"] = bytes_of(adapter_parameters(model)) or items["weights"]
    return sum(items.get(name, 0) for name in ("weights", "optimizer", "reference", "policy"))


def check_disk(run: RunConfig, stage: str, costs: Costs):
    """Refuse a run (ValueError) whose states do not fit the disk, where earlier ones will go."""
    folder = Path(run.output_dir).absolute()
    earlier = sum(path.stat().st_size for path in folder.glob("states/*/*"))
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free + earlier
    size = state_bytes(run, stage, costs)
    if (run.state_steps or run.state_minutes) and (KEPT + 1) * size > free:
        sizes = f"{KEPT + 1} states of {size / GB:.2g} GB, and {free / GB:.2g} GB are free for"
        cure = "make room, or take another output_dir; --check_memory=false starts it as it is"
        raise ValueError(f"{stage} saves {sizes} {run.output_dir}: {cure}")


def check_memory(run: RunConfig, world: World):
    """Refuse a run (ValueError) that fits neither disk nor GPUs, of images of data.max_pixels."""
    if not run.check_memory or not run.model.path:
        return
    costs = Costs(ModelConfig.from_dict(read_json(find_folder(run.model.path) / "config.json")))
    for stage in run.stages:
        check_disk(run, stage, costs)
    if world.device.type != "cuda":
        return
    gpus, memory = world.size, torch.cuda.get_device_properties(world.device).total_memory
    vision = costs.config.vision_config
    token = (vision.patch_size * vision.spatial_merge_size) ** 2  # pixels of it
    image_tokens = min(IMAGE_TOKENS, (run.data.max_pixels or 10**9) // token)
    for stage in run.stages:
        needed = most(plan(run, stage, costs, gpus, TEXT_TOKENS, image_tokens))
        if needed > memory:
            sizes = f"{needed / GB:.1f} GB on each of {gpus} GPUs, and one has {memory / GB:.1f}"
            cure = "docs/memory.md lists what saves memory, `python -m minivlmrl plan` adds it up"
            cure = f"{cure}; --check_memory=false starts it as it is"
            raise ValueError(f"{stage} needs about {sizes}: {cure}")
