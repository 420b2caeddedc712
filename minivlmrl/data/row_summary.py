"""How many rows have how many images, and how long their prompts are, without decoding an image."""

from collections.abc import Iterator
from dataclasses import replace

import PIL.Image
import torch

from minivlmrl.data.fetch import open_image
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.mix import Picked
from minivlmrl.image import ImageProcessor
from minivlmrl.rows import Dataset, Processor, Row

SAMPLE = 64  # rows whose prompts are laid out to say how long prompts are
MARKUP = 1000  # tokens that a template adds to a prompt, at most


class Sizes(ImageProcessor):
    """Tells how many tokens an image has, and leaves its pixels alone."""

    def patches(self, frames, height: int, width: int) -> tuple[torch.Tensor, tuple[int, int, int]]:
        grid = 1, height // self.patch_size, width // self.patch_size
        return torch.zeros(0, self.patch_dim), grid


def summary(rows: Dataset, processor: Processor) -> str:
    """Say "1204 (1200 with 1 image, 4 with no image); prompts of 212 to 580 tokens (...)"."""
    counter = _counter(processor)
    numbers = sorted({len(rows) * i // SAMPLE for i in range(SAMPLE)})
    sample = [row for row in (outline(rows, i) for i in numbers) if row is not None]
    if isinstance(rows, Picked):
        total = sum(map(len, rows.parts))
        shown = f"{len(rows)} picked out of {total} in {len(rows.parts)} file(s)"
    else:  # all rows of an embedded task are alike
        counts = getattr(rows, "counts", None) or {(len(sample[0].images), 0): len(rows)}
        described = sorted((_words(*each), n) for each, n in counts.items())
        shown = ", ".join(f"{n} with {words}" for words, n in described)
        shown = f"{len(rows)} ({shown})" if len(counts) > 1 else shown
    lengths = sorted(len(row.prompt(counter).input_ids) for row in sample)
    if not lengths:
        return shown
    of = f" ({len(lengths)} were measured)" if len(lengths) < len(rows) else ""
    ends = " to ".join(map(str, sorted({lengths[0], lengths[-1]})))
    return f"{shown}; prompts of {ends} tokens{of}"


def outline(rows: Dataset, index: int) -> Row | None:
    """Read a row with blank images of the sizes that files claim; None: it has videos."""
    if isinstance(rows, Picked):
        return outline(*rows.find(index))
    if not isinstance(rows, FileDataset):
        return rows[index]
    row, media = rows.read(index)
    if any(one.kind == "video" for one in media):
        return None
    blank = []
    for one in media:
        with open_image(one.source, rows.folder) as image:
            blank.append(PIL.Image.new("L", image.size))
    return replace(row, images=blank)


def without_long(rows: Dataset, processor: Processor, limit: int) -> tuple[Dataset, list[str]]:
    """Leave out rows with a prompt of over `limit` tokens, and describe them; not videos."""
    long = {n: f"{where}: {length} tokens" for n, where, length in _long(rows, processor, limit)}
    if len(long) == len(rows):
        raise ValueError(f"data.max_prompt_tokens is {limit}: all prompts are longer, {long[0]}")
    kept = [(0, number) for number in range(len(rows)) if number not in long]
    return (Picked([rows], kept) if long else rows), list(long.values())


def check_lengths(rows: Dataset, processor: Processor, limit: int, cause: str):
    """Refuse a prompt of over `limit` tokens (ValueError: its row, and `cause`); not videos."""
    for _, where, length in _long(rows, processor, limit):
        raise ValueError(f"{where}: its prompt of {length} tokens {cause}")


def _long(rows: Dataset, processor: Processor, limit: int) -> Iterator[tuple[int, str, int]]:
    """Yield rows of files with a prompt of over `limit` tokens: number, line, tokens."""
    counter = _counter(processor)
    settings = processor.image_processor
    side = settings.patch_size * settings.merge_size
    for number in range(len(rows)):
        part, index = rows.find(number) if isinstance(rows, Picked) else (rows, number)
        if not isinstance(part, FileDataset):
            return  # all rows of an embedded task are alike
        row, media = part.read(index)
        most = len(repr(row.messages).encode()) + len(media) * settings.max_pixels // side**2
        # others are not laid out
        if most + MARKUP > limit and (row := outline(part, index)) is not None:
            length = len(row.prompt(counter).input_ids)
            if length > limit:
                yield number, row.where, length


def _counter(processor: Processor) -> Processor:
    return replace(processor, image_processor=Sizes(**vars(processor.image_processor)))


def _words(images: int, videos: int) -> str:
    kinds = {"image": images, "video": videos}
    counts = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in kinds.items() if count]
    return " and ".join(counts) or "no image"
