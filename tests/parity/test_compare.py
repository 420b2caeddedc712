"""What becomes of a cell, and what is said about a family of cells."""

import math

import pytest
import torch
from parity.compare import Cell, Question, ask, digits, loss_cell


@pytest.mark.parametrize("ours, theirs, agrees", [
    ({"loss": 1.0}, {"loss": 1.0 + 1e-12}, True),
    ({"loss": 1.0}, {"loss": 1.0 + 1e-9}, False),
    ({"loss": 1e9}, {"loss": 1e9 + 1e-3}, True),  # relative to what is large
    ({"loss": 1.0}, {"loss": [1.0, 1.0]}, False),
    ({"loss": 1.0}, {"loss": math.nan}, False),
    ({"loss": math.nan}, {"loss": math.nan}, True),
    ({"loss": 1.0}, {"loss": 1.0, "d loss / d x": 0.0}, False),
    ({"loss": 1.0, "metric kl": 1.0}, {"loss": 1.0, "metric kl": 1.0 + 1e-7, "metric other": 3.0}, True),
    ({"loss": 1.0, "metric kl": 1.0}, {"loss": 1.0, "metric kl": 1.1}, False),
])  # fmt: skip
def test_what_becomes_of_a_cell(ours, theirs, agrees):
    sides = ({name: torch.tensor(v, dtype=torch.float64) for name, v in side.items()} for side in (ours, theirs))
    assert ask(Cell("fake", "options", *(lambda side=side: side for side in sides))).agrees == agrees


def test_digits_and_gradients():
    assert [digits(error) for error in (0.0, 1e-17, 3e-12, 0.5)] == [16, 16, 11, 0]
    batch = {"x": torch.tensor(3.0), "y": torch.tensor(1.0)}
    question = Question("fake", {}, "plain", 0, {})
    result = loss_cell(question, batch, lambda given: (given["x"] ** 2, {"m": 2}), None, ("x", "y")).ours()
    assert {name: value.item() for name, value in result.items()} == {
        "loss": 9, "d loss / d x": 6, "d loss / d y": 0, "metric m": 2,
    }  # fmt: skip
