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
from typing import NamedTuple

import torch
from torch import Tensor

from minivlmrl.kernels.backend import backend_for, tl, triton
from minivlmrl.kernels.window_attention import DTYPES

PROGRAMS = 128  # one for each multiprocessor, of prompts and of own keys
MOST_PARTS = 32  # of a query's keys
TILE = 64  # queries of a program
KEY_BLOCK = 32  # keys that a program reads at once
WARPS = {16: 4, 32: 4, 64: 4, 128: 4, 256: 8}  # by head_dim
STAGES = 2  # blocks of keys on their way
constexpr = tl.constexpr
BLOCK = tl.constexpr(KEY_BLOCK)
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _attend(queries, k, v, mask, begin, end, TILE: constexpr, D: constexpr):
    """Compute o (TILE, D) and e (TILE,) of the keys from begin to end, for queries (TILE, D)."""
    top = tl.full((TILE,), -1e38, tl.float32)  # 2^(-inf - top) is 0, where -inf - -inf is NaN
    total = tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, D), tl.float32)
    for first in range(begin, end, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        inside = keys[:, None] < end
        offsets = keys[:, None] * D + tl.arange(0, D)[None, :]
        key_block = tl.load(k + offsets, mask=inside, other=0.0)
        bias = tl.load(mask + keys, mask=keys < end, other=float("-inf")).to(tl.float32)
        products = tl.dot(queries, tl.trans(key_block), input_precision="ieee")
        scores = products * (D**-0.5 * LOG2E) + bias[None, :]
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        value_block = tl.load(v + offsets, mask=inside, other=0.0)
        rounded_weights = weights.to(value_block.dtype)
        out = tl.dot(rounded_weights, value_block, out * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    total = tl.maximum(total, 1.0)  # it is 1 or more, but without keys
    return out / total[:, None], top + tl.log2(total)


@triton.jit
def _part(
    program,
    q,
    k,
    v,
    mask,
    mask_stride,
    outs,
    ends,
    lines,
    group_rows,
    num_keys,
    part_keys,
    K: constexpr,
    HEADS: constexpr,
    D: constexpr,
    TILE: constexpr,
):
    """Write o and e of one part of the keys of one key head, for a tile of its queries.

    The queries of a key head are those of its HEADS query heads in all rows of the group.
    """
    num_queries = group_rows * HEADS
    tiles = tl.cdiv(num_queries, TILE)
    parts = tl.cdiv(num_keys, part_keys)
    # programs count tiles first, then parts, then key heads, then groups
    tile = program % tiles
    part = program // tiles % parts
    group_and_head = program // tiles // parts
    group = group_and_head // K
    key_head = group_and_head % K

    query = tile * TILE + tl.arange(0, TILE)
    inside = query < num_queries
    row = group * group_rows + query // HEADS
    line = (row * K + key_head) * HEADS + query % HEADS  # of (R, H)
    column = tl.arange(0, D)[None, :]
    queries = tl.load(q + line[:, None] * D + column, mask=inside[:, None], other=0.0)

    mask += group * mask_stride
    k += group_and_head.to(tl.int64) * num_keys * D
    v += group_and_head.to(tl.int64) * num_keys * D
    begin = part * part_keys
    # hidden keys come last: where the first of a part is hidden, all of them are
    part_end = tl.minimum(begin + part_keys, num_keys)
    end = tl.where(tl.load(mask + begin) == 0, part_end, begin)
    out, log_sum = _attend(queries, k, v, mask, begin, end, TILE, D)

    line += part * lines
    tl.store(ends + line, log_sum, mask=inside)
    offsets = line.to(tl.int64)[:, None] * D + column
    tl.store(outs + offsets, out, mask=inside[:, None])


@triton.jit
def _parts_kernel(
    q,
    k,
    v,
    hidden,
    own_k,
    own_v,
    unseen,
    unseen_stride,
    outs,
    ends,
    lines,
    prompt_programs,
    prompt_rows,
    prompt_keys,
    prompt_part,
    own_keys,
    own_part,
    K: constexpr,
    HEADS: constexpr,
    D: constexpr,
    TILE: constexpr,
    OWN_TILE: constexpr,
):
    """The first programs compute parts of prompts; then a row is a group of its own keys."""
    program = tl.program_id(0)
    if program < prompt_programs:
        _part(
            program,
            q,
            k,
            v,
            hidden,
            prompt_keys,
            outs,
            ends,
            lines,
            prompt_rows,
            prompt_keys,
            prompt_part,
            K,
            HEADS,
            D,
            TILE,
        )
    else:
        done = tl.cdiv(prompt_keys, prompt_part) * lines  # lines of the prompts' parts come first
        _part(
            program - prompt_programs,
            q,
            own_k,
            own_v,
            unseen,
            unseen_stride,
            outs + done.to(tl.int64) * D,
            ends + done,
            lines,
            1,
            own_keys,
            own_part,
            K,
            HEADS,
            D,
            OWN_TILE,
        )


@triton.jit
def _join_kernel(outs, ends, out, lines, parts, D: constexpr, PARTS: constexpr):
    """Join the parts of one line; PARTS is a power of two."""
    line = tl.program_id(0)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, D)
    part_line = part * lines + line
    inside = part < parts
    end = tl.load(ends + part_line, mask=inside, other=float("-inf"))
    weight = tl.exp2(end - tl.max(end, 0))
    offsets = part_line.to(tl.int64)[:, None] * D + column[None, :]
    part_outs = tl.load(outs + offsets, mask=inside[:, None], other=0.0)
    joined = tl.sum(weight[:, None] * part_outs, 0) / tl.sum(weight, 0)
    tl.store(out + line * D + column, joined.to(out.dtype.element_ty))


def fits(q: Tensor) -> bool:
    """Say whether the kernels take queries (R, H, D); others go to torch."""
    return q.shape[-1] in WARPS and q.dtype in DTYPES and backend_for(q) == "triton"


class Cut(NamedTuple):
    """How queries and keys are divided among programs."""

    tile: int  # queries of a program
    part_keys: int
    parts: int
    programs: int


def cut(k: Tensor, queries: int) -> Cut:
    """Divide keys (B, K, T, D), each read by so many queries."""
    (B, K, T, _) = k.shape
    tile = min(TILE, max(16, 1 << (queries - 1).bit_length()))  # 16: of a matrix instruction
    tiles = B * K * math.ceil(queries / tile)
    parts = min(MOST_PARTS, max(1, PROGRAMS // tiles))
    part_keys = KEY_BLOCK * max(1, math.ceil(T / (parts * KEY_BLOCK)))
    parts = math.ceil(T / part_keys)
    return Cut(tile, part_keys, parts, tiles * parts)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, own_k: Tensor, own_v: Tensor, unseen: Tensor
) -> Tensor:
    """Compute DecodeAttention of minivlmrl/model/attention.py, where `fits` says so: (R, H, D).

    Args:
        q: (R, H, D), R / B rows of each prompt, one prompt after the other.
        k, v: (B, K, P, D) of prompts. own_k, own_v: (R, K, C, D) of rows. All contiguous.
        hidden: (B, P), 0 or -inf for keys that are not there, which come last; unseen: (R, C), its
            lines any number apart, the same of own keys, of which the first is there.
    """
    (R, H, D) = q.shape
    (B, K, P, _) = k.shape
    heads_per_key = H // K
    prompt_rows = R // B
    lines = R * H
    of_prompts = cut(k, prompt_rows * heads_per_key)
    of_rows = cut(own_k, heads_per_key)
    parts = of_prompts.parts + of_rows.parts
    ends = torch.empty(parts, lines, dtype=torch.float32, device=q.device)
    outs = ends.new_empty(parts, lines, D)
    out = q.new_empty(q.shape)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        _parts_kernel[(of_prompts.programs + of_rows.programs,)](
            q.contiguous(),
            k,
            v,
            hidden,
            own_k,
            own_v,
            unseen,
            unseen.stride(0),
            outs,
            ends,
            lines,
            prompt_programs=of_prompts.programs,
            prompt_rows=prompt_rows,
            prompt_keys=P,
            prompt_part=of_prompts.part_keys,
            own_keys=own_k.shape[2],
            own_part=of_rows.part_keys,
            K=K,
            HEADS=heads_per_key,
            D=D,
            TILE=of_prompts.tile,
            OWN_TILE=of_rows.tile,
            num_warps=WARPS[D],
            num_stages=STAGES,
        )
        _join_kernel[(lines,)](outs, ends, out, lines, parts, D, triton.next_power_of_2(parts))
    return out
