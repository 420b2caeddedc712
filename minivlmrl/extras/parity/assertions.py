"""Assertions for testing your own trainer, with tensors or NumPy arrays."""

import math
from collections.abc import Callable
from functools import partial

import torch


def assert_split_invariant(gradients, rows: int, tolerance: float = 1e-6, sizes=None):
    """Assert that gradients do not depend on how rows are split into micro-batches or ranks.

    Args:
        gradients: your trainer's function from micro-batches of row indices, such as [[0, 2], [1, 3]], to
            {parameter name: accumulated gradient}.
        rows: number of rows in the step, at least 2.
        tolerance: maximum difference, relative to the largest gradient without micro-batches.
        sizes: numbers of micro-batches to test; default: 2, rows - 1 and rows.
    """
    __tracebackhide__ = True
    assert rows > 1, f"rows is {rows}, but at least 2 rows are needed to compare different splits"

    def split(parts: int) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
        """Return micro-batches of row indices, such as [[0, 2, 4], [1, 3]], and accumulated gradients."""
        indices = [list(range(part, rows, parts)) for part in range(parts)]
        return indices, {name: torch.as_tensor(x).double() for name, x in gradients(indices).items()}

    _, whole_gradients = split(1)
    unit = max(x.abs().max() for x in whole_gradients.values())
    assert unit > 0, "all gradients are zero, so nothing was compared; use rows with a nonzero loss"
    # unequal sizes (2, 1, 1, ... in rows - 1 micro-batches) reveal a mean that ignores micro-batch sizes
    for size in sizes or (2, rows - 1, rows):
        parts, split_gradients = split(size)
        names = sorted(whole_gradients.keys() ^ split_gradients.keys())
        assert not names, (
            f"micro-batches {parts}: the parameter {names[0]} has a gradient either only with this split, or only "
            "without it"
        )
        errors = {
            name: ((x - whole_gradients[name]).abs() / unit).nan_to_num(math.inf).max()
            for name, x in split_gradients.items()
        }
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] <= tolerance, (
            f"micro-batches {parts}: the gradient of {worst} differs from the gradient of the whole "
            f"step by {errors[worst]:.1e} times the largest gradient"
        )


def split_error(gradient: Callable, batch: dict[str, torch.Tensor], tolerance: float) -> str:
    """Return "" if the sum or mean of micro-batch gradients equals the whole batch's gradient, else an error message.

    Args:
        gradient: function from a batch to the loss gradient with respect to per_token_logps.
        batch: {name: tensor with B rows}.
    """
    if not gradient(batch).nan_to_num().any():
        return ""
    error = ""
    for is_mean in (False, True):
        try:
            assert_split_invariant(
                partial(accumulated, gradient, batch, is_mean=is_mean), len(batch["mask"]), tolerance
            )
            return ""
        except AssertionError as found:
            error = str(found)
    return error


def accumulated(gradient: Callable, batch: dict[str, torch.Tensor], parts: list[list[int]], is_mean: bool) -> dict:
    """Return the sum of micro-batch gradients, or with is_mean, their mean weighted by rows."""
    slope = torch.zeros_like(batch["per_token_logps"])
    for rows in parts:
        share = len(rows) / len(slope) if is_mean else 1.0
        slope[rows] = share * gradient({name: x[rows] for name, x in batch.items()}).nan_to_num()
    return {"per_token_logps": slope}
