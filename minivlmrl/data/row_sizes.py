"""Measure rows in tokens, and find rows that are too long.

A row is tokenized, without decoding images, only if its text length and image sizes allow more tokens than the limit.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch

from minivlmrl.data.file_dataset import FileDataset, RowFacts, Size, read_header
from minivlmrl.data.image import Grid, ImageProcessor
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.data.video import outline_video
from minivlmrl.errors import error_context

MARKUP = 1000  # maximum tokens added by a chat template
TOKEN_BYTES = 3  # bytes per token, a rough estimate for sorting


@dataclass(frozen=True)
class RowSize:
    """Token and image counts for a row; defaults describe a typical row with one image."""

    text_tokens: int = 200  # text tokens in the prompt
    image_tokens: int = 1000  # image tokens in the prompt, after merging patches
    frames: int = 1  # number of images and video frame pairs, assumed to be equally large
    answer_tokens: int | None = None  # tokens in the longest answer, None = no answer
    longest: int = 0  # tokens in the longest sequence (prompt and answer)
    where: str = ""  # file and line, for error messages
    index: int = 0  # row index in the dataset

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + self.image_tokens

    @property
    def weight(self) -> int:
        """Rough compute cost: decoder tokens plus vision tower tokens."""
        return self.prompt_tokens + self.image_tokens + (self.answer_tokens or 0)


class PatchCounter(ImageProcessor):
    """Image processor that computes patch grids without pixel values."""

    def patches(self, frames, height: int, width: int) -> tuple[torch.Tensor, Grid]:
        depth = math.ceil(len(frames) / self.temporal_patch_size)
        grid = depth, height // self.patch_size, width // self.patch_size
        return torch.zeros(0, self.patch_dim, dtype=self.dtype), grid

    def tokens(self, size: Size, options: dict) -> int:
        _, grid = self(cast(Any, SimpleNamespace(size=size)), **options)
        return self.num_tokens(grid)


def patch_counter(processor: Processor) -> PatchCounter:
    return PatchCounter(**vars(processor.image_processor))


def row_size(row: Row, processor: Processor, answers: Sequence[str]) -> RowSize:
    """Count the tokens in a row without decoding its images and videos."""
    counter = replace(processor, image_processor=patch_counter(processor))
    prompt = row.prompt(counter)
    prompt_tokens = len(prompt.input_ids)
    grids = prompt.image_grid_thw
    image_tokens = int(grids.prod(1).sum()) // counter.image_processor.merge_size**2
    given = [getattr(row, name) for name in answers if getattr(row, name)]
    encoded = [encode_completion(counter, row.messages, answer, row.images, row.videos) for answer in given]
    turns = [turn for completion in encoded for turn in completion.turns or [completion]]
    sequences = [len((turn.prompt or prompt).input_ids) + len(turn.ids) for turn in turns]
    return RowSize(
        text_tokens=prompt_tokens - image_tokens,
        image_tokens=image_tokens,
        frames=max(int(grids[:, 0].sum()), 1),
        answer_tokens=max((len(completion.ids) for completion in encoded), default=None),
        longest=max([prompt_tokens, *sequences]),
        where=row.where,
    )


def measure(rows: Dataset, index: int, processor: Processor, answers: Sequence[str] = ()) -> RowSize:
    """Return a row's size in tokens, cached per processor.

    Args:
        answers: Row fields to measure besides the prompt, such as ("chosen", "rejected").
    Raises:
        UserError: an image is unreadable, or the processor rejects its size.
    """
    if not isinstance(rows, FileDataset):
        return row_size(rows[index], processor, answers)
    facts = rows.facts[index]
    file = facts.file
    if file.processor is not processor:
        file.processor = processor
        file.sizes = {}
    sizes = file.sizes.setdefault(facts.line, {})
    key = tuple(answers)
    if not answers and sizes:  # reuse the prompt's token count from an earlier call with answers
        size = next(iter(sizes.values()))
        return replace(size, answer_tokens=None, longest=size.prompt_tokens)
    if key not in sizes:
        row = file.load(facts.line, read_header, outline_video)
        with error_context(row.where):
            sizes[key] = row_size(row, processor, answers)
    return sizes[key]


def row_sizes(
    rows: Dataset,
    indices: Iterable[int],
    processor: Processor,
    answers: Sequence[str] = (),
    unreadable: list[str] | None = None,
) -> Iterator[RowSize]:
    """Yield the sizes of rows, in the order of `indices`.

    Args:
        unreadable: list that collects errors, None = raise them.
    """
    for index in indices:
        try:
            yield replace(measure(rows, index, processor, answers), index=index)
        except ValueError as error:
            if unreadable is None:
                raise
            unreadable.append(str(error))


def image_tokens(facts: RowFacts, counter: PatchCounter) -> float:
    """Return the image tokens in a row; inf (unknown) with videos or unreadable images."""
    if facts.num_videos or any(size is None for size, _ in facts.images):
        return math.inf
    try:
        return sum(counter.tokens(size, options) for size, options in facts.images if size is not None)
    except ValueError:  # the size is unknown; training on this row raises this ValueError again
        return math.inf


def text_bytes(facts: RowFacts, answers: Sequence[str] = ()) -> int:
    return sum(facts.text_bytes[name] for name in ("prompt", *answers))


def long_rows(
    rows: Dataset, processor: Processor, limit: int, skip_unreadable: bool = False, answers: Sequence[str] = ()
) -> Iterator[RowSize]:
    """Yield sizes for rows whose prompt plus longest answer exceeds `limit` tokens."""
    if not isinstance(rows, FileDataset):
        return  # only data files have outliers: rows generated by data.task have similar lengths
    counter = patch_counter(processor)
    indices = [
        index
        for index, facts in enumerate(rows.facts)
        # text has at most one token per byte
        if text_bytes(facts, answers) + image_tokens(facts, counter) + MARKUP > limit
    ]
    sizes = row_sizes(rows, indices, processor, answers, [] if skip_unreadable else None)
    yield from (size for size in sizes if size.longest > limit)
