"""Convert a row in a data file to a Row with prompt, images, videos and answers.

Rows must have passed row_checks.check_columns.
"""

from itertools import takewhile

from minivlmrl.config.options import RowOptions
from minivlmrl.data.columns import ANSWERS, PROMPTS, missing_column
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
from minivlmrl.errors import UserError, error_context

Answers = dict[str, str | list[dict]]


def read_row(columns: dict, options: RowOptions) -> tuple[Row, list[Media]]:
    """Convert a data row to a Row, and return it with the unloaded images and videos of its prompt, in order.

    Image parts in answers contain a Media object in key "image". `chosen` and `rejected` must have the same images.
    """
    place, prompt, answers = split_answers(columns, options.prompt_template)
    row_media = read_media(columns)
    messages = prompt
    media: list[Media] = []
    showing = [name for name, answer in answers.items() if shows_media(answer)]
    for name in showing:
        with error_context(f"column {column_of(name, place)!r}"):
            conversation, media = place_media([*prompt, *as_turns(answers[name])], row_media, options)
            messages = conversation[: len(prompt)]
            answers[name] = take_images(conversation[len(prompt) :], media)
    if not showing:
        with error_context(f"column {place!r}"):
            messages, media = place_media(prompt, row_media, options)
    messages = add_system_prompt(messages, options.system_prompt)
    row = Row(messages, [], columns, answers.get("completion"), answers.get("chosen"), answers.get("rejected"))
    return row, media


def split_answers(columns: dict, template: str) -> tuple[str, list[dict], Answers]:
    """Separate the prompt in a row from the answers; see docs/data.md.

    Args:
        template: data.prompt_template. A template without {problem} is the question for all rows.
    Returns:
        (name of the prompt column, prompt turns, {answer column: answer})
    """
    texts = {name: without_nulls(columns[name]) for name in PROMPTS if columns.get(name) is not None}
    answers = {name: without_nulls(columns[name]) for name in ANSWERS if columns.get(name) is not None}
    if "{problem}" not in template:  # a template without {problem} is the question for all rows
        texts = {"problem": template}
        template = "{problem}"
    if not texts:
        place = "chosen"
        prompt = shared_turns(answers, columns)
        for name in ("chosen", "rejected"):
            answers[name] = answers[name][len(prompt) :]
    else:
        [(place, text_or_turns)] = texts.items()
        prompt = as_turns(text_or_turns, "user")
        if place == "messages" and prompt[-1]["role"] == "assistant":
            first_answer = [turn["role"] for turn in prompt].index("assistant")
            answers["completion"] = prompt[first_answer:]
            prompt = prompt[:first_answer]
    if system := columns.get("system"):
        prompt = add_system_prompt(prompt, system)
        if text_of(prompt[0]) != system:
            raise UserError(
                "column 'system': the turns begin with another system message; remove the column or the system message"
            )
    if template != "{problem}":
        with error_context(f"column {place!r}"):
            prompt = put_in_template(template, prompt)
    return place, prompt, answers


def without_nulls(text_or_turns: str | list[dict]) -> str | list[dict]:
    """Remove keys with value None, except "content"; a missing "content" becomes None.

    Parquet files add keys with null, so that all turns have the same keys.
    """
    if isinstance(text_or_turns, str):
        return text_or_turns
    turns = [{"content": None} | _given(turn) for turn in text_or_turns]
    for turn in turns:
        if isinstance(turn["content"], list):
            turn["content"] = [_given(part) for part in turn["content"]]
    return turns


def _given(values: dict) -> dict:
    return {key: value for key, value in values.items() if value is not None}


def shared_turns(answers: Answers, columns: dict) -> list[dict]:
    """Return the prompt of a preference pair: the first turns, which `chosen` and `rejected` share."""
    conversations = [answers[name] for name in ("chosen", "rejected") if isinstance(answers.get(name), list)]
    if len(conversations) < 2:
        name = next((name for name in PROMPTS if name in columns), "problem")
        raise missing_column(
            name,
            columns,
            "Rename the column of the question with data.columns: {YOURS: problem}, or set the same question for all "
            "rows with data.prompt_template",
        )
    pairs = zip(*conversations, strict=False)
    shared = [turn for turn, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    if not shared:
        raise UserError(
            "columns 'chosen' and 'rejected': the conversations begin with different turns, but these turns are the "
            "prompt; begin both with the same turns, or write the prompt into the column 'prompt'"
        )
    return shared


def column_of(answer: str, place: str) -> str:
    """Return the column that contains an answer; a completion may follow its prompt in `messages`."""
    return place if (answer, place) == ("completion", "messages") else answer


def take_images(answer: list[dict], media: list[Media]) -> list[dict]:
    """Move an answer's images, which are the last items of `media`, into its image parts."""
    parts = shown_parts_of(answer)
    if any(part_kind(part) == "video" for part in parts):
        raise UserError("a video after the first assistant turn is not supported; move it into the prompt")
    for part in reversed(parts):
        part["image"] = media.pop()  # RowFile.load replaces this Media object with a function that loads the image
    return answer


def shows_media(turns: str | list[dict]) -> bool:
    """Return True if an answer has an image part, or if its user or tool turns contain <image>."""
    if isinstance(turns, str):
        return False
    others = [turn for turn in turns if turn["role"] != "assistant"]
    return bool(shown_parts_of(turns)) or any(MARK.search(text_of(turn)) for turn in others)


def answer_image_parts(row: Row) -> list[dict]:
    answers = (row.completion, row.chosen, row.rejected)
    return [part for answer in answers if isinstance(answer, list) for part in shown_parts_of(answer)]
