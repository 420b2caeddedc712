"""Data classes: Row (one example), Prompt (its question as tensors), Completion (answer tokens)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import PIL.Image
import torch
from torch import Tensor

if TYPE_CHECKING:
    from minivlmrl.data.video import Video, VideoFile


# Arguments of rewards that do not come from columns. No column may have these names.
REWARD_ARGUMENTS = {
    "prompts",
    "images",
    "row_names",
    "completions",
    "completion_ids",
    "answer_texts",
    "turn_texts",
    "image_sizes",
    "answer_extents",
    "reward_model_scores",
    "row_rewards",
    "environments",
    "extras",
    "trainer_state",
    "log_metric",
    "log_extra",
}


@dataclass
class Prompt:
    """One row's question, as tensors."""

    input_ids: Tensor  # (P,) int64, image placeholders expanded
    # (all images' and videos' patches in order, patch_dim), in the ImageProcessor's dtype
    pixel_values: Tensor
    image_grid_thw: Tensor  # (images and videos, 3) int64: patches in time, height, width
    second_per_grid_ts: Tensor | None = None  # (images and videos,) float32, 0 for images
    # a frozen vision tower's output for the images; None if the tower has not computed it
    vision_embeds: Tensor | None = None

    def __post_init__(self):
        # This prompt's Row, for environments; Row.prompt sets it. The row is not a dataclass field, because FSDP2's
        # hooks walk through all fields in a model's arguments.
        self.row: Row | None = None


@dataclass
class Completion:
    """An answer to a prompt, sampled or demonstrated.

    The token ids are kept, and never recomputed from the text, because tokenizing decoded text can give other ids.
    """

    ids: Tensor  # (C,) int64, with the stop token
    # log-probabilities (C,) float32, in nats, at the sampling temperature, or at temperature 1 if decoding was greedy;
    # None for a demonstrated answer
    logps: Tensor | None = None
    # True if a stop token or a stop string ended the completion, False if max_new_tokens ended it
    stopped: bool = True
    # (C,) bool: True for tokens that the policy wrote, False for tool tokens; None sets all tokens to True
    policy_mask: Tensor = None  # pyright: ignore[reportAssignmentType]  # not None after __post_init__
    # ids that top_k, top_p and min_p left for each token, as (number of ids per token (C,), all ids concatenated); None
    # stands for the whole vocabulary
    sampling_mask: tuple[Tensor, Tensor] | None = None
    # images that tools return, in order, each as (image, patches, image_grid_thw); a trajectory has only the images,
    # because its `turns` have the patches
    pictures: Sequence[tuple] = ()
    environment: Any = None  # the Environment that the tools belong to, see extras/agents/environment.py
    # tool calls: (number made, number failed, True if a result was truncated to fit)
    calls: tuple[int, int, bool] = (0, 0, False)
    extra: dict = field(default_factory=dict)  # values that rewards log with TRL's log_extra
    # `turns` are a trajectory's completions, each with its own ids and its own prompt. The attribute `prompt` of a
    # completion outside a trajectory is None, because its row has the prompt.
    turns: "Sequence[Completion]" = ()
    prompt: Prompt | None = None

    def __post_init__(self):
        if self.policy_mask is None:
            self.policy_mask = torch.ones_like(self.ids, dtype=torch.bool)

    @property
    def sampled_logps(self) -> Tensor:
        """Return a sampled completion's log-probabilities (C,).

        Raises:
            AssertionError: the completion is a demonstrated answer, which has no log-probabilities.
        """
        assert self.logps is not None, "a demonstrated answer has no log-probabilities"
        return self.logps


@dataclass
class Row:
    """One example from a data file or an embedded task."""

    messages: list[dict]  # the prompt, see data/messages.py
    images: Sequence[PIL.Image.Image]  # one for each image part in the prompt, in order
    # {column: value}, the reward arguments, such as problem and solution
    columns: dict = field(default_factory=dict)
    # A demonstrated answer, for SFT. If the answer is a list of turns, the key "image" of an image part has the image,
    # or a function that decodes the image (see processor.images_in).
    completion: str | list[dict] | None = None
    chosen: str | list[dict] | None = None  # the better answer in a pair, for preference training
    rejected: str | list[dict] | None = None  # the worse answer
    # one video for each video part in the prompt, in order
    videos: "Sequence[Video | VideoFile]" = field(default_factory=list)
    where: str = ""  # the row's file and line, for error messages
    key: str = ""  # text that seeds all random numbers for this row
    index: int = -1  # the row's index in its dataset

    def prompt(self, processor: Callable[..., Prompt]) -> Prompt:
        """Convert the question to tensors.

        Args:
            processor: function that takes messages, images and videos, such as a Processor.
        Raises:
            ValueError: the prompt is invalid. The message begins with the row's file and line.
        """
        try:
            prompt = processor(self.messages, self.images, self.videos)
        except ValueError as error:  # image sizes, for example, are only checked here
            if not self.where or str(error).startswith(self.where):  # an image names its row
                raise
            raise ValueError(f"{self.where}: {error}") from error
        prompt.row = self
        return prompt


Dataset = Sequence[Row]


def uniform_numbers(keys: Sequence[str], num_generations: int, max_new_tokens: int) -> Tensor:
    """Return random numbers in [0, 1) that depend only on each prompt's key.

    Completions therefore do not depend on how prompts are divided among batches and ranks.

    Returns:
        (keys * num_generations, max_new_tokens) float64: one number per completion token.
    """
    shape = num_generations, max_new_tokens
    numbers = [random_numbers(key).random(shape) for key in keys]
    return torch.from_numpy(numpy.concatenate(numbers))


def random_numbers(key: str) -> numpy.random.Generator:
    """Create a NumPy random generator that is seeded with a text's bytes."""
    return numpy.random.default_rng(list(key.encode()))
