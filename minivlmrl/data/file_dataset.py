"""Read the rows of a file or a dataset folder as Row: prompt, answers, columns, images, videos.

row_files.py reads the columns of a row, formats.py converts formats of other projects, and media.py
finds images and videos. This file converts the columns to messages and answers. docs/data.md has
examples.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os.path import getsize, isfile, normpath
from pathlib import Path
from types import UnionType

import PIL.Image

from minivlmrl.config.options import RowOptions
from minivlmrl.config.parsing import check_field, did_you_mean, error_context
from minivlmrl.config.types import Plain
from minivlmrl.data.chat_template import render
from minivlmrl.data.formats import QUESTION_FORMATS, ROLES, check_columns, to_columns
from minivlmrl.data.media import (
    SAMPLING_OPTIONS,
    Media,
    check_unread,
    fetch_image,
    files_of,
    open_image,
    place_media,
    read_media,
)
from minivlmrl.data.messages import (
    MARK,
    add_system_prompt,
    as_turns,
    check_ends,
    check_messages,
    part_kind,
    put_in_template,
    shown_parts_of,
    text_of,
)
from minivlmrl.data.row_files import open_rows
from minivlmrl.data.row_summary import FileRows, count_words
from minivlmrl.data.rows import Row
from minivlmrl.data.video import VideoFile, load_video
from minivlmrl.files import digest

# {column with text: allowed types}; a row has at most one column of PROMPTS, see _split_columns
PROMPTS = {"problem": str, "prompt": str | list, "messages": list}
ANSWERS = {"completion": str | list, "chosen": str | list, "rejected": str | list}
TEXT_COLUMNS = PROMPTS | ANSWERS
TYPE_WORDS = {str: "text", list: "a list of turns", str | list: "text or a list of turns"}


class FileDataset(FileRows):
    """Rows of a file or dataset folder, all validated at construction and read again when used.

    Args:
        path: file or folder of the rows.
        required: columns that every row must have; "problem" stands for any prompt.
        limit: maximum number of rows; None reads all rows.
        constants: columns that are added to every row.
        options: fields of RowOptions.

    Raises:
        ValueError: a row is invalid, or an image or video file is missing.
    """

    def __init__(
        self,
        path: str | Path,
        required: Sequence[str] = ("problem",),
        limit: int | None = None,
        constants: Mapping[str, Plain] | None = None,
        **options,
    ):
        self.options = RowOptions(**options)
        self.required = required
        self.source = open_rows(path)
        self.constants = dict(constants or {})
        self.size = len(self.source) if limit is None else min(limit, len(self.source))
        if not self.size:
            raise ValueError(f"{path} has no rows")
        self.folder = Path(self.options.image_root or self.source.folder)
        self.counts = Counter()  # {(images, videos) of a row: number of such rows}
        self.prompt_hashes = []  # hash per row of its prompt and the sizes of its image files
        self.columns = ()
        missing_files = []
        column_names = set()
        for index in range(self.size):
            row, media = self.read(index)
            column_names.update(row.columns)
            missing_files += self._count(row, media)
        if missing_files:
            raise ValueError(
                f"{path}: {len(missing_files)} file(s) of its rows are missing in {self.folder}, "
                f"for example {', '.join(missing_files[:5])}. Set data.image_root to their folder."
            )
        self.columns = sorted(column_names)

    def _count(self, row: Row, media: list[Media]) -> list[str]:
        """Count the images and videos of a row, and hash its prompt; return its missing files."""
        answer_images = [part["image"] for part in answer_image_parts(row)]
        with error_context(row.where):
            files = list(files_of(media + answer_images, str(self.folder)))
            if self.source.is_downloaded:
                check_inside(self.folder, files)
        kinds = [item.kind for item in media]
        self.counts[kinds.count("image"), kinds.count("video")] += 1
        file_sizes = []
        missing_files = []
        for source, path in files:
            is_file = isfile(path)
            file_sizes.append(getsize(path) if is_file else len(source))
            if path and not is_file:
                missing_files.append(f"{source} ({re.sub(r'.*:(?=[0-9]+$)', 'line ', row.where)})")
        self.prompt_hashes.append(hash(repr((row.messages, file_sizes))))
        return missing_files

    def __len__(self) -> int:
        return self.size

    def read(self, index: int) -> tuple[Row, list[Media]]:
        columns = self.source[index]
        where = self.source.where(index)
        with error_context(where):
            row, media = read_row(columns, self.required, self.options)
        row.where = where
        row.columns = dict.fromkeys(self.columns) | row.columns | self.constants
        return row, media

    def describe(self) -> str:
        return count_words(self.counts, self.size)

    def outline(self, index: int) -> Row | None:
        row, media = self.read(index)
        if any(item.kind == "video" for item in media):
            return None
        blank_images = []
        for item in media:
            with open_image(item.image_source, self.folder) as image:
                blank_images.append(PIL.Image.new("L", image.size))
        return replace(row, images=blank_images)

    def content(self, index: int) -> str:
        row, media = self.read(index)
        hashed_parts: list[str | bytes | Path] = [repr(row.messages)]
        for source, path in files_of(media, str(self.folder)):
            hashed_parts.append(Path(path) if path else source)
        return digest(hashed_parts)

    def __getitem__(self, index: int) -> Row:
        row, media = self.read(range(self.size)[index])
        with error_context(row.where):
            row.images, row.videos = load_media(media, self.folder)
            for part in answer_image_parts(row):
                part["image"] = fetch_image(part["image"].image_source, self.folder)
        return row


class LazyImages(Sequence):
    """The images of a row. An image is decoded at every access, because this saves memory."""

    def __init__(self, decoders: list[Callable]):
        self.decoders = decoders
        self.sizes = {}  # {index: (width, height)} of the images decoded so far

    def __len__(self) -> int:
        return len(self.decoders)

    def __getitem__(self, index: int) -> PIL.Image.Image:
        image = self.decoders[index]()
        self.sizes[index] = image.size
        return image


def load_media(media: list[Media], folder: Path) -> tuple[Sequence, Sequence]:
    """Return the images and videos of a row, which are decoded only when they are used."""
    images = []
    videos = []
    for item in media:
        if item.kind == "image":
            images.append(partial(fetch_image, item.image_source, folder))
        else:
            sampling = {n: value for n, value in item.options.items() if n in SAMPLING_OPTIONS}
            videos.append(VideoFile(partial(load_video, item.source, folder, **sampling)))
    return images and LazyImages(images), videos


def check_inside(folder: Path, files: list[tuple[str | bytes, str]]):
    """Raise ValueError if a file of a downloaded row is outside of the data set's folder."""
    for source, path in files:
        if path and not Path(normpath(path)).is_relative_to(normpath(folder)):
            raise ValueError(
                f"{source!r} is outside of {folder}. A data set from the hub may only use its own "
                "files."
            )


