"""Datasets that read rows from data files.

Opening a file parses and checks all rows once, and stores one RowFacts per row. Every access parses the row again, so
changes to a Row are lost.
"""

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from os.path import getsize, isfile
from pathlib import Path
from typing import Any

import PIL.Image

from minivlmrl.config.import_utils import resolve_function
from minivlmrl.config.options import RowOptions
from minivlmrl.config.types import Plain
from minivlmrl.data.boxes import MARKED_BOX
from minivlmrl.data.columns import ANSWERS, READ, rename_columns
from minivlmrl.data.media import SAMPLING_OPTIONS, Media, Source, fetch_image, files_of, open_image
from minivlmrl.data.messages import as_turns, text_of
from minivlmrl.data.read_row import answer_image_parts, read_row
from minivlmrl.data.row_checks import check_unread, checked_row
from minivlmrl.data.row_files import convert_advice, open_rows
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.data.video import Video, VideoFile, load_video
from minivlmrl.errors import UserError, error_context, pluralize, require
from minivlmrl.files import digest

SECONDS = 5  # seconds between progress lines while a file is read
Size = tuple[int, int]  # (width, height) in pixels


def find_format(name: str) -> Callable[[dict], dict]:
    """Load the row conversion function named in data.format."""
    with error_context(f"data.format {name}"):
        convert = resolve_function("format", name, {})

    def converted(row: dict) -> dict:
        columns = convert(row)
        is_valid = isinstance(columns, Mapping) and all(isinstance(column, str) for column in columns)
        require(is_valid, f"what data.format {name} returns", columns, "a dict from column names to values")
        return dict(columns)

    return converted


