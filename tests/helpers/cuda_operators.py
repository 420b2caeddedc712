"""CUDA-only PyTorch operators, computed by definition on the CPU, for the simulated GPU.

The GPU path in kernels/ needs 16-bit products with float32 result, and flash attention with log-sum-exps. Both follow
PyTorch's documentation, without code from kernels/.
"""

import torch
from torch import Tensor

aten = torch.ops.aten


def scores_of(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    """Return attention scores (S, H, L, T) in float32; with is_causal, query i sees keys 0 to T-L+i."""
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    L, T = scores.shape[-2:]
    return scores.masked_fill(torch.ones(L, T).triu(T - L + 1) > 0, -torch.inf) if is_causal else scores


def for_query_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for all query heads: (S, K, T, D) -> (S, H, T, D)."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None) -> tuple:
    """Compute _scaled_dot_product_flash_attention: outputs, log-sum-exps and backward arguments."""
    scores = scores_of(q, for_query_heads(k, q), is_causal)
    out = scores.softmax(-1) @ for_query_heads(v, q).float()
    unused = q.new_empty(0)
    state = (unused, unused, q.shape[2], k.shape[2], unused, unused)
    return out.to(q.dtype), scores.logsumexp(-1), *state, unused


def flash_backward(
    grad, q, k, v, out, lse, queries, keys, max_queries, max_keys, dropout_p, is_causal, seed, offset, *, scale=None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute _scaled_dot_product_flash_attention_backward, with weights exp(score - lse)."""
    wide_k, wide_v = (for_query_heads(x, q).float() for x in (k, v))
    grad = grad.float()
    weights = (scores_of(q, wide_k, is_causal) - lse[..., None]).exp()
    score_grads = weights * (grad @ wide_v.mT - (grad * out.float()).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    per_head = score_grads.mT @ q.float(), weights.mT @ grad
    k_grad, v_grad = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for x in per_head)
    return (score_grads @ wide_k).to(q.dtype), k_grad, v_grad


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    return torch.matmul(a.to(out_dtype), b.to(out_dtype), out=out)


def add_product(total, a, b, out_dtype, *, beta=1, alpha=1, out=None) -> Tensor:
    return torch.addmm(total, a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha, out=out)


CUDA_OPERATORS = {
    aten.mm.dtype: product,
    aten.mm.dtype_out: product,
    aten.bmm.dtype: product,
    aten.bmm.dtype_out: product,
    aten.addmm.dtype: add_product,
    aten.addmm.dtype_out: add_product,
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
}
