"""Images and videos of a row: where their bytes are, what they ask for, which part shows them."""

import base64
import contextlib
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import join
from pathlib import Path
from urllib.request import url2pathname

import PIL.Image
from PIL.Image import Image

from minivlmrl.config.options import ImageOptions, RowOptions, VideoOptions
from minivlmrl.config.parsing import check_values, error_context
from minivlmrl.config.types import Plain
from minivlmrl.data.image import load_image
from minivlmrl.data.messages import (
    add_placeholders,
    check_counts,
    check_total,
    content_parts,
    part_kind,
    shown_parts_of,
)

# what people call the column of an image or a video, and what such a column says
MEDIA_NAME = re.compile(
    r"(img|image|pic|picture|photo|video|media)s?(_?(path|file|name|url|uri|src|bytes)s?)*"
    r"|file_?names?"
)
BASE64 = r"(/9j/|iVBORw0KGgo|UklGR|R0lGOD)[\w+/=\s]{32}"  # of a JPEG, PNG, WebP or GIF
FILE_NAME = r"\S{1,400}\.(png|jpe?g|webp|bmp|gif|tiff?)\Z"
PICTURE = re.compile(f"data:image/|{BASE64}|{FILE_NAME}", re.IGNORECASE)
COLUMNS = {"image": "image", "images": "image", "video": "video", "videos": "video"}
# keys of a part that say what it shows
SOURCES = {"image": ("image", "image_url"), "video": ("video", "video_url")}
OPTIONS = {"image": ImageOptions, "video": VideoOptions}
# options that choose frames of a video file
SAMPLING_OPTIONS = ("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end")
# Pillow would run Ghostscript for EPS, open any file inside IPTC, ask Windows for WMF
PROGRAMS = "EPS", "IPTC", "WMF"
# Pillow's own limit, half a GiB as RGB: a file of a few kilobytes could claim any size
MAX_IMAGE_PIXELS = 178_956_970

Source = str | Path | bytes

# Pillow warns from half of our limit on. Set once, because threads share one list of filters.
warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)


def fetch_image(source: Source, folder: str | Path | None = None) -> Image:
    """Read an image as image.load_image does (ValueError: names the source and what is wrong).

    folder: where a relative path starts.
    """
    with open_image(source, folder) as image:
        return load_image(image)


@contextlib.contextmanager
def open_image(source: Source, folder: str | Path | None = None) -> Iterator[Image]:
    """Open an image; every error inside the block becomes a ValueError."""
    name, file = open_source(source, folder)
    try:
        with PIL.Image.open(file) as image:
            if image.width * image.height > MAX_IMAGE_PIXELS:
                raise ValueError(
                    f"{image.width} x {image.height} pixels are over {MAX_IMAGE_PIXELS}; "
                    "scale it down"
                )
            if image.format in PROGRAMS:
                raise ValueError(f"{image.format} files can hold programs; convert it to PNG")
            yield image
    except Exception as error:  # Pillow's decoders raise anything: struct.error, IndexError, ...
        error_text = getattr(error, "strerror", None) or error
        if isinstance(error, PIL.UnidentifiedImageError):
            error_text = "none of the formats that Pillow knows"
        raise ValueError(f"{name}: cannot be read as an image ({error_text})") from error


def open_source(source: Source, folder: str | Path | None) -> tuple[str, Path | io.BytesIO]:
    """Find a path, file:// URL, data URI or bytes: its name; the path or the bytes."""
    if isinstance(source, bytes | bytearray):
        return f"{len(source)} bytes", io.BytesIO(source)
    if not isinstance(source, str | Path):
        raise ValueError(f"a path, data URI or bytes is needed, not {type(source).__name__}")
    text = str(source)
    name = text if len(text) <= 200 else f"{text[:60]}... ({len(text)} characters)"
    with error_context(name):
        if text.startswith("data:"):
            header, comma, data = text.partition(",")
            if not comma or not header.endswith(";base64"):
                raise ValueError("a data URI must look like data:image/png;base64,...")
            with error_context(
                "not base64"
            ):  # strictly: urllib's handler skips letters that are none
                return name, io.BytesIO(base64.b64decode("".join(data.split()), validate=True))
        if text.startswith(("http://", "https://")):
            raise ValueError(
                "download it, or a run sees another picture tomorrow: "
                "python recipes/download.py ROWS.jsonl does so once"
            )
    if text.startswith("file://"):
        text = url2pathname(text.removeprefix("file://").removeprefix("localhost"))
    path = Path(folder or "", text)
    # reading from a pipe or device might never end
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{path}: a pipe or device; give a file")
    return str(path) if len(str(path)) <= 400 else name, path


@dataclass
class Media:
    """One image or video that a row names."""

    kind: str  # "image" or "video"
    # path, data URI or bytes; of a video also a list of those of its frames
    source: str | bytes | list[str]
    options: dict[str, float]  # see ImageOptions and VideoOptions

    @property
    def image_source(self) -> str | bytes:
        """Return where the bytes of an image are."""
        assert not isinstance(self.source, list), "only a video is a list of frames"
        return self.source


def read_media(columns: dict) -> dict[str, list[Media]]:
    """List a row's media by kind, of its columns `image`, `images`, `video` and `videos`.

    Each entry is a source, or one with options: {"image": "cat.jpg", "max_pixels": 200704}.
    """
    row_media = {}
    for name, kind in COLUMNS.items():
        entries = columns.get(name)
        if entries is None:
            continue
        if kind in row_media:
            raise ValueError(f"give column {kind!r} or {name!r}, not both")
        if name == "video" or not isinstance(entries, list):
            entries = [entries]  # a list under `video` is one of frames
        with error_context(f"column {name!r}"):
            row_media[kind] = [_media(entry, kind) for entry in entries]
    return row_media