def answer_image_parts(row: Row) -> list[dict]:
    """List the message parts with an image in the answers of a row."""
    parts = []
    for answer in (row.completion, row.chosen, row.rejected):
        if isinstance(answer, list):
            parts += shown_parts_of(answer)
    return parts


def read_row(
    columns: dict, required: Sequence[str], options: RowOptions
) -> tuple[Row, list[Media]]:
    """Convert the columns of a row to a Row without images, and list its media in order.

    Args:
        columns: columns of the row, as in the file.
        required: columns that the row must have; "problem" stands for any prompt.
        options: options of all rows.
    """
    # NaN is dropped, because pandas writes NaN for missing values
    written = {name: value for name, value in columns.items() if value == value}
    columns = to_columns(written, options.columns)
    check_columns(columns, required)
    row_media = read_media(columns)
    if "{problem}" not in options.prompt_template:
        question_columns = [name for name in PROMPTS if columns.get(name) is not None]
        check_field(
            not question_columns,
            "data.prompt_template",
            options.prompt_template,
            f"a text that contains {{problem}}, because the row has {question_columns}",
        )
        columns = columns | {"problem": options.prompt_template}
        options = replace(options, prompt_template="{problem}")
    media = []
    try:
        messages, media, answers = read_conversation(columns, row_media, options)
    finally:  # also if the text contains <image> but the row has no image
        if not media and not any(row_media.values()):
            check_unread(columns)
    for name in required:
        if name != "problem" and name not in answers and columns.get(name) is None:
            existing_columns = sorted(column for column in written if written[column] is not None)
            raise ValueError(
                f"column {name!r} is missing; the row has {existing_columns}. Rename a column with "
                f"data.columns: {{YOURS: {name}}}."
                f"{did_you_mean(name, existing_columns)}"
            )
    return Row(
        messages,
        [],
        columns,
        completion=answers.get("completion"),
        chosen=answers.get("chosen"),
        rejected=answers.get("rejected"),
    ), media


def read_conversation(
    row: dict, row_media: dict[str, list[Media]], options: RowOptions
) -> tuple[list[dict], list[Media], dict[str, str | list[dict]]]:
    """Split a row into its prompt, its media and its answers.

    Args:
        row: {column: value}; None counts as missing. These columns are read (turns are a list of
            messages as in chat_template.render):
            problem, prompt: text, or turns in `prompt`. The text, or the text of the last user
                turn, is inserted into prompt_template.
            messages: a conversation. The turns before the first assistant turn are the prompt, the
                others the completion.
            completion, chosen, rejected: text, or turns whose first and last are the assistant's.
            chosen, rejected without a prompt: two conversations; the turns that both begin with
                are the prompt (TRL's implicit prompt).
        row_media: {kind: media from the columns of the row}.
        options: options of all rows.

    Returns:
        Messages of the prompt, its media in order, and {column: answer}.
    """
    row_texts = {column: row[column] for column in TEXT_COLUMNS if row.get(column) is not None}
    for column, text_or_turns in row_texts.items():
        with error_context(f"column {column!r}"):
            _check_column(text_or_turns, TEXT_COLUMNS[column])
    pair = ("chosen", "rejected")
    rendered = [render(as_turns(row_texts[name])) for name in pair if name in row_texts]
    if len(rendered) == 2 and rendered[0] == rendered[1]:
        raise ValueError("the columns 'chosen' and 'rejected' are equal; remove the row")
    prompt_column, prompt, answers = _split_columns(row_texts, row)
    place = partial(_place_turns, prompt, row_media, options)
    messages = None
    for answer_column, answer in answers.items():
        column = answer_column if answer_column in row_texts else prompt_column
        with error_context(f"column {column!r}"):
            turns = as_turns(answer)
            _check_answer(turns)
            if _shows_images(turns):
                messages, media, answers[answer_column] = _place_answer(place, turns)
    if messages is None:
        with error_context(f"column {prompt_column!r}"):
            messages, media = place()
    return messages, media, answers


