"""Suggest options for unknown names, from the table names.csv, which also makes the tables in docs/coming_from.md.

A row of names.csv has names separated by spaces: `theirs`, and the options `ours`. As many options as names belong
together in order, else all options belong to each name, and `grpo.*` stands for grpo.NAME.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")  # in notes, for the page
NO_OPTION = "minivlmrl has no such option"


class Answer(NamedTuple):
    """What the table says about one name."""

    name: str
    project: str  # where the name is from, such as "TRL"; "removed" for our earlier option
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
            for number, name in enumerate(names):
                ours = options[number : number + 1] if len(options) == len(names) else options
                ours = [option.replace("*", name) for option in ours]
                answers[name].append(Answer(name, row["project"], ours, LINK.sub(r"\1", row["note"])))
    return dict(answers)


def answer(section: str, key: str, dashes: str, options: Sequence[str]) -> str:
    """Explain what to use instead of an unknown option; return "" if nothing is known.

    Args:
        section: path with a trailing dot, such as "grpo.", or "".
        dashes: "--" on the command line, else "".
    """
    name = key.replace("-", "_")
    table = read_table()
    rows = table.get(section + name) or table.get(name, [])
    if not rows and not section:  # perhaps a removed option, written without its section
        removed = [found[0] for full, found in table.items() if full.endswith(f".{name}")]
        rows = [row for row in removed if row.project == "removed"]
    if rows and rows[0].project == "removed":
        return f"{rows[0].name} was removed. Instead: {rows[0].note}"
    groups = [row.options for row in rows if row.options]
    is_ours = not rows or bool(groups)
    if is_ours and not (section and (section + name in table or name in ("name", "path", "config"))):
        same = [option for option in options if name in (option.rpartition(".")[2], option.replace(".", "_"))]
        groups = [[option] for option in same] + groups
    notes = "; ".join(row.note.removeprefix("same; ") for row in rows if row.note not in ("", "same"))
    stages = [option.partition(".")[0] for option in options if option.endswith(".max_steps")]
    texts = [" and ".join(dashes + option for option in group) for group in for_all_stages(groups, stages, options)]
    if section[:-1] in stages and texts:
        others = tuple(f"{dashes}{stage}." for stage in stages if stage != section[:-1])
        here = [text for text in texts if not text.startswith(others)]
        if not here:
            return f"{NO_OPTION} in the section {section[:-1]}; {' and '.join(texts)} belong to other stages"
        texts = here
    if texts:
        return f"the name in minivlmrl is {' or '.join(texts)}" + (f" ({notes})" if notes else "")
    return f"{NO_OPTION}: {notes}" if rows else ""


def for_all_stages(groups: list[list[str]], stages: list[str], options: Sequence[str]) -> list[list[str]]:
    """Add sft.learning_rate and others to grpo.learning_rate, without repetitions."""
    found = [*groups]
    for group in groups:
        of_stages = [f"{stage}.{option.rpartition('.')[2]}" for option in group for stage in stages]
        if {*group} < {*of_stages} <= {*options}:
            found += [[option] for option in of_stages]
    return [group for index, group in enumerate(found) if group not in found[:index]]
