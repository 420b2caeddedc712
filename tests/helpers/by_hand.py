"""Helpers for tests that compute a loss by hand: float64 tensors, a tolerance, and functions of the formulas."""

from math import exp

import pytest
import torch


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def near(*values):
    """Return pytest.approx with a tolerance of 1e-6, for numbers written with seven digits or computed by math."""
    return pytest.approx(values[0] if len(values) == 1 else list(values), abs=1e-6)


def sigmoid(x):
    return 1 / (1 + exp(-x))
