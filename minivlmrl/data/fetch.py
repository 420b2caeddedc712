"""Where the bytes of an image or a video come from: a file, a data URI or memory."""

import base64
import contextlib
import io
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.request import url2pathname

import PIL.Image
from PIL.Image import Image

from minivlmrl.config.parsing import naming
from minivlmrl.data.image import load_image

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
    with naming(name):
        if text.startswith("data:"):
            header, comma, data = text.partition(",")
            if not comma or not header.endswith(";base64"):
                raise ValueError("a data URI must look like data:image/png;base64,...")
            with naming("not base64"):  # strictly: urllib's handler skips letters that are none
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
