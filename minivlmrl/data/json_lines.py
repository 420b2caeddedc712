"""A line of a JSON lines file -> Row: its prompt, answers, columns and what its images and videos are.

A row has a prompt and answers in one of the forms of conversations.read_conversation (`completion` for sft, `chosen`
and `rejected` for preferences, `completion` and `label` for kto), `image` or `images` (a path, relative to the file, a
list of paths, or what else media.read_media knows), `video` or `videos`, and columns that rewards ask for. docs/data.md
has examples.
"""

import json
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from minivlmrl.data.conversations import read_conversation
from minivlmrl.data.media import Media, check_columns, check_unread, load_media, missing_files, place_media, read_media
from minivlmrl.hub.checker import naming, require
from minivlmrl.rewards import GIVEN
from minivlmrl.rows import Row


@dataclass
class RowOptions:
    """How the rows of a file are read."""

    prompt_template: str = "{problem}"  # what the (last) user turn says; {problem} is the row's text of it
    system_prompt: str | None = None  # replaces Qwen's default system message
    constants: dict = field(default_factory=dict)  # columns that every row gets unless it has them
    video_options: dict = field(default_factory=dict)  # asked of every video, see sizes.OPTIONS; a row's own win
    allow_urls: bool | str = False  # fetch http(s) URLs of rows; "private": of private networks too


class JsonLines:
    """At most `limit` rows of a JSON lines file; images are read when a row is used.

    Every row must have the columns `required`; "problem" means a prompt and "completion" an answer, in any form.
    """

    def __init__(self, path: str | Path, required=("problem",), limit: int | None = None, **options):
        self.path, self.options, self.required = Path(path), RowOptions(**options), required
        self.rows = []  # line number and line: what is read of it takes ten times the memory
        self.counts, columns, missing, folder = Counter(), set(), [], self.path.parent
        if not self.path.is_file():
            raise ValueError(f"{path}: no such file")
        with naming(path):  # for what is not UTF-8
            lines = self.path.read_text(encoding="utf-8").split("\n")  # not splitlines: it cuts at U+2028 too
        for number, line in enumerate(lines, start=1):
            if line.strip() and (limit is None or len(self.rows) < limit):
                with naming(f"{path}:{number}"):
                    row, media = read_row(line, required, self.options)
                    missing += [f"{file} (line {number})" for file in missing_files(media, folder)]
                columns |= row.columns.keys()
                kinds = [one.kind for one in media]
                self.counts[kinds.count("image"), kinds.count("video")] += 1
                self.rows.append((number, line))
        if not self.rows:
            raise ValueError(f"{path}: has no rows")
        if missing:
            first = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ValueError(f"{path}: {len(missing)} file(s) that its rows name are not in {folder}: {first}")
        self.columns = sorted(columns)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        where, (row, media) = f"{self.path}:{self.rows[index][0]}", self.read(index)
        with naming(where):
            images, videos = load_media(media, self.path.parent, self.options.allow_urls)
        columns = {name: row.columns.get(name) for name in self.columns}
        return replace(row, images=images, videos=videos, columns=columns, where=where)

    def read(self, index: int) -> tuple[Row, list[Media]]:
        """Read a row without its images and videos."""
        return read_row(self.rows[index][1], self.required, self.options)


def read_row(line: str, required: Collection[str], options: RowOptions) -> tuple[Row, list[Media]]:
    """Read one row without its images and videos, and list these in order of appearance."""
    try:
        columns = json.loads(line)
        json.dumps(columns, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text to tokenize
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    require(isinstance(columns, dict), "a row", columns, "an object with columns")
    if taken := [name for name in GIVEN - {"images"} if columns.get(name) is not None]:
        raise ValueError(f"column {min(taken)!r} has the name of something else that rewards are given; rename it")
    margin, label = columns.get("margin"), columns.get("label")
    require(margin is None or _finite(margin), "column 'margin'", margin, "a number, by how much chosen is better")
    extent = columns.get("answer_extent")
    good = isinstance(extent, list) and len(extent) == 2 and all(_finite(side) and side > 0 for side in extent)
    require(extent is None or good, "column 'answer_extent'", extent, "[width, height], both above 0")
    good = str(columns.get("solution")).count("<answer>") <= 1
    require(good, "column 'solution'", columns.get("solution"), "one answer")
    good = "label" not in required or label is None or isinstance(label, bool)
    require(good, "column 'label'", label, "true or false, whether the completion is good")
    listed = {kind: read_media(columns, kind) for kind in ("image", "video")}
    counts = {kind: len(media) for kind, media in listed.items()}
    media = []
    try:
        messages, answers = read_conversation(columns, counts, options.prompt_template, options.system_prompt)
        messages, media = place_media(messages, listed, options.video_options)
    finally:  # also where the text says <image> and none came
        if not media and not any(counts.values()):
            check_unread(columns)
    check_columns(columns, media)
    present = {"problem", *answers, *(name for name, value in columns.items() if value is not None)}
    for name in required:
        if name not in present:
            raise ValueError(f"column {name!r} is missing; the row has {sorted(columns)}")
    columns |= {name: value for name, value in options.constants.items() if columns.get(name) is None}
    return Row(messages, [], columns, **answers), media


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
