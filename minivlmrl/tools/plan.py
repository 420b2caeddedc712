"""What a run needs of each GPU's memory, phase by phase, before the first GPU hour.

python -m minivlmrl plan --model FOLDER_OR_CONFIG --gpus 8 [RECIPE] [--section.name=value ...]

Of the model only config.json is read. Activations are not estimated but counted: the model is built on the meta device,
where tensors have shapes but no numbers, and forward and backward run there. The rest is parameters times bytes,
divided by the shards of the recipe.

    rollout    weights (gathered, if sharded), keys and values, the prompts' forward, the logits of one decode step
    score      a forward without gradient
    train      gradients, activations, temporary tensors
    always     weights, optimizer state, reference, value model or reward model

Not counted: the CUDA context, nccl's buffers and gaps between allocations (RESERVE is for them), and evaluations.
"""

import argparse
import io
import math
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minivlmrl.algorithms.reference import shared_parameters
from minivlmrl.batch import GroupBatch, pack
from minivlmrl.generate import inverse_cdf, next_tokens
from minivlmrl.hub.checkpoint import DTYPES
from minivlmrl.hub.family import FAMILIES, family_of
from minivlmrl.hub.folder import read_json
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.kernels.linear_log_softmax import piece_bytes
from minivlmrl.logprobs import per_token_logps
from minivlmrl.rows import Prompt
from minivlmrl.run.config import RunConfig, load_config, recipes_folder
from minivlmrl.sampling.filters import SamplingOptions, filter_logits
from minivlmrl.scale.sharding import recompute_blocks

GB = 10**9
RESERVE = 3 * GB
# stages -> completions of one prompt in a micro-batch; None: the recipe's num_generations, which a rollout samples
STAGES = {"sft": 1, "dpo": 2, "kto": 1, "reward_model": 2, "grpo": None, "ppo": None}
# options that save memory, cheapest first
SAVINGS = ["model.activation_checkpointing=true", "sharding.enabled=true", "{stage}.micro_batch_size=1"]
SAVINGS += ["sharding.compute_dtype=bfloat16", "rollout.gather_weights=false", "sharding.cpu_offload=true"]


@dataclass(frozen=True)
class Work:
    """Sizes of one micro-batch, or of the prompts of a rollout."""

    prompts: int
    num_generations: int  # completions of each prompt; 0: prompts alone
    text_tokens: int  # of a prompt, without its image
    image_tokens: int  # of a prompt's image, after merging
    completion_tokens: int


class LiveBytes(TorchDispatchMode):
    """Count the bytes of all tensors created in this context that still exist (.now), and their maximum (.most).

    Args:
        known: tensors that exist already; they and their views are not counted.
    """

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.counted = {tensor.untyped_storage()._cdata for tensor in known}
        self.now = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.counted:
                storage = tensor.untyped_storage()
                self.counted.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return result

    def _forget(self, storage: int, size: int):
        self.counted.discard(storage)
        self.now -= size


