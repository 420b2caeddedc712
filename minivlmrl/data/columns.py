"""Name the columns of a row in a data file; docs/data.md describes the columns."""

from typing import Annotated

from minivlmrl.config.types import BoxSpace
from minivlmrl.errors import did_you_mean, truncate

# {column: types of its values}; a row may have only one of the columns problem, prompt and messages
PROMPTS = {"problem": str, "prompt": str | list, "messages": list}
ANSWERS = {"completion": str | list, "chosen": str | list, "rejected": str | list}
TEXTS = PROMPTS | ANSWERS
MEDIA = {"image": "image", "images": "image", "video": "video", "videos": "video"}
# columns that every training stage reads
READ = {*PROMPTS, *MEDIA, "system", "box_space"}
VALUES = {  # {column: type and bounds of its values}
    "system": str,
    "box_space": BoxSpace,
    "margin": Annotated[float, "(-inf, inf)"],  # how much better `chosen` is than `rejected`
    "label": bool,  # for KTO: True if the completion is a good answer
}


class LayoutError(ValueError):
    """Raised for a row in the layout of another project; the `convert` command can read such rows."""


class EmptyColumnError(LayoutError):
    """Raised for a missing value that the row may contain in another project's layout."""


def rename_columns(row: dict, renamed: dict[str, str]) -> dict:
    """Rename a row's columns all at once, so that two columns can swap names. pandas' NaN becomes None."""
    row = {name: value if value == value else None for name, value in row.items()}  # NaN differs from itself
    renamed = {theirs: ours for theirs, ours in renamed.items() if theirs != ours and theirs in row}
    columns = row | dict.fromkeys(renamed)
    for theirs, ours in renamed.items():
        if row[theirs] is None:
            columns.setdefault(ours, None)
            continue
        if columns.get(ours) is not None:
            raise ValueError(
                f"data.columns renames {theirs!r} to {ours!r}, but the row already has both columns; remove one of them"
            )
        columns[ours] = row[theirs]
    return columns


def missing_column(name: str, columns: dict, cure: str) -> ValueError:
    """Return the error for a column without a value: a LayoutError if the row may have another project's layout.

    Args:
        name: the column, which is missing in the row or contains None.
        columns: the row's columns.
        cure: how to rename a column or do without it; a sentence without its period.
    """
    given = sorted(other for other, value in columns.items() if value is not None)
    unknown = [other for other in given if other not in (*TEXTS, *VALUES, *MEDIA, "solution")]
    if name in columns:
        kind = EmptyColumnError if any(isinstance(columns[other], str | list) for other in unknown) else ValueError
        return kind(f"column {name!r} has no value in this row: write a value or remove the row")
    meant = did_you_mean(name, unknown)
    kind = ValueError if meant else LayoutError
    return kind(f"column {name!r} is missing; the row has {truncate(given, 200)}{meant or '.'} {cure}")
