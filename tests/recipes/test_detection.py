"""Test the rewards of recipes/vlm_r1.py for labeled boxes: by hand, with random orders of hits, and with exploits."""

import json

import numpy as np
import pytest

from recipes.vlm_r1 import read_objects
from tests.helpers.links import ROOT
from tests.helpers.score_texts import score_texts

RECIPE = f"{ROOT}/recipes/vlm_r1.py"
NAMES = [f"{RECIPE}:detection", f"{RECIPE}:ap_50", f"{RECIPE}:weighted_sum"]
CAT = ([0, 0, 20, 20], "cat")
OTHER_CAT = ([60, 0, 80, 20], "cat")
DOG = ([0, 40, 20, 60], "dog")
HALF = ([0, 0, 20, 10], "cat")  # half the cat: IoU 0.5
NOWHERE = ([80, 80, 90, 90], "cat")


def js(*objects):
    return json.dumps([{"bbox_2d": box, "label": label} for box, label in objects])


def earned(message, *true, size=(100, 100), extent=(100, 100), names=NAMES):
    given = {"solution": [js(*true)], "image_sizes": [size], "answer_extents": [extent]}
    return tuple(score_texts(names, [message], given, "whole")[0].tolist())


ALL = (1, 1, 1)
NOTHING = (0, 0, 0)
ROWS = [  # answer, truth, (detection, ap_50, weighted_sum)
    (f"```json\n{js(CAT)}\n```", [CAT], ALL),
    (js(DOG, OTHER_CAT, CAT), [CAT, OTHER_CAT, DOG], ALL),
    (js((CAT[0], " Cat ")), [CAT], ALL),
    (js(HALF), [CAT], (0.5, 1, 0.7 * 0.5 + 0.3)),
    (js(CAT), [CAT, OTHER_CAT], (0.5, 51 / 101, 0.7 / 2 + 0.3 * 0.75)),
    (js(NOWHERE, CAT), [CAT], (0.5, 0.5, 0.7 + 0.3 * 0.75)),
    (js(CAT, DOG), [CAT], (0.5, 0.5, 0.7 + 0.3 * 0.75)),  # without a dog, the label dog has AP 0
    (js((CAT[0], "dog")), [CAT], (0, 0, 0.3)),  # VLM-R1 rewards a complete answer
    (js(NOWHERE), [CAT], NOTHING),
    (js(*[CAT] * 50), [CAT], (1 / 50, 1, 0.7 + 0.3 * 0.51)),
    ("[]", [CAT], NOTHING),
    ("[]", [], ALL),
    (js(CAT), [], NOTHING),
    ("", [], NOTHING),  # an empty answer, unlike an empty list, earns nothing
    ('[{"bbox_2d": [0, 0, 20, 20]}]', [CAT], NOTHING),
    ("[" * 100000, [CAT], NOTHING),
]


@pytest.mark.parametrize(("message", "true", "expected"), ROWS)
def test_by_hand(message, true, expected, scipy):
    assert earned(message, *true) == pytest.approx(expected, abs=1e-6)


def test_boxes_are_compared_in_pixels_of_the_file():
    assert earned(js(([0, 0, 10, 5], "cat")), ([0, 0, 40, 30], "cat"), size=(400, 300), extent=(100, 50)) == ALL


def test_average_precision_is_that_of_coco():
    """COCO averages the precision at 101 recall levels, each the best precision at that recall or more."""
    rng = np.random.default_rng(0)
    for _ in range(8):
        hits = rng.random(8) < 0.6
        hits[rng.integers(8)] = True
        true = [([10 * i, 0, 10 * i + 8, 8], "cat") for i in range(hits.sum())]
        waiting = iter(true)
        message = [next(waiting) if hit else ([0, 50, 5, 55], "cat") for hit in hits]
        precision, recall = hits.cumsum() / np.arange(1, 9), hits.cumsum() / hits.sum()
        expected = np.mean([precision[recall >= level / 100 - 1e-9].max() for level in range(101)])
        assert earned(js(*message), *true)[1] == pytest.approx(expected, abs=1e-6)


def test_weights_of_the_sum():
    [found] = earned(js(HALF), CAT, DOG, names=[f"{RECIPE}:weighted_sum(weights=(1, 1, 2))"])
    assert found == pytest.approx((0.5 / 2 + 1 / 2 + 2 * (1 - (1 / 2 + 0) / 2)) / 4)


@pytest.mark.parametrize("solution", ["cat", "[[0, 0, 1, 1]]", '[{"bbox_2d": [5, 0, 1, 1], "label": "a"}]', 3])
def test_a_wrong_solution_is_named(solution):
    given = {"solution": [solution], "image_sizes": [(9, 9)], "answer_extents": [(9, 9)]}
    with pytest.raises(ValueError, match=r"^reward .*:detection, for .* solution .* contains no objects; it must be "):
        score_texts(NAMES[:1], ["[]"], given)


def test_without_solution_or_image():
    given = {"solution": [None, "[]"], "image_sizes": [(9, 9), None], "answer_extents": [(9, 9), None]}
    assert score_texts(NAMES, ["[]", "[]"], given).isnan().all()
    assert read_objects("```json\n[]\n```", (9, 9)) == []
