"""Row -> Prompt, the only form in which a question reaches the model.

data/file_dataset.py makes rows of files, tasks/ of pictures that it draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy
import PIL.Image
import torch
from torch import Tensor

from minivlmrl.chat import IMAGE, VIDEO, render
from minivlmrl.image import ImageProcessor

ENDS = ("<|im_end|>", "<|endoftext|>")  # a completion ends with either: of a turn, of a document


@dataclass
class Prompt:
    """One question as tensors."""

    input_ids: Tensor  # (P,) int64, image placeholders expanded
    pixel_values: Tensor  # (patches of all images and videos in order, patch_dim) float32
    image_grid_thw: Tensor  # (images and videos, 3) int64: patches in time, height, width
    second_per_grid_ts: Tensor | None = None  # (images and videos,) float32: 0 for an image
    position_ids: Tensor | None = None  # (3, P) int64, from the first pack on
    vision_embeds: Tensor | None = None  # (merged tokens, hidden_size), if a frozen tower saw them


@dataclass
class Processor:
    """Tokenizer, chat template and image settings of one checkpoint."""

    tokenizer: object  # hub/tokenizer.py
    image_processor: ImageProcessor
    template: object = None  # the folder's own, data/template.py; None: Qwen's of chat.py
    add_vision_id: bool = False  # number the images and videos of a prompt: "Picture 1: "
    answer: str = "tags"  # where a completion says its answer, see rewards.find_answer
    carried: dict[str, bytes] = field(default_factory=dict, repr=False)  # files that a save keeps

    @property
    def special(self) -> dict[str, int]:
        """Ids of the control tokens."""
        return self.tokenizer.special_tokens

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        return tuple(self.special[end] for end in ENDS)

    def __call__(
        self, messages: list[dict], images: Sequence = (), videos: Sequence = ()
    ) -> Prompt:
        """Render a conversation up to where the assistant has to answer.

        Args:
            messages: see chat.render; a part may have size options, see data/sizes.py.
            images, videos: one PIL image or data.video.Video for each part of its kind, in order.
        """
        from minivlmrl.data.media import shown_parts

        layout = render if self.template is None else self.template.render
        pieces = layout(messages, add_vision_id=self.add_vision_id)
        shown = shown_parts(pieces, messages, images, videos)
        seen = [(torch.zeros(0, self.image_processor.patch_dim), (0, 0, 0), 0.0)]
        for kind, item, options in shown:
            if kind == "image":
                seen.append((*self.image_processor(item, **options), 0.0))
            else:
                from minivlmrl.data.video import see_video

                seen.append(see_video(self.image_processor, item, **options))
        pixel_values, grids, seconds = zip(*seen, strict=True)
        lengths = iter(grids[1:])
        ids = []
        for piece in pieces:
            tokens = self.tokenizer.encode(piece)
            if piece is IMAGE or piece is VIDEO:  # by identity: text may spell the same
                tokens = tokens * self.image_processor.num_tokens(next(lengths))
            ids += tokens
        return Prompt(
            torch.tensor(ids),
            torch.cat(pixel_values),
            torch.tensor(grids, dtype=torch.long)[1:],
            torch.tensor(seconds, dtype=torch.float32)[1:],
        )

    def decode(self, ids: Tensor) -> str:
        """Return the text of a completion without its stop token."""
        ids = ids.tolist()
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids)


@dataclass
class Row:
    """One example. An answer is text, or turns that begin and end with the assistant's."""

    messages: list[dict]  # the prompt, see chat.render
    images: list[PIL.Image.Image]  # one for each image part of the prompt, in order
    columns: dict = field(default_factory=dict)  # problem, solution, ...: what rewards are given
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
            return processor(self.messages, self.images, self.videos)
        except ValueError as error:  # a size that an image cannot have shows only here
            raise ValueError(f"{self.where}: {error}" if self.where else str(error)) from error


Dataset = Sequence[Row]  # what a run asks of data: a length, and rows by number


def uniform_numbers(keys: Sequence[str], num_generations: int, max_new_tokens: int) -> Tensor:
    """(keys * num_generations, max_new_tokens) float64 in [0, 1), by the key of each prompt."""
    shape = num_generations, max_new_tokens
    return torch.from_numpy(numpy.concatenate([random_numbers(key).random(shape) for key in keys]))


def random_numbers(key: str) -> numpy.random.Generator:
    """Make a source of random numbers that depends on a text alone."""
    return numpy.random.default_rng(list(key.encode()))
