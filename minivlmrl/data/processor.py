"""Convert messages and images to a tokenized Prompt, an answer to a Completion, and token ids to text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.data.chat_template import (
    ENDS,
    IMAGE,
    VIDEO,
    RewrittenTurnsError,
    SpecialToken,
    render,
    render_completion,
)
from minivlmrl.data.image import Grid, ImageProcessor
from minivlmrl.data.messages import as_turns, check_counts, check_ends, part_kind, parts_of, shown_parts_of
from minivlmrl.data.rows import Completion, Prompt, Row

if TYPE_CHECKING:
    from minivlmrl.data.folder_template import ChatTemplate
    from minivlmrl.data.tokenizer import Tokenizer
    from minivlmrl.data.video import Video, VideoFile

# keys for the kind and content of a message part; other keys, such as max_pixels, are options
PART_KEYS = {"type", "text", "image", "image_url", "video", "video_url"}
AnyImage = TypeVar("AnyImage")
AnyVideo = TypeVar("AnyVideo")
VISION = ("<|vision_start|>", IMAGE, "<|vision_end|>")  # tokens that the model never writes


@dataclass
class Processor:
    """The tokenizer, the chat template and the image processor of one checkpoint."""

    tokenizer: "Tokenizer"
    image_processor: ImageProcessor
    # chat template in the model's folder; None means Qwen2.5-VL's template (see chat_template.py)
    template: "ChatTemplate | None" = None
    # where the answer is in a completion, such as "tags"; see find_answer in rewards/text.py
    answer_format: str = "tags"
    box_space: str = "resized"  # units of the boxes in answers; see data/boxes.py
    # token ids that end a completion, in addition to ENDS; from generation_config.json and sampling.stop_token_ids
    end_token_ids: Sequence[int] = ()
    sizes: Mapping[str, dict] = field(default_factory=dict)  # options of data.image and data.video, for saved folders

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([*(self.tokenizer.special_tokens[end] for end in ENDS), *self.end_token_ids]))

    def __call__(
        self, messages: list[dict], images: Sequence[PIL.Image.Image] = (), videos: "Sequence[Video | VideoFile]" = ()
    ) -> Prompt:
        """Render and tokenize a prompt, and compute the patches of its images and videos.

        Args:
            messages: see data/messages.py. An image or video part may have options, such as {"type": "image",
                "max_pixels": 200704}, which are passed to ImageProcessor or Video.patches.
            images: one image for each image part, in order.
            videos: one video for each video part, in order.
        """
        pieces = render(messages) if self.template is None else self.template.render(messages)
        pixel_values = []
        grids = []
        seconds = []
        for patches, grid, time in self.media_patches(messages, images, videos):
            pixel_values.append(patches)
            grids.append(grid)
            seconds.append(time)
        # In Qwen3-VL's prompt, a timestamp such as "<0.3 seconds>" precedes each pair of frames of a video.
        if self.image_processor.videos is not None:
            pieces, grids, seconds = self.image_processor.videos.insert_timestamps(pieces, grids, seconds)
        # torch.cat refuses an empty list, so a prompt without images needs an empty tensor
        no_patches = torch.zeros(0, self.image_processor.patch_dim, dtype=self.image_processor.dtype)
        return Prompt(
            input_ids=torch.tensor(list(chain(*self.encode(pieces, grids)))),
            pixel_values=torch.cat([no_patches, *pixel_values]),
            image_grid_thw=torch.tensor(grids, dtype=torch.long).view(-1, 3),
            second_per_grid_ts=torch.tensor(seconds, dtype=torch.float32),
        )

    def media_patches(
        self, messages: list[dict], images: Sequence[PIL.Image.Image], videos: "Sequence[Video | VideoFile]"
    ) -> Iterator[tuple[Tensor, Grid, float | list[float]]]:
        """Yield (patches, patch grid, seconds) for each image and video of a prompt.

        The patch grid is the number of patches in time, height and width. `seconds` is 0 for images; for videos, see
        Video.patches.
        """
        for item, options in shown_parts(messages, images, videos):
            if isinstance(item, PIL.Image.Image):
                yield *self.image_processor(item, **options), 0.0
            else:
                yield item.patches(self.image_processor, **options)

    def encode(self, pieces: Sequence[str], grids: Sequence[Grid]) -> list[list[int]]:
        """Tokenize texts and control tokens. A placeholder is repeated once for each token of its image or video.

        Args:
            pieces: text and control tokens, as `render` returns them.
            grids: (t, h, w) for each image and video, in order.
        Returns:
            The list of token ids of each piece.
        """
        remaining_grids = iter(grids)
        ids = []
        for piece in pieces:
            piece_ids = self.tokenizer.encode(piece)  # a control token has one id
            if piece is IMAGE or piece is VIDEO:
                piece_ids = piece_ids * self.image_processor.num_tokens(next(remaining_grids))
            ids.append(piece_ids)
        return ids

    def join_turns(self, turns: list[dict]) -> list[dict]:
        """Return an answer's turns unchanged; the subclass ToolProcessor merges tool results into assistant turns."""
        return turns

    def mark_results(self, pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
        """Return an answer's pieces unchanged; the subclass ToolProcessor marks tool results as not trained."""
        return pieces

    def decode(self, ids: Tensor) -> str:
        """Decode a completion's token ids to text, without the stop token."""
        id_list = ids.tolist()
        if id_list and id_list[-1] in self.stop_token_ids:
            id_list = id_list[:-1]
        return self.tokenizer.decode(id_list)

    def decode_assistant_turn(self, completion: Completion) -> str:
        """Decode the tokens that the policy wrote, without tool results.

        If the chat template ends a prompt with an opening tag such as "<think>", the decoded text begins with the tag.
        """
        generation_prefix = self.template.generation_prefix if self.template else ""
        return generation_prefix + self.decode(completion.ids[completion.policy_mask])


def shown_parts(
    messages: list[dict], images: Sequence[AnyImage], videos: Sequence[AnyVideo]
) -> Iterator[tuple[AnyImage | AnyVideo, dict[str, int]]]:
    """Yield (image or video, its options) for each image part and video part of the messages, in order."""
    parts = shown_parts_of(messages)
    kinds = [part_kind(part) for part in parts]
    check_counts(kinds, {"image": len(images), "video": len(videos)})
    remaining_images, remaining_videos = iter(images), iter(videos)
    # The generator decodes one image at a time, so that the decoded images do not fill the memory.
    for kind, part in zip(kinds, parts, strict=True):
        options = {key: part[key] for key in part.keys() - PART_KEYS if part[key] is not None}
        yield next(remaining_images if kind == "image" else remaining_videos), options


def encode_completion(
    processor: Processor,
    messages: list[dict],
    completion: str | list[dict],
    images: Sequence[PIL.Image.Image] = (),
    videos: "Sequence[Video | VideoFile]" = (),
) -> Completion:
    """Tokenize a demonstrated answer for SFT, and mark the tokens that the model must learn to write.

    An answer ends with the token <|im_end|>. The mask Completion.policy_mask is True only for tokens in assistant
    turns. User and tool turns, and images in any turn, are context on which no loss is computed.

    If the chat template drops the thoughts of earlier turns, Completion.turns has one Completion per assistant turn,
    whose prompt contains all earlier turns.

    Args:
        messages: the prompt; see data/messages.py.
        completion: a text, or turns that begin and end with an assistant turn.
        images, videos: the prompt's images and videos.
    """
    (_, first), *later = encode_windows(processor, messages, completion)
    if not later:
        return first
    for window, turn in later:
        shown = [*images, *images_in(window[len(messages) :])]
        turn.prompt = processor(window, shown, videos)
    turns = [first, *(turn for _, turn in later)]
    return Completion(
        ids=torch.cat([turn.ids for turn in turns]),
        policy_mask=torch.cat([turn.policy_mask for turn in turns]),
        turns=turns,
    )


def encode_answer(processor: Processor, row: Row, answer: str | list[dict]) -> Completion:
    completion = encode_completion(processor, row.messages, answer, row.images, row.videos)
    for turn in completion.turns:
        if turn.prompt is not None:
            turn.prompt.row = row
    return completion


def encode_windows(
    processor: Processor, messages: list[dict], completion: str | list[dict]
) -> list[tuple[list[dict], Completion]]:
    """Tokenize an answer as one sequence, or turn by turn if the chat template drops the thoughts of earlier turns.

    Returns:
        For each sequence, its prompt's messages and the tokens that follow this prompt.
    """
    turns = as_turns(completion)
    check_ends(turns)
    turns = processor.join_turns(turns)
    try:
        return [(messages, encode_turns(processor, messages, turns))]
    except RewrittenTurnsError:
        numbers = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if len(numbers) == 1:
            raise
    windows = [([*messages, *turns[:i]], [turns[i]]) for i in numbers]
    return [(window, encode_turns(processor, window, turn)) for window, turn in windows]


def encode_turns(processor: Processor, messages: list[dict], turns: list[dict]) -> Completion:
    template = processor.template
    pieces = render_completion(turns) if template is None else template.render_completion(messages, turns)
    pieces = processor.mark_results(pieces)
    shown = shown_parts(turns, images_in(turns), ())
    pictures = [(image, *processor.image_processor(image, **options)) for image, options in shown]
    if len(pictures) != sum(piece is IMAGE for piece, _ in pieces):
        raise ValueError("the chat template cannot render an image in the answer; use a model whose template can")
    grids = [grid for *_, grid in pictures]
    encoded_pieces = processor.encode([piece for piece, _ in pieces], grids)
    ids = []
    written = []
    for piece_ids, (piece, is_written) in zip(encoded_pieces, pieces, strict=True):
        is_vision = isinstance(piece, SpecialToken) and piece in VISION
        ids += piece_ids
        written += [is_written and not is_vision] * len(piece_ids)
    return Completion(torch.tensor(ids), policy_mask=torch.tensor(written), pictures=pictures)


def images_in(turns: list[dict]) -> list[PIL.Image.Image]:
    """Return the images in the parts of turns, in order.

    If a part holds a function that decodes the image file, the function is called.
    """
    images = [part.get("image") for part in parts_of(turns)]
    decoded = [image() if callable(image) else image for image in images]
    return [image for image in decoded if isinstance(image, PIL.Image.Image)]
