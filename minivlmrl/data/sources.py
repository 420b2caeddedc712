"""Datasets: numbered rows, each a conversation with its images and the columns that rewards may ask for."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import PIL.Image
import torch

from minivlmrl.data.image import load_image

PLACEHOLDER = "<image>"  # in a problem's text: where an image goes


@dataclass
class Row:
    """One example."""

    messages: list[dict]  # see chat.render
    images: list[PIL.Image.Image]
    columns: dict = field(default_factory=dict)  # problem, solution, ...: what the rewards are given
    completion: str | None = None  # a demonstrated answer, for sft


class Dataset(Protocol):
    """What the algorithms ask of data: a length and rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class JsonLines:
    """Rows of a JSON lines file.

    Each line is an object with `problem` (text) and, as needed, `image` or `images` (a path or a list of paths,
    relative to the file), `solution` (for the accuracy reward), `completion` (for sft) and any other columns. Images
    stand where the problem says <image>, or before its text if it says so nowhere.

    Args:
        path: the file.
        required: columns that every row must have.
        prompt_template, system_prompt: see `conversation`.
        limit: read no more rows than this.
    Raises:
        ValueError: the file or a line cannot be read, or a column is missing (with file and line number). Images are
            read when a row is used; what is wrong with one names its row too.
    """

    def __init__(
        self,
        path: str | Path,
        required: tuple[str, ...] = ("problem",),
        prompt_template: str = "{problem}",
        system_prompt: str | None = None,
        limit: int | None = None,
    ):
        self.path, self.prompt_template, self.system_prompt = Path(path), prompt_template, system_prompt
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file")
        self.rows: list[tuple[int, dict, list[str]]] = []  # line number, columns, image paths
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")  # not splitlines: it cuts at U+2028 too
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error})") from error
        for number, line in enumerate(lines, start=1):
            if line.strip() and (limit is None or len(self.rows) < limit):
                self.rows.append((number, *self._parse(line, number, required)))
        if not self.rows:
            raise ValueError(f"{path}: has no rows")
        self.columns = sorted(set().union(*(row for _, row, _ in self.rows)))

    def _parse(self, line: str, number: int, required: tuple[str, ...]) -> tuple[dict, list[str]]:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.path}:{number}: a row must be an object with columns, it is {row!r:.40}")
        for column in required:
            if row.get(column) is None:
                raise ValueError(f"{self.path}:{number}: column {column!r} is missing; the row has {sorted(row)}")
        for column in ("problem", "completion"):
            if not isinstance(row.get(column, ""), str):
                raise ValueError(f"{self.path}:{number}: column {column!r} must be text, it is {row[column]!r:.40}")
        listed = [row[column] for column in ("images", "image") if row.get(column) is not None]
        paths = [path for entry in listed for path in (entry if isinstance(entry, list) else [entry])]
        if len(listed) > 1 or not all(isinstance(path, str) for path in paths):
            raise ValueError(f"{self.path}:{number}: give image or images, a path or a list of paths: {listed!r:.60}")
        return row, paths

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        number, row, paths = self.rows[index]
        try:
            images = [load_image(self.path.parent / path) for path in paths]
            messages = conversation(row["problem"], len(images), self.prompt_template, self.system_prompt)
        except ValueError as error:
            raise ValueError(f"{self.path}:{number}: {error}") from error
        columns = {name: row.get(name) for name in self.columns}
        return Row(messages, images, columns, row.get("completion"))


def conversation(
    problem: str, images: int, prompt_template: str = "{problem}", system_prompt: str | None = None
) -> list[dict]:
    """Messages that ask about a problem.

    Args:
        images: how many come with it; see place_images.
        prompt_template: the user message; {problem} is replaced.
        system_prompt: replaces Qwen's default system message.
    """
    user = {"role": "user", "content": place_images(prompt_template.replace("{problem}", problem), images)}
    return [user] if system_prompt is None else [{"role": "system", "content": system_prompt}, user]


def place_images(text: str, count: int) -> list[dict]:
    """Split a text at its <image> placeholders into parts; without any, the images come first.

    Raises:
        ValueError: some placeholders, but another number than images.
    """
    pieces = text.split(PLACEHOLDER)
    if len(pieces) == 1:
        return [{"type": "image"}] * count + [{"type": "text", "text": text}]
    if len(pieces) - 1 != count:
        raise ValueError(
            f"the problem has {len(pieces) - 1} {PLACEHOLDER} placeholder(s) but the row has {count} image(s)"
        )
    parts = [{"type": "text", "text": pieces[0]}]
    for piece in pieces[1:]:
        parts += [{"type": "image"}, {"type": "text", "text": piece}]
    return parts


def shuffled(size: int, per_step: int, seed: int) -> Iterator[list[int]]:
    """Endless lists of per_step row numbers: every pass visits all rows once, in a new order."""
    if size == 0:
        raise ValueError("there are no rows to train on")
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < per_step:
            waiting += torch.randperm(size, generator=generator).tolist()
        yield waiting[:per_step]
        waiting = waiting[per_step:]
