"""Suggest options for unknown names, from tables in docs/coming_from.md and other_names.md."""

import re
from collections import defaultdict
from functools import cache
from typing import NamedTuple

from minivlmrl.errors import PACKAGE

CELLS = re.compile(r"(?<!\\)\|")
CODE = re.compile(r"`(\w[\w.]*\*?)[^`]*`")
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
FILES = (
    PACKAGE / "docs" / "coming_from.md",  # in an installed wheel
    PACKAGE.parent / "docs" / "coming_from.md",  # in a git clone
    PACKAGE / "extras" / "other_names.md",
)
NO_OPTION = "minivlmrl has no such option"


class Answer(NamedTuple):
    name: str
    title: str  # column title, such as "TRL" or "removed"
    here: str  # corresponding minivlmrl options, or "none"
    note: str


@cache
def read_tables() -> dict[str, list[Answer]]:
    """Read the Markdown tables in FILES, as {option name: table rows}."""
    text = "".join(file.read_text(encoding="utf-8") for file in FILES if file.is_file())
    found, title = defaultdict(list), ""
    for line in text.splitlines():
        cells = [LINK.sub(r"\1", cell).strip() for cell in CELLS.split(line)[1:-1]]
        if not cells or line.startswith("|--"):
            continue
        theirs, here, note = [*cells, ""][:3]
        names, parts = CODE.findall(theirs), here.split(", ")
        title = title if names else theirs
        for number, name in enumerate(names):
            part = parts[number] if len(parts) == len(names) else here
            found[name].append(Answer(name, title, part.replace(".*", f".{name}"), note))
    return found


def answer(section: str, key: str, dashes: str, options: list[str]) -> str:
    """Explain what to use instead of an unknown option; return "" if nothing is known.

    Args:
        section: path with a trailing dot, such as "grpo.", or "".
        dashes: "--" on the command line, else "".
    """
    name, tables = key.replace("-", "_"), read_tables()
    named = tables.get(section + name) or tables.get(name, [])
    if not named and not section:  # perhaps a removed option, written without its recipe section
        named = [row for full in tables if full.endswith(f".{name}") for row in tables[full] if row.title == "removed"]
    for row in named:
        if row.title == "removed":
            return f"{row.name} was removed. Instead: {row.here}"
    same = [option for option in options if name in (option.rpartition(".")[2], option.replace(".", "_"))]
    is_other = section and (section + name in tables or name in ("name", "path", "config"))
    groups = [[option] for option in same if not is_other]
    groups += [[option for option in CODE.findall(row.here) if option in options] for row in named]
    stages = [option.partition(".")[0] for option in options if option.endswith(".max_steps")]
    # suggest sft.learning_rate too, although the Markdown tables list only grpo.learning_rate
    for group in [*groups]:
        of_stages = [f"{stage}.{option.rpartition('.')[2]}" for option in group for stage in stages]
        if {*group} < {*of_stages} <= {*options}:
            groups += [[option] for option in of_stages]
    texts = dict.fromkeys(" and ".join(dashes + option for option in group) for group in groups if group)
    notes = "; ".join(row.note.removeprefix("same; ") for row in named if row.note not in ("", "same"))
    if section[:-1] in stages:
        others = tuple(f"{dashes}{stage}." for stage in stages if stage != section[:-1])
        here = [text for text in texts if not text.startswith(others)]
        if texts and not here:
            return f"{NO_OPTION} in the section {section[:-1]}; {' and '.join(texts)} belong to other stages"
        texts = here
    if texts:
        return f"the name in minivlmrl is {' or '.join(texts)}" + (f" ({notes})" if notes else "")
    here = "; ".join(row.here for row in named if row.here != "none")
    return f"{NO_OPTION}: {'; '.join(filter(None, (here, notes)))}" if named else ""
