"""Check dataset rows: conversations, images, questions, boxes and answers."""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from minivlmrl.config.options import RunConfig
from minivlmrl.data.file_dataset import FileDataset
from minivlmrl.data.messages import as_turns, shown_parts_of, text_of
from minivlmrl.data.processor import Processor, encode_windows
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.errors import pluralize, truncate
from minivlmrl.rewards.boxes import check_inside
from minivlmrl.rewards.text import find_answer
from minivlmrl.trainers.registry import find_class

NUM_ROWS = 16  # rows to check in detail
TASK_ROWS = 1000  # maximum rows to check if data.task generates rows
MAX_MARKUP_TOKENS = 64  # maximum tokens that a chat template adds to an answer (assumed)


def without_media(rows: Dataset) -> Iterator[Row]:
    """Read rows without opening images: all rows in a file, or up to 1000 generated ones."""
    if isinstance(rows, FileDataset):
        return (rows.read(number)[0] for number in range(len(rows)))
    return (rows[number] for number in range(min(len(rows), TASK_ROWS)))


def check_rows(config: RunConfig, all_rows: Dataset, names: Sequence[str], processor: Processor) -> Iterator[str]:
    """Check the rows for one training stage."""
    yield from check_conversations(all_rows, config.data.system_prompt)
    yield from check_duplicates(all_rows)
    rows = sample_rows(all_rows)
    yield from check_images(rows)
    yield from check_prompts(rows, processor)
    yield from check_questions(rows)
    for row in rows:
        try:
            if row.images:
                check_inside(row.columns.get("solution") or "", row.images[0].size, len(row.images))
        except ValueError as error:
            yield f"{row.where}: {error}."
            break
    yield from check_answers(config, names, all_rows, processor)


def check_conversations(all_rows: Dataset, system_prompt: str | None) -> Iterator[str]:
    """Check that no row has several different system messages."""
    num_two_systems = 0
    for row in without_media(all_rows):
        systems = {text_of(turn) for turn in row.messages if turn["role"] == "system"}
        num_two_systems += len({*systems, system_prompt} - {None}) > 1
    if num_two_systems:
        yield (
            f"{num_two_systems} of {len(all_rows)} rows have several system messages, counting data.system_prompt, "
            "which is ignored for rows with a system message of their own. Keep only one of the messages."
        )


def check_duplicates(all_rows: Dataset) -> Iterator[str]:
    """Check for rows with the same prompt and images, but different solutions."""
    if not isinstance(all_rows, FileDataset):
        return
    counts = Counter(all_rows.prompt_hashes)
    first_rows = {}  # {prompt and image hash: first row with it}
    faults = []
    for index, prompt_hash in enumerate(all_rows.prompt_hashes):
        if counts[prompt_hash] > 1:
            row = all_rows.read(index)[0]
            first = first_rows.setdefault(all_rows.content(index), row)
            if first.columns.get("solution") != row.columns.get("solution"):
                faults.append((first, row))
    if faults:
        first, second = (f"{row.where} has {truncate(row.columns.get('solution'), 60)}" for row in faults[0])
        yield (
            f"{pluralize(len(faults), 'row')} with the prompt and images of an earlier row, but a different solution: "
            f"{first}, and {second}. Remove the wrong row of each pair."
        )


def check_images(rows: Sequence[Row]) -> Iterator[str]:
    """Check for identical images, and for images with a single color."""
    shown_bytes = [tuple(image.tobytes() for image in row.images) for row in rows]
    if len(rows) > 3 and all(shown_bytes) and len(set(shown_bytes)) == 1:
        yield "All rows that were checked have the same image. Check which files the column image or images names."
    images = [image for row in rows for image in row.images]
    num_one_color = sum(image.getcolors(1) is not None for image in images)
    if 5 * num_one_color > len(images):
        yield f"{num_one_color} of {len(images)} images have only one color. Check for damaged files and for masks."


def check_prompts(rows: Sequence[Row], processor: Processor) -> Iterator[str]:
    """Check that rows have images, and that images are not resized to a single token."""
    prompts = [row.prompt(processor) for row in rows]
    grids = [grid for prompt in prompts for grid in prompt.image_grid_thw.tolist()]
    if not grids:
        yield "No row that was checked has an image or a video. Images must be in the column image or images."
        return
    num_tokens = max(map(processor.image_processor.num_tokens, grids))
    longer_sides = [max(image.size) for row in rows for image in row.images]
    if num_tokens == 1 and max(longer_sides, default=0) > 28:
        yield "Each image is reduced to a single token, which shows almost nothing. Raise data.max_pixels."


