"""Tensor functions, such as gradient clipping, to recompute training steps and simulate trainer bugs."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils import get_total_norm


def rounded(x: Tensor, theirs: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to a dtype; values halfway between two numbers are rounded like `theirs`, the trainer's tensor."""
    unit = torch.finfo(dtype).eps * x.abs()
    is_rounded = theirs == theirs.to(dtype)
    return theirs.where(is_rounded & ((theirs - x).abs() <= 0.501 * unit), x.to(dtype).double())


def clipped(gradients: dict[str, Tensor], max_norm: float | None, norm: float | None = None) -> dict[str, Tensor]:
    """Clip gradients like torch's clip_grad_norm_; `norm`: total gradient norm, None = compute."""
    if norm is None:
        norm = get_total_norm(gradients.values()).item()
    share = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    return {name: x * share for name, x in gradients.items()}


def first(x: Tensor) -> Tensor:
    """Keep the first True in each run along S: [0, 1, 1, 0, 1] gives [0, 1, 0, 0, 1]."""
    return x & ~pad(x, (1, -1))


def last(x: Tensor) -> Tensor:
    """Keep the last True in each run along S: [0, 1, 1, 0, 1] gives [0, 0, 1, 0, 1]."""
    return x & ~pad(x, (-1, 1))


def distance(ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to max(1, largest |expected|); inf if shapes or NaN positions differ."""
    ours, expected = ours.double(), expected.double()
    if ours.shape != expected.shape or not torch.equal(ours.isnan(), expected.isnan()):
        return math.inf
    if not expected.numel():
        return 0.0
    difference = (ours - expected).nan_to_num(0.0).abs().max()
    scale = expected.nan_to_num(0.0).abs().max().clamp(min=1)
    return (difference / scale).item()
