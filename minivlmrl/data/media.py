"""Read the images and videos of a row, and assign each image and video to a part of a message."""

import base64
import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import join
from pathlib import Path
from urllib.request import url2pathname

import PIL.Image
from PIL.Image import Image

from minivlmrl.config.options import RowOptions
from minivlmrl.config.types import Plain
from minivlmrl.data.columns import MEDIA
from minivlmrl.data.image import load_image
from minivlmrl.data.image_settings import check_options
from minivlmrl.data.messages import (
    BASE64,
    KINDS,
    add_placeholders,
    check_counts,
    check_keys,
    content_parts,
    part_kind,
    shown_parts_of,
)
from minivlmrl.errors import error_context, pluralize, truncate
from minivlmrl.json_files import check_downloaded

# keys of an image or video part that may name a file, such as "image_url" or "path"
SOURCES = {kind: (kind, f"{kind}_url", "url", "path", "base64", "source") for kind in KINDS}
# keys of a JSON object that describes an image file, in the formats of Hugging Face, OpenAI and Anthropic
SOURCE_KEYS = ("bytes", "path", "url", "type", "media_type", "data")
# options that select which frames of a video file are used
SAMPLING_OPTIONS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")
# Image formats that are not allowed, because reading them has side effects: Pillow runs Ghostscript for EPS, opens the
# files that an IPTC file names, and calls Windows functions for WMF.
PROGRAMS = "EPS", "IPTC", "WMF"
# Pillow's limit for the pixels of an image; without a limit, a file of a few kilobytes could fill the memory.
MAX_IMAGE_PIXELS = 178_956_970

EMPTY = (None, "")  # entries which mean that there is no image or video

Source = str | Path | bytes


def fetch_image(source: Source, folder: str | Path | None = None) -> Image:
    """Load an image from a file, a data URI or bytes, and convert the image to RGB.

    Args:
        source: path, file:// URL, data URI or bytes.
        folder: folder that a relative path starts from.

    Raises:
        ValueError: the image cannot be read. The message names the source and the reason.
    """
    with open_image(source, folder) as image:
        return load_image(image)


@contextlib.contextmanager
def open_image(source: Source, folder: str | Path | None = None) -> Iterator[Image]:
    """Context manager that opens an image, and converts every exception in its block to a ValueError."""
    name, file = open_source(source, folder)
    try:
        with PIL.Image.open(file) as image:
            if image.width * image.height > MAX_IMAGE_PIXELS:
                raise ValueError(
                    f"the image has {image.width} x {image.height} pixels, which is more than the "
                    f"limit of {MAX_IMAGE_PIXELS}; scale the image down"
                )
            if image.format in PROGRAMS:
                raise ValueError(
                    f"the format {image.format} is not allowed, because such files can run other "
                    "programs or open other files; convert the image to PNG"
                )
            yield image
    except Exception as error:  # Pillow's decoders raise struct.error, IndexError and many others
        error_text = getattr(error, "strerror", None) or error
        if isinstance(error, PIL.UnidentifiedImageError):
            if isinstance(file, Path):
                check_downloaded(file)
            error_text = "Pillow does not recognize its format"
        raise ValueError(f"{name}: the image cannot be read ({error_text})") from error


def open_source(source: Source, folder: str | Path | None) -> tuple[str, Path | io.BytesIO]:
    """Find the file of an image or video.

    Returns:
        A name for error messages, and the path. For bytes and data URIs, a byte stream replaces the path.
    """
    if isinstance(source, bytes | bytearray):
        return pluralize(len(source), "byte"), io.BytesIO(source)
    text = str(source)
    name = text if len(text) <= 200 else f"{text[:60]}... ({len(text)} characters)"
    if text.startswith("data:"):
        # base64.b64decode refuses invalid characters in a data URI, which urllib would ignore.
        with error_context(f"{name}: the data is not valid base64"):
            return name, io.BytesIO(base64.b64decode("".join(text.partition(",")[2].split()), validate=True))
    if text.startswith(("http://", "https://")):
        raise ValueError(
            f"{name}: remote files are not supported, because they can change; download them once with "
            "`python recipes/download.py ROWS.jsonl`"
        )
    if text.startswith("file://"):
        text = url2pathname(text.removeprefix("file://").removeprefix("localhost"))
    path = Path(folder or "", text)
    # a pipe or a device is not an image, and reading from it may never end
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is a pipe or a device; use a regular file instead")
    return str(path) if len(str(path)) <= 400 else name, path


@dataclass
class Media:
    """The source (such as a path) and the options of one image or video in a row."""

    kind: str  # "image" or "video"
    # path, data URI or bytes of the image or video; a video can also be a list with the source of each frame
    source: str | bytes | list[str]
    options: dict[str, float]  # see ImageOptions and VideoOptions
    column: str | None = None  # column of the row that contains the source; None if a message part contains it

    @property
    def sources(self) -> Sequence[str | bytes]:
        """Return the files of an image or video: one file, or one for each frame of a video."""
        return self.source if isinstance(self.source, list) else [self.source]


def read_media(columns: dict) -> dict[str, list[Media]]:
    """Read the images and videos in a row's columns `image`, `images`, `video` and `videos`.

    An image in a column is a path or other source, or a dict with options: {"image": "cat.jpg", "max_pixels": 200704}.

    Returns:
        {"image" or "video": media in the column's order}. A kind that has no column is left out.
    """
    row_media = {}
    for name, kind in MEDIA.items():
        entries = columns.get(name)
        # some tools write "" or [null] into the column of a row without images
        if entries in EMPTY or (isinstance(entries, list) and all(entry in EMPTY for entry in entries)):
            continue
        if kind in row_media:
            raise ValueError(f"the row has both columns {kind!r} and {name!r}; use only one of them")
        if name == "video" or not isinstance(entries, list):
            entries = [entries]  # a list in the `video` column is a list of frames
        with error_context(f"column {name!r}"):
            row_media[kind] = [replace(_media(entry, kind), column=name) for entry in entries]
    return row_media


