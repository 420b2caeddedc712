"""Softmax attention with grouped heads (GQA): several query heads share a key head.

    S = q k^T D^-1/2, -inf for masked keys       P = softmax(S)       out = P v

With H query heads and K key heads, query head i uses key head i // (H / K).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from minivlmrl.kernels.backend import at_least_float32, is_before_ampere
from minivlmrl.kernels.float32_matmul import float32_matmul

# on a CPU with up to 128 keys and head dimension 64, plain matrix products take half the time of PyTorch's fused kernel
MAX_KEYS = 128
MAX_HEAD_DIM = 64
# disable cuDNN attention: NaN gradients with a mask (pytorch 196678), wrong results below 8 key heads (pytorch 193893)
torch.backends.cuda.enable_cudnn_sdp(False)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index] (*index.shape, ...) for x (N, ...), with a fast backward pass.

    F.embedding's backward is 17 times faster than indexing on a CPU, but can be wrong on a GPU for more than 1,024
    indices (pytorch issue 187687).
    """
    if not x.is_cpu:
        return x[index]
    return F.embedding(index, x.flatten(1)).view(*index.shape, *x.shape[1:])


class Reorder(torch.autograd.Function):
    """Return x[index] with a fast backward pass, which copies gradients instead of summing them.

    Args:
        x: (N, ...)
        index: row indices, possibly repeated.
        back: (N,) index of the output row from which x[i] gets its gradient. Other copies of x[i] must have zero
            gradients. None if `index` has no repeats.
    """

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, back: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(index, back)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        index, back = ctx.saved_tensors
        if back is not None:
            return grad.index_select(0, back), None, None
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None, None


def dense_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Compute softmax(q k^T D^-1/2) v: (S, H, L, D).

    Args:
        q: (S, H, L, D), sequences, query heads, queries, head dimension.
        k, v: (S, K, T, D), sequences, key heads, keys, head dimension. K must divide H.
        is_causal: whether query i attends only to keys 0..T-L+i. L <= T.
    Source: torch's scaled_dot_product_attention with enable_gqa and causal_lower_right.
    """
    if q.dtype == torch.bfloat16 and is_before_ampere(q.device):
        return dense_attention(q.float(), k.float(), v.float(), is_causal).to(q.dtype)
    _, H, L, D = q.shape
    _, K, T, _ = k.shape
    flash = is_causal and q.is_cuda and D % 8 == 0
    if flash and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True)):
        # in F.scaled_dot_product_attention, the causal mask would let query i attend to keys 0..i, not 0..T-L+i
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]
    is_small = q.is_cpu and T <= MAX_KEYS and D <= MAX_HEAD_DIM
    if is_causal and L == T and not is_small:
        if not has_flash_attention(q, k, v):
            # SDPA's memory-efficient kernel needs as many key heads as query heads
            k, v = (x[:, :, None].expand(-1, -1, H // K, -1, -1).flatten(1, 2) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    # stack the queries of the H/K heads that share a key head
    q = q.unflatten(1, (K, -1)).flatten(2, 3)  # (S, K, H/K*L, D) queries, grouped by key head
    mask = None
    if is_causal:
        mask = q.new_full((L, T), -math.inf).triu(T - L + 1).repeat(H // K, 1)  # (H/K*L, T) causal mask
    if is_small:
        out = attention_scores(q, k, mask).softmax(-1).to(q.dtype) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.unflatten(2, (-1, L)).flatten(1, 2)


def has_flash_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if flash_attention supports the device, dtype and head dimension.

    The meta device stands for an NVIDIA GPU in memory estimates. Apple GPUs are not supported, because PyTorch returns
    no log-sum-exp there. AMD GPUs are not supported, because they were not tested.
    """
    half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0
    if q.is_meta:
        return half and not is_before_ampere(q.device)
    if q.is_cuda and not torch.version.hip:
        return half and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True))
    return q.is_cpu


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor, list]:
    """Compute attention and log-sum-exps with PyTorch's fused kernel, outside autograd.

    Args:
        q: (S, H, L, D); k, v: (S, K, T, D). has_flash_attention(q, k, v) must be True.
        is_causal: whether query i attends only to keys 0..i; requires L = T.
    Returns:
        Attention outputs (S, H, L, D), on a CPU at least float32.
        Log-sum-exps of scores (S, H, L), at least float32.
        More arguments for the backward kernel: on a GPU, sequence lengths and unused dropout seed; on a CPU, none.
    """
    if q.is_cuda:
        out, lse, *state, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
        return out, lse, state
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*with_more_digits(q, k, v), 0.0, is_causal)
    return out, lse, []


def with_more_digits(*inputs: Tensor) -> list[Tensor]:
    """Convert 16-bit tensors on a CPU to float32; return others unchanged."""
    if not inputs[0].is_cpu:
        return [*inputs]
    return [x.to(at_least_float32(x.dtype)) for x in inputs]


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: list, is_causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute q, k and v gradients with PyTorch's fused backward kernel.

    k and v may be a subset of the keys and values used for `out`, because the kernel recomputes attention weights as
    exp(score - log-sum-exp).

    With attention weight w and upstream gradient g, an attention score has the gradient w (g . value - g . output). If
    one key has nearly all the weight, g . value and g . output nearly cancel, and a 16-bit output is not exact enough.

    Args:
        grad: (S, H, L, D) upstream gradient, with contiguous last axis.
        out, lse: as from flash_attention, over all keys.
        state: third result of flash_attention(q, k, v).
    """
    lse = lse.contiguous()  # contiguous, because the GPU kernel ignores strides
    if q.is_cuda:
        *lengths, seed, offset = state
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *lengths, 0.0, is_causal, seed, offset
        )
    # in float32, because the CPU kernel sums k and v gradients in their own dtype
    q_grad, k_grad, v_grad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *with_more_digits(grad, q, k, v, out), lse, 0.0, is_causal
    )
    return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype)


def attention_scores(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute scores q k^T D^-1/2 + mask: (..., L, T), in float32 (float64 for float64 inputs).

    Args:
        q: (..., L, D)
        k: (..., T, D)
        mask: 0 or -inf, (L, T) or with as many dimensions as the scores.
    """
    scale = q.shape[-1] ** -0.5
    if q.dtype not in (torch.float32, torch.float64):
        # scale after the product, because scaling the queries would round them to 16 bits
        scores = float32_matmul(q, k.mT)
        return scores * scale if mask is None else torch.add(mask, scores, alpha=scale)
    queries = q.flatten(0, -3)
    keys = k.flatten(0, -3).mT
    if mask is None:
        scores = torch.baddbmm(q.new_empty(()), queries, keys, beta=0, alpha=scale)
    else:
        mask = mask.expand(*q.shape[:-2], *mask.shape[-2:]).flatten(0, -3)
        scores = torch.baddbmm(mask, queries, keys, alpha=scale)
    return scores.unflatten(0, q.shape[:-2])
