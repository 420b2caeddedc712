"""What rewards for boxes are told about each row, and what an evaluation makes of rewards, on one rank and on two."""

import math
import threading

import PIL.Image
import pytest
import torch

from minivlmrl.data.video import Video
from minivlmrl.image import ImageProcessor
from minivlmrl.rows import Processor, Row
from minivlmrl.run import evaluate as rollout_file
from minivlmrl.run.config import SamplingConfig
from minivlmrl.run.evaluate import Answer, Rollout, box_columns, evaluate
from minivlmrl.scale.ranks import World
from minivlmrl.tasks import localisation

REWARDS = ("iou", "box_format", "acc_0_5")
NAN = float("nan")


def row(*sizes, **columns):
    images = [PIL.Image.new("RGB", size) for size in sizes]
    return Row([{"role": "user", "content": [{"type": "image"}] * len(images)}], images, columns)


def columns_of(rows, G=1, **options):
    processor = Processor(localisation.tokenizer(), ImageProcessor(**options))
    return box_columns(rows, [r.prompt(processor) for r in rows], processor, G)


def test_an_answer_counts_in_pixels_of_the_resized_image():
    assert columns_of([row((90, 50))]) == {"image_sizes": [(90, 50)], "answer_extents": [(84.0, 56.0)]}
    small = columns_of([row((90, 50))], patch_size=7, min_pixels=14 * 14)
    assert small == {"image_sizes": [(90, 50)], "answer_extents": [(84.0, 56.0)]}
    bounded = columns_of([row((90, 50))], min_pixels=28 * 28, max_pixels=28 * 28 * 2)
    assert bounded == {"image_sizes": [(90, 50)], "answer_extents": [(28.0, 28.0)]}


@pytest.mark.parametrize(
    ("space", "extent"),
    [("original", (90, 50)), ("resized", (84, 56)), ("thousandths", (1000, 1000)), ("unit", (1, 1)), (None, (84, 56))],
)
def test_a_row_may_say_its_space(space, extent):
    assert columns_of([row((90, 50), box_space=space)])["answer_extents"] == [extent]


def test_a_row_may_say_its_extent():
    """It comes before the space."""
    assert columns_of([row((90, 50), box_space="unit", answer_extent=(8, 8))])["answer_extents"] == [(8, 8)]


def test_an_unknown_space_is_named():
    with pytest.raises(ValueError, match="unknown space 'pixels' for boxes; there are: original, resized"):
        columns_of([row((90, 50), box_space="pixels")])


def test_rows_without_images_have_neither():
    """Not even with an extent of their own; each of a row's completions is told the same, in the order of groups."""
    rows = [row(box_space="unit", answer_extent=(8, 8)), row((90, 50)), row()]
    assert columns_of(rows, 2) == {
        "image_sizes": [None, None, (90, 50), (90, 50), None, None],
        "answer_extents": [None, None, (84, 56), (84, 56), None, None],
    }


def test_the_first_image_counts():
    rows = [row((56, 112), (90, 50)), row((90, 50), (56, 112))]
    assert columns_of(rows) == {"image_sizes": [(56, 112), (90, 50)], "answer_extents": [(56, 112), (84, 56)]}


def test_a_video_before_the_image_does_not_count():
    one = row((90, 50))
    one.videos = [Video([PIL.Image.new("RGB", (56, 112))] * 2, 2.0)]
    one.messages[0]["content"].insert(0, {"type": "video"})
    assert columns_of([one]) == {"image_sizes": [(90, 50)], "answer_extents": [(84, 56)]}


def test_parts_of_a_rollout_keep_their_extents():
    def one(name, extent):
        return Rollout([name], [[None, None]], [f"{name}1", f"{name}2"], torch.zeros(2, 1), [extent] * 2, [0], [0])

    joined = one("a", (8, 8)).join(one("b", None)).join(one("c", (1, 1)))
    assert joined.answer_extents == [(8, 8), (8, 8), None, None, (1, 1), (1, 1)]
    part = joined.select([2, 0])
    assert part.texts == ["c1", "c2", "a1", "a2"]
    assert part.answer_extents == [(1, 1), (1, 1), (8, 8), (8, 8)]


