"""Read a file's or dataset folder's rows as Row: prompt, answers, columns, images, videos.

row_files.py reads a row's columns, formats.py converts other projects' formats, and
media.py finds images and videos. This file converts the columns to messages and answers. docs/rows.md has examples.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from os.path import getsize, isdir, isfile, normpath
from pathlib import Path
from types import UnionType

import PIL.Image

from minivlmrl.config.options import RowOptions
from minivlmrl.config.types import Plain
from minivlmrl.data.chat_template import render
from minivlmrl.data.file_rows import FileRows
from minivlmrl.data.formats import QUESTION_FORMATS, ROLES, ForeignLayoutError, check_columns, find_format, to_columns
from minivlmrl.data.media import (
    SAMPLING_OPTIONS,
    TEXTS,
    Media,
    check_unread,
    fetch_image,
    files_of,
    open_image,
    place_media,
    read_media,
)
from minivlmrl.data.messages import (
    LOSS_KEYS,
    MARK,
    add_system_prompt,
    as_turns,
    check_ends,
    check_messages,
    check_turns,
    is_trained,
    part_kind,
    put_in_template,
    shown_parts_of,
    text_of,
)
from minivlmrl.data.row_files import convert_advice, open_rows
from minivlmrl.data.row_summary import count_words
from minivlmrl.data.rows import REWARD_ARGUMENTS, Row
from minivlmrl.data.video import Video, VideoFile, load_video, outline_video
from minivlmrl.errors import check_field, did_you_mean, error_context
from minivlmrl.files import digest

# {column with text: allowed types}. A row may have only one column in PROMPTS, see _split_columns.
PROMPTS = {"problem": str, "prompt": str | list, "messages": list}
ANSWERS = {"completion": str | list, "chosen": str | list, "rejected": str | list}
TEXT_COLUMNS = PROMPTS | ANSWERS
TYPE_WORDS = {str: "text", list: "a list of turns", str | list: "text or a list of turns"}


class FileDataset(FileRows):
    """A file's or dataset folder's rows.

    All rows are validated when the dataset is created. Each row is read again from the file when the row is used.

    Args:
        path: file or folder with the rows.
        required: columns that every row must have; "problem" stands for any prompt column.
        limit: maximum number of rows; None reads all rows.
        constants: columns that are added to every row.
        checks_files: False does not ask the file system for the rows' images and videos. On
            several ranks, only rank 0 asks, because a shared file system is slow at such questions.
        options: RowOptions fields.

    Raises:
        ValueError: there are no rows, a row is invalid, or an image or video file is missing.
    """

    def __init__(
        self,
        path: str | Path,
        required: Sequence[str] = ("problem",),
        limit: int | None = None,
        constants: Mapping[str, Plain] | None = None,
        checks_files: bool = True,
        **options,
    ):
        self.checks_files = checks_files
        self.options = RowOptions(**options)
        self.convert = find_format(self.options.format) if self.options.format else dict
        self.required = required
        self.source = open_rows(path)
        self.constants = dict(constants or {})
        self.size = len(self.source) if limit is None else min(limit, len(self.source))
        if not self.size:
            raise ValueError(f"{path} has no rows; add at least one row or choose another file")
        self.folder = Path(self.options.image_root or self.source.folder)
        # {(image count, video count): number of such rows}
        self.counts = Counter()
        # for each row, a hash of its prompt, and of its file sizes if checks_files is True
        self.prompt_hashes = []
        self.columns = ()
        missing_files = []
        column_names = set()
        for index in range(self.size):
            row, media = self.read(index)
            column_names.update(row.columns)
            missing_files += self._count(row, media)
        if missing_files:
            raise ValueError(
                f"{path}: {len(missing_files)} image or video file(s) of the rows are missing in "
                f"{self.folder.resolve()}, for example {', '.join(missing_files[:5])}. Set "
                "data.image_root to the folder from which the paths of the rows start."
            )
        self.columns = sorted(column_names)

    def _count(self, row: Row, media: list[Media]) -> list[str]:
        """Add a row to `counts` and `prompt_hashes`.

        Returns:
            The row's missing image and video files, if checks_files is True.
        """
        answer_images = [part["image"] for part in answer_image_parts(row)]
        with error_context(row.where):
            files = list(files_of(media + answer_images, str(self.folder)))
            if self.source.is_downloaded:
                check_inside(self.folder, files)
        kinds = [item.kind for item in media]
        self.counts[kinds.count("image"), kinds.count("video")] += 1
        file_sizes = []
        missing_files = []
        for source, path in files if self.checks_files else ():
            is_file = isfile(path)
            file_sizes.append(getsize(path) if is_file else len(source))
            if path and not is_file:
                if isdir(path):
                    raise ValueError(
                        f"{row.where}: {source!r} is a folder, but an image must be a file, and a "
                        "video a file or a list of its frames, such as "
                        '["frames/1.png", "frames/2.png"]'
                    )
                missing_files.append(f"{source} ({re.sub(r'.*:(?=[0-9]+$)', 'line ', row.where)})")
        self.prompt_hashes.append(hash(repr((row.messages, file_sizes))))
        return missing_files

    def __len__(self) -> int:
        return self.size

    def read(self, index: int) -> tuple[Row, list[Media]]:
        columns = self.source[index]
        where = self.source.where(index)
        with error_context(where):
            columns = self.convert(columns)
            try:
                row, media = read_row(columns, self.required, self.options, self.folder)
            except ForeignLayoutError as error:
                raise ValueError(f"{error}; {convert_advice(self.source.path)}") from error
        row.where = where
        row.columns = dict.fromkeys(self.columns) | row.columns | self.constants
        return row, media

    def describe(self) -> str:
        return count_words(self.counts, self.size)

    def outline(self, index: int) -> Row:
        row, media = self.read(index)
        with readable_image(row.where):
            row.images = [self._header(item) for item in media if item.kind == "image"]
            for part in answer_image_parts(row):
                part["image"] = self._header(part["image"])
        row.videos = load_videos(media, self.folder, outline_video)
        return row

    def _header(self, item: Media) -> PIL.Image.Image:
        """Open an image to read its size; the returned image cannot be decoded."""
        with open_image(item.image_source, self.folder) as image:
            return image

    def content(self, index: int) -> str:
        row, media = self.read(index)
        hashed_parts: list[str | bytes | Path] = [repr(row.messages)]
        for source, path in files_of(media, str(self.folder)):
            hashed_parts.append(Path(path) if path else source)
        return digest(hashed_parts)

    def __getitem__(self, index: int) -> Row:
        row, media = self.read(range(self.size)[index])
        with error_context(row.where):
            row.images, row.videos = load_media(media, self.folder, row.where)
            for part in answer_image_parts(row):
                source = part["image"].image_source
                part["image"] = partial(fetch_row_image, row.where, source, self.folder)
        return row


class LazyImages(Sequence):
    """A row's images. Each access decodes the image again, which saves memory."""

    def __init__(self, decoders: list[Callable]):
        self.decoders = decoders
        self.sizes = {}  # {index: (width, height)} for the images decoded so far

    def __len__(self) -> int:
        return len(self.decoders)

    def __getitem__(self, index: int) -> PIL.Image.Image:
        image = self.decoders[index]()
        self.sizes[index] = image.size
        return image


