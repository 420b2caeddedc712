"""Functions of tensors that `parity` uses to imitate bugs of trainers, such as gradient clipping."""

import math

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


def rounded(x: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to a dtype; of two equally close roundings, return the one that equals `theirs`."""
    # A number halfway between two representable numbers has two right roundings, so an error of 0.501 units is allowed.
    unit = torch.finfo(dtype).eps * x.abs()
    is_rounded = theirs == theirs.to(dtype)
    return theirs.where(is_rounded & ((theirs - x).abs() <= 0.501 * unit), x.to(dtype).double())


def in_half(x: Tensor, theirs: Tensor, exact: Tensor) -> Tensor:
    """Return a trainer's log-probabilities `theirs` if they look rounded to 16 bits, else our 16-bit values x.

    Two programs in 16 bits round the same weights, so the rounding errors of the trainer must be as large as ours and
    correlated with ours. At least 16 log-probabilities must differ, because fewer may be correlated by chance.
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
    """Scale gradients like torch's clip_grad_norm_; `norm` replaces the total norm of the gradients."""
    if norm is None:
        norm = get_total_norm(gradients.values()).item()
    share = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    return {name: x * share for name, x in gradients.items()}


def total_by(x: Tensor, span: Tensor) -> Tensor:
    """Replace each token's value in x by the sum over all tokens with the same number in `span`.

    Example: x = [1, 2, 3] with span = [0, 0, 1] gives [3, 3, 3].
    """
    totals = x.new_zeros(int(span.max()) + 1)
    return totals.index_add(0, span.flatten(), x.flatten())[span]


def first(x: Tensor, k: int = 1) -> Tensor:
    """Keep the first k True values of each run of True values in a mask (..., S).

    Example: [0, 1, 1, 0, 1] with k = 1 gives [0, 1, 0, 0, 1].
    """
    count = x.cumsum(-1)
    earlier_runs = (count * ~x).cummax(-1).values
    return x & (count - earlier_runs <= k)


def last(x: Tensor, k: int = 1) -> Tensor:
    """Keep the last k True values of each run of True values in a mask (n, S)."""
    return first(x.flip(1), k).flip(1)


def distance(ours: Tensor, expected: Tensor) -> float:
    """Compute the largest difference between two tensors, relative to max(1, largest |expected|).

    The difference is inf if the two shapes differ, or if the two tensors have NaN at different positions.
    """
    ours, expected = ours.double(), expected.double()
    if ours.shape != expected.shape or not torch.equal(ours.isnan(), expected.isnan()):
        return math.inf
    if not expected.numel():
        return 0.0
    difference = (ours - expected).nan_to_num(0.0).abs().max()
    scale = expected.nan_to_num(0.0).abs().max().clamp(min=1)
    return (difference / scale).item()
