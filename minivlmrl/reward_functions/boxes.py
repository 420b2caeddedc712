"""Rewards for boxes: how well an answer's boxes cover the true ones.

Boxes come in two spaces: `solution` in pixels of the image file, an answer in whatever space it was asked for. So these
rewards are given image_sizes and answer_extents besides the columns of the rows: width and height of the row's first
image in the units of the one and of the other. None says that there is no image: such a row cannot be judged.

The answer is the last <answer>...</answer> after the last </think>. A completion without any tag is all answer (what
Qwen2.5-VL writes when nobody asks for tags); one with tags but no such block, or with thinking that does not end, has
none. Boxes that are only thought count nothing. What an answer may say stands at parse_boxes.

Every box of an answer counts: it is matched with one true box or it is one too many. The sum over pairs is divided by
the number of boxes on the longer side, so two guesses earn no more than the mean of both.
"""

import json
from collections.abc import Callable

from minivlmrl.data import boxes
from minivlmrl.data.boxes import Box
from minivlmrl.rewards import ANSWER, TAGS, format, reward

Extents = list[tuple[float, float] | None]


@reward
def iou(completions: list[str], solution: list, image_sizes: Extents, answer_extents: Extents, **columns) -> list:
    """Mean IoU over best-matched boxes, missing and extra ones as 0: from 0 to 1.

    Example: the one true box twice: 1/2; one of two true boxes: 1/2; half of the true box: 1/2.

    Args:
        completions: n texts.
        solution: the true box [x1, y1, x2, y2], a list of such, or either as text (which may
            itself stand between answer tags), in pixels of the image file.
        image_sizes: width and height of the image file, in pixels.
        answer_extents: width and height of the image, in the units of the answer.
    Returns:
        n numbers, None where a row has no solution (None) or no image.
    Raises:
        ValueError: a solution is no box (named).
    """
    rows = zip(completions, solution, image_sizes, answer_extents, strict=True)
    return [mean(overlaps("iou", boxes.iou, 0.0, *row)) for row in rows]


@reward
def acc_0_5(completions: list[str], solution: list, image_sizes: Extents, answer_extents: Extents, **columns) -> list:
    """Share of best-matched boxes with an IoU of 0.5 or more, missing and extra ones as 0: see iou.

    Example: one true box, met with IoU 0.5: 1; with 0.49: 0; with 0.9 and another box beside: 1/2.
    """
    rows = zip(completions, solution, image_sizes, answer_extents, strict=True)
    values = [overlaps("acc_0_5", boxes.iou, 0.0, *row) for row in rows]
    return [None if pairs is None else mean([float(pair >= 0.5) for pair in pairs]) for pairs in values]


@reward
def giou(completions: list[str], solution: list, image_sizes: Extents, answer_extents: Extents, **columns) -> list:
    """Mean generalised IoU over boxes best matched by it, missing and extra ones as -1: from -1 to 1, see iou.

    Example: a box of the right size beside the true one, as far away as it is wide: -1/3. A box of the whole image gets
    the share of the true one in it: little, but more than such a miss, so this reward alone first teaches large boxes.
    """
    rows = zip(completions, solution, image_sizes, answer_extents, strict=True)
    return [mean(overlaps("giou", boxes.giou, -1.0, *row)) for row in rows]


@reward
def box_format(completions: list[str], answer_extents: Extents, **columns) -> list:
    """1.0 for the form of `format` whose answer says one box or more, all valid and inside the image."""

    def fits(completion: str, extent: tuple[float, float]) -> bool:
        said = answered_boxes(completion, extent)
        return format([completion]) == [1.0] and bool(said) and all(box.valid and box.inside() for box in said)

    rows = zip(completions, answer_extents, strict=True)
    return [None if extent is None else float(fits(completion, extent)) for completion, extent in rows]


def overlaps(
    name: str,
    similarity: Callable[[Box, Box], float],
    nothing: float,
    completion: str,
    solution: list | str | None,
    image_size: tuple[float, float] | None,
    answer_extent: tuple[float, float] | None,
) -> list[float] | None:
    """Similarities of an answer's boxes and the true ones, matched for the largest sum.

    Args:
        name: of the reward that asks, for its errors.
        nothing: what a box without a partner gets.
    Returns:
        as many numbers as there are boxes on the longer side; None where nothing can be judged.
    """
    if solution is None or image_size is None or answer_extent is None:
        return None
    truth = true_boxes(name, solution, image_size)
    predicted = [box.to(image_size) for box in answered_boxes(completion, answer_extent)]
    pairs = boxes.match(predicted, truth, similarity)
    alone = max(len(predicted), len(truth)) - len(pairs)
    return [similarity(predicted[p], truth[t]) for p, t in pairs] + [nothing] * alone


def true_boxes(name: str, solution: list | str, image_size: tuple[float, float]) -> list[Box]:
    """Ground truth, which has to be right: nothing could earn a reward for it otherwise."""
    try:
        found = boxes.parse_boxes(answer(solution if isinstance(solution, str) else json.dumps(solution)))
    except TypeError:  # no JSON
        found = []
    truth = [Box(*numbers, image_size) for numbers in found]
    if not truth or not all(box.valid for box in truth):
        raise ValueError(
            f"reward {name}: solution {solution!r} is no box; it needs [x1, y1, x2, y2] with x2 > x1 and y2 > y1, or a "
            "list of such"
        )
    return truth


def answered_boxes(completion: str, extent: tuple[float, float]) -> list[Box]:
    """Boxes of the answer, in its units."""
    return [Box(*numbers, extent) for numbers in boxes.parse_boxes(answer(completion))]


def answer(completion: str) -> str:
    """The answer of a completion, empty if it has none.

    Example: "<think>1 1 2 2</think><answer>1 2 5 6</answer>" gives "1 2 5 6", and so does "1 2 5 6" alone.
    """
    if not any(tag in completion for tag in TAGS):
        return completion
    after = completion.rpartition("</think>")[2]
    answers = ANSWER.findall(after)
    return answers[-1] if answers and "<think>" not in after else ""


def mean(values: list[float] | None) -> float | None:
    return None if values is None else sum(values) / len(values)
