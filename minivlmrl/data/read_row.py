"""Convert a row of a data file to a Row object: a prompt, its images and videos, and answers.

split_answers   the prompt's turns, and the answers
read_media      the columns image, images, video and videos
place_answers   each image and video gets its part in a message

The functions expect a row whose columns row_checks.check_columns has checked.
"""

from itertools import takewhile

from minivlmrl.config.options import RowOptions
from minivlmrl.data.columns import ANSWERS, PROMPTS, LayoutError
from minivlmrl.data.media import Media, place_media, read_media
from minivlmrl.data.messages import (
    MARK,
    add_system_prompt,
    as_turns,
    part_kind,
    put_in_template,
    shown_parts_of,
    text_of,
)
from minivlmrl.data.rows import Row
from minivlmrl.errors import check_field, error_context

Answers = dict[str, str | list[dict]]


def read_row(columns: dict, options: RowOptions) -> tuple[Row, list[Media]]:
    """Convert a row's columns to a Row object without images, and list the prompt's images and videos in order.

    An image part of an answer contains the image's Media under the key "image".
    """
    place, prompt, answers = split_answers(columns, options)
    messages, media, answers = place_answers(place, prompt, answers, columns, options)
    row = Row(messages, [], columns, answers.get("completion"), answers.get("chosen"), answers.get("rejected"))
    return row, media


def split_answers(columns: dict, options: RowOptions) -> tuple[str, list[dict], Answers]:
    """Split a row into its prompt and its answers, as docs/data.md describes.

    Returns:
        The column of the prompt, for error messages; the prompt's turns; and {column: answer}.
    """
    texts = {name: without_nulls(columns[name]) for name in PROMPTS if columns.get(name) is not None}
    answers = {name: without_nulls(columns[name]) for name in ANSWERS if columns.get(name) is not None}
    template = options.prompt_template
    if "{problem}" not in template:
        expected = f"a text that contains {{problem}}, because the row has {[*texts]}"
        check_field(not texts, "data.prompt_template", template, expected)
        texts, template = {"problem": template}, "{problem}"
    check_one_of([*texts])
    if not texts:
        place, prompt = "chosen", shared_turns(answers, columns)
        answers |= {name: answers[name][len(prompt) :] for name in ("chosen", "rejected")}
    else:
        [(place, value)] = texts.items()
        prompt = as_turns(value, "user")
        if place == "messages" and prompt[-1]["role"] == "assistant":
            check_one_of(["messages", *answers.keys() & {"completion"}])
            first_answer = [turn["role"] for turn in prompt].index("assistant")
            answers = {"completion": prompt[first_answer:], **answers}
            prompt = prompt[:first_answer]
    if system := columns.get("system"):
        prompt = add_system_prompt(prompt, system)
        if text_of(prompt[0]) != system:
            raise ValueError(
                "column 'system': the turns begin with another system message; remove the column or the system message"
            )
    if template != "{problem}":
        with error_context(f"column {place!r}"):
            prompt = put_in_template(template, prompt)
    return place, prompt, answers


def without_nulls(text_or_turns: str | list[dict]) -> str | list[dict]:
    """Remove the keys without a value, because a table writes every key of any turn or part into all of them."""
    if isinstance(text_or_turns, str):
        return text_or_turns
    turns = []
    for turn in text_or_turns:
        turn = {key: value for key, value in turn.items() if value is not None or key == "content"}
        if isinstance(turn["content"], list):
            turn["content"] = [{key: part[key] for key in part if part[key] is not None} for part in turn["content"]]
        turns.append(turn)
    return turns


def check_one_of(given: list[str]):
    if len(given) > 1:
        raise LayoutError(
            f"the row has both columns {given[0]!r} and {given[1]!r}, but only one of them is allowed; remove the other"
        )


def shared_turns(answers: Answers, columns: dict) -> list[dict]:
    """Return the turns with which the conversations `chosen` and `rejected` both begin."""
    conversations = [answers[name] for name in ("chosen", "rejected") if isinstance(answers.get(name), list)]
    if len(conversations) < 2:
        given = sorted(name for name, value in columns.items() if value is not None)
        raise LayoutError(
            f"column 'problem' is missing; the row has {given!r:.200}. Rename the column of the question with "
            "data.columns: {YOURS: problem}, or set the same question for all rows with data.prompt_template"
        )
    pairs = zip(*conversations, strict=False)
    shared = [turn for turn, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    if not shared:
        raise ValueError(
            "columns 'chosen' and 'rejected': the conversations begin with different turns, but these turns are the "
            "prompt; begin both with the same turns, or write the prompt into the column 'prompt'"
        )
    return shared


def column_of(answer: str, place: str) -> str:
    """Return the column that contains an answer, such as `completion`, or `messages` with prompt and answer."""
    return place if (answer, place) == ("completion", "messages") else answer


def place_answers(
    place: str, prompt: list[dict], answers: Answers, columns: dict, options: RowOptions
) -> tuple[list[dict], list[Media], Answers]:
    """Assign a row's images and videos, in order, to the parts of the prompt and of its answers.

    If the answers `chosen` and `rejected` of a pair contain images, both contain the same images.

    Returns:
        The prompt's messages, its media in order, and {column: answer}.
    """
    row_media = read_media(columns)
    shown = {name: as_turns(turns) for name, turns in answers.items() if shows_media(turns)}
    messages, media, placed = prompt, [], dict(answers)
    # If no answer contains an image, all images of the row belong to the prompt.
    for name, turns in (shown or {place: []}).items():
        with error_context(f"column {column_of(name, place)!r}"):
            conversation, media = place_media([*prompt, *turns], row_media, options)
            messages, answer = conversation[: len(prompt)], conversation[len(prompt) :]
            parts = shown_parts_of(answer)
            if any(part_kind(part) == "video" for part in parts):
                raise ValueError("a video after the first assistant turn is not supported; move it into the prompt")
            # the last items of the list `media` are the answer's images
            for part in reversed(parts):
                part["image"] = media.pop()  # RowFile.load replaces it by a function that loads the image
        if shown:
            placed[name] = answer
    return add_system_prompt(messages, options.system_prompt), media, placed


def shows_media(turns: str | list[dict]) -> bool:
    """Return True if an answer has an image part, or the tag <image> in a user or tool turn."""
    if isinstance(turns, str):
        return False
    others = [turn for turn in turns if turn["role"] != "assistant"]
    return bool(shown_parts_of(turns)) or any(MARK.search(text_of(turn)) for turn in others)


def answer_image_parts(row: Row) -> list[dict]:
    answers = (row.completion, row.chosen, row.rejected)
    return [part for answer in answers if isinstance(answer, list) for part in shown_parts_of(answer)]
