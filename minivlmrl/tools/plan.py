"""What a run needs of each GPU's memory, phase by phase, before the first GPU hour.

python -m minivlmrl plan --model FOLDER_OR_CONFIG --gpus 8 [RECIPE] [--section.name=value ...]

Of the model only config.json is read. What autograd keeps of a micro-batch, and what comes and goes beside it, is not
estimated but counted: the model is built on the meta device, where tensors have shapes and no numbers, and forward and
backward run there. The rest is parameters times bytes, cut into shards where the recipe says so.

    rollout    weights (gathered whole, if sharded), keys and values, the prompts' forward, one step's logits
    score      a forward without gradient
    train      gradients, what autograd keeps, what comes and goes
    always     weights, optimizer state, reference, critic or reward model

Not counted: the CUDA context and nccl's buffers, gaps between allocations (RESERVE stands for them), and evaluations,
of 64 rows at a time.
"""

import argparse
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minivlmrl.algorithms.reference import shared_parameters
from minivlmrl.batch import GroupBatch, pack
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.generate import sample
from minivlmrl.hub.checkpoint import DTYPES
from minivlmrl.hub.config import ModelConfig
from minivlmrl.hub.folder import read_json
from minivlmrl.kernels.linear_log_softmax import piece_bytes
from minivlmrl.logprobs import per_token_logps
from minivlmrl.rows import Prompt
from minivlmrl.run.config import RunConfig, SamplingConfig, StageConfig, load_config
from minivlmrl.scale.sharding import blocks, recompute_blocks

GB = 10**9
RESERVE = 3 * GB
STAGES = ("sft", "dpo", "reward_model", "grpo", "ppo")
# what can be given up for memory, cheapest first
SAVINGS = (
    "model.activation_checkpointing=true", "sharding.enabled=true", "{stage}.micro_batch_size=1",
    "sharding.compute_dtype=bfloat16", "rollout.gather_weights=false", "sharding.cpu_offload=true",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """One micro-batch, or the prompts of a rollout."""

    prompts: int
    num_generations: int  # completions of each; 0: prompts alone
    text_tokens: int  # of a prompt, beside its image
    image_tokens: int  # of a prompt's image, after merging
    completion_tokens: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made meanwhile that are still there, and keeps the most there were at once."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.counted = {tensor.untyped_storage()._cdata for tensor in known}  # these were there before: views are free
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage):
        if storage._cdata in self.counted:
            return
        self.counted.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, storage: int, size: int):
        self.counted.discard(storage)
        self.now -= size


class _Fused(torch.autograd.Function):
    """Attention as a fused kernel leaves its traces: no scores; queries, keys, values and output are kept."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


class FusedAttention(TorchFunctionMode):
    """Takes _Fused for torch's attention, which has no fused kernel on the meta device."""

    def __call__(self, function: Callable) -> Callable:
        """The function with this in force, also where a backward runs it again."""

        def with_it(*args):
            with self:
                return function(*args)

        return with_it

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            return _Fused.apply(*args[:3])
        return function(*args, **(kwargs or {}))


def meta_model(config: ModelConfig, dtype: torch.dtype) -> Qwen2_5_VL:
    with torch.device("meta"):
        return Qwen2_5_VL(config).to(dtype)


def meta_batch(config: ModelConfig, work: Work) -> GroupBatch:
    """A batch of these lengths, on the meta device but for its grids."""
    rows = max(math.isqrt(work.image_tokens), 1)
    merge, columns = config.vision_config.spatial_merge_size, math.ceil(work.image_tokens / rows)
    grid = torch.tensor([[1, rows * merge, columns * merge]] if work.image_tokens else []).view(-1, 3).long()
    tokens = [torch.full((columns * rows,), config.image_token_id), torch.zeros(work.text_tokens, dtype=torch.long)]
    pixels = torch.empty(int(grid.prod(1).sum()), config.vision_config.patch_dim, device="meta")
    completion = torch.zeros(work.completion_tokens, dtype=torch.long)
    prompt = Prompt(torch.cat(tokens), torch.empty(0, config.vision_config.patch_dim), grid)
    batch = pack([prompt] * work.prompts, [[completion] * work.num_generations] * work.prompts, config)
    batch.pixel_values = pixels.repeat(work.prompts, 1)
    grids = batch.image_grid_thw
    _to_meta(batch)
    batch.image_grid_thw = grids
    return batch


