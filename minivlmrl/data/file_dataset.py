"""A dataset with the rows of data files, and the facts about each row.

When a file is opened, each row is parsed and checked once, and described by its RowFacts. After that, a row is read
again only to measure its tokens with a processor, once for each dataset, and whenever a batch contains the row.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from os.path import getmtime, getsize, isfile
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import PIL.Image
import torch

from minivlmrl.config.import_utils import resolve_function
from minivlmrl.config.options import RowOptions
from minivlmrl.config.types import Plain
from minivlmrl.data.columns import ANSWERS, READ, LayoutError, rename_columns
from minivlmrl.data.image import Grid, ImageProcessor
from minivlmrl.data.media import SAMPLING_OPTIONS, Media, Source, fetch_image, files_of, open_image
from minivlmrl.data.processor import Processor, encode_completion
from minivlmrl.data.read_row import answer_image_parts, read_row
from minivlmrl.data.row_checks import checked_row
from minivlmrl.data.row_files import convert_advice, open_rows
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.data.video import Video, VideoFile, load_video, outline_video
from minivlmrl.errors import counted, error_context
from minivlmrl.files import digest

SAMPLE = 64  # rows that are measured for the summary and for the memory estimate
MARKUP = 1000  # maximum number of tokens that a chat template adds to a prompt
TOKEN_BYTES = 3  # text bytes per token, roughly; only the order of rows depends on this number

CONTROL = re.compile(r"<\|\w{1,40}\|>")  # a control token, such as <|im_end|>

Size = tuple[int, int]  # width and height in pixels


def find_format(name: str) -> Callable[[dict], dict]:
    """Return the function for the option data.format, which converts a row of a data file."""
    with error_context(f"data.format {name}"):
        return resolve_function("format", name, {})


class RowFile:
    """A data file that is open, with the options for reading its rows.

    Args:
        path: file or folder with the rows.
        constants: columns that are added to every row.
        options: see RowOptions.
    """

    def __init__(self, path: str | Path, constants: Mapping[str, Plain], options: RowOptions):
        self.path = path
        self.constants = dict(constants)
        self.options = options
        self.convert = find_format(options.format) if options.format else dict
        self.source = open_rows(path)
        self.folder = Path(options.image_root or self.source.folder)
        self.num_rows = 0  # number of rows that are used
        self.columns: list[str] = []  # names of the columns of all rows
        self.given: set[str] = set()  # columns that have a value in a row
        self.unread: set[str] = set()  # those that no stage and no reward reads
        self.processor: Processor | None = None  # the processor with which `sizes` were measured
        self.sizes: dict[int, dict[tuple, RowSize]] = {}  # {line: {names of answers: token counts}}

    def columns_of(self, line: int) -> dict:
        """Parse a row, and give its columns their new names."""
        return rename_columns(self.convert(self.source[line]), self.options.columns)

    def read(self, line: int) -> tuple[Row, list[Media]]:
        """Read a row without its images and videos, and list their sources in order."""
        row, media = read_row(self.columns_of(line), self.options)
        row.where = self.source.where(line)
        row.columns = dict.fromkeys(self.columns) | row.columns | self.constants
        return row, media

    def load(self, line: int, load_image: Callable[..., PIL.Image.Image], load_video: Callable[..., Video]) -> Row:
        """Read a row whose images and videos are loaded only when they are used."""
        row, media = self.read(line)

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


@dataclass(frozen=True, slots=True)
class RowFacts:
    """A row's place, and what is known about the row since its file was opened."""

    file: RowFile
    line: int  # index of the row in its file
    num_images: int  # in the prompt
    num_videos: int
    prompt_hash: int  # hash of the prompt, and of the sizes of the row's image and video files
    media_stamp: int  # checksum of the sizes and times of the row's image and video files; equal in all processes
    text_bytes: tuple[int, ...]  # bytes in the texts of the prompt, and of each column in ANSWERS
    solution: Plain  # value of the column `solution`, which a run compares with answers before the first step
    spelled: tuple[str, ...]  # names of control tokens that stand in the row's texts, such as <|im_end|>
    # size and options of each image in the prompt and the answers; the size is None if it is not known
    images: tuple[tuple[Size | None, dict], ...]

    @property
    def where(self) -> str:
        """Return the row's file and line, such as "rows.jsonl:3", for error messages."""
        return self.file.source.where(self.line)

    def bytes_of(self, answers: Sequence[str]) -> int:
        """Return the bytes in the texts of the prompt and of the given answers."""
        prompt, *others = self.text_bytes
        return prompt + sum(size for name, size in zip(ANSWERS, others, strict=True) if name in answers)

    def image_tokens(self, counter: "PatchCounter") -> float:
        """Return the number of tokens of a row's images; infinity if it cannot be computed without reading the row."""
        if self.num_videos or any(size is None for size, _ in self.images):
            return math.inf
        try:
            return sum(counter.tokens(size, options) for size, options in self.images if size is not None)
        except ValueError:  # the processor refuses the size; reported, or skipped, when the image is used
            return math.inf


