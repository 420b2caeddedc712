"""A reward to copy: does the answer point at the true object?

In a recipe, from the folder where the command runs:
    rewards: {recipes/point.py:point: 1.0}
"""

import math
import re

from minivlmrl.data import boxes
from minivlmrl.data.boxes import COMMA, NUMBER, PAIR, Box
from minivlmrl.rewards.boxes import NEEDED, ObjectFormat, Objects, mean_similarity, read_boxes, score_boxes
from minivlmrl.rewards.text import find_answer

POINT = rf"(?:\[\s*{NUMBER}{COMMA}{NUMBER}\s*\]|{PAIR})"
POINTS = re.compile(rf"{NUMBER}{COMMA}{NUMBER}|{POINT}(?:\s*(?:,\s*)?{POINT})*", re.ASCII)
POINT_KEYS = ("point_2d", "point")


def point(answer_texts, solution, image_sizes, answer_extents, within=None, **columns) -> list:
    """Share of points inside best-matched true boxes, missing and extra ones as 0: as in iou.

    Example: one true box and a point in it: 1; a second point as well: 1/2; a box as answer: 0.

    Args:
        solution: also true points, [x, y] or a list of such, for the pixel around each.
        within: earn 1 at a box's centre, and linearly less to 0 at this share of the diagonal.
    """

    def mean_nearness(answered: Objects, true: Objects) -> float:
        return mean_similarity(answered, true, lambda a, b: nearness(a[1], b[1], within))

    return score_boxes("point", POINT_FORMAT, mean_nearness, answer_texts, solution, image_sizes, answer_extents)


def parse_points(text: str) -> list[tuple[float, float]]:
    """Read the points of a text, as boxes.parse_boxes does boxes.

    {"point_2d": [1, 2], "label": "cat"} as Qwen3-VL writes it, or "point"; a JSON list of such or
    of lists of two; (1, 2) or several; 1 2. Source: the cookbook of Qwen3-VL for "point_2d".
    """
    return boxes.parse(text, POINT_KEYS, 2, POINTS)


def read_points(text: str, extent: tuple[float, float], half: float = 0.0) -> Objects:
    """Read points as boxes of twice `half` a side."""
    points = parse_points(find_answer(text) or text)
    return [("", Box(x - half, y - half, x + half, y + half, extent)) for x, y in points]


def nearness(point: Box, box: Box, within: float | None) -> float:
    """Tell whether a point is in a box; with `within` how near its centre it is, see point."""
    # twice the distance to the centre
    across = box.x1 + box.x2 - 2 * point.x1
    down = box.y1 + box.y2 - 2 * point.y1
    if within is None:
        return float(abs(across) <= box.x2 - box.x1 and abs(down) <= box.y2 - box.y1)
    distance = math.hypot(across, down) / 2
    return max(0.0, 1 - distance / math.hypot(*box.extent) / within)


def read_solution(text: str, extent: tuple[float, float]) -> Objects:
    """Read true points, each as the pixel around it, or boxes."""
    return read_points(text, extent, half=0.5) or read_boxes(text, extent)


POINT_FORMAT = ObjectFormat(
    read_solution, read_points, f"is neither a box nor a point; {NEEDED} or [x, y], a list of them, or []"
)
