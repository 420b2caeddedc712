"""Images and videos of a row: where they come from, what they ask for, which part shows them."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from os.path import join
from pathlib import Path

import PIL.Image

from minivlmrl.chat import content_parts, part_kind
from minivlmrl.data.fetch import fetch_image, open_source
from minivlmrl.data.sizes import OPTIONS, SAMPLING_OPTIONS, check_options
from minivlmrl.data.video import VideoFile, load_video
from minivlmrl.hub.recipe_values import naming
from minivlmrl.rows import check_counts

# what people call the column of an image or a video, and what such a column says
UNREAD = r"(img|image|pic|picture|photo|video|media)s?(_?(path|file|name|url|uri|src|bytes)s?)*"
UNREAD = re.compile(rf"{UNREAD}|file_?names?")
BASE64 = r"(/9j/|iVBORw0KGgo|UklGR|R0lGOD)[\w+/=\s]{32}"  # of a JPEG, PNG, WebP or GIF
NAMED = r"\S{1,400}\.(png|jpe?g|webp|bmp|gif|tiff?)\Z"
PICTURE = re.compile(f"data:image/|{BASE64}|{NAMED}", re.IGNORECASE)
COLUMNS = {"image": "image", "images": "image", "video": "video", "videos": "video"}
# keys of a part that say what it shows
SOURCES = {"image": ("image", "image_url"), "video": ("video", "video_url")}
MARK = re.compile("<(image|video)>")  # in a prompt's text it is where one goes
MAX_MEDIA = 1000  # of a row


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
    media = {}
    for name, kind in COLUMNS.items():
        if (listed := columns.get(name)) is None:
            continue
        if kind in media:
            raise ValueError(f"give column {kind!r} or {name!r}, not both")
        if name == "video" or not isinstance(listed, list):  # a list under `video` is one of frames
            listed = [listed]
        with naming(f"column {name!r}"):
            media[kind] = [_media(entry, kind) for entry in listed]
    return media


def place_media(
    turns: list[dict], listed: dict[str, list[Media]], media_options: dict[str, dict]
) -> tuple[list[dict], list[Media]]:
    """Give a prompt a part for each image and video; return also what parts show, in order.

    They go to the parts of their kind that do not say themselves what they show, else where the
    text says <image> or <video>, else before the text of the first user turn.

    Args:
        listed: by kind, the media that come with the row. The options of a part win over those
            listed here.
        media_options: by kind, those of every image without its own, and those that a video does
            not say itself; which frames to take only of files without nframes.
    """
    contents = [content_parts(turn) for turn in turns]
    marked = not _shown(contents)  # else <image> is text
    if marked:
        contents = [_cut_at_marks(parts) for parts in contents]
        if not _shown(contents) and any(listed.values()):
            pairs = zip(turns, contents, strict=True)  # without a user's turn the counts differ
            first = next((parts for turn, parts in pairs if turn["role"] == "user"), [])
            first[:0] = [{"type": kind} for kind in OPTIONS for _ in listed.get(kind, ())]
    waiting = {kind: iter(entries) for kind, entries in listed.items()}
    media = []
    check_counts([kind for kind, part in _shown(contents) if not _sources(part, kind)], listed)

    def show(part: dict) -> dict:
        if (kind := part_kind(part)) == "text":
            return part
        one = _media(part, kind) if _sources(part, kind) else next(waiting[kind])
        options = one.options | _options(part, kind)
        common = media_options.get(kind, {})
        if kind == "image":
            options = options or common
        else:
            whole = isinstance(one.source, list) or "nframes" in options
            options = (_without(common) if whole else common) | options
        media.append(Media(kind, one.source, options))
        return {"type": kind, **_without(options)}

    messages = []
    for number, (turn, parts) in enumerate(zip(turns, contents, strict=True)):
        with naming(f"message {number}"):
            stays = isinstance(turn.get("content"), str) and not marked
            messages.append(turn if stays else {**turn, "content": list(map(show, parts))})
    if len(media) > MAX_MEDIA:
        raise ValueError(f"{len(media)} images and videos are over {MAX_MEDIA}; split the row")
    return messages, media


def _shown(contents: list[list[dict]]) -> list[tuple[str, dict]]:
    """List the parts of a conversation that are not text, each with its kind."""
    parts = [(part_kind(part), part) for parts in contents for part in parts]
    return [(kind, part) for kind, part in parts if kind != "text"]


def _cut_at_marks(parts: list[dict]) -> list[dict]:
    """Cut texts at <image> and <video>: "<image>What?" is text, an image, text."""
    cut = []
    for part in parts:
        for number, piece in enumerate(MARK.split(part["text"])):  # text, kind, text, ..., text
            cut.append({"type": piece} if number % 2 else {"type": "text", "text": piece})
    return cut


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
    for one in media:
        if one.kind == "image":
            images.append(partial(fetch_image, open_source(one.source, folder)))
        else:
            sampling = {n: value for n, value in one.options.items() if n in SAMPLING_OPTIONS}
            load = partial(load_video, one.source, folder, **sampling)
            videos.append(VideoFile(load))
    return images and Decoded(images), videos


def check_unread(columns: dict):
    """Refuse a row with a column like an image that is not read: it would be trained blind."""
    for name, value in columns.items():
        first = value[0] if isinstance(value, list) and value else value
        named = UNREAD.fullmatch(name.lower()) and isinstance(first, str | dict) and first
        if named or (isinstance(first, str) and name != "solution" and PICTURE.match(first)):
            kind = "video" if "video" in name.lower() else "image"
            what = f"column {name!r} looks like an {kind} and is not read; did you mean {kind!r}?"
            raise ValueError(f"{what} data.columns: {{{name}: {kind}}} renames it; or leave it out")


def files_of(media: list[Media], folder: str) -> Iterator[tuple[str | bytes, str]]:
    """Yield the sources of a row's images and videos and their paths, "" of bytes."""
    sources = (one.source if isinstance(one.source, list) else [one.source] for one in media)
    for source in itertools.chain.from_iterable(sources):
        if isinstance(source, bytes) or source.startswith("data:"):
            yield source, ""
        else:
            url = ":" in source
            yield source, str(open_source(source, folder)[1]) if url else join(folder, source)


