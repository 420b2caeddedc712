"""Reward function to copy: whether the answered points lie in the true boxes.

Use it in a recipe like this; the path is relative to the folder in which you run the command:
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


def point(answer_texts, solution, image_sizes, answer_extents, within=None, log_extra=None, **columns) -> list:
    """Compute the fraction of points inside their true boxes. Missing and additional points count as 0.

    Points and boxes are matched as in the reward `iou`. For example, if there is one true box, an answer with one point
    inside the box gets reward 1, and an answer with this point and a second point gets 1/2. If the answer is a box, the
    reward is 0.

    Args:
        solution: boxes, or points [x, y]. A point stands for the pixel around it.
        within: if given, a point's reward is 1 at the centre of its box and decreases linearly to 0 at this fraction of
            the image's diagonal.
    """

    def mean_nearness(answered: Objects, true: Objects) -> float:
        return mean_similarity(answered, true, lambda a, b: nearness(a[1], b[1], within))

    return score_boxes(
        "point", POINT_FORMAT, mean_nearness, answer_texts, solution, image_sizes, answer_extents, log_extra=log_extra
    )


def parse_points(text: str) -> list[tuple[float, float]]:
    """Parse the points in a text, like boxes.parse_boxes for boxes.

    The accepted formats are {"point_2d": [1, 2], "label": "cat"}, as Qwen3-VL writes points, the same with the key
    "point", a JSON list with such objects or with pairs, one or several pairs (1, 2), and 1 2. Source: Qwen3-VL's
    cookbook for "point_2d".
    """
    return boxes.parse(text, POINT_KEYS, 2, POINTS)


def read_points(text: str, extent: tuple[float, float], half: float = 0.0) -> Objects:
    """Parse points and return square boxes around them with sides 2 * half."""
    points = parse_points(find_answer(text) or text)
    return [("", Box(x - half, y - half, x + half, y + half, extent)) for x, y in points]


def nearness(point: Box, box: Box, within: float | None) -> float:
    """Return 1.0 if a point is in a box, otherwise 0.0; with `within`, its closeness to the centre, see `point`."""
    # twice the distances to the centre
    across = box.x1 + box.x2 - 2 * point.x1
    down = box.y1 + box.y2 - 2 * point.y1
    if within is None:
        return float(abs(across) <= box.x2 - box.x1 and abs(down) <= box.y2 - box.y1)
    distance = math.hypot(across, down) / 2
    return max(0.0, 1 - distance / math.hypot(*box.extent) / within)


def read_solution(text: str, extent: tuple[float, float]) -> Objects:
    """Parse the solution: points, each of which becomes the pixel around it, or boxes."""
    return read_points(text, extent, half=0.5) or read_boxes(text, extent)


POINT_FORMAT = ObjectFormat(
    read_solution, read_points, f"is neither a box nor a point; {NEEDED} or [x, y], a list of them, or []"
)
