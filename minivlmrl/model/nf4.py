"""Quantize frozen weights to NF4, 4 bits per value, as in QLoRA (arXiv 2305.14314).

A block of 64 values is divided by its scale, the largest absolute value. A divided value is stored as the index of the
nearest of 16 normal quantiles. Scales minus their mean are quantized to 8 bits ("double quantization"). A value takes
4.13 bits, including scales.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivlmrl.kernels.backend import backend_for
from minivlmrl.kernels.nf4_unpack import BLOCK, GROUP, nf4_unpack
from minivlmrl.model.plain_weights import PackedLinear, gather

NF4 = (  # 16 normal quantiles, QLoRA paper appendix, in float32 precision
    -1.0, -0.696192801, -0.525073051, -0.394917488, -0.284441382, -0.18477343,
    -0.0910500363, 0.0, 0.0795802996, 0.160930201, 0.246112302, 0.337915242,
    0.440709829, 0.562617004, 0.722956836, 1.0,
)  # fmt: skip
# NF4 values on a device; cached, because CUDA graphs forbid blocking copies from the CPU
_table = cache(lambda device: torch.tensor(NF4).to(device))


@cache
def dynamic_code(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values of bitsandbytes' dynamic 8-bit code, ascending."""
    numbers = [torch.zeros(1), torch.ones(1)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values.to(device)


def quantize(values: Tensor, code: Tensor, block: int = GROUP) -> tuple[Tensor, Tensor]:
    """Divide blocks by their largest absolute value, and round to the nearest values in `code`.

    Args:
        values: (rows, n) float32.
        code: (k,) quantization levels in [-1, 1], ascending, k <= 256.
        block: values per scale.
    Returns:
        indices: (rows, n) uint8 indices into `code`.
        scales: (rows, ceil(n / block)) largest absolute values.
    """
    num_rows, num_values = values.shape
    value_blocks = F.pad(values, (0, -num_values % block)).view(num_rows, -1, block)
    scales = value_blocks.abs().amax(2)  # (rows, blocks)
    normalized = value_blocks * (1 / scales.clamp(min=1e-38))[..., None]  # (rows, blocks, values) in [-1, 1]
    nearest_indices = torch.bucketize(normalized, (code[:-1] + code[1:]) / 2, out_int32=True)
    return nearest_indices.to(torch.uint8).view(num_rows, -1)[:, :num_values], scales


def dequantize(indices: Tensor, scales: Tensor, code: Tensor) -> Tensor:
    """Compute float32 values (rows, n) from indices and scales."""
    return code[indices.int()] * scales.repeat_interleave(GROUP, 1)[:, : indices.shape[1]]


def pack_nf4(weight: Tensor) -> dict[str, Tensor]:
    """Quantize a weight to NF4, two values per byte, and its scales to 8 bits.

    Returns:
        Dictionary: `packed` values, quantized scales `scale_indices` and `scale_scales`, and `offset`, the mean scale.
    """
    padded_values = F.pad(weight.detach().float().flatten(), (0, -weight.numel() % BLOCK))
    value_indices, scales = quantize(padded_values[None], _table(weight.device), BLOCK)
    offset = scales.mean()
    scale_indices, scale_scales = quantize(scales - offset, dynamic_code(True, weight.device))
    return {
        "packed": value_indices[0, ::2] << 4 | value_indices[0, 1::2],
        "scale_indices": scale_indices[0],
        "scale_scales": scale_scales[0],
        "offset": offset,
    }


@cache
def pack_on_meta(shape: torch.Size) -> dict[str, Tensor]:
    """Return meta tensors with the shapes and dtypes from pack_nf4."""
    return pack_nf4(torch.empty(shape, device="meta"))


def unpack_nf4(
    packed: Tensor, scale_indices: Tensor, scale_scales: Tensor, offset: Tensor, dtype=torch.float32
) -> Tensor:
    """Unpack an NF4 weight into a flat tensor (n,), padded to whole blocks of 64 values."""
    scale_code = dynamic_code(True, packed.device)
    value_table = _table(packed.device)
    if backend_for(offset, "nf4_unpack") == "triton":
        return nf4_unpack(packed, scale_indices, scale_scales, offset, (scale_code, value_table), dtype)
    scales = dequantize(scale_indices[None], scale_scales[None], scale_code)[0] + offset
    # 4,096 blocks of 64 values fit into CPU caches: 3 times faster than all at once
    piece_blocks = 4096 if packed.is_cpu else len(scales)
    # (256,) lookup table from a packed byte to its two NF4 values: two float32 numbers, viewed as one int64
    value_pairs = torch.cartesian_prod(value_table, value_table).view(torch.int64)
    values = scales.new_empty(len(scales), BLOCK, dtype=dtype)
    for value_piece, pair_indices, block_scales in zip(
        values.split(piece_blocks),
        packed.view(-1, BLOCK // 2).split(piece_blocks),
        scales[:, None].split(piece_blocks),
        strict=True,
    ):
        unscaled = value_pairs.take(pair_indices.long()).view(torch.float32)
        torch.mul(unscaled, block_scales, out=value_piece)
    return values.flatten()


class NF4Linear(PackedLinear):
    """Frozen linear layer with an NF4 weight; FSDP shards the packed values, but not the scales."""

    packed: nn.Parameter
    scale_indices: Tensor
    scale_scales: Tensor
    offset: Tensor

    def pack(self, weight: Tensor, take_shard: Callable | None = None):
        # cached: memory estimates pack thousands of meta tensors with equal shapes
        if weight.is_meta:
            packed_tensors = {name: torch.empty_like(x) for name, x in pack_on_meta(weight.shape).items()}
        else:
            packed_tensors = pack_nf4(weight.to(self.dtype))
        packed_weight = packed_tensors.pop("packed")
        if take_shard:
            packed_weight = take_shard(packed_weight, self.packed)
        self.packed = nn.Parameter(packed_weight, requires_grad=False)
        for name, tensor in packed_tensors.items():
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:
        """Gather and unpack the weight."""
        # with CPU offload, NF4 values are on the CPU, but their scales on the GPU
        packed = gather(self.packed).to(self.offset.device)
        values = unpack_nf4(packed, self.scale_indices, self.scale_scales, self.offset, self.dtype)
        return values[: self.shape.numel()].view(self.shape)
