"""Rewards to copy for objects with labels: IoU, VLM-R1's sum, the average precision of one picture.

In a recipe, from the folder where the command runs:
    rewards: {recipes/vlm_r1.py:weighted_sum: 1.0}
Solutions and answers are lists as Qwen2.5-VL writes them, maybe empty:
[{"bbox_2d": [x1, y1, x2, y2], "label": "cat"}, ...].
"""

import json
from itertools import product

from minivlmrl.data import boxes
from minivlmrl.data.boxes import Box
from minivlmrl.reward_functions.box_rewards import ObjectForm, Objects, judge_boxes, mean_similarity, overlap


def detection(answer_texts, solution, image_sizes, answer_extents, **columns) -> list:
    """Mean IoU over best-matched objects of one label, missing and extra ones as 0: as in iou."""
    columns = answer_texts, solution, image_sizes, answer_extents
    return judge_boxes("detection", LABELLED, mean_similarity, *columns)


def ap_50(answer_texts: list, solution: list, image_sizes: list, answer_extents: list, **columns) -> list:
    """Average precision at IoU 0.5 of one picture: COCO's mean over 101 recalls, then over labels.

    Objects count in the order of the answer. A label that the picture does not have counts as 0.
    """

    def mean_over_labels(answered: Objects, true: Objects) -> float:
        labels = {label for label, _ in answered + true}
        total = 0.0
        for label in labels:
            of_label = ([item for item in items if item[0] == label] for items in (answered, true))
            total += average_precision(*of_label)
        return total / len(labels)

    columns = answer_texts, solution, image_sizes, answer_extents
    return judge_boxes("ap_50", LABELLED, mean_over_labels, *columns)


def weighted_sum(answer_texts, solution, image_sizes, answer_extents, weights=(0.7, 0.0, 0.3), **columns) -> list:
    """VLM-R1's sum: IoU of pairs, right labels, and 1 - (share missed + share extra) / 2.

    Boxes are paired by IoU alone, the largest first, down to 0.5. A pair of two labels scores
    nothing but is complete. Source: detection_score in VLM-R1's grpo_jsonl.py.
    """

    def weighted(answered: Objects, true: Objects) -> float:
        table = {}
        pairs = []
        for (i, (_, a)), (j, (_, b)) in product(enumerate(answered), enumerate(true)):
            table[i, j] = boxes.iou(a, b)
        for i, j in sorted(table, key=table.get, reverse=True):
            if table[i, j] >= 0.5 and all(i != other and j != another for other, another in pairs):
                pairs.append((i, j))
        right = [table[i, j] for i, j in pairs if answered[i][0] == true[j][0]]
        complete = (len(pairs) / len(true) + len(pairs) / len(answered)) / 2
        scores = sum(right) / len(true), len(right) / len(true), complete
        parts = (weight * score for weight, score in zip(weights, scores, strict=True))
        return sum(parts) / sum(weights)

    columns = answer_texts, solution, image_sizes, answer_extents
    return judge_boxes("weighted_sum", LABELLED, weighted, *columns)


def average_precision(answered: Objects, true: Objects) -> float:
    """Average precision of objects of one label."""
    # the last level of recall that is reached, the precision there
    left = list(true)
    curve = []
    for number, item in enumerate(answered, start=1):
        best = max(left, key=lambda other: overlap(item, other), default=None)
        if best is not None and overlap(item, best) >= 0.5:
            left.remove(best)
            hits = len(true) - len(left)
            curve.append((hits * 100 // len(true), hits / number))
    return sum(max((p for r, p in curve if r >= level), default=0.0) for level in range(101)) / 101


def read_objects(text: str, extent: tuple[float, float]) -> Objects:
    """Read a list of labelled boxes, maybe in a code fence; none if it is no such list."""
    try:
        items = ((item["label"], boxes.value_of(item)) for item in json.loads(boxes.unfenced(text)))
        return [(label.strip().casefold(), Box(*map(float, four), extent)) for label, four in items]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return []


WRONG = 'says no objects; it needs a list of {"bbox_2d": [x1, y1, x2, y2], "label": "cat"}, or []'
LABELLED = ObjectForm(read_objects, read_objects, WRONG)
