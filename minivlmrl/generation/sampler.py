"""The sampler of a recipe: filters, stop strings, sharded weights, decoding as a CUDA graph."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor

from minivlmrl.config.import_utils import find_named, recipes_folder
from minivlmrl.config.options import SamplingOptions
from minivlmrl.config.parsing import naming
from minivlmrl.data.rows import Completion, Processor, Prompt
from minivlmrl.distributed.fsdp import in_lockstep, is_sharded, rollout_weights
from minivlmrl.distributed.micro_batching import in_pieces
from minivlmrl.distributed.process_group import World
from minivlmrl.generation.cuda_graphs import CapturedDecode
from minivlmrl.generation.filters import Filters
from minivlmrl.generation.generate import Choose, Decode, Sampler, generate
from minivlmrl.generation.stop_strings import StopStrings
from minivlmrl.kernels.backend import to_device
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.routes import watch_routes

# samplers of rollouts, by the values of sampling.engine
ENGINES = {
    "own": "minivlmrl.generation.sampler:RunSampler",
    "vllm": f"{recipes_folder()}/vllm_sampler.py:VLLMSampler",
}


class RunSampler(Sampler):
    """Draws completions as a recipe's section `sampling` says.

    Args:
        gather_weights: see scale/sharding.rollout_weights.
        keeps_vision: the tower is frozen: prompts keep what it makes of their images.
        listen: is told of tokens as they come, listen(rows (r,), ids (r,)), see commands/chat.py.
    """

    def __init__(
        self, model, processor: Processor, sampling: SamplingOptions, world: World,
        gather_weights=True, keeps_vision=False, listen: Callable = lambda *_: None,
    ):  # fmt: skip
        super().__init__(model, processor, sampling, world.device)  # weights may be offloaded
        self.world = world
        self.gather_weights = gather_weights
        self.listen = listen
        by_layer = is_sharded(model) and not gather_weights
        self.keeps_vision = keeps_vision and not by_layer and sampling.max_tokens_at_once is None
        # a graph waits for no counts of experts' tokens
        fits_graph = not by_layer and model.config.experts is None
        on_gpu = world.device.type == "cuda" and fits_graph
        self.captured = sampling.graph == "auto" and on_gpu
        self.filters = self.texts = None  # of the present call

    def __call__(self, prompts, num_generations, keys) -> list[list[Completion]]:
        """Sample num_generations completions of each prompt; all ranks call this."""
        sample = super().__call__
        if self.sampling.max_tokens_at_once is None:
            return sample(prompts, num_generations, keys)
        return in_pieces(sample, prompts, num_generations, keys, self.sampling, self.world)

    def sample_with(self, prompts, num_generations, choose) -> list[list[Completion]]:
        with rollout_weights(self.model, self.gather_weights) as model:
            if is_sharded(model):
                choose = in_lockstep(choose, self.sampling.max_new_tokens, model, self.world)
            return self.draw(model, prompts, num_generations, choose)

    def draw(self, model, prompts, num_generations, choose) -> list[list[Completion]]:
        """Sample with the weights of rollouts; environments/ draw turn after turn."""
        limit = self.sampling.max_new_tokens
        if self.keeps_vision:
            keep_vision(model, prompts, self.device)
        decode = self.decode()
        watched = nullcontext(choose)
        if model.config.experts is not None:
            kept_routes = torch.zeros(len(prompts) * num_generations, limit, dtype=torch.long)
            watched = watch_routes(model, choose, kept_routes)
        with watched as choose:
            groups = generate(model, prompts, num_generations, limit, choose, decode, self.device)
        if model.config.experts is not None:
            for completion, routes in zip(chain(*groups), kept_routes, strict=True):
                completion.routes = routes
        if self.filters is not None:
            self.filters.record_masks(chain(*groups))
        return groups

    # What another engine may have to say; this one says nothing.

    @classmethod
    def check(cls, run):
        """Refuse a recipe (ValueError) before anything is loaded."""

    @classmethod
    def most_tokens(cls, sampling: SamplingOptions) -> int | None:
        """Say how many tokens a prompt and its completion may have, where the engine has a limit."""

    @classmethod
    def engine_bytes(cls, sampling: SamplingOptions, num_parameters: int, dtype) -> dict[str, int]:
        """Name the bytes that an engine holds in a rollout alone, of a policy of this dtype."""
        return {}

    def prove(self, rollout, max_logp_mismatch: float):
        """Prove that the policy drew a grpo.Rollout (ValueError: it did not)."""

    def decode(self) -> Decode:
        """Make what computes a decode step; environments/ have one that reads answers."""
        return CapturedDecode() if self.captured else Decode()

    def row_ends(self, rows: Tensor, ids: Tensor, turn_ends: Tensor) -> Tensor:
        """Take the tokens (r,) that were chosen; (r,) bool: which rows end with them.

        environments/ answer calls here, and go on.
        """
        return turn_ends | self.hear(rows, ids)

    def hear(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Take tokens (r,) of rows (r,), drawn or answered; (r,) bool: a stop string is complete."""
        if self.filters is not None:
            self.filters.add_seen(rows, ids)
        self.listen(rows, ids)
        if self.texts is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        return self.texts.completed(rows, ids)

    def chooser(self, prompts, num_generations, keys) -> Choose:
        """Make the function that chooses tokens: the book's, with filters and stop strings."""
        ids = [prompt.input_ids for prompt in prompts]
        if self.sampling.filtered:
            self.filters = Filters(self.sampling, ids, num_generations)
        strings = self.sampling.stop_strings
        if strings:
            ids_of_rows = [prompt_ids for prompt_ids in ids for _ in range(num_generations)]
            self.texts = StopStrings(strings, self.processor.tokenizer, ids_of_rows)
        choose = super().chooser(prompts, num_generations, keys, self.filters)

        def choose_and_tell(logits: Tensor, rows: Tensor, counts: Tensor):
            ids, logps, turn_ends = choose(logits, rows, counts)
            return ids, logps, self.row_ends(rows, ids, turn_ends)

        return choose_and_tell


