"""Read a row's images and videos, and assign them to message parts."""

import base64
import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from minivlmrl.errors import UserError, error_context, pluralize, truncate
from minivlmrl.json_files import check_downloaded

# {"image" or "video": keys for the file in a message part, such as "image_url" or "path"}
SOURCES = {kind: (kind, f"{kind}_url", "url", "path") for kind in KINDS}
SAMPLING_OPTIONS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")
# unsafe formats: EPS runs Ghostscript, IPTC opens other files, WMF calls Windows functions
PROGRAMS = "EPS", "IPTC", "WMF"

EMPTY = (None, "")  # values that mean no image or video

MAX_IMAGE_PIXELS = 178_956_970  # limit for a video frame, equal to Pillow's limit for an image
Source = str | Path | bytes


def fetch_image(source: Source, folder: str | Path | None = None) -> Image:
    """Load an image as RGB.

    Args:
        source: path, file:// URL, data URI or bytes.
        folder: base folder for relative paths.
    Raises:
        UserError: the image is unreadable.
    """
    with open_image(source, folder) as image:
        return load_image(image)


@contextlib.contextmanager
def open_image(source: Source, folder: str | Path | None = None) -> Iterator[Image]:
    """Open an image; exceptions in the `with` block become UserError."""
    name, file = open_source(source, folder)
    try:
        # pass a stream: if given a path, Pillow 13 swaps the width and height of a rotated grayscale TIFF
        with file.open("rb") if isinstance(file, Path) else file as stream, PIL.Image.open(stream) as image:
            if image.format in PROGRAMS:
                raise UserError(
                    f"the format {image.format} is not allowed, because such files can run other "
                    "programs or open other files; convert the image to PNG"
                )
            yield image
    except Exception as error:  # Pillow's decoders raise many exceptions, such as struct.error and IndexError
        error_text = getattr(error, "strerror", None) or error
        if isinstance(error, PIL.UnidentifiedImageError):
            if isinstance(file, Path):
                check_downloaded(file)
            error_text = "Pillow does not recognize its format"
        raise UserError(f"{name}: the image cannot be read ({error_text})") from error


def open_source(source: Source, folder: str | Path | None) -> tuple[str, Path | io.BytesIO]:
    """Return (name for error messages, path) for an image or video.

    For bytes and data URIs, return a byte stream instead of a path.
    """
    if isinstance(source, bytes | bytearray):
        return pluralize(len(source), "byte"), io.BytesIO(source)
    text = str(source)
    name = text if len(text) <= 200 else f"{text[:60]}... ({len(text)} characters)"
    if text.startswith("data:"):
        # urllib would ignore invalid base64 characters
        with error_context(f"{name}: the data is not valid base64"):
            return name, io.BytesIO(base64.b64decode("".join(text.partition(",")[2].split()), validate=True))
    if text.startswith(("http://", "https://")):
        raise UserError(
            f"{name}: remote files are not supported, because they can change; download them once with "
            "`python recipes/download.py ROWS.jsonl`"
        )
    if text.startswith("file://"):
        text = url2pathname(text.removeprefix("file://").removeprefix("localhost"))
    path = Path(folder or "", text)
    # reject pipes and devices, which could be endless
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(f"{path} is a pipe or a device; use a regular file instead")
    return str(path) if len(str(path)) <= 400 else name, path


@dataclass
class Media:
    """An image or video in a row, with options such as max_pixels."""

    kind: str
    # path, data URI or bytes; list of frames for some videos
    source: str | bytes | list[str]
    options: dict[str, float]

    @property
    def sources(self) -> Sequence[str | bytes]:
        """List of files: one image or video file, or one file per video frame."""
        return self.source if isinstance(self.source, list) else [self.source]


def read_media(columns: dict) -> dict[str, list[Media]]:
    """Read a row's media from the columns `image`, `images`, `video` and `videos`.

    An entry is a path or other source, or a dict with options: {"image": "cat.jpg", "max_pixels": 200704}.

    Returns:
        {"image": images in column order, "video": videos}. A row without videos has no key "video".
    """
    row_media = {}
    for name, kind in MEDIA.items():
        entries = columns.get(name)
        if entries in EMPTY or (isinstance(entries, list) and all(entry in EMPTY for entry in entries)):
            continue
        if kind in row_media:
            raise UserError(f"the row has both columns {kind!r} and {name!r}; use only one of them")
        if name == "video" or not isinstance(entries, list):
            entries = [entries]  # a list in column `video` contains the frames of one video
        with error_context(f"column {name!r}"):
            row_media[kind] = [_media(entry, kind) for entry in entries]
    return row_media


