"""Build error messages: where the error is, which value is wrong, how to fix it."""

import difflib
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from traceback import extract_tb, print_exception
from typing import Any

PACKAGE = Path(__file__).resolve().parent
# folders with the library's own code, as opposed to user code
OURS = tuple(f"{PACKAGE.parent / name}{os.sep}" for name in (PACKAGE.name, "kernels", "recipes"))
# folders that do not import UserError; a ValueError raised in them is shown like a UserError
TORCH_ONLY = tuple(f"{PACKAGE.parent / name}{os.sep}" for name in ("minivlmrl/losses", "minivlmrl/kernels", "kernels"))
# the user's Python files, which a recipe names as `file.py:name`
USER_FILES: set[str] = set()

# text to shorten in messages: quotes of 80 or more characters, words of 500 or more
LONG_QUOTES = re.compile(r"""(?<!\w)'[^']{80,}'(?!\w)|"[^"]{80,}"|[^\s'"]{500,}""")

MAX_MESSAGE = 600  # maximum error message length, in characters

SIMILAR = 0.75  # minimum similarity for "did you mean", 1 = identical

# out-of-memory messages from PyTorch, CUDA and cuBLAS
NO_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|STATUS_ALLOC_FAILED", re.IGNORECASE)


class UserError(ValueError):
    """Error for the user to fix, shown without a traceback."""


class error_context(AbstractContextManager):
    """Convert a ValueError in the `with` block to a UserError whose message begins with `where`, such as a file.

    Other exceptions keep their type, and get the note "in {where}".
    """

    # a class, because contextlib.contextmanager is too slow for every data row
    def __init__(self, where: str | Path):
        self.where = where

    def __exit__(self, kind, error, traceback):
        if isinstance(error, ValueError):
            if not str(error).startswith(f"{self.where}: "):
                raise UserError(f"{self.where}: {truncate_message(error)}") from error
        elif isinstance(error, Exception):
            error.add_note(f"in {self.where}")


def user_error_message(error: BaseException) -> str | None:
    """Return a one-line message for an error, or None if the traceback must be printed.

    UserError, OSError and out-of-memory errors are printed without a traceback, unless user code raised them.
    """
    if is_out_of_memory(error):
        size = f" ({truncate_message(str(error).splitlines()[0])})" if str(error) else ""
        return f"not enough memory{size}; reduce the sizes in the recipe or in the model's files"
    is_known = isinstance(error, UserError | FloatingPointError | OSError)
    if isinstance(error, ValueError) and not is_known:
        is_known = extract_tb(error.__traceback__)[-1].filename.startswith(TORCH_ONLY)
    if not is_known or user_code(error):
        return None
    message = "; ".join([str(error), *getattr(error, "__notes__", ())])
    line = " ".join(message.split())
    is_path = isinstance(error, OSError) and len(line) < 500  # truncating could remove an OSError's file name
    return line if is_path else truncate_message(line)


def user_code(error: BaseException) -> str:
    """Describe where user code raised an error, such as "mine.py:3, in f: return x[0]".

    Return "" for an error outside user code, even in a minivlmrl function that user code called.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, SyntaxError) and error.filename in USER_FILES:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    for frame in reversed(extract_tb(error.__traceback__)):
        if frame.filename.startswith(OURS):
            break
        if frame.filename in USER_FILES:
            return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
    return ""


def print_traceback(error: BaseException):
    """Print the failing line in user code and the message, then the traceback."""
    if line := user_code(error):
        print(line, f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), "", sep="\n", file=sys.stderr)
    print_exception(error)


def require(valid: bool, name: str, value: Any, expected: str):
    """Raise UserError unless `valid` is True; the message gives name, value and what is expected."""
    if not valid:
        raise invalid_value(name, value, expected)


def invalid_value(name: str, value: Any, expected: str) -> UserError:
    # reprlib.repr is fast for long lists
    to_text = reprlib.repr if isinstance(value, list | dict) else repr
    return UserError(f"{name} is {truncate(value, 80, to_text)}, but it must be {expected}")


def truncate_message(error: str | Exception) -> str:
    """Shorten long strings in a message, such as base64 images, and then the message if it is still too long."""
    text = str(error)
    if len(text) > 10**6:  # cut first, because the regular expression is slow on long strings
        text = f"{text[:500_000]} ... {text[-500_000:]}"
    text = LONG_QUOTES.sub(lambda quote: f"{quote[0][:80]}...{quote[0][-1]}", text)
    if len(text) <= MAX_MESSAGE:
        return text
    # keep the end of the message, which says how to fix the error
    return f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 + 5 :]}"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True for out-of-memory errors on GPU (OutOfMemoryError) or host (RuntimeError)."""
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    # check torch.OutOfMemoryError by name, because errors.py must not import torch
    return type(error).__name__ == "OutOfMemoryError" or bool(NO_MEMORY.search(str(error)))


@contextmanager
def error_phase(name: str, rows: Sequence = ()) -> Iterator[None]:
    """Add a training phase, such as "forward", to errors raised in the `with` block; inner blocks take precedence.

    Args:
        rows: dataset rows used in the `with` block; an out-of-memory message names the longest row.
    """
    try:
        yield
    except BaseException as error:
        if not hasattr(error, "phase"):
            error.phase, error.rows = name, rows  # pyright: ignore[reportAttributeAccessIssue]
        raise


@contextmanager
def optional_dependency(name: str, needed: str) -> Iterator[None]:
    """Convert an ImportError to a UserError with the pip command to run.

    Args:
        name: pip extra, such as "video".
        needed: start of the message, such as "reading video files requires PyAV".
    """
    try:
        yield
    except ImportError as error:
        raise UserError(f"{needed}; run pip install -e '.[{name}]' in your clone of minivlmrl") from error


def pluralize(number: int, noun: str) -> str:
    """Return a number and its noun, such as "1 row" or "3 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def truncate(value: Any, limit: int, to_text: Callable[[Any], str] = repr) -> str:
    """Return `to_text(value)`, truncated to `limit` characters plus "..."."""
    text = to_text(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def in_one_line(error: Exception) -> str:
    """Return an error's type and message (at most 300 characters) in one line."""
    return f"{type(error).__name__}: {truncate(error, 300, str)}".replace("\n", " ")


def did_you_mean(name: str, names: Iterable[str], write: Callable[[str], str] = str) -> str:
    """Suggest the one or two most similar names, as in "; did you mean shapes?"; return "" if none is similar.

    Args:
        write: function that formats a suggested name.
    """
    names = [*names]
    near = difflib.get_close_matches(name.lower(), names, 2, SIMILAR)
    if "_" in name and not near:  # also suggest names with additional words: old_per_token_logps for old_logps
        near = [known for known in names if {*name.split("_")} <= {*known.split("_")}][:2]
    return f"; did you mean {' or '.join(map(write, near))}?" if near else ""
