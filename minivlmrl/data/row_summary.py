"""Count images per row and tokens per prompt in a dataset, without decoding images."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from minivlmrl.data.file_rows import FileRows, RowSelection
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.read_row import answer_image_parts
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.errors import error_context

SAMPLE = 64  # rows that are measured, for the summary and for the memory estimate
MARKUP = 1000  # maximum number of tokens that a chat template adds to a prompt
TOKEN_BYTES = 3  # text bytes per token, roughly; only the order of rows depends on this number


class PatchCounter(ImageProcessor):
    """An image processor that computes the patch grid of an image, but no pixel values."""

    def patches(self, frames, height: int, width: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
        depth = math.ceil(len(frames) / self.temporal_patch_size)
        grid = depth, height // self.patch_size, width // self.patch_size
        return torch.zeros(0, self.patch_dim, dtype=self.dtype), grid


def counting_processor(processor: Processor) -> Processor:
    return replace(processor, image_processor=PatchCounter(**vars(processor.image_processor)))


def without_rows(rows: Dataset, removed: Collection[int]) -> Dataset:
    if not removed or not isinstance(rows, FileRows):
        return rows
    return RowSelection([rows], [(0, i) for i in range(len(rows)) if i not in removed])


def row_sizes(
    rows: Dataset, numbers: Iterable[int], processor: Processor, answers: Sequence[str] = (),
    unreadable: list[str] | None = None, videos: bool = False,
) -> Iterator["RowSize"]:  # fmt: skip
    """Yield the sizes of the rows with the given indices.

    Args:
        unreadable: list that collects the errors of unreadable rows; None raises them.
        videos: whether rows with videos are included.
    """
    counter = counting_processor(processor)
    for number in numbers:
        try:
            row = rows.outline(number) if isinstance(rows, FileRows) else rows[number]
            with error_context(row.where or "row"):
                if videos or not row.videos:
                    yield row_size(row, number, counter, answers)
        except ValueError as error:
            if unreadable is None:
                raise
            unreadable.append(str(error))


def summary(rows: Dataset, processor: Processor, skip_unreadable: bool = False) -> str:
    """Describe a dataset, such as "1204 (1200 with 1 image, 4 with no image); prompts of 212 to 580 tokens".

    If skip_unreadable is False, an unreadable row raises ValueError.
    """
    numbers = sorted({len(rows) * i // SAMPLE for i in range(SAMPLE)})
    unreadable: list[str] | None = [] if skip_unreadable else None
    lengths = sorted(size.prompt_tokens for size in row_sizes(rows, numbers, processor, (), unreadable))
    if isinstance(rows, FileRows):
        text = rows.describe()
    else:  # the rows of data.task are all similar
        text = count_words({(len(rows[0].images), 0): len(rows)}, len(rows))
    if lengths:
        text += f"; prompts of {' to '.join(map(str, sorted({lengths[0], lengths[-1]})))} tokens"
        if len(lengths) < len(rows):
            text += f" ({len(lengths)} were measured)"
    if unreadable:
        text += (
            f"; {len(unreadable)} of {len(numbers)} measured rows are unreadable and will be "
            f"skipped (data.skip_unreadable), for example {unreadable[0]}"
        )
    return text


def count_words(media_counts: Mapping[tuple[int, int], int], num_rows: int) -> str:
    """Describe the numbers of images and videos per row, such as "1204 (1200 with 1 image, 4 with no image)"."""

    listed = []
    for counts, number in media_counts.items():
        kinds = zip(counts, ("image", "video"), strict=True)
        media = " and ".join(f"{n} {kind}{'s' if n > 1 else ''}" for n, kind in kinds if n)
        listed.append((media or "no image", number))
    text = ", ".join(f"{number} with {media}" for media, number in sorted(listed))
    return f"{num_rows} ({text})" if len(media_counts) > 1 else text


def long_rows(
    rows: Dataset, processor: Processor, limit: int, skip_unreadable: bool = False, answers: Sequence[str] = ()
) -> Iterator["RowSize"]:
    """Yield the size of each row whose prompt and longest answer exceed `limit` tokens.

    If skip_unreadable is False, an unreadable row raises ValueError.
    """
    if not isinstance(rows, FileRows):
        return  # the rows of data.task are all similar
    images = processor.image_processor
    numbers = []
    for number in range(len(rows)):
        row, media = rows.read(number)
        media += [part["image"] for part in answer_image_parts(row)]
        image_tokens = len(media) * images.max_pixels // images.factor**2
        texts = [row.messages, *(getattr(row, name) for name in answers)]
        # A video, or an image with options of its own, can have more tokens.
        is_unbounded = any(item.options or item.kind == "video" for item in media)
        # a token has at least one byte, so a text has at most as many tokens as bytes
        if is_unbounded or len(repr(texts).encode()) + image_tokens + MARKUP > limit:
            numbers.append(number)
    sizes = row_sizes(rows, numbers, processor, answers, [] if skip_unreadable else None, videos=True)
    yield from (size for size in sizes if size.longest > limit)


@dataclass(frozen=True)
class RowSize:
    """The token and image counts of a row; the defaults describe a typical row with one image."""

    text_tokens: int = 200  # text tokens in the prompt
    image_tokens: int = 1000  # image tokens in the prompt, after patches are merged
    frames: int = 1  # equally large images of image_tokens; two video frames count as one
    answer_tokens: int | None = None  # of the longest given answer; None without an answer
    longest: int = 0  # tokens in the longest sequence, a prompt with an answer or with a part of its turns
    where: str = ""  # the row's file and line
    media: str = ""  # image and video sizes, for messages
    has_videos: bool = False
    index: int = 0  # index of the row in its dataset

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + self.image_tokens

    @property
    def weight(self) -> int:
        """Rough cost of a row: tokens in the decoder plus image tokens in the vision tower."""
        return self.prompt_tokens + self.image_tokens + (self.answer_tokens or 0)


def measure_rows(rows: Dataset, processor: Processor, answers: Sequence[str] = ()) -> list[RowSize]:
    """Return the sizes of a dataset's largest rows, the largest first, without unreadable rows."""
    numbers = range(min(len(rows), SAMPLE))  # the rows of data.task are all similar
    if isinstance(rows, FileRows):
        counter = counting_processor(processor)
        weights = {}
        for number in range(len(rows)):
            with suppress(ValueError):
                weights[number] = rough_weight(rows.outline(number), counter, answers)
        numbers = sorted(weights, key=lambda number: -weights[number])[:SAMPLE]
    sizes = row_sizes(rows, numbers, processor, answers, unreadable=[], videos=True)
    return sorted(sizes, key=lambda size: -size.weight)


