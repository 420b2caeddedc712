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
        prompt_template: the user message; {problem} is replaced.
        system_prompt: replaces Qwen's default system message.
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
    ):
        self.path, self.prompt_template, self.system_prompt = Path(path), prompt_template, system_prompt
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file")
        self.rows: list[tuple[int, dict]] = []  # (line number, columns)
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), start=1):
            if line.strip():
                self.rows.append((number, self._parse(line, number, required)))
        if not self.rows:
            raise ValueError(f"{path}: has no rows")
        self.columns = sorted(set().union(*(row for _, row in self.rows)))

    def _parse(self, line: str, number: int, required: tuple[str, ...]) -> dict:
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{self.path}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.path}:{number}: a row must be an object with columns, it is {row!r:.40}")
        for column in required:
            if row.get(column) is None:
                raise ValueError(f"{self.path}:{number}: column {column!r} is missing; the row has {sorted(row)}")
        return row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        number, row = self.rows[index]
        listed = row.get("images", row.get("image"))
        paths = [] if listed is None else [listed] if isinstance(listed, str) else listed
        text = self.prompt_template.replace("{problem}", row["problem"])
        try:
            images = [load_image(self.path.parent / path) for path in paths]
            messages = [{"role": "user", "content": place_images(text, len(images))}]
        except ValueError as error:
            raise ValueError(f"{self.path}:{number}: {error}") from error
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        columns = {name: row.get(name) for name in self.columns}
        return Row(messages, images, columns, row.get("completion"))


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
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < per_step:
            waiting += torch.randperm(size, generator=generator).tolist()
        yield waiting[:per_step]
        waiting = waiting[per_step:]
