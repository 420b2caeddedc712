"""Triton kernel that unpacks NF4 weights (4 bits each) in one pass over memory.

A byte holds two indices into a table with 16 values, the first in the upper 4 bits. A block of 64 values has a scale:
table[index] * group_scale + offset, with an 8-bit index into a table with 256 numbers. 256 blocks share group_scale, a
float32. Unpacking to bfloat16 reads and writes 2.6 bytes per weight, while separate torch operations need 24.
"""

import torch
from torch import Tensor

from minivlmrl.kernels.backend import tl, triton

BLOCK = 64  # number of values that share a scale
GROUP = 256  # number of blocks that share group_scale
# bytes of NF4 values per Triton program; each of 128 threads writes 16 bfloat16 values in two 16-byte stores
BYTES = 1024
constexpr = tl.constexpr


@triton.jit
def _kernel(packed, indices, scales, offset, scale_table, value_table, out, size, BYTES: constexpr, GROUP: constexpr):
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


def nf4_unpack(packed: Tensor, indices: Tensor, scales: Tensor, offset: Tensor, tables: tuple, dtype) -> Tensor:
    """Unpack n NF4 values: (n,) in `dtype`.

    The result is bit-identical to unpack_nf4 in model/nf4.py, because the kernel does not fuse multiplications and
    additions.

    Args:
        packed: (n / 2,) bytes with two values each.
        indices, scales, offset: scale_indices, scale_scales and offset from pack_nf4 in model/nf4.py.
        tables: scale table (256,) and value table (16,).
    """
    size = packed.numel()
    out = packed.new_empty(2 * size, dtype=dtype)
    with torch.cuda.device_of(packed):  # launch on the tensors' GPU, which may not be the current one
        _kernel[(triton.cdiv(size, BYTES),)](
            packed, indices, scales, offset, *tables, out, size,
            BYTES=BYTES, GROUP=GROUP, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
