"""Images and videos of a row: where they come from, what they ask for, which part shows them."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import join
from pathlib import Path

import PIL.Image

from minivlmrl.config.parsing import naming
from minivlmrl.data.fetch import fetch_image, open_source
from minivlmrl.data.media_options import SAMPLING_OPTIONS, check_options
from minivlmrl.data.messages import (
    add_placeholders,
    check_counts,
    check_total,
    content_parts,
    part_kind,
    shown_parts_of,
)
from minivlmrl.data.video import VideoFile, load_video

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


@dataclass
class Media:
    """One image or video that a row names."""

    kind: str  # "image" or "video"
    # path, data URI or bytes; of a video also a list of those of its frames
    source: str | bytes | list[str]
    options: dict[str, float]  # see sizes.OPTIONS


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
        with naming(f"column {name!r}"):
            row_media[kind] = [_media(entry, kind) for entry in entries]
    return row_media


def place_media(
    turns: list[dict], row_media: dict[str, list[Media]], media_options: dict[str, dict]
) -> tuple[list[dict], list[Media]]:
    """Give a prompt a part for each image and video; return also what parts show, in order.

    They go to the parts of their kind that do not say themselves what they show, else where the
    text says <image> or <video>, else before the text of the first user turn.

    Args:
        row_media: by kind, the media that come with the row. The options of a part win over those
            listed here.
        media_options: by kind, those of every image without its own, and those that a video does
            not say itself; which frames to take only of files without nframes.
    """
    media_counts = {kind: len(entries) for kind, entries in row_media.items()}
    if not shown_parts_of(turns):  # else <image> is text
        turns = add_placeholders(turns, media_counts)
    kinds = []  # of the parts that do not say what they show
    for part in shown_parts_of(turns):
        kind = part_kind(part)
        if not _sources(part, kind):
            kinds.append(kind)
    check_counts(kinds, media_counts)
    next_media = {kind: iter(entries) for kind, entries in row_media.items()}
    messages = []
    media = []
    for turn_number, turn in enumerate(turns):
        parts = []
        for part in content_parts(turn):
            kind = part_kind(part)
            if kind == "text":
                parts.append(part)
                continue
            with naming(f"message {turn_number}"):
                item = _media(part, kind) if _sources(part, kind) else next(next_media[kind])
                options = item.options | _options(part, kind)
            options = _with_common(item, options, media_options.get(kind, {}))
            media.append(Media(kind, item.source, options))
            parts.append({"type": kind, **_without(options)})
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


class Decoded(Sequence):
    """The images of a row, each decoded whenever it is looked at, to save memory."""

    def __init__(self, decoders: list[Callable]):
        self.decoders = decoders
        self.sizes = {}  # width and height in pixels of the images that have been looked at

    def __len__(self) -> int:
        return len(self.decoders)

    def __getitem__(self, index: int) -> PIL.Image.Image:
        image = self.decoders[index]()
        self.sizes[index] = image.size
        return image


def load_media(media: list[Media], folder: Path) -> tuple[Sequence, Sequence]:
    """Find the images and videos of a row."""
    images = []
    videos = []
    for item in media:
        if item.kind == "image":
            images.append(partial(fetch_image, item.source, folder))
        else:
            sampling = {n: value for n, value in item.options.items() if n in SAMPLING_OPTIONS}
            videos.append(VideoFile(partial(load_video, item.source, folder, **sampling)))
    return images and Decoded(images), videos


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


def _sources(part: dict, kind: str) -> list:
    """List what an entry or a part says itself that it shows."""
    return [part[name] for name in SOURCES[kind] if part.get(name) is not None]


def _media(entry: object, kind: str) -> Media:
    """Read an entry of a column, or a part: its source and its options."""
    if isinstance(entry, str):
        is_base64 = kind == "image" and re.match(BASE64, entry)  # as in MMBench's files
        return Media(kind, f"data:;base64,{entry}" if is_base64 else entry, {})
    if not isinstance(entry, dict) or "bytes" in entry:
        entry = {kind: entry}
    sources = _sources(entry, kind)
    if len(sources) > 1:
        raise ValueError(f"it has {kind!r} and '{kind}_url'; give one of them")
    source = sources[0] if sources else None
    if isinstance(source, dict):
        source = _source_in(source)
    frames = source if kind == "video" and isinstance(source, list) else [source]
    if not frames or not all(isinstance(frame, str | bytes) for frame in frames):
        frame_list = ", or a list of those of its frames" if kind == "video" else ""
        raise ValueError(f"each {kind} must be a path or data URI{frame_list}, not {source!r:.60}")
    return Media(kind, source, _options(entry, kind))


def _source_in(source: dict) -> object:
    """Read {"bytes": ..., "path": ...} of Hugging Face, or {"url": ...} of an image_url."""
    content = source.get("bytes")
    if content is not None:
        return f"data:;base64,{content}" if isinstance(content, str) else content  # text: of JSON
    return source.get("path" if "bytes" in source else "url")


def _options(entry: dict, kind: str) -> dict[str, float]:
    return check_options(kind, _without(entry, ("type", "text", "index", *SOURCES[kind])))


def _without(options: dict, names: Sequence[str] = SAMPLING_OPTIONS) -> dict:
    return {name: value for name, value in options.items() if name not in names}
