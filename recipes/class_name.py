"""A reward to copy: is the answer the name of the class?

In a recipe, from the folder where the command runs:
    rewards: {recipes/class_name.py:class_name: 1.0}
"""

import functools
import re
from pathlib import Path

from minivlmrl.reward_functions.judges import DENIED, judge_rows
from minivlmrl.rewards import normalize


def class_name(answer_texts: list, solution: list, classes: list | str | None = None, **columns) -> list:
    """1.0 for the name of the class; case, spacing, - and _ do not matter.

    Args:
        classes: all names, or a text file with one in each line: then an answer may be a sentence
            that names one class alone and does not deny it. None: it is the name and nothing else.
    """
    if isinstance(classes, str):
        classes = Path(classes).read_text(encoding="utf-8").splitlines()
    names = frozenset(_words(name) for name in classes or () if name.strip())

    def named(text: str) -> str | None:
        there = set(_pattern(names).findall(_words(text)))
        denied = DENIED.search(_pattern(names).sub("", _words(text)))
        return there.pop() if len(there) == 1 and not denied else None

    read, kind = named if names else _words, f"class of {len(names)}"
    return judge_rows("class_name", kind, read, answer_texts, solution)


def _words(text: str) -> str:
    return normalize(re.sub(r"[-_\s]+", " ", text))


@functools.cache
def _pattern(names: frozenset[str]) -> re.Pattern:
    """Match whole names, the longest first: "green square" is not "square"."""
    any_of = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(?<!\w)(?:{any_of})(?!\w)")
