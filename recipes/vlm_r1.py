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
from minivlmrl.rewards.boxes import ObjectFormat, Objects, mean_similarity, overlap, score_boxes


def detection(answer_texts, solution, image_sizes, answer_extents, **columns) -> list:
    """Mean IoU over best-matched objects of one label, missing and extra ones as 0: as in iou."""
    return score_boxes("detection", LABELLED, mean_similarity, answer_texts, solution, image_sizes, answer_extents)


def ap_50(answer_texts: list, solution: list, image_sizes: list, answer_extents: list, **columns) -> list:
    """Average precision at IoU 0.5 of one picture: COCO's mean over 101 recalls, then over labels.

    Objects count in the order of the answer. A label that the picture does not have counts as 0.
    """

    def mean_over_labels(answered: Objects, true: Objects) -> float:
        labels = {label for label, _ in answered + true}
        total = 0.0
        for label in labels:
            answered_so = [item for item in answered if item[0] == label]
            true_so = [item for item in true if item[0] == label]
            total += average_precision(answered_so, true_so)
        return total / len(labels)

    return score_boxes("ap_50", LABELLED, mean_over_labels, answer_texts, solution, image_sizes, answer_extents)


def weighted_sum(answer_texts, solution, image_sizes, answer_extents, weights=(0.7, 0.0, 0.3), **columns) -> list:
    """VLM-R1's sum: IoU of pairs, right labels, and 1 - (share missed + share extra) / 2.

    Boxes are paired by IoU alone, the largest first, down to 0.5. A pair of two labels scores
    nothing but is complete. Source: detection_score in VLM-R1's grpo_jsonl.py.
    """

    def weighted(answered: Objects, true: Objects) -> float:
        ious = {}
        for (i, (_, a)), (j, (_, b)) in product(enumerate(answered), enumerate(true)):
            ious[i, j] = boxes.iou(a, b)
        pairs = []
        free_answers = set(range(len(answered)))
        free_truths = set(range(len(true)))
        for i, j in sorted(ious, key=ious.get, reverse=True):
            if ious[i, j] >= 0.5 and i in free_answers and j in free_truths:
                pairs.append((i, j))
                free_answers.remove(i)
                free_truths.remove(j)
        right_ious = [ious[i, j] for i, j in pairs if answered[i][0] == true[j][0]]
        complete = (len(pairs) / len(true) + len(pairs) / len(answered)) / 2
        scores = sum(right_ious) / len(true), len(right_ious) / len(true), complete
        return sum(weight * score for weight, score in zip(weights, scores, strict=True)) / sum(weights)

    return score_boxes("weighted_sum", LABELLED, weighted, answer_texts, solution, image_sizes, answer_extents)


def average_precision(answered: Objects, true: Objects) -> float:
    """Average precision of objects of one label."""
    left = list(true)
    curve = []  # (hundredths of recall that are reached, the precision there)
    for number, item in enumerate(answered, start=1):
        best = max(left, key=lambda other: overlap(item, other), default=None)
        if best is not None and overlap(item, best) >= 0.5:
            left.remove(best)
            hits = len(true) - len(left)
            curve.append((hits * 100 // len(true), hits / number))
    total = 0.0
    for level in range(101):
        total += max((precision for recall, precision in curve if recall >= level), default=0.0)
    return total / 101


def read_objects(text: str, extent: tuple[float, float]) -> Objects:
    """Read a list of labelled boxes, maybe in a code fence; none if it is no such list."""
    try:
        objects = []
        for item in json.loads(boxes.unfenced(text)):
            corners = map(float, boxes.value_of(item))
            objects.append((item["label"].strip().casefold(), Box(*corners, extent)))
        return objects
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return []


WRONG = 'says no objects; it needs a list of {"bbox_2d": [x1, y1, x2, y2], "label": "cat"}, or []'
LABELLED = ObjectFormat(read_objects, read_objects, WRONG)
