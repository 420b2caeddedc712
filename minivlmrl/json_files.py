"""Read and write JSON and JSON lines, and write whole files."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivlmrl.errors import UserError, error_context, require

LFS = b"version https://git-lfs"  # start of a Git LFS pointer file
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # Unicode surrogate escape, paired or not
TRAILING_COMMA = re.compile(r",\s*([}\]]|$)")
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)


def parse_json(text: str | bytes, decode: Callable = _DECODER.decode, *arguments):
    """Parse JSON; NaN and Infinity become None.

    Args:
        decode: parser, called as decode(text, *arguments).
    Raises:
        UserError: invalid JSON, or nested too deeply.
    """
    try:
        return decode(text.decode() if isinstance(text, bytes) else text, *arguments)
    except (ValueError, RecursionError) as error:
        where = json_cure(error) if isinstance(error, json.JSONDecodeError) else ""
        if not where:
            where = str(error).replace("line 1 column", "column")  # `text` may be a later line of a JSON Lines file
        raise UserError(f"the text is not valid JSON ({where})") from error


def json_cure(error: json.JSONDecodeError) -> str:
    """Say how to fix a common mistake in JSON, or return ""."""
    before = error.doc[: error.pos].rstrip().removesuffix(",")  # valid JSON, so a final comma is not inside a string
    if TRAILING_COMMA.match(error.doc, len(before)):
        return f"remove the comma after {before[-20:]}"
    if error.doc.startswith("'", error.pos):
        return "write double quotes instead of single quotes"
    is_constant = error.doc.startswith(("True", "False", "None"), error.pos)
    return "write true, false or null instead of True, False or None" if is_constant else ""


def check_surrogates(text: str, content: Any):
    """Raise UserError for an unpaired surrogate such as \\ud800, which is valid in JSON but cannot be encoded as UTF-8.

    Args:
        content: value parsed from `text`.
    """
    if SURROGATE.search(text):
        parse_json(json.dumps(content, ensure_ascii=False), str.encode)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from (key, value) pairs; raise UserError for a repeated key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise UserError(f"the key {max(names, key=names.count)!r} occurs twice in one object; remove one of them")
    return content


def check_downloaded(path: Path):
    """Raise UserError for a Git LFS pointer."""
    with path.open("rb") as file:
        is_pointer = file.read(len(LFS)) == LFS
    if is_pointer:
        raise UserError(
            f"{path} is a Git LFS pointer, not the file itself. Run `git lfs pull` in the "
            "folder, or download the file again."
        )


def read_json(path: Path) -> dict:
    """Read a JSON object from a file.

    Raises:
        UserError: the file contains no JSON object.
        FileNotFoundError: the file is missing.
    """
    check_downloaded(path)
    with error_context(path):
        text = path.read_bytes()
        content = parse_json(text)
        check_surrogates(text.decode(), content)
        require(isinstance(content, dict), "the content", content, "a JSON object")
        return content


def json_text(content, **options) -> str:
    """Convert a value to JSON; NaN and infinity become null, and values of unknown types become strings."""
    return json.dumps(_DECODER.decode(json.dumps(content, default=str)), **options)


def write_json(path: Path, content: dict):
    write_file(path, f"{json_text(content, indent=2)}\n".encode())


def write_file(path: Path, content: bytes):
    """Write a draft and rename it to `path`, so no reader sees half a file; a link at `path` is replaced."""
    draft = path.with_name(f"{path.name}.partial")
    draft.unlink(missing_ok=True)  # if this path is a link, do not write to its target
    draft.write_bytes(content)
    draft.replace(path)