class RowFile:
    """A data file, with the options for reading its rows."""

    def __init__(self, path: str | Path, constants: Mapping[str, Plain], options: RowOptions):
        self.path = path
        self.constants = dict(constants)
        self.options = options
        self.convert = find_format(options.format) if options.format else dict
        self.source = open_rows(path)
        self.folder = Path(options.image_root or self.source.folder)
        self.num_rows = 0
        self.columns: list[str] = []
        self.given: set[str] = set()  # columns with a value in at least one row
        self.unread: set[str] = set()
        # token counts of rows for one processor: {line number: {names of answer columns: RowSize}}
        self.sizes: dict[int, dict[tuple, Any]] = {}
        self.processor: Any = None

    def columns_of(self, line: int) -> dict:
        return rename_columns(self.convert(self.source[line]), self.options.columns)

    def open(self, line: int, required: Sequence[str], known: Collection[str]) -> tuple[Row, list[Media]]:
        """Parse and check a row when opening its file; see row_checks.checked_row."""
        where = self.source.where(line)
        with error_context(where):
            try:
                columns = self.columns_of(line)
                row, media = checked_row(columns, required, known, self.options)
            except ValueError as error:
                if self.given or self.options.format:  # no advice on conversion if an earlier row was valid
                    raise
                end = "" if str(error).endswith((".", "?")) else "."
                advice = convert_advice(self.path, self.options.columns)
                raise UserError(f"{error}{end} If the rows have the layout of another project, {advice}") from error
            check_unread(columns, self.folder, known, bool(media or answer_image_parts(row)))
        row.where = where
        return row, media

    def read(self, line: int) -> tuple[Row, list[Media]]:
        """Read a row without images and videos; also return their sources, such as file paths."""
        row, media = read_row(self.columns_of(line), self.options)
        row.where = self.source.where(line)
        row.columns = dict.fromkeys(self.columns) | row.columns | self.constants
        return row, media

    def load(self, line: int, load_image: Callable[..., PIL.Image.Image], load_video: Callable[..., Video]) -> Row:
        """Read a row, whose images and videos are loaded on access."""
        row, media = self.read(line)

        def load(item: Media) -> PIL.Image.Image:
            try:
                return load_image(item.sources[0], self.folder)
            except ValueError as error:
                raise UserError(
                    f"{row.where}: {error}; replace the file or remove the row, or leave out such rows in "
                    "training with data.skip_unreadable=true"
                ) from error

        row.images = LazyImages([partial(load, item) for item in media if item.kind == "image"])
        row.videos = load_videos(media, self.folder, load_video)
        for part in answer_image_parts(row):
            part["image"] = partial(load, part["image"])
        return row


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Properties of a row, collected when its file is opened."""

    file: RowFile
    line: int  # row index in the file
    num_images: int  # images in the prompt
    num_videos: int
    prompt_hash: int  # hash of the prompt and media file sizes
    text_bytes: dict[str, int]  # {"prompt" or answer column: text length in bytes}
    solution: Plain
    boxes: dict[str, str]  # {answer column: first bounding box in the answer's text}
    box_space: str | None
    # (size, options) of each image in prompt and answers; the size of an unreadable image is None
    images: tuple[tuple[Size | None, dict], ...]

    @property
    def where(self) -> str:
        """File and line, such as "rows.jsonl:3", for error messages."""
        return self.file.source.where(self.line)


class FileDataset(Sequence[Row]):
    """Rows from one data file, or from several files after mix().

    Args:
        required: columns needed in every row; "problem" stands for the prompt, in any column such as `messages`.
        constants: columns added to every row.
        checks_files: whether to check for missing media files; only on rank 0, because shared file systems are slow.
        reads: columns read by training stages and rewards in addition to columns.READ, None = all.
        options: see RowOptions.
    Raises:
        UserError: no rows, an invalid row, or a missing image or video file.
    """

    def __init__(
        self,
        path: str | Path,
        required: Sequence[str] = ("problem",),
        limit: int | None = None,
        constants: Mapping[str, Plain] | None = None,
        checks_files: bool = True,
        reads: Collection[str] | None = None,
        **options,
    ):
        file = RowFile(path, constants or {}, RowOptions(**options))
        known = {*file.options.columns, *required, *(reads or ())}
        file.num_rows = len(file.source) if limit is None else min(limit, len(file.source))
        if not file.num_rows:
            raise UserError(f"{path} has no rows; add at least one row or choose another file")
        self.facts: list[RowFacts] = []
        columns: set[str] = set()
        missing: list[str] = []
        reported = time.monotonic()
        for line in range(file.num_rows):
            if checks_files and time.monotonic() - reported > SECONDS:
                print(f"{path}: read {line:,} of {file.num_rows:,} rows", file=sys.stderr, flush=True)
                reported = time.monotonic()
            row, media = file.open(line, required, known)
            columns |= row.columns.keys()
            file.given |= {name for name, value in row.columns.items() if value is not None}
            file.given |= {name for name in ANSWERS if getattr(row, name) is not None}
            facts, missing_files = facts_of(file, line, row, media, checks_files)
            self.facts.append(facts)
            missing += missing_files
        if missing:
            raise UserError(
                f"{path}: {pluralize(len(missing), 'missing image or video file')} in "
                f"{file.folder.resolve()}, for example {', '.join(missing[:5])}. Correct the paths"
                f"{' (write / instead of the backslash)' if chr(92) in missing[0] else ''}, or "
                "set data.image_root to the folder that they start from. A video is a file or a list of its frames, "
                "not a folder."
            )
        file.columns = sorted(columns)
        if reads is not None:
            file.unread = file.given - {*known, *READ, *file.options.columns.values()}

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, index: int) -> Row:
        facts = self.facts[index]
        return facts.file.load(facts.line, fetch_image, load_video)

    def read(self, index: int) -> tuple[Row, list[Media]]:
        facts = self.facts[index]
        return facts.file.read(facts.line)

    def content(self, index: int) -> str:
        """Hash a row's prompt and media file contents."""
        row, media = self.read(index)
        files = files_of(media, str(self.facts[index].file.folder))
        return digest([repr(row.messages), *(Path(path) if path else source for source, path in files)])

    def select(self, facts: list[RowFacts]) -> "FileDataset":
        """Return a dataset with the given rows, which may come from several datasets."""
        if not facts:
            raise UserError(
                "data: no rows remain in the dataset; check data.train_file, sampling and data.max_prompt_tokens"
            )
        selected = copy(self)
        selected.facts = facts
        return selected

    @property
    def files(self) -> list[RowFile]:
        return list(dict.fromkeys(facts.file for facts in self.facts))

    @property
    def columns(self) -> set[str]:
        """All column names, before and after renaming with data.columns."""
        return {name for file in self.files for name in file.columns}

    @property
    def unread(self) -> list[str]:
        """Return the row columns that no training stage and no reward reads."""
        return sorted({name for file in self.files for name in file.unread})

    @property
    def prompt_hashes(self) -> list[int]:
        return [facts.prompt_hash for facts in self.facts]


