"""Measure rows in tokens, so that a run's memory can be planned before images are decoded."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from minivlmrl.data.file_rows import FileRows
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.row_summary import counting_processor, outline
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.data.video import VideoFile

NUM_MEASURED = 64  # number of the largest rows whose tokens are counted exactly
TOKEN_BYTES = 3  # text bytes per token, roughly; only the order of rows depends on this number


@dataclass(frozen=True)
class RowSize:
    """A row's token and image counts; the default is a typical row with one image."""

    text_tokens: int = 200  # text tokens in the prompt
    image_tokens: int = 1000  # image tokens in the prompt, after patches are merged
    # number of equally large images that image_tokens are divided into; two video frames
    # count as one image
    frames: int = 1
    # token count of the longest given answer; None if the row has no answer
    answer_tokens: int | None = None
    where: str = ""  # the row's file and line
    media: str = ""  # image and video sizes, for messages
    has_videos: bool = False
    index: int = 0  # index of the row in its dataset

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt's token count."""
        return self.text_tokens + self.image_tokens

    @property
    def weight(self) -> int:
        """Return the number by which rows are ordered.

        Image tokens count twice, because the vision tower and the decoder both process them.
        """
        return self.prompt_tokens + self.image_tokens + (self.answer_tokens or 0)


def measure_rows(rows: Dataset, processor: Processor, answers: Sequence[str] = ()) -> list[RowSize]:
    """Measure a dataset's largest rows, and return their sizes, the largest first.

    Only each file's header is read. A row that cannot be read is not measured, because the
    run reports the row when it reads it.

    Args:
        rows: the dataset. Only the first rows from an embedded task are measured, because all are
            similar.
        processor: the model's processor.
        answers: Row fields that contain given answers.
    """
    counter = counting_processor(processor)
    numbers = range(min(len(rows), NUM_MEASURED))
    if isinstance(rows, FileRows):
        weights = {}
        for number in range(len(rows)):
            with suppress(ValueError):
                weights[number] = rough_weight(rows.outline(number), counter, answers)
        numbers = sorted(weights, key=lambda number: -weights[number])[:NUM_MEASURED]
    sizes = []
    for number in numbers:
        with suppress(ValueError):
            size = row_size(outline(rows, number), counter, answers)
            sizes.append(replace(size, index=number))
    return sorted(sizes, key=lambda size: -size.weight)


def rough_weight(row: Row, counter: Processor, answers: Sequence[str]) -> float:
    """Estimate RowSize.weight without tokenizing a row's texts."""
    media = counter.media_patches(row.messages, row.images, row.videos)
    image_tokens = sum(counter.image_processor.num_tokens(grid) for _, grid, _ in media)
    texts = [row.messages, *(getattr(row, name) for name in answers)]
    return 2 * image_tokens + sum(len(repr(text).encode()) for text in texts) / TOKEN_BYTES


def row_size(row: Row, counter: Processor, answers: Sequence[str]) -> RowSize:
    """Count the tokens in a row that FileRows.outline has read.

    Args:
        counter: processor that counts patches, see counting_processor.
    """
    prompt = row.prompt(counter)
    grids = prompt.image_grid_thw
    image_tokens = int(grids.prod(1).sum()) // counter.image_processor.merge_size**2
    given = [getattr(row, name) for name in answers]
    lengths = [len(encode_completion(counter, row.messages, text).ids) for text in given if text]
    words = [f"an image of {image.width} x {image.height} pixels" for image in row.images]
    for video in row.videos:
        if isinstance(video, VideoFile):
            video = video.read(counter.image_processor)
        frames = video.frames
        words.append(f"a video of {len(frames)} frames of {frames[0].width} x {frames[0].height}")
    return RowSize(
        len(prompt.input_ids) - image_tokens,
        image_tokens,
        max(int(grids[:, 0].sum()), 1),
        max(lengths, default=None),
        row.where,
        ", ".join(words[:3]) + (", ..." if len(words) > 3 else ""),
        bool(row.videos),
    )
