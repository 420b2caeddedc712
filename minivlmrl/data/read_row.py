"""Convert a row of a data file to a Row object: a prompt, its images and videos, and answers.

rename_columns   data.columns
check_columns    names and values
read_media       the columns image, images, video and videos
split_answers    the prompt's turns, and the answers
place_answers    each image and video gets its part in a message
"""

from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path

from minivlmrl.config.options import RowOptions
from minivlmrl.data.columns import ANSWERS, PROMPTS, TEXTS, ForeignLayoutError, check_columns, rename_columns
from minivlmrl.data.media import Media, check_unread, place_media, read_media
from minivlmrl.data.messages import (
    LOSS_KEYS,
    MARK,
    add_system_prompt,
    as_turns,
    check_ends,
    check_turns,
    is_trained,
    part_kind,
    put_in_template,
    shown_parts_of,
    text_of,
)
from minivlmrl.data.rows import REWARD_ARGUMENTS, Row
from minivlmrl.errors import check_field, did_you_mean, error_context

TYPE_WORDS = {str: "text", list: "a list of turns", str | list: "text or a list of turns"}
Answers = dict[str, str | list[dict]]


def read_row(
    columns: dict, required: Sequence[str], options: RowOptions, folder: Path, reads: Collection[str] = ()
) -> tuple[Row, list[Media]]:
    """Convert a row's columns to a Row object without images, and list the sources of images and videos.

    Args:
        required: columns that the row must have; "problem" stands for any prompt column.
        folder: folder that relative paths start from.
        reads: further columns that a stage or a reward reads.
    """
    file_columns = columns
    known = {*options.columns, *required, *reads}
    columns = rename_columns(columns, options.columns)
    check_columns(columns, required, known)
    row_media = read_media(columns)
    try:
        place, prompt, answers = split_answers(columns, options)
        messages, media, answers = place_answers(place, prompt, answers, row_media, options)
    except ValueError:
        # If the images are in a misspelt column, such as `imge`, the error of check_unread names the column.
        check_unread(columns, [item for items in row_media.values() for item in items], folder, known)
        raise
    check_required(required, columns | answers, file_columns)
    row = Row(messages, [], columns, answers.get("completion"), answers.get("chosen"), answers.get("rejected"))
    shown = [*media, *(part["image"] for part in answer_image_parts(row))]
    if shown:  # data.columns may keep a column with a further image for a reward
        known |= {*options.columns.values()}
    check_unread(columns, shown, folder, known)
    return row, media


def check_required(required: Sequence[str], columns: dict, file_columns: dict):
    existing = sorted(name for name, value in file_columns.items() if value is not None and value == value)  # not NaN
    unknown = [name for name in existing if name not in (*ANSWERS, "label", "solution", "problem")]
    for name in required:
        if name == "problem" or columns.get(name) is not None:
            continue
        hint = ""
        if name not in (*ANSWERS, "label", "solution"):
            hint = (
                f". A reward function has the argument {name!r}; besides columns of the rows, its arguments may be "
                f"{', '.join(sorted(REWARD_ARGUMENTS))}"
            )
        is_foreign = name in ("solution", "completion") and any(columns.get(x) for x in ("answer", "ground_truth"))
        raise (ForeignLayoutError if is_foreign else ValueError)(
            f"column {name!r} is missing; the row has {existing}. Rename a column with data.columns: {{YOURS: {name}}}"
            f"{did_you_mean(name, unknown)}{hint}"
        )


def answer_image_parts(row: Row) -> list[dict]:
    answers = (row.completion, row.chosen, row.rejected)
    return [part for answer in answers if isinstance(answer, list) for part in shown_parts_of(answer)]


def split_answers(columns: dict, options: RowOptions) -> tuple[str, list[dict], Answers]:
    """Split a row into its prompt and its answers, as docs/data.md describes.

    Returns:
        The column of the prompt, for error messages; the prompt's turns; and {column: answer}.
    """
    texts = read_texts(columns)
    prompts = [name for name in texts if name in PROMPTS]
    answers = {name: value for name, value in texts.items() if name in ANSWERS}
    template = options.prompt_template
    if "{problem}" not in template:
        expected = f"a text that contains {{problem}}, because the row has {prompts}"
        check_field(not prompts, "data.prompt_template", template, expected)
        texts["problem"], prompts, template = template, ["problem"], "{problem}"
    if prompts == ["messages"] and texts["messages"][-1]["role"] == "assistant":
        if "completion" in texts:
            prompts.append("completion")
        first_answer = [turn["role"] for turn in texts["messages"]].index("assistant")
        answers = {"completion": texts["messages"][first_answer:], **answers}
        texts["messages"] = texts["messages"][:first_answer]
    if len(prompts) > 1:
        raise ValueError(
            f"the row has both columns {prompts[0]!r} and {prompts[1]!r}, but only "
            "one of them is allowed; remove the other one"
        )
    place = prompts[0] if prompts else "chosen"
    prompt = as_turns(texts[place], "user") if prompts else _shared_turns(answers, sorted(columns))
    if not prompts:
        answers |= {name: answers[name][len(prompt) :] for name in ("chosen", "rejected")}
    if system := columns.get("system"):
        prompt = add_system_prompt(prompt, system)
        if text_of(prompt[0]) != system:
            raise ValueError(
                "column 'system': the turns begin with another system message; remove the column or the system message"
            )
    check_answers(answers, place)
    if prompt and prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"column {place!r}: the prompt ends with an assistant turn; move this turn into the column of the answer"
        )
    if template != "{problem}":
        with error_context(f"column {place!r}"):
            prompt = put_in_template(template, prompt)
    return place, prompt, answers