def _to_meta(x):
    """Move all tensors inside, at any depth, in place."""
    if isinstance(x, Tensor):
        return x.to("meta")
    if isinstance(x, list | tuple):
        return type(x)(_to_meta(item) for item in x)
    if is_dataclass(x) or hasattr(x, "__dict__"):
        for name, value in vars(x).items():
            setattr(x, name, _to_meta(value))
    return x


class Costs:
    """What one model costs: numbers of parameters, and bytes that come and go."""

    def __init__(self, config: ModelConfig):
        self.config = config
        model = meta_model(config, torch.float32)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.vision = sum(p.numel() for p in model.visual.parameters())
        self.backbone = self.parameters - (0 if config.tie_word_embeddings else model.lm_head.weight.numel())
        sizes = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
        self.largest_block, self.root = max(sizes), self.parameters - sum(sizes)
        self.shared = lambda layers: sum(p.numel() for p in shared_parameters(model, layers))
        self.passing = cache(self._passing)

    def _passing(
        self,
        dtype: torch.dtype,
        work: Work,
        train: bool,
        recompute: bool = False,
        frozen: tuple[bool, int] = (False, 0),
    ) -> int:
        """Most bytes that a forward, with or without its backward, has at once beside weights and gradients.

        Args:
            dtype: that it computes in.
            recompute: activation checkpointing.
            frozen: whether the vision tower is, and how many layers from the embeddings on.
        """
        model = meta_model(self.config, dtype)
        still = [*(model.visual.parameters() if frozen[0] else ()), *shared_parameters(model, frozen[1])]
        for parameter in still:
            parameter.requires_grad_(False)
        for block in blocks(model):
            block.forward = FusedAttention()(block.forward)
        if recompute:
            recompute_blocks(model)
        for parameter in model.parameters():
            if parameter.requires_grad:  # sharded or not, gradients are counted for themselves
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        batch = meta_batch(self.config, work)
        with torch.set_grad_enabled(train), LiveBytes(list(model.parameters())) as live:
            if work.num_generations == 0:
                model(batch, select=batch.layout.last_index)
            else:
                logps, _ = per_token_logps(model, batch)
                if train:
                    logps.sum().backward()
        return live.most + batch.pixel_values.nbytes

    def keys_and_values(self, dtype: torch.dtype, work: Work) -> int:
        """Bytes of a rollout's cache: a prompt's once, those of each completion."""
        heads, layers = self.config.num_key_value_heads, self.config.num_hidden_layers
        tokens = work.text_tokens + work.image_tokens + work.num_generations * work.completion_tokens
        return 2 * layers * heads * self.config.head_dim * dtype.itemsize * work.prompts * tokens

    def logits(self, dtype: torch.dtype, work: Work, device_type: str = "cuda") -> int:
        """Bytes of the piece of logits that the head's kernel has at a time."""
        rows = work.prompts * work.num_generations * work.completion_tokens
        return piece_bytes(rows, self.config.vocab_size, dtype, device_type)

    def one_draw(self, dtype: torch.dtype, sampling: SamplingConfig, rows: int) -> int:
        """Bytes of one step's logits and what the sampler makes of them."""
        logits = torch.empty(rows, self.config.vocab_size, dtype=dtype, device="meta")
        with LiveBytes([]) as live:
            seen = torch.empty(rows, self.config.vocab_size, dtype=torch.bool, device="meta")
            sample(logits, sampling, None, seen, uniform=torch.empty(rows, dtype=torch.float64, device="meta"))
        return live.most + logits.nbytes


