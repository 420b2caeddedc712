"""Where the bytes of an image or a video come from: a file, a URL, a data URI or memory."""

import base64
import binascii
import http.client
import io
import time
import urllib.request
from pathlib import Path

MAX_DOWNLOAD = 512 * 2**20  # bytes
TIMEOUT = 60  # seconds, of a whole download


def open_source(
    source: str | Path | bytes, folder: str | Path | None, allow_url: bool
) -> tuple[str, Path | io.BytesIO]:
    """Find where the bytes of an image or video are.

    Returns:
        name: for messages, of bearable length.
        file: path, or the bytes when they are not in a file.
    Raises:
        ValueError: another type, a data URI that is not base64, a URL without allow_url or without an answer.
    """
    if isinstance(source, bytes | bytearray):
        return f"{len(source)} bytes", io.BytesIO(source)
    if not isinstance(source, str | Path):
        raise ValueError(f"an image or video is a path, URL, data URI or bytes, not {type(source).__name__}")
    text = str(source)
    name = text if len(text) <= 200 else f"{text[:60]}... ({len(text)} characters)"
    if isinstance(source, str) and text.startswith("data:"):
        return name, io.BytesIO(_decode_data_uri(name, text))
    if isinstance(source, str) and text.startswith(("http://", "https://")):
        if not allow_url:
            raise ValueError(f"{name}: URLs are not downloaded unless data.allow_urls: true")
        return name, io.BytesIO(_download(name, text))
    if isinstance(source, str) and text.startswith("file://"):
        text = urllib.parse.unquote(text.removeprefix("file://").removeprefix("localhost"))
    path = Path(folder or "", text)
    return str(path) if len(str(path)) <= 400 else name, path


def _decode_data_uri(name: str, uri: str) -> bytes:
    header, comma, data = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ValueError(f"{name}: a data URI must look like data:image/png;base64,...")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: letters beyond ASCII
        raise ValueError(f"{name}: not base64 ({error})") from error


def _download(name: str, url: str) -> bytes:
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
        raise ValueError(f"{name}: cannot be downloaded ({error})") from error
    return content.getvalue()
