"""Count images per row and tokens per prompt in a dataset, without decoding images."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch

from minivlmrl.data.file_rows import FileRows, RowSelection
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Dataset, Row

SAMPLE = 64  # rows whose prompt lengths are measured for the summary
TASK_ROWS = 1000  # rows from an embedded task that are inspected, because all are similar
MARKUP = 1000  # maximum number of tokens that a chat template adds to a prompt


class PatchCounter(ImageProcessor):
    """Image processor that counts an image's patches without computing their values."""

    def patches(self, frames, height: int, width: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
        depth = math.ceil(len(frames) / self.temporal_patch_size)
        grid = depth, height // self.patch_size, width // self.patch_size
        return torch.zeros(0, self.patch_dim, dtype=self.dtype), grid


def summary(rows: Dataset, processor: Processor, skip_unreadable: bool = False) -> str:
    """Describe a dataset: "1204 (1200 with 1 image, 4 with no image); prompts of 212 to 580 tokens".

    Args:
        rows: the dataset.
        processor: the model's processor, which counts the tokens in sampled prompts.
        skip_unreadable: True counts and names unreadable rows in the sample; False raises their
            ValueError.
    """
    counter = counting_processor(processor)
    row_numbers = sorted({len(rows) * i // SAMPLE for i in range(SAMPLE)})
    unreadable: list[str] | None = [] if skip_unreadable else None
    lengths = [_prompt_length(rows, number, counter, unreadable) for number in row_numbers]
    prompt_lengths = sorted(length for length in lengths if length is not None)
    if isinstance(rows, FileRows):
        summary_text = rows.describe()
    else:  # an embedded task's rows are all similar
        summary_text = count_words({(len(rows[0].images), 0): len(rows)}, len(rows))
    if prompt_lengths:
        length_bounds = " to ".join(map(str, sorted({prompt_lengths[0], prompt_lengths[-1]})))
        summary_text += f"; prompts of {length_bounds} tokens"
        if len(prompt_lengths) < len(rows):
            summary_text += f" ({len(prompt_lengths)} were measured)"
    if unreadable:
        summary_text += (
            f"; {len(unreadable)} of {len(row_numbers)} measured rows are unreadable and will be "
            f"skipped (data.skip_unreadable), for example {unreadable[0]}"
        )
    return summary_text


def _prompt_length(
    rows: Dataset, index: int, counter: Processor, unreadable: list[str] | None
) -> int | None:
    """Return a prompt's token count, or None if the row has videos or is unreadable.

    An unreadable row's error is appended to `unreadable`, or raised if that is None.
    """
    try:
        row = outline(rows, index)
        return None if row.videos else len(row.prompt(counter).input_ids)
    except ValueError as error:
        if unreadable is None:
            raise
        unreadable.append(str(error))
        return None


def count_words(media_counts: Mapping[tuple[int, int], int], num_rows: int) -> str:
    """Describe the image and video counts: "1204 (1200 with 1 image, 4 with no image)".

    Args:
        media_counts: {a row's (images, videos): number of such rows}.
        num_rows: number of all rows.
    """
    media_words = sorted((_media_words(*media), count) for media, count in media_counts.items())
    text = ", ".join(f"{count} with {words}" for words, count in media_words)
    return f"{num_rows} ({text})" if len(media_counts) > 1 else text


def outline(rows: Dataset, index: int) -> Row:
    """Return a row for measuring its prompt; its images and videos need not be readable."""
    return rows.outline(index) if isinstance(rows, FileRows) else rows[index]


def without_media(rows: Dataset) -> Iterator[Row]:
    """Yield all rows without their images and videos.

    Only an embedded task's first TASK_ROWS rows are yielded, with their images.
    """
    if isinstance(rows, FileRows):
        for row_number in range(len(rows)):
            yield rows.read(row_number)[0]
    else:
        for row_number in range(min(len(rows), TASK_ROWS)):
            yield rows[row_number]


def describe_spelled(rows: Dataset, structure: Collection[str]) -> str | None:
    """Describe the rows whose texts spell a control token that no text may write.

    Args:
        rows: the dataset. Rows of an embedded task are not searched, because no stranger wrote them.
        structure: these control tokens, see Tokenizer.structure.

    Returns:
        A sentence with the number of such rows and the tokens, or None if there are no such rows.
    """
    if not isinstance(rows, FileRows):
        return None
    longest_first = sorted(structure, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))
    num_rows = 0
    names = set()
    for row in without_media(rows):
        found = set(pattern.findall(repr([row.messages, row.completion, row.chosen, row.rejected])))
        num_rows += bool(found)
        names |= found
    if not names:
        return None
    return (
        f"{num_rows} of {len(rows)} rows spell {', '.join(sorted(names))} in their texts. The "
        "tokenizer has a token for each of these names, but the names are encoded as ordinary "
        "text here, because only the chat template may write tokens of the structure"
    )


def find_long_rows(
    rows: Dataset, processor: Processor, limit: int, skip_unreadable: bool = False
) -> dict[int, str]:
    """Find rows whose prompt has more than `limit` tokens, except rows with videos.

    Args:
        rows: the dataset.
        processor: the model's processor.
        limit: maximum prompt length in tokens.
        skip_unreadable: True keeps unreadable rows, which the loader skips; False raises their
            ValueError.

    Returns:
        {row index: its file and line, and its prompt length}.

    Raises:
        ValueError: all rows are too long, or a row is unreadable.
    """
    unreadable: list[str] | None = [] if skip_unreadable else None
    long_rows = {}
    for row_number, where, prompt_length in _long_rows(rows, processor, limit, unreadable):
        long_rows[row_number] = f"{where}: {prompt_length} tokens"
    if len(long_rows) == len(rows):
        raise ValueError(
            f"data.max_prompt_tokens is {limit}, but all prompts are longer, for example "
            f"{long_rows[0]}"
        )
    return long_rows


def without_rows(rows: Dataset, removed: Mapping[int, str]) -> Dataset:
    """Return a dataset without the rows whose indices are the keys of `removed`."""
    if not removed or not isinstance(rows, FileRows):
        return rows
    picks = [(0, row_number) for row_number in range(len(rows)) if row_number not in removed]
    return RowSelection([rows], picks)


def check_lengths(
    rows: Dataset, processor: Processor, limit: int, reason: str, skip_unreadable: bool = False
):
    """Raise ValueError if a prompt without videos has more than `limit` tokens.

    Args:
        rows: the dataset.
        processor: the model's processor.
        limit: maximum prompt length in tokens.
        reason: end of the error message, after "the prompt of 2000 tokens".
        skip_unreadable: True ignores unreadable rows; False raises their ValueError.
    """
    unreadable: list[str] | None = [] if skip_unreadable else None
    for _, where, prompt_length in _long_rows(rows, processor, limit, unreadable):
        raise ValueError(f"{where}: the prompt of {prompt_length} tokens {reason}")


def _long_rows(
    rows: Dataset, processor: Processor, limit: int, unreadable: list[str] | None
) -> Iterator[tuple[int, str, int]]:
    """Yield (index, file and line, prompt length) for rows with more than `limit` prompt tokens."""
    if not isinstance(rows, FileRows):
        return  # an embedded task's rows are all similar
    counter = counting_processor(processor)
    image_processor = processor.image_processor
    token_side = image_processor.patch_size * image_processor.merge_size
    for row_number in range(len(rows)):
        row, media = rows.read(row_number)
        # upper bound, because a token has at least one byte
        text_tokens = len(repr(row.messages).encode())
        image_tokens = len(media) * image_processor.max_pixels // token_side**2
        if text_tokens + image_tokens + MARKUP <= limit:
            continue  # not even the upper bound is over the limit, so the prompt is not tokenized
        prompt_length = _prompt_length(rows, row_number, counter, unreadable)
        if prompt_length is not None and prompt_length > limit:
            yield row_number, row.where, prompt_length


def counting_processor(processor: Processor) -> Processor:
    """Return a processor that counts image and video patches without decoding them."""
    return replace(processor, image_processor=PatchCounter(**vars(processor.image_processor)))


def _media_words(num_images: int, num_videos: int) -> str:
    words = []
    for kind, count in (("image", num_images), ("video", num_videos)):
        if count:
            words.append(f"{count} {kind}s" if count > 1 else f"1 {kind}")
    return " and ".join(words) or "no image"
