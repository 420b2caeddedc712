"""Measure the rows of a dataset in tokens: the longest and the heaviest rows, and a summary.

The facts of a row give an estimate of its size. Only rows for which an estimate is not enough are read again, and their
prompts are tokenized; their images are not decoded.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from minivlmrl.data.file_dataset import FileDataset, RowFacts, Size, read_header
from minivlmrl.data.image import Grid, ImageProcessor
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.data.video import outline_video
from minivlmrl.errors import counted, error_context

NUM_SUMMARY = 16  # rows that are measured for the summary
NUM_HEAVIEST = 64  # rows that are measured for the memory estimate
MARKUP = 1000  # maximum number of tokens that a chat template adds to a prompt
TOKEN_BYTES = 3  # text bytes per token, roughly; only the order of rows depends on this number


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


class PatchCounter(ImageProcessor):
    """An image processor that computes the patch grid of an image, but no pixel values."""

    def patches(self, frames, height: int, width: int) -> tuple[torch.Tensor, Grid]:
        depth = math.ceil(len(frames) / self.temporal_patch_size)
        grid = depth, height // self.patch_size, width // self.patch_size
        return torch.zeros(0, self.patch_dim, dtype=self.dtype), grid

    def tokens(self, size: Size, options: dict) -> int:
        """Return the number of tokens of an image with this width and height."""
        _, grid = self(SimpleNamespace(size=size), **options)  # pyright: ignore[reportArgumentType]  # reads the size
        return self.num_tokens(grid)


def patch_counter(processor: Processor) -> PatchCounter:
    return PatchCounter(**vars(processor.image_processor))


def row_size(row: Row, processor: Processor, answers: Sequence[str]) -> RowSize:
    """Count the tokens of a row, whose images and videos only need to have a size."""
    counter = replace(processor, image_processor=patch_counter(processor))
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
        words.append(f"a video of {counted(len(frames), 'frame')} of {frames[0].width} x {frames[0].height}")
    return RowSize(
        text_tokens=prompt_tokens - image_tokens,
        image_tokens=image_tokens,
        frames=max(int(grids[:, 0].sum()), 1),
        answer_tokens=max((len(completion.ids) for completion in encoded), default=None),
        longest=max(longest, default=prompt_tokens),
        where=row.where,
        media=", ".join(words[:3]) + (", ..." if len(words) > 3 else ""),
        has_videos=bool(row.videos),
    )


def measure(rows: FileDataset, index: int, processor: Processor, answers: Sequence[str] = ()) -> RowSize:
    """Count the tokens of a row; a row is read and measured only once for each processor.

    Args:
        answers: names of the answers that are measured, such as ("chosen", "rejected").

    Raises:
        ValueError: an image is unreadable, or the processor refuses its size.
    """
    file, line = rows.facts[index].file, rows.facts[index].line
    if file.processor is not processor:
        file.processor, file.sizes = processor, {}
    sizes = file.sizes.setdefault(line, {})
    if not answers and sizes:  # the row was measured with its answers
        size = next(iter(sizes.values()))
        return replace(size, answer_tokens=None, longest=size.prompt_tokens, index=index)
    if tuple(answers) not in sizes:
        row = file.load(line, read_header, outline_video)
        with error_context(row.where):
            sizes[tuple(answers)] = row_size(row, processor, answers)
    return replace(sizes[tuple(answers)], index=index)


def row_sizes(
    rows: Dataset,
    indices: Iterable[int],
    processor: Processor,
    answers: Sequence[str] = (),
    unreadable: list[str] | None = None,
) -> Iterator[RowSize]:
    """Yield the sizes of the rows with the given indices.

    Args:
        unreadable: list that collects the errors of unreadable rows; None raises them.
    """
    for index in indices:
        try:
            if isinstance(rows, FileDataset):
                yield measure(rows, index, processor, answers)
            else:
                yield replace(row_size(rows[index], processor, answers), index=index)
        except ValueError as error:
            if unreadable is None:
                raise
            unreadable.append(str(error))


def image_tokens(facts: RowFacts, counter: PatchCounter) -> float:
    """Return the number of tokens of a row's images; infinity if it cannot be computed without reading the row."""
    if facts.num_videos or any(size is None for size, _ in facts.images):
        return math.inf
    try:
        return sum(counter.tokens(size, options) for size, options in facts.images if size is not None)
    except ValueError:  # the processor refuses the size; reported, or skipped, when the image is used
        return math.inf


def text_bytes(facts: RowFacts, answers: Sequence[str]) -> int:
    """Return the bytes in the texts of a row's prompt and of the given answers."""
    return sum(facts.text_bytes[name] for name in ("prompt", *answers))


