"""Describe the dataset rows: counts, lengths, unread columns and boxes."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from minivlmrl.config.options import RunConfig
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.processor import Processor
from minivlmrl.data.row_sizes import TOKEN_BYTES, image_tokens, patch_counter, row_sizes, text_bytes
from minivlmrl.data.rows import Dataset
from minivlmrl.errors import pluralize
from minivlmrl.rewards.columns import REWARD_ARGUMENTS
from minivlmrl.run.setup import answers_of
from minivlmrl.trainers.base import Trainer

MAX_NAMES = 10  # maximum columns named in a note
NUM_MEASURED = 16  # rows whose length is measured for the summary


def describe_rows(config: RunConfig, datasets: dict[str, Dataset], processor: Processor) -> Iterator[str]:
    """Yield a summary for each dataset, and notes about unread columns and control tokens in the text."""
    for name, rows in datasets.items():
        skips = config.data.skip_unreadable and name != "eval"
        yield f"rows of {name}: {summary(rows, processor, skips, answers_of(config, name))}"
        if isinstance(rows, FileDataset):
            if num_left := sum(len(file.source) - file.num_rows for file in rows.files):
                yield f"rows of {name}: data.eval_rows leaves out the last {pluralize(num_left, 'row')} of the file"
            yield from (f"rows of {name}: {note}" for note in describe_unread(rows))
            structure = processor.tokenizer.structure
            yield from (f"rows of {name}: {note}" for note in describe_literal_tokens(rows, structure))


def summary(rows: Dataset, processor: Processor, skip_unreadable: bool = False, answers: Sequence[str] = ()) -> str:
    """Describe a dataset: "1204 (1200 with 1 image, 4 with no image); prompts of 212 to 580 tokens".

    Raises:
        UserError: a row is unreadable, and skip_unreadable is False.
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
            f"; {pluralize(len(unreadable), 'unreadable row')} will be skipped (data.skip_unreadable), for example "
            f"{unreadable[0]}"
        )
    return text


def rows_to_measure(rows: Dataset, processor: Processor) -> list[int]:
    """Choose all unreadable rows and 16 from shortest to longest; rows with videos are skipped as slow."""
    if not isinstance(rows, FileDataset):  # data.task: generated rows have similar sizes
        return list(range(min(len(rows), NUM_MEASURED)))
    counter = patch_counter(processor)
    readable = []  # (estimated prompt tokens, row index)
    unreadable = []
    for index, facts in enumerate(rows.facts):
        num_tokens = image_tokens(facts, counter) + text_bytes(facts) / TOKEN_BYTES
        if num_tokens < math.inf:
            readable.append((num_tokens, index))
        elif not facts.num_videos:
            unreadable.append(index)
    readable.sort()
    last = max(len(readable) - 1, 0)
    places = {round(last * i / (NUM_MEASURED - 1)): None for i in range(NUM_MEASURED)}
    return [*unreadable, *(index for place in places for _, index in readable[place : place + 1])]


def count_media(rows: Dataset) -> str:
    """Count rows by their images and videos: "1204 (1200 with 1 image, 4 with no image)"."""
    if isinstance(rows, FileDataset):
        num_rows = sum(file.num_rows for file in rows.files)
        if len(rows.files) > 1 or num_rows != len(rows):
            return f"{len(rows)} selected out of {num_rows} in {pluralize(len(rows.files), 'file')}"
        counts = Counter((facts.num_images, facts.num_videos) for facts in rows.facts)
    else:  # data.task: all rows have as many images as the first
        counts = Counter({(len(rows[0].images), 0): len(rows)})
    listed = []
    for (num_images, num_videos), number in counts.items():
        media = [pluralize(n, kind) for n, kind in ((num_images, "image"), (num_videos, "video")) if n]
        listed.append((" and ".join(media) or "no image", number))
    text = ", ".join(f"{number} with {media}" for media, number in sorted(listed))
    return f"{len(rows)} ({text})" if len(counts) > 1 else text


def describe_unread(rows: FileDataset) -> Iterator[str]:
    """Yield a note about columns that no stage and no reward reads."""
    given = set().union(*(file.given for file in rows.files))
    replaced = given & (REWARD_ARGUMENTS - {"images"})
    names = sorted({*rows.unread} | replaced)
    if not names:
        return
    others = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    listed = ", ".join(f"{name:.40}" for name in names[:MAX_NAMES])
    note = f"no stage and no reward reads the columns {listed}{others}"
    if replaced:
        note += (
            f"; rewards receive other values for {' and '.join(sorted(replaced))} from minivlmrl; see docs/rewards.md"
        )
    yield note


def describe_literal_tokens(rows: FileDataset, structure: Collection[str]) -> Iterator[str]:
    """Yield a note about rows whose text contains the name of a special token.

    Args:
        structure: tokens that only a chat template may produce.
    """
    literal_tokens = [names for facts in rows.facts if (names := {*structure}.intersection(facts.literal_tokens))]
    if literal_tokens:
        yield (
            f"{len(literal_tokens)} of {len(rows)} rows spell {', '.join(sorted(set().union(*literal_tokens)))} in "
            "their texts. These names are encoded as ordinary letters, because only the chat template writes the "
            "tokens of a conversation; remove them from the texts"
        )


def describe_boxes(
    trainers: dict[str, type[Trainer]], datasets: dict[str, Dataset], processor: Processor
) -> Iterator[str]:
    """Yield a note about the box unit for every stage whose answers contain boxes."""
    for stage, trainer in trainers.items():
        rows = datasets[stage]
        if not isinstance(rows, FileDataset):
            continue
        for facts in rows.facts:
            boxes = [facts.boxes[name] for name in trainer.answers if name in facts.boxes]
            if boxes:
                space = facts.box_space or processor.box_space
                yield (
                    f"rows of {stage}: answers contain boxes such as {boxes[0]}, which are trained on unchanged. This "
                    f"model's unit is {space} (data.box_space); recipes/rescale_boxes.py converts pixels of the "
                    "file"
                )
                break