@contextmanager
def readable_image(where: str) -> Iterator[None]:
    """Add the row `where` and advice to the ValueError of an image that cannot be read."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{where}: {error}; replace the file or remove the row, or leave out such rows in "
            "training with data.skip_unreadable=true"
        ) from error


def fetch_row_image(where: str, source: str | bytes, folder: Path) -> PIL.Image.Image:
    """Load an image from the row `where`; raise ValueError, with advice, if it cannot be read."""
    with readable_image(where):
        return fetch_image(source, folder)


def load_media(media: list[Media], folder: Path, where: str) -> tuple[Sequence, Sequence]:
    """Return a row's images and videos, which are decoded only when they are used."""
    sources = [item.image_source for item in media if item.kind == "image"]
    images = [partial(fetch_row_image, where, source, folder) for source in sources]
    return images and LazyImages(images), load_videos(media, folder, load_video)


def load_videos(media: list[Media], folder: Path, load: Callable[..., Video]) -> list[VideoFile]:
    """Return a row's videos, which are read with load_video or outline_video when used."""
    videos = []
    for item in media:
        if item.kind == "video":
            sampling = {n: value for n, value in item.options.items() if n in SAMPLING_OPTIONS}
            videos.append(VideoFile(partial(load, item.source, folder, **sampling)))
    return videos


