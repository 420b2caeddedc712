"""Test coordinate spaces and parsing of boxes; test_properties.py tests the overlap and the matching of valid boxes."""

import math
import sys
from dataclasses import replace

import pytest

from minivlmrl.data.boxes import Box, iou, match, parse_boxes

IMAGE = (100.0, 80.0)


def box(*numbers):
    return Box(*numbers, IMAGE)


@pytest.mark.parametrize(("numbers", "valid", "inside"), [
    ((0, 0, 100, 80), True, True), ((0, 0, 100.00001, 80), True, True), ((0, 0, 100.001, 80), True, False),
    ((-0.001, 0, 5, 5), True, False), ((0, 0, 80, 100), True, False), ((5, 6, 1, 2), False, True),
    ((1, 2, 1, 6), False, True), ((101, 2, 1, 6), False, False), ((1, math.nan, 5, 6), False, False),
    ((1, 2, 5, math.inf), False, False), ((1, 2, 1e100, 6), False, False), ((1, -1e308, 5, 6), False, False),
])  # fmt: skip
def test_valid_and_inside(numbers, valid, inside):
    assert (box(*numbers).valid, box(*numbers).inside()) == (valid, inside)


def test_a_box_around_an_image_stays_around_it():
    assert Box(0, 0, 49, 49, (49, 49)).to((1, 1)).numbers == (0, 0, 1, 1)  # although 49 * (1 / 49) < 1


def test_several_boxes_need_scipy_and_one_does_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    near = box(0, 0, 2, 2)
    far = box(5, 5, 7, 7)
    assert match([near], [near], iou) == [(0, 0)]
    assert match([far, near], [near], iou) == [(1, 0)]
    assert match([near], [far, near], iou) == [(0, 1)]
    with pytest.raises(ValueError, match=r"needs scipy; run pip install .*\[boxes\]"):
        match([near, far], [far, near], iou)


def test_match_without_boxes():
    good = box(1, 2, 5, 6)
    bad = box(5, 6, 1, 2)
    assert match([], [good], iou) == match([good], [], iou) == match([], [], iou) == []
    assert (2, 0) in match([bad, replace(good, x1=math.nan), good], [good], iou)


BOX = (1.0, 2.0, 5.0, 6.0)
SECOND = (7.0, 7.0, 8.0, 9.5)


@pytest.mark.parametrize(("text", "expected"), [
    ('```json\n[\n\t{"bbox_2d": [1, 2, 5, 6], "label": "cat"}\n]\n```', [BOX]),
    ('{"bbox_2d": [1, 2, 5, 6], "label": "[7, 7, 8, 9.5] 猫", "score": 0.9, "tags": [1, [2]]}', [BOX]),
    ("[1, 2, 5, 6]", [BOX]),
    ("[[1, 2, 5, 6], [7, 7, 8, 9.5]]", [BOX, SECOND]),
    ("[{'Position': [1, 2, 5, 6], 'Confidence': 1}, {'Position': [7, 7, 8, 9.5]}]", [BOX, SECOND]),
    ("[1, 2, 5, 6], [7, 7, 8, 9.5]", [BOX, SECOND]),
    ("[ +1., 02 ,\t5.00 ,6 ].", [BOX]),
    # in markup, in single quotes, or from another keyboard
    ("```JSON\n[1, 2, 5, 6]\n```", [BOX]), ('"1 2 5 6"', [BOX]), ("**[1, 2, 5, 6]**", [BOX]),
    ("$\\boxed{[1, 2, 5, 6]}$", [BOX]), ("Answer: `[1, 2, 5, 6]`", [BOX]), ("１ ２ ５ ６", [BOX]),
    ("［1，2，5，6］", [BOX]), ("[−1, –1, 5, 6]", [(-1.0, -1.0, 5.0, 6.0)]),
    ("{'bbox_2d': [1, 2, 5, 6], 'label': \"cat's\"}", [BOX]),
    ('{"bbox_2d": [1, 2, 5, 6], "label": "a “red” cat"}', [BOX]),
    ("(1, 2), (5, 6)", [BOX]),
    ("<|object_ref_start|>the cat<|object_ref_end|><|box_start|>(1,2),(5,6)<|box_end|>", [BOX]),
    ("(1 2) (5 6), (7, 7), (8, 9.5)", [BOX, SECOND]),
    (" 1,2,5,6\n", [BOX]),
    ("-1.5 +.5 5e0 6E-1", [(-1.5, 0.5, 5.0, 0.6)]),
    # boxes are returned as written, even if they are invalid
    ("5 6 1 2", [(5.0, 6.0, 1.0, 2.0)]),
    ("[1, 2, 5, 6], [1, 2, 5, 6]", [BOX, BOX]),
])  # fmt: skip
def test_parse_boxes(text, expected):
    assert parse_boxes(text) == expected
    assert all(type(number) is float for numbers in parse_boxes(text) for number in numbers)


@pytest.mark.parametrize("text", [
    "", "[]", "[{}]", "null", "```json\n```", "1 2 5", "1 2 5 6 7", "[1, 2], [5, 6]", "(1, 2, 5, 6)",
    "(1, 2), (5, 6), (7, 7)", '{"bbox_2d": [[1, 2, 5, 6]]}',
    # values that are not finite numbers
    "[NaN, 2, 5, 6]", "[1, 2, 1e309, 6]", '["1", "2", "5", "6"]', "[true, 2, 5, 6]", '{"bbox_2d": null}',
    "0x1 2 5 6", "1_0 2 5 6", "1-2-5-6", "1,,2 5 6", "1 2 5 6,",
    # broken JSON, or boxes within other text
    '{"bbox_2d": [1, 2, 5, 6]', '{"bbox_2d": [1, 2, 5, 6], }', "[1, 2, 5, 6", '{"point_2d": [1, 2]}',
    '{"bbox_2d": [1, 2, 5, 6], "bbox_2d": [7, 7, 8, 9]}', '[{"bbox_2d": [1, 2, 5, 6]}, {"label": "cat"}]',
    "[1, 2, 5, 6] and [7, 7, 8, 9]", "The box is [1, 2, 5, 6].", "```json\n[1, 2, 5, 6]", "```xml\n[1, 2, 5, 6]\n```",
    "```json\n[1, 2, 5, 6]\n```\n```json\n[7, 7, 8, 9]\n```", "Here: ```json\n[1, 2, 5, 6]\n```",
])  # fmt: skip
def test_no_box(text):
    assert parse_boxes(text) == []