def make_sampler(
    model: Qwen2_5_VL, processor: Processor, sampling: SamplingOptions, world: World,
    gather_weights: bool = True, keeps_vision: bool = False, **options,
) -> RunSampler:  # fmt: skip
    """Make the sampler that the section `sampling` of a recipe describes.

    The class of the sampler is the one that sampling.engine names, or one of agents/ if there is
    a sampling.environment. See RunSampler for the arguments.
    """
    if sampling.environment is None:
        kind = find_engine(sampling)
    else:
        from minivlmrl.agents.trajectories import find_sampler

        kind = find_sampler(sampling)
    return kind(model, processor, sampling, world, gather_weights, keeps_vision, **options)


def find_engine(sampling: SamplingOptions) -> type[RunSampler]:
    """Find the sampler of rollouts that sampling.engine names (ValueError: there is none)."""
    with naming(f"sampling.engine {sampling.engine}"):
        kind, options = find_named("engine", sampling.engine, ENGINES)
        if options or not (isinstance(kind, type) and issubclass(kind, RunSampler)):
            raise ValueError("it must be a class made of minivlmrl.generation.sampler.RunSampler")
    return kind


def keep_vision(model, prompts: Sequence[Prompt], device):
    """Let prompts keep what a frozen tower makes of their images, for reference and training."""
    patches_per_token = model.config.vision_config.spatial_merge_size**2
    num_patches = [int(prompt.image_grid_thw.prod(-1).sum()) for prompt in prompts]
    if not any(num_patches):
        return
    pixel_values = to_device(torch.cat([prompt.pixel_values for prompt in prompts]), device)
    image_grid_thw = torch.cat([prompt.image_grid_thw for prompt in prompts])
    vision_embeds = model.visual(pixel_values, image_grid_thw)
    num_tokens = [count // patches_per_token for count in num_patches]
    for prompt, embeds in zip(prompts, vision_embeds.split(num_tokens), strict=True):
        prompt.vision_embeds = embeds
