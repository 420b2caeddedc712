"""Products of bfloat16 (float16) tensors that stay float32, in which they are summed anyway.

In bfloat16 a logit of 20 is off by up to .06, an attention score of 220 (Qwen2.5's biases) by .5.
"""

import torch
from torch import Tensor


def float32_matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute a @ b in float32 (float64 of float64), of matrices or batches; out: matrices only."""
    wide = torch.promote_types(a.dtype, torch.float32)
    # PyTorch has such products for CUDA alone
    if a.dtype == wide or not a.is_cuda or torch.version.hip:
        return torch.matmul(a.to(wide), b.to(wide), out=out)
    if a.dim() == 2:
        return torch.mm(a, b, out_dtype=wide, out=out)
    products = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=wide)
    return products.unflatten(0, a.shape[:-2])
