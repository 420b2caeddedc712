"""Triton kernels that sample one token per row from logits, in two passes over the logits.

In torch, `inverse_cdf` (generation/generate.py) and the softmax before it read and write the whole
vocabulary about twelve times. The kernels compute the same sums, which add integers and are
therefore exact.

Derivation. For one row's logits z (V,), temperature T and random number u in [0, 1), with
k = log2(e) / T:

    top = max_j k z_j               s = sum_j 2^(k z_j - top)
    units_j = floor(2^(k z_j - top) (2^52 / s))             total = sum_j units_j
    target = floor(u total)         id = the first i with sum_{j <= i} units_j > target

Here units_j is token j's probability in multiples of 2^-52, rounded down. The kernels follow
these formulas in three steps:

    1.  one program per row: top and s
    2.  one program per row and block (BLOCK tokens): the sum over the block's units
    3.  one program per row: the block in which the cumulative sum exceeds the target, this block's
        units again, the id, and its log-probability k z_id ln 2 - (top + log2 s) ln 2

The probabilities are rounded in another way than in torch's softmax, in the last float32 bit. With
equal units, the ids are equal too. A token with 0 units is never sampled.
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.backend import tl, triton
from minivlmrl.kernels.selective_log_softmax import LOG2E, _describe_row

constexpr = tl.constexpr
BLOCK = tl.constexpr(1024)  # tokens in a block, whose units are added in step 2
UNITS = tl.constexpr(2.0**52)  # units that make up the probability 1
LN2 = tl.constexpr(math.log(2))
# In _describe_row, a thread holds 4 columns, which is one 16-byte load for float32 logits.
TOP_WARPS = 8


@triton.jit
def _top_kernel(logits, tops, sums, stride, width, k):
    """Compute one row's top and s."""
    row = tl.program_id(0).to(tl.int64)
    top, s, _ = _describe_row(logits + row * stride, width, k)
    tl.store(tops + row, top)
    tl.store(sums + row, s)


@triton.jit
def _block_units(row_logits, block, width, k, top, s):
    """Compute the units (BLOCK,) for one token block.

    The multiply-add is explicit, and the launches do not allow the compiler to fuse others, because
    steps 2 and 3 must round alike.
    """
    ids = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(row_logits + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
    weights = tl.exp2(tl.fma(z, k, -top))
    return (weights * (UNITS / s)).to(tl.int64)


@triton.jit
def _units_kernel(logits, tops, sums, totals, stride, width, blocks, k):
    """Sum the units in one block of a row."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    top = tl.load(tops + row)
    s = tl.load(sums + row)
    units = _block_units(logits + row * stride, block, width, k, top, s)
    tl.store(totals + row * blocks + block, tl.sum(units, 0))


@triton.jit
def _select_kernel(
    logits, uniforms, tops, sums, totals, ids, logps, stride, width, blocks, k, BLOCKS: constexpr
):
    """Sample one row's token. BLOCKS is `blocks`, rounded up to a power of two."""
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    top = tl.load(tops + row)
    s = tl.load(sums + row)
    index = tl.arange(0, BLOCKS)
    block_units = tl.load(totals + row * blocks + index, mask=index < blocks, other=0)
    total = tl.sum(block_units, 0)
    # The product is rounded down, so the target is below the total.
    target = (tl.load(uniforms + row) * total.to(tl.float64)).to(tl.int64)
    is_before = tl.cumsum(block_units, 0) <= target
    # NaN logits have no units. The minimum keeps the index inside the row; `generate` raises an
    # error later, because the log-probability is NaN.
    block = tl.minimum(tl.sum(is_before.to(tl.int32), 0), blocks - 1)
    target -= tl.sum(tl.where(is_before, block_units, 0), 0)
    units = _block_units(row_logits, block, width, k, top, s)
    is_before = tl.cumsum(units, 0) <= target
    token = tl.minimum(block * BLOCK + tl.sum(is_before.to(tl.int32), 0), width - 1)
    chosen = tl.load(row_logits + token).to(tl.float32) * k
    tl.store(ids + row, token.to(tl.int64))
    tl.store(logps + row, (chosen - top - tl.log2(s)) * LN2)


def sample_blocks(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token per row from softmax(logits / temperature).

    The ids equal those from inverse_cdf in minivlmrl/generation/generate.py, for the probabilities
    in the derivation above.

    Args:
        logits: (r, V), in one of DTYPES; rows are contiguous.
        uniforms: (r,) float64 in [0, 1), each row's random number.
        temperature: logit divisor, greater than 0.
    Returns:
        The ids (r,) int64, and their log-probabilities (r,) float32 in nats.
    """
    rows, width = logits.shape
    blocks = triton.cdiv(width, BLOCK.value)
    tops, sums, logps = logits.new_empty(3, rows, dtype=torch.float32)
    totals = logits.new_empty(rows, blocks, dtype=torch.int64)
    ids = logits.new_empty(rows, dtype=torch.int64)
    stride = logits.stride(0)
    k = LOG2E / temperature
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _top_kernel[(rows,)](
            logits, tops, sums, stride, width, k, num_warps=TOP_WARPS, enable_fp_fusion=False
        )
        _units_kernel[(blocks, rows)](
            logits, tops, sums, totals, stride, width, blocks, k, enable_fp_fusion=False
        )
        _select_kernel[(rows,)](
            logits,
            uniforms,
            tops,
            sums,
            totals,
            ids,
            logps,
            stride,
            width,
            blocks,
            k,
            BLOCKS=triton.next_power_of_2(blocks),
            enable_fp_fusion=False,
        )
    return ids, logps