def estimated_weights(rows: FileDataset, processor: Processor, answers: Sequence[str] = ()) -> list[float]:
    """Estimate the weight of each row from its facts, see RowSize.weight; infinity for a row that must be read."""
    counter = patch_counter(processor)
    return [2 * image_tokens(facts, counter) + text_bytes(facts, answers) / TOKEN_BYTES for facts in rows.facts]


def long_rows(
    rows: Dataset, processor: Processor, limit: int, skip_unreadable: bool = False, answers: Sequence[str] = ()
) -> Iterator[RowSize]:
    """Yield the size of each row whose prompt and longest answer exceed `limit` tokens.

    If skip_unreadable is False, an unreadable row raises ValueError.
    """
    if not isinstance(rows, FileDataset):
        return  # the rows of data.task are all similar
    counter = patch_counter(processor)
    indices = []
    for index, facts in enumerate(rows.facts):
        # a token has at least one byte, so a text has at most as many tokens as bytes
        if text_bytes(facts, answers) + image_tokens(facts, counter) + MARKUP > limit:
            indices.append(index)
    sizes = row_sizes(rows, indices, processor, answers, [] if skip_unreadable else None)
    yield from (size for size in sizes if size.longest > limit)


def heaviest_rows(rows: Dataset, processor: Processor, answers: Sequence[str] = ()) -> list[RowSize]:
    """Return the sizes of a dataset's largest rows, the largest first, without unreadable rows."""
    indices = range(min(len(rows), NUM_HEAVIEST))  # the rows of data.task are all similar
    if isinstance(rows, FileDataset):
        weights = estimated_weights(rows, processor, answers)
        for index, weight in enumerate(weights):
            if weight == math.inf:
                sizes = row_sizes(rows, [index], processor, answers, [])
                weights[index] = max((size.weight for size in sizes), default=0)
        indices = sorted(range(len(rows)), key=lambda index: -weights[index])[:NUM_HEAVIEST]
    sizes = row_sizes(rows, indices, processor, answers, unreadable=[])
    return sorted(sizes, key=lambda size: -size.weight)


def summary(rows: Dataset, processor: Processor, skip_unreadable: bool = False, answers: Sequence[str] = ()) -> str:
    """Describe a dataset, such as "1204 (1200 with 1 image, 4 with no image); prompts of 212 to 580 tokens".

    If skip_unreadable is False, an unreadable row raises ValueError.
    """
    unreadable: list[str] | None = [] if skip_unreadable else None
    indices = rows_to_measure(rows, processor)
    lengths = sorted(size.prompt_tokens for size in row_sizes(rows, indices, processor, answers, unreadable))
    text = count_media(rows)
    if lengths:
        text += f"; prompts of {' to '.join(map(str, sorted({lengths[0], lengths[-1]})))} tokens"
        if len(lengths) < len(rows):
            text += f" ({len(lengths)} were measured)"
    if unreadable:
        text += (
            f"; {counted(len(unreadable), 'unreadable row')} will be skipped (data.skip_unreadable), for example "
            f"{unreadable[0]}"
        )
    return text


def rows_to_measure(rows: Dataset, processor: Processor) -> list[int]:
    """Choose the rows that the summary measures: unreadable rows, and rows from the shortest to the longest.

    Videos take long to open, so rows with videos are left out.
    """
    if not isinstance(rows, FileDataset):  # the rows of data.task are all similar
        return list(range(min(len(rows), NUM_SUMMARY)))
    readable = []
    unreadable = []
    for index, weight in enumerate(estimated_weights(rows, processor)):
        if weight < math.inf:
            readable.append((weight, index))
        elif not rows.facts[index].num_videos:
            unreadable.append(index)
    if not readable:
        return unreadable
    readable.sort()
    last = len(readable) - 1
    places = {round(last * i / (NUM_SUMMARY - 1)) for i in range(NUM_SUMMARY)}
    return [*unreadable, *(readable[place][1] for place in sorted(places))]


def count_media(rows: Dataset) -> str:
    """Describe the numbers of rows, images and videos, such as "1204 (1200 with 1 image, 4 with no image)"."""
    if isinstance(rows, FileDataset):
        num_rows = sum(file.num_rows for file in rows.files)
        if len(rows.files) > 1 or num_rows != len(rows):
            return f"{len(rows)} selected out of {num_rows} in {counted(len(rows.files), 'file')}"
        counts = Counter((facts.num_images, facts.num_videos) for facts in rows.facts)
    else:  # the rows of data.task are all similar
        counts = Counter({(len(rows[0].images), 0): len(rows)})
    listed = []
    for (num_images, num_videos), number in counts.items():
        media = [counted(n, kind) for n, kind in ((num_images, "image"), (num_videos, "video")) if n]
        listed.append((" and ".join(media) or "no image", number))
    text = ", ".join(f"{number} with {media}" for media, number in sorted(listed))
    return f"{len(rows)} ({text})" if len(counts) > 1 else text
