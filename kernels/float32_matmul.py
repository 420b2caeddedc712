"""Products of bfloat16 (float16) tensors that stay float32, in which they are summed anyway.

A logit of 20 in bfloat16 is off by up to .06, an attention score of 220 by .5: biases of Qwen2.5's
keys put it there.
"""

import torch
from torch import Tensor


def float32_matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute a @ b in float32 (float64 of float64), of matrices or of batches with equal axes;
    out: matrices only."""
    wide = torch.promote_types(a.dtype, torch.float32)
    # PyTorch has such products for CUDA alone
    if a.dtype == wide or not a.is_cuda or torch.version.hip:
        return torch.matmul(a.to(wide), b.to(wide), out=out)
    if a.dim() == 2:
        return torch.mm(a, b, out_dtype=wide, out=out)
    return torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=wide).unflatten(0, a.shape[:-2])
