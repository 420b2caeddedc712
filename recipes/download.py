"""Download the images and videos to which rows refer by URL, and write rows that refer to the files.

    python recipes/download.py ROWS.jsonl  # writes ROWS.local.jsonl, and the files to ROWS.files/

Existing files are not downloaded again. If a download fails, the row is printed and not written.
"""

import hashlib
import json
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from tqdm import tqdm

TIMEOUT = 60  # maximum time in seconds to wait for data
LARGEST = 512 * 2**20  # maximum size of a file in bytes


def main(rows: str) -> int:
    """Download all files and write the rows. Return 1 if a download failed, otherwise 0."""
    file = Path(rows)
    folder = file.with_suffix(".files")
    folder.mkdir(exist_ok=True)
    written = file.with_suffix(".local.jsonl")
    num_lost = 0
    lines = file.read_text(encoding="utf-8").splitlines()
    with written.open("w", encoding="utf-8") as out:
        for number, line in enumerate(tqdm(lines), start=1):
            try:
                row = replaced(json.loads(line), folder)
            except (OSError, ValueError) as error:
                num_lost += 1
                tqdm.write(f"{file}:{number}: left out ({error})")
                continue
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{written}: {num_lost} rows are left out")
    return int(num_lost > 0)


def replaced(value, folder: Path):
    """Download every URL in a row, at any depth, and replace it with the path of the file.

    A text that contains a URL and other words is not changed.
    """
    if isinstance(value, dict):
        return {key: replaced(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, folder) for item in value]
    is_url = isinstance(value, str) and value.startswith(("http://", "https://")) and " " not in value
    return f"{folder.name}/{download(value, folder).name}" if is_url else value


def download(url: str, folder: Path) -> Path:
    """Download a file to a name that is a hash of its URL, and return its path.

    Raises:
        OSError, ValueError: if the download fails, or the file is too large.
    """
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    path = folder / f"{name}{Path(urlsplit(url).path).suffix}"
    if not path.exists():
        with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:
            content = reply.read(LARGEST + 1)
        if len(content) > LARGEST or reply.length:
            raise ValueError(f"{url}: the file has over {LARGEST} bytes, or the download was cut off")
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
