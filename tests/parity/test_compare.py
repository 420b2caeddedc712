"""What becomes of a cell."""

import math

import pytest
import torch
from parity.compare import Cell, ask


@pytest.mark.parametrize("ours, theirs, agrees", [
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
