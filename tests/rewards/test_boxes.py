"""Test the rewards for boxes on good and bad answers, and on answers that try to exploit the rewards."""

import json
import re

import PIL.Image
import pytest
import torch

from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Row
from minivlmrl.data.video import Video
from minivlmrl.rewards.boxes import acc_0_5, box_format, mean_iou
from minivlmrl.rewards.columns import image_and_box_sizes
from minivlmrl.tasks import shapes
from tests.helpers.score_texts import logged_reasons, score_texts
from tests.helpers.talk import IMAGE_PART, user

SIZE = (200, 100)  # width and height of the image file
SOLUTION = [40, 20, 80, 60]  # in pixels of the file; RIGHT is the same box in pixels of the resized image
RIGHT = "20 10 40 30"
WRONG = "60 10 80 30"  # as large as the right box, and beside it
NAMES = ["iou", "acc_0_5", "box_format"]


def columns(solution=SOLUTION, count=1, size=SIZE, extent=(100.0, 50.0)):
    return {"solution": [solution] * count, "image_sizes": [size] * count, "answer_extents": [extent] * count}


def rewards(completion, **settings):
    return tuple(score_texts(NAMES, [completion], columns(**settings))[0].tolist())


def say(text):
    return f"<think>a</think><answer>{text}</answer>"


def js(*boxes, **more):
    return json.dumps([{"bbox_2d": [float(n) for n in box.split()], "label": "cat", **more} for box in boxes])


NOTHING = (0, 0, 0)
ALL = (1, 1, 1)
ALL_BUT_FORM = (1, 1, 0)

# {completion: (mean_iou, acc_0_5, box_format)}
HACKS = {
    say(RIGHT): ALL,
    say(js(RIGHT, iou=1.0, confidence=99, reward=1e300)): ALL,
    say(js(RIGHT).replace("cat", "[60, 10, 80, 30]")): ALL,  # a box in a label does not count
    say(WRONG): (0, 0, 1),
    say("0 0 100 50"): (0.08, 0, 1),
    say("-1000 -1000 1000 1000"): (1e-4, 0, 0),
    say("20 10 20 20"): NOTHING,  # x, y, width, height
    say("10 20 30 40"): (1 / 7, 0, 1),  # y first
    say("40 20 80 60"): (0, 0, 0),  # pixels of the file
    say("0.2 0.2 0.4 0.6"): (0, 0, 1),  # unit
    say("[]"): NOTHING,  # "no such object"
    say(f"The cat is at [{RIGHT}]"): NOTHING,
    say(js(RIGHT, WRONG)): (0.5, 0.5, 1),
    # tags; test_text.py has more
    RIGHT: NOTHING,
    f"<answer>{RIGHT}</answer>": ALL_BUT_FORM,
    f"{RIGHT}{say(WRONG)}": (0, 0, 0),
    f"<answer>{WRONG}</answer><answer>{RIGHT}</answer>": ALL_BUT_FORM,  # only the last answer counts
    f"<answer>{RIGHT}</answer><answer>{WRONG}": ALL_BUT_FORM,  # an answer without a closing tag does not count
    js(RIGHT).replace("cat", "<answer>"): NOTHING,
    say(js(RIGHT).replace("cat", "</answer><answer>")): NOTHING,
}


def test_red_team():
    found = score_texts(NAMES, list(HACKS), columns(count=len(HACKS)))
    for message, earned in zip(HACKS, found.tolist(), strict=True):
        assert tuple(earned) == pytest.approx(HACKS[message], abs=1e-6), message


# two true boxes of 40 x 40 and 20 x 20 pixels of the file
TWO = [[40, 20, 80, 60], [100, 0, 120, 20]]
FIRST, OTHER = "20 10 40 30", "50 0 60 10"


@pytest.mark.parametrize(("boxes", "expected"), [
    ([FIRST, OTHER], (1, 1, 1)),
    ([OTHER], (0.5, 0.5, 1)),
    ([FIRST, OTHER, "0 0 1 1"], (2 / 3, 2 / 3, 1)),
    (["20 10 40 20", OTHER], (0.75, 1, 1)),  # half of the first, which is an IoU of exactly 0.5
    (["20 0 60 30"], (1 / 6, 0, 1)),  # one around both
])  # fmt: skip
def test_several_true_boxes(boxes, expected, scipy):
    assert rewards(say(js(*boxes)), solution=TWO) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("solution", [
    [40, 20, 80, 60], (40.0, 20, 80, 60), [[40, 20, 80, 60]], "[[40, 20, 80, 60]]", "40 20 80 60",
    '{"bbox_2d": [40, 20, 80, 60], "label": "cat"}', {"bbox_2d": [40, 20, 80, 60]}, [{"bbox_2d": [40, 20, 80, 60]}],
    "<think>a</think><answer>[40, 20, 80, 60]</answer>",
])  # fmt: skip
def test_solutions_in_every_format(solution):
    assert rewards(say(RIGHT), solution=solution) == ALL