def plan(run: RunConfig, stage: str, costs: Costs, gpus: int, text_tokens: int, image_tokens: int) -> dict[str, dict]:
    """Bytes on one GPU in each phase of a stage, by what they are for.

    Args:
        stage: one of ALGORITHMS' names.
        text_tokens, image_tokens: of a prompt. Completions have sampling.max_new_tokens.
    """
    compute, replicas = run.sharding.compute_dtype, run.sharding.replicas
    if gpus % replicas:
        raise ValueError(f"sharding.replicas is {replicas}, but {gpus} GPUs are no multiple of it")
    for name, dtype in (("model.dtype", run.model.dtype), ("sharding.compute_dtype", compute or run.model.dtype)):
        if dtype not in DTYPES:
            raise ValueError(f"{name} is {dtype!r}, it must be one of {', '.join(DTYPES)}")
    config: StageConfig = getattr(run, stage)
    stored = DTYPES[run.model.dtype]
    computed = DTYPES[compute or run.model.dtype]
    cut = run.sharding.enabled  # into one part even: FSDP gathers a copy of that too
    shards = gpus // replicas if cut else 1
    part = 0 if run.sharding.cpu_offload else stored.itemsize / shards  # bytes on the GPU of a number stored
    G = getattr(config, "num_generations", 2 if stage in ("dpo", "reward_model") else 1)
    layers = getattr(config, "num_shared_layers", 0)
    vision = costs.vision if config.freeze_vision_tower and not layers else 0
    trained = costs.parameters - costs.shared(layers) - vision
    always = {"weights": costs.parameters * part, "optimizer": 2 * trained * part}
    if stage == "ppo" and run.ppo.critic == "separate":
        # weights, gradients, the two of AdamW, and the copy of gradients below
        always["critic"] = (5 if gpus > 1 and not cut else 4) * costs.backbone * part
    if needs_reference(run, stage):
        common = 0 if cut else costs.shared(layers)  # cut models share nothing, see Reference
        always["reference"] = (costs.parameters - common) * part
    if stage == "reward_model":
        always["policy"] = costs.parameters * part  # stays beside the copy that is trained
    if "reward_model" in run.rewards and stage in ("grpo", "ppo"):
        always["reward model"] = costs.backbone * part
    units = (costs.root + 2 * costs.largest_block) * computed.itemsize if cut else 0  # one runs, one arrives
    lengths = (text_tokens, image_tokens, run.sampling.max_new_tokens)
    micro = Work(min(config.micro_batch_size, math.ceil(config.prompts_per_step / gpus)), G, *lengths)
    frozen = (config.freeze_vision_tower, layers)
    phases = {}
    if stage in ("grpo", "ppo"):
        steps = config.steps_per_generation if stage == "grpo" else config.num_mini_batches
        prompts = math.ceil(config.prompts_per_step * steps / gpus)
        whole = costs.parameters * computed.itemsize if cut and run.rollout.gather_weights else units
        phases["rollout"] = always | {
            "gathered": whole,
            "keys and values": costs.keys_and_values(computed, Work(prompts, G, *lengths)),
            "prompts' forward": costs.passing(computed, Work(prompts, 0, *lengths), False),
            "logits": costs.one_draw(computed, run.sampling, prompts * G),
        }
    if "reference" in always or stage in ("grpo", "ppo"):
        forward = costs.passing(computed, micro, False)
        phases["score"] = always | {"gathered": units, "forward": forward, "logits": costs.logits(computed, micro)}
    recompute = run.model.activation_checkpointing
    phases["train"] = always | {
        "gathered": 2 * units,  # the weights and their gradients
        "gradients": trained * part * (2 if gpus > 1 and not cut else 1),  # a copy to add ranks up
        "forward and backward": costs.passing(computed, micro, True, recompute, frozen),
        "logits": costs.logits(computed, micro),
    }
    return phases


