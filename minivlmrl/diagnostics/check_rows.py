"""Check the rows of a dataset: conversations, images, questions, boxes and answers."""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import PIL.Image

from minivlmrl.config.options import RunConfig
from minivlmrl.data.boxes import Box, parse_boxes
from minivlmrl.data.messages import as_turns, part_kind, parts_of, shown_parts_of, text_of
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.row_summary import without_media
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.rewards.text import find_answer
from minivlmrl.trainers.registry import find_class

PROMPTS = 16  # number of rows that are checked in detail
MARKUP_OF_ANSWER = 64  # maximum number of tokens that a chat template adds to an answer


def check_rows(
    config: RunConfig, all_rows: Dataset, names: Sequence[str], processor: Processor
) -> Iterator[str]:
    """Check the rows of one training stage.

    Args:
        all_rows: dataset of the stage.
        names: fields of a row that hold answers to train on, for example "chosen" and "rejected".

    Yields:
        One sentence for each problem, with its cause and a fix.
    """
    yield from check_conversations(all_rows, config.data.system_prompt)
    rows = spread(all_rows)
    solutions = [str(row.columns.get("solution") or "") for row in rows]
    yield from check_pictures(rows)
    yield from check_prompts(rows, processor)
    yield from check_questions(rows, solutions)
    yield from check_boxes(rows, solutions)
    yield from check_answers(config, names, all_rows, processor)


def check_conversations(all_rows: Dataset, system_prompt: str | None) -> Iterator[str]:
    """Check for rows with two system messages, and for an inconsistent order of image and text."""
    num_two_systems = 0
    # {whether the text comes first: number of rows}, for rows with an image at exactly one end
    image_orders = Counter()
    for row in without_media(all_rows):
        systems = {text_of(turn) for turn in row.messages if turn["role"] == "system"}
        num_two_systems += len({*systems, system_prompt} - {None}) > 1
        kinds = [part_kind(part) for part in parts_of([row.messages[-1]]) if part.get("text") != ""]
        if kinds and "text" in (kinds[0], kinds[-1]) and kinds[0] != kinds[-1]:
            image_orders[kinds[0] == "text"] += 1
    if num_two_systems:
        yield (
            f"{num_two_systems} of {len(all_rows)} rows have two system messages, or one beside "
            "data.system_prompt, which is not used for them: leave one out"
        )
    if min(image_orders[True], image_orders[False]) > 0.2 * image_orders.total():
        yield (
            f"{image_orders[True]} questions have their image at the end, {image_orders[False]} at "
            "the beginning: write all in one way"
        )


def check_pictures(rows: Sequence[Row]) -> Iterator[str]:
    """Check for images that are all identical, have one colour, or are enlarged thumbnails."""
    shown_bytes = [tuple(image.tobytes() for image in row.images) for row in rows]
    if len(rows) > 3 and all(shown_bytes) and len(set(shown_bytes)) == 1:
        yield "all rows show one picture: look at what the column image or images names"
    pictures = [image for row in rows for image in row.images]
    num_plain = sum(image.getcolors(1) is not None for image in pictures)
    if 5 * num_plain > len(pictures):
        yield (
            f"{num_plain} of {len(pictures)} images have one colour: "
            "look at the files, they may be damaged, or masks"
        )
    num_stretched = sum(map(is_stretched, pictures))
    if 5 * num_stretched > len(pictures):
        yield (
            f"{num_stretched} of {len(pictures)} images are thumbnails that were stretched "
            "(squares of one colour): take the files that they were made of"
        )


def is_stretched(image: PIL.Image.Image) -> bool:
    """Return whether an image is a thumbnail that was enlarged by repeating its pixels.

    Such an image has more than 64 colours, and each column equals the column to its left or right.
    """
    if image.getcolors(64) is not None:
        return False
    pixels = np.array(image.convert("RGB"))  # (H, W, 3)
    differs = (pixels[:, 1:] != pixels[:, :-1]).any(
        (0, 2)
    )  # (W - 1,), a column from the one before
    return not (differs[1:] & differs[:-1]).any()


