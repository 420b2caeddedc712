"""Data classes: a Row is a training example; Prompt and Completion contain its tensors."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import PIL.Image
import torch
from torch import Tensor

from minivlmrl.errors import UserError

if TYPE_CHECKING:
    from minivlmrl.data.video import Video, VideoFile


@dataclass
class Prompt:
    """A row's prompt as tensors."""

    input_ids: Tensor  # (P,) int64 token ids, with one placeholder per image token
    # (patches, values per patch) for all images and videos in order; dtype from ImageProcessor
    pixel_values: Tensor
    image_grid_thw: Tensor  # (images and videos, 3) int64: patches in time, height, width
    second_per_grid_ts: Tensor | None = None  # (images and videos,) float32 seconds per time step, 0 for images
    # cached output of a frozen vision tower, None = not computed
    vision_embeds: Tensor | None = None

    def __post_init__(self):
        # `row` is not a dataclass field, because FSDP2 copies all fields in every forward pass
        self.row: Row | None = None


@dataclass
class ToolUse:
    """A sampled completion's tool environment, with counts of its tool calls."""

    environment: Any = None  # an Environment; see extras/agents/environment.py
    num_calls: int = 0
    num_failed: int = 0
    cut: bool = False  # whether the completion ended because a tool result was too long

    @property
    def counts(self) -> tuple[int, int, bool]:
        return self.num_calls, self.num_failed, self.cut


@dataclass
class Completion:
    """Token ids of one answer, sampled by the policy or read from the dataset.

    Sampled ids are kept, because decoding them to text and tokenizing again can change them.
    """

    ids: Tensor  # (C,) int64 token ids, including the stop token
    # (C,) float32 log-probs at the sampling temperature (1 for greedy decoding); None = not sampled
    logps: Tensor | None = None
    # whether a stop token or stop string, not max_new_tokens, ended the completion
    stopped: bool = True
    # (C,) bool, False for tokens from a tool or user; None if the policy generated all tokens
    policy_mask: Tensor = None  # pyright: ignore[reportAssignmentType]  # not None after __post_init__
    # tokens allowed by top_k, top_p and min_p: (how many per position, their ids for all positions concatenated)
    sampling_mask: tuple[Tensor, Tensor] | None = None
    # images from an environment: (image, patches, patch grid), or (image,) for an image that is only logged
    pictures: Sequence[tuple] = ()
    tool_use: ToolUse = field(default_factory=ToolUse)
    extra: dict = field(default_factory=dict)  # values for the completion log, added by rewards with log_extra
    # one Completion per assistant turn, if the chat template drops earlier reasoning from the prompt of a later turn
    turns: "Sequence[Completion]" = ()
    prompt: Prompt | None = None  # for a Completion in `turns`: the prompt of this turn

    def __post_init__(self):
        if self.policy_mask is None:
            self.policy_mask = torch.ones_like(self.ids, dtype=torch.bool)

    @property
    def sampled_logps(self) -> Tensor:
        """Log-probs (C,) of a sampled completion; a demonstration has none and raises AssertionError."""
        assert self.logps is not None, "a demonstrated answer has no log-probabilities"
        return self.logps


@dataclass
class Row:
    """A training example."""

    messages: list[dict]  # prompt messages; see data/messages.py
    images: Sequence[PIL.Image.Image]  # images in the prompt, one per image part
    # data columns such as problem and solution, which are passed to reward functions
    columns: dict = field(default_factory=dict)
    # demonstration for SFT: string or turns; images in turns are functions that decode the file
    completion: str | list[dict] | None = None
    chosen: str | list[dict] | None = None  # better answer in a preference pair
    rejected: str | list[dict] | None = None  # worse answer in a preference pair
    # videos, one per video part in the prompt
    videos: "Sequence[Video | VideoFile]" = field(default_factory=list)
    where: str = ""  # file and line, for error messages
    key: str = ""  # random seed for sampling
    index: int = -1  # row index in the dataset
    prepared_prompt: Prompt | None = None  # prompt tensors, if a loader thread has already computed them

    @property
    def name(self) -> str:
        """Return file and line, or the row index, for error messages."""
        return self.where or f"row {self.index}"

    def prompt(self, processor: Callable[..., Prompt]) -> Prompt:
        """Return the prompt as tensors, computing it unless a loader thread already has.

        Args:
            processor: function (messages, images, videos) -> Prompt, such as a Processor.
        Raises:
            UserError: the prompt is invalid; the message begins with file and line.
        """
        if self.prepared_prompt is not None:
            return self.prepared_prompt
        try:
            prompt = processor(self.messages, self.images, self.videos)
        except ValueError as error:
            if not self.where or str(error).startswith(self.where):
                raise
            raise UserError(f"{self.where}: {error}") from error
        prompt.row = self
        return prompt


Dataset = Sequence[Row]


def uniform_numbers(keys: Sequence[str], num_generations: int, max_new_tokens: int) -> Tensor:
    """Return random numbers in [0, 1) for sampling, one per token.

    Args:
        keys: seed per prompt; completions do not depend on batches or ranks.
    Returns:
        (len(keys) * num_generations, max_new_tokens) float64
    """
    numbers = [random_numbers(key).random((num_generations, max_new_tokens)) for key in keys]
    return torch.from_numpy(numpy.concatenate(numbers))


def random_numbers(key: str) -> numpy.random.Generator:
    return numpy.random.default_rng(list(key.encode()))


def seed_user_code(key: str):
    """Seed torch, numpy and random for user code, such as rewards; minivlmrl never draws from these generators."""
    seed = int(random_numbers(key).integers(2**32))
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
