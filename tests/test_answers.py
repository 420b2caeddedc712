"""Rows with their answers as micro-batches, and pairs that are judged on any number of ranks."""

import math
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.algorithms.answers import PairAlgorithm, equal_share, with_answers
from minivlmrl.scale.ranks import World
from minivlmrl.tasks.shapes import Shapes

from stages import ONE, Rows


def test_equal_shares():
    """Seven items for three ranks: three each, two of the first ones twice."""
    ranks = [World(rank, 3, torch.device("cpu")) for rank in range(3)]
    assert [equal_share([*range(7)], rank) for rank in ranks] == [[0, 3, 6], [1, 4, 0], [2, 5, 0]]
    assert [equal_share([8, 9], rank) for rank in ranks] == [[8], [9], [8]]
    assert [equal_share([], rank) for rank in ranks] == [[], [], []]


class Rank(World):
    """A rank, with what the collectives of two ranks would answer."""

    def gather_objects(self, value):
        return [[0, 4], [3]]

    def sum(self, *values):
        return [value + 1 for value in values]


def pair_accuracy(world, rows, margins, size=64):
    algorithm = SimpleNamespace(world=world, trained=torch.nn.Linear(1, 1), margins=margins)
    return PairAlgorithm.pair_accuracy(algorithm, rows, size)


@pytest.mark.parametrize("rank, seen", [(0, [0, 4]), (1, [3, 0])])
def test_pairs_are_judged_once_on_any_number_of_ranks(rank, seen):
    """Rows 0, 3 and 4 of five have both answers; rank 1 scores row 0 too, as all score equally many, and drops it."""
    rows, asked = Rows(Shapes(5, "x")[i] for i in range(5)), []

    def margins(rows):
        asked.extend(row.index for row in rows)
        return torch.tensor([1.0 if row.index == 0 else -1.0 for row in rows])

    accuracy = pair_accuracy(Rank(rank, 2, torch.device("cpu")), rows, margins, size=1)
    assert asked == seen
    assert accuracy == ((1 if rank == 0 else 0) + 1) / 3  # the other rank's sum is 1


def test_rows_without_both_answers_are_no_pairs():
    rows = Rows(Shapes(3, "x")[i] for i in range(3))
    rows[0].rejected = rows[1].chosen = None
    assert with_answers(rows, ONE) == [2]
    assert pair_accuracy(ONE, Rows(rows[:2]), None) is None and pair_accuracy(ONE, Rows(), None) is None


@pytest.mark.parametrize("name", ["dpo", "reward_model"])
def test_both_answers_share_their_prompt_and_its_image(stage, name):
    run = stage(name)
    for batch, rows in zip(run.next(), ((0, 1), (2, 3)), strict=True):
        assert len(batch.group.layout.prompt_lengths) == len(rows) and len(batch.loss_mask) == 2 * len(rows)
        assert len(batch.group.image_grid_thw) == len(rows)
        assert len(batch.group.pixel_values) == 16 * len(rows)  # 56 pixels are 4 patches a side
        prompts, answers = batch.group.layout.prompt_lengths, batch.group.layout.row_lengths
        assert len(batch.group.input_ids) == sum(prompts) + sum(answers) - len(answers)


@pytest.mark.parametrize("name", ["dpo", "sft", "kto"])
def test_of_several_turns_only_the_assistants_are_trained_on(stage, name):
    """What the user says between two turns of an answer has no gradient and counts nowhere."""

    class Turns(Shapes):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            for name in ("chosen", "rejected", "completion"):
                said = getattr(row, name)
                turns = [("assistant", said), ("user", "what?"), ("assistant", said + "!")]
                setattr(row, name, [{"role": role, "content": text} for role, text in turns])
            row.columns["label"] = index % 2 == 0
            return row

    run = stage(name, rows=Turns(8, "rows"))
    batches = run.next()
    every = 2 if name == "dpo" else 1
    trained = sum(int(b.loss_mask[::every].sum()) for b in batches)
    tokens = sum(sum(b.group.layout.row_lengths[::every]) for b in batches)
    assert trained < tokens
    if name != "kto":
        assert batches[0].counts.tokens == trained
    assert math.isfinite(run.update()["grad_norm"]) and run.number == 1
