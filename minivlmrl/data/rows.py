"""Row, of data/file_dataset.py or tasks/ -> Prompt, the form in which questions reach the model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy
import PIL.Image
import torch
from torch import Tensor

from minivlmrl.data.chat_template import ENDS, IMAGE, VIDEO, content_parts, part_kind, render
from minivlmrl.data.image import ImageProcessor

PART_KEYS = {"type", "text", "image", "image_url", "video", "video_url"}  # others are options


@dataclass
class Prompt:
    """One question as tensors."""

    input_ids: Tensor  # (P,) int64, image placeholders expanded
    pixel_values: Tensor  # (patches of all images and videos in order, patch_dim) float32
    image_grid_thw: Tensor  # (images and videos, 3) int64: patches in time, height, width
    second_per_grid_ts: Tensor | None = None  # (images and videos,) float32: 0 for an image
    vision_embeds: Tensor | None = None  # what a frozen tower returned for its images
    # the Row it was made from, for environments: set by Row.prompt. Not a dataclass field, because
    # FSDP2's hooks walk through all fields of what a model is called with.
    row = None


@dataclass
class Completion:
    """What answers a prompt, sampled or demonstrated: ids, which are never made again from text."""

    ids: Tensor  # (C,) int64, with the token that it stopped at
    logps: Tensor | None = None  # (C,) float32, nats, at the sampling temperature (greedy: 1)
    stopped: bool = True  # by a stop token or stop string; False: cut at max_new_tokens
    written: Tensor | None = None  # (C,) bool: the policy wrote it, no tool; None: all
    # for top_k, top_p and min_p: the ids that each token was drawn from, as (number of ids per
    # token (C,), all ids end to end); None: from all
    sampling_mask: tuple[Tensor, Tensor] | None = None
    pictures: Sequence[tuple] = ()  # that tools show, in order: image, patches, image_grid_thw
    environment: object = None  # that the tools belong to, see environments/
    # tool calls: (made, failed, cut off because an answer did not fit)
    calls: tuple[int, int, bool] = (0, 0, False)
    extra: dict = field(default_factory=dict)  # what rewards log of it, by TRL's log_extra
    # Completions of a trajectory, whose ids are theirs; each has the prompt that it was written
    # from, None: its row's
    turns: Sequence = ()
    prompt: Prompt | None = None

    def __post_init__(self):
        if self.written is None:
            self.written = torch.ones_like(self.ids, dtype=torch.bool)


@dataclass
class Processor:
    """Tokenizer, chat template and image settings of one checkpoint."""

    tokenizer: object  # data/tokenizer.py
    image_processor: ImageProcessor
    template: object = None  # the folder's own, data/folder_template.py; None: Qwen's of chat.py
    answer: str = "tags"  # where a completion says its answer, see rewards.find_answer
    box_space: str = "resized"  # units of the boxes in it, see data/boxes.py
    tools: tuple = ()  # names of what completions may call, see environments/

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        return tuple(self.tokenizer.special_tokens[end] for end in ENDS)

    def __call__(
        self, messages: list[dict], images: Sequence = (), videos: Sequence = ()
    ) -> Prompt:
        """Render a conversation up to where the assistant has to answer.

        Args:
            messages: see chat.render. A part may say how large it is seen: options that
                ImageProcessor or Video.patches takes, such as {"type": "image", "max_pixels": n}.
            images, videos: one PIL image or data.video.Video for each part of its kind, in order.
        """
        pieces = render(messages) if self.template is None else self.template.render(messages)
        pixel_values = []
        grids = []
        seconds = []
        for item, options in shown_parts(messages, images, videos):
            if isinstance(item, PIL.Image.Image):
                patches, grid = self.image_processor(item, **options)
                time = 0.0
            else:  # time: seconds of a step in time, or Qwen3-VL's list of when each is shown
                patches, grid, time = item.patches(self.image_processor, **options)
            pixel_values.append(patches)
            grids.append(grid)
            seconds.append(time)
        if self.image_processor.videos is not None:  # each step a picture, its time as text
            pieces, grids, seconds = self.image_processor.videos.lay_out(pieces, grids, seconds)
        no_patches = torch.zeros(0, self.image_processor.patch_dim)  # torch.cat needs a tensor
        return Prompt(
            input_ids=torch.tensor(list(chain(*self.encode(pieces, grids)))),
            pixel_values=torch.cat([no_patches, *pixel_values]),
            image_grid_thw=torch.tensor(grids, dtype=torch.long).view(-1, 3),
            second_per_grid_ts=torch.tensor(seconds, dtype=torch.float32),
        )

    def encode(self, pieces: list[str], grids: Sequence) -> list[list[int]]:
        """Return the ids of each piece, a placeholder's as often as its grid of patches needs."""
        remaining_grids = iter(grids)
        ids = []
        for piece in pieces:
            piece_ids = self.tokenizer.encode(piece)
            if piece is IMAGE or piece is VIDEO:  # not ==: text may spell the same
                piece_ids = piece_ids * self.image_processor.num_tokens(next(remaining_grids))
            ids.append(piece_ids)
        return ids

    def decode(self, ids: Tensor) -> str:
        """Return the text of a completion without its stop token."""
        ids = ids.tolist()
        if ids and ids[-1] in self.stop_token_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids)

    def turn(self, completion: Completion) -> str:
        """Return the assistant's turn: the thought that the prompt opens, and what was written."""
        opened = self.template.opened if self.template else ""
        return opened + self.decode(completion.ids[completion.written])


