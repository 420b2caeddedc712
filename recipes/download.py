"""Download the pictures and videos that rows name by URL, and write rows that name files.

    python recipes/download.py ROWS.jsonl  # writes ROWS.local.jsonl, and files into ROWS.files/

What is there is not downloaded again. Rows of which something cannot be had are left out, and named.
"""

import hashlib
import json
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from tqdm import tqdm

TIMEOUT = 60  # seconds without a byte
LARGEST = 512 * 2**20  # bytes of a file


def main(rows: str) -> int:
    """Write the rows whose files could be had; returns 1 if some could not."""
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
    """Replace the URLs in a row by what was downloaded, wherever they are; a text that holds more stays as it is."""
    if isinstance(value, dict):
        return {key: replaced(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, folder) for item in value]
    is_url = isinstance(value, str) and value.startswith(("http://", "https://")) and " " not in value
    return f"{folder.name}/{download(value, folder).name}" if is_url else value


def download(url: str, folder: Path) -> Path:
    """Download a file, named by a hash of its URL (ValueError, OSError: it cannot be had)."""
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    path = folder / f"{name}{Path(urlsplit(url).path).suffix}"
    if not path.exists():
        with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:
            content = reply.read(LARGEST + 1)
        if len(content) > LARGEST or reply.length:
            raise ValueError(f"{url}: over {LARGEST} bytes, or cut off")
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(content)
        partial.replace(path)
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
