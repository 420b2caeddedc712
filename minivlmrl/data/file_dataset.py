"""Rows of a file or a dataset folder -> Row: prompt, answers, columns, images and videos.

row_files.py reads a row's columns, formats.py translates the forms of other projects, media.py finds
what is shown; here the columns become messages and answers. docs/data.md has examples.
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
from minivlmrl.data.formats import QUESTION_FORMS, ROLES, check_columns, to_columns
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

# a column with text, and the types that it may have; of PROMPTS a row has one, or none: see _split
PROMPTS = {"problem": str, "prompt": str | list, "messages": list}
ANSWERS = {"completion": str | list, "chosen": str | list, "rejected": str | list}
TEXT_COLUMNS = PROMPTS | ANSWERS
TYPE_WORDS = {str: "text", list: "a list of turns", str | list: "text or a list of turns"}


class FileDataset(FileRows):
    """At most `limit` rows of a file or dataset folder; all are checked now and read when used.

    Rows must have the columns `required`; "problem" is a prompt, "completion" an answer. They get
    the columns of `constants` too.
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
            raise ValueError(f"{path}: has no rows")
        self.folder = Path(self.options.image_root or self.source.folder)
        self.counts = Counter()  # (images, videos) of a row -> rows with as many
        self.asked = []  # of each row a hash of its prompt and of the sizes of what that shows
        self.columns = ()
        missing_files = []
        column_names = set()
        for index in range(self.size):
            row, media = self.read(index)
            column_names.update(row.columns)
            missing_files += self._count(row, media)
        if missing_files:
            raise ValueError(
                f"{path}: {len(missing_files)} file(s) that its rows name are not in {self.folder} "
                f"(data.image_root), such as {', '.join(missing_files[:5])}"
            )
        self.columns = sorted(column_names)

    def _count(self, row: Row, media: list[Media]) -> list[str]:
        """Count what a row shows, and hash what it asks; return its files that are missing."""
        answer_images = [part["image"] for part in answer_pictures(row)]
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
        self.asked.append(hash(repr((row.messages, file_sizes))))
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
            for part in answer_pictures(row):
                part["image"] = fetch_image(part["image"].image_source, self.folder)
        return row


class Decoded(Sequence):
    """The images of a row, each decoded whenever it is looked at, to save memory."""

    def __init__(self, decoders: list[Callable]):
        self.decoders = decoders
        self.sizes = {}  # width and height in pixels of the images that have been looked at

    def __len__(self) -> int:
        return len(self.decoders)

    def __getitem__(self, index: int) -> PIL.Image.Image:
        image = self.decoders[index]()
        self.sizes[index] = image.size
        return image


def load_media(media: list[Media], folder: Path) -> tuple[Sequence, Sequence]:
    """Find the images and videos of a row."""
    images = []
    videos = []
    for item in media:
        if item.kind == "image":
            images.append(partial(fetch_image, item.image_source, folder))
        else:
            sampling = {n: value for n, value in item.options.items() if n in SAMPLING_OPTIONS}
            videos.append(VideoFile(partial(load_video, item.source, folder, **sampling)))
    return images and Decoded(images), videos


def check_inside(folder: Path, files: list[tuple[str | bytes, str]]):
    """Refuse files of a row (ValueError) that are outside of a folder: somebody else named them."""
    for source, path in files:
        if path and not Path(normpath(path)).is_relative_to(normpath(folder)):
            raise ValueError(
                f"{source!r} is outside of {folder}; a data set by its id names only its own files"
            )


def answer_pictures(row: Row) -> list[dict]:
    """List the parts of a row's answers that show something."""
    parts = []
    for answer in (row.completion, row.chosen, row.rejected):
        if isinstance(answer, list):
            parts += shown_parts_of(answer)
    return parts


