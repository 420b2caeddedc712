"""Reward functions for labeled boxes: mean IoU, VLM-R1's weighted sum, average precision.

A recipe names a file, relative to the folder in which you run the command, and a function in it:
    rewards: {recipes/vlm_r1.py:weighted_sum: 1.0}
Solutions and answers are lists in Qwen2.5-VL's format, possibly empty:
[{"bbox_2d": [x1, y1, x2, y2], "label": "cat"}, ...].
"""

from itertools import product

from minivlmrl.data import boxes
from minivlmrl.data.boxes import Box
from minivlmrl.rewards.boxes import Objects, mean_similarity, overlap, score_boxes


def detection(answer_texts, solution, image_sizes, answer_extents, log_extra=None, **columns) -> list:
    """Compute the mean IoU of matched objects with equal labels; missing and extra objects count as 0.

    Objects are matched as in the reward `iou`.
    """
    return score_boxes(
        mean_similarity, answer_texts, solution, image_sizes, answer_extents, log_extra, read_objects, WRONG
    )


def ap_50(
    answer_texts: list, solution: list, image_sizes: list, answer_extents: list, log_extra=None, **columns
) -> list:
    """Compute the average precision at IoU 0.5 in an image, averaged over labels.

    As in COCO, precision is averaged over 101 recall levels. Without confidence scores, objects are ranked in answer
    order. Labels not in the image count as 0.
    """

    def mean_over_labels(answered: Objects, true: Objects) -> float:
        labels = {label for label, _ in answered + true}
        total = 0.0
        for label in labels:
            answered_so = [item for item in answered if item[0] == label]
            true_so = [item for item in true if item[0] == label]
            total += average_precision(answered_so, true_so)
        return total / len(labels)

    return score_boxes(
        mean_over_labels, answer_texts, solution, image_sizes, answer_extents, log_extra, read_objects, WRONG
    )


def weighted_sum(
    answer_texts, solution, image_sizes, answer_extents, weights=(0.7, 0.0, 0.3), log_extra=None, **columns
) -> list:
    """Compute VLM-R1's weighted mean of three scores: IoU, label accuracy and completeness.

    Completeness is 1 - (missed fraction + extra fraction) / 2. Boxes are paired by IoU, largest first, down to 0.5.
    Pairs with different labels count for completeness, but have IoU and label score 0.
    Source: detection_score in VLM-R1's grpo_jsonl.py.
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

    return score_boxes(weighted, answer_texts, solution, image_sizes, answer_extents, log_extra, read_objects, WRONG)


def average_precision(answered: Objects, true: Objects) -> float:
    """Compute the average precision for one label."""
    unmatched = list(true)
    curve = []  # (recall in percent, precision at this recall)
    for number, item in enumerate(answered, start=1):
        best = max(unmatched, key=lambda other: overlap(item, other), default=None)
        if best is not None and overlap(item, best) >= 0.5:
            unmatched.remove(best)
            hits = len(true) - len(unmatched)
            curve.append((hits * 100 // len(true), hits / number))
    total = 0.0
    for level in range(101):
        total += max((precision for recall, precision in curve if recall >= level), default=0.0)
    return total / 101


def read_objects(text: str, extent: tuple[float, float]) -> Objects:
    """Parse one labeled box or a list of them, possibly inside markup; return [] for other strings."""
    try:
        objects = []
        for item in boxes.json_items(text):
            corners = map(float, boxes.value_of(item))
            objects.append((item["label"].strip().casefold(), Box(*corners, extent)))
        return objects
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return []


WRONG = 'contains no objects; it must be a list of {"bbox_2d": [x1, y1, x2, y2], "label": "cat"}, or []'
