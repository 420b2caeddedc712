"""Convert messages and images to a Prompt, answers to Completions, and token ids to text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import PIL.Image
import torch
from torch import Tensor

from minivlmrl.data.chat_template import ENDS, IMAGE, VIDEO, VISION, ChatTemplate, RewrittenTurnsError
from minivlmrl.data.image import Grid, ImageProcessor
from minivlmrl.data.messages import as_turns, check_counts, check_ends, part_kind, parts_of, shown_parts_of
from minivlmrl.data.rows import Completion, Prompt, Row
from minivlmrl.data.tokenizer import SpecialToken, Tokenizer
from minivlmrl.errors import UserError

if TYPE_CHECKING:
    from minivlmrl.data.video import Video, VideoFile

# message part keys for type and content; others, such as max_pixels, are image options
PART_KEYS = {"type", "text", "image", "image_url", "video", "video_url"}
AnyImage = TypeVar("AnyImage")
AnyVideo = TypeVar("AnyVideo")


@dataclass
class Processor:
    """A checkpoint's tokenizer, chat template and image processor."""

    tokenizer: Tokenizer
    image_processor: ImageProcessor
    template: ChatTemplate = field(default_factory=ChatTemplate)
    # how find_answer in rewards/text.py extracts an answer from a completion
    answer_format: str = "tags"
    box_space: str = "resized"  # unit of box coordinates in answers; see data.box_space
    # tokens that end a completion besides ENDS; from generation_config.json and sampling.stop_token_ids
    end_token_ids: Sequence[int] = ()
    sizes: Mapping[str, dict] = field(default_factory=dict)  # options data.image and data.video, saved with the model

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([*(self.tokenizer.special_tokens[end] for end in ENDS), *self.end_token_ids]))

    def __call__(
        self, messages: list[dict], images: Sequence[PIL.Image.Image] = (), videos: "Sequence[Video | VideoFile]" = ()
    ) -> Prompt:
        """Render and tokenize a prompt, and compute image and video patches.

        Args:
            messages: see data/messages.py. Image and video parts may have options for ImageProcessor or Video.patches,
                such as {"type": "image", "max_pixels": 200704}.
            images, videos: one per image or video part, in order.
        """
        pieces = self.template.render(messages)
        shown = []  # (patches, patch grid, seconds per time step) per image or video
        for item, options in shown_parts(messages, images, videos):
            if isinstance(item, PIL.Image.Image):
                shown.append((*self.image_processor(item, **options), 0.0))
            else:
                shown.append(item.patches(self.image_processor, **options))
        pixel_values, grids, seconds = ([values[i] for values in shown] for i in range(3))
        # Qwen3-VL puts a timestamp such as "<0.3 seconds>" before each pair of frames
        if self.image_processor.videos is not None:
            pieces, grids, seconds = self.image_processor.videos.insert_timestamps(pieces, grids, seconds)
        # for prompts without images, because torch.cat rejects an empty list
        no_patches = torch.zeros(0, self.image_processor.patch_dim, dtype=self.image_processor.dtype)
        return Prompt(
            input_ids=torch.tensor(list(chain(*self.encode(pieces, grids)))),
            pixel_values=torch.cat([no_patches, *pixel_values]),
            image_grid_thw=torch.tensor(grids, dtype=torch.long).view(-1, 3),
            second_per_grid_ts=torch.tensor(seconds, dtype=torch.float32),
        )

    def encode(self, pieces: Sequence[str], grids: Sequence[Grid]) -> list[list[int]]:
        """Tokenize each text and control token; repeat each placeholder once per image or video token.

        Args:
            grids: patch grid (t, h, w) per image and video, in order.
        """
        remaining_grids = iter(grids)
        ids = []
        for piece in pieces:
            piece_ids = self.tokenizer.encode(piece)
            if piece is IMAGE or piece is VIDEO:
                piece_ids *= self.image_processor.num_tokens(next(remaining_grids))
            ids.append(piece_ids)
        return ids

    def join_turns(self, turns: list[dict]) -> list[dict]:
        """Return turns unchanged. The subclass ToolProcessor merges tool results into assistant turns."""
        return turns

    def mark_results(self, pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
        """Return (text, has loss) pairs unchanged. The subclass ToolProcessor removes the loss from tool results."""
        return pieces

    def decode(self, ids: Tensor) -> str:
        """Decode a completion to text, without the stop token."""
        id_list = ids.tolist()
        if id_list and id_list[-1] in self.stop_token_ids:
            id_list.pop()
        return self.tokenizer.decode(id_list)

    def decode_assistant_turn(self, completion: Completion) -> str:
        """Decode only the tokens generated by the policy, not tool results.

        If the prompt ends with an opening tag such as "<think>", the returned text begins with this tag.
        """
        return self.template.generation_prefix + self.decode(completion.ids[completion.policy_mask])


def shown_parts(
    messages: list[dict], images: Sequence[AnyImage], videos: Sequence[AnyVideo]
) -> Iterator[tuple[AnyImage | AnyVideo, dict[str, int]]]:
    """Yield an image or video, with its options, for each image and video part in messages."""
    parts = shown_parts_of(messages)
    kinds = [part_kind(part) for part in parts]
    check_counts(kinds, {"image": len(images), "video": len(videos)})
    remaining_images = iter(images)
    remaining_videos = iter(videos)
    # decode one image at a time, because all images together could fill the memory
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
    """Tokenize a demonstration for SFT.

    Answers end with <|im_end|>. Completion.policy_mask is True for tokens with a loss: only text in assistant turns,
    not user turns, tool turns or images. If the chat template drops earlier reasoning, Completion.turns has one
    Completion per assistant turn, with all earlier turns as its prompt.

    Args:
        completion: string, or turns that begin and end with an assistant turn.
    """
    (_, first), *later = encode_windows(processor, messages, completion)
    if not later:
        return first
    for window, turn in later:
        turn.prompt = processor(window, [*images, *images_in(window[len(messages) :])], videos)
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
    """Tokenize an answer as one sequence, or per turn if the chat template drops earlier reasoning.

    Returns:
        (prompt messages, tokenized answer) for the whole answer, or for each assistant turn.
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
    pieces = processor.mark_results(processor.template.render_completion(messages, turns))
    pictures = [
        (image, *processor.image_processor(image, **options))
        for image, options in shown_parts(turns, images_in(turns), ())
    ]
    if len(pictures) != sum(piece is IMAGE for piece, _ in pieces):
        raise UserError("the chat template cannot render an image in the answer; use a model whose template can")
    encoded_pieces = processor.encode([piece for piece, _ in pieces], [grid for *_, grid in pictures])
    ids = []
    written = []
    for piece_ids, (piece, is_written) in zip(encoded_pieces, pieces, strict=True):
        is_vision = isinstance(piece, SpecialToken) and piece in VISION
        ids += piece_ids
        written += [is_written and not is_vision] * len(piece_ids)
    return Completion(torch.tensor(ids), policy_mask=torch.tensor(written), pictures=pictures)


def images_in(turns: list[dict]) -> list[PIL.Image.Image]:
    """Decode and return all images in turns, in order."""
    images = [part.get("image") for part in parts_of(turns)]
    decoded = [image() if callable(image) else image for image in images]
    return [image for image in decoded if isinstance(image, PIL.Image.Image)]
