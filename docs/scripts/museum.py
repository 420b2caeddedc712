"""Read the exhibits of docs/museum.md: sections with a one-line diff of minimal.py, and table rows."""

import re
from pathlib import Path
from typing import NamedTuple

import minimal

SOURCE = Path(minimal.__file__).read_text(encoding="utf-8")
PAGE = (Path(__file__).parents[1] / "museum.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^## \d+\. (.+)\n(?s:.*?)^- (.+)\n\+ (.+)\n", re.MULTILINE)
ROW = re.compile(r"^\| \d+ \| (.+) \| (.+) \|$", re.MULTILINE)


class Exhibit(NamedTuple):
    title: str
    right: str  # part of minimal.py
    wrong: str
    found_by: str  # command, function or page
    says: str  # what it shows


EXHIBITS = [Exhibit(*section, *row) for section, row in zip(SECTION.findall(PAGE), ROW.findall(PAGE), strict=True)]


def changed(exhibit: Exhibit) -> dict:
    """Run minimal.py with the exhibit's wrong line; return the names that it defines."""
    if SOURCE.count(exhibit.right) != 1:
        raise ValueError(f"minimal.py has {exhibit.right!r} {SOURCE.count(exhibit.right)} times instead of once")
    names = {"__name__": "museum"}
    exec(compile(SOURCE.replace(exhibit.right, exhibit.wrong), "minimal.py", "exec"), names)
    return names