def check_inside(folder: Path, files: list[tuple[str | bytes, str]]):
    """Raise ValueError if a file is outside a downloaded data set's folder.

    Args:
        folder: the data set's folder.
        files: (source, path) pairs, as files_of yields them.
    """
    for source, path in files:
        if path and not Path(normpath(path)).is_relative_to(normpath(folder)):
            raise ValueError(
                f"the file {source!r} is outside of the folder {folder}, but rows of a data set "
                "from the hub may only use files in the folder of the data set"
            )


def answer_image_parts(row: Row) -> list[dict]:
    """Return the image parts in all answers of a row."""
    parts = []
    for answer in (row.completion, row.chosen, row.rejected):
        if isinstance(answer, list):
            parts += shown_parts_of(answer)
    return parts


def read_row(columns: dict, required: Sequence[str], options: RowOptions, folder: Path) -> tuple[Row, list[Media]]:
    """Convert a row's columns to a Row without images, and list its media in order.

    Args:
        columns: the row's columns, as in the file.
        required: columns that the row must have; "problem" stands for any prompt column.
        options: options for all rows in the file.
        folder: folder that relative paths start from.
    """
    # NaN, which differs from itself, is dropped, because pandas writes NaN for a missing value.
    file_columns = {name: value for name, value in columns.items() if value == value}
    columns = to_columns(file_columns, options.columns)
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
    known = {*options.columns, *required}
    try:
        messages, media, answers = read_conversation(columns, row_media, options)
    except ValueError:
        # An image under an unknown name better explains an <image> tag without an image.
        others = {name: value for name, value in columns.items() if name not in TEXTS}
        check_unread(others, [*chain(*row_media.values())], folder, known)
        raise
    for name in required:
        if name != "problem" and name not in answers and columns.get(name) is None:
            existing_columns = sorted(column for column in file_columns if file_columns[column] is not None)
            raise ValueError(
                f"column {name!r} is missing; the row has {existing_columns}. Rename a column with "
                f"data.columns: {{YOURS: {name}}}"
                f"{did_you_mean(name, existing_columns)}{_reward_hint(name)}"
            )
    row = Row(
        messages,
        [],
        columns,
        completion=answers.get("completion"),
        chosen=answers.get("chosen"),
        rejected=answers.get("rejected"),
    )
    shown = [*media, *(part["image"] for part in answer_image_parts(row))]
    if shown:  # a row with images may keep another one under the name that data.columns gives it
        known |= {*options.columns.values()}
    check_unread(columns, shown, folder, known)
    return row, media


def _reward_hint(column: str) -> str:
    """Return the end of the message that a column is missing, if only a reward can need it."""
    if column in (*ANSWERS, "label", "solution"):
        return ""
    return (
        f". A reward function has the argument {column!r}; besides columns of the rows, its "
        f"arguments may be {', '.join(sorted(REWARD_ARGUMENTS))}"
    )