def shown_parts(
    messages: list[dict], images: Sequence, videos: Sequence
) -> Iterator[tuple[object, dict[str, int]]]:
    """Yield what each image or video part of a prompt shows, and the options it has."""
    all_parts = chain(*map(content_parts, messages))
    parts = [part for part in all_parts if part_kind(part) != "text"]
    kinds = [part_kind(part) for part in parts]
    check_counts(kinds, {"image": images, "video": videos})
    media = {"image": iter(images), "video": iter(videos)}
    for kind, part in zip(kinds, parts, strict=True):  # one is decoded at a time
        options = {key: part[key] for key in part.keys() - PART_KEYS if part[key] is not None}
        yield next(media[kind]), options


def check_counts(kinds: Sequence[str], media: dict[str, Sequence]):
    """Refuse another number of placeholders of a kind than of images or videos with a prompt."""
    for kind in ("image", "video"):
        placeholders = kinds.count(kind)
        given = len(media.get(kind, ()))
        if placeholders != given:
            raise ValueError(
                f"the prompt has {placeholders} {kind} placeholder(s) but {given} {kind}(s) came "
                f"with it; put one where each {kind} belongs and name as many {kind}s"
            )


@dataclass
class Row:
    """One example; data/tokenize_completions.py turns its answers into tokens."""

    messages: list[dict]  # the prompt, see chat.render
    images: list[PIL.Image.Image]  # one for each image part of the prompt, in order
    columns: dict = field(default_factory=dict)  # problem, solution, ...: arguments of rewards
    completion: str | list[dict] | None = None  # a demonstrated answer, for sft
    chosen: str | list[dict] | None = None  # the better of two answers, for preferences
    rejected: str | list[dict] | None = None  # the worse one
    videos: list = field(default_factory=list)  # data.video.Video, one for each video part
    where: str = ""  # its file and line, for errors
    key: str = ""  # what the random draws of this row depend on
    index: int = -1  # its number in the dataset

    def prompt(self, processor: Processor) -> Prompt:
        """Make tensors of the question (ValueError: begins with the file and line)."""
        try:
            prompt = processor(self.messages, self.images, self.videos)
        except ValueError as error:  # impossible sizes are only detected here
            raise ValueError(f"{self.where}: {error}" if self.where else str(error)) from error
        prompt.row = self
        return prompt


Dataset = Sequence[Row]  # has a length, and rows by number


def uniform_numbers(keys: Sequence[str], num_generations: int, max_new_tokens: int) -> Tensor:
    """(keys * num_generations, max_new_tokens) float64 in [0, 1), by the key of each prompt."""
    shape = num_generations, max_new_tokens
    numbers = [random_numbers(key).random(shape) for key in keys]
    return torch.from_numpy(numpy.concatenate(numbers))


def random_numbers(key: str) -> numpy.random.Generator:
    """Make a source of random numbers that depends on a text alone."""
    return numpy.random.default_rng(list(key.encode()))
