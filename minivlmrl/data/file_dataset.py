"""A dataset with the rows of a data file or folder."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from os.path import getsize, isfile
from pathlib import Path

import PIL.Image

from minivlmrl.config.options import RowOptions
from minivlmrl.config.types import Plain
from minivlmrl.data.columns import ANSWERS, READ, ForeignLayoutError, find_format
from minivlmrl.data.file_rows import FileRows
from minivlmrl.data.media import SAMPLING_OPTIONS, Media, Source, fetch_image, files_of, open_image
from minivlmrl.data.read_row import answer_image_parts, read_row
from minivlmrl.data.row_files import convert_advice, open_rows
from minivlmrl.data.row_summary import count_words
from minivlmrl.data.rows import Row
from minivlmrl.data.video import Video, VideoFile, load_video, outline_video
from minivlmrl.errors import error_context
from minivlmrl.files import digest


class FileDataset(FileRows):
    """The rows of a data file. All rows are checked at the start, and a row is read from the file again at each use.

    Args:
        path: file or folder with the rows.
        required: columns that every row must have; "problem" stands for any prompt column.
        limit: maximum number of rows; None reads all rows.
        constants: columns that are added to every row.
        checks_files: whether to check that the image and video files exist. On several ranks, only rank 0 checks,
            because a shared file system is slow.
        reads: columns that a stage or a reward reads, besides `required`; None stands for all columns.
        options: fields of RowOptions.

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
        reads: Collection[str] | None = None,
        **options,
    ):
        self.path = path
        self.checks_files = checks_files
        self.options = RowOptions(**options)
        self.convert = find_format(self.options.format) if self.options.format else dict
        self.required = required
        # `reads` is None if a user's own code may read any column, including `label`.
        self.reads = ("label",) if reads is None else reads
        self.source = open_rows(path)
        self.constants = dict(constants or {})
        self.size = len(self.source) if limit is None else min(limit, len(self.source))
        if not self.size:
            raise ValueError(f"{path} has no rows; add at least one row or choose another file")
        self.folder = Path(self.options.image_root or self.source.folder)
        self.counts = Counter()  # {(images per row, videos per row): number of rows}
        self.prompt_hashes = []
        self.columns = ()
        missing_files = []
        column_names = set()
        unread = set()
        for index in range(self.size):
            row, media = self.read(index)
            column_names.update(row.columns)
            unread.update(name for name, value in row.columns.items() if value is not None)
            unread.update(name for name in ANSWERS if getattr(row, name) is not None)
            missing_files += self._count(row, media)
        if missing_files:
            raise ValueError(
                f"{path}: {len(missing_files)} image or video file(s) of the rows are missing in "
                f"{self.folder.resolve()}, for example {', '.join(missing_files[:5])}. Correct the paths, or "
                "set data.image_root to the folder that they start from. A video is a file or a list of its frames, "
                "not a folder."
            )
        self.columns = sorted(column_names)
        known = {*self.reads, *required, *READ, *self.options.columns.values(), *self.constants}
        self.unread = [] if reads is None else sorted(unread - known)

    def _count(self, row: Row, media: list[Media]) -> list[str]:
        """Add a row to the counts, and return the row's missing image and video files."""
        answer_images = [part["image"] for part in answer_image_parts(row)]
        with error_context(row.where):
            files = list(files_of(media + answer_images, str(self.folder)))
        kinds = [item.kind for item in media]
        self.counts[kinds.count("image"), kinds.count("video")] += 1
        file_sizes = []
        missing_files = []
        for source, path in files if self.checks_files else ():
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
            columns = self.convert(columns)
            try:
                row, media = read_row(columns, self.required, self.options, self.folder, self.reads)
            except ForeignLayoutError as error:
                advice = convert_advice(self.path, self.options.format, self.options.columns)
                raise ValueError(f"{error}; {advice}") from error
        row.where = where
        row.columns = dict.fromkeys(self.columns) | row.columns | self.constants
        return row, media

    def describe(self) -> str:
        return count_words(self.counts, self.size)

    def outline(self, index: int) -> Row:
        return self._open(index, read_header, outline_video)

    def __getitem__(self, index: int) -> Row:
        return self._open(range(self.size)[index], fetch_image, load_video)

    def _open(self, index: int, load_image: Callable[..., PIL.Image.Image], load_video: Callable[..., Video]) -> Row:
        """Read a row whose images and videos are loaded only when they are used."""
        row, media = self.read(index)

        def load(item: Media) -> PIL.Image.Image:
            try:
                return load_image(item.sources[0], self.folder)
            except ValueError as error:
                raise ValueError(
                    f"{row.where}: {error}; replace the file or remove the row, or leave out such rows in "
                    "training with data.skip_unreadable=true"
                ) from error

        row.images = LazyImages([partial(load, item) for item in media if item.kind == "image"])
        row.videos = load_videos(media, self.folder, load_video)
        for part in answer_image_parts(row):
            part["image"] = partial(load, part["image"])
        return row

    def content(self, index: int) -> str:
        row, media = self.read(index)
        hashed_parts: list[str | bytes | Path] = [repr(row.messages)]
        for source, path in files_of(media, str(self.folder)):
            hashed_parts.append(Path(path) if path else source)
        return digest(hashed_parts)


class LazyImages(Sequence):
    """A row's images. An image is decoded again at each access, so that no decoded image stays in memory."""

    def __init__(self, decoders: Sequence[Callable[[], PIL.Image.Image]]):
        self.decoders = decoders
        self.sizes = {}  # {index: (width, height)} for the images decoded so far

    def __len__(self) -> int:
        return len(self.decoders)

    def __getitem__(self, index: int) -> PIL.Image.Image:
        image = self.decoders[index]()
        self.sizes[index] = image.size
        return image


def read_header(source: Source, folder: Path) -> PIL.Image.Image:
    """Open an image file to read the image's size; the returned image cannot be decoded."""
    with open_image(source, folder) as image:
        return image


def load_videos(media: list[Media], folder: Path, load: Callable[..., Video]) -> list[VideoFile]:
    """Return a row's videos, whose frames are read at each use."""
    videos = []
    for item in media:
        if item.kind == "video":
            sampling = {n: value for n, value in item.options.items() if n in SAMPLING_OPTIONS}
            videos.append(VideoFile(partial(load, item.source, folder, **sampling)))
    return videos