def read_conversation(
    row: dict, row_media: dict[str, list[Media]], options: RowOptions
) -> tuple[list[dict], list[Media], dict[str, str | list[dict]]]:
    """Split a row into its prompt, its media and its answers.

    Args:
        row: {column: value}; the value None counts as missing. The following columns are read. A list of turns is a
            list of messages, as in chat_template.render.
            problem: the question's text, which is inserted into prompt_template.
            prompt: the question's text, or a list of turns, whose last user turn has the
                question.
            messages: a conversation. The turns before the first assistant turn are the prompt, and the remaining turns
                are the completion.
            completion, chosen, rejected: an answer, which is a text or a list of turns that begins and ends with an
                assistant turn. If the row has no prompt, `chosen` and `rejected` are whole conversations, and their
                common first turns are the prompt (TRL's implicit prompt).
        row_media: {"image" or "video": media from the row's columns}.
        options: options for all rows in the file.

    Returns:
        The prompt's messages, its media in order, and {column: answer}.
    """
    row_texts = {column: row[column] for column in TEXT_COLUMNS if row.get(column) is not None}
    for column, text_or_turns in row_texts.items():
        with error_context(f"column {column!r}"):
            _check_column(text_or_turns, TEXT_COLUMNS[column], column == "prompt")
    pair = ("chosen", "rejected")
    rendered = [render(as_turns(row_texts[name])) for name in pair if name in row_texts]
    if len(rendered) == 2 and rendered[0] == rendered[1]:
        raise ValueError("the columns 'chosen' and 'rejected' are equal; remove the row")
    prompt_column, prompt, answers = _split_columns(row_texts, row)
    prompt = _add_system(row.get("system"), prompt)
    if options.train_answers == "last":
        prompt, answers = _keep_last(prompt, answers)
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


def _check_column(text_or_turns: Plain, types: type | UnionType, is_prompt: bool):
    """Raise ValueError unless a column is a text, or a list of turns that can be rendered."""
    if not isinstance(text_or_turns, types):
        raise ValueError(f"the value must be {TYPE_WORDS[types]}, but it is {text_or_turns!r:.40}")
    turns = as_turns(text_or_turns)
    check_messages(turns)
    roles = [turn["role"] for turn in turns]
    if not turns or not set(roles) <= set(ROLES):
        raise ValueError(
            f"there must be at least one turn, and the roles must be {', '.join(ROLES)}, but the roles are {roles}"
        )
    check_turns(turns, is_prompt)


def _check_answer(turns: list[dict]):
    """Raise ValueError if an answer's assistant turn is empty or blank."""
    check_ends(turns)
    for turn in turns:
        is_blank = not text_of(turn).strip() and not turn.get("tool_calls")
        if turn["role"] == "assistant" and is_blank:
            raise ValueError("an answer is empty or blank; add its text or remove the row")
    if not any(map(is_trained, turns)):
        raise ValueError(f"no turn of the answer is trained, because all have one of {', '.join(LOSS_KEYS)}; remove it")


def _add_system(text: Plain, prompt: str | list[dict]) -> str | list[dict]:
    """Put the text of the column `system` before a prompt as its system message."""
    if text in (None, ""):
        return prompt
    if not isinstance(text, str):
        raise ValueError(f"column 'system': the value must be text, but it is {text!r:.40}")
    turns = as_turns(prompt, "user")
    if turns and turns[0]["role"] == "system":
        if text_of(turns[0]) == text:
            return prompt
        raise ValueError(
            "column 'system': the turns begin with another system message; remove the column or the system message"
        )
    return [{"role": "system", "content": text}, *turns]


def _shows_images(turns: list[dict]) -> bool:
    """Return True if an answer has an image or video part, or a tag such as <image>.

    Tags in assistant turns do not count, because they are ordinary text there.
    """
    for turn in turns:
        if turn["role"] != "assistant" and MARK.search(text_of(turn)):
            return True
    return bool(shown_parts_of(turns))


