"""Triton kernels for decoding: attention for one new token per unfinished completion (row).

A new token attends to prompt keys, which all completions for a prompt share, and to keys in its own completion.

Derivation. The keys are divided into parts, which are computed in parallel. From the scores s_i = q k_i D^-1/2 log2 e
and the values v_i of the keys in part j, a first kernel computes

    m_j = max s_i        l_j = sum 2^(s_i - m_j)        o_j = sum 2^(s_i - m_j) v_i / l_j

A second kernel combines the outputs o_j of all parts. With e_j = m_j + log2 l_j, attention over all keys is

    out = sum 2^(e_j - max e) o_j / sum 2^(e_j - max e)

A Triton program handles up to 64 queries that share keys, so that it reads the keys only once.

Source: Flash-Decoding (Dao et al., 2023) for parts, Hydragen (Juravsky et al., 2024) for shared keys.
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.backend import backend_for, tl, triton
from minivlmrl.kernels.window_attention import TILE_DTYPES

# target number of Triton programs, about one per GPU multiprocessor
PROGRAMS = 128
MAX_PARTS = 32  # maximum parts per key sequence
TILE = 64  # maximum queries per Triton program
KEY_BLOCK = 32  # keys per loop iteration
WARPS = {16: 4, 32: 4, 64: 4, 128: 4, 256: 8}  # {head_dim: warps per program}
STAGES = 2  # prefetched key blocks (Triton's num_stages)
constexpr = tl.constexpr
BLOCK = tl.constexpr(KEY_BLOCK)
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _attend(queries, k, v, mask, start, end, TILE: constexpr, D: constexpr):
    """Compute attention (TILE, D) and base-2 log-sum-exps (TILE,) for queries."""
    # a finite initial maximum, because -inf - (-inf) is NaN
    max_score = tl.full((TILE,), -1e38, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    out = tl.zeros((TILE, D), tl.float32)
    for first in range(start, end, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        inside = keys[:, None] < end
        offsets = keys[:, None] * D + tl.arange(0, D)[None, :]
        key_block = tl.load(k + offsets, mask=inside, other=0.0)
        bias = tl.load(mask + keys, mask=keys < end, other=float("-inf")).to(tl.float32)
        products = tl.dot(queries, tl.trans(key_block), input_precision="ieee")
        scores = products * (D**-0.5 * LOG2E) + bias[None, :]
        new_max = tl.maximum(max_score, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(max_score - new_max)
        value_block = tl.load(v + offsets, mask=inside, other=0.0)
        rounded_weights = weights.to(value_block.dtype)
        out = tl.dot(rounded_weights, value_block, out * rescale[:, None], input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        max_score = new_max
    # avoid 0 / 0 if all keys in a part are masked
    total = tl.maximum(total, 1.0)
    return out / total[:, None], max_score + tl.log2(total)


@triton.jit
def _part(
    program, q, k, v, mask, mask_stride, outs, log_sums, lines, group_rows, num_keys, part_keys,
    K: constexpr, HEADS: constexpr, D: constexpr, TILE: constexpr,
):  # fmt: skip
    """Compute and store attention outputs and log-sum-exps for up to 64 queries and one part of the keys."""
    num_queries = group_rows * HEADS  # queries that share keys
    tiles = tl.cdiv(num_queries, TILE)
    parts = tl.cdiv(num_keys, part_keys)
    tile = program % tiles
    part = program // tiles % parts
    group_and_head = program // tiles // parts
    group = group_and_head // K
    key_head = group_and_head % K

    query = tile * TILE + tl.arange(0, TILE)
    inside = query < num_queries
    row = group * group_rows + query // HEADS
    line = (row * K + key_head) * HEADS + query % HEADS  # query index in q, flattened to (R * H, D)
    column = tl.arange(0, D)[None, :]
    queries = tl.load(q + line[:, None] * D + column, mask=inside[:, None], other=0.0)

    mask += group * mask_stride
    k += group_and_head.to(tl.int64) * num_keys * D
    v += group_and_head.to(tl.int64) * num_keys * D
    start = part * part_keys
    # masked keys come last: skip a part if its first key is masked
    part_end = tl.minimum(start + part_keys, num_keys)
    end = tl.where(tl.load(mask + start).to(tl.float32) == 0, part_end, start)
    out, log_sum = _attend(queries, k, v, mask, start, end, TILE, D)

    line += part * lines
    tl.store(log_sums + line, log_sum, mask=inside)
    offsets = line.to(tl.int64)[:, None] * D + column
    tl.store(outs + offsets, out, mask=inside[:, None])


@triton.jit
def _parts_kernel(
    q, k, v, prompt_bias, own_k, own_v, own_bias, own_bias_stride, outs, log_sums, lines,
    prompt_programs, prompt_rows, prompt_keys, prompt_part, own_keys, own_part,
    K: constexpr, HEADS: constexpr, D: constexpr, TILE: constexpr, OWN_TILE: constexpr,
):  # fmt: skip
    """Compute attention over one part of the keys, from a prompt or a completion."""
    program = tl.program_id(0)
    if program < prompt_programs:
        _part(
            program, q, k, v, prompt_bias, prompt_keys, outs, log_sums, lines, prompt_rows, prompt_keys, prompt_part,
            K, HEADS, D, TILE,
        )  # fmt: skip
    else:
        done = tl.cdiv(prompt_keys, prompt_part) * lines
        # a single completion uses these keys, so group_rows is 1
        _part(
            program - prompt_programs, q, own_k, own_v, own_bias, own_bias_stride,
            outs + done.to(tl.int64) * D, log_sums + done, lines, 1, own_keys, own_part, K, HEADS, D, OWN_TILE,
        )  # fmt: skip


@triton.jit
def _join_kernel(outs, log_sums, out, lines, parts, D: constexpr, PARTS: constexpr):
    """Merge attention outputs from all parts of the keys."""
    line = tl.program_id(0)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, D)
    part_line = part * lines + line
    inside = part < parts
    log_sum = tl.load(log_sums + part_line, mask=inside, other=float("-inf"))
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    offsets = part_line.to(tl.int64)[:, None] * D + column[None, :]
    part_outs = tl.load(outs + offsets, mask=inside[:, None], other=0.0)
    joined = tl.sum(weight[:, None] * part_outs, 0) / tl.sum(weight, 0)
    tl.store(out + line * D + column, joined.to(out.dtype.element_ty))


def fits(q: Tensor) -> bool:
    """Return True if the Triton kernels can run, and support q (R, H, D)."""
    return q.shape[-1] in WARPS and q.dtype in TILE_DTYPES and backend_for(q, "decode_attention") == "triton"


def split_work(k: Tensor, queries: int) -> tuple[int, int, int, int]:
    """Divide keys (B, K, T, D), and the queries per key head, among about 128 Triton programs.

    Returns:
        Queries per program, keys per part, number of parts, number of programs.
    """
    B, K, T, _ = k.shape
    # a GPU's matrix instructions need at least 16 rows
    tile = min(TILE, max(16, triton.next_power_of_2(queries)))
    tiles = B * K * math.ceil(queries / tile)
    parts = min(MAX_PARTS, max(1, PROGRAMS // tiles))
    part_keys = KEY_BLOCK * max(1, math.ceil(T / (parts * KEY_BLOCK)))
    parts = math.ceil(T / part_keys)
    return tile, part_keys, parts, tiles * parts


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_bias: Tensor, own_k: Tensor, own_v: Tensor, own_bias: Tensor
) -> Tensor:
    """Compute attention (R, H, D) from new tokens to their prompts and completions; fits(q) must be True.

    Args:
        q: (R, H, D), R / B consecutive rows per prompt.
        k, v: (B, K, P, D) prompt keys and values, contiguous.
        prompt_bias: (B, P) score bias: 0 for prompt tokens, then -inf for padding.
        own_k, own_v: (R, K, C, D) completion keys and values, contiguous.
        own_bias: (R, C) score bias: 0 for completion tokens (at least one), then -inf for unused KV cache positions.
            Any stride between rows is allowed.
    """
    R, H, D = q.shape
    B, K, P, _ = k.shape
    heads_per_key = H // K
    prompt_rows = R // B
    lines = R * H
    prompt_tile, prompt_part, prompt_parts, prompt_programs = split_work(k, prompt_rows * heads_per_key)
    own_tile, own_part, own_parts, own_programs = split_work(own_k, heads_per_key)
    parts = prompt_parts + own_parts
    log_sums = torch.empty(parts, lines, dtype=torch.float32, device=q.device)
    outs = log_sums.new_empty(parts, lines, D)
    out = q.new_empty(q.shape)
    with torch.cuda.device_of(q):  # launch on the tensors' GPU, which may not be the current one
        _parts_kernel[(prompt_programs + own_programs,)](
            q.contiguous(), k, v, prompt_bias, own_k, own_v, own_bias, own_bias.stride(0), outs, log_sums, lines,
            prompt_programs=prompt_programs, prompt_rows=prompt_rows, prompt_keys=P, prompt_part=prompt_part,
            own_keys=own_k.shape[2], own_part=own_part,
            K=K, HEADS=heads_per_key, D=D, TILE=prompt_tile, OWN_TILE=own_tile,
            num_warps=WARPS[D], num_stages=STAGES, enable_fp_fusion=True,
        )  # fmt: skip
        _join_kernel[(lines,)](
            outs, log_sums, out, lines, parts, D, triton.next_power_of_2(parts), enable_fp_fusion=True
        )
    return out
