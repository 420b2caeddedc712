"""Rewards for finding objects: boxes with labels, in the spaces of box_rewards.py.

Solution and answer are lists as Qwen2.5-VL writes them, [{"bbox_2d": [x1, y1, x2, y2], "label":
"cat"}, ...]. An empty list, or None, says that there is no such object: right where the solution
says so too, or is empty.
"""

import json
from itertools import product

from minivlmrl.data import boxes
from minivlmrl.data.boxes import FENCED, Box
from minivlmrl.reward_functions.box_rewards import Objects, judge_boxes, mean, overlap


def detection(
    answer_texts: list, solution: list, image_sizes: list, answer_extents: list, **columns
) -> list:
    """Mean IoU over best-matched objects of one label, missing and extra ones as 0: from 0 to 1."""
    columns = answer_texts, solution, image_sizes, answer_extents
    return judge_boxes("detection", LABELLED, mean(overlap), *columns)


def ap_50(
    answer_texts: list, solution: list, image_sizes: list, answer_extents: list, **columns
) -> list:
    """Average precision at IoU 0.5 of one picture: COCO's mean over 101 recalls, then over labels.

    Objects count in the order of the answer. A label that the picture does not have counts as 0.
    """

    def average_precision(said: Objects, true: Objects) -> float:
        labels, total = {label for label, _ in said + true}, 0.0
        for label in labels:
            own = ([item for item in items if item[0] == label] for items in (said, true))
            total += _average_precision(*own)
        return total / len(labels)

    columns = answer_texts, solution, image_sizes, answer_extents
    return judge_boxes("ap_50", LABELLED, average_precision, *columns)


def weighted_sum(
    answer_texts, solution, image_sizes, answer_extents, weights=(0.7, 0.0, 0.3), **columns
) -> list:
    """VLM-R1's sum: IoU of pairs, right labels, and 1 - (share missed + share extra) / 2.

    Boxes are paired by IoU alone, the largest first, down to 0.5. A pair of two labels scores
    nothing but is complete. Source: detection_score in VLM-R1's grpo_jsonl.py.
    """

    def weighted(said: Objects, true: Objects) -> float:
        table, pairs = {}, []
        for (i, (_, a)), (j, (_, b)) in product(enumerate(said), enumerate(true)):
            table[i, j] = boxes.iou(a, b)
        for i, j in sorted(table, key=table.get, reverse=True):
            if table[i, j] >= 0.5 and all(i != other and j != another for other, another in pairs):
                pairs.append((i, j))
        right = [table[i, j] for i, j in pairs if said[i][0] == true[j][0]]
        complete = (len(pairs) / len(true) + len(pairs) / len(said)) / 2
        scores = sum(right) / len(true), len(right) / len(true), complete
        parts = (weight * score for weight, score in zip(weights, scores, strict=True))
        return sum(parts) / sum(weights)

    columns = answer_texts, solution, image_sizes, answer_extents
    return judge_boxes("weighted_sum", LABELLED, weighted, *columns)


def read_objects(text: str, extent: tuple[float, float]) -> Objects:
    """Read a list of labelled boxes, maybe in a code fence; none if it is no such list."""
    fenced = FENCED.fullmatch(text.strip())
    try:
        said = json.loads(fenced[1] if fenced else text)
        corners = [map(float, boxes.value_of(item)) for item in said]
        labels = [item["label"].strip().casefold() for item in said]
        return [(label, Box(*own, extent)) for label, own in zip(labels, corners, strict=True)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return []


LABELLED = (
    read_objects,
    read_objects,
    'says no objects; it needs a list of {"bbox_2d": [x1, y1, x2, y2], "label": "cat"}, or []',
)


def _average_precision(said: Objects, true: Objects) -> float:
    left, curve = list(true), []  # the last level of recall that is reached, the precision there
    for number, item in enumerate(said, start=1):
        best = max(left, key=lambda other: overlap(item, other), default=None)
        if best is not None and overlap(item, best) >= 0.5:
            left.remove(best)
            hits = len(true) - len(left)
            curve.append((hits * 100 // len(true), hits / number))
    return sum(max((p for r, p in curve if r >= level), default=0.0) for level in range(101)) / 101
