"""Rewards for boxes: how well an answer's boxes cover the true ones.

`solution` is in pixels of the image file, an answer in whatever space it was asked for, so these
rewards are given image_sizes and answer_extents too, None of a row without an image: see
boxes.box_columns.

boxes.parse_boxes reads an answer. Every box counts: it is matched with one true box or it is one
too many. The sum over pairs is divided by the number of boxes on the longer side.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from minivlmrl.data import boxes
from minivlmrl.data.boxes import Box
from minivlmrl.rewards.text import find_answer, tag_format

Extents = list[tuple[float, float] | None]
Objects = list[tuple[str, Box]]  # a label, "" where labels do not count, and its box


def mean_iou(
    answer_texts: list, solution: list, image_sizes: Extents, answer_extents: Extents, **columns
) -> list:
    """Mean IoU over best-matched boxes, missing and extra ones as 0: from 0 to 1.

    Example: the one true box twice: 1/2; one of two true boxes: 1/2; half of the true box: 1/2.

    Args:
        answer_texts: n answers, None where a completion has none.
        solution: the true box [x1, y1, x2, y2], a list of such, or either as text, in pixels of the
            image file. [] and "": there is no such object, and an answer has to say so, see
            boxes.says_none.
        image_sizes, answer_extents: width and height of the image, in pixels of the file and in
            units of the answer.
    Returns:
        n numbers, None where a row has no solution (None) or no image.
    Raises:
        ValueError: a solution is no box (named).
    """
    return judge_boxes(
        "iou", BOXES, mean_similarity, answer_texts, solution, image_sizes, answer_extents
    )


def acc_0_5(answer_texts, solution, image_sizes, answer_extents, **columns) -> list:
    """Share of best-matched boxes with an IoU of 0.5 or more, missing and extra ones as 0: see mean_iou.

    Example: one true box, met with IoU 0.5: 1; with 0.49: 0; with 0.9 and another box as well: 1/2.
    """

    def share_of_hits(answered: Objects, true: Objects) -> float:
        values = similarities(answered, true)
        return sum(value >= 0.5 for value in values) / len(values)

    return judge_boxes(
        "acc_0_5", BOXES, share_of_hits, answer_texts, solution, image_sizes, answer_extents
    )


def mean_giou(answer_texts, solution, image_sizes, answer_extents, **columns) -> list:
    """Mean generalised IoU over boxes best matched by it, missing and extra ones as -1: see mean_iou.

    Example: a box of the right size, as far from the true one as it is wide: -1/3. The whole image
    earns more, the share of the true box in it, so this reward alone first teaches large boxes.
    """

    def measure(answered: Objects, true: Objects) -> float:
        return mean_similarity(answered, true, lambda a, b: boxes.giou(a[1], b[1]), nothing=-1.0)

    return judge_boxes(
        "giou", BOXES, measure, answer_texts, solution, image_sizes, answer_extents, nothing=-1.0
    )


def box_format(completions: list[str], answer_extents: Extents, **columns) -> list:
    """1.0 for the form of tag_format around boxes that are all valid and inside, or around none."""
    values = []
    forms = tag_format(completions)
    for completion, form, extent in zip(completions, forms, answer_extents, strict=True):
        if extent is None:
            values.append(None)
            continue
        answered = read_boxes(completion, extent)
        has_answer = answered or boxes.says_none(find_answer(completion) or "")
        is_valid = has_answer and all(box.valid and box.inside() for _, box in answered)
        values.append(1.0 if form == 1.0 and is_valid else 0.0)
    return values


def overlap(a: tuple[str, Box], b: tuple[str, Box]) -> float:
    """Compute the IoU of two objects, 0 if they have different labels."""
    return boxes.iou(a[1], b[1]) if a[0] == b[0] else 0.0


def similarities(
    answered: Objects, true: Objects, similarity: Callable = overlap, nothing=0.0
) -> list[float]:
    """List the similarity of each best-matched pair, and `nothing` for each object without one."""
    pairs = boxes.match(answered, true, similarity)
    num_unmatched = max(len(answered), len(true)) - len(pairs)
    return [similarity(answered[i], true[j]) for i, j in pairs] + [nothing] * num_unmatched


def mean_similarity(
    answered: Objects, true: Objects, similarity: Callable = overlap, nothing=0.0
) -> float:
    """Average the values of `similarities`."""
    values = similarities(answered, true, similarity, nothing)
    return sum(values) / len(values)


@dataclass
class ObjectForm:
    """How the objects of a text are read, with the width and height of the image in its units."""

    read_solution: Callable[[str, tuple], Objects]
    read_answer: Callable[[str, tuple], Objects]
    wrong: str  # what is said of a solution without objects: "is no box; ..."


def judge_boxes(
    name: str,
    form: ObjectForm,
    measure: Callable[[Objects, Objects], float],
    answer_texts: list,
    solutions: list,
    image_sizes: Extents,
    answer_extents: Extents,
    nothing=0.0,
) -> list:
    """Measure what n answers say against the truth, see mean_iou.

    Args:
        nothing: what an answer without objects earns.
    """
    values = []
    rows = zip(answer_texts, solutions, image_sizes, answer_extents, strict=True)
    for answer, solution, size, extent in rows:
        if solution is None or size is None or extent is None:
            values.append(None)
            continue
        text = solution if isinstance(solution, str) else json.dumps(solution, default=str)
        truth = find_answer(text) or text
        if not text.strip() or boxes.says_none(truth):
            values.append(1.0 if boxes.says_none(answer or "") else nothing)
            continue
        # has to be right: nothing could earn a reward otherwise
        true = form.read_solution(truth, size)
        if not true or not all(box.valid for _, box in true):
            raise ValueError(f"reward {name}: solution {solution!r:.300} {form.wrong}")
        answered = [(label, box.to(size)) for label, box in form.read_answer(answer or "", extent)]
        values.append(measure(answered, true) if answered else nothing)
    return values


def read_boxes(text: str, extent: tuple[float, float]) -> Objects:
    """Read the boxes of an answer, in its units; of a completion those in its tags, if any."""
    return [("", Box(*four, extent)) for four in boxes.parse_boxes(find_answer(text) or text)]


NEEDED = "it needs [x1, y1, x2, y2] with x2 > x1 and y2 > y1,"
BOXES = ObjectForm(read_boxes, read_boxes, f"is no box; {NEEDED} a list of such, or []")
