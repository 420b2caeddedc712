"""Where the bytes of an image or a video come from: a file, a URL, a data URI or memory."""

import base64
import contextlib
import http.client
import io
import os
import time
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
from PIL.Image import Image

from minivlmrl.hub.checker import naming

MAX_DOWNLOAD = 512 * 2**20  # bytes
TIMEOUT = 60  # seconds, of a whole download
PROGRAMS = "EPS", "IPTC", "WMF"  # Pillow would run Ghostscript for EPS, open any file inside IPTC, ask Windows for WMF
MAX_IMAGE_PIXELS = 178_956_970  # Pillow's own limit, half a GiB as RGB: a file of a few kilobytes could claim any size

Source = str | Path | bytes


@contextlib.contextmanager
def open_image(source: Source | Image, folder: str | Path | None = None, allow_url: bool = False) -> Iterator[Image]:
    """Open an image, or take one in memory; every error inside the block becomes a ValueError that names it."""
    if in_memory := isinstance(source, Image):
        name = f"image of {source.width} x {source.height} pixels"
    else:
        name, file = open_source(source, folder, allow_url)
    try:
        with contextlib.ExitStack() as stack:
            with warnings.catch_warnings():  # Pillow warns from half of our limit on
                warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
                image = source if in_memory else stack.enter_context(PIL.Image.open(file))
            if image.width * image.height > MAX_IMAGE_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are over {MAX_IMAGE_PIXELS}; scale it down")
            if image.format in PROGRAMS:
                raise ValueError(f"{image.format} files can hold programs; convert it to PNG")
            yield image
    except Exception as error:  # damaged files make Pillow's decoders raise anything: struct.error, IndexError, ...
        unknown = isinstance(error, PIL.UnidentifiedImageError)
        reason = "none of the formats that Pillow knows" if unknown else getattr(error, "strerror", None) or error
        raise ValueError(f"{name}: cannot be read as an image ({reason})") from error


def open_source(source: Source, folder: str | Path | None, allow_url: bool) -> tuple[str, Path | io.BytesIO]:
    """Find a path, file:// URL, base64 data URI, http(s) URL or bytes: a name for errors; the path or the bytes."""
    if isinstance(source, bytes | bytearray):
        return f"{len(source)} bytes", io.BytesIO(source)
    if not isinstance(source, str | Path):
        raise ValueError(f"an image or video is a path, URL, data URI or bytes, not {type(source).__name__}")
    text, url = str(source), source if isinstance(source, str) else ""
    name = text if len(text) <= 200 else f"{text[:60]}... ({len(text)} characters)"
    with naming(name):
        if url.startswith("data:"):
            return name, io.BytesIO(_decode_data_uri(url))
        if url.startswith(("http://", "https://")):
            if not allow_url:
                raise ValueError("URLs are not downloaded unless data.allow_urls: true")
            return name, io.BytesIO(_download(url))
    if url.startswith("file://"):
        text = urllib.parse.unquote(url.removeprefix("file://").removeprefix("localhost"))
    path = Path(folder or "", text)
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # it might never end
        raise ValueError(f"{path}: a pipe or device; give a file")
    return str(path) if len(str(path)) <= 400 else name, path


def _decode_data_uri(uri: str) -> bytes:
    """Decode a data URI, strictly: urllib's own handler skips letters that are not base64."""
    header, comma, data = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ValueError("a data URI must look like data:image/png;base64,...")
    with naming("not base64"):
        return base64.b64decode("".join(data.split()), validate=True)


def _download(url: str) -> bytes:
    content, deadline = io.BytesIO(), time.monotonic() + TIMEOUT
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "minivlmrl"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            while chunk := response.read1(2**20):
                content.write(chunk)
                if content.tell() > MAX_DOWNLOAD:
                    raise ValueError(f"over {MAX_DOWNLOAD} bytes")
                if time.monotonic() > deadline:
                    raise ValueError(f"not finished after {TIMEOUT} seconds")
            if response.length:
                raise ValueError(f"the connection ended {response.length} bytes early")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ValueError(f"cannot be downloaded ({error})") from error
    return content.getvalue()
