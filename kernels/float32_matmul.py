"""Matrix products of bfloat16 or float16 inputs with float32 results.

GPUs sum bfloat16 products in float32, and float32_matmul returns this sum without rounding. Rounding to bfloat16 would
change logits near 20 by up to 0.06, and attention scores near 220, as in Qwen2.5, by up to 0.5.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from minivlmrl.kernels.backend import at_least_float32, is_before_ampere

COLUMNS = 2048  # columns of b to convert to float32 at once


def float32_matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute a @ b in float32 (float64 for float64 inputs).

    Args:
        a, b: matrices, or batches with equal leading dimensions.
        out: tensor for the result; not supported for batches.
    """
    out_dtype = at_least_float32(a.dtype)
    if a.dtype == out_dtype or not has_float32_products(a.device):
        a = a.to(out_dtype)
        # convert `b` in blocks: a float32 copy of a whole LM head can take 0.5 GB
        if b.dtype == a.dtype or b.dim() > 2 or b.shape[1] <= COLUMNS:
            return torch.matmul(a, b.to(a.dtype), out=out)
        if out is None:
            out = a.new_empty(len(a), b.shape[1])
        for result, columns in zip(out.split(COLUMNS, 1), b.split(COLUMNS, 1), strict=True):
            result.copy_(a @ columns.to(a.dtype))
        return out
    if a.dim() == 2:
        return torch.mm(a, b, out_dtype=out_dtype, out=out)
    return torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=out_dtype).unflatten(0, a.shape[:-2])


@cache
def has_float32_products(device: torch.device) -> bool:
    """Return True if a device can multiply 16-bit matrices with a float32 result.

    On NVIDIA GPUs below compute capability 8.0, run a small matrix product as a test.
    """
    # torch.mm, bmm and addmm support the argument out_dtype only on CUDA
    if device.type != "cuda" or torch.version.hip:
        return False
    if not is_before_ampere(device):
        return True
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        return bool((torch.mm(ones, ones, out_dtype=torch.float32) == 16).all())
    except RuntimeError:
        return False


@contextmanager
def tf32_products() -> Iterator[None]:
    """Compute float32 matrix products on a GPU in TF32 inside a `with` block.

    Products on a CPU do not change, although PyTorch's TF32 setting is global.
    """
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before