def _sources(part: dict, kind: str) -> list:
    """List what an entry or a part says itself that it shows."""
    return [part[name] for name in SOURCES[kind] if part.get(name) is not None]


def _media(entry: object, kind: str) -> Media:
    if isinstance(entry, str):
        bare = kind == "image" and re.match(BASE64, entry)  # as in MMBench's files
        return Media(kind, f"data:;base64,{entry}" if bare else entry, {})
    if not isinstance(entry, dict) or "bytes" in entry:
        entry = {kind: entry}
    source, *more = _sources(entry, kind) or [None]
    if more:
        raise ValueError(f"it has {kind!r} and '{kind}_url'; give one of them")
    # Hugging Face's; in JSON base64
    if isinstance(source, dict) and (content := source.get("bytes")) is not None:
        source = f"data:;base64,{content}" if isinstance(content, str) else content
    elif isinstance(source, dict):  # {"image_url": {"url": ...}} or {"bytes": None, "path": ...}
        source = source.get("path" if "bytes" in source else "url")
    frames = source if kind == "video" and isinstance(source, list) else [source]
    if not frames or not all(isinstance(frame, str | bytes) for frame in frames):
        also = ", or a list of those of its frames" if kind == "video" else ""
        raise ValueError(f"each {kind} must be a path or data URI{also}, not {source!r:.60}")
    return Media(kind, source, _options(entry, kind))


def _options(entry: dict, kind: str) -> dict[str, float]:
    return check_options(kind, _without(entry, ("type", "text", "index", *SOURCES[kind])))


def _without(options: dict, names: Sequence[str] = SAMPLING_OPTIONS) -> dict:
    return {name: value for name, value in options.items() if name not in names}
