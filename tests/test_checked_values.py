"""What rewards may return."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from minivlmrl.reward_functions.checked_values import checked_values


@pytest.mark.parametrize(
    "values", [(1, 0.5), [True, 0.5], [1.0, Fraction(1, 2)], np.array([1, 0.5]), torch.tensor([1, 0.5])], ids=repr
)
def test_numbers_of_any_kind(values):
    assert checked_values("own", values, ["a", "b"]) == [1.0, 0.5]


def test_none_is_no_verdict():
    first, second = checked_values("own", [None, 2], ["a", "b"])
    assert math.isnan(first) and second == 2.0


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e39, 10**400, "1.0", [1.0], 1j, np.float32("nan"), torch.ones(1)], ids=str
)
def test_what_is_no_finite_number_is_named_with_its_reward_and_completion(value):
    message = r"^reward own returned .* for the completion 'what\?'; it must be a finite number, or None"
    with pytest.raises(ValueError, match=message):
        checked_values("own", [0.0, value], ["a", "what?"])


def test_a_known_row_comes_first():
    with pytest.raises(ValueError, match=r"^rows.jsonl:7: reward own returned nan for the completion 'b'"):
        checked_values("own", [0.0, math.nan], ["a", "b"], ["rows.jsonl:6", "rows.jsonl:7"])


@pytest.mark.parametrize("values", [None, 1.0])
def test_one_number_or_nothing_is_no_list(values):
    with pytest.raises(ValueError, match=rf"reward own returned {values}; it must be a list"):
        checked_values("own", values, ["a"])


@pytest.mark.parametrize("values", [[], [1.0], iter([1.0, 0.0, 1.0])])
def test_another_number_of_values_is_refused(values):
    with pytest.raises(ValueError, match=r"reward own returned \d values for 2 completions"):
        checked_values("own", values, ["a", "b"])