def place_media(
    turns: list[dict], row_media: dict[str, list[Media]], options: RowOptions
) -> tuple[list[dict], list[Media]]:
    """Assign a row's images and videos to message parts.

    Message parts {"type": "image"} without a file get the images in the row's columns, in order. If no message has
    image parts, images replace <image> tags in text, or precede the first user text. The same rules apply to videos and
    <video> tags.

    Args:
        turns: prompt messages, followed by answer messages if they contain images.
        row_media: {"image" or "video": media from columns}. Options such as max_pixels in a message part override
            those in a column.
        options: recipe options for images and videos.
    Returns:
        Messages with one part per image and video, and the media in order.
    """
    counts = {kind: len(entries) for kind, entries in row_media.items()}
    if not shown_parts_of(turns):  # if messages have image parts, <image> in their text has no special meaning
        turns = add_placeholders(turns, counts)
    kinds = [(part, part_kind(part)) for part in shown_parts_of(turns)]
    check_counts([kind for part, kind in kinds if kind and not source_keys(part, kind)], counts)
    next_media = {kind: iter(row_media.get(kind, ())) for kind in KINDS}
    messages = []
    media = []
    for number, turn in enumerate(turns):
        parts = []
        for part in content_parts(turn):
            kind = part_kind(part)
            if kind in KINDS:
                with error_context(f"message {number}"):
                    item = _media(part, kind, next_media[kind])
                item.options = _with_common(item, getattr(options, kind))
                media.append(item)
                sizes = {name: item.options[name] for name in item.options if name not in SAMPLING_OPTIONS}
                part = {"type": kind, **sizes}
            parts.append(part)
        messages.append(turn if isinstance(turn.get("content"), str) else {**turn, "content": parts})
    return messages, media


def _with_common(item: Media, common_options: dict) -> dict:
    """Return an image's options from its row, or from the recipe if the row has none.

    Video options from row and recipe are merged.
    """
    if item.kind == "image":
        return item.options or common_options
    # if a data row sets nframes, ignore all frame sampling options in the recipe
    ignored = SAMPLING_OPTIONS if "nframes" in item.options else ()
    if isinstance(item.source, list):  # a list of frames is used as a whole: only fps matters
        ignored = {*SAMPLING_OPTIONS} - {"fps"}
    return {name: common_options[name] for name in common_options if name not in ignored} | item.options


def files_of(media: list[Media], folder: str) -> Iterator[tuple[str | bytes, str]]:
    """Yield (source, path) per image, video and frame, with path "" for bytes and data URIs."""
    for item in media:
        for source in item.sources:
            if isinstance(source, bytes) or source.startswith("data:"):
                yield source, ""
            elif ":" in source:
                yield source, str(open_source(source, folder)[1])
            else:
                yield source, join(folder, source)


def source_keys(part: dict, kind: str) -> list[str]:
    """Return keys of a message part for an image or video file, such as "image_url"."""
    return [name for name in SOURCES[kind] if part.get(name) is not None]


def _media(entry: Plain, kind: str, next_media: Iterator[Media] | None = None) -> Media:
    if isinstance(entry, str) and kind == "image" and re.match(BASE64, entry):
        entry = f"data:;base64,{entry}"  # MMBench images are base64 without a data URI header
    if not isinstance(entry, dict) or "bytes" in entry:
        entry = {kind: entry}
    names = source_keys(entry, kind)
    if len(names) > 1:
        raise UserError(f"the {kind} has both {names[0]!r} and {names[1]!r}; use only one of them")
    known = ("type", "text", "index", *SOURCES[kind])
    options = check_options(
        kind, {name: value for name, value in entry.items() if name not in known and value is not None}
    )
    if not names and next_media is not None:
        listed = next(next_media)  # check_counts ensures that next() finds a file
        return Media(kind, listed.source, listed.options | options)
    source: Plain = entry[names[0]] if names else None
    if isinstance(source, dict):  # dict such as {"bytes": ..., "path": ...} (Hugging Face) or {"url": ...} (OpenAI)
        check_keys(source, ("bytes", "path", "url", "detail"), "the source")
        content = source.get("bytes")
        if content is None:
            source = source.get("path" if "bytes" in source else "url")
        else:  # JSON files contain bytes as base64
            source = f"data:;base64,{content}" if isinstance(content, str) else content
    frames = source if kind == "video" and isinstance(source, list) else [source]
    if not frames or not all(isinstance(frame, str | bytes) for frame in frames):
        frame_list = ", or a list with a path or data URI per frame" if kind == "video" else ""
        raise UserError(f"each {kind} must be a path or data URI{frame_list}, but found {truncate(source, 60)}")
    return Media(kind, source, options)
