"""Name the columns of a row in a data file; docs/data.md describes the columns."""

from typing import Annotated

from minivlmrl.config.types import BoxSpace

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
    """Raised for a row in the layout of another project; the command `convert` can read such rows."""


def rename_columns(row: dict, renamed: dict[str, str]) -> dict:
    """Rename a row's columns all at once, so that two columns can swap names. pandas' NaN becomes None."""
    row = {name: value if value == value else None for name, value in row.items()}  # NaN differs from itself
    renamed = {theirs: ours for theirs, ours in renamed.items() if theirs != ours and row.get(theirs) is not None}
    columns = row | dict.fromkeys(renamed)
    for theirs, ours in renamed.items():
        if columns.get(ours) is not None:
            raise ValueError(
                f"data.columns renames {theirs!r} to {ours!r}, but the row already has both columns; remove one of them"
            )
        columns[ours] = row[theirs]
    return columns
