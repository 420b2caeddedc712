"""recipes/localisation.py: objects fill their boxes, noise is in demonstrations only, unseen boxes are unseen."""

import hashlib
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from minivlmrl.reward_functions import box_rewards
from minivlmrl.tasks.shapes import COLORS
from recipes.localisation import GRID, NAMES, Localisation, draw, is_unseen, overlap, pixels, position

RECIPES = Path(__file__).parents[1] / "recipes"
SIDES = [(low, high) for low in range(GRID) for high in range(low + 1, GRID + 1)]
EVERY_BOX = [(left, top, right, bottom) for left, right in SIDES for top, bottom in SIDES]
SQUARES = [box for box in EVERY_BOX if box[2] - box[0] == box[3] - box[1] in (2, 3, 4, 5)]


def rows_of(rows):
    return [rows[i] for i in range(len(rows))]


def pictures(rows):
    return [row.images[0].tobytes() for row in rows_of(rows)]


def columns(rows):
    return [row.columns for row in rows_of(rows)]


def extent(image, color):
    """The smallest box in pixels that holds all of a colour; None if there is none of it."""
    rows, across = np.nonzero((np.asarray(image) == COLORS[color]).all(-1))
    return [int(n) for n in (across.min(), rows.min(), across.max() + 1, rows.max() + 1)] if len(rows) else None


def seen(image):
    """Read off the pixels: colour -> shape and box in pixels. The corners tell the shape."""
    shapes = {(True, True): "square", (True, False): "triangle", (False, False): "circle"}
    boxes = {color: extent(image, color) for color in COLORS if extent(image, color)}
    return {
        color: (
            shapes[tuple(image.getpixel(at) == COLORS[color] for at in ((box[0], box[3] - 1), tuple(box[:2])))],
            box,
        )
        for color, box in boxes.items()
    }


def named(row):
    return tuple(row.columns["problem"].removeprefix("box the ").split())


def demonstrated(row):
    return tuple(int(number) for number in row.completion.partition("<answer>")[2].removesuffix("</answer>").split())


def iou(a, b):
    """Counted, unit by unit."""
    cells = [{(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])} for box in (a, b)]
    return len(cells[0] & cells[1]) / len(cells[0] | cells[1])


def test_rows_of_a_seed_are_the_same_in_every_version():
    """Recorded: published results depend on these rows."""
    digest = hashlib.sha256()
    for objects in ((1, 1), (1, 3)):
        for row in rows_of(Localisation(50, "test", objects=objects, jitter=1, wrong_boxes=0.3)):
            digest.update(f"{row.columns}{row.completion}".encode())
    assert digest.hexdigest() == "c7d83c90b9ee52c058ce78a83f3b260d8cae1ffc04626454d91cdd6aa0bcc78e"


@pytest.mark.parametrize("name", NAMES)
def test_an_object_fills_its_box(name):
    """Every size and shape, to the pixel."""
    color, shape = name.split()
    for width in (2, 3, 4, 5):
        for height in (2, 3, 4, 5):
            box = (1, 3, 1 + width, 3 + height)
            assert seen(draw([(name, box)], random.Random(0))) == {color: (shape, pixels(box))}


@pytest.mark.parametrize("options", [{}, {"jitter": 1, "wrong_boxes": 1.0}])
def test_the_solution_is_the_box_of_the_named_object(options):
    for row in rows_of(Localisation(60, "test", **options)):
        color, shape = named(row)
        assert seen(row.images[0]) == {color: (shape, row.columns["solution"])}
        assert all(number % 7 == 0 for number in row.columns["solution"])
        assert row.columns["answer_extent"] == (8, 8)


@pytest.mark.parametrize("options", [{}, {"objects": (1, 3), "thinking": "position"}])
def test_demonstrations_without_noise_earn_every_reward(options):
    rows = rows_of(Localisation(30, "test", **options))
    given = {
        "completions": [row.completion for row in rows],
        "answer_texts": [row.completion for row in rows],
        "solution": [row.columns["solution"] for row in rows],
        "image_sizes": [row.images[0].size for row in rows],
        "answer_extents": [row.columns["answer_extent"] for row in rows],
    }
    assert box_rewards.iou(**given) == pytest.approx([1.0] * 30)
    assert box_rewards.box_format(**given) == [1.0] * 30


def test_several_objects_have_different_colours_and_do_not_overlap():
    counts = Counter()
    for row in rows_of(Localisation(300, 0, objects=(1, 3))):
        found = seen(row.images[0])
        counts[len(found)] += 1
        boxes = [box for _, box in found.values()]
        assert not any(overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
        assert all(box[i + 2] - box[i] in (14, 21, 28) for box in boxes for i in (0, 1))
        color, shape = named(row)
        assert found[color] == (shape, row.columns["solution"])
    assert set(counts) == {1, 2, 3} and min(counts.values()) > 70


def test_noise_changes_demonstrations_only():
    for objects in ((1, 1), (1, 3)):
        clean = Localisation(40, 0, objects=objects)
        noisy = Localisation(40, 0, objects=objects, jitter=1, wrong_boxes=0.3)
        assert pictures(clean) == pictures(noisy)
        assert columns(clean) == columns(noisy)
        assert sum(a.completion != b.completion for a, b in zip(rows_of(clean), rows_of(noisy), strict=True)) > 35


@pytest.mark.parametrize("seed", [0, "0/sft", "7/grpo"])
def test_training_never_shows_an_unseen_box(seed):
    rows = columns(Localisation(3000, seed))
    assert not any(c["unseen"] for c in rows)
    shown = {tuple(number // 7 for number in c["solution"]) for c in rows}
    assert shown == {box for box in SQUARES if not is_unseen(box)}
    for row in rows_of(Localisation(150, seed, objects=(2, 3))):  # nor has an object that is not asked for one
        assert not any(is_unseen([number // 7 for number in box]) for _, box in seen(row.images[0]).values())


@pytest.mark.parametrize("seed", ["validation", "test"])
def test_evaluation_shows_all_boxes_and_marks_the_unseen(seed):
    rows = columns(Localisation(3000, seed))
    assert {tuple(number // 7 for number in c["solution"]) for c in rows} == set(SQUARES)
    assert all(c["unseen"] == is_unseen(tuple(number // 7 for number in c["solution"])) for c in rows)
    share = sum(c["unseen"] for c in rows) / 3000
    assert abs(share - (7 / 49 + 2 / 36 + 3 / 25 + 3 / 16) / 4) < 0.025  # 12.6 %, standard deviation 0.6 %


def test_thinking_of_positions_is_about_the_box_that_is_demonstrated():
    options = {"objects": (1, 3), "jitter": 1, "wrong_boxes": 0.3, "thinking": "position"}
    for row in rows_of(Localisation(100, 0, **options)):
        color, _ = named(row)
        down, across = position(demonstrated(row))
        assert row.completion.startswith(f"<think>{color} {down} {color} {across}</think><answer>")
