"""Weights under adapters in 4 bits a value (NF4 with double quantisation, QLoRA, arXiv 2305.14314).

64 values have a scale, the largest of them, and each is the index of the nearest of 16 quantiles of
a normal. Scales, less their mean, have 8 bits: 4.13 bits a value. Each pass unpacks weights again.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.adapters.adamw8bit import dequantize, dynamic_code, quantize
from minivlmrl.kernels.backend import backend_for
from minivlmrl.kernels.nf4_unpack import BLOCK, nf4_unpack

NF4 = (  # the appendix of the paper, to the digits of float32
    -1.0, -0.696192801, -0.525073051, -0.394917488, -0.284441382, -0.18477343,
    -0.0910500363, 0.0, 0.0795802996, 0.160930201, 0.246112302, 0.337915242,
    0.440709829, 0.562617004, 0.722956836, 1.0,
)  # fmt: skip
# cached on the device: a copy would synchronise, which a CUDA graph forbids
_table = cache(lambda device: torch.tensor(NF4).to(device))  # (16,)
_scale_code = cache(lambda device: dynamic_code(True).to(device))  # (256,)


def pack(weight: Tensor) -> dict[str, Tensor]:
    """Pack a weight, two values a byte, and the scales of its blocks, less their mean, `offset`."""
    values = F.pad(weight.detach().float().flatten(), (0, -weight.numel() % BLOCK))
    nearest, scales = quantize(values[None], _table(weight.device), BLOCK)
    offset = scales.mean()
    scale_indices, scale_scales = quantize(scales - offset, _scale_code(weight.device))
    return {
        "packed": nearest[0, ::2] << 4 | nearest[0, 1::2],
        "scale_indices": scale_indices[0],
        "scale_scales": scale_scales[0],
        "offset": offset,
    }


def unpack(
    packed: Tensor, scale_indices: Tensor, scale_scales: Tensor, offset: Tensor, dtype=torch.float32
) -> Tensor:
    """Compute the (n,) values of a dtype that pack's result means, n filled up to whole blocks."""
    code = _scale_code(packed.device)
    table = _table(packed.device)
    if backend_for(offset) == "triton":
        return nf4_unpack(packed, scale_indices, scale_scales, offset, (code, table), dtype)
    scales = dequantize(scale_indices[None], scale_scales[None], code)[0] + offset
    # a byte's two values are one int64; 4096 blocks stay in a CPU's cache, all take thrice as long
    size = 4096 if packed.is_cpu else len(scales)
    pairs = torch.cartesian_prod(table, table).view(torch.int64)
    values = scales.new_empty(len(scales), BLOCK, dtype=dtype)
    pieces = zip(
        values.split(size),
        packed.view(-1, BLOCK // 2).split(size),
        scales[:, None].split(size),
        strict=True,
    )
    for out, pair_indices, scale in pieces:
        torch.mul(pairs.take(pair_indices.long()).view(torch.float32), scale, out=out)
    return values.flatten()


class NF4Product(torch.autograd.Function):
    """x W^T that remembers neither x, as W is not trained, nor W in full."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: "NF4Linear") -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight.to(gradient.dtype), None


class NF4Linear(nn.Module):
    """A linear layer whose weight is packed; a rank of a sharded one has all scales of it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.shape = linear.weight.shape  # (out_features, in_features)
        self.dtype = linear.weight.dtype  # of the weight before it was packed, and when unpacked
        self.bias = linear.bias
        self.read(linear.weight)

    def read(self, weight: Tensor, part: Callable | None = None):
        """Pack a weight; part(packed, the parameter so far) is what this rank keeps of it."""
        values = pack(weight.to(self.dtype))
        packed = values.pop("packed")
        if part is not None:
            packed = part(packed, self.packed)
        self.packed = nn.Parameter(packed, requires_grad=False)
        for name, tensor in values.items():
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:
        """Unpack (out_features, in_features) in the dtype that it was packed from, gathered."""
        packed = self.packed.full_tensor() if hasattr(self.packed, "full_tensor") else self.packed
        packed = packed.to(self.offset.device)  # an offloaded part is in host memory
        values = unpack(packed, self.scale_indices, self.scale_scales, self.offset, self.dtype)
        return values[: self.shape.numel()].view(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        product = NF4Product.apply(x, self)
        if self.bias is None:
            return product
        return product + self.bias