def check_questions(rows: Sequence[Row]) -> Iterator[str]:
    """Check for prompts that give away the solution; listing all solutions ("Is it a cat or a dog?") is fine."""
    answers = []  # per row: correct answers, reduced to letters and digits
    for row, texts in zip(rows, solutions_of(rows), strict=True):
        is_known = row.columns.get("solution") is not None
        letters = [letters_of(find_answer(text) or text) for text in texts if is_known]
        answers.append([text for text in letters if text])
    places = {"questions": [row.messages[-1:] for row in rows]}
    for place, roles in (("system messages", {"system"}), ("earlier turns", {"user", "assistant"})):
        places[place] = [[turn for turn in row.messages[:-1] if turn["role"] in roles] for row in rows]
    for place, turns in places.items():
        texts = []
        for of_row in turns:
            texts.append(" ".join(letters_of(text_of(turn)) for turn in of_row))
        num_revealed = sum(map(reveals, texts, answers))
        reveals_others = [reveals(texts[0], answer) for answer in answers if answer != answers[0]]
        lists_few = sum(reveals_others) < len(reveals_others) / 3
        if len(rows) > 3 and num_revealed > 0.8 * len(rows) and lists_few:
            yield (
                f"{num_revealed} of {len(rows)} {place} contain their solution. Remove the solution from the prompt."
            )


def reveals(text: str, answers: Sequence[str]) -> bool:
    """Return whether a text contains any answer."""
    return any(answer in text for answer in answers)


def solutions_of(rows: Dataset) -> list[list[str]]:
    """Return the correct answers per row: all strings if `solution` is a list, else str(solution)."""
    if isinstance(rows, FileDataset):
        values = [facts.solution for facts in rows.facts]  # known since the file was opened, so not read again
    else:
        values = [row.columns.get("solution") for row in without_media(rows)]
    solutions = []
    for solution in values:
        is_texts = isinstance(solution, list) and all(isinstance(x, str) for x in solution)
        solutions.append((solution or [""]) if is_texts else [str(solution)])
    return solutions


def letters_of(text: str) -> str:
    """Reduce a text to lowercase letters and digits: "Ice-Cream 2" becomes "icecream2"."""
    return re.sub(r"[\W_]", "", text.lower())


def check_answers(config: RunConfig, names: Sequence[str], all_rows: Dataset, processor: Processor) -> Iterator[str]:
    """Check that answers to train on end with a stop token, and fit into sampling.max_new_tokens."""
    rows = sample_rows(all_rows)
    stop_ids = config.sampling.stop_token_ids
    stop_ids = processor.stop_token_ids if stop_ids is None else stop_ids
    max_new_tokens = config.sampling.max_new_tokens
    samples_later = any(find_class(stage).samples_completions for stage in config.stages)
    for name in names:
        windows = (encode_windows(processor, row.messages, getattr(row, name)) for row in rows)
        id_lists = [turn.ids for of_row in windows for _, turn in of_row]
        last_ids = {int(answer_ids[-1]) for answer_ids in id_lists} - set(stop_ids)
        if last_ids:
            yield (
                f"An answer in the field {name} ends with the token id {min(last_ids)}, which is not a stop token. Add "
                "it to sampling.stop_token_ids, or remove that option."
            )
        lengths = [*map(len, id_lists), *answer_lengths(all_rows, name, processor, max_new_tokens)]
        if samples_later and max(lengths) > max_new_tokens:
            yield (
                f"An answer in the field {name} has {max(lengths)} tokens, but sampling.max_new_tokens is "
                f"{max_new_tokens}. Raise it."
            )


def answer_lengths(all_rows: Dataset, name: str, processor: Processor, limit: int) -> Iterator[int]:
    """Yield token counts for answers that may exceed `limit` tokens.

    A text of n bytes has at most n tokens, so answers with few bytes are skipped without tokenizing them.
    """
    indices = range(min(len(all_rows), TASK_ROWS))
    if isinstance(all_rows, FileDataset):
        indices = [i for i, x in enumerate(all_rows.facts) if x.text_bytes[name] + MAX_MARKUP_TOKENS > limit]
    for index in indices:
        row = all_rows.read(index)[0] if isinstance(all_rows, FileDataset) else all_rows[index]
        answer = getattr(row, name)
        if not shown_parts_of(as_turns(answer)):
            yield max(len(turn.ids) for _, turn in encode_windows(processor, row.messages, answer))


def sample_rows(rows: Sequence, count: int = NUM_ROWS) -> list:
    """Draw at most `count` random rows, always the same ones, in dataset order."""
    # random, because evenly spaced rows may all be alike
    row_indices = random.Random(0).sample(range(len(rows)), min(count, len(rows)))
    return [rows[index] for index in sorted(row_indices)]