class FileDataset(Sequence[Row]):
    """The rows of a data file, or of several files after mix().

    Args:
        path: file or folder with the rows.
        required: columns that every row must have; "problem" stands for any prompt column.
        limit: maximum number of rows; None reads all rows.
        constants: columns that are added to every row.
        checks_files: whether to look at image and video files. On several ranks, only rank 0 looks at them, because a
            shared file system is slow.
        reads: columns that a stage or a reward reads, in addition to `required`; None stands for all columns.
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
        file = RowFile(path, constants or {}, RowOptions(**options))
        known = {*file.options.columns, *required, *(reads or ())}
        size = len(file.source) if limit is None else min(limit, len(file.source))
        if not size:
            raise ValueError(f"{path} has no rows; add at least one row or choose another file")
        self.facts: list[RowFacts] = []
        columns: set[str] = set()
        missing: list[str] = []  # image and video files
        for line in range(size):
            row, media = open_row(file, line, required, known)
            columns |= row.columns.keys()
            file.given |= {name for name, value in row.columns.items() if value is not None}
            file.given |= {name for name in ANSWERS if getattr(row, name) is not None}
            facts, lost = facts_of(file, line, row, media, checks_files)
            self.facts.append(facts)
            missing += lost
        if missing:
            raise ValueError(
                f"{path}: {len(missing)} image or video file(s) of the rows are missing in "
                f"{file.folder.resolve()}, for example {', '.join(missing[:5])}. Correct the paths, or "
                "set data.image_root to the folder that they start from. A video is a file or a list of its frames, "
                "not a folder."
            )
        file.num_rows = size
        file.columns = sorted(columns)
        if reads is not None:
            file.unread = file.given - {*known, *READ, *file.options.columns.values()}

    def __len__(self) -> int:
        return len(self.facts)

    def __getitem__(self, index: int) -> Row:
        facts = self.facts[index]
        return facts.file.load(facts.line, fetch_image, load_video)

    def read(self, index: int) -> tuple[Row, list[Media]]:
        """Read a row without its images and videos, and list their sources in order."""
        facts = self.facts[index]
        return facts.file.read(facts.line)

    def content(self, index: int) -> str:
        """Return a hash of a row's prompt and of the contents of its image and video files."""
        row, media = self.read(index)
        hashed_parts: list[str | bytes | Path] = [repr(row.messages)]
        for source, path in files_of(media, str(self.facts[index].file.folder)):
            hashed_parts.append(Path(path) if path else source)
        return digest(hashed_parts)

    def select(self, facts: list[RowFacts]) -> "FileDataset":
        """Return a dataset with the given rows, which may be rows of several datasets."""
        if not facts:
            raise ValueError(
                "data: no rows remain in the dataset; check data.train_file, sampling and data.max_prompt_tokens"
            )
        selected = copy(self)
        selected.facts = facts
        return selected

    def measure(self, index: int, processor: Processor, answers: Sequence[str] = ()) -> "RowSize":
        """Count the tokens of a row; a row is read and measured only once for each processor.

        Args:
            answers: names of the answers that are measured, such as ("chosen", "rejected").

        Raises:
            ValueError: an image is unreadable, or the processor refuses its size.
        """
        file, line = self.facts[index].file, self.facts[index].line
        if file.processor is not processor:
            file.processor, file.sizes = processor, {}
        sizes = file.sizes.setdefault(line, {})
        if not answers and sizes:  # the row was measured with its answers
            size = next(iter(sizes.values()))
            return replace(size, answer_tokens=None, longest=size.prompt_tokens, index=index)
        if tuple(answers) not in sizes:
            row = file.load(line, read_header, outline_video)
            with error_context(row.where):
                sizes[tuple(answers)] = row_size(row, processor, answers)
        return replace(sizes[tuple(answers)], index=index)

    @property
    def files(self) -> list[RowFile]:
        return list({id(facts.file): facts.file for facts in self.facts}.values())

    @property
    def columns(self) -> set[str]:
        """Return the names of the columns of all rows, before and after data.columns."""
        return {name for file in self.files for name in file.columns}

    @property
    def given(self) -> set[str]:
        """Return the columns that have a value in a row."""
        return {name for file in self.files for name in file.given}

    @property
    def unread(self) -> list[str]:
        """Return the columns that no stage and no reward reads."""
        return sorted({name for file in self.files for name in file.unread})

    @property
    def prompt_hashes(self) -> list[int]:
        return [facts.prompt_hash for facts in self.facts]

    @property
    def media_stamp(self) -> str:
        """Return a hash of the sizes and times of all image and video files; only rank 0 has looked at the files."""
        return digest([repr([facts.media_stamp for facts in self.facts])])

    def describe(self) -> str:
        """Describe in words how many rows the dataset has, and how many images and videos per row."""
        num_rows = sum(file.num_rows for file in self.files)
        if len(self.files) > 1 or num_rows != len(self):
            return f"{len(self)} selected out of {num_rows} in {len(self.files)} file(s)"
        counts = Counter((facts.num_images, facts.num_videos) for facts in self.facts)
        return count_words(counts, len(self.facts))


