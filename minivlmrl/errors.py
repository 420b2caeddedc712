"""Functions for error messages, which say where an error is, which value is wrong and how it can probably be fixed."""

import difflib
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from opcode import opmap
from pathlib import Path
from traceback import extract_tb, print_exception
from typing import Any

PACKAGE = Path(__file__).resolve().parent
# folders of minivlmrl's own code, whose errors are shown without a traceback
OURS = tuple(f"{PACKAGE.parent / name}{os.sep}" for name in (PACKAGE.name, "kernels", "recipes"))
# the user's Python files, which a recipe names as `file.py:name`
USER_FILES: set[str] = set()

# what is shortened in an error message: quoted texts of at least 80 characters, and words of at least 500 characters
LONG_QUOTES = re.compile(r"""(?<!\w)'[^']{80,}'(?!\w)|"[^"]{80,}"|[^\s'"]{500,}""")

MAX_MESSAGE = 600  # longest error message, in characters

SIMILAR = 0.75  # smallest similarity of a name that a message proposes: 1 for equal names

# regular expression for the out-of-memory messages of PyTorch, CUDA and cuBLAS
NO_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|STATUS_ALLOC_FAILED", re.IGNORECASE)


class error_context(AbstractContextManager):
    """Context manager that begins the message of a ValueError raised in its block with a file, row or field.

    An exception of any other type gets a note with the file, row or field.
    """

    # A class is faster than contextlib.contextmanager, which matters if every row of a data file enters the context.
    def __init__(self, where: str | Path):
        self.where = where

    def __exit__(self, kind, error, traceback):
        if isinstance(error, ValueError):
            if not str(error).startswith(f"{self.where}: "):
                raise ValueError(f"{self.where}: {truncate_message(error)}") from error
        elif isinstance(error, Exception):
            error.add_note(f"in {self.where}")


def user_error_message(error: BaseException) -> str | None:
    """Return a one-line message for an error that the user can fix without a traceback, otherwise None.

    A user can fix three kinds of errors: running out of memory, an OSError, and a ValueError that minivlmrl raises.
    Errors in a user's own code are shown with their traceback.
    """
    if is_out_of_memory(error):
        size = f" ({truncate_message(str(error).splitlines()[0])})" if str(error) else ""  # it gives the size, if known
        return f"not enough memory{size}; reduce the sizes in the recipe or in the model's files"
    is_known = isinstance(error, ValueError | FloatingPointError) and is_raised_by_us(error)
    if not is_known and not isinstance(error, OSError):
        return None
    if user_code(error):
        return None
    message = "; ".join([str(error), *getattr(error, "__notes__", ())])
    line = " ".join(message.split())
    is_path = isinstance(error, OSError) and len(line) < 500  # the end of a path is the most useful part
    return line if is_path else truncate_message(line)


def user_code(error: BaseException) -> str:
    """Describe the line of a user's file in which an error was raised, for example "mine.py:3, in f: return x[0]".

    Returns "" if minivlmrl raised the error, also if the user's code called minivlmrl.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, SyntaxError) and error.filename in USER_FILES:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    for frame in reversed(extract_tb(error.__traceback__)):
        if frame.filename.startswith(OURS) or is_out_of_memory(error):
            break
        if frame.filename in USER_FILES:
            return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
    return ""


def print_traceback(error: BaseException):
    """Print the line of the user's file and the message first, because they often suffice, and then the traceback."""
    if line := user_code(error):
        notes = getattr(error, "__notes__", ())
        print(line, f"{type(error).__name__}: {error}", *notes, "", sep="\n", file=sys.stderr)
    print_exception(error)


def is_raised_by_us(error: BaseException) -> bool:
    """Return True if a `raise` statement in minivlmrl raised the error, and False if, for example, int("x") failed.

    The innermost frame of the traceback records which instruction it executed last.
    """
    last = error.__traceback__
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    return code.co_filename.startswith(OURS) and code.co_code[last.tb_lasti] == opmap["RAISE_VARARGS"]


def require(valid: bool, name: str, value: Any, expected: str):
    """Raise ValueError if `valid` is False; the message gives the field's name, its value and what is expected."""
    if not valid:
        raise invalid_value(name, value, expected)


def invalid_value(name: str, value: Any, expected: str) -> ValueError:
    # reprlib.repr converts only the first elements of a long list to text, so it is faster than repr.
    to_text = reprlib.repr if isinstance(value, list | dict) else repr
    return ValueError(f"{name} is {truncate(value, 80, to_text)}, but it must be {expected}")


def truncate_message(error: str | Exception) -> str:
    """Shorten long texts in an error message, such as images in base64, and the message to MAX_MESSAGE characters."""
    text = str(error)
    if len(text) > 10**6:  # the regular expression would take a long time
        text = f"{text[:500_000]} ... {text[-500_000:]}"
    text = LONG_QUOTES.sub(lambda quote: f"{quote[0][:80]}...{quote[0][-1]}", text)
    if len(text) <= MAX_MESSAGE:
        return text
    return f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 + 5 :]}"  # the end says what to do


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error means that GPU memory or host memory is full.

    PyTorch raises OutOfMemoryError if GPU memory is full, but a plain RuntimeError if host memory is full.
    """
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    # errors.py does not import torch, so torch.OutOfMemoryError is recognized by its name
    return type(error).__name__ == "OutOfMemoryError" or bool(NO_MEMORY.search(str(error)))


class error_phase(AbstractContextManager):
    """Context manager that marks its block as a phase of training, such as "forward", for error messages.

    If phases are nested, an error names the innermost phase.

    Args:
        name: name of the phase, as shown in the message.
        rows: rows of the dataset that the block works on; the message names the longest one.
    """

    def __init__(self, name: str, rows: Sequence = ()):
        self.name, self.rows = name, rows

    def __exit__(self, kind, error, traceback):
        if error is not None and not hasattr(error, "phase"):
            error.phase, error.rows = self.name, self.rows


@contextmanager
def optional_dependency(name: str, needed: str) -> Iterator[None]:
    """Context manager that converts an ImportError to a ValueError that says what to install.

    Args:
        name: extra of minivlmrl, such as "video".
        needed: beginning of the error message, such as "reading video files requires PyAV".
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{needed}; run pip install -e '.[{name}]' in your clone of minivlmrl") from error


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 row" or "3 rows"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def truncate(value: Any, limit: int, to_text: Callable[[Any], str] = repr) -> str:
    """Return a value's repr for an error message; a repr of more than `limit` characters is cut and ends with "...".

    Args:
        to_text: function that converts the value to text.
    """
    text = to_text(value)
    return text if len(text) <= limit else f"{text[:limit]}..."


def did_you_mean(name: str, names: Iterable[str], write: Callable[[str], str] = str) -> str:
    """Return a suggestion to append to an error message about an unknown name, such as "; did you mean shapes?".

    Returns:
        The text with the most similar name, or with two equally similar names; "" if no known name is similar.

    Args:
        name: the unknown name.
        names: the known names.
        write: function that returns how to write a known name.
    """
    words = {*name.split("_")}

    def similarity(known: str) -> float:
        is_short = len(words) > 1 and words <= {*known.split("_")}  # old_logps for old_per_token_logps
        return max(SIMILAR * is_short, difflib.SequenceMatcher(None, known, name.lower()).ratio())

    similarities = {known: similarity(known) for known in names}
    nearest = max(similarities.values(), default=0)
    if nearest < SIMILAR:
        return ""
    near = [known for known, value in similarities.items() if value == nearest]
    return f"; did you mean {' or '.join(map(write, near[:2]))}?"