def _place_answer(place: Callable, turns: list[dict]) -> tuple[list[dict], list[Media], list[dict]]:
    """Return the prompt's messages, the prompt's media, and the answer.

    Each image part in the answer contains its Media under the key "image".
    """
    conversation, media = place(turns)
    answer = conversation[-len(turns) :]
    shown_parts = shown_parts_of(answer)
    if any(part_kind(part) == "video" for part in shown_parts):
        raise ValueError("a video after the first assistant turn is not supported; move it into the prompt")
    # The last media belong to the answer, because the media are in the parts' order.
    for part in reversed(shown_parts):
        part["image"] = media.pop()  # FileDataset.__getitem__ loads the image
    return conversation[: -len(turns)], media, answer


def _place_turns(
    prompt: str | list[dict], row_media: dict[str, list[Media]], options: RowOptions, answer: Sequence[dict] = ()
) -> tuple[list[dict], list[Media]]:
    """Return the messages for a prompt and an answer, and their media in order."""
    turns = as_turns(prompt, "user")
    if turns and turns[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an assistant turn; move this turn into the column of the answer")
    if options.prompt_template != "{problem}":
        turns = put_in_template(options.prompt_template, turns)
    messages, media = place_media([*turns, *answer], row_media, options)
    return add_system_prompt(messages, options.system_prompt), media


def _split_columns(row_texts: dict, row: dict) -> tuple[str, str | list[dict], dict]:
    """Split a row's text columns into a prompt and answers.

    Returns:
        The prompt column's name, the prompt, and {column: answer}.
    """
    prompt_columns = [column for column in row_texts if column in PROMPTS]
    if prompt_columns == ["messages"] and "completion" in row_texts:
        prompt_columns.append("completion")
    if len(prompt_columns) > 1:
        raise ValueError(
            f"the row has both columns {prompt_columns[0]!r} and {prompt_columns[1]!r}, but only "
            "one of them is allowed; remove the other one"
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


def _keep_last(
    prompt: str | list[dict], answers: dict[str, str | list[dict]]
) -> tuple[str | list[dict], dict[str, str | list[dict]]]:
    """Move the turns before a conversation's last answer into the prompt.

    Args:
        prompt: text or turns.
        answers: {column: answer}.

    Raises:
        ValueError: a pair's answers have different turns before their last answers.
    """
    earlier = []  # for each answer, its turns up to the last one that is not the assistant's
    last = {}
    for name, answer in answers.items():
        turns = as_turns(answer)
        end = max((i + 1 for i, turn in enumerate(turns) if turn["role"] != "assistant"), default=0)
        earlier.append(turns[:end])
        last[name] = turns[end:] if 0 < end < len(turns) else answer
    if not any(earlier):
        return prompt, answers
    if any(turns != earlier[0] for turns in earlier):
        raise ValueError(
            f"data.train_answers is last, but the columns {' and '.join(answers)} have different "
            "turns before their last answers, so they have no common prompt; set "
            "data.train_answers to all, or make these turns equal"
        )
    return [*as_turns(prompt, "user"), *earlier[0]], last


def _implicit_prompt(answers: dict, columns: list[str]) -> tuple[list[dict], dict]:
    """Split the conversations `chosen` and `rejected` after the turns that both begin with.

    Returns:
        The common first turns, which are the prompt, and {column: answer} with the other turns.
    """
    chosen = answers.get("chosen")
    rejected = answers.get("rejected")
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        chosen = rejected = []
    num_shared = 0  # number of first turns that are equal in `chosen` and `rejected`
    for chosen_turn, rejected_turn in zip(chosen, rejected, strict=False):
        if chosen_turn != rejected_turn:
            break
        num_shared += 1
    if num_shared == 0:
        raise ValueError(
            f"column 'problem' is missing; the row has {columns}. Rename the column of the "
            "question with data.columns: {YOURS: problem}, set the same question for all rows with "
            "data.prompt_template: 'What is it?', or use the columns of another format: "
            f"{', '.join(QUESTION_FORMATS)}."
        )
    endings = {"chosen": chosen[num_shared:], "rejected": rejected[num_shared:]}
    return chosen[:num_shared], answers | endings