def without_rows(rows: Dataset, removed: Collection[int]) -> Dataset:
    if not removed or not isinstance(rows, FileDataset):
        return rows
    return rows.select([facts for index, facts in enumerate(rows.facts) if index not in removed])


def open_row(file: RowFile, line: int, required: Sequence[str], known: Collection[str]) -> tuple[Row, list[Media]]:
    """Parse, check and read a row; see row_checks.checked_row."""
    where = file.source.where(line)
    with error_context(where):
        try:
            row, media = checked_row(file.columns_of(line), required, known, file.options, file.folder)
        except ValueError as error:
            if not is_foreign(error):
                raise
            advice = convert_advice(file.path, file.options.format, file.options.columns)
            end = "" if str(error).endswith((".", "?")) else "."
            raise ValueError(f"{error}{end} If the rows have the layout of another project, {advice}") from error
    row.where = where
    return row, media


def is_foreign(error: BaseException | None) -> bool:
    """Return True for a LayoutError, or an error that error_context made from a LayoutError."""
    return isinstance(error, LayoutError) or (error is not None and is_foreign(error.__cause__))


def facts_of(file: RowFile, line: int, row: Row, media: list[Media], checks_files: bool) -> tuple[RowFacts, list[str]]:
    """Collect the facts about a row, and list its missing image and video files.

    Args:
        checks_files: whether to look at the image and video files.
    """
    shown = media + [part["image"] for part in answer_image_parts(row)]
    with error_context(row.where):
        paths = list(files_of(shown, str(file.folder)))
    file_sizes, file_times, missing = [], [], []
    for source, path in paths if checks_files else ():
        is_file = isfile(path)
        file_sizes.append(getsize(path) if is_file else len(source))
        file_times.append(getmtime(path) if is_file else 0)
        if path and not is_file:
            missing.append(f"{source} ({re.sub(r'.*:(?=[0-9]+$)', 'line ', row.where)})")
    images = []
    for item in shown:
        if item.kind == "image":
            size = image_size(item.sources[0], file.folder) if checks_files else None
            images.append((size, item.options))
    kinds = [item.kind for item in media]
    texts = [repr(text) for text in (row.messages, *(getattr(row, name) for name in ANSWERS))]
    spelled = CONTROL.findall("".join([*texts, str(row.columns.get("solution"))]))
    facts = RowFacts(
        file,
        line,
        num_images=kinds.count("image"),
        num_videos=kinds.count("video"),
        prompt_hash=hash(repr((row.messages, file_sizes))),
        media_stamp=crc32(repr((file_sizes, file_times)).encode()),
        text_bytes=tuple(len(text.encode()) for text in texts),
        solution=row.columns.get("solution"),
        spelled=tuple(dict.fromkeys(spelled)),
        images=tuple(images),
    )
    return facts, missing