def needs_reference(run: RunConfig, stage: str) -> bool:
    """Whether a second model lies in memory while the stage trains."""
    if stage == "dpo":
        return not run.dpo.reference_free and not run.dpo.precompute_ref_log_probs
    return bool({"grpo": run.grpo.beta, "ppo": run.ppo.kl_coef}.get(stage))


def most(phases: dict[str, dict]) -> float:
    return RESERVE + max(sum(items.values()) for items in phases.values())


def smallest_saving(make: Callable[[list[str]], float], stage: str, gpus: int, memory: float) -> list[str] | None:
    """The fewest of SAVINGS, cheapest first, with which the stage fits; None: none are enough.

    Args:
        make: from overrides to the bytes that are needed.
    """
    savings = [f"--{saving.format(stage=stage)}" for saving in SAVINGS]
    taken = next((savings[:n] for n in range(1, len(savings) + 1) if _fits(make, savings[:n], memory)), None)
    if taken is None:
        return None
    for saving in list(taken):  # an early one may not be needed any more
        fewer = [other for other in taken if other != saving]
        if _fits(make, fewer, memory):
            taken = fewer
    return taken


def _fits(make: Callable[[list[str]], float], overrides: list[str], memory: float) -> bool:
    try:
        return make(overrides) <= memory
    except ValueError:  # an option that another one, left out here, has to come with
        return False


def table(phases: dict[str, dict], memory: float) -> str:
    """Lines of a Markdown table, in GB: a column for each phase."""
    names = list(dict.fromkeys(name for items in phases.values() for name in items))
    lines = [f"| GB on each GPU | {' | '.join(phases)} |", "|---" * (len(phases) + 1) + "|"]
    for name in names:
        cells = (f"{items[name] / GB:.1f}" if name in items else "" for items in phases.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    totals = [RESERVE + sum(items.values()) for items in phases.values()]
    cells = (f"{total / GB:.1f}" + (" (too much)" if total > memory else "") for total in totals)
    lines += [f"| in reserve | {' | '.join([f'{RESERVE / GB:.1f}'] * len(phases))} |", f"| all | {' | '.join(cells)} |"]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Returns the exit status: 2, and a line on stderr, for what the user has to change."""
    try:
        show(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show(arguments: list[str]):
    """Print the plan that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m minivlmrl plan", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder with a config.json, or that file")
    parser.add_argument("--gpus", type=int, default=1, help="all of them, over all nodes")
    parser.add_argument("--gpu_memory", type=float, default=80.0, help="GB of one")
    parser.add_argument("--text_tokens", type=int, default=200, help="of a prompt, beside its image")
    parser.add_argument("--image_tokens", type=int, default=1000, help="of a prompt's image: (height/28) x (width/28)")
    given, rest = parser.parse_known_args(arguments)
    recipe = rest.pop(0) if rest and not rest[0].startswith("--") else "recipes/own_data.yaml"
    path = Path(given.model)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; of a repository do: hf download {path} config.json")
    config = ModelConfig.from_dict(read_json(path if path.is_file() else path / "config.json"))
    costs, memory = Costs(config), given.gpu_memory * GB
    print(f"{given.model}: {costs.parameters:,} parameters; {given.gpus} GPUs of {given.gpu_memory:g} GB")
    for stage in load_config(recipe, rest).stages:
        if stage not in STAGES:
            raise ValueError(f"stages: unknown algorithm {stage!r}; known are {', '.join(STAGES)}")

        def phases(overrides: list[str], stage=stage) -> dict[str, dict]:
            run = load_config(recipe, [*rest, *overrides])
            return plan(run, stage, costs, given.gpus, given.text_tokens, given.image_tokens)

        print(f"\n{stage}\n" + table(phases([]), memory))
        if most(phases([])) <= memory:
            continue
        saving = smallest_saving(lambda overrides: most(phases(overrides)), stage, given.gpus, memory)
        if saving is None:
            print("does not fit, whatever is saved: take more GPUs, shorter prompts or a smaller model")
        else:
            print(f"fits with {' '.join(saving)}\n" + table(phases(saving), memory))