class FusedAttention(torch.autograd.Function):
    """Attention with the memory of a fused kernel, which the meta device does not have: no scores."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def meta_model(config: ModelConfig, dtype: torch.dtype) -> torch.nn.Module:
    """The model on the meta device."""
    with torch.device("meta"):
        return FAMILIES[config.model_type].model(config).to(dtype)


def meta_batch(config: ModelConfig, work: Work) -> GroupBatch:
    """A batch of these sizes, on the meta device except for its grids."""
    merge, rows = config.vision_config.spatial_merge_size, max(math.isqrt(work.image_tokens), 1)
    columns = math.ceil(work.image_tokens / rows)
    grid = torch.tensor([[1, rows * merge, columns * merge]] if work.image_tokens else []).view(-1, 3).long()
    tokens = [torch.full((columns * rows,), config.image_token_id), torch.zeros(work.text_tokens, dtype=torch.long)]
    completion = torch.zeros(work.completion_tokens, dtype=torch.long)
    prompt = Prompt(torch.cat(tokens), torch.empty(0, config.vision_config.patch_dim), grid)
    batch = pack([prompt] * work.prompts, [[completion] * work.num_generations] * work.prompts, config)
    grids, patches = batch.image_grid_thw, work.prompts * int(grid.prod(1).sum())
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    batch = torch.load(file, map_location="meta", weights_only=False)  # all tensors, at any depth
    batch.image_grid_thw = grids
    batch.pixel_values = torch.empty(patches, config.vision_config.patch_dim, device="meta")
    return batch


class Costs:
    """Numbers of parameters of a model, and bytes of what its computations hold."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.model = meta_model(config, torch.float32)
        self.parameters = _count(self.model.parameters())
        self.vision = _count(self.model.visual.parameters())
        self.backbone = self.parameters - (0 if config.tie_word_embeddings else self.model.lm_head.weight.numel())
        sizes = [_count(block.parameters()) for block in family_of(self.model).blocks(self.model)]
        self.largest_block, self.root = max(sizes), self.parameters - sum(sizes)
        self.activations = cache(self._activations)

    def shared(self, layers: int) -> int:
        """Parameters that policy and reference share with num_shared_layers."""
        return _count(shared_parameters(self.model, layers))

    def _activations(
        self, dtype: torch.dtype, work: Work, train: bool, recompute: bool = False, vision: bool = True, layers: int = 0
    ) -> int:
        """Maximum bytes of a forward, with or without its backward, in addition to weights and gradients.

        Args:
            dtype: of the computation.
            recompute: activation checkpointing.
            vision: whether the vision tower is trained.
            layers: frozen ones, from the embeddings on.
        """
        model = meta_model(self.config, dtype)
        for parameter in [*(() if vision else model.visual.parameters()), *shared_parameters(model, layers)]:
            parameter.requires_grad_(False)
        if recompute:
            recompute_blocks(model)
        for parameter in model.parameters():
            if parameter.requires_grad:  # gradients have a row of their own in the plan
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        batch = meta_batch(self.config, work)
        fused = mock.patch.object(F, "scaled_dot_product_attention", lambda q, k, v, **_: FusedAttention.apply(q, k, v))
        with torch.set_grad_enabled(train), fused, LiveBytes(list(model.parameters())) as live:
            if work.num_generations == 0:
                model(batch, select=batch.layout.last_index)
            else:
                logps, _ = per_token_logps(model, batch)
                if train:
                    logps.sum().backward()
        return live.most + batch.pixel_values.nbytes

    def keys_and_values(self, dtype: torch.dtype, work: Work) -> int:
        """Bytes of a rollout's cache: a prompt's once, and those of each completion."""
        heads, layers = self.config.num_key_value_heads, self.config.num_hidden_layers
        tokens = work.text_tokens + work.image_tokens + work.num_generations * work.completion_tokens
        return 2 * layers * heads * self.config.head_dim * dtype.itemsize * work.prompts * tokens

    def logits(self, dtype: torch.dtype, work: Work, device_type: str = "cuda") -> int:
        """Bytes of the piece of logits that linear_log_softmax holds."""
        rows = work.prompts * work.num_generations * work.completion_tokens
        return piece_bytes(rows, self.config.vocab_size, dtype, device_type)

    def one_draw(self, dtype: torch.dtype, sampling: SamplingOptions, rows: int) -> int:
        """Bytes of one decode step's logits and of what the sampler computes from them."""
        logits = torch.empty(rows, self.config.vocab_size, dtype=dtype, device="meta")
        uniform = torch.empty(rows, dtype=torch.float64, device="meta")
        with LiveBytes([]) as live:
            if sampling.filtered:
                filter_logits(logits.float(), sampling, torch.empty_like(logits, dtype=torch.bool))
            next_tokens(logits, sampling.temperature, lambda probs, *_: inverse_cdf(probs, uniform), None, uniform, 0)
        return live.most + logits.nbytes


def _count(parameters) -> int:
    return sum(parameter.numel() for parameter in parameters)


def plan(run: RunConfig, stage: str, costs: Costs, gpus: int, text_tokens: int, image_tokens: int) -> dict[str, dict]:
    """Bytes on one GPU in each phase of a stage: {"train": {"weights": ..., "gradients": ...}, ...}.

    Args:
        stage: one of STAGES.
        text_tokens, image_tokens: of a prompt. Completions have sampling.max_new_tokens.
    """
    config, sharded = getattr(run, stage), run.sharding.enabled
    computed = DTYPES[run.sharding.compute_dtype or run.model.dtype]
    G = STAGES[stage] or config.num_generations
    layers = getattr(config, "num_shared_layers", 0)
    vision = costs.vision if config.freeze_vision_tower and not layers else 0
    trained = costs.parameters - costs.shared(layers) - vision
    always, part = _always(run, stage, costs, gpus, trained)
    unit = (costs.root + 2 * costs.largest_block) * computed.itemsize if sharded else 0  # one runs, the next arrives
    lengths = (text_tokens, image_tokens, run.sampling.max_new_tokens)
    micro = Work(min(config.micro_batch_size, math.ceil(config.prompts_per_step / gpus)), G, *lengths)
    phases = {}
    if STAGES[stage] is None:
        steps = config.steps_per_generation if stage == "grpo" else config.num_mini_batches
        prompts = math.ceil(config.prompts_per_step * steps / gpus)
        gathers = sharded and run.rollout.gather_weights
        phases["rollout"] = always | {
            "gathered": costs.parameters * computed.itemsize if gathers else unit,
            "keys and values": costs.keys_and_values(computed, Work(prompts, G, *lengths)),
            "prompts' forward": costs.activations(computed, Work(prompts, 0, *lengths), False),
            "logits": costs.one_draw(computed, run.sampling, prompts * G),
        }
    logits = {"logits": costs.logits(computed, micro)}
    if "reference" in always or STAGES[stage] is None:
        forward = costs.activations(computed, micro, False)
        phases["score"] = always | {"gathered": unit, "forward": forward} | logits
    frozen = (run.model.activation_checkpointing, not config.freeze_vision_tower, layers)
    train = {"gathered": 2 * unit}  # weights and their gradients
    train["gradients"] = trained * part * (2 if gpus > 1 and not sharded else 1)  # one more copy to sum over the ranks
    train["forward and backward"] = costs.activations(computed, micro, True, *frozen)
    return phases | {"train": always | train | logits}