# evaluation


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    """A rollout that earns what a row's columns `sampled` and `greedy` say, and names its row."""

    def rollout(model, processor, batch, num_generations, sampling, reward_names, keys, reward_model, pace):
        assert num_generations == 1 and tuple(reward_names) == REWARDS
        kind = {1.0: "sampled", 0.0: "greedy"}[sampling.temperature]
        # answers end as in training, but are drawn without its filters
        assert sampling == SamplingConfig(sampling.temperature, max_new_tokens=20, stop_strings=["</answer>"])
        texts = [f"{r.columns['name']} {kind}" for r in batch]
        values = torch.tensor([r.columns[kind] for r in batch]).view(-1, len(REWARDS))
        return Rollout([], [], texts, values, [r.columns.get("answer_extent") for r in batch])

    monkeypatch.setattr(rollout_file, "rollout", rollout)


SAMPLING = SamplingConfig(0.7, 5, 0.9, 0.1, 1.3, max_new_tokens=20, stop_strings=["</answer>"])


def scored(name, sampled, greedy, **columns):
    return Row([], [], {"name": name, "sampled": sampled, "greedy": greedy, **columns})


ROWS = [
    scored("a", [0.5, 1.0, 1.0], [1.0, 1.0, 1.0], unseen=True, answer_extent=(8, 8)),
    scored("b", [0.0, 0.0, 0.0], [0.25, 0.0, 0.0], unseen=False),
    scored("c", [NAN, 1.0, NAN], [NAN, 1.0, NAN]),
    scored("d", [0.25, 0.0, 0.0], [0.5, 1.0, 1.0], unseen=True),
    scored("e", [0.25, 1.0, 0.0], [0.25, 0.0, 0.0]),
]


def ask(rows, rank=0, size=1, batch_size=64, world=World):
    world = world(rank, size, torch.device("cpu"))
    return evaluate(None, None, rows, SAMPLING, world, REWARDS, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [64, 2])
def test_each_figure_is_a_mean_over_the_rows_that_could_be_judged(batch_size):
    result = ask(ROWS, batch_size=batch_size)
    assert (result.sampled, result.greedy, result.format) == (0.25, 0.5, 0.6)
    assert result.more == {
        "acc_0_5 sampled": 0.25, "acc_0_5 greedy": 0.5, "unseen sampled": 0.375, "unseen greedy": 0.75,
    }  # fmt: skip
    assert result.pairs is None


def test_answers_are_the_greedy_ones_with_the_first_reward():
    answers = ask(ROWS).answers
    assert [answer.text for answer in answers] == [f"{name} greedy" for name in "abcde"]
    assert [answer.score for answer in answers[:2] + answers[3:]] == [1.0, 0.25, 0.5, 0.25]
    assert math.isnan(answers[2].score)
    assert [answer.extent for answer in answers] == [(8, 8), None, None, None, None]


def test_what_no_row_can_tell_is_not_reported():
    """No row is marked unseen; acc_0_5 could judge no row. What counts is always there."""
    result = ask([scored("a", [NAN, 1.0, NAN], [0.5, 1.0, NAN])])
    assert result.more == {}
    assert math.isnan(result.sampled) and result.greedy == 0.5


def test_an_unseen_row_that_could_not_be_judged_counts_nothing():
    result = ask([ROWS[1], scored("u", [NAN, 1.0, NAN], [NAN, 1.0, NAN], unseen=True)])
    assert result.more == {"acc_0_5 sampled": 0.0, "acc_0_5 greedy": 0.0}


@pytest.mark.parametrize("count", [5, 4, 1])
def test_two_ranks_answer_as_one_and_in_the_order_of_the_rows(count):
    """A rank may have no row at all, and no unseen one: with five, all of those are not with the same rank."""
    barrier, slots, results = threading.Barrier(2, timeout=20), [None, None], [None, None]

    class Pair(World):
        def exchange(self, value):
            slots[self.rank] = value
            barrier.wait()
            both = list(slots)
            barrier.wait()
            return both

        def sum(self, *values):
            return [sum(pair) for pair in zip(*self.exchange(values), strict=True)]

        def gather_objects(self, value):
            return self.exchange(value)

    def work(rank):
        try:
            results[rank] = ask(ROWS[:count], rank, 2, world=Pair)
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one = ask(ROWS[:count])
    for result in results:
        assert [answer.text for answer in result.answers] == [f"{name} greedy" for name in "abcde"[:count]]
        assert repr(result) == repr(one)  # NaN is not equal to itself
    assert isinstance(one.answers[0], Answer)
