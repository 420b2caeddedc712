"""The sampler of a recipe: filters, stop strings, sharded weights, decoding as a CUDA graph."""

from collections.abc import Sequence

import torch

from minivlmrl.generate import (
    Choose,
    Completion,
    Decode,
    Sampler,
    chooser,
    draw_by,
    generate,
    stop_tokens,
)
from minivlmrl.kernels.backend import to_device
from minivlmrl.rows import Processor, Prompt, uniform_numbers
from minivlmrl.sampling.captured import CapturedDecode
from minivlmrl.sampling.filters import Filters, SamplingOptions
from minivlmrl.sampling.pieces import in_pieces
from minivlmrl.sampling.stop_strings import StopStrings
from minivlmrl.scale.ranks import World
from minivlmrl.scale.sharding import is_sharded, rollout_weights


class RunSampler(Sampler):
    """Draws completions as a recipe's section `sampling` says.

    Args:
        gather_weights: see scale/sharding.rollout_weights.
    """

    keeps_vision = False  # the tower is frozen: prompts keep what it makes of their images

    def __init__(
        self,
        model,
        processor: Processor,
        sampling: SamplingOptions,
        world: World,
        gather_weights=True,
    ):
        super().__init__(model, processor, sampling)
        self.world, self.gather_weights = world, gather_weights
        on_gpu = sampling.graph == "auto" and world.device.type == "cuda"
        self.captured = sampling.graph == "always" or on_gpu
        if is_sharded(model) and not gather_weights:
            if sampling.graph == "always":
                cure = "it needs rollout.gather_weights: true"
                raise ValueError(f"sampling.graph is 'always', {cure}")
            self.captured = False

    def __call__(
        self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]
    ) -> list[list[Completion]]:
        """Sample num_generations completions of each prompt; all ranks call this."""
        if self.sampling.max_tokens_at_once is None:
            return self.sample(prompts, num_generations, keys)
        return in_pieces(self.sample, prompts, num_generations, keys, self.sampling, self.world)

    def sample(
        self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]
    ) -> list[list[Completion]]:
        """Sample completions of these prompts together."""
        limit = self.sampling.max_new_tokens
        decode = self.decode()
        with rollout_weights(self.model, self.world, self.gather_weights) as (model, lockstep):
            choose = self.chooser(prompts, num_generations, keys)
            if lockstep is not None:
                choose = lockstep.keeping(choose, limit, model)
            device = self.world.device  # weights may be offloaded
            if self.keeps_vision and lockstep is None and self.sampling.max_tokens_at_once is None:
                keep_vision(model, prompts, device)
            return generate(model, prompts, num_generations, limit, choose, decode, device)

    def decode(self) -> Decode:
        """Make what computes a decode step; environments/ has one that feeds pictures."""
        return CapturedDecode() if self.captured else Decode()

    def forcing(self, choose: Choose) -> Choose:
        """Return the chooser that filters and stop strings hear; environments/ forces tokens."""
        return choose

    def chooser(
        self, prompts: Sequence[Prompt], num_generations: int, keys: Sequence[str]
    ) -> Choose:
        """Make the function that chooses tokens: the book's, with filters and stop strings."""
        sampling, device = self.sampling, self.world.device
        vocab_size = self.model.config.vocab_size
        stop = stop_tokens(sampling, self.processor.stop_token_ids, vocab_size)
        numbers = uniform_numbers(keys, num_generations, sampling.max_new_tokens)
        ids = [prompt.input_ids for prompt in prompts]
        filters = None
        if sampling.filtered:
            filters = Filters(sampling, ids, num_generations, stop, device)
        choose = chooser(sampling, stop, draw_by(numbers, device), filters, device)
        choose = self.forcing(choose)
        if filters is not None:
            choose = filters.remembering(choose)
        if sampling.stop_strings:
            rows = [own for own in ids for _ in range(num_generations)]
            strings = StopStrings(sampling.stop_strings, self.processor.tokenizer, rows)
            choose = strings.ending(choose)
        return choose


def keep_vision(model, prompts: Sequence[Prompt], device):
    """Let prompts keep what a frozen tower makes of their images, for reference and training."""
    merge = model.config.vision_config.spatial_merge_size**2
    tokens = [int(prompt.image_grid_thw.prod(-1).sum()) // merge for prompt in prompts]
    if not sum(tokens):
        return
    pixels = to_device(torch.cat([prompt.pixel_values for prompt in prompts]), device)
    embeds = model.visual(pixels, torch.cat([prompt.image_grid_thw for prompt in prompts]))
    for prompt, own in zip(prompts, embeds.split(tokens), strict=True):
        prompt.vision_embeds = own
