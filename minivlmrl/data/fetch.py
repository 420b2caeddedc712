"""Where the bytes of an image or a video come from: a file, a URL, a data URI or memory."""

import base64
import contextlib
import http.client
import io
import ipaddress
import os
import socket
import time
import urllib.parse
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import PIL.Image
from PIL.Image import Image

from minivlmrl.hub.checker import naming
from minivlmrl.image import load_image

MAX_DOWNLOAD = 512 * 2**20  # bytes
TIMEOUT = 60  # seconds, of a whole download
# Pillow would run Ghostscript for EPS, open any file inside IPTC, ask Windows for WMF
PROGRAMS = "EPS", "IPTC", "WMF"
# Pillow's own limit, half a GiB as RGB: a file of a few kilobytes could claim any size
MAX_IMAGE_PIXELS = 178_956_970

Source = str | Path | bytes

# Pillow warns from half of our limit on. Here, for threads share one list of filters.
warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)


def fetch_image(
    source: Source | Image, folder: str | Path | None = None, allow_url: bool | str = False
) -> Image:
    """Read an image as image.load_image does (ValueError: names the source and what is wrong).

    folder: where a relative path starts; allow_url: data.allow_urls, whether to fetch URLs.
    """
    with open_image(source, folder, allow_url) as image:
        return load_image(image)


@contextlib.contextmanager
def open_image(
    source: Source | Image, folder: str | Path | None = None, allow_url=False
) -> Iterator[Image]:
    """Open an image, or take one in memory; every error inside the block becomes a ValueError."""
    if isinstance(source, Image):
        name, file = f"image of {source.width} x {source.height} pixels", source
    else:  # a pair is what open_source has found
        name, file = source if isinstance(source, tuple) else open_source(source, folder, allow_url)
    try:
        with contextlib.nullcontext(file) if file is source else PIL.Image.open(file) as image:
            if image.width * image.height > MAX_IMAGE_PIXELS:
                size = f"{image.width} x {image.height} pixels"
                raise ValueError(f"{size} are over {MAX_IMAGE_PIXELS}; scale it down")
            if image.format in PROGRAMS:
                raise ValueError(f"{image.format} files can hold programs; convert it to PNG")
            yield image
    except Exception as error:  # Pillow's decoders raise anything: struct.error, IndexError, ...
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, PIL.UnidentifiedImageError):
            reason = "none of the formats that Pillow knows"
        raise ValueError(f"{name}: cannot be read as an image ({reason})") from error


def open_source(
    source: Source, folder: str | Path | None, allow_url: bool | str
) -> tuple[str, Path | io.BytesIO]:
    """Find a path, file:// or http(s) URL, data URI or bytes: its name; the path or the bytes."""
    if isinstance(source, bytes | bytearray):
        return f"{len(source)} bytes", io.BytesIO(source)
    if not isinstance(source, str | Path):
        raise ValueError(f"a path, URL, data URI or bytes is needed, not {type(source).__name__}")
    text, url = str(source), source if isinstance(source, str) else ""
    name = text if len(text) <= 200 else f"{text[:60]}... ({len(text)} characters)"
    with naming(name):
        if url.startswith("data:"):
            header, comma, data = url.partition(",")
            if not comma or not header.endswith(";base64"):
                raise ValueError("a data URI must look like data:image/png;base64,...")
            with naming("not base64"):  # strictly: urllib's handler skips letters that are none
                return name, io.BytesIO(base64.b64decode("".join(data.split()), validate=True))
        if url.startswith(("http://", "https://")):
            if not allow_url:
                raise ValueError("URLs are not downloaded unless data.allow_urls: true")
            try:
                web = Web(private=allow_url == "private")
                return name, io.BytesIO(read_reply(url, TIMEOUT, MAX_DOWNLOAD, web))
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ValueError(f"cannot be downloaded ({error})") from error
    if url.startswith("file://"):
        text = urllib.parse.unquote(url.removeprefix("file://").removeprefix("localhost"))
    path = Path(folder or "", text)
    # it might never end
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{path}: a pipe or device; give a file")
    return str(path) if len(str(path)) <= 400 else name, path


def read_reply(request: str | Request, seconds: float, limit: int, web: "Web") -> bytes:
    """Read what a server replies (ValueError: too large, cut off, or not all within `seconds`)."""
    pool = ThreadPoolExecutor(1)  # nothing else ends the wait for a server of names
    future = pool.submit(_read, request, time.monotonic() + seconds, limit, web)
    pool.shutdown(wait=False)
    try:
        return future.result(seconds)
    except TimeoutError as error:
        if sock := getattr(web.connection, "sock", None):  # its headers still come
            sock.shutdown(socket.SHUT_RDWR)
        raise ValueError(f"not finished after {seconds} seconds") from error


def _read(request: str | Request, deadline: float, limit: int, web: "Web") -> bytes:
    content, seconds = io.BytesIO(), deadline - time.monotonic()
    with build_opener(web).open(request, timeout=seconds) as response:
        while chunk := response.read1(2**20):
            content.write(chunk)
            if content.tell() > limit:
                raise ValueError(f"over {limit} bytes")
            if time.monotonic() > deadline:  # a byte now and then, and no read times out
                raise TimeoutError
        if response.length:
            raise ValueError(f"the connection ended {response.length} bytes early")
    return content.getvalue()


class Web(HTTPHandler, HTTPSHandler, HTTPRedirectHandler):
    """http and https to checked addresses, also after redirects; private: all addresses."""

    connection = None  # the last that was made

    def __init__(self, private: bool):
        super().__init__()
        self.private = private

    def do_open(self, http_class, req, **options):
        def connection(*args, **more):
            self.connection = http_class(*args, **more)
            self.connection._create_connection = self.connect
            return self.connection

        return super().do_open(connection, req, **options)

    def connect(self, address: tuple[str, int], timeout: float, *_) -> socket.socket:
        """Resolve a name once, as a second answer might differ, and connect to what was checked."""
        answers = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys(info[4][0] for info in answers))
        for ip in () if self.private else map(ipaddress.ip_address, found):
            if not ip.is_global or ip.is_multicast:
                private = f"{address[0]} has the private address {ip}"
                raise ValueError(f"{private}; data.allow_urls: private permits it")
        for ip in found:
            try:
                return socket.create_connection((ip, address[1]), timeout)
            except OSError:
                if ip == found[-1]:
                    raise

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        fp.close()  # urllib would read all that comes with a redirect
        if not newurl.startswith(("http://", "https://")):  # urllib would take ftp too
            raise ValueError(f"it leads to {newurl:.200}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
