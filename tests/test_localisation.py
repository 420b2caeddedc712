"""recipes/localisation.py: objects fill their boxes, noise is in demonstrations only, unseen boxes are unseen."""

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml

from minivlmrl.data.turns import encode_completion
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.image import ImageProcessor
from minivlmrl.reward_functions import box_rewards
from minivlmrl.rows import Processor
from minivlmrl.tasks.shapes import COLORS
from recipes.localisation import (  # fmt: skip
    GRID,
    NAMES,
    Localisation,
    answer,
    constant_box,
    draw,
    is_unseen,
    jittered,
    overlap,
    pixels,
    placed,
    position,
    tokenizer,
)

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


def true_box(row):
    return tuple(number // 7 for number in row.columns["solution"])


def test_rows_are_deterministic_and_do_not_depend_on_their_number():
    for options in ({}, {"objects": (1, 3), "jitter": 1, "wrong_boxes": 0.3}):
        first, second = (Localisation(20, 0, **options) for _ in range(2))
        assert pictures(first) == pictures(second)
        assert columns(first) == columns(second)
        assert [row.completion for row in rows_of(first)] == [row.completion for row in rows_of(second)]
        assert pictures(Localisation(3, 0, **options)) == pictures(first)[:3]


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


def test_one_object_has_four_sizes_and_all_names_about_equally_often():
    rows = columns(Localisation(3600, 0))
    sizes = Counter((c["solution"][2] - c["solution"][0], c["solution"][3] - c["solution"][1]) for c in rows)
    assert set(sizes) == {(14, 14), (21, 21), (28, 28), (35, 35)}
    assert all(810 < count < 990 for count in sizes.values())  # 900 expected, standard deviation 26
    names = Counter(c["problem"] for c in rows)
    assert len(names) == 18 and all(140 < count < 260 for count in names.values())  # 200 and 14


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


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_share_of_random_boxes(share):
    """A fiftieth of those drawn at random happens to be right."""
    rows = rows_of(Localisation(1500, 0, wrong_boxes=share))
    wrong = sum(demonstrated(row) != true_box(row) for row in rows) / 1500
    assert abs(wrong - share * 0.98) < 0.04


@pytest.mark.parametrize("units", [0, 1, 2, 8])
def test_a_jittered_box_is_a_box_inside_the_picture(units):
    rng = random.Random(0)
    for box in EVERY_BOX:
        moved = jittered(box, units, rng)
        assert 0 <= moved[0] < moved[2] <= GRID and 0 <= moved[1] < moved[3] <= GRID
        assert all(abs(a - b) <= units for a, b in zip(moved, box, strict=True))


def test_demonstrations_of_the_recipe_are_vague():
    """Mean IoU of their boxes with the true ones 0.40, against 0.28 of the best constant box."""
    rows = rows_of(Localisation(4000, 0, jitter=1, wrong_boxes=0.3))
    mean = sum(iou(demonstrated(row), true_box(row)) for row in rows) / 4000
    print(f"mean IoU of noisy demonstrations: {mean:.4f}")
    assert 0.39 < mean < 0.42


def test_boxes_that_are_held_out():
    """Of the 126 an object alone can have, 15, and some of each size; fixed for ever, results depend on them."""
    held_out = [box for box in SQUARES if is_unseen(box)]
    assert len(SQUARES) == 126
    assert Counter(box[2] - box[0] for box in held_out) == {2: 7, 3: 2, 4: 3, 5: 3}
    assert held_out[:3] == [(0, 0, 2, 2), (0, 2, 5, 7), (1, 4, 3, 6)]


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


def test_position_is_the_third_that_holds_the_centre():
    for box in EVERY_BOX:
        x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
        down = "top" if y < 8 / 3 else "bottom" if y > 16 / 3 else "middle"
        across = "left" if x < 8 / 3 else "right" if x > 16 / 3 else "center"
        assert position(box) == (down, across)


def test_thinking_of_positions_is_about_the_box_that_is_demonstrated():
    options = {"objects": (1, 3), "jitter": 1, "wrong_boxes": 0.3, "thinking": "position"}
    for row in rows_of(Localisation(100, 0, **options)):
        color, _ = named(row)
        down, across = position(demonstrated(row))
        assert row.completion.startswith(f"<think>{color} {down} {color} {across}</think><answer>")


def test_best_constant_box_by_hand():
    """The example of the docstring, in pixels; of equally good boxes the first."""

    class Two:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            row = Localisation(1, 0)[0]
            row.columns["solution"] = [[0, 0, 14, 14], [0, 0, 14, 28]][index]
            return row

    assert constant_box(Two()) == ((0, 0, 2, 2), 0.75)


def test_best_constant_box_of_the_test_rows():
    """0.285 of the 512 rows that are evaluated, though chosen with them; 0.281 of all boxes."""
    rows = Localisation(512, "test")
    box, mean = constant_box(rows)
    print(f"best constant box of the test rows: {box}, {mean:.4f}")
    every = [sum(iou(candidate, true_box(row)) for row in rows_of(rows)) / 512 for candidate in (box, (1, 1, 6, 7))]
    assert every[0] == pytest.approx(mean) and every[1] <= mean
    assert mean == pytest.approx(0.285, abs=0.001)


@pytest.fixture(scope="module")
def processor():
    return Processor(tokenizer(), ImageProcessor(patch_size=7, min_pixels=14 * 14))


def test_every_digit_and_every_word_is_one_token(processor):
    encode = processor.tokenizer.encode
    assert all(len(encode(digit)) == 1 for digit in "0123456789")
    assert len(encode("1 2 5 6")) == 7  # spaces are tokens too
    words = {word for name in NAMES for word in name.split()} | {"top", "middle", "bottom", "left", "center", "right"}
    assert all(len(encode(f" {word}")) == 1 for word in words)
    assert (
        len(processor.tokenizer)
        <= ModelConfig.from_dict(json.loads((RECIPES / "localisation_model.json").read_text())).vocab_size
    )


def test_tokens_of_a_prompt_and_of_a_completion(processor):
    """41 (of them 16 of the image) and 19, thinking of positions 21; the recipe leaves room for a few more."""
    rows = rows_of(Localisation(40, "test", objects=(1, 3)))
    prompts = [processor(row.messages, row.images) for row in rows]
    assert {len(prompt.input_ids) for prompt in prompts} == {41}
    assert prompts[0].image_grid_thw.tolist() == [[1, 8, 8]]
    lengths = {
        thinking: {
            len(encode_completion(processor, [], answer(n, box, thinking))[0]) for n in NAMES for box in SQUARES[::9]
        }
        for thinking in ("name", "position")
    }
    assert lengths == {"name": {19}, "position": {21}}
    recipe = yaml.safe_load((RECIPES / "localisation.yaml").read_text())
    assert recipe["sampling"]["max_new_tokens"] >= 21


def test_docstring_examples():
    assert answer("purple circle", (4, 0, 8, 3)) == "<think>purple circle</think><answer>4 0 8 3</answer>"
    assert answer("purple circle", (4, 0, 8, 3), "position") == (
        "<think>purple top purple right</think><answer>4 0 8 3</answer>"
    )
    assert position((4, 0, 8, 3)) == ("top", "right")
    assert pixels((1, 2, 5, 6)) == [7, 14, 35, 42]
    assert is_unseen((0, 0, 2, 2)) and not is_unseen((1, 0, 3, 2))
    assert overlap((0, 0, 2, 2), (1, 1, 3, 3)) and not overlap((0, 0, 2, 2), (2, 0, 4, 2))
    assert {placed((5, 5), random.Random(seed))[:2] for seed in range(400)} == {
        (x, y) for x in range(4) for y in range(4)
    }

    class Moves(random.Random):
        moves = iter((1, -1, -1, 1))

        def choice(self, options):
            return next(self.moves)

    assert jittered((0, 2, 2, 6), 1, Moves()) == (0, 1, 2, 7)
