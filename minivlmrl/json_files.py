"""Read and write JSON and JSON lines."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivlmrl.errors import error_context, require

LFS = b"version https://git-lfs"  # beginning of a pointer file
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escape of half of a surrogate pair, with or without the other half
# {what a mistake leaves unread: what to do}
CURES = {
    r",?\s*[]}]": "; remove the comma before the bracket",
    r",\s*$": "; remove the comma at the end",
    "'": "; write double quotes instead of single ones",
}
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)


def parse_json(text: str | bytes, decode: Callable = _DECODER.decode, *arguments):
    """Parse JSON. NaN and Infinity, which Python writes although JSON does not allow them, are read as None.

    Args:
        text: JSON, in UTF-8 if it is bytes.
        decode: function that parses the text; its result is returned.
        arguments: additional arguments for `decode`.

    Raises:
        ValueError: the text is not JSON, or is nested too deeply.
    """
    try:
        return decode(text.decode() if isinstance(text, bytes) else text, *arguments)
    except (ValueError, RecursionError) as error:
        where = str(error).replace("line 1 column", "column")  # a JSON lines file has its own line numbers
        rest = error.doc[error.pos :] if isinstance(error, json.JSONDecodeError) else ""
        cure = next((cure for pattern, cure in CURES.items() if re.match(pattern, rest)), "")
        raise ValueError(f"the text is not valid JSON ({where}){cure}") from error


def check_surrogates(text: str, content: Any):
    """Raise ValueError if a text in JSON escapes half of a surrogate pair, such as \\ud800.

    Such an escape is valid JSON, but neither UTF-8 nor a tokenizer can encode the character.

    Args:
        content: the value that was parsed from the text.
    """
    if SURROGATE.search(text):
        parse_json(json.dumps(content, ensure_ascii=False), str.encode)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from the (key, value) pairs of a JSON object; raise ValueError for a repeated key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {max(names, key=names.count)!r} occurs twice in one object; remove one of them")
    return content


def check_downloaded(path: Path):
    """Raise ValueError if a file contains only the pointer that Git LFS stores in place of the real file."""
    with path.open("rb") as file:
        is_pointer = file.read(len(LFS)) == LFS
    if is_pointer:
        raise ValueError(
            f"{path} is a Git LFS pointer, not the file itself. Run `git lfs pull` in the "
            "folder, or download the file again."
        )


def read_json(path: Path) -> dict:
    """Read a JSON file that contains one object.

    Raises:
        ValueError: the file is missing, or does not contain a JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path}: this file is missing")
    check_downloaded(path)
    with error_context(path):
        text = path.read_bytes()
        content = parse_json(text)
        check_surrogates(text.decode(), content)
        require(isinstance(content, dict), "the content", content, "a JSON object")
        return content


def json_text(content, **options) -> str:
    """Convert a value to JSON, with null in place of NaN and infinite numbers."""
    return json.dumps(_DECODER.decode(json.dumps(content)), **options)


def write_json(path: Path, content: dict):
    path.write_bytes(f"{json_text(content, indent=2)}\n".encode())
