"""Rewards for finding objects: boxes with labels, in the spaces of box_rewards.py.

Solution and answer are lists as Qwen2.5-VL writes them, [{"bbox_2d": [x1, y1, x2, y2], "label":
"cat"}, ...]. An empty list, or None, says that there is no such object: right where the solution
says so too, or is empty.
"""

import json

from minivlmrl.data.boxes import Box, unfenced, value_of
from minivlmrl.reward_functions.box_rewards import Objects, judge_boxes, mean, overlap


def detection(answer_texts, solution, image_sizes, answer_extents, **columns) -> list:
    """Mean IoU over best-matched objects of one label, missing and extra ones as 0: from 0 to 1."""
    columns = answer_texts, solution, image_sizes, answer_extents
    return judge_boxes("detection", LABELLED, mean(overlap), *columns)


def read_objects(text: str, extent: tuple[float, float]) -> Objects:
    """Read a list of labelled boxes, maybe in a code fence; none if it is no such list."""
    try:
        objects = json.loads(unfenced(text))
        labels = [item["label"].strip().casefold() for item in objects]
        boxes = [Box(*map(float, value_of(item)), extent) for item in objects]
        return list(zip(labels, boxes, strict=True))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return []


WRONG = 'says no objects; it needs a list of {"bbox_2d": [x1, y1, x2, y2], "label": "cat"}, or []'
LABELLED = read_objects, read_objects, WRONG
