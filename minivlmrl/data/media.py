"""Images and videos of a row: where each comes from, what it asks for, and the message part it belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import PIL.Image

from minivlmrl.chat import IMAGE, VIDEO, content_parts, part_kind
from minivlmrl.data.sizes import OPTIONS, SAMPLING_OPTIONS, check_options
from minivlmrl.data.video import Video, load_video
from minivlmrl.image import load_image

SOURCES = {"image": ("image", "image_url"), "video": ("video", "video_url")}  # keys of a part that say what it shows
COLUMNS_TOO = ("fps", "min_frames", "max_frames")  # options that may also be columns for rewards


@dataclass
class Media:
    """One image or video that a row names."""

    kind: str  # "image" or "video"
    source: str | list[str]  # path, URL or data URI; of a video also a list of those of its frames
    options: dict[str, float]  # see sizes.OPTIONS


def read_media(columns: dict, kind: str) -> list[Media]:
    """List the images or videos of a row's columns `image`, `images`, `video` or `videos`.

    Each entry is a source, or an object with the source and options such as {"image": "cat.jpg", "max_pixels": 200704}.
    """
    given = [name for name in (f"{kind}s", kind) if columns.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"give column {kind!r} or '{kind}s', not both")
    if not given:
        return []
    listed = columns[given[0]]
    if given == ["video"] or not isinstance(listed, list):  # a list under `video` is one of frames
        listed = [listed]
    where = f"column {given[0]!r}"
    return [_media(entry if isinstance(entry, dict) else {kind: entry}, kind, where) for entry in listed]


def place_media(
    messages: list[dict], listed: dict[str, list[Media]], video_options: dict[str, float]
) -> tuple[list[dict], list[Media]]:
    """Give each image or video part of a prompt what it shows.

    Args:
        messages: a part with a source of its own shows that, the others what the columns list.
        listed: by kind, as many as there are parts without a source. The options of a part win over those listed.
        video_options: of every video, unless it has its own; which frames to take only of files without nframes.
    Returns:
        messages, with kind and size options in their parts but no sources; all media in order of appearance.
    """
    waiting = {kind: iter(media) for kind, media in listed.items()}
    placed, used = [], []
    for number, message in enumerate(messages):
        parts, where = [], f"message {number}"
        for part in content_parts(message):
            kind = part_kind(part)
            if kind in OPTIONS:
                if has_source(part):
                    media = _media(part, kind, where)
                else:
                    media = next(waiting[kind])
                    media = replace(media, options=media.options | _options(part, kind, where))
                common = video_options if kind == "video" else {}
                if isinstance(media.source, list) or "nframes" in media.options:
                    common = _without(common, SAMPLING_OPTIONS)
                media = replace(media, options=common | media.options)
                used.append(media)
                part = {"type": kind, **_without(media.options, SAMPLING_OPTIONS)}
            parts.append(part)
        placed.append({**message, "content": parts} if isinstance(message["content"], list) else message)
    return placed, used


def load_media(
    media: list[Media], folder: Path, allow_urls: bool, where: str
) -> tuple[list[PIL.Image.Image], list[Video]]:
    """Read the images and videos of a row (ValueError: begins with `where`, the row's file and line)."""
    images, videos = [], []
    for one in media:
        try:
            if one.kind == "image":
                images.append(load_image(one.source, folder, allow_urls))
            else:
                sampling = {name: value for name, value in one.options.items() if name in SAMPLING_OPTIONS}
                videos.append(load_video(one.source, folder, allow_urls, **sampling))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return images, videos


def shown_parts(
    pieces: list[str], messages: list[dict], images: Sequence[PIL.Image.Image], videos: Sequence[Video]
) -> list[tuple[str, PIL.Image.Image | Video, dict[str, int]]]:
    """Find what each image and video part of a prompt shows.

    Args:
        pieces: the messages as a chat template laid them out.
        images, videos: one for each part of its kind, in order (ValueError: another number of them).
    Returns:
        for each part: "image" or "video", the image or video, and its size options, see sizes.py.
    """
    parts = [(part_kind(part), part) for message in messages for part in content_parts(message) or ()]
    parts = [(kind, part) for kind, part in parts if kind in OPTIONS]
    kinds, given = [kind for kind, _ in parts], {"image": images, "video": videos}
    for kind, items in given.items():
        if kinds.count(kind) != len(items):
            raise ValueError(
                f"the prompt has {kinds.count(kind)} {kind} placeholder(s) but {len(items)} {kind}(s) came with it; "
                f"put one placeholder where each {kind} belongs"
            )
    # by identity: text may spell the same
    shown = ["image" if piece is IMAGE else "video" for piece in pieces if piece is IMAGE or piece is VIDEO]
    if shown != kinds:
        raise ValueError(f"the chat template shows {shown}, the messages have {kinds}")
    waiting = {kind: iter(items) for kind, items in given.items()}
    other = ("type", "text", *SOURCES["image"], *SOURCES["video"], *SAMPLING_OPTIONS)
    return [(kind, next(waiting[kind]), _without(part, other)) for kind, part in parts]


def check_columns(columns: dict, media: list[Media]):
    """Refuse columns that look like options of the row's images or videos, where they would do nothing (ValueError)."""
    for kind in dict.fromkeys(one.kind for one in media):
        for name in OPTIONS[kind]:
            if columns.get(name) is not None and name not in COLUMNS_TOO:
                raise ValueError(
                    f"column {name!r} does nothing; as an option of the {kind} it belongs beside the source, "
                    f'{{"{kind}": ..., "{name}": ...}}, and anything else needs another name'
                )


def has_source(part: dict) -> bool:
    """Whether an image or video part says itself what it shows."""
    return any(part.get(name) is not None for names in SOURCES.values() for name in names)


def _media(entry: dict, kind: str, where: str) -> Media:
    given = [entry[name] for name in SOURCES[kind] if entry.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"{where}: it has {kind!r} and '{kind}_url'; give one of them")
    source = given[0] if given else None
    if isinstance(source, dict):  # {"image_url": {"url": ...}}
        source = source.get("url")
    frames = kind == "video" and isinstance(source, list) and source and all(isinstance(x, str) for x in source)
    if not isinstance(source, str) and not frames:
        also = ", or a list of those of its frames" if kind == "video" else ""
        raise ValueError(f"{where}: each {kind} must be a path, URL or data URI{also}; one is {source!r:.60}")
    return Media(kind, source, _options(entry, kind, where))


def _options(entry: dict, kind: str, where: str) -> dict[str, float]:
    options = {name: value for name, value in entry.items() if value is not None}
    options = _without(options, ("type", "text", "index", *SOURCES[kind]))
    for name, value in options.items():
        if name not in OPTIONS[kind]:
            raise ValueError(f"{where}: {name!r} is not an option of {kind}s; known are {', '.join(OPTIONS[kind])}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{where}: {name} is {value!r:.40}, it must be a number")
    try:
        check_options(_without(options, SAMPLING_OPTIONS), OPTIONS[kind])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return options


def _without(options: dict, names: Sequence[str]) -> dict:
    return {name: value for name, value in options.items() if name not in names}
