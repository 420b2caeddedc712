"""Download the images and videos of a data file, and write rows with local paths.

    python recipes/download.py ROWS.jsonl  # writes ROWS.local.jsonl, and downloads to ROWS.files/

Existing files are kept. A row is left out, with a message, if a download fails or is neither image nor video.
"""

import argparse
import hashlib
import http.client
import io
import json
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import PIL.Image

from minivlmrl.run.progress_bar import ProgressBar

TIMEOUT = 60  # seconds to wait for data
LONGEST = 600  # seconds per download: a server may send one byte per minute
LARGEST = 512 * 2**20  # maximum file size in bytes
CHUNK = 2**20  # bytes per read
# only the row is left out; HTTPException: invalid HTTP response
FAILURES = (OSError, ValueError, RecursionError, http.client.HTTPException)
# (offset, bytes) in video files: MP4 and MOV, WebM and MKV, AVI, MPEG-TS, MPEG-PS, FLV, OGG
VIDEOS = ((4, b"ftyp"), (0, b"\x1aE\xdf\xa3"), (8, b"AVI "), (0, b"G@"), (0, b"\0\0\1\xba"), (0, b"FLV"), (0, b"OggS"))


def main(arguments: list[str]) -> int:
    """Download all files and write the rows; return 1 if a download failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl", help="file with one JSON object a line")
    file = parser.parse_args(arguments).rows
    lines = file.read_bytes().split(b"\n")  # splitlines would also split at U+2028 inside text
    folder = file.with_suffix(".files")
    folder.mkdir(exist_ok=True)
    written = file.with_suffix(".local.jsonl")
    num_lost = 0
    with written.open("wb") as out, ProgressBar("rows", len(lines)) as bar:
        for number, line in enumerate(lines, start=1):
            bar.update()
            if not line.strip():
                continue
            try:
                row = json.dumps(replaced(json.loads(line), folder), ensure_ascii=False).encode()
            except FAILURES as error:
                num_lost += 1
                bar.print(f"{file}:{number}: left out ({error or type(error).__name__})")
                continue
            out.write(row + b"\n")
    print(f"{written}: rows left out: {num_lost}")
    return int(num_lost > 0)


def replaced(value, folder: Path):
    """Download all URLs in a row, also nested ones, and insert paths.

    Strings with a URL among other words are unchanged.
    """
    if isinstance(value, dict):
        return {key: replaced(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, folder) for item in value]
    is_url = isinstance(value, str) and value.startswith(("http://", "https://")) and " " not in value
    return f"{folder.name}/{download(value, folder).name}" if is_url else value


def download(url: str, folder: Path) -> Path:
    """Download an image or video to a file named by its URL's hash; return the path.

    Raises:
        OSError, ValueError, HTTPException: the download fails, takes too long, or is neither image nor video.
    """
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    path = folder / f"{name}{Path(urlsplit(url).path).suffix}"
    if not path.exists():
        content = read(url)
        check_media(url, content)
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


def read(url: str) -> bytes:
    content = bytearray()
    ends = time.monotonic() + LONGEST
    with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:
        while part := reply.read1(CHUNK):
            content += part
            if len(content) > LARGEST:
                raise ValueError(f"{url}: the file has over {LARGEST} bytes")
            if time.monotonic() > ends:
                raise ValueError(f"{url}: the download took over {LONGEST} seconds")
        if reply.length:
            raise ValueError(f"{url}: the download was cut off, {reply.length} bytes are missing")
    return bytes(content)


def check_media(url: str, content: bytes):
    """Raise ValueError unless the content looks like an image or video.

    Servers often send an empty file or an error page instead of a missing image.
    """
    if any(content[start:].startswith(mark) for start, mark in VIDEOS):
        return
    try:
        PIL.Image.open(io.BytesIO(content)).close()
    except Exception as error:  # PIL raises many kinds of exceptions for damaged files
        raise ValueError(
            f"{url}: the file is neither an image nor a video, it begins with {content[:20]!r}; remove the URL from "
            "the row if it is a link"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