def _always(run: RunConfig, stage: str, costs: Costs, gpus: int, trained: int) -> tuple[dict[str, float], float]:
    """Bytes that are held all the time, and the bytes on one GPU for each number stored."""
    replicas, sharded, stored = run.sharding.replicas, run.sharding.enabled, DTYPES[run.model.dtype]
    if gpus % replicas:
        raise ValueError(f"sharding.replicas is {replicas}, but {gpus} GPUs are no multiple of it")
    shards = gpus // replicas if sharded else 1
    part = 0 if run.sharding.cpu_offload else stored.itemsize / shards
    always = {"weights": costs.parameters * part, "optimizer": 2 * trained * part}
    if stage == "ppo" and run.ppo.critic == "separate":
        # weights, gradients, the two of AdamW, and a copy of the gradients to sum over the ranks
        always["value model"] = (5 if gpus > 1 and not sharded else 4) * costs.backbone * part
    if needs_reference(run, stage):
        shared = 0 if sharded else costs.shared(getattr(getattr(run, stage), "num_shared_layers", 0))
        always["reference"] = (costs.parameters - shared) * part  # sharded models share nothing
    if stage == "reward_model":
        always["policy"] = costs.parameters * part  # in addition to the copy that is trained
    if "reward_model" in run.rewards and STAGES[stage] is None:
        always["reward model"] = costs.backbone * part
    return always, part


def needs_reference(run: RunConfig, stage: str) -> bool:
    """Whether a second model is in memory while the stage trains."""
    if stage == "dpo":
        return not run.dpo.reference_free and not run.dpo.precompute_ref_log_probs
    return stage == "kto" or bool({"grpo": run.grpo.beta, "ppo": run.ppo.kl_coef}.get(stage))


def most(phases: dict[str, dict]) -> float:
    """Bytes of the largest phase."""
    return RESERVE + max(sum(items.values()) for items in phases.values())


def smallest_saving(needed: Callable[[list[str]], float], stage: str, memory: float) -> list[str] | None:
    """The fewest of SAVINGS, cheap ones first, with which the stage fits; None if even all of them are not enough.

    Args:
        needed: overrides of the recipe -> bytes.
    """
    savings = [f"--{saving.format(stage=stage)}" for saving in SAVINGS]
    for overrides in (list(some) for count in range(len(savings) + 1) for some in combinations(savings, count)):
        with suppress(ValueError):  # an option that needs another one, which is left out here
            if needed(overrides) <= memory:
                return overrides
    return None


def table(phases: dict[str, dict], memory: float) -> str:
    """A Markdown table in GB with one column for each phase."""
    rows = {name: [items.get(name) for items in phases.values()] for items in phases.values() for name in items}
    rows |= {"in reserve": [RESERVE] * len(phases), "all": [most({name: phases[name]}) for name in phases]}
    lines = [f"| GB on each GPU | {' | '.join(phases)} |", "|---" * (len(phases) + 1) + "|"]
    for name, row in rows.items():
        cells = ["" if size is None else f"{size / GB:.1f}" for size in row]
        if name == "all":
            cells = [cell + " (too much)" * (size > memory) for cell, size in zip(cells, row, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]):
    """Print the plan that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m minivlmrl plan", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder with a config.json, or that file")
    parser.add_argument("--gpus", type=int, default=1, help="of all nodes together")
    parser.add_argument("--gpu_memory", type=float, default=80.0, help="GB of one GPU")
    parser.add_argument("--text_tokens", type=int, default=200, help="of a prompt, without its image")
    parser.add_argument("--image_tokens", type=int, default=1000, help="of a prompt's image: (height/28) x (width/28)")
    given, rest = parser.parse_known_args(arguments)
    recipe = rest.pop(0) if rest and not rest[0].startswith("--") else recipes_folder() / "own_data.yaml"
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
        saving = smallest_saving(lambda overrides: most(phases(overrides)), stage, memory)
        if saving is None:
            print("does not fit with any saving: take more GPUs, shorter prompts or a smaller model")
        else:
            print(f"fits with {' '.join(saving)}\n" + table(phases(saving), memory))
