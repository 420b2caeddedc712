"""Frozen weights in 4 bits a value (NF4 with double quantisation, QLoRA, arXiv 2305.14314).

64 values have a scale, the largest of them, and each is the index of the nearest of 16 quantiles of
a normal. Scales, less their mean, have 8 bits: 4.13 bits a value. Each pass unpacks weights again.
run/adamw8bit.py has moments of such 8 bits.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.kernels.backend import backend_for
from minivlmrl.kernels.nf4_unpack import BLOCK, GROUP, nf4_unpack
from minivlmrl.model.plain_weights import PackedLinear, gather

NF4 = (  # the appendix of the paper, to the digits of float32
    -1.0, -0.696192801, -0.525073051, -0.394917488, -0.284441382, -0.18477343,
    -0.0910500363, 0.0, 0.0795802996, 0.160930201, 0.246112302, 0.337915242,
    0.440709829, 0.562617004, 0.722956836, 1.0,
)  # fmt: skip
# cached on the device: a copy would synchronise, which a CUDA graph forbids
_table = cache(lambda device: torch.tensor(NF4).to(device))  # (16,)


@cache  # a copy to the device would synchronise, which a CUDA graph forbids
def dynamic_code(signed: bool, device: torch.device) -> Tensor:
    """List bitsandbytes' 256 numbers, ascending: 0, 1, and twice as many in each of seven decades."""
    numbers = [torch.zeros(1), torch.ones(1)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values.to(device)


def quantize(values: Tensor, code: Tensor, block: int = GROUP) -> tuple[Tensor, Tensor]:
    """(rows, n) float32 -> indices (rows, n) uint8 of numbers, scales (rows, ceil(n / block))."""
    num_rows, num_values = values.shape
    value_blocks = F.pad(values, (0, -num_values % block)).view(num_rows, -1, block)
    scales = value_blocks.abs().amax(2)  # (rows, blocks)
    normalised = value_blocks * (1 / scales.clamp(min=1e-38))[..., None]  # (rows, blocks, block)
    boundaries = (code[:-1] + code[1:]) / 2
    nearest_indices = torch.bucketize(normalised, boundaries, out_int32=True)
    return nearest_indices.to(torch.uint8).view(num_rows, -1)[:, :num_values], scales


def dequantize(indices: Tensor, scales: Tensor, code: Tensor) -> Tensor:
    """Compute the (rows, n) float32 values that quantize's result means."""
    return code[indices.int()] * scales.repeat_interleave(GROUP, 1)[:, : indices.shape[1]]


def pack_nf4(weight: Tensor) -> dict[str, Tensor]:
    """Pack a weight, two values a byte, and the scales of its blocks, less their mean, `offset`."""
    padded_values = F.pad(weight.detach().float().flatten(), (0, -weight.numel() % BLOCK))
    value_indices, scales = quantize(padded_values[None], _table(weight.device), BLOCK)
    offset = scales.mean()
    scale_code = dynamic_code(True, weight.device)
    scale_indices, scale_scales = quantize(scales - offset, scale_code)
    return {
        "packed": value_indices[0, ::2] << 4 | value_indices[0, 1::2],
        "scale_indices": scale_indices[0],
        "scale_scales": scale_scales[0],
        "offset": offset,
    }


@cache
def pack_on_meta(shape: torch.Size) -> dict[str, Tensor]:
    """Pack a weight without numbers."""
    return pack_nf4(torch.empty(shape, device="meta"))


def unpack_nf4(
    packed: Tensor, scale_indices: Tensor, scale_scales: Tensor, offset: Tensor, dtype=torch.float32
) -> Tensor:
    """Compute the (n,) values of a dtype that pack_nf4's result means, n filled up to whole blocks."""
    scale_code = dynamic_code(True, packed.device)
    value_table = _table(packed.device)
    if backend_for(offset) == "triton":
        return nf4_unpack(
            packed, scale_indices, scale_scales, offset, (scale_code, value_table), dtype
        )
    scales = dequantize(scale_indices[None], scale_scales[None], scale_code)[0] + offset
    # a byte's two values are one int64; 4096 blocks stay in a CPU's cache, all take thrice as long
    piece_blocks = 4096 if packed.is_cpu else len(scales)
    value_pairs = torch.cartesian_prod(value_table, value_table).view(torch.int64)
    values = scales.new_empty(len(scales), BLOCK, dtype=dtype)
    pieces = zip(
        values.split(piece_blocks),
        packed.view(-1, BLOCK // 2).split(piece_blocks),
        scales[:, None].split(piece_blocks),
        strict=True,
    )
    for value_piece, pair_indices, block_scales in pieces:
        unscaled = value_pairs.take(pair_indices.long()).view(torch.float32)
        torch.mul(unscaled, block_scales, out=value_piece)
    return values.flatten()


class NF4Linear(PackedLinear):
    """A frozen linear layer in NF4. Where its values are sharded, each rank has all its scales."""

    packed: nn.Parameter
    scale_indices: Tensor
    scale_scales: Tensor
    offset: Tensor

    def read(self, weight: Tensor, part: Callable | None = None):
        """Pack a weight; part(packed, the parameter so far) is what this rank keeps of it."""
        if weight.is_meta:  # for the plan, which may have thousands of experts
            packed_tensors = {
                name: torch.empty_like(x) for name, x in pack_on_meta(weight.shape).items()
            }
        else:
            packed_tensors = pack_nf4(weight.to(self.dtype))
        packed_weight = packed_tensors.pop("packed")
        if part is not None:
            packed_weight = part(packed_weight, self.packed)
        self.packed = nn.Parameter(packed_weight, requires_grad=False)
        for name, tensor in packed_tensors.items():
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:
        """Unpack (out_features, in_features) in the dtype that it was packed from, gathered."""
        # an offloaded part is in host memory
        packed = gather(self.packed).to(self.offset.device)
        values = unpack_nf4(packed, self.scale_indices, self.scale_scales, self.offset, self.dtype)
        return values[: self.shape.numel()].view(self.shape)
