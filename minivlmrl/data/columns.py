"""Column names of data files; see docs/data.md."""

from typing import Annotated

from minivlmrl.config.types import BoxSpace
from minivlmrl.errors import UserError, did_you_mean, truncate

# {column with the prompt: type}; a row must have exactly one of these columns
PROMPTS = {"problem": str, "prompt": str | list, "messages": list}
ANSWERS = {"completion": str | list, "chosen": str | list, "rejected": str | list}
TEXTS = PROMPTS | ANSWERS
MEDIA = {"image": "image", "images": "image", "video": "video", "videos": "video"}
# columns read by every training stage
READ = {*PROMPTS, *MEDIA, "system", "box_space"}
VALUES = {  # {column: type hint, with bounds for numbers}
    "system": str,
    "box_space": BoxSpace,
    "margin": Annotated[float, "(-inf, inf)"],  # how much better the chosen answer is than the rejected one
    "label": bool,  # KTO: True for a good answer
}


def rename_columns(row: dict, renamed: dict[str, str]) -> dict:
    """Rename a row's columns, and convert NaN (from pandas) to None; two columns may swap names."""
    row = {name: value if value == value else None for name, value in row.items()}
    renamed = {theirs: ours for theirs, ours in renamed.items() if theirs != ours and theirs in row}
    columns = row | dict.fromkeys(renamed)
    for theirs, ours in renamed.items():
        if row[theirs] is None:
            columns.setdefault(ours, None)
            continue
        if columns.get(ours) is not None:
            raise UserError(
                f"data.columns renames {theirs!r} to {ours!r}, but the row already has both columns; remove one of them"
            )
        columns[ours] = row[theirs]
    return columns


def missing_column(name: str, columns: dict, cure: str) -> UserError:
    """Return the error for a missing or empty column.

    Args:
        cure: advice in the error message, such as how to rename the column.
    """
    if name in columns:
        return UserError(f"column {name!r} has no value in this row: write a value or remove the row")
    given = sorted(other for other, value in columns.items() if value is not None)
    unknown = [other for other in given if other not in (*TEXTS, *VALUES, *MEDIA, "solution")]
    meant = did_you_mean(name, unknown) or "."
    return UserError(f"column {name!r} is missing; the row has {truncate(given, 200)}{meant} {cure}")
