"""Test the parity assertions that users call in their own tests."""

import pytest
import torch

from minivlmrl.extras.parity.dependence import assert_split_invariant

X, LENGTHS = torch.arange(24.0).view(6, 4), torch.tensor([4, 1, 3, 2, 4, 1])


def sums(rows):
    mask = torch.arange(4) < LENGTHS[rows, None]
    return (X[rows] * mask).sum(0), mask.sum()


def mean_over_tokens(parts):
    """Average the gradient over all tokens of the step, whatever the split into `parts`."""
    return {"w": sum(sums(rows)[0] for rows in parts) / LENGTHS.sum()}


def mean_of_means(parts):
    return {"w": sum(total / count for total, count in map(sums, parts)) / len(parts)}


@pytest.mark.parametrize("rows, gradients, expected", [
    (6, mean_of_means, "^micro-batches .* the gradient of w differs"),
    (6, lambda parts: {"w": torch.zeros(2)}, "all gradients are zero"),
    (6, lambda parts: {"a": torch.ones(2), "b": torch.tensor([1.0, torch.nan])},
     "the gradient of b differs from the gradient of the whole step by inf"),
    (6, lambda parts: {"abc"[i]: torch.ones(2) for i in range(len(parts))}, "b has a gradient either only"),
    (1, mean_over_tokens, "rows is 1, but at least 2 rows are needed"),
])  # fmt: skip
def test_gradients_that_depend_on_the_split_or_are_invalid_fail(rows, gradients, expected):
    assert_split_invariant(mean_over_tokens, 6)
    with pytest.raises(AssertionError, match=expected):
        assert_split_invariant(gradients, rows)
    assert_split_invariant(mean_of_means, 4, sizes=[1])
