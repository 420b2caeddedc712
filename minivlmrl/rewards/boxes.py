"""Rewards for object detection: compare predicted with true boxes, matched one to one.

True boxes (column `solution`) are in image file pixels; predicted boxes may have other units, such as 0 to 1000
across the image.
"""

import json
from collections.abc import Callable
from itertools import repeat
from typing import Any

from minivlmrl.data import boxes
from minivlmrl.data.boxes import Box
from minivlmrl.errors import UserError, truncate
from minivlmrl.rewards.text import NO_ANSWER, NO_SOLUTION, LogExtra, find_answer, format_error

Objects = list[tuple[str, Box]]  # (label, box); label "" = no label
NO_IMAGE = "the row has no image"
NO_BOX = "no box was found in the answer"
NO_SOLUTION_BOX = (
    "is not a box; the solution must be [x1, y1, x2, y2] with x2 > x1 and y2 > y1, a list of boxes, or [] for no object"
)


def mean_iou(
    answer_texts: list,
    solution: list,
    image_sizes: list,
    answer_extents: list,
    log_extra: LogExtra | None = None,
    **columns,
) -> list:
    """Compute the mean IoU between predicted and true boxes, 0 to 1; missing and extra boxes count as 0.

    Example: an answer with one of two true boxes gets 1/2.

    Args:
        answer_texts: n answers, None = no answer found.
        solution: true box [x1, y1, x2, y2] or list of boxes, in image file pixels, possibly as a string. [] or "" = no
            object, so the answer must have no box.
        image_sizes, answer_extents: image (width, height) in file pixels, and in predicted box units.
    Returns:
        n rewards, None for rows without an image or solution.
    """
    return score_boxes(mean_similarity, answer_texts, solution, image_sizes, answer_extents, log_extra)


def acc_0_5(answer_texts, solution, image_sizes, answer_extents, log_extra=None, **columns) -> list:
    """Compute the fraction of boxes with IoU >= 0.5; missing and extra boxes count as 0.

    Example: for one true box, IoU 0.5 gives 1, and IoU 0.49 gives 0.
    """

    def share_of_hits(predicted: Objects, true: Objects) -> float:
        values = similarities(predicted, true)
        return sum(value >= 0.5 for value in values) / len(values)

    return score_boxes(share_of_hits, answer_texts, solution, image_sizes, answer_extents, log_extra)


def box_format(
    completions: list[str],
    answer_extents: list,
    solution: list | None = None,
    log_extra: LogExtra | None = None,
    **columns,
) -> list:
    """Return 1.0 for <think> and <answer> tags with valid boxes inside the image, else 0.0.

    If the solution contains no box, answers such as "[]", "None" or "No such object" get 1.0. Rows without an image get
    None.
    """
    reasons = []
    for completion, extent, truth in zip(completions, answer_extents, solution or repeat(None), strict=False):
        reasons.append(NO_IMAGE if extent is None else box_format_error(completion, extent, truth))
    if log_extra is not None:
        log_extra("why", reasons)
    return [None if reason is NO_IMAGE else float(reason is None) for reason in reasons]


def box_format_error(completion: str, extent: tuple[float, float], solution: Any) -> str | None:
    """Return why the reward box_format is 0, or None if it is 1."""
    reason = format_error(completion)
    if reason is not None:
        return reason
    predicted = read_boxes(completion, extent)
    if not predicted:
        if not boxes.says_none(find_answer(completion) or ""):
            return NO_BOX
        has_object = read_boxes(solution_boxes(solution), extent)
        return "the answer says that there is no object, but the solution has a box" if has_object else None
    for label, box in predicted:
        text = box_texts([(label, box)])
        if not box.valid:
            return f"the box {text} does not have x2 > x1 and y2 > y1"
        if not box.inside():
            return f"the box {text} is not inside the image, which is {extent[0]:g} x {extent[1]:g}"
    return None


def overlap(a: tuple[str, Box], b: tuple[str, Box]) -> float:
    """Compute the IoU between two labeled boxes; 0 if the labels differ."""
    return boxes.iou(a[1], b[1]) if a[0] == b[0] else 0.0


