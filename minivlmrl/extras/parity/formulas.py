"""Tensor functions that imitate trainer bugs, such as gradient clipping."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils import get_total_norm


def rounded(x: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to a dtype; halfway values are rounded as in `theirs`."""
    unit = torch.finfo(dtype).eps * x.abs()
    is_rounded = theirs == theirs.to(dtype)
    return theirs.where(is_rounded & ((theirs - x).abs() <= 0.501 * unit), x.to(dtype).double())


def in_half(x: Tensor, theirs: Tensor, exact: Tensor) -> Tensor:
    """Return the trainer's log-probabilities if their errors look like those of 16-bit x, else x.

    Errors must be correlated and of similar size; below 16 log-probabilities, they could be correlated by chance.

    Args:
        x: log-probabilities recomputed in 16 bits.
        exact: log-probabilities recomputed in float64.
    """
    errors = (x - exact)[theirs != exact]
    differences = (theirs - exact)[theirs != exact]
    if len(errors) < 16 or differences.abs().max() > 0.05:
        return x
    sizes = errors.norm(), differences.norm()
    correlation = (errors @ differences) / (sizes[0] * sizes[1] + 1e-30)
    is_large_enough = correlation > max(0.3, 2 / len(errors) ** 0.5)
    return theirs if is_large_enough and max(sizes) < 2 * min(sizes) else x


def clipped(gradients: dict[str, Tensor], max_norm: float | None, norm: float | None = None) -> dict[str, Tensor]:
    """Clip gradients like torch's clip_grad_norm_; `norm` defaults to the total norm."""
    if norm is None:
        norm = get_total_norm(gradients.values()).item()
    share = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    return {name: x * share for name, x in gradients.items()}


def total_by(x: Tensor, span: Tensor) -> Tensor:
    """Replace values with their sum over all tokens with the same number in `span`.

    Example: the values [1, 2, 4] with the span numbers [0, 0, 1] become the sums [3, 3, 4].
    """
    totals = x.new_zeros(int(span.max()) + 1)
    return totals.index_add(0, span.flatten(), x.flatten())[span]


def first(x: Tensor) -> Tensor:
    """Select the first of consecutive True values in a mask (n, S): [0, 1, 1, 0, 1] gives [0, 1, 0, 0, 1]."""
    return x & ~pad(x, (1, -1))


def last(x: Tensor) -> Tensor:
    """Select the last of consecutive True values: [0, 1, 1, 0, 1] gives [0, 0, 1, 0, 1]."""
    return x & ~pad(x, (-1, 1))


def distance(ours: Tensor, expected: Tensor) -> float:
    """Compute the largest difference between two tensors, relative to max(1, largest |expected|).

    It is infinite for different shapes, or NaN at different positions.
    """
    ours, expected = ours.double(), expected.double()
    if ours.shape != expected.shape or not torch.equal(ours.isnan(), expected.isnan()):
        return math.inf
    if not expected.numel():
        return 0.0
    difference = (ours - expected).nan_to_num(0.0).abs().max()
    scale = expected.nan_to_num(0.0).abs().max().clamp(min=1)
    return (difference / scale).item()
