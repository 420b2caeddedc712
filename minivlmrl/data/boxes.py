"""Boxes: which space they are in, how they overlap, and what a text says about them.

A box is two corners, top left and bottom right, in continuous coordinates: an image begins at 0 and
ends at its width. So a box of one whole pixel is 1 wide, and no formula adds or takes 1.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from minivlmrl.config.parsing import optional_dependency
from minivlmrl.config.types import Plain
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Prompt, Row

Item = TypeVar("Item")
SPACES = ("original", "resized", "thousandths", "unit")
LIMIT = 1e100  # from here on a coordinate is in no image, and areas might overflow

NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
COMMA = r"(?:\s*,\s*|\s+)"
PAIR = rf"\(\s*{NUMBER}{COMMA}{NUMBER}\s*\)"
FOUR = COMMA.join([NUMBER] * 4)
GROUP = rf"(?:\[\s*{FOUR}\s*\]|{PAIR}\s*(?:,\s*)?{PAIR})"
GROUPS = re.compile(rf"{FOUR}|{GROUP}(?:\s*(?:,\s*)?{GROUP})*", re.ASCII)
KEYS = ("bbox_2d", "bbox", "Position")  # of an object in JSON, where its box may be
QWEN2 = re.compile(r"<\|object_ref_start\|>[^<]*<\|object_ref_end\|>|<\|box_start\|>|<\|box_end\|>")
FENCED = re.compile(r"```(?:json)?\s(.*)```", re.DOTALL)


def extent(space: str, original: tuple[int, int], resized: tuple[int, int]) -> tuple[float, float]:
    """Width and height of a whole image in the units of a space; original and resized in pixels.

    "original": pixels of the file; "resized": pixels of the image that the model sees, as
    Qwen2.5-VL writes; "thousandths": 0 to 1000, as Qwen2-VL and Qwen3-VL write; "unit": 0 to 1.
    """
    if space not in SPACES:
        raise ValueError(f"unknown space {space!r} for boxes; there are: {', '.join(SPACES)}")
    extents = {
        "original": original,
        "resized": resized,
        "thousandths": (1000, 1000),
        "unit": (1, 1),
    }
    return extents[space]


def box_columns(
    rows: Sequence[Row], prompts: Sequence[Prompt], processor: Processor, num_generations: int
) -> dict[str, list]:
    """List image_sizes and answer_extents, (width, height) of each answer's first image.

    An answer's space is the row's answer_extent, or its box_space, or the processor's.
    """
    image_sizes = []
    answer_extents = []
    patch_size = processor.image_processor.patch_size
    for row, prompt in zip(rows, prompts, strict=True):
        image_size = None
        answer_extent = None
        if row.images:
            _, height, width = prompt.image_grid_thw[prompt.second_per_grid_ts == 0][0].tolist()
            # known after the prompt was made
            image_size = getattr(row.images, "sizes", {}).get(0) or row.images[0].size
            box_space = row.columns.get("box_space") or processor.box_space
            resized_size = width * patch_size, height * patch_size
            answer_extent = row.columns.get("answer_extent")
            if not answer_extent:
                answer_extent = extent(box_space, image_size, resized_size)
        image_sizes += [image_size] * num_generations
        answer_extents += [answer_extent] * num_generations
    return {"image_sizes": image_sizes, "answer_extents": answer_extents}


@dataclass(frozen=True)
class Box:
    """Two corners and the width and height of the whole image in the same units."""

    x1: float
    y1: float
    x2: float
    y2: float
    extent: tuple[float, float]

    def to(self, extent: tuple[float, float]) -> "Box":
        """Convert to other units, whole pixels to the float nearest to the exact quotient.

        Example: (10, 10, 20, 20) of (100, 50) is (20, 40, 40, 80) of (200, 200).
        """
        if extent == self.extent:
            return self
        numbers = zip(self.numbers, extent * 2, self.extent * 2, strict=True)
        x1, y1, x2, y2 = (number * new / old for number, new, old in numbers)
        return Box(x1, y1, x2, y2, extent)

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """Return the corners, x1, y1, x2, y2."""
        return self.x1, self.y1, self.x2, self.y2

    @property
    def area(self) -> float:
        """Return width times height."""
        return (self.x2 - self.x1) * (self.y2 - self.y1)

    @property
    def valid(self) -> bool:
        """Tell whether the corners are finite and in order, with some area between them."""
        is_finite = all(abs(number) < LIMIT for number in self.numbers)  # False for NaN
        return is_finite and self.x2 > self.x1 and self.area > 0  # which needs y2 > y1

    def inside(self) -> bool:
        """Tell whether all of it is in its image, but for a millionth of the image's sides."""
        numbers = zip(self.numbers, self.extent * 2, strict=True)
        return all(-1e-6 * side <= number <= side + 1e-6 * side for number, side in numbers)


def iou(a: Box, b: Box) -> float:
    """Intersection over union, 0 to 1; 0 where a box is not valid.

    Example: (0, 0, 2, 2) and (1, 0, 3, 2) share 2 of 6: 1/3.
    Source: Jaccard's index; torchvision's box_iou.
    """
    intersection, union = _areas(a, b)
    return intersection / union if a.valid and b.valid else 0.0


