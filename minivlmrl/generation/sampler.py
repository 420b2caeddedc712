"""Sample completions with stop strings, sharded weights and CUDA graphs."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivlmrl.config.import_utils import parameters_of, resolve_object, with_options
from minivlmrl.config.options import RunConfig, SamplingOptions
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Prompt, Row, uniform_numbers
from minivlmrl.distributed.micro_batching import sample_in_micro_batches
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import is_sharded, rollout_weights
from minivlmrl.errors import UserError, error_context
from minivlmrl.generation.generate import Decode, TokenSampler, generate, make_token_sampler, sample_by_uniforms
from minivlmrl.kernels.backend import to_device
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.families.registry import family_of

if TYPE_CHECKING:
    from minivlmrl.generation.filters import Filters
    from minivlmrl.generation.stop_strings import StopStrings

ENGINES = {"native": "minivlmrl.generation.sampler:Sampler", "vllm": "minivlmrl.extras.vllm:VLLMSampler"}


class Sampler:
    """Sample completions with the options in the recipe section `sampling`.

    A subclass overrides one of three methods; see docs/developer_guide.md:

        __call__: around a whole rollout, such as other sampling options at a step
        sample_with: another engine that computes logits, such as vLLM
        generate: another decoding loop for our model, such as one with tools

    The method `sample`, which samples one batch of a rollout, needs no override.

    Args:
        world: process group, by default only this process on the model's device.
        gather_weights: gather all sharded weights before a rollout; see rollout_weights.
        keeps_vision: cache image embeddings for training and the reference; requires a frozen vision tower.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        processor: Processor,
        sampling: SamplingOptions,
        world: World | None = None,
        gather_weights: bool = True,
        keeps_vision: bool = False,
    ):
        self.model = model
        self.processor = processor
        self.sampling = sampling
        self.world = world or World(device=model.lm_head.weight.device)
        # compute device; weights may be offloaded to the CPU
        self.device = self.world.device
        self.gather_weights = gather_weights
        # called after every decode step, with row indices (r,) and new token ids (r,)
        self.on_tokens: Callable[[Tensor, Tensor], None] = lambda rows, ids: None
        by_layer = is_sharded(model) and not gather_weights
        self.keeps_vision = keeps_vision and not by_layer and sampling.max_batch_tokens is None
        # whether to decode with a CUDA graph, in which FSDP cannot gather weights
        self.captured = (
            self.device.type == "cuda"
            and sampling.cuda_graph == "auto"
            and not by_layer
            and family_of(model).in_cuda_graphs
        )
        self.filters: Filters | None = None
        self.stop_strings: StopStrings | None = None
        self.step = 0  # optimizer step, set by the trainer before a rollout

    def __call__(self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]) -> list[list[Completion]]:
        """Sample num_generations completions per prompt; all ranks must call this.

        Args:
            keys: one random seed per prompt.
        """
        if self.sampling.max_batch_tokens is None:
            return self.sample(prompts, num_generations, keys)
        return sample_in_micro_batches(self.sample, prompts, num_generations, keys, self.sampling, self.world)

    def sample(self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]) -> list[list[Completion]]:
        """Sample all completions in one batch."""
        groups = self.sample_with(prompts, num_generations, self.token_sampler(prompts, num_generations, keys))
        self.world.barrier()
        return groups

    def token_sampler(self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]) -> TokenSampler:
        """Return a token sampler with filters and stop strings."""
        sampling = self.sampling
        ids = [prompt.input_ids for prompt in prompts]
        longest = max(map(len, ids), default=0)
        max_positions = self.model.config.max_position_embeddings
        if longest + sampling.max_new_tokens > max_positions:
            raise UserError(
                f"a prompt of {longest} tokens and sampling.max_new_tokens, which is "
                f"{sampling.max_new_tokens}, exceed the model's {max_positions} positions "
                "(max_position_embeddings); shorten the prompt, or decrease max_new_tokens"
            )
        if sampling.filtered:
            from minivlmrl.generation.filters import Filters

            self.filters = Filters(sampling, ids, num_generations)
        if sampling.stop_strings:
            from minivlmrl.generation.stop_strings import StopStrings

            self.stop_strings = StopStrings(
                sampling.stop_strings,
                self.processor.tokenizer,
                [prompt_ids for prompt_ids in ids for _ in range(num_generations)],
            )
        stop_ids = self.processor.stop_token_ids if sampling.stop_token_ids is None else sampling.stop_token_ids
        largest = max(stop_ids, default=0)
        vocab_size = self.model.config.vocab_size
        if largest >= vocab_size:
            raise UserError(
                f"stop_token_ids contains {largest}, but the vocabulary of the model has only "
                f"{vocab_size} tokens; use ids from 0 to {vocab_size - 1}"
            )
        sample = sample_by_uniforms(uniform_numbers(keys, num_generations, sampling.max_new_tokens), self.device)
        sample_token = make_token_sampler(sampling.temperature, stop_ids, sample, self.filters, self.device)

        def sample_and_record(logits: Tensor, rows: Tensor, counts: Tensor):
            ids, logps, turn_ends = sample_token(logits, rows, counts)
            return ids, logps, self.accept_tokens(rows, ids, turn_ends)

        return sample_and_record

    def sample_with(
        self, prompts: Sequence[Prompt], num_generations: int, sample_token: TokenSampler
    ) -> list[list[Completion]]:
        """Sample completions with `sample_token`; VLLMSampler overrides this."""
        with rollout_weights(self.model, self.gather_weights) as model:
            if is_sharded(model):
                from minivlmrl.distributed.fsdp import in_lockstep

                sample_token = in_lockstep(sample_token, self.sampling.max_new_tokens, model, self.world)
            return self.generate(model, prompts, num_generations, sample_token)

    def generate(
        self, model: VisionLanguageModel, prompts: Sequence[Prompt], num_generations: int, sample_token: TokenSampler
    ) -> list[list[Completion]]:
        """Sample from the policy, whose weights are still sharded if rollout.gather_weights is False."""
        num_patches = [int(prompt.image_grid_thw.prod(-1).sum()) for prompt in prompts]
        if self.keeps_vision and any(num_patches):  # encode images only once, for sampling and training
            pixel_values = to_device(torch.cat([prompt.pixel_values for prompt in prompts]), self.device)
            vision_embeds = model.visual(pixel_values, torch.cat([prompt.image_grid_thw for prompt in prompts]))
            patches_per_token = model.config.vision_config.spatial_merge_size**2
            num_tokens = [count // patches_per_token for count in num_patches]
            for prompt, embeds in zip(prompts, vision_embeds.split(num_tokens), strict=True):
                prompt.vision_embeds = embeds
        groups = generate(
            model, prompts, num_generations, self.sampling.max_new_tokens, sample_token, self.decode(), self.device
        )
        if self.filters is not None:
            self.filters.record_masks(chain(*groups))
        return groups

    def decode(self) -> Decode:
        """Return the function for a decode step, which uses a CUDA graph if possible."""
        if not self.captured:
            return Decode()
        from minivlmrl.generation.cuda_graphs import CapturedDecode

        return CapturedDecode()

    def accept_tokens(self, rows: Tensor, ids: Tensor, turn_ends: Tensor) -> Tensor:
        """Record one new token per completion; return (r,) bool, True for finished completions.

        Samplers in extras/agents/ override this method to run tools.

        Args:
            turn_ends: (r,) bool, True for a stop token.
        """
        return turn_ends | self.record_tokens(rows, ids)

    def record_tokens(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Record one new token per completion; return (r,) bool, True if the token completes a stop string."""
        if self.filters is not None and self.filters.seen is not None:
            self.filters.seen[rows, ids] = True
        self.on_tokens(rows, ids)
        if self.stop_strings is None:
            return torch.zeros_like(ids, dtype=torch.bool)
        return self.stop_strings.completed(rows, ids)

    @classmethod
    def check(cls, config: RunConfig):
        """Raise UserError if the sampling engine cannot run the recipe; called before models are loaded."""

    @classmethod
    def most_tokens(cls, sampling: SamplingOptions) -> int | None:
        """Return the engine's limit on prompt plus completion, in tokens; None = no limit."""

    @classmethod
    def engine_bytes(cls, sampling: SamplingOptions, num_parameters: int, dtype: torch.dtype) -> dict[str, int]:
        """Estimate the engine's memory during rollouts: {name: bytes}."""
        return {}

    def verify_logps(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[Completion]],
        max_logp_mismatch: float,
    ):
        """Raise UserError if log-probabilities from the sampling engine and from the policy differ too much.

        Args:
            rows: dataset row per prompt, for error messages.
            max_logp_mismatch: factor for the sampling engine's default limit.
        """


def find_engine(sampling: SamplingOptions) -> type[Sampler]:
    """Return the sampler class for sampling.engine."""
    return resolve_engine(sampling)[0]


def resolve_engine(sampling: SamplingOptions) -> tuple[type[Sampler], Callable[..., Sampler]]:
    """Return the sampler class for sampling.engine, and a constructor with the options given there."""
    with error_context(f"sampling.engine {sampling.engine}"):
        kind, options = resolve_object("engine", sampling.engine, ENGINES)
        own = [p.name for p in parameters_of(kind).values() if p.default is not p.empty]
        own = [name for name in own if name not in parameters_of(Sampler)]  # drop options set by the trainer
        for name in options.keys() - own:
            raise UserError(f"the engine has no option {name!r}; its options are: {', '.join(own) or 'none'}")
        return kind, with_options(kind, options)
