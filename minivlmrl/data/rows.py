"""Data classes: Row (one example), Prompt (its question as tensors), Completion (answer tokens)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy
import PIL.Image
import torch
from torch import Tensor

if TYPE_CHECKING:
    from minivlmrl.data.video import Video, VideoFile


# Arguments of rewards that do not come from columns of the row. No column may have these names.
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
    """The question of one row, as tensors."""

    input_ids: Tensor  # (P,) int64, image placeholders expanded
    # (patches of all images and videos in order, patch_dim), in the dtype of the ImageProcessor
    pixel_values: Tensor
    image_grid_thw: Tensor  # (images and videos, 3) int64: patches in time, height, width
    second_per_grid_ts: Tensor | None = None  # (images and videos,) float32, 0 for images
    # output of a frozen vision tower for the images; None if the tower has not computed it
    vision_embeds: Tensor | None = None

    def __post_init__(self):
        # The Row of this prompt, for environments; Row.prompt sets it. It is not a dataclass
        # field, because FSDP2's hooks walk through all fields of a model's arguments.
        self.row: Row | None = None


class Environment(Protocol):
    """The state of one completion that calls tools.

    An environment has the method `reset`. All other public methods are tools, except the optional
    methods `get_reward` and `observe`. An environment may also have an attribute `done`, and
    attributes that replace the defaults of Settings in agents/environment.py.
    """

    def reset(self, **columns) -> None:
        """Start an episode from the columns of a row."""


@dataclass
class Completion:
    """An answer to a prompt, sampled or demonstrated.

    The token ids are kept, and never recomputed from the text, because tokenizing decoded text can
    give other ids.
    """

    ids: Tensor  # (C,) int64, with the stop token
    # log-probabilities (C,) float32, in nats, at the temperature of sampling, or at temperature 1
    # if decoding was greedy; None for a demonstrated answer
    logps: Tensor | None = None
    # True if a stop token or a stop string ended the completion, False if max_new_tokens ended it
    stopped: bool = True
    # (C,) bool: True for tokens that the policy wrote, False for tokens of tools; None sets all
    # tokens to True
    policy_mask: Tensor = None  # pyright: ignore[reportAssignmentType]  # not None after __post_init__
    # ids from which top_k, top_p and min_p let each token be sampled, as (number of ids per token
    # (C,), all ids end to end); None stands for the whole vocabulary
    sampling_mask: tuple[Tensor, Tensor] | None = None
    # images that tools return, in order, each as (image, patches, image_grid_thw); a trajectory has
    # only the images, because its `turns` have the patches
    pictures: Sequence[tuple] = ()
    environment: Environment | None = None  # the environment that the tools belong to
    # tool calls: (number made, number failed, True if a result was truncated to fit)
    calls: tuple[int, int, bool] = (0, 0, False)
    extra: dict = field(default_factory=dict)  # values that rewards log with TRL's log_extra
    # `turns` are the completions of a trajectory, each with its own ids and its own prompt. The
    # attribute `prompt` of a completion outside of a trajectory is None, because its row has the
    # prompt.
    turns: "Sequence[Completion]" = ()
    prompt: Prompt | None = None
    # (max_new_tokens,) int64: expert choices of each token, see model/families/routes.py
    routes: Tensor | None = None

    def __post_init__(self):
        if self.policy_mask is None:
            self.policy_mask = torch.ones_like(self.ids, dtype=torch.bool)

    @property
    def sampled_logps(self) -> Tensor:
        """Return the log-probabilities (C,) of a sampled completion.

        Raises:
            AssertionError: the completion is a demonstrated answer, which has no log-probabilities.
        """
        assert self.logps is not None, "a demonstrated answer has no log-probabilities"
        return self.logps


@dataclass
class Row:
    """One example of a data file or an embedded task."""

    messages: list[dict]  # the prompt, see data/messages.py
    images: Sequence[PIL.Image.Image]  # one for each image part of the prompt, in order
    # {column: value}, the arguments of rewards, such as problem and solution
    columns: dict = field(default_factory=dict)
    completion: str | list[dict] | None = None  # a demonstrated answer, for SFT
    chosen: str | list[dict] | None = None  # the better of two answers, for preference training
    rejected: str | list[dict] | None = None  # the worse answer
    # one video for each video part of the prompt, in order
    videos: "Sequence[Video | VideoFile]" = field(default_factory=list)
    where: str = ""  # file and line of the row, for error messages
    key: str = ""  # text that seeds all random numbers of this row
    index: int = -1  # index of the row in its dataset

    def prompt(self, processor: Callable[..., Prompt]) -> Prompt:
        """Compute the tensors of the question.

        Args:
            processor: function of messages, images and videos, such as a Processor of processor.py.
        Raises:
            ValueError: the prompt is invalid. The message begins with the file and line of the row.
        """
        try:
            prompt = processor(self.messages, self.images, self.videos)
        except ValueError as error:  # the sizes of images, for example, are only checked here
            if not self.where or str(error).startswith(self.where):  # an image names its row
                raise
            raise ValueError(f"{self.where}: {error}") from error
        prompt.row = self
        return prompt


Dataset = Sequence[Row]


def uniform_numbers(keys: Sequence[str], num_generations: int, max_new_tokens: int) -> Tensor:
    """Return random numbers in [0, 1) that depend only on the key of each prompt.

    The same completions are therefore sampled for every division of prompts among batches and
    ranks.

    Returns:
        (keys * num_generations, max_new_tokens) float64: one number per token of each completion.
    """
    shape = num_generations, max_new_tokens
    numbers = [random_numbers(key).random(shape) for key in keys]
    return torch.from_numpy(numpy.concatenate(numbers))


def random_numbers(key: str) -> numpy.random.Generator:
    """Create a NumPy random generator that is seeded with the bytes of a text."""
    return numpy.random.default_rng(list(key.encode()))
