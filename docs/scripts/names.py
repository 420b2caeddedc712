"""Write the tables of docs/coming_from.md from minivlmrl/extras/names.csv: `python -m docs.scripts.make_pages`."""

import csv
import re

from docs.scripts.picture import DOCS

TABLE = DOCS.parent / "minivlmrl" / "extras" / "names.csv"
SECTIONS = {  # {title: projects in names.csv}
    "From TRL": ["TRL"],
    "From VLM-R1 and ms-swift": ["VLM-R1", "ms-swift"],
    "From EasyR1 and verl": ["EasyR1 or verl"],
}


def page() -> str:
    """Return the page, with the tables of the sections written again."""
    text = (DOCS / "coming_from.md").read_text(encoding="utf-8")
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for title, projects in SECTIONS.items():
        lines = [line(row, len(projects) > 1) for row in rows if row["project"] in projects]
        table = "".join(f"{line}\n" for line in lines)
        section = rf"(?s)(\n## {re.escape(title)}\n.*?\n\|[^\n]* here \|[^\n]*\n\|--[^\n]*\n)(?:\|[^\n]*\n)+"
        text = re.sub(section, lambda match, table=table: match[1] + table, text, count=1)
    return text


def line(row: dict[str, str], with_project: bool) -> str:
    """Return a line of a Markdown table."""
    theirs, ours = (", ".join(f"`{name}`" for name in row[side].split()) for side in ("theirs", "ours"))
    project = f"{row['project']} " if with_project else ""
    return f"| {project}{theirs} | {ours} | {row['note']} |".replace("|  |", "| |")