def without_rows(rows: Dataset, removed: Collection[int]) -> Dataset:
    if not removed or not isinstance(rows, FileDataset):
        return rows
    return rows.select([facts for index, facts in enumerate(rows.facts) if index not in removed])


def facts_of(file: RowFile, line: int, row: Row, media: list[Media], checks_files: bool) -> tuple[RowFacts, list[str]]:
    """Collect a row's properties (RowFacts), and describe its missing image and video files.

    Args:
        checks_files: whether to look for image and video files, and read image sizes.
    """
    answers = {name: getattr(row, name) for name in ANSWERS}
    texts = {"prompt": repr(row.messages)} | {name: repr(answer) for name, answer in answers.items()}
    boxes = {
        name: MARKED_BOX.search("\n".join(map(text_of, as_turns(answer or [])))) for name, answer in answers.items()
    }
    solution = row.columns.get("solution")
    shown = media + [part["image"] for part in answer_image_parts(row)]
    with error_context(row.where):
        sizes, missing = look_at_files(row, shown if checks_files else [], file.folder)
    facts = RowFacts(
        file,
        line,
        num_images=sum(item.kind == "image" for item in media),
        num_videos=sum(item.kind == "video" for item in media),
        prompt_hash=hash(repr((row.messages, sizes))),
        text_bytes={name: len(text.encode()) for name, text in texts.items()},
        solution=solution,
        boxes={name: box[0] for name, box in boxes.items() if box},
        box_space=row.columns.get("box_space"),
        images=tuple(
            (image_size(item, file.folder) if checks_files else None, item.options)
            for item in shown
            if item.kind == "image"
        ),
    )
    return facts, missing


def look_at_files(row: Row, media: list[Media], folder: Path) -> tuple[list[int], list[str]]:
    """Return image and video file sizes in bytes, and descriptions of missing files.

    If the row contains the image itself, the size is the length of its bytes or base64 string.
    """
    sizes = []
    missing = []
    for item in media:
        for source, path in files_of([item], str(folder)):
            if isfile(path):
                sizes.append(getsize(path))
            else:
                sizes.append(len(source))
                if path:
                    missing.append(f"{source} ({row.where})")
    return sizes, missing


def image_size(image: Media, folder: Path) -> Size | None:
    """Return an image's (width, height), or None if the image is unreadable."""
    try:
        return read_header(image.sources[0], folder).size
    except ValueError:  # ignored here: training raises the error when it decodes the image
        return None


def read_header(source: Source, folder: Path) -> PIL.Image.Image:
    """Read an image's header and close the file; the returned image has a size, but no pixels."""
    with open_image(source, folder) as image:
        return image


class LazyImages(Sequence):
    """A row's images, decoded on every access, to save memory."""

    def __init__(self, decoders: Sequence[Callable[[], PIL.Image.Image]]):
        self.decoders = decoders
        self.sizes = {}  # {index: (width, height)} of decoded images

    def __len__(self) -> int:
        return len(self.decoders)

    def __getitem__(self, index: int) -> PIL.Image.Image:
        image = self.decoders[index]()
        self.sizes[index] = image.size
        return image


def load_videos(media: list[Media], folder: Path, load: Callable[..., Video]) -> list[VideoFile]:
    """Return videos, which read their frames only when used."""
    videos = []
    for item in media:
        if item.kind == "video":
            sampling = {n: value for n, value in item.options.items() if n in SAMPLING_OPTIONS}
            videos.append(VideoFile(partial(load, item.source, folder, **sampling)))
    return videos
