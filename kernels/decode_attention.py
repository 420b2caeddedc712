"""Attention of a new token of each row: to its prompt's keys, which rows share, and to its own.

Derivation. A query's keys are cut into parts. Of part j, with scores s_i = q k_i D^-1/2 log2 e:

    m_j = max s_i        l_j = sum 2^(s_i - m_j)        o_j = sum 2^(s_i - m_j) v_i / l_j

Parts need nothing of each other, so a card computes all at once. With e_j = m_j + log2 l_j

    out = sum 2^(e_j - max e) o_j / sum 2^(e_j - max e)

is the softmax over all keys: a second, small kernel. Inside a part keys come in blocks, and what is
known so far is joined with each block in the same way. The queries of all rows of a prompt are one
tile, which reads the prompt's keys once; own keys are read by the heads of their row.

Sources: Dao et al., Flash-Decoding, 2023, for parts; Juravsky et al., Hydragen, 2024, for prompts.
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.backend import backend_for, tl, triton
from minivlmrl.kernels.window_attention import DTYPES

PROGRAMS = 128  # one for each multiprocessor, of prompts and of own keys
MOST_PARTS, TILE, BLOCK = 32, 64, 32  # of a query's keys; queries of a program; keys of a block
WARPS = {16: 4, 32: 4, 64: 4, 128: 4, 256: 8}  # by head_dim
STAGES = 2  # blocks of keys on their way
constexpr = tl.constexpr


@triton.jit
def _part(
    program, q, k, v, hidden, stride, outs, ends, lines, slots, T, size, scale, K, h, D, TILE, BLOCK
):
    """Compute o and e of one part of a group's keys, for a tile of the queries of its rows."""
    tiles = tl.cdiv(slots * h, TILE)
    parts = tl.cdiv(T, size)
    tile = program % tiles
    part = program // tiles % parts
    keys = program // tiles // parts
    query = tile * TILE + tl.arange(0, TILE)
    d = tl.arange(0, D)[None, :]
    inside = query < slots * h
    # the line of a query: of (R, K, h), where h heads read one key head
    line = ((keys // K * slots + query // h) * K + keys % K) * h + query % h
    queries = tl.load(q + line[:, None] * D + d, mask=inside[:, None], other=0.0)
    hidden += keys // K * stride
    k += keys.to(tl.int64) * T * D
    v += keys.to(tl.int64) * T * D
    top = tl.full((TILE,), -1e38, tl.float32)  # 2^(-inf - top) is 0, where -inf - -inf is NaN
    total = tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, D), tl.float32)
    begin = part * size
    # hidden keys come last: where the first of a part is hidden, all of them are
    end = tl.where(tl.load(hidden + begin) == 0, tl.minimum(begin + size, T), begin)
    for first in range(begin, end, BLOCK):
        key = first + tl.arange(0, BLOCK)
        there = key[:, None] < end
        at = key[:, None] * D + d
        block = tl.trans(tl.load(k + at, mask=there, other=0.0))
        bias = tl.load(hidden + key, mask=key < end, other=float("-inf")).to(tl.float32)
        scores = tl.dot(queries, block, input_precision="ieee") * scale + bias[None, :]
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        block = tl.load(v + at, mask=there, other=0.0)
        out = out * shrink[:, None]
        out = tl.dot(weights.to(block.dtype), block, out, input_precision="ieee")
        top, total = higher, total * shrink + tl.sum(weights, 1)
    line, total = line + part * lines, tl.maximum(total, 1.0)  # it is 1 or more, but without keys
    tl.store(ends + line, top + tl.log2(total), mask=inside)
    at = line.to(tl.int64)[:, None] * D + d
    tl.store(outs + at, out / total[:, None], mask=inside[:, None])