def _check_column(text_or_turns: Plain, types: type | UnionType):
    """Raise ValueError unless a column is text, or a list of turns that can be rendered."""
    if not isinstance(text_or_turns, types):
        raise ValueError(f"must be {TYPE_WORDS[types]}, it is {text_or_turns!r:.40}")
    turns = as_turns(text_or_turns)
    check_messages(turns)
    roles = [turn["role"] for turn in turns]
    if not turns or not set(roles) <= set(ROLES):
        raise ValueError(f"the roles of its turns must be {', '.join(ROLES)}; they are {roles}")


def _check_answer(turns: list[dict]):
    """Raise ValueError if an assistant turn of an answer is empty or blank."""
    check_ends(turns)
    for turn in turns:
        is_blank = not text_of(turn).strip() and not turn.get("tool_calls")
        if turn["role"] == "assistant" and is_blank:
            raise ValueError("an answer is empty or blank; add its text or remove the row")


def _shows_images(turns: list[dict]) -> bool:
    """Return True if an answer has an image; <image> in an assistant's text is ordinary text."""
    for turn in turns:
        if turn["role"] != "assistant" and MARK.search(text_of(turn)):
            return True
    return bool(shown_parts_of(turns))


def _place_answer(place: Callable, turns: list[dict]) -> tuple[list[dict], list[Media], list[dict]]:
    """Return the messages of the prompt, its media, and the answer with its images in its parts."""
    conversation, media = place(turns)
    answer = conversation[-len(turns) :]
    shown_parts = shown_parts_of(answer)
    if any(part_kind(part) == "video" for part in shown_parts):
        raise ValueError(
            "a video after the first assistant turn is not supported; move it into the prompt"
        )
    for part in reversed(shown_parts):  # media are in order, so the answer's are the last ones
        part["image"] = media.pop()  # FileDataset.__getitem__ loads the image
    return conversation[: -len(turns)], media, answer


def _place_turns(
    prompt: str | list[dict],
    row_media: dict[str, list[Media]],
    options: RowOptions,
    answer: Sequence[dict] = (),
) -> tuple[list[dict], list[Media]]:
    """Return the messages of a prompt and an answer, and their media in order."""
    turns = as_turns(prompt, "user")
    if turns and turns[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant turn; move this turn into the answers")
    if options.prompt_template != "{problem}":
        turns = put_in_template(options.prompt_template, turns)
    messages, media = place_media([*turns, *answer], row_media, options)
    return add_system_prompt(messages, options.system_prompt), media


def _split_columns(row_texts: dict, row: dict) -> tuple[str, str | list[dict], dict]:
    """Split the text columns of a row: return the prompt's column, the prompt, the answers."""
    prompt_columns = [column for column in row_texts if column in PROMPTS]
    if prompt_columns == ["messages"] and "completion" in row_texts:
        prompt_columns.append("completion")
    if len(prompt_columns) > 1:
        raise ValueError(
            f"the columns {prompt_columns[0]!r} and {prompt_columns[1]!r} exclude each other; "
            "keep one of them"
        )
    answers = {column: value for column, value in row_texts.items() if column in ANSWERS}
    if not prompt_columns:
        prompt, answers = _implicit_prompt(answers, sorted(row))
        return "chosen", prompt, answers
    prompt = row_texts[prompt_columns[0]]
    if prompt_columns == ["messages"]:
        answer_start = [turn["role"] for turn in prompt].index("assistant")
        answers = {"completion": prompt[answer_start:], **answers}
        prompt = prompt[:answer_start]
    return prompt_columns[0], prompt, answers


def _implicit_prompt(answers: dict, columns: list[str]) -> tuple[list[dict], dict]:
    """Return the turns that chosen and rejected begin with, and the answers without these turns."""
    chosen = answers.get("chosen")
    rejected = answers.get("rejected")
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        chosen = rejected = []
    num_shared = 0  # number of turns that both begin with
    for chosen_turn, rejected_turn in zip(chosen, rejected, strict=False):
        if chosen_turn != rejected_turn:
            break
        num_shared += 1
    if num_shared == 0:
        raise ValueError(
            f"column 'problem' is missing; the row has {columns}. Rename the column of the question "
            "with data.columns: {YOURS: problem}, use one question for all rows with "
            "data.prompt_template: 'What is it?', or use the columns of another format: "
            f"{', '.join(QUESTION_FORMATS)}."
        )
    endings = {"chosen": chosen[num_shared:], "rejected": rejected[num_shared:]}
    return chosen[:num_shared], answers | endings