def similarities(predicted: Objects, true: Objects) -> list[float]:
    """Match predicted to true objects one to one; return the IoU of every match, and 0 for every unmatched object."""
    pairs = boxes.match(predicted, true, overlap)
    num_unmatched = max(len(predicted), len(true)) - len(pairs)
    return [overlap(predicted[i], true[j]) for i, j in pairs] + [0.0] * num_unmatched


def mean_similarity(predicted: Objects, true: Objects) -> float:
    values = similarities(predicted, true)
    return sum(values) / len(values)


def read_boxes(text: str, extent: tuple[float, float]) -> Objects:
    """Parse boxes in the last <answer>; without <answer>, in the whole text."""
    return [("", Box(*four, extent)) for four in boxes.parse_boxes(find_answer(text) or text)]


def solution_boxes(solution: Any) -> str:
    """Convert a solution to text: the text in its <answer> tags, if any; JSON, if it is not a string."""
    text = solution if isinstance(solution, str) else json.dumps(solution, default=str)
    return find_answer(text) or text


def score_boxes(
    measure: Callable[[Objects, Objects], float],
    answer_texts: list,
    solutions: list,
    image_sizes: list,
    answer_extents: list,
    log_extra: LogExtra | None = None,
    read: Callable[[str, tuple], Objects] = read_boxes,
    requirement: str = NO_SOLUTION_BOX,
) -> list:
    """Compute n rewards from predicted and true boxes.

    Args:
        measure: function (predicted objects, true objects) -> reward.
        read: function (text, image size) -> objects.
        requirement: what a solution must be, for the error message.
    """
    scored = []  # (reward, reason) per answer
    rows = zip(answer_texts, solutions, image_sizes, answer_extents, strict=True)
    for answer, solution, size, extent in rows:
        if solution is None or size is None:
            scored.append((None, NO_SOLUTION if solution is None else NO_IMAGE))
            continue
        truth = solution_boxes(solution)
        if not truth.strip() or boxes.says_none(truth):
            wrong = 0.0, "the object is not in the image, so the answer should be [] or None"
            scored.append((1.0, None) if boxes.says_none(answer or "") else wrong)
            continue
        true = read(truth, size)
        if not true or not all(box.valid for _, box in true):
            raise UserError(f"solution {truncate(solution, 300)} {requirement}")
        predicted = [(label, box.to(size)) for label, box in read(answer or "", extent)]
        if not predicted:
            scored.append((0.0, NO_ANSWER if answer is None else NO_BOX))
            continue
        value = measure(predicted, true)
        found = f"the answer has {box_texts(predicted)}, the solution {box_texts(true)}, in pixels of the image file"
        scored.append((value, None if value == 1 else found))
    if log_extra is not None:
        log_extra("why", [reason for _, reason in scored])
    return [value for value, _ in scored]


def check_inside(solution: Any, size: tuple[int, int], num_images: int = 1):
    """Raise UserError if a true box is more than one pixel outside the image, or not in pixels.

    Args:
        solution: see mean_iou; solutions without boxes are accepted.
        size: image (width, height), in file pixels.
    """
    image = "the image" if num_images == 1 else f"the first image (of {num_images})"
    for _, box in read_boxes(str(solution), size):
        sides = zip(box.numbers, size * 2, strict=True)
        if max(box.numbers) <= 1 or any(not -1 <= number <= side + 1 for number, side in sides):
            raise UserError(
                f"the solution {solution!s:.80} is not a box inside {image} of {size[0]} x {size[1]} pixels; write "
                "x1, y1, x2, y2 in pixels of the image file"
            )


def box_texts(objects: Objects) -> str:
    texts = [f"{label:.40} [{', '.join(map('{:g}'.format, box.numbers))}]".strip() for label, box in objects[:3]]
    others = f" and {len(objects) - 3} more" if len(objects) > 3 else ""
    return ", ".join(texts) + others
