"""Products of bfloat16 (or float16) tensors that are float32: summed in it as always, and not rounded after that.

Rounded to bfloat16 a logit of 20 moves by up to .06, and an attention score of 220 by up to .5: the biases of Qwen2.5's
keys put scores there, and a common share of them, which the softmax ignores, then costs its whole precision.
"""

import torch
from torch import Tensor


def float32_matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute a @ b in float32 (float64 of float64): (L, D) @ (D, T), or batches of that with equal leading axes.

    Args:
        out: memory for the result, of its dtype; for two matrices only.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide or not a.is_cuda or torch.version.hip:  # PyTorch has such products for CUDA alone
        return torch.matmul(a.to(wide), b.to(wide), out=out)
    if a.dim() == 2:
        return torch.mm(a, b, out_dtype=wide, out=out)
    return torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=wide).unflatten(0, a.shape[:-2])