def image_size(source: Source, folder: Path) -> Size | None:
    """Return the width and height of an image, or None if its file is unreadable."""
    try:
        return read_header(source, folder).size
    except ValueError:  # reported, or skipped, when the image is used
        return None


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


class PatchCounter(ImageProcessor):
    """An image processor that computes the patch grid of an image, but no pixel values."""

    def patches(self, frames, height: int, width: int) -> tuple[torch.Tensor, Grid]:
        depth = math.ceil(len(frames) / self.temporal_patch_size)
        grid = depth, height // self.patch_size, width // self.patch_size
        return torch.zeros(0, self.patch_dim, dtype=self.dtype), grid

    def tokens(self, size: Size, options: dict) -> int:
        """Return the number of tokens of an image with this width and height."""
        _, grid = self(SimpleNamespace(size=size), **options)  # pyright: ignore[reportArgumentType]  # reads the size
        return self.num_tokens(grid)


def patch_counter(processor: Processor) -> PatchCounter:
    return PatchCounter(**vars(processor.image_processor))


@dataclass(frozen=True)
class RowSize:
    """The token and image counts of a row; the defaults describe a typical row with one image."""

    text_tokens: int = 200  # text tokens in the prompt
    image_tokens: int = 1000  # image tokens in the prompt, after patches are merged
    frames: int = 1  # equally large images of image_tokens; two video frames count as one
    answer_tokens: int | None = None  # of the longest given answer; None without an answer
    longest: int = 0  # tokens in the longest sequence, a prompt with an answer or with a part of its turns
    where: str = ""  # the row's file and line
    media: str = ""  # image and video sizes, for messages
    has_videos: bool = False
    index: int = 0  # index of the row in its dataset

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + self.image_tokens

    @property
    def weight(self) -> int:
        """Rough cost of a row: tokens in the decoder plus image tokens in the vision tower."""
        return self.prompt_tokens + self.image_tokens + (self.answer_tokens or 0)


def row_size(row: Row, processor: Processor, answers: Sequence[str]) -> RowSize:
    """Count the tokens of a row, whose images and videos only need to have a size."""
    counter = replace(processor, image_processor=patch_counter(processor))
    prompt = row.prompt(counter)
    prompt_tokens = len(prompt.input_ids)
    grids = prompt.image_grid_thw
    image_tokens = int(grids.prod(1).sum()) // counter.image_processor.merge_size**2
    given = [getattr(row, name) for name in answers if getattr(row, name)]
    encoded = [encode_completion(counter, row.messages, answer, row.images, row.videos) for answer in given]
    turns = [turn for completion in encoded for turn in completion.turns or [completion]]
    longest = [len(turn.ids) + (len(turn.prompt.input_ids) if turn.prompt else prompt_tokens) for turn in turns]
    words = [f"an image of {image.width} x {image.height} pixels" for image in row.images]
    for video in row.videos:
        frames = video.read(counter.image_processor).frames
        words.append(f"a video of {len(frames)} frames of {frames[0].width} x {frames[0].height}")
    return RowSize(
        text_tokens=prompt_tokens - image_tokens,
        image_tokens=image_tokens,
        frames=max(int(grids[:, 0].sum()), 1),
        answer_tokens=max((len(completion.ids) for completion in encoded), default=None),
        longest=max(longest, default=prompt_tokens),
        where=row.where,
        media=", ".join(words[:3]) + (", ..." if len(words) > 3 else ""),
        has_videos=bool(row.videos),
    )


def row_sizes(
    rows: Dataset,
    indices: Iterable[int],
    processor: Processor,
    answers: Sequence[str] = (),
    unreadable: list[str] | None = None,
) -> Iterator[RowSize]:
    """Yield the sizes of the rows with the given indices.

    Args:
        unreadable: list that collects the errors of unreadable rows; None raises them.
    """
    for index in indices:
        try:
            if isinstance(rows, FileDataset):
                yield rows.measure(index, processor, answers)
            else:
                yield replace(row_size(rows[index], processor, answers), index=index)
        except ValueError as error:
            if unreadable is None:
                raise
            unreadable.append(str(error))


