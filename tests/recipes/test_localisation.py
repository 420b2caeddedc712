"""Test recipes/localisation.py: solutions are the boxes in the images, and unseen boxes are unseen."""

import hashlib

import numpy as np
import pytest

from minivlmrl.tasks.shapes import COLORS
from recipes.localisation import GRID, Localisation, is_unseen

from score_texts import score_texts

SIDES = [(low, high) for low in range(GRID) for high in range(low + 1, GRID + 1)]
EVERY_BOX = [(left, top, right, bottom) for left, right in SIDES for top, bottom in SIDES]
SQUARES = [box for box in EVERY_BOX if box[2] - box[0] == box[3] - box[1] in (2, 3, 4, 5)]


def rows_of(rows):
    return [rows[i] for i in range(len(rows))]


def columns(rows):
    return [row.columns for row in rows_of(rows)]


def cells(box):
    """Convert a box from pixels to grid units."""
    return tuple(number // 7 for number in box)


def extent(image, color):
    """Return the smallest box in pixels that contains all pixels with a colour, or None if the colour is absent."""
    rows, across = np.nonzero((np.asarray(image) == COLORS[color]).all(-1))
    return [int(n) for n in (across.min(), rows.min(), across.max() + 1, rows.max() + 1)] if len(rows) else None


def seen(image):
    """Read off the pixels: colour -> shape and box in pixels. The corners tell the shape."""
    shapes = {(True, True): "square", (True, False): "triangle", (False, False): "circle"}
    found = {}
    for color in COLORS:
        if box := extent(image, color):
            corners = [image.getpixel(at) == COLORS[color] for at in ((box[0], box[3] - 1), (box[0], box[1]))]
            found[color] = shapes[tuple(corners)], box
    return found


def named(row):
    return tuple(row.columns["problem"].removeprefix("box the ").split())


def test_rows_of_a_seed_are_the_same_in_every_version():
    """The rows are compared with recorded ones, because published results depend on them."""
    digest = hashlib.sha256()
    for objects in ((1, 1), (1, 3)):
        for row in rows_of(Localisation(50, "test", objects=objects, jitter=1, wrong_boxes=0.3)):
            digest.update(f"{row.columns}{row.completion}".encode())
    assert digest.hexdigest() == "c7d83c90b9ee52c058ce78a83f3b260d8cae1ffc04626454d91cdd6aa0bcc78e"


@pytest.mark.parametrize("options", [{}, {"jitter": 1, "wrong_boxes": 1.0}])
def test_the_solution_is_the_box_of_the_named_object(options):
    """A demonstration without noise contains this box."""
    for row in rows_of(Localisation(30, "test", **options)):
        color, shape = named(row)
        assert seen(row.images[0]) == {color: (shape, row.columns["solution"])}
        assert all(number % 7 == 0 for number in row.columns["solution"])
        assert row.columns["answer_extent"] == (8, 8)
        given = {"solution": [row.columns["solution"]], "image_sizes": [(56, 56)], "answer_extents": [(8, 8)]}
        assert options or score_texts(["iou", "box_format"], [row.completion], given).tolist() == [[1, 1]]


def test_training_never_shows_an_unseen_box():
    rows = columns(Localisation(2000, "0/sft"))
    assert not any(c["unseen"] for c in rows)
    assert {cells(c["solution"]) for c in rows} == {box for box in SQUARES if not is_unseen(box)}
    for row in rows_of(Localisation(100, 0, objects=(2, 3))):  # other objects do not have an unseen box either
        assert not any(is_unseen(cells(box)) for _, box in seen(row.images[0]).values())
