"""Say where an error occurred, which value is wrong, and which name was probably meant."""

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

# quoted texts of 80 characters or more (not apostrophes), and words of 500 characters or more
LONG_QUOTES = re.compile(r"""(?<!\w)'[^']{80,}'(?!\w)|"[^"]{80,}"|[^\s'"]{500,}""")


class error_context(AbstractContextManager):
    """Prefix errors raised in the block with the file, row or field concerned."""

    # A class is faster than a generator with @contextmanager, which matters because each of 200,000
    # rows enters several contexts.
    def __init__(self, where: str | Path):
        self.where = where

    def __exit__(self, kind, error, traceback):
        if isinstance(error, ValueError):
            raise ValueError(f"{self.where}: {shortened(error)}") from error


def check_field(valid: bool, name: str, value: Any, expected: str):
    """Raise ValueError with the name, the value and the expected value unless `valid` is true.

    Dataclasses call this function in `__post_init__` for rules about several fields.
    """
    if not valid:
        raise _invalid(name, value, expected)


def _invalid(name: str, value: Any, expected: str) -> ValueError:
    # reprlib, because repr is slow for a long list
    shown = reprlib.repr(value) if isinstance(value, list | dict) else repr(value)
    return ValueError(f"{name} is {shown:.80}, but it must be {expected}")


def shortened(error: str | Exception) -> str:
    """Shorten long quoted texts in an error message, because such texts may be images in base64."""
    return LONG_QUOTES.sub(lambda quote: f"{quote[0][:80]}...{quote[0][-1]}", str(error))


def out_of_memory(error: MemoryError) -> str:
    """Describe a MemoryError in one sentence; that of NumPy has the size of the array."""
    size = f" ({error})" if str(error) else ""
    return f"not enough memory{size}; decrease the sizes in the recipe or in the files of the model"


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
        raise ValueError(
            f"{needed}; run pip install -e '.[{name}]' in your clone of minivlmrl"
        ) from error


def did_you_mean(
    name: str, names: Iterable[str], prefix: str = "", count: int = 1, cutoff: float = 0.6
) -> str:
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
