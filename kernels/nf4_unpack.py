"""Weights of 4 bits, to compute with: one read of what is packed and one write.

A byte has two indices into a table of 16 numbers, the first in its upper half; 64 numbers share a
scale, an index of 8 bits into a table of 256 numbers, times one of float32 for 256 blocks, plus an
offset. In torch that is 24 bytes of traffic a weight, here 2.6 with bfloat16.
"""

import torch
from torch import Tensor

from minivlmrl.kernels.backend import tl, triton

BLOCK = 64  # values of one scale
GROUP = 256  # scales of one scale
BYTES = 1024  # of a program: 16 values of bfloat16 a thread, in two writes
constexpr = tl.constexpr


@triton.jit
def _kernel(
    packed,
    indices,
    scales,
    offset,
    scale_table,
    value_table,
    out,
    size,
    BYTES: constexpr,
    GROUP: constexpr,
):
    """Unpack BYTES bytes, two values of each; `size` is the number of all bytes."""
    begin = tl.program_id(0).to(tl.int64) * BYTES
    byte = begin + tl.arange(0, BYTES)
    inside = byte < size
    pair = tl.load(packed + byte, mask=inside, other=0).to(tl.int32)
    block = byte // 32
    scale_index = tl.load(indices + block, mask=inside, other=0).to(tl.int32)
    group_scale = tl.load(scales + block // GROUP, mask=inside, other=0.0)
    scale = tl.load(scale_table + scale_index) * group_scale + tl.load(offset)
    first = tl.load(value_table + (pair >> 4)) * scale
    second = tl.load(value_table + (pair & 15)) * scale
    values = tl.interleave(first, second).to(out.dtype.element_ty)
    position = 2 * begin + tl.arange(0, 2 * BYTES)
    tl.store(out + position, values, mask=position < 2 * size)


def nf4_unpack(
    packed: Tensor, indices: Tensor, scales: Tensor, offset: Tensor, tables: tuple, dtype
) -> Tensor:
    """Unpack (n / 2,) bytes into (n,) values of a dtype, with torch's bits: no fused multiply-add.

    Args: see pack_nf4 in model/nf4.py; tables: of scales (256,) and of values (16,).
    """
    size = packed.numel()
    out = packed.new_empty(2 * size, dtype=dtype)
    with torch.cuda.device_of(packed):  # Triton launches on the current device
        _kernel[(triton.cdiv(size, BYTES),)](
            packed,
            indices,
            scales,
            offset,
            *tables,
            out,
            size,
            BYTES=BYTES,
            GROUP=GROUP,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out