def read_texts(columns: dict) -> dict:
    """Check the columns of a row that contain texts or lists of turns, and return these columns."""
    texts = {name: columns[name] for name in TEXTS if columns.get(name) is not None}
    for name, value in texts.items():
        check_field(isinstance(value, TEXTS[name]), f"column {name!r}", value, TYPE_WORDS[TEXTS[name]])
        with error_context(f"column {name!r}"):
            check_turns(as_turns(value), name == "prompt")
    return texts


def _column(answer: str, place: str) -> str:
    """Return the column that contains an answer, such as `completion`, or `messages` with prompt and answer."""
    return place if (answer, place) == ("completion", "messages") else answer


def check_answers(answers: Answers, place: str):
    """Raise ValueError for a blank answer, an answer without a turn to train on, or a pair of equal answers."""
    said = {}  # an answer's turns, with the texts of a turn joined
    for name, answer in answers.items():
        turns = as_turns(answer)
        said[name] = [{**turn, "content": (text_of(turn), shown_parts_of([turn]))} for turn in turns]
        with error_context(f"column {_column(name, place)!r}"):
            check_ends(turns)
            for turn in turns:
                if turn["role"] == "assistant" and not text_of(turn).strip() and not turn.get("tool_calls"):
                    raise ValueError("an answer is empty or blank; add its text or remove the row")
            if not any(map(is_trained, turns)):
                raise ValueError(
                    f"every assistant turn of the answer has {' or '.join(LOSS_KEYS)}: false; remove this key"
                )
    if "chosen" in said and said["chosen"] == said.get("rejected"):
        raise ValueError("the columns 'chosen' and 'rejected' are equal; remove the row")


def _shared_turns(answers: Answers, columns: list[str]) -> list[dict]:
    """Return the turns with which the conversations `chosen` and `rejected` both begin."""
    conversations = [answers[name] for name in ("chosen", "rejected") if isinstance(answers.get(name), list)]
    pairs = zip(*conversations, strict=False) if len(conversations) == 2 else ()
    shared = [turn for turn, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    if not shared and len(conversations) == 2:
        raise ValueError(
            "columns 'chosen' and 'rejected': the conversations begin with different turns, but these turns are the "
            "prompt; begin both with the same turns, or write the prompt into the column 'prompt'"
        )
    if not shared:
        raise ValueError(
            f"column 'problem' is missing; the row has {columns}. Rename the column of the question with data.columns: "
            "{YOURS: problem}, or set the same question for all rows with data.prompt_template: 'What is it?'"
        )
    return shared


def place_answers(
    place: str, prompt: list[dict], answers: Answers, row_media: dict[str, list[Media]], options: RowOptions
) -> tuple[list[dict], list[Media], Answers]:
    """Assign a row's images and videos, in order, to the parts of the prompt and of its answers.

    If the answers `chosen` and `rejected` of a pair contain images, both contain the same images.

    Returns:
        The prompt's messages, its media in order, and {column: answer}. An image part of an answer contains its Media
        under the key "image".
    """
    shown = {}  # answers with an image part, or with the tag <image> in a user or tool turn
    for name, turns in answers.items():
        if isinstance(turns, list):
            others = [turn for turn in turns if turn["role"] != "assistant"]
            if shown_parts_of(turns) or any(MARK.search(text_of(turn)) for turn in others):
                shown[name] = turns
    messages, media, placed = prompt, [], dict(answers)
    # If no answer contains an image, all images of the row belong to the prompt.
    for name, turns in (shown or {place: []}).items():
        with error_context(f"column {_column(name, place)!r}"):
            conversation, media = place_media([*prompt, *turns], row_media, options)
            messages, answer = conversation[: len(prompt)], conversation[len(prompt) :]
            parts = shown_parts_of(answer)
            if any(part_kind(part) == "video" for part in parts):
                raise ValueError("a video after the first assistant turn is not supported; move it into the prompt")
            # the last items of the list `media` are the answer's images
            for part in reversed(parts):
                part["image"] = media.pop()  # FileDataset.__getitem__ loads the image
        if shown:
            placed[name] = answer
    return add_system_prompt(messages, options.system_prompt), media, placed