def read_row(
    columns: dict, required: Sequence[str], options: RowOptions
) -> tuple[Row, list[Media]]:
    """Read one row without its images and videos, and list these in order of appearance."""
    # pandas writes NaN for what is missing
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
            f"a text with {{problem}} in it, as the row has {question_columns}",
        )
        columns = columns | {"problem": options.prompt_template}
        options = replace(options, prompt_template="{problem}")
    media = []
    try:
        messages, media, answers = read_conversation(columns, row_media, options)
    finally:  # also where the text says <image> and none came
        if not media and not any(row_media.values()):
            check_unread(columns)
    for name in required:
        if name != "problem" and name not in answers and columns.get(name) is None:
            existing_columns = sorted(column for column in written if written[column] is not None)
            raise ValueError(
                f"column {name!r} is missing; the row has {existing_columns}; "
                f"data.columns: {{YOURS: {name}}} renames one"
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
    """Find the prompt of a row, what its parts show in order, and its answers by column.

    Args:
        row: columns, of which these are read; None counts as missing. Turns are messages as in
            chat.render. problem, prompt: text; or prompt: turns. Text, or that of the last user
            turn, goes through prompt_template. messages: a whole conversation. All before its first
            assistant turn is the prompt, the rest the completion. completion, chosen, rejected:
            text, or turns that begin and end with one of the assistant's. chosen, rejected: alone
            two whole conversations; what both begin with is the prompt (TRL's implicit one).
        row_media: by kind, the images and videos that come with the row.
    """
    row_texts = {column: row[column] for column in TEXT_COLUMNS if row.get(column) is not None}
    for column, text_or_turns in row_texts.items():
        with error_context(f"column {column!r}"):
            _check_column(text_or_turns, TEXT_COLUMNS[column])
    pair = ("chosen", "rejected")
    rendered = [render(as_turns(row_texts[name])) for name in pair if name in row_texts]
    if len(rendered) == 2 and rendered[0] == rendered[1]:
        raise ValueError("column 'rejected' equals column 'chosen': drop the row")
    prompt_column, prompt, answers = _split(row_texts, row)
    place = partial(_place, prompt, row_media, options)
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
    """Refuse what is neither text nor turns, and turns that cannot be laid out."""
    if not isinstance(text_or_turns, types):
        raise ValueError(f"must be {TYPE_WORDS[types]}, it is {text_or_turns!r:.40}")
    turns = as_turns(text_or_turns)
    check_messages(turns)
    roles = [turn["role"] for turn in turns]
    if not turns or not set(roles) <= set(ROLES):
        raise ValueError(f"needs turns with the roles {', '.join(ROLES)}; it has {roles}")


def _check_answer(turns: list[dict]):
    """Refuse an answer in which the assistant says nothing."""
    check_ends(turns)
    for turn in turns:
        is_blank = not text_of(turn).strip() and not turn.get("tool_calls")
        if turn["role"] == "assistant" and is_blank:
            raise ValueError("an answer is empty or blank; write it or drop the row")


def _shows_images(turns: list[dict]) -> bool:
    """Tell whether an answer shows something; <image> in a text of the assistant is text."""
    for turn in turns:
        if turn["role"] != "assistant" and MARK.search(text_of(turn)):
            return True
    return bool(shown_parts_of(turns))


def _place_answer(place: Callable, turns: list[dict]) -> tuple[list[dict], list[Media], list[dict]]:
    """Return the messages of the prompt, what they show, and the answer with its images in it."""
    conversation, media = place(turns)
    answer = conversation[-len(turns) :]
    shown_parts = shown_parts_of(answer)
    if any(part_kind(part) == "video" for part in shown_parts):
        raise ValueError("there is a video after the assistant's first turn; put it in the prompt")
    for part in reversed(shown_parts):  # the last of the media; those before are the prompt's
        part["image"] = media.pop()  # FileDataset.__getitem__ reads it
    return conversation[: -len(turns)], media, answer


def _place(
    prompt: str | list[dict],
    row_media: dict[str, list[Media]],
    options: RowOptions,
    answer: Sequence[dict] = (),
) -> tuple[list[dict], list[Media]]:
    """Return the messages of a prompt and an answer, and what their parts show."""
    turns = as_turns(prompt, "user")
    if turns and turns[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant turn; move that turn into the answers")
    if options.prompt_template != "{problem}":
        turns = put_in_template(options.prompt_template, turns)
    messages, media = place_media([*turns, *answer], row_media, options)
    return add_system_prompt(messages, options.system_prompt), media


def _split(row_texts: dict, row: dict) -> tuple[str, str | list[dict], dict]:
    """Tell prompt and answers apart; also name the column that the prompt is from."""
    prompt_columns = [column for column in row_texts if column in PROMPTS]
    if prompt_columns == ["messages"] and "completion" in row_texts:
        prompt_columns.append("completion")
    if len(prompt_columns) > 1:
        raise ValueError(
            f"columns {prompt_columns[0]!r} and {prompt_columns[1]!r} say the same thing; keep one"
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
    """Return the turns that chosen and rejected begin with, and the answers without them."""
    chosen = answers.get("chosen")
    rejected = answers.get("rejected")
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        chosen = rejected = []
    num_shared = 0  # turns that they share
    for chosen_turn, rejected_turn in zip(chosen, rejected, strict=False):
        if chosen_turn != rejected_turn:
            break
        num_shared += 1
    if num_shared == 0:
        raise ValueError(
            f"column 'problem' is missing; the row has {columns}; name its question, data.columns: "
            "{YOURS: problem}, ask all rows the same, data.prompt_template: 'What is it?', or use "
            f"a form: {', '.join(QUESTION_FORMS)}"
        )
    endings = {"chosen": chosen[num_shared:], "rejected": rejected[num_shared:]}
    return chosen[:num_shared], answers | endings