@triton.jit
def _parts_kernel(
    q, k, v, hidden, own_k, own_v, unseen, outs, ends, lines, slots, programs, P, size, C, S,
    own_size, scale, K: constexpr, h: constexpr, D: constexpr, TILE: constexpr, OWN: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """The first programs compute parts of prompts; then a row is a group of its own keys."""
    n = tl.program_id(0)
    if n < programs:
        _part(n, q, k, v, hidden, P, outs, ends, lines, slots, P, size, scale, K, h, D, TILE, BLOCK)
    else:
        n, done = n - programs, tl.cdiv(P, size) * lines
        outs, ends, k, v = outs + done.to(tl.int64) * D, ends + done, own_k, own_v
        _part(n, q, k, v, unseen, S, outs, ends, lines, 1, C, own_size, scale, K, h, D, OWN, BLOCK)


@triton.jit
def _join_kernel(outs, ends, out, lines, parts, D: constexpr, PARTS: constexpr):
    """Join the parts of one line."""
    line = tl.program_id(0)
    part = tl.arange(0, PARTS)
    d = tl.arange(0, D)
    at = part * lines + line
    inside = part < parts
    end = tl.load(ends + at, mask=inside, other=float("-inf"))
    weight = tl.exp2(end - tl.max(end, 0))
    at = at.to(tl.int64)[:, None] * D + d[None, :]
    rows = tl.load(outs + at, mask=inside[:, None], other=0.0)
    joined = tl.sum(weight[:, None] * rows, 0) / tl.sum(weight, 0)
    tl.store(out + line * D + d, joined.to(out.dtype.element_ty))


def fits(q: Tensor) -> bool:
    """Say whether the kernels take queries (R, H, D); others go to torch."""
    return q.shape[-1] in WARPS and q.dtype in DTYPES and backend_for(q) == "triton"


def cut(k: Tensor, queries: int) -> tuple[int, int, int, int]:
    """Divide keys (B, K, T, D) of so many queries: queries a program, keys a part, parts, programs."""
    tile = min(TILE, max(16, 1 << (queries - 1).bit_length()))  # 16: of a matrix instruction
    groups = k.shape[0] * k.shape[1] * -(-queries // tile)
    blocks = min(MOST_PARTS, max(1, PROGRAMS // groups)) * BLOCK
    size = BLOCK * max(1, -(-k.shape[2] // blocks))
    parts = -(-k.shape[2] // size)
    return tile, size, parts, groups * parts


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, own_k: Tensor, own_v: Tensor, unseen: Tensor
) -> Tensor:
    """Compute DecodeAttention of minivlmrl/attention.py, where `fits` says so: (R, H, D).

    Args:
        q: (R, H, D), R / B rows of each prompt, one prompt after the other.
        k, v: (B, K, P, D) of prompts. own_k, own_v: (R, K, C, D) of rows. All contiguous.
        hidden: (B, P), 0 or -inf for keys that are not there, which come last; unseen: (R, C), its
            lines S numbers apart, the same of own keys, of which the first is there.
    """
    (R, H, D) = q.shape
    (B, K, P, _) = k.shape
    C = own_k.shape[2]
    slots = R // B
    h = H // K
    lines = R * H
    scale = D**-0.5 * math.log2(math.e)
    tile, size, parts, programs = cut(k, slots * h)
    own_tile, own_size, own_parts, own_programs = cut(own_k, h)
    parts += own_parts
    ends = torch.empty(parts, lines, dtype=torch.float32, device=q.device)
    outs = ends.new_empty(parts, lines, D)
    out = q.new_empty(q.shape)
    tensors = q.contiguous(), k, v, hidden, own_k, own_v, unseen, outs, ends
    numbers = lines, slots, programs, P, size, C, unseen.stride(0), own_size, scale, K, h, D
    numbers += tile, own_tile, BLOCK
    options = {"num_warps": WARPS[D], "num_stages": STAGES}
    with torch.cuda.device_of(q):  # Triton launches on the current device
        _parts_kernel[(programs + own_programs,)](*tensors, *numbers, **options)
        _join_kernel[(lines,)](outs, ends, out, lines, parts, D, 1 << (parts - 1).bit_length())
    return out