def check_prompts(rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """Check for prompts with over 8192 tokens, without images, or with one token per image."""
    prompts = [row.prompt(processor) for row in rows]
    longest_prompt = max(len(prompt.input_ids) for prompt in prompts)
    if longest_prompt > 8192:
        yield f"a prompt has {longest_prompt} tokens: lower data.max_pixels or cut the text"
    grids = [grid for prompt in prompts for grid in prompt.image_grid_thw.tolist()]
    if not grids:
        yield "no row has an image or video: name the column image or images"
        return
    num_tokens = max(map(processor.image_processor.num_tokens, grids))
    longer_sides = [max(image.size) for row in rows for image in row.images]
    if num_tokens == 1 and max(longer_sides, default=0) > 28:
        yield "each image is one token, which shows next to nothing: raise data.max_pixels"


def check_questions(rows: Sequence[Row], solutions: Sequence[str]) -> Iterator[str]:
    """Check for questions that contain their solution.

    A question that lists all possible answers is allowed.
    """
    questions = [letters_of(text_of(row.messages[-1])) for row in rows]
    answers = [letters_of(find_answer(text) or text) for text in solutions]
    num_told = 0
    for answer, question in zip(answers, questions, strict=True):
        num_told += answer != "" and answer in question
    others_told = [answer in questions[0] for answer in answers if answer != answers[0]]
    names_few = sum(others_told) < len(others_told) / 3
    if len(rows) > 3 and num_told > 0.8 * len(rows) and names_few:
        yield f"{num_told} of {len(rows)} questions hold their solution: take it out of the prompt"


def letters_of(text: str) -> str:
    """Return the text in lower case, with only its letters and digits.

    For example, "Green_Square.png" becomes "greensquarepng", which contains "greensquare".
    """
    return re.sub(r"[\W_]", "", text.lower())


def check_boxes(rows: Sequence[Row], solutions: Sequence[str]) -> Iterator[str]:
    """Check that the boxes in solutions are in pixels and lie inside the image."""
    for row, text in zip(rows, solutions, strict=True):
        corner_lists = parse_boxes(find_answer(text) or text) if row.images else []
        for box in [Box(*corners, row.images[0].size) for corners in corner_lists]:
            if not box.valid or not box.inside() or max(box.x2, box.y2) <= 1:
                yield (
                    f"{row.where}: {text:.80} is outside; "
                    "write x1, y1, x2, y2 in pixels of the file"
                )
                return


def check_answers(
    config: RunConfig, names: Sequence[str], all_rows: Dataset, processor: Processor
) -> Iterator[str]:
    """Check the answers that a stage trains on.

    The checks find answers without a stop token at the end, and, if a later stage samples, answers
    with more than sampling.max_new_tokens tokens.
    """
    rows = spread(all_rows)
    stop_ids = config.sampling.stop_token_ids or processor.stop_token_ids
    max_new_tokens = config.sampling.max_new_tokens
    draws_later = not all(trainer.answers for trainer in map(find_class, config.stages))
    for name in names:
        answers = [encode_completion(processor, row.messages, getattr(row, name)) for row in rows]
        id_lists = [answer.ids for answer in answers]
        last_ids = {int(answer_ids[-1]) for answer_ids in id_lists} - set(stop_ids)
        if last_ids:
            yield f"a {name} ends with {min(last_ids)}: name it in sampling.stop_token_ids, or none"
        lengths = list(map(len, id_lists))
        lengths += answer_lengths(all_rows, name, processor, max_new_tokens)
        if draws_later and max(lengths) > max_new_tokens:
            yield (
                f"a {name} has {max(lengths)} tokens, "
                f"sampling.max_new_tokens is {max_new_tokens}: raise it"
            )


def answer_lengths(all_rows: Dataset, name: str, processor: Processor, limit: int) -> Iterator[int]:
    """Yield the number of tokens of each answer that has no images and may exceed `limit`.

    Answers whose number of bytes is small enough are skipped, because a token has at least one byte.
    """
    for row in without_media(all_rows):
        answer = getattr(row, name)
        num_bytes = len(repr(answer).encode())  # An answer has at most one token per byte.
        if num_bytes + MARKUP_OF_ANSWER > limit and not shown_parts_of(as_turns(answer)):
            yield len(encode_completion(processor, row.messages, answer).ids)


def spread(rows: Sequence) -> list:
    """Sample at most PROMPTS rows, always the same, in the order of the dataset.

    The rows are sampled at random, because every k-th row may be of the same kind.
    """
    row_indices = random.Random(0).sample(range(len(rows)), min(PROMPTS, len(rows)))
    return [rows[index] for index in sorted(row_indices)]
