"""Test the task `shapes`: images agree with labels, and training and held-out rows do not overlap."""

import hashlib
from collections import Counter

import pytest

from minivlmrl.config.options import DataOptions, RunConfig
from minivlmrl.rewards.text import accuracy, find_answer, tag_format
from minivlmrl.run import datasets
from minivlmrl.tasks import shapes
from minivlmrl.tasks.registry import get_task


def each(rows, count=None):
    return [rows[i] for i in range(count or len(rows))]


def pictures(rows, count=None):
    return [row.images[0].tobytes() for row in each(rows, count)]


def seen(image):
    """Return the label that the pixels show, and the largest width of the shape's top and bottom rows."""
    pixels = image.load()
    inside = [(x, y) for y in range(shapes.SIZE) for x in range(shapes.SIZE) if pixels[x, y] in shapes.COLORS.values()]
    color = next(name for name, rgb in shapes.COLORS.items() if rgb == pixels[inside[0]])
    top, foot = min(y for _, y in inside), max(y for _, y in inside)
    widths = [sum(y == row for _, y in inside) for row in (top, foot)]
    return f"{color} {'square' if widths[0] == widths[1] else 'triangle'}", max(widths)


def test_the_solution_is_what_the_picture_shows():
    smallest, largest = shapes.OBJECT_SIZES
    for row in (*each(shapes.Shapes(40, "a")), *each(shapes.Shapes(40, "b", wrong_labels=1.0))):
        label, side = seen(row.images[0])
        assert row.columns["solution"] == label and smallest <= side <= largest


def test_rows_end_and_do_not_depend_on_their_number():
    assert len(list(shapes.Shapes(3, 0))) == 3
    assert pictures(shapes.Shapes(3, 0)) == pictures(shapes.Shapes(20, 0))[:3]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_share_of_wrong_labels(share):
    rows = each(shapes.Shapes(600, 0, share))
    texts, solutions = [row.completion for row in rows], [row.columns["solution"] for row in rows]
    wrong = accuracy(map(find_answer, texts), solutions).count(0.0) / 600
    assert tag_format(texts) == [1.0] * 600
    assert abs(wrong - share * 11 / 12) < 0.06 and (share or wrong == 0)


@pytest.mark.parametrize("where", ["tags", "whole", "last_line"])
def test_demonstrations_say_the_label_where_the_rewards_look_for_it(where):
    training, _ = get_task("shapes(wrong_demonstrations=0)").datasets(DataOptions(answer_format=where), 0)
    row = training["demonstrations"][3]
    assert find_answer(row.completion, where) == row.columns["solution"]


def test_a_preference_is_the_right_answer_over_a_worse_one():
    """Four kinds are about equally frequent: wrong color, wrong shape, contradiction, missing characters."""
    kinds = Counter()
    for row in each(shapes.Shapes(400, 0)):
        label, truth = row.columns["solution"], shapes.tagged_answer(row.columns["solution"])
        assert row.chosen == truth and row.rejected != truth
        named = row.rejected.partition("<answer>")[2].removesuffix("</answer>")
        if named in shapes.LABELS and row.rejected == shapes.tagged_answer(named):
            same = [a == b for a, b in zip(named.split(), label.split(), strict=True)]
            kinds[{(False, True): "color", (True, False): "shape"}[tuple(same)]] += 1
        elif named in shapes.LABELS and row.rejected.replace(named, label) == truth:
            assert named.split()[0] != label.split()[0] and named.split()[1] == label.split()[1]
            kinds["contradiction"] += 1
        else:
            assert 1 <= len(truth) - len(row.rejected) <= 12
            kinds["part left out"] += 1
    assert all(70 < count < 130 for count in kinds.values()) and len(kinds) == 4, kinds


def test_rows_of_a_seed_are_the_same_in_every_version():
    """The hash was recorded before rows had preferences, and published results depend on these images."""
    digest = hashlib.sha256()
    for row in each(shapes.Shapes(50, "0/sft", wrong_labels=0.5)):
        digest.update(row.images[0].tobytes() + f"{row.columns}{row.completion}".encode())
    assert digest.hexdigest() == "862eb074bf2256e17a87dc43b84c99ff60d594220ec647ac6e62247678caf4e8"


def test_splits_and_seeds_share_no_picture_and_evaluation_rows_are_the_same_for_every_seed():
    stages = {"sft": "demonstrations", "grpo": "prompts"}
    data = DataOptions(task="shapes(demonstrations=100)", eval_rows=100)
    first, second = (datasets.load_datasets(RunConfig(data=data, seed=seed), stages) for seed in (0, 1))
    every = [pictures(rows[stage], 100) for rows in (first, second) for stage in stages] + [pictures(first["eval"])]
    assert len({picture for part in every for picture in part}) == 500
    assert pictures(second["eval"]) == every[-1]