def long_rows(
    rows: Dataset, processor: Processor, limit: int, skip_unreadable: bool = False, answers: Sequence[str] = ()
) -> Iterator[RowSize]:
    """Yield the size of each row whose prompt and longest answer exceed `limit` tokens.

    If skip_unreadable is False, an unreadable row raises ValueError.
    """
    if not isinstance(rows, FileDataset):
        return  # the rows of data.task are all similar
    counter = patch_counter(processor)
    indices = []
    for index, facts in enumerate(rows.facts):
        # a token has at least one byte, so a text has at most as many tokens as bytes
        if facts.bytes_of(answers) + facts.image_tokens(counter) + MARKUP > limit:
            indices.append(index)
    sizes = row_sizes(rows, indices, processor, answers, [] if skip_unreadable else None)
    yield from (size for size in sizes if size.longest > limit)


def heaviest_rows(rows: Dataset, processor: Processor, answers: Sequence[str] = ()) -> list[RowSize]:
    """Return the sizes of a dataset's largest rows, the largest first, without unreadable rows."""
    indices = range(min(len(rows), SAMPLE))  # the rows of data.task are all similar
    if isinstance(rows, FileDataset):
        counter = patch_counter(processor)
        weights = {}
        for index, facts in enumerate(rows.facts):
            weight = 2 * facts.image_tokens(counter) + facts.bytes_of(answers) / TOKEN_BYTES
            if weight == math.inf:
                weight = max((size.weight for size in row_sizes(rows, [index], processor, answers, [])), default=0)
            weights[index] = weight
        indices = sorted(weights, key=lambda index: -weights[index])[:SAMPLE]
    sizes = row_sizes(rows, indices, processor, answers, unreadable=[])
    return sorted(sizes, key=lambda size: -size.weight)


def summary(rows: Dataset, processor: Processor, skip_unreadable: bool = False, answers: Sequence[str] = ()) -> str:
    """Describe a dataset, such as "1204 (1200 with 1 image, 4 with no image); prompts of 212 to 580 tokens".

    If skip_unreadable is False, an unreadable row raises ValueError.
    """
    indices = sorted({len(rows) * i // SAMPLE for i in range(SAMPLE)})
    if isinstance(rows, FileDataset):
        text = rows.describe()
        indices = [index for index in indices if not rows.facts[index].num_videos]
    else:  # the rows of data.task are all similar
        text = count_words({(len(rows[0].images), 0): len(rows)}, len(rows))
    unreadable: list[str] | None = [] if skip_unreadable else None
    lengths = sorted(size.prompt_tokens for size in row_sizes(rows, indices, processor, answers, unreadable))
    if lengths:
        text += f"; prompts of {' to '.join(map(str, sorted({lengths[0], lengths[-1]})))} tokens"
        if len(lengths) < len(rows):
            text += f" ({len(lengths)} were measured)"
    if unreadable:
        text += (
            f"; {len(unreadable)} of {len(indices)} measured rows are unreadable and will be "
            f"skipped (data.skip_unreadable), for example {unreadable[0]}"
        )
    return text


def describe_spelled(rows: Dataset, structure: Collection[str]) -> str | None:
    """Return a note about rows whose texts spell a control token, or None if there are none.

    Args:
        structure: names of the control tokens that only a chat template may write.
    """
    if not isinstance(rows, FileDataset):
        return None
    spelled = [names for facts in rows.facts if (names := [name for name in facts.spelled if name in structure])]
    if not spelled:
        return None
    names = sorted({name for names in spelled for name in names})
    return (
        f"{len(spelled)} of {len(rows)} rows spell {', '.join(names)} in their texts. These names are encoded as "
        "ordinary letters, because only the chat template writes the tokens of a conversation; remove them from the "
        "texts"
    )


def count_words(media_counts: Mapping[tuple[int, int], int], num_rows: int) -> str:
    """Describe the numbers of images and videos per row, such as "1204 (1200 with 1 image, 4 with no image)"."""

    listed = []
    for counts, number in media_counts.items():
        kinds = zip(counts, ("image", "video"), strict=True)
        media = " and ".join(counted(n, kind) for n, kind in kinds if n)
        listed.append((media or "no image", number))
    text = ", ".join(f"{number} with {media}" for media, number in sorted(listed))
    return f"{num_rows} ({text})" if len(media_counts) > 1 else text
