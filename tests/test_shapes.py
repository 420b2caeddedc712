"""The embedded task: its pictures show what the labels say, and its splits share nothing."""

import hashlib
import math
from collections import Counter

import pytest

from minivlmrl.rewards import accuracy, find_answer, format
from minivlmrl.run import batches
from minivlmrl.run.config import DataSection, RunConfig
from minivlmrl.tasks import shapes
from minivlmrl.tasks.shapes import COLORS, LABELS, Shapes, answer
from minivlmrl.tasks.task import get_task


def pictures(rows):
    return [rows[i].images[0].tobytes() for i in range(len(rows))]


def seen(image):
    """Read the label off the pixels: the colour that COLORS knows, and whether its top row is as wide as its foot."""
    pixels = image.load()
    inside = [(x, y) for y in range(shapes.SIZE) for x in range(shapes.SIZE) if pixels[x, y] in COLORS.values()]
    color = next(name for name, rgb in COLORS.items() if rgb == pixels[inside[0]])
    top, foot = min(y for _, y in inside), max(y for _, y in inside)
    widths = [sum(y == row for _, y in inside) for row in (top, foot)]
    return f"{color} {'square' if widths[0] == widths[1] else 'triangle'}", max(widths)


def test_the_solution_is_what_the_picture_shows():
    for rows in (Shapes(40, "a"), Shapes(40, "b", wrong_labels=1.0)):
        for i in range(len(rows)):
            label, side = seen(rows[i].images[0])
            assert rows[i].columns["solution"] == label
            smallest, largest = shapes.OBJECT_SIZES
            assert smallest <= side <= largest


def test_rows_end_and_do_not_depend_on_their_number():
    assert len(list(Shapes(3, 0))) == len(list(shapes.LabelledShapes(Shapes(3, 0)))) == 3
    assert pictures(Shapes(3, 0)) == pictures(Shapes(20, 0))[:3]


def test_all_labels_occur_about_equally_often():
    rows = Shapes(1200, 0)
    counts = [sum(rows[i].columns["solution"] == label for i in range(1200)) for label in LABELS]
    assert len(LABELS) == len(COLORS) * len(shapes.SHAPES) == 12
    assert math.isclose(shapes.CHANCE, 1 / 12)
    assert all(60 < count < 140 for count in counts)  # 100 expected, standard deviation 9.6


def test_demonstrations_without_noise_earn_every_reward():
    rows = [Shapes(30, 0)[i] for i in range(30)]
    texts, solutions = [row.completion for row in rows], [row.columns["solution"] for row in rows]
    assert accuracy(map(find_answer, texts), solutions) == format(texts) == [1.0] * 30


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_share_of_wrong_labels(share):
    """A twelfth of those drawn at random happens to be right."""
    rows = [Shapes(1000, 0, share)[i] for i in range(1000)]
    wrong = sum(accuracy([find_answer(row.completion)], [row.columns["solution"]]) == [0.0] for row in rows) / 1000
    assert abs(wrong - share * 11 / 12) < 0.05


@pytest.mark.parametrize("where", ["tags", "whole", "last_line"])
def test_demonstrations_say_the_label_where_the_rewards_look_for_it(where):
    training, _ = get_task("shapes").datasets(DataSection(task="shapes", answer=where, wrong_demonstrations=0), 0)
    row = training["demonstrations"][3]
    assert find_answer(row.completion, where) == row.columns["solution"]


def test_noise_changes_demonstrations_only():
    clean, noisy = Shapes(20, 0), Shapes(20, 0, wrong_labels=1.0)
    assert pictures(clean) == pictures(noisy)
    assert [clean[i].columns for i in range(20)] == [noisy[i].columns for i in range(20)]


def test_a_preference_is_the_right_answer_over_a_worse_one():
    """All four kinds occur about equally often: another colour, the other shape, a contradiction, a part left out."""
    kinds = Counter()
    for row in (Shapes(800, 0)[i] for i in range(800)):
        label, truth = row.columns["solution"], answer(row.columns["solution"])
        assert row.chosen == truth and row.rejected != truth
        named = row.rejected.partition("<answer>")[2].removesuffix("</answer>")
        if named in LABELS and row.rejected == answer(named):
            same = [a == b for a, b in zip(named.split(), label.split(), strict=True)]
            kinds[{(False, True): "colour", (True, False): "shape"}[tuple(same)]] += 1
        elif named in LABELS and row.rejected.replace(named, label) == truth:
            assert named.split()[0] != label.split()[0] and named.split()[1] == label.split()[1]
            kinds["contradiction"] += 1
        else:
            assert 1 <= len(truth) - len(row.rejected) <= 12
            kinds["part left out"] += 1
    assert all(160 < count < 240 for count in kinds.values()) and len(kinds) == 4, kinds


def test_rows_of_a_seed_are_the_same_in_every_version():
    """Recorded before there were preferences; the published results need these pictures."""
    digest = hashlib.sha256()
    for row in (Shapes(50, "0/sft", wrong_labels=0.5)[i] for i in range(50)):
        digest.update(row.images[0].tobytes() + f"{row.columns}{row.completion}".encode())
    assert digest.hexdigest() == "862eb074bf2256e17a87dc43b84c99ff60d594220ec647ac6e62247678caf4e8"


def test_labelled_rows_have_one_answer_and_say_whether_it_is_the_right_one():
    """In turn the chosen and the rejected answer of the pairs, which stay as they are."""
    data = DataSection(task="shapes", pairs=6)
    training, _ = get_task("shapes").datasets(data, 0)
    pairs, labelled = training["pairs"], training["labels"]
    assert len(labelled) == len(pairs) == 6
    for i in range(6):
        row, pair = labelled[i], pairs[i]
        assert row.columns == pair.columns | {"label": i % 2 == 0}
        assert row.completion == (pair.rejected if i % 2 else pair.chosen)
        assert (row.chosen, row.rejected) == (None, None)
        assert row.images[0].tobytes() == pair.images[0].tobytes()


def load_datasets(data, stages, seed):
    return batches.load_datasets(RunConfig(data=data, seed=seed), stages)


def test_splits_and_seeds_share_no_picture():
    every = []
    for seed in (0, 1):
        data = DataSection(task="shapes", eval_rows=100, demonstrations=100)
        datasets = load_datasets(data, {"sft": "demonstrations", "grpo": "prompts"}, seed)
        every += [datasets[stage][i].images[0].tobytes() for stage in ("sft", "grpo") for i in range(100)]
    every += pictures(datasets["eval"])
    assert len(set(every)) == len(every) == 500


def test_evaluation_rows_are_the_same_for_every_seed():
    first, second = (load_datasets(DataSection(task="shapes", eval_rows=10), {}, seed)["eval"] for seed in (0, 1))
    assert pictures(first) == pictures(second)
