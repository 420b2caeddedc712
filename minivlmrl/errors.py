"""Functions for error messages: where an error occurred, which value is wrong, and which name was probably meant."""

import difflib
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

PACKAGE = Path(__file__).resolve().parent
# folders with this project's code; kernels and recipes are beside the package in a clone
OURS = tuple(f"{PACKAGE.parent / name}{os.sep}" for name in (PACKAGE.name, "kernels", "recipes"))
# files of code that options name, except those of this package; see config/import_utils.py
USER_FILES: set[str] = set()

# quoted texts of 80 characters or more (apostrophes are no quotes), and words of 500 characters or more
LONG_QUOTES = re.compile(r"""(?<!\w)'[^']{80,}'(?!\w)|"[^"]{80,}"|[^\s'"]{500,}""")

# messages of PyTorch, CUDA and cuBLAS if an allocation fails
NO_MEMORY = re.compile("out of memory|not enough memory|can't allocate memory|STATUS_ALLOC_FAILED", re.IGNORECASE)


class error_context(AbstractContextManager):
    """Prefix errors raised in the block with the file, row or field concerned.

    A ValueError that already begins with this prefix does not get the prefix twice. Errors of other types, which users'
    code may raise, keep their type and get a note.
    """

    # error_context is a class, because a generator is slower, and each of 200,000 rows enters several contexts.
    def __init__(self, where: str | Path):
        self.where = where

    def __exit__(self, kind, error, traceback):
        if isinstance(error, ValueError):
            if not str(error).startswith(f"{self.where}: "):
                raise ValueError(f"{self.where}: {shortened(error)}") from error
        elif isinstance(error, Exception):
            error.add_note(f"in {self.where}")


def mistake(error: BaseException) -> str | None:
    """Describe an error in one line if the user can correct it without a traceback, else None.

    The user can correct a lack of memory, errors of the system such as a full disk, and errors that a `raise` statement
    of this package raised. An error in a user's own file needs its traceback.
    """
    if is_out_of_memory(error):
        size = f" ({shortened(str(error).splitlines()[0])})" if str(error) else ""  # the first line has it, if known
        return f"not enough memory{size}; decrease the sizes in the recipe or in the files of the model"
    last = extract_tb(error.__traceback__)[-1]
    is_raised = last.filename.startswith(OURS) and (last.line or "").startswith("raise ")
    is_known = isinstance(error, ValueError | FloatingPointError) and is_raised
    if not is_known and not isinstance(error, OSError):
        return None
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    for frame in reversed(extract_tb(cause.__traceback__)):
        if frame.filename.startswith(OURS) or is_out_of_memory(cause):
            break
        if frame.filename in USER_FILES:
            return None
    message = "; ".join([str(error), *getattr(error, "__notes__", ())])
    line = " ".join(message.split())
    is_path = isinstance(error, OSError) and len(line) < 500  # the end of a path tells most
    return line if is_path else shortened(line)


def check_field(valid: bool, name: str, value: Any, expected: str):
    """Raise ValueError with the name, the value and the expected value unless `valid` is true.

    Dataclasses call this function in `__post_init__` for rules about several fields.
    """
    if not valid:
        raise _invalid(name, value, expected)


def _invalid(name: str, value: Any, expected: str) -> ValueError:
    # reprlib is used, because repr is slow for a long list
    shown = reprlib.repr(value) if isinstance(value, list | dict) else repr(value)
    return ValueError(f"{name} is {shown:.80}, but it must be {expected}")


def shortened(error: str | Exception) -> str:
    """Shorten long quoted texts in an error message, because such texts may be images in base64."""
    return LONG_QUOTES.sub(lambda quote: f"{quote[0][:80]}...{quote[0][-1]}", str(error))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an allocation failed, on a GPU or in the memory of the host.

    PyTorch raises OutOfMemoryError for a GPU, and a plain RuntimeError for the host and in CUDA's libraries. The class
    is compared by name, because this module must not import torch.
    """
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    return type(error).__name__ == "OutOfMemoryError" or bool(NO_MEMORY.search(str(error)))


class phase(AbstractContextManager):
    """Mark a block as one phase of a run, such as "forward", for the messages after an error.

    An error gets the attributes `phase` and `rows` of the innermost block around it.

    Args:
        name: name of the phase, as the message shows it.
        rows: rows of the dataset that the block works on; the message names the longest one.
    """

    def __init__(self, name: str, rows: Sequence = ()):
        self.name, self.rows = name, rows

    def __exit__(self, kind, error, traceback):
        if error is not None and not hasattr(error, "phase"):
            error.phase, error.rows = self.name, self.rows


@contextmanager
def optional_dependency(name: str, needed: str) -> Iterator[None]:
    """Convert an ImportError in the block to a ValueError that explains which extra to install.

    Args:
        name: extra of minivlmrl, such as "video".
        needed: beginning of the error message, such as "reading video files requires PyAV".
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{needed}; run pip install -e '.[{name}]' in your clone of minivlmrl") from error


def check_extras(target: str, name: str):
    """Raise ValueError if `target` is in the folder extras/, which a copy of this package may lack.

    Args:
        target: module, or "module:name", that the core knows by this text alone.
        name: the command, option value or model type that loads the target, for the message.
    """
    is_extra = target.startswith("minivlmrl.extras.")
    if is_extra and not Path(__file__).with_name("extras").joinpath("__init__.py").is_file():
        raise ValueError(f"{name} needs minivlmrl/extras, which this copy lacks")


def did_you_mean(name: str, names: Iterable[str], prefix: str = "", count: int = 1, cutoff: float = 0.6) -> str:
    """Return the end of a message about an unknown name: "; did you mean shapes?", or "".

    Args:
        name: the unknown name.
        names: the known names.
        prefix: path of the section of `names`, with a dot at the end.
        count: maximum number of suggestions.
        cutoff: minimum similarity of a suggestion, from 0 to 1 (difflib's ratio).
    """
    nearest = difflib.get_close_matches(name, names, count, cutoff)
    if not nearest:
        return ""
    return f"; did you mean {' or '.join(prefix + match for match in nearest)}?"
