"""Explain unknown options, such as TRL's name for a minivlmrl option.

The names are in the table names.csv, from which docs/coming_from.md is generated. The table columns `theirs` and `ours`
contain names separated by spaces. If both have the same number of names, they correspond in order; otherwise, all
options in `ours` belong to each name in `theirs`. `grpo.*` stands for grpo.NAME.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")  # Markdown links in notes; messages show only their text
NO_OPTION = "minivlmrl has no such option"


class Answer(NamedTuple):
    """An entry in names.csv: another project's option name, and what to use instead."""

    name: str
    project: str  # project that has this option, such as "TRL"; "removed" if minivlmrl had it earlier
    options: list[str]  # what to use instead, such as ["grpo.beta"]
    note: str


@cache
def read_table() -> dict[str, list[Answer]]:
    """Read names.csv as {name: answers}."""
    answers = defaultdict(list)
    with Path(__file__).with_name("names.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            names = row["theirs"].split()
            options = row["ours"].split()
            note = LINK.sub(r"\1", row["note"])
            for number, name in enumerate(names):
                ours = [options[number]] if len(options) == len(names) else options
                ours = [option.replace("*", name) for option in ours]
                answers[name].append(Answer(name, row["project"], ours, note))
    return dict(answers)


def answer(section: str, key: str, dashes: str, options: Sequence[str]) -> str:
    """Explain what to use instead of an unknown option; return "" if the table does not have it.

    Args:
        section: the unknown option's section with a dot, such as "grpo.", or "".
        dashes: "--" for an option on the command line, else "".
    """
    name = key.replace("-", "_")
    table = read_table()
    rows = table.get(section + name) or table.get(name, [])
    if not rows and not section:  # a removed option may be written without its section
        first_rows = [found[0] for full, found in table.items() if full.endswith(f".{name}")]
        rows = [row for row in first_rows if row.project == "removed"]
    if rows and rows[0].project == "removed":
        return f"{rows[0].name} was removed. Instead: {rows[0].note}"
    groups = [row.options for row in rows if row.options]
    is_ours = not rows or bool(groups)
    is_explained = section + name in table or name in ("name", "path", "config")
    if is_ours and not (section and is_explained):
        same = []
        for option in options:
            spellings = (option.rpartition(".")[2], option.replace(".", "_"))
            if name in spellings:
                same.append([option])
        groups = same + groups
    notes = [row.note.removeprefix("same; ") for row in rows if row.note not in ("", "same")]
    note = "; ".join(notes)
    stages = [option.partition(".")[0] for option in options if option.endswith(".max_steps")]
    texts = []
    for group in for_all_stages(groups, stages, options):
        texts.append(" and ".join(dashes + option for option in group))
    stage = section[:-1]
    if stage in stages and texts:
        others = tuple(f"{dashes}{other}." for other in stages if other != stage)
        here = [text for text in texts if not text.startswith(others)]
        if not here:
            return f"{NO_OPTION} in the section {stage}; {' and '.join(texts)} belong to other stages"
        texts = here
    if texts:
        suffix = f" ({note})" if note else ""
        return f"the name in minivlmrl is {' or '.join(texts)}{suffix}"
    return f"{NO_OPTION}: {note}" if rows else ""


def for_all_stages(groups: list[list[str]], stages: list[str], options: Sequence[str]) -> list[list[str]]:
    """Add the same option in other stages, such as sft.learning_rate to grpo.learning_rate, without repetitions."""
    found = [*groups]
    for group in groups:
        names = [option.rpartition(".")[2] for option in group]
        of_stages = [f"{stage}.{name}" for name in names for stage in stages]
        if {*group} < {*of_stages} <= {*options}:
            found += [[option] for option in of_stages]
    return [group for index, group in enumerate(found) if group not in found[:index]]
