"""Define the data classes Row (one example), Prompt (a row's question as tensors) and Completion (an answer)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import PIL.Image
import torch
from torch import Tensor

if TYPE_CHECKING:
    from minivlmrl.data.video import Video, VideoFile


@dataclass
class Prompt:
    """One row's question, as tensors."""

    input_ids: Tensor  # (P,) int64, image placeholders expanded
    # (patches, values per patch), in the dtype of ImageProcessor: the patches of all images and videos, in order
    pixel_values: Tensor
    image_grid_thw: Tensor  # (images and videos, 3) int64: patches in time, height, width
    second_per_grid_ts: Tensor | None = None  # (images and videos,) float32, 0 for images
    # output of a frozen vision tower for the prompt's images; None if the output has not been computed
    vision_embeds: Tensor | None = None

    def __post_init__(self):
        # If Prompt.row were a dataclass field, FSDP2 would copy the row in each forward pass.
        self.row: Row | None = None


@dataclass
class Completion:
    """An answer to a prompt, sampled or demonstrated.

    A completion keeps its token ids, because decoding the ids and tokenizing the text again can give different ids.
    """

    ids: Tensor  # (C,) int64, with the stop token
    # (C,) float32: log-probabilities of the tokens in nats, at the sampling temperature (1 for greedy decoding). None
    # for an answer that was not sampled.
    logps: Tensor | None = None
    # True if a stop token or a stop string ended the completion, False if max_new_tokens ended it
    stopped: bool = True
    # (C,) bool: True for each token that the policy wrote, False for tokens from a tool or user; None means that the
    # policy wrote all tokens
    policy_mask: Tensor = None  # pyright: ignore[reportAssignmentType]  # not None after __post_init__
    # (counts, ids): token i was chosen from the counts[i] ids that top_k, top_p and min_p kept; `ids` lists them all
    sampling_mask: tuple[Tensor, Tensor] | None = None
    pictures: Sequence[tuple] = ()  # (image, patches, patch grid), or (image,) only, for each image in the turns
    environment: Any = None  # the Environment that the tools belong to; see extras/agents/environment.py
    # (tool calls, failed tool calls, True if a tool result was too long for the completion)
    calls: tuple[int, int, bool] = (0, 0, False)
    extra: dict = field(default_factory=dict)  # values that rewards log with TRL's log_extra
    turns: "Sequence[Completion]" = ()  # one for each assistant turn if each turn has its own prompt
    prompt: Prompt | None = None  # prompt of a single turn

    def __post_init__(self):
        if self.policy_mask is None:
            self.policy_mask = torch.ones_like(self.ids, dtype=torch.bool)

    @property
    def sampled_logps(self) -> Tensor:
        """Return the log-probabilities (C,) of a sampled completion's C tokens.

        Raises:
            AssertionError: the completion is a demonstrated answer, which has no log-probabilities.
        """
        assert self.logps is not None, "a demonstrated answer has no log-probabilities"
        return self.logps


@dataclass
class Row:
    """One training example: a prompt, its images and videos, and its columns and answers."""

    messages: list[dict]  # the prompt; see data/messages.py
    images: Sequence[PIL.Image.Image]  # one for each image part in the prompt, in order
    # {column: value}, such as problem and solution; reward functions get the values as arguments
    columns: dict = field(default_factory=dict)
    # demonstrated answer for SFT: a text, or turns; an image in a turn is a function that decodes the image file
    completion: str | list[dict] | None = None
    chosen: str | list[dict] | None = None  # the better answer in a pair, for preference training
    rejected: str | list[dict] | None = None  # the worse answer
    # one video for each video part in the prompt, in order
    videos: "Sequence[Video | VideoFile]" = field(default_factory=list)
    where: str = ""  # the row's file and line, for error messages
    key: str = ""  # text that seeds all random numbers for this row
    index: int = -1  # the row's index in its dataset
    prepared_prompt: Prompt | None = None  # computed in advance by a thread of the loader

    def prompt(self, processor: Callable[..., Prompt]) -> Prompt:
        """Convert the question to tensors, unless a thread has done so in advance.

        Args:
            processor: function that takes messages, images and videos, such as a Processor.
        Raises:
            ValueError: the prompt is invalid. The message begins with the row's file and line.
        """
        if self.prepared_prompt is not None:
            return self.prepared_prompt
        try:
            prompt = processor(self.messages, self.images, self.videos)
        except ValueError as error:  # image sizes, for example, are only checked here
            if not self.where or str(error).startswith(self.where):  # an error about an image already names the row
                raise
            raise ValueError(f"{self.where}: {error}") from error
        prompt.row = self
        return prompt


Dataset = Sequence[Row]


def uniform_numbers(keys: Sequence[str], num_generations: int, max_new_tokens: int) -> Tensor:
    """Return random numbers in [0, 1) for sampling completions.

    Each text in `keys` seeds the random numbers of one prompt, so that completions do not depend on batches or ranks.

    Returns:
        (keys * num_generations, max_new_tokens) float64: one number per completion token.
    """
    shape = num_generations, max_new_tokens
    numbers = [random_numbers(key).random(shape) for key in keys]
    return torch.from_numpy(numpy.concatenate(numbers))


def random_numbers(key: str) -> numpy.random.Generator:
    """Create a NumPy random generator that is seeded with a text's bytes."""
    return numpy.random.default_rng(list(key.encode()))