def rough_weight(row: Row, counter: Processor, answers: Sequence[str]) -> float:
    """Estimate a row's token count from the bytes of its texts and the sizes of its images."""
    media = counter.media_patches(row.messages, row.images, row.videos)
    image_tokens = sum(counter.image_processor.num_tokens(grid) for _, grid, _ in media)
    texts = [row.messages, *(getattr(row, name) for name in answers)]
    return 2 * image_tokens + sum(len(repr(text).encode()) for text in texts) / TOKEN_BYTES


def row_size(row: Row, index: int, counter: Processor, answers: Sequence[str]) -> RowSize:
    prompt = row.prompt(counter)
    prompt_tokens = len(prompt.input_ids)
    grids = prompt.image_grid_thw
    image_tokens = int(grids.prod(1).sum()) // counter.image_processor.merge_size**2
    given = [getattr(row, name) for name in answers if getattr(row, name)]
    encoded = [encode_completion(counter, row.messages, answer, row.images, row.videos) for answer in given]
    turns = [turn for completion in encoded for turn in completion.turns or [completion]]
    longest = [len(turn.ids) + (len(turn.prompt.input_ids) if turn.prompt else prompt_tokens) for turn in turns]
    words = [f"an image of {image.width} x {image.height} pixels" for image in row.images]
    for video in row.videos:
        frames = video.read(counter.image_processor).frames
        words.append(f"a video of {len(frames)} frames of {frames[0].width} x {frames[0].height}")
    return RowSize(
        prompt_tokens - image_tokens, image_tokens, max(int(grids[:, 0].sum()), 1),
        max((len(completion.ids) for completion in encoded), default=None), max(longest, default=prompt_tokens),
        row.where, ", ".join(words[:3]) + (", ..." if len(words) > 3 else ""), bool(row.videos), index,
    )  # fmt: skip
