"""Datasets: numbered rows, each a prompt with its images, answers to it, and the columns that rewards may ask for."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import PIL.Image
import torch

from minivlmrl.data.conversations import read_conversation
from minivlmrl.data.media import Media, check_columns, place_media, read_media
from minivlmrl.data.processor import Processor, Prompt
from minivlmrl.data.video import Video


@dataclass
class Row:
    """One example. An answer is text, or a list of turns that begins and ends with one of the assistant's."""

    messages: list[dict]  # the prompt, see chat.render
    images: list[PIL.Image.Image]  # one for each image part of the prompt, in order; videos below likewise
    columns: dict = field(default_factory=dict)  # problem, solution, ...: what the rewards are given
    completion: str | list[dict] | None = None  # a demonstrated answer, for sft
    chosen: str | list[dict] | None = None  # the better of two answers, for preferences
    rejected: str | list[dict] | None = None  # the worse
    videos: list[Video] = field(default_factory=list)
    where: str = ""  # file and line that it is from, for errors

    def prompt(self, processor: Processor) -> Prompt:
        """Make tensors of what it asks (ValueError: see Processor; begins with where the row is from)."""
        try:
            return processor(self.messages, self.images, self.videos)
        except ValueError as error:  # a size that an image cannot be given shows only here
            raise ValueError(f"{self.where}: {error}" if self.where else str(error)) from error


class Dataset(Protocol):
    """What the algorithms ask of data: a length and rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class JsonLines:
    """Rows of a JSON lines file.

    Each line is an object with a prompt, as needed with answers (`completion` for sft, `chosen` and `rejected` for
    preferences), `image` or `images` (a path, relative to the file, a list of paths, or what media.read_media knows
    beside), `video` or `videos`, `solution` (for the accuracy reward), and any other columns. Prompt and answers have
    one of the forms of conversations.read_conversation:

        {"image": "cat.jpg", "problem": "How many?", "solution": "2", "completion": "Two."}
        {"image": "cat.jpg", "prompt": [{"role": "user", "content": "How many?"}], "chosen": "Two.", "rejected": "One."}
        {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "Two."}]}
        {"video": {"video": "cat.mp4", "fps": 1}, "problem": "How often does it blink?", "solution": "3"}

    Args:
        path: the file.
        required: columns that every row must have. "problem" stands for a prompt and "completion" for a demonstrated
            answer, in any form.
        prompt_template, system_prompt: see conversations.read_conversation.
        limit: read no more rows than this.
        constants: columns that every row gets unless it has them.
        video_options: what is asked of every video, see media.OPTIONS; a row's own options win.
        allow_urls: fetch images and videos from the net where a row names an http(s) URL.
    Raises:
        ValueError: the file or a line cannot be read, or a column is missing or wrong (with file and line number).
            Images and videos are read when a row is used; what is wrong with one names its row too.
    """

    def __init__(
        self,
        path: str | Path,
        required: tuple[str, ...] = ("problem",),
        prompt_template: str = "{problem}",
        system_prompt: str | None = None,
        limit: int | None = None,
        constants: dict | None = None,
        video_options: dict | None = None,
        allow_urls: bool = False,
    ):
        self.path, self.prompt_template, self.system_prompt = Path(path), prompt_template, system_prompt
        self.constants, self.video_options, self.allow_urls = constants or {}, video_options or {}, allow_urls
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file")
        self.rows: list[tuple[int, Row, list[Media]]] = []  # line number, the row without its images, where they are
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")  # not splitlines: it cuts at U+2028 too
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error})") from error
        for number, line in enumerate(lines, start=1):
            if line.strip() and (limit is None or len(self.rows) < limit):
                try:
                    self.rows.append((number, *self._parse(line, required)))
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
        if not self.rows:
            raise ValueError(f"{path}: has no rows")
        self.columns = sorted(set().union(*(row.columns for _, row, _ in self.rows)))

    def _parse(self, line: str, required: tuple[str, ...]) -> tuple[Row, list[Media]]:
        try:
            columns = json.loads(line)
            json.dumps(columns, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text to tokenize
        except ValueError as error:
            raise ValueError(f"not JSON ({error})") from error
        if not isinstance(columns, dict):
            raise ValueError(f"a row must be an object with columns, it is {columns!r:.40}")
        margin = columns.get("margin")
        if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float)):
            raise ValueError(f"column 'margin' must be a number, by how much chosen is better; it is {margin!r:.40}")
        listed = {kind: read_media(columns, kind) for kind in ("image", "video")}
        counts = {kind: len(media) for kind, media in listed.items()}
        messages, answers = read_conversation(columns, counts, self.prompt_template, self.system_prompt)
        messages, media = place_media(messages, listed, self.video_options)
        check_columns(columns, media)
        present = {"problem", *answers, *(column for column, value in columns.items() if value is not None)}
        for column in required:
            if column not in present:
                raise ValueError(f"column {column!r} is missing; the row has {sorted(columns)}")
        columns |= {name: value for name, value in self.constants.items() if columns.get(name) is None}
        return Row(messages, [], columns, **answers), media

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        number, row, media = self.rows[index]
        where = f"{self.path}:{number}"
        try:
            loaded = [(one.kind, one.load(self.path.parent, self.allow_urls)) for one in media]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        images, videos = ([item for kind, item in loaded if kind == wanted] for wanted in ("image", "video"))
        columns = {name: row.columns.get(name) for name in self.columns}
        return replace(row, images=images, videos=videos, columns=columns, where=where)


def shuffled(size: int, per_step: int, seed: int, skip: int = 0) -> Iterator[list[int]]:
    """Endless lists of per_step row numbers: every pass visits all rows once, in a new order.

    Args:
        skip: leave out so many numbers at the beginning.
    """
    if size == 0:
        raise ValueError("there are no rows to train on")
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < per_step:
            waiting += torch.randperm(size, generator=generator).tolist()
            dropped = min(skip, len(waiting))
            waiting, skip = waiting[dropped:], skip - dropped
        yield waiting[:per_step]
        waiting = waiting[per_step:]