def place_media(
    turns: list[dict], row_media: dict[str, list[Media]], options: RowOptions
) -> tuple[list[dict], list[Media]]:
    """Give a prompt a part for each image and video; return also what parts show, in order.

    They go to the parts of their kind that do not say themselves what they show, else where the
    text says <image> or <video>, else before the text of the first user turn.

    Args:
        row_media: by kind, the media that come with the row. The options of a part win over those
            listed here.
        options: of all rows: those of every image without its own, and those that a video does not
            say itself; which frames to take only of files without nframes.
    """
    common_options = media_options(options)
    media_counts = {kind: len(entries) for kind, entries in row_media.items()}
    if not shown_parts_of(turns):  # else <image> is text
        turns = add_placeholders(turns, media_counts)
    kinds = []  # of the parts that do not say what they show
    for part in shown_parts_of(turns):
        kind = _checked_kind(part)
        if not _sources(part, kind):
            kinds.append(kind)
    check_counts(kinds, media_counts)
    next_media = {kind: iter(entries) for kind, entries in row_media.items()}
    messages = []
    media = []
    for turn_number, turn in enumerate(turns):
        parts = []
        for part in content_parts(turn):
            kind = _checked_kind(part)
            if kind == "text":
                parts.append(part)
                continue
            with error_context(f"message {turn_number}"):
                item = _media(part, kind) if _sources(part, kind) else next(next_media[kind])
                own_options = item.options | _options(part, kind)
            all_options = _with_common(item, own_options, common_options[kind])
            media.append(Media(kind, item.source, all_options))
            parts.append({"type": kind, **_without(all_options)})
        is_text = isinstance(turn.get("content"), str)
        messages.append(turn if is_text else {**turn, "content": parts})
    check_total(len(media))
    return messages, media


def _with_common(item: Media, options: dict, common_options: dict) -> dict:
    """Add the common options: all to an image without its own, to a video those it does not say."""
    if item.kind == "image":
        return options or common_options
    if isinstance(item.source, list) or "nframes" in options:  # says which frames to take
        common_options = _without(common_options)
    return common_options | options


def media_options(options: RowOptions) -> dict[str, dict]:
    """Return the options of all images and of all videos; options in a row take precedence."""
    return {kind: check_options(kind, getattr(options, kind)) for kind in ("image", "video")}


def check_options(kind: str, options: Mapping[str, float | None]) -> dict[str, Plain]:
    """Return the options of an image or video that are not None (ValueError names a wrong one)."""
    return check_values(OPTIONS[kind], options, f"options of the {kind}")


def check_unread(columns: dict):
    """Refuse a row with a column like an image that is not read: it would be trained blind."""
    for name, value in columns.items():
        first = value[0] if isinstance(value, list) and value else value
        if not isinstance(first, str | dict) or not first:
            continue
        is_picture = isinstance(first, str) and name != "solution" and PICTURE.match(first)
        if MEDIA_NAME.fullmatch(name.lower()) or is_picture:
            kind = "video" if "video" in name.lower() else "image"
            raise ValueError(
                f"column {name!r} looks like an {kind} and is not read; did you mean {kind!r}? "
                f"data.columns: {{{name}: {kind}}} renames it; or leave it out"
            )


def files_of(media: list[Media], folder: str) -> Iterator[tuple[str | bytes, str]]:
    """Yield the sources of a row's images and videos and their paths, "" of bytes."""
    for item in media:
        for source in item.source if isinstance(item.source, list) else [item.source]:
            if isinstance(source, bytes) or source.startswith("data:"):
                yield source, ""
            elif ":" in source:  # a URL
                yield source, str(open_source(source, folder)[1])
            else:
                yield source, join(folder, source)


def _checked_kind(part: dict) -> str:
    """Return the kind of a part of messages that have been checked: image, video or text."""
    kind = part_kind(part)
    assert kind is not None, "check_messages refuses such a part"
    return kind


def _sources(part: dict, kind: str) -> list:
    """List what an entry or a part says itself that it shows."""
    return [part[name] for name in SOURCES[kind] if part.get(name) is not None]


def _media(entry: Plain, kind: str) -> Media:
    """Read an entry of a column, or a part: its source and its options."""
    if isinstance(entry, str):
        is_base64 = kind == "image" and re.match(BASE64, entry)  # as in MMBench's files
        return Media(kind, f"data:;base64,{entry}" if is_base64 else entry, {})
    if not isinstance(entry, dict) or "bytes" in entry:
        entry = {kind: entry}
    sources = _sources(entry, kind)
    if len(sources) > 1:
        raise ValueError(f"it has {kind!r} and '{kind}_url'; give one of them")
    source: Plain = sources[0] if sources else None
    if isinstance(source, dict):
        source = _source_in(source)
    frames = source if kind == "video" and isinstance(source, list) else [source]
    if not frames or not all(isinstance(frame, str | bytes) for frame in frames):
        frame_list = ", or a list of those of its frames" if kind == "video" else ""
        raise ValueError(f"each {kind} must be a path or data URI{frame_list}, not {source!r:.60}")
    return Media(kind, source, _options(entry, kind))


def _source_in(source: dict) -> Plain:
    """Read {"bytes": ..., "path": ...} of Hugging Face, or {"url": ...} of an image_url."""
    content = source.get("bytes")
    if content is not None:
        return f"data:;base64,{content}" if isinstance(content, str) else content  # text: of JSON
    return source.get("path" if "bytes" in source else "url")


def _options(entry: dict, kind: str) -> dict[str, float]:
    return check_options(kind, _without(entry, ("type", "text", "index", *SOURCES[kind])))


def _without(options: dict, names: Sequence[str] = SAMPLING_OPTIONS) -> dict:
    return {name: value for name, value in options.items() if name not in names}
