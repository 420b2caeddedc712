"""Demonstrated boxes in pixels of the image file, rewritten in the space that is asked for."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from minivlmrl.data.boxes import NUMBER, Box, extent
from minivlmrl.data.turns import text_of
from minivlmrl.hub.checker import naming
from minivlmrl.rows import Dataset, Row

BETWEEN = r"\)?[\s,]+\(?"
FOUR = BETWEEN.join([f"({NUMBER})"] * 4)
WRITTEN = re.compile(
    rf'(\[\s*|data-bbox="\s*|<\|box_start\|>\s*\(\s*){FOUR}(\s*\)\s*<\|box_end\|>|\s*\]|\s*")'
)
# alone in its key: [1, 2] in a text could be anything
POINTED = re.compile(rf'("point_2d"\s*:\s*\[\s*)({NUMBER}){BETWEEN}({NUMBER})(\s*\])')


class Rescaled(Sequence):
    """Rows whose answers have boxes and points in box_space, as WRITTEN and POINTED know them."""

    def __init__(self, rows: Dataset, sized: Callable[[Row], tuple], box_space: str = "resized"):
        # row -> (width, height) of its image file, and as the model sees it
        self.rows, self.sized, self.box_space = rows, sized, box_space

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        row = self.rows[index]
        answers = {name: getattr(row, name) for name in ("completion", "chosen", "rejected")}
        if not row.images or not re.search(f"{WRITTEN.pattern}|{POINTED.pattern}", str(answers)):
            return row
        with naming(row.where):
            if len(row.images) > 1:
                raise ValueError("data.rescale_boxes: the row has several images; boxes of which?")
            size, resized = self.sized(row)
            space = row.columns.get("box_space") or self.box_space
            how = size, extent(space, size, resized), space
            return replace(row, **{name: _answer(said, *how) for name, said in answers.items()})


def rescale(
    text: str, size: tuple[int, int], target: tuple[float, float], digits: int | None = None
) -> str:
    """Write the boxes and points of a text in other units, rounded to whole numbers or some digits.

    Example: "[10, 10, 20, 20]" of an image of 100 x 50 is "[100, 200, 200, 400]" in thousandths.
    """

    def written(found: re.Match) -> str:
        before, *corners, after = found.groups()
        box = Box(*map(float, (corners * 2)[:4]), tuple(map(float, size))).to(target)
        numbers = (round(value, digits) for value in (box.x1, box.y1, box.x2, box.y2))
        between = found[0][len(before) : len(found[0]) - len(after)]
        return before + re.sub(NUMBER, lambda _: str(next(numbers)), between) + after

    return POINTED.sub(written, WRITTEN.sub(written, text))


def _answer(answer: str | list | None, size, target, space: str) -> str | list | None:
    how = size, target, 4 if space == "unit" else None
    if not isinstance(answer, list):
        return answer and rescale(answer, *how)
    turns = []
    for turn in answer:
        said = {"content": rescale(text_of(turn), *how)} if turn["role"] == "assistant" else {}
        turns.append(turn | said)
    return turns
