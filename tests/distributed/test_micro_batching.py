"""Test how prompts and completions are divided into micro-batches."""

from itertools import pairwise

import pytest
import torch

from minivlmrl.distributed.micro_batching import split_into_micro_batches
from tests.helpers.stages import ONE


def tokens(lengths, piece):
    """Count the tokens of a micro-batch; each prompt counts once."""
    return sum(lengths[i][0] for i in {i for i, _ in piece}) + sum(lengths[i][1][j] for i, j in piece)


def test_the_example_and_the_order_of_prompts():
    assert split_into_micro_batches([(10, [5, 5]), (10, [40, 2])], 9, 40, ONE) == [[(0, 0), (0, 1)], [(1, 1)], [(1, 0)]]
    assert split_into_micro_batches([(10, [5, 5]), (10, [5, 5])], 9, 40, ONE) == [[(0, 0), (0, 1), (1, 0), (1, 1)]]
    lengths = [(3, [9, 1]), (5, [2, 2]), (1, [1, 7])]
    assert split_into_micro_batches(lengths, 2, None, ONE) == [[(0, 0), (0, 1), (1, 0), (1, 1)], [(2, 0), (2, 1)]]


@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_in_one_micro_batch_within_the_limit(seed):
    sizes = torch.randint(1, 60, (7, 9), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths, budget = [(prompt, completions) for prompt, *completions in sizes], 40 + 30 * seed
    found = split_into_micro_batches(lengths, 3, budget, ONE)
    assert sorted(row for piece in found for row in piece) == [(i, j) for i in range(7) for j in range(8)]
    for piece in found:
        prompts = [i for i, _ in piece]
        assert tokens(lengths, piece) <= budget or len(piece) == 1
        assert len(set(prompts)) <= 3
        assert sum(a != b for a, b in pairwise(prompts)) == len(set(prompts)) - 1, "side by side"
    whole = [i for i in range(7) if lengths[i][0] + sum(lengths[i][1]) <= budget]
    assert all(sum(i in {k for k, _ in piece} for piece in found) == 1 for i in whole), "no group is cut that fits"


def test_ranks_have_equal_numbers_of_micro_batches():
    class Two:
        def gather_objects(self, count):
            return [count, 5]

    found = split_into_micro_batches([(1, [1, 1, 1]), (1, [1, 1, 1])], 2, 100, Two())
    assert [len(piece) for piece in found] == [1, 1, 1, 1, 2]