def place_media(
    turns: list[dict], row_media: dict[str, list[Media]], options: RowOptions
) -> tuple[list[dict], list[Media]]:
    """Assign each image and video in a row to a part of a message.

    The images in a row's column are assigned, in order, to the image parts that do not name a file. If the messages
    contain only text, each image replaces a tag <image>. If the text has no tag <image>, the images come before the
    first user turn's text. Videos are assigned like images.

    Args:
        turns: the prompt's messages and, if the answer contains images, those of the answer.
        row_media: {"image" or "video": media from the row's columns}. Options in a part override those in a column.
        options: options for all rows.

    Returns:
        The messages with one part per image and video, and the media in the order of these parts.
    """
    counts = {kind: len(entries) for kind, entries in row_media.items()}
    if not shown_parts_of(turns):  # if there are image or video parts, <image> is ordinary text
        turns = add_placeholders(turns, counts)
    kinds = [(part, part_kind(part)) for part in shown_parts_of(turns)]
    check_counts([kind for part, kind in kinds if kind and not source_keys(part, kind)], counts)
    next_media = {kind: iter(row_media.get(kind, ())) for kind in KINDS}
    common_options = {"image": options.image, "video": options.video}
    messages = []
    media = []
    for number, turn in enumerate(turns):
        parts = []
        for part in content_parts(turn):
            kind = part_kind(part)
            if kind in KINDS:
                with error_context(f"message {number}"):
                    item = _media(part, kind, next_media[kind])
                if common_options[kind]:
                    item.options = _with_common(item, common_options[kind])
                media.append(item)
                sizes = {name: item.options[name] for name in item.options if name not in SAMPLING_OPTIONS}
                part = {"type": kind, **sizes}
            parts.append(part)
        messages.append(turn if isinstance(turn.get("content"), str) else {**turn, "content": parts})
    return messages, media


def _with_common(item: Media, common_options: dict) -> dict:
    """Return an image's own options, or else the common options. A video's own options are added to the common ones."""
    if item.kind == "image":
        return item.options or common_options
    # If a row gives nframes or a list of frames, the options of data.video must not select frames again.
    ignored = SAMPLING_OPTIONS if "nframes" in item.options else ()
    if isinstance(item.source, list):  # the frames are given, and fps is their frame rate
        ignored = {*SAMPLING_OPTIONS} - {"fps"}
    return {name: common_options[name] for name in common_options if name not in ignored} | item.options


def files_of(media: list[Media], folder: str) -> Iterator[tuple[str | bytes, str]]:
    """Yield (source in the row, path) of each image, video and frame; bytes and data URIs have the path ""."""
    for item in media:
        for source in item.sources:
            if isinstance(source, bytes) or source.startswith("data:"):
                yield source, ""
            elif ":" in source:  # a URL
                yield source, str(open_source(source, folder)[1])
            else:
                yield source, join(folder, source)


def source_keys(part: dict, kind: str) -> list[str]:
    """Return the keys of a message part that name the file of its image or video, such as "image_url"."""
    return [name for name in SOURCES[kind] if part.get(name) is not None]


def _media(entry: Plain, kind: str, next_media: Iterator[Media] | None = None) -> Media:
    if isinstance(entry, str) and kind == "image" and re.match(BASE64, entry):
        entry = {"base64": entry}  # MMBench's data files contain base64 text without a data URI's header
    if not isinstance(entry, dict) or "bytes" in entry:
        entry = {kind: entry}
    names = source_keys(entry, kind)
    if len(names) > 1:
        raise ValueError(f"the {kind} has both {names[0]!r} and {names[1]!r}; use only one of them")
    known = ("type", "text", "index", *SOURCES[kind])
    options = {name: value for name, value in entry.items() if name not in known and value is not None}
    if options:
        options = check_options(kind, options)
    if not names and next_media is not None:
        listed = next(next_media)  # the column's next image; check_counts has checked that it exists
        return Media(kind, listed.source, listed.options | options, listed.column)
    source: Plain = entry[names[0]] if names else None
    if names == ["base64"]:
        source = {"bytes": source}
    if isinstance(source, dict):
        source = _source_in(source)
    frames = source if kind == "video" and isinstance(source, list) else [source]
    if not frames or not all(isinstance(frame, str | bytes) for frame in frames):
        frame_list = ", or a list with a path or data URI per frame" if kind == "video" else ""
        raise ValueError(f"each {kind} must be a path or data URI{frame_list}, but found {truncate(source, 60)}")
    return Media(kind, source, options)


def _source_in(source: dict) -> Plain:
    """Return the image's source in a dict, such as Hugging Face's {"bytes", "path"} or OpenAI's {"url"}."""
    # reject OpenAI's {"detail": "low"}, because the image would not get smaller
    known = SOURCE_KEYS if source.get("detail") == "low" else (*SOURCE_KEYS, "detail")
    check_keys(source, known, "the source")
    content = source.get("bytes", source.get("data"))
    if content is not None:
        # JSON has no bytes, so the bytes of an image in a JSON file are base64 text
        return f"data:;base64,{content}" if isinstance(content, str) else content
    return source.get("path" if "bytes" in source else "url")
