"""Sample with the options of a recipe: filters, stop strings, sharded weights, CUDA graphs."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from minivlmrl.config.import_utils import find_named
from minivlmrl.config.options import RunConfig, SamplingOptions
from minivlmrl.config.parsing import naming
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row, uniform_numbers
from minivlmrl.distributed.micro_batching import in_pieces
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import is_sharded, rollout_weights
from minivlmrl.generation.environments import agents
from minivlmrl.generation.generate import (
    Decode,
    TokenSampler,
    generate,
    make_token_sampler,
    sample_by_uniforms,
)
from minivlmrl.kernels.backend import to_device
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.families.registry import family_of

if TYPE_CHECKING:
    from minivlmrl.generation.filters import Filters
    from minivlmrl.generation.stop_strings import StopStrings

# samplers of rollouts, by the values of sampling.engine
ENGINES = {
    "own": "minivlmrl.generation.sampler:Sampler",
    "vllm": "minivlmrl.generation.vllm:VLLMSampler",
}


class SampledRows(Protocol):
    """The fields of a trainers/base.Rollout that a sampler verifies."""

    @property
    def rows(self) -> Sequence[Row]: ...
    @property
    def prompts(self) -> Sequence[Prompt]: ...
    @property
    def completions(self) -> Sequence[Sequence[Completion]]: ...


class Sampler:
    """Samples completions with the options of a recipe's section `sampling`.

    Samples depend on the key of each prompt, not on the other prompts or the number of ranks.
    Another engine is a subclass, see vllm.py and docs/carry_on.md.

    Args:
        world: the ranks of the run, by default this process alone, on the device of the model.
        gather_weights: gather sharded weights before a rollout, see weights.rollout_weights.
        keeps_vision: store the embeddings of images in their prompts, because the vision tower is
            frozen and the reference and the training step can use them too.
    """

    def __init__(
        self, model: Qwen2_5_VL, processor: Processor, sampling: SamplingOptions,
        world: World | None = None, gather_weights: bool = True, keeps_vision: bool = False,
    ):  # fmt: skip
        self.model = model
        self.processor = processor
        self.sampling = sampling
        self.world = world or World(device=model.lm_head.weight.device)
        self.device = self.world.device  # weights may be offloaded
        self.gather_weights = gather_weights
        # called with the rows (r,) and ids (r,) of new tokens, see commands/chat.py
        self.on_tokens: Callable[[Tensor, Tensor], None] = lambda rows, ids: None
        by_layer = is_sharded(model) and not gather_weights
        self.keeps_vision = keeps_vision and not by_layer and sampling.max_tokens_at_once is None
        # the number of an expert's tokens is not known when a graph is captured
        fits_graph = not by_layer and model.config.experts is None
        on_gpu = self.device.type == "cuda" and fits_graph
        self.captured = sampling.graph == "auto" and on_gpu
        self.filters: Filters | None = None  # filters and stop strings of the present call
        self.stop_strings: StopStrings | None = None

    def __call__(
        self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]
    ) -> list[list[Completion]]:
        """Sample num_generations completions of each prompt: B lists; all ranks call this."""
        if self.sampling.max_tokens_at_once is None:
            return self.sample(prompts, num_generations, keys)
        return in_pieces(self.sample, prompts, num_generations, keys, self.sampling, self.world)

    def sample(
        self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]
    ) -> list[list[Completion]]:
        """Sample completions of prompts that fit into memory together."""
        sample_token = self.token_sampler(prompts, num_generations, keys)
        return self.sample_with(prompts, num_generations, sample_token)

    def token_sampler(
        self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]
    ) -> TokenSampler:
        """Make the function that samples tokens, with filters and stop strings.

        Raises:
            ValueError: the model lacks a stop token.
        """
        sampling = self.sampling
        ids = [prompt.input_ids for prompt in prompts]
        if sampling.filtered:
            from minivlmrl.generation.filters import Filters

            self.filters = Filters(sampling, ids, num_generations)
        if sampling.stop_strings:
            from minivlmrl.generation.stop_strings import StopStrings

            ids_of_rows = [prompt_ids for prompt_ids in ids for _ in range(num_generations)]
            tokenizer = self.processor.tokenizer
            self.stop_strings = StopStrings(sampling.stop_strings, tokenizer, ids_of_rows)
        stop_ids = sampling.stop_token_ids
        if stop_ids is None:
            stop_ids = self.processor.stop_token_ids
        largest = max(stop_ids, default=0)
        vocab_size = self.model.config.vocab_size
        if largest >= vocab_size:
            raise ValueError(f"stop_token_ids has {largest}, the model has {vocab_size} tokens")
        uniforms = uniform_numbers(keys, num_generations, sampling.max_new_tokens)
        sample = sample_by_uniforms(uniforms, self.device)
        sample_token = make_token_sampler(
            sampling.temperature, stop_ids, sample, self.filters, self.device
        )

        def sample_and_record(logits: Tensor, rows: Tensor, counts: Tensor):
            ids, logps, turn_ends = sample_token(logits, rows, counts)
            return ids, logps, self.is_finished(rows, ids, turn_ends)

        return sample_and_record

    def sample_with(
        self, prompts: Sequence[Prompt], num_generations: int, sample_token: TokenSampler
    ) -> list[list[Completion]]:
        """Sample completions with the weights of the rollout; vllm.py replaces this method."""
        with rollout_weights(self.model, self.gather_weights) as model:
            if is_sharded(model):
                from minivlmrl.distributed.fsdp import in_lockstep

                limit = self.sampling.max_new_tokens
                sample_token = in_lockstep(sample_token, limit, model, self.world)
            return self.generate(model, prompts, num_generations, sample_token)

    def generate(
        self, model: Qwen2_5_VL, prompts: Sequence[Prompt], num_generations: int,
        sample_token: TokenSampler,
    ) -> list[list[Completion]]:  # fmt: skip
        """Sample with a model that has the weights of the rollout; agents/ extend this method."""
        limit = self.sampling.max_new_tokens
        if self.keeps_vision:
            keep_vision(model, prompts, self.device)
        decode = self.decode()
        arguments = model, prompts, num_generations, limit
        routing = family_of(model).routing
        if routing is None:
            groups = generate(*arguments, sample_token, decode, self.device)
        else:
            kept_routes = torch.zeros(len(prompts) * num_generations, limit, dtype=torch.long)
            with routing.watch_routes(model, sample_token, kept_routes) as watched:
                groups = generate(*arguments, watched, decode, self.device)
            for completion, routes in zip(chain(*groups), kept_routes, strict=True):
                completion.routes = routes
        if self.filters is not None:
            self.filters.record_masks(chain(*groups))
        return groups

    def decode(self) -> Decode:
        """Make the decode step; agents/ replace it by one that also reads answers."""
        if not self.captured:
            return Decode()
        from minivlmrl.generation.cuda_graphs import CapturedDecode

        return CapturedDecode()

    def is_finished(self, rows: Tensor, ids: Tensor, turn_ends: Tensor) -> Tensor:
        """Record sampled tokens (r,); return (r,) bool: the row ends. agents/ answer calls here.

        Args:
            turn_ends: (r,) bool, the token is a stop token.
        """
        return turn_ends | self.record_tokens(rows, ids)

    def record_tokens(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Record tokens (r,), sampled or of answers; return (r,) bool: a stop string is complete."""
        if self.filters is not None:
            self.filters.add_seen(rows, ids)
        self.on_tokens(rows, ids)
        if self.stop_strings is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        return self.stop_strings.completed(rows, ids)

    # Other engines extend these methods.

    @classmethod
    def check(cls, run: RunConfig):
        """Raise ValueError if the engine cannot run a recipe, before anything is loaded."""

    @classmethod
    def most_tokens(cls, sampling: SamplingOptions) -> int | None:
        """Return the engine's limit of the tokens of a prompt and its completion, if any."""

    @classmethod
    def engine_bytes(
        cls, sampling: SamplingOptions, num_parameters: int, dtype: torch.dtype
    ) -> dict[str, int]:
        """Return the memory that the engine needs only in rollouts, in bytes by name.

        Args:
            dtype: dtype of the policy.
        """
        return {}

    def verify_logps(self, rollout: SampledRows, max_logp_mismatch: float):
        """Raise ValueError if the log-probabilities of a rollout are not those of the policy."""


def make_sampler(
    model: Qwen2_5_VL, processor: Processor, sampling: SamplingOptions, world: World,
    gather_weights: bool = True, keeps_vision: bool = False,
) -> Sampler:  # fmt: skip
    """Make the sampler of a recipe: the class that sampling.engine names, or one with tools.

    See Sampler for the arguments.
    """
    if sampling.environment is None:
        kind = find_engine(sampling)
    else:
        kind = agents().find_sampler(sampling.environment, sampling.history)
    return kind(model, processor, sampling, world, gather_weights, keeps_vision)


def find_engine(sampling: SamplingOptions) -> type[Sampler]:
    """Return the class of sampler that sampling.engine names (ValueError: there is none)."""
    with naming(f"sampling.engine {sampling.engine}"):
        kind, options = find_named("engine", sampling.engine, ENGINES)
        if options or not (isinstance(kind, type) and issubclass(kind, Sampler)):
            raise ValueError("it must be a class made of minivlmrl.generation.sampler.Sampler")
    return kind


def keep_vision(model: Qwen2_5_VL, prompts: Sequence[Prompt], device: torch.device):
    """Store the embeddings of images in their prompts, for the reference and the training step."""
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