def giou(a: Box, b: Box) -> float:
    """IoU less the empty share of the smallest box around both: -1 to 1; -1 where one is not valid.

    Example: (0, 0, 1, 1) and (2, 0, 3, 1) leave a third of the box around them empty: 0 - 1/3.
    Source: Rezatofighi et al. 2019, algorithm 1 (arXiv 1902.09630); torchvision's too.
    """
    if not (a.valid and b.valid):
        return -1.0
    width = max(a.x2, b.x2) - min(a.x1, b.x1)
    height = max(a.y2, b.y2) - min(a.y1, b.y1)
    area_around = width * height
    intersection, union = _areas(a, b)
    empty_area = max(0.0, area_around - union)  # rounding alone can make it negative
    return intersection / union - empty_area / area_around


def _areas(a: Box, b: Box) -> tuple[float, float]:
    """Return intersection and union, summed in an order that never makes the union the smaller."""
    assert a.extent == b.extent, "boxes of different spaces: use to()"
    width = min(a.x2, b.x2) - max(a.x1, b.x1)
    height = min(a.y2, b.y2) - max(a.y1, b.y1)
    intersection = max(0.0, width) * max(0.0, height)
    return intersection, a.area + (b.area - intersection)


def match(
    predicted: Sequence[Item], truth: Sequence[Item], similarity: Callable[[Item, Item], float]
) -> list[tuple[int, int]]:
    """Pair boxes one to one, as many as can be, so that the sum of similarities is the largest.

    Example: IoU .6 and .5 of the first box, .5 and 0 of the second: (0, 1) and (1, 0), 1.0 in all.
    """
    if not predicted or not truth:
        return []
    rows = []
    for box in predicted:
        rows.append([similarity(box, true_box) for true_box in truth])
    table = np.array(rows)
    if 1 in table.shape:
        return [divmod(int(table.argmax()), len(truth))]
    with optional_dependency("boxes", "matching several boxes needs scipy"):
        from scipy.optimize import linear_sum_assignment
    chosen, true = linear_sum_assignment(table, maximize=True)
    return list(zip(chosen.tolist(), true.tolist(), strict=True))


def says_none(text: str) -> bool:
    """Tell whether an answer says that there is no such object: [], None or No such object."""
    return unfenced(text).casefold() in ("[]", "none", "no such object")


def unfenced(text: str) -> str:
    """Take a text out of a code fence, and off a full stop."""
    fenced = FENCED.fullmatch(text.strip())
    return (fenced[1] if fenced else text).strip().removesuffix(".")


def parse_boxes(text: str) -> list[tuple[float, float, float, float]]:
    """Read the boxes of a text that is one of these, maybe in a code fence or before a full stop.

        {"bbox_2d": [1, 2, 5, 6], "label": "cat"}           as Qwen2.5-VL writes it; other keys do not matter
        {'Position': [1, 2, 5, 6]}  or "bbox"               as others ask for it
        [{"bbox_2d": [1, 2, 5, 6]}, [7, 7, 8, 9.5]]         a JSON list of such, or of lists of four
        [1, 2, 5, 6]  or several, with or without commas    [1 2 5 6] [7, 7, 8, 9.5]
        (1, 2), (5, 6)  or several                          corners
        1 2 5 6  or  1, 2, 5, 6                             one box
        <|box_start|>(1,2),(5,6)<|box_end|>                 as Qwen2-VL writes it, the object's name before it or not

    A text with prose around is not read ("not [1, 2, 5, 6]" says the opposite), nor one with a
    group that is no box. The numbers are finite; corners may be out of order or of the image, see
    Box.valid. Source: the cookbook of Qwen2.5-VL for "bbox_2d".
    """
    return parse(text, KEYS, 4, GROUPS)


def parse(text: str, keys: Sequence[str], count: int, plain: re.Pattern) -> list[tuple]:
    """Read groups of `count` numbers, in JSON maybe under one of the keys, or as plain text."""
    text = unfenced(QWEN2.sub(" ", text))
    try:
        number_groups = _groups_in_json(text, keys)
    except (ValueError, RecursionError):
        numbers = [float(n) for n in re.findall(NUMBER, text)] if plain.fullmatch(text) else []
        number_groups = [numbers[i : i + count] for i in range(0, len(numbers), count)]
    for group in number_groups:
        if not isinstance(group, list) or len(group) != count:
            return []
        if not all(isinstance(number, float) and math.isfinite(number) for number in group):
            return []
    return list(map(tuple, number_groups))


def _groups_in_json(text: str, keys: Sequence[str]) -> list[Plain]:
    """Read what should be groups of numbers (ValueError, RecursionError: it is no JSON)."""
    if '"' not in text:
        text = text.replace("'", '"')  # as Python writes it
    value = json.loads(text, parse_int=float, object_pairs_hook=_object)
    is_several = isinstance(value, list) and all(isinstance(item, list | dict) for item in value)
    items = value if is_several else [value]
    return [value_of(item, keys) if isinstance(item, dict) else item for item in items]


def value_of(item: dict, keys: Sequence[str] = KEYS) -> Plain:
    """Return what an object in JSON says of its box, in the first of the keys; None: nothing."""
    for key in keys:
        if key in item:
            return item[key]
    return None


def _object(pairs: list[tuple[str, Plain]]) -> dict[str, Plain]:
    """Make a JSON object; one with the same key twice says two things at once."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("the same key twice")
    return dict(pairs)
