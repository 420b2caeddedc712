"""What becomes of a cell, and what is said about a family of cells."""

import math

import pytest
import torch
from parity.compare import Cell, Outcome, Question, ask, digits, judge, loss_cell, summary, table


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


def test_the_table():
    good = judge("a", [Outcome("cell 0", True, 3e-12), Outcome("cell 1", True)])
    outcomes = Outcome("cell 0", False, 0.5, "metric kl"), Outcome("cell 1", True), Outcome("cell 2", False, 0.25)
    bad = judge("b", [*outcomes])
    other = judge("c", [Outcome("cell 0", False, math.inf)])
    assert [row.agrees for row in (good, bad, other)] == [True, False, False]
    assert [" ".join(line.split()) for line in table([good, bad, other])] == [
        "a 2 agrees to 11 digits", "b 3 differs by 5.0e-01 (metric kl) in 2 of 3 cells", "most in: cell 0",
        "c 1 differs in shape or NaN in 1 of 1 cells", "most in: cell 0",
    ]  # fmt: skip
    assert summary([good, bad, other]) == "3 families, 6 cells: 1 agree, 2 differ"
