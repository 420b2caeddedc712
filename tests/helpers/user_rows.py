"""Read tests/rows/cases.json, a table with row files as users wrote them, and write messages for transformers.

In the table, a turn is a list: the role, then texts and parts, such as ["user", {"image": "red.png"}, "What?"]. A part
with another key than image or video, such as tool_calls, is a message field.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

ROWS = Path(__file__).parents[1] / "rows"
FILES, MODELS = ROWS / "files", ROWS / "models"
RECORDED = ROWS.parent / "recorded" / "rows_transformers_5.23.0.json"
# columns that a row must have for a stage
REQUIRED = {
    "sft": ("problem", "completion"),
    "dpo": ("problem", "chosen", "rejected"),
    "kto": ("problem", "completion", "label"),
    "grpo": ("problem",),
}
ANSWERS = ("completion", "chosen", "rejected")


@dataclass
class Case:
    """A row file, and either its rows' messages or words in the error message."""

    file: str
    reference: str  # URL for the report or the page that shows such a row
    model: str = "qwen2_5_vl"  # folder in tests/rows/models
    template: str = ""  # file in tests/rows/files that replaces the model's chat template
    stage: str = "sft"
    options: dict = field(default_factory=dict)  # fields for RowOptions
    # for each row: its turns under "prompt" and ANSWERS, and its values in other columns
    rows: list[dict] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # words in the error message
    skipped: list[int] = field(default_factory=list)  # rows that data.skip_unreadable skips
    typed: bool = False  # whether texts spell control tokens that must stay text


def read_cases() -> dict[str, Case]:
    """Return {name: case}."""
    table = json.loads((ROWS / "cases.json").read_text(encoding="utf-8"))
    return {name: Case(**case) for name, case in table.items()}


def to_messages(turns: list[list]) -> list[dict]:
    """Return the table's turns as messages for transformers, whose images and videos are paths in FILES."""
    messages = []
    for role, *items in turns:
        message = {"role": role, "content": []}
        for item in items:
            if isinstance(item, str):
                message["content"].append({"type": "text", "text": item})
            elif "image" in item or "video" in item:
                message["content"].append({"type": "image" if "image" in item else "video", **item})
            else:
                message |= item
        messages.append(message)
    return messages


def pack_ids(ids: list[int]) -> list:
    """Replace each run of more than 3 equal ids by [id, length]."""
    packed = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[start]:
            run = end - start
            packed += [[ids[start], run]] if run > 3 else [ids[start]] * run
            start = end
    return packed


def unpack_ids(packed: list) -> list[int]:
    """Return the ids that pack_ids packed."""
    ids = []
    for item in packed:
        ids += [item[0]] * item[1] if isinstance(item, list) else [item]
    return ids


def mean_colors(patches, grids) -> list:
    """Return the mean colour of each quarter of each picture, which shows its content, its order and its orientation.

    Args:
        patches: (patches in all pictures, channels * temporal * height * width), ordered as in Qwen's image processor.
        grids: (pictures, 3): patches in time, height and width.
    Returns:
        For each temporal patch, 2 x 2 x 3 numbers in the same units as the patches.
    """
    colors = []
    start = 0
    for t, h, w in [[int(side) for side in grid] for grid in grids]:
        end = start + t * h * w
        means = patches[start:end].float().reshape(t, h // 2, w // 2, 2, 2, 3, -1).mean(-1)
        image = means.permute(0, 1, 3, 2, 4, 5).reshape(t, 2, h // 2, 2, w // 2, 3).mean((2, 4))
        colors += [[[[round(float(x), 2) for x in c] for c in row] for row in frame] for frame in image]
        start = end
    assert start == len(patches)
    return colors
