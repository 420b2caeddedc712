"""The files that README tells a newcomer to read, in its order."""

import re
from pathlib import Path

from links import ROOT

SECTION = "## The reading list"


def reading_list() -> dict[Path, str]:
    """Return the table in README as {file: name of the function or class with which a reader begins}."""
    section = (ROOT / "README.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \[[\w./]+\]\(([\w./]+)\).*\| `([\w.]+)` \|$", section, re.MULTILINE)
    return {ROOT / file: name for file, name in rows}
