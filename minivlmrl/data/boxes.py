"""Parse bounding boxes from text, convert coordinates, and compute overlaps.

A box has a top left and a bottom right corner in continuous coordinates: x runs from 0 to the image width, and a box
around one pixel has x2 - x1 = 1.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

import numpy as np

from minivlmrl.config.types import BoxSpace, Plain
from minivlmrl.data.markup import PLAIN_SIGNS, read_json, unwrap
from minivlmrl.errors import optional_dependency

Item = TypeVar("Item")
SPACES = get_args(BoxSpace)
LIMIT = 1e100  # coordinates of at least 1e100 are invalid, because box areas could overflow

NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
COMMA = r"(?:\s*,\s*|\s+)"
PAIR = rf"\(\s*{NUMBER}{COMMA}{NUMBER}\s*\)"
FOUR = COMMA.join([NUMBER] * 4)
GROUP = rf"(?:\[\s*{FOUR}\s*\]|{PAIR}\s*(?:,\s*)?{PAIR})"
GROUPS = re.compile(rf"{FOUR}|{GROUP}(?:\s*(?:,\s*)?{GROUP})*", re.ASCII)
MARKED_BOX = re.compile(rf"\[\s*{FOUR}\s*\]|{PAIR}\s*,\s*{PAIR}")  # matches [1, 2, 5, 6] or (1, 2), (5, 6)
KEYS = ("bbox_2d", "bbox", "Position")
QWEN2 = re.compile(r"<\|object_ref_start\|>[^<]*<\|object_ref_end\|>|<\|box_start\|>|<\|box_end\|>")


@dataclass(frozen=True)
class Box:
    """A bounding box and its image size."""

    x1: float
    y1: float
    x2: float
    y2: float
    extent: tuple[float, float]  # image (width, height), in the units of the coordinates

    def to(self, extent: tuple[float, float]) -> "Box":
        """Scale a box to another image size, for example after resizing.

        Example: if the image (width, height) changes from (100, 50) to (200, 200), the box (10, 10, 20, 20) becomes
        (20, 40, 40, 80).
        """
        if extent == self.extent:
            return self
        numbers = zip(self.numbers, extent * 2, self.extent * 2, strict=True)
        # multiply first: integer products are exact, so only the division rounds
        x1, y1, x2, y2 = (number * new / old for number, new, old in numbers)
        return Box(x1, y1, x2, y2, extent)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        return self.x1, self.y1, self.x2, self.y2

    @property
    def area(self) -> float:
        return (self.x2 - self.x1) * (self.y2 - self.y1)

    @property
    def valid(self) -> bool:
        """Whether the box has finite coordinates, corners in order, and a positive area."""
        is_finite = all(abs(number) < LIMIT for number in self.numbers)
        return is_finite and self.x2 > self.x1 and self.area > 0  # with x2 > x1, a positive area implies y2 > y1

    def inside(self) -> bool:
        """Return True if the box is inside its image, with a tolerance of 1e-6 times the image size."""
        numbers = zip(self.numbers, self.extent * 2, strict=True)
        return all(-1e-6 * side <= number <= side + 1e-6 * side for number, side in numbers)


def iou(a: Box, b: Box) -> float:
    """Compute the intersection over union (IoU) of two boxes, 0 to 1; invalid boxes give 0.

    Example: (0, 0, 2, 2) and (1, 0, 3, 2) share area 2 out of 6, so their IoU is 1/3.
    Source: Jaccard's index; torchvision's box_iou.
    """
    if not (a.valid and b.valid):
        return 0.0
    assert a.extent == b.extent, "the boxes have different extents; convert one box with Box.to"
    width = min(a.x2, b.x2) - max(a.x1, b.x1)
    height = min(a.y2, b.y2) - max(a.y1, b.y1)
    intersection = max(0.0, width) * max(0.0, height)
    # subtract the intersection first: then rounding never makes the union smaller than the intersection
    return intersection / (a.area + (b.area - intersection))


def match(
    predicted: Sequence[Item], truth: Sequence[Item], similarity: Callable[[Item, Item], float]
) -> list[tuple[int, int]]:
    """Match predicted to true boxes one to one, maximizing total similarity.

    Example: IoUs [[0.6, 0.5], [0.5, 0]] between two predicted boxes (rows) and two true boxes (columns) give [(0, 1),
    (1, 0)], because 0.5 + 0.5 is more than 0.6 + 0.

    Returns:
        (predicted index, true index) per match; every box in the shorter list is matched.
    """
    if not predicted or not truth:
        return []
    table = np.array([[similarity(box, true_box) for true_box in truth] for box in predicted])
    if 1 in table.shape:
        return [divmod(int(table.argmax()), len(truth))]
    with optional_dependency("boxes", "matching several boxes needs scipy"):
        from scipy.optimize import linear_sum_assignment
    chosen, true = linear_sum_assignment(table, maximize=True)
    return list(zip(chosen.tolist(), true.tolist(), strict=True))


def says_none(text: str) -> bool:
    """Return True if an answer says that there is no object: "[]", "None" or "No such object"."""
    return unwrap(text.translate(PLAIN_SIGNS)).casefold() in ("[]", "none", "no such object")


def parse_boxes(text: str) -> list[tuple[float, float, float, float]]:
    """Parse bounding boxes from a text in one of these formats:

        {"bbox_2d": [1, 2, 5, 6], "label": "cat"}    Qwen2.5-VL's JSON; other keys are ignored
        {'Position': [1, 2, 5, 6]}                   key Position or bbox instead of bbox_2d
        [{"bbox_2d": [1, 2, 5, 6]}, [7, 7, 8, 9]]    JSON list with objects or lists
        [1, 2, 5, 6] [7, 7, 8, 9.5]                  one or more lists, with or without commas
        (1, 2), (5, 6)                               corners of one or more boxes
        1 2 5 6                                      one box, with or without commas
        <|box_start|>(1,2),(5,6)<|box_end|>          Qwen2-VL's format, with or without an object name

    Markdown or LaTeX around a box, such as a code fence, and a final period are ignored.

    Returns:
        (x1, y1, x2, y2) of each box, all finite; Box.valid and Box.inside check more.
        An empty list if the text contains other words or numbers, as in "not [1, 2, 5, 6]".

    Source: Qwen2.5-VL's cookbook.
    """
    text = QWEN2.sub(" ", text)
    try:
        groups = [value_of(item) if isinstance(item, dict) else item for item in json_items(text)]
    except ValueError:
        text = unwrap(text.translate(PLAIN_SIGNS))
        numbers = [float(n) for n in re.findall(NUMBER, text)] if GROUPS.fullmatch(text) else []
        groups = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
    for group in groups:
        is_list = isinstance(group, list) and len(group) == 4
        if not is_list or not all(isinstance(number, float) and math.isfinite(number) for number in group):
            return []
    return [(x1, y1, x2, y2) for x1, y1, x2, y2 in groups]


def json_items(text: str) -> list[Plain]:
    """Parse a JSON list with boxes, given as objects or lists; a single box becomes a list with one item."""
    value = read_json(text, parse_int=float)
    is_several = isinstance(value, list) and all(isinstance(item, list | dict) for item in value)
    return value if is_several else [value]


def value_of(item: dict) -> Plain:
    """Return the box in a JSON object, from key "bbox_2d", "bbox" or "Position"."""
    return next((item[key] for key in KEYS if key in item), None)