@pytest.mark.parametrize("solution", [
    "cat", "[40, 20, 80, NaN]", "[[40, 20, 80, 60], [1, 2, 3]]", [[]], {}, [40, 20, 80], [80, 20, 40, 60],
    ["40", "20", "80", "60"], [None, 20, 80, 60], [True, 20, 80, 60], 7, torch.tensor([40, 20, 80, 60]),
], ids=repr)  # fmt: skip
def test_invalid_solutions_are_reported(solution):
    message = f"solution {solution!r} is not a box; the solution must be [x1, y1, x2, y2]"
    for name in ("iou", "acc_0_5"):
        with pytest.raises(ValueError, match=f"^reward {name}, for the completion .*{re.escape(message)}"):
            score_texts([name], [say(RIGHT)], columns(solution))


@pytest.mark.parametrize("solution", ["", "[]", [], "None", "<answer>no such object</answer>"])
def test_rows_without_an_object(solution):
    for message in ("[]", "None.", "no such object", "```json\n[]\n```"):
        assert rewards(say(message), solution=solution) == ALL
    for message in (RIGHT, "", "null", "none, or [20, 10, 40, 30]", [[20, 10, 40, 30]]):
        assert rewards(say(message), solution=solution)[:2] == (0, 0)


BOXES = "the answer has {}, the solution [40, 20, 80, 60], in pixels of the image file"
# {answer text: (reason for iou and acc_0_5; reason for box_format)}
REASONS = {
    RIGHT: (None, None),
    WRONG: (BOXES.format("[120, 20, 160, 60]"), None),
    "40 20 80 60": (
        BOXES.format("[80, 40, 160, 120]"),
        "the box [40, 20, 80, 60] is not inside the image, which is 100 x 50",
    ),
    "40 30 20 10": (BOXES.format("[80, 60, 40, 20]"), "the box [40, 30, 20, 10] does not have x2 > x1 and y2 > y1"),
    js(*[RIGHT] * 5): (BOXES.format("[40, 20, 80, 60], [40, 20, 80, 60], [40, 20, 80, 60] and 2 more"), None),
    "left": ("no box was found in the answer", "no box was found in the answer"),
    "[]": (
        "no box was found in the answer", "the answer says that there is no object, but the solution has a box"
    ),
}  # fmt: skip


def test_box_rewards_give_a_reason():
    given = columns(count=len(REASONS))
    expected, expected_format = map(list, zip(*REASONS.values(), strict=True))
    for reward in (mean_iou, acc_0_5):
        rewards, reasons = logged_reasons(reward, answer_texts=list(REASONS), **given)
        assert reasons == expected and [value == 1 for value in rewards] == [reason is None for reason in reasons]
        assert rewards == reward(list(REASONS), **given), "the reasons do not change the rewards"
    rewards, reasons = logged_reasons(box_format, completions=[say(answer) for answer in REASONS], **given)
    assert reasons == expected_format and rewards == [float(reason is None) for reason in reasons]
    assert logged_reasons(box_format, completions=[RIGHT], **columns()) == ([0.0], ["no <think>"])


def test_box_rewards_give_a_reason_without_an_answer_a_solution_an_image_or_an_object():
    for answer, settings, value, reason in (
        (None, {}, 0, "no answer, see data.answer_format"),
        (RIGHT, {"solution": None}, None, "the row has no solution"),
        (RIGHT, {"size": None, "extent": None}, None, "the row has no image"),
        (RIGHT, {"solution": []}, 0, "the object is not in the image, so the answer should be [] or None"),
        ("[]", {"solution": []}, 1, None),
    ):
        assert logged_reasons(mean_iou, answer_texts=[answer], **columns(**settings)) == ([value], [reason])
    reasons = logged_reasons(box_format, completions=[say(RIGHT)], **columns(extent=None))
    assert reasons == ([None], ["the row has no image"])


def row(*sizes, **columns):
    images = [PIL.Image.new("RGB", size) for size in sizes]
    return Row([user([IMAGE_PART] * len(images))], images, columns)


def extents_of(row, **options):
    processor = Processor(shapes.tokenizer(), ImageProcessor(**options))
    return image_and_box_sizes(row, row.prompt(processor), processor)


def test_a_row_may_have_its_own_box_space():
    spaces = {"original": (90, 50), "resized": (84, 56), "thousandths": (1000, 1000), "unit": (1, 1), None: (84, 56)}
    for space, extent in spaces.items():
        assert extents_of(row((90, 50), box_space=space))[1] == extent
    assert extents_of(row((90, 50)), patch_size=7, min_pixels=784, max_pixels=2000)[1] == (56, 28)


def test_the_first_image_counts_and_videos_are_ignored():
    rows = [row(box_space="unit"), row((90, 50), (56, 112)), row((90, 50))]
    rows[2].videos = [Video([PIL.Image.new("RGB", (56, 112))] * 2, 2.0)]
    rows[2].messages[0]["content"].insert(0, {"type": "video"})
    assert [extents_of(row) for row in rows] == [(None, None), *[((90, 50), (84, 56))] * 2]
