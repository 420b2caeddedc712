"""Attention for completions that share a prompt, with one matrix product for all their queries and the prompt keys.

Dimensions: R rows (completions), B prompts, K key heads, h query heads per key head, H = K h, P prompt tokens, C
completion tokens, D head dimension.
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import (
    Reorder,
    attention_scores,
    dense_attention,
    flash_attention,
    flash_attention_backward,
    has_flash_attention,
)

# on a CPU, grouped_attention is faster than PyTorch's fused kernel if float32 scores take at most this many bytes
MAX_SCORE_BYTES = 2**22


class PromptSlots:
    """Convert between one row per completion and one padded row per prompt.

    Args:
        prompt_index: (R,) prompt index per completion, ascending, on the CPU to avoid waiting for a GPU.
        prompts: number of prompts.
    """

    def __init__(self, prompt_index: Tensor, prompts: int, device: torch.device | str = "cpu"):
        counts = prompt_index.bincount(minlength=prompts)
        first_row = counts.cumsum(0) - counts  # (prompts,) index of each prompt's first completion
        self.prompts = prompts
        self.slots = int(counts.max())  # maximum completions per prompt
        self.prompt_index = to_device(prompt_index, device)
        rows_before = torch.arange(len(prompt_index)) - first_row[prompt_index]
        self.slot = to_device(prompt_index * self.slots + rows_before, device)
        # whether all prompts have the same number of completions
        self.full = len(prompt_index) == prompts * self.slots

    def by_prompt(self, x: Tensor) -> Tensor:
        """Concatenate the completions of a prompt in one row: (R, K, h, X) -> (B, K, slots*h, X).

        For prompts with fewer than `slots` completions, the row is padded with 0.
        """
        if not self.full:
            x = x.new_zeros(self.prompts * self.slots, *x.shape[1:]).index_copy_(0, self.slot, x)
        return x.unflatten(0, (-1, self.slots)).transpose(1, 2).flatten(2, 3)

    def by_row(self, x: Tensor) -> Tensor:
        """Split prompt rows into completions, to undo by_prompt: (B, K, slots*h, X) -> (R, K, h, X)."""
        x = x.unflatten(2, (self.slots, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.full else x[self.slot]

    def expand_to_rows(self, x: Tensor) -> Tensor:
        """Repeat prompt rows for their completions: (prompts, ...) -> (completions, ...)."""
        x = x.unsqueeze(1).expand(-1, self.slots, *x.shape[1:]).flatten(0, 1)
        return x if self.full else Reorder.apply(x, self.slot)


def completion_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots
) -> Tensor:
    """Compute attention (R, H, C, D) from completions to their whole prompt, and causally to their own tokens.

    Small inputs on a CPU use grouped_attention, others PyTorch's fused kernel. On a GPU, the fused kernel does not
    support float32, so that prompt keys are copied for every completion.

    Args:
        q: (R, H, C, D) completion queries.
        k, v: (R, K, C, D) completion keys and values.
        prompt_k, prompt_v: (B, K, P, D) prompt keys and values.
    """
    score_bytes = 4 * q[..., 0].numel() * (prompt_k.shape[2] + k.shape[2])  # float32 scores
    if q.is_cpu and score_bytes <= MAX_SCORE_BYTES:
        return grouped_attention(q, k, v, prompt_k, prompt_v, slots)
    if has_flash_attention(q, k, v):
        return JoinedAttention.apply(q, k, v, prompt_k, prompt_v, slots)
    k = torch.cat([slots.expand_to_rows(prompt_k), k], dim=2)
    v = torch.cat([slots.expand_to_rows(prompt_v), v], dim=2)
    # query i of a completion attends to P prompt keys and i + 1 completion keys
    return dense_attention(q, k, v, is_causal=True)


class JoinedAttention(torch.autograd.Function):
    """Compute completion attention in two calls to PyTorch's fused kernel, without copies or masks.

    Call 1 attends to prompt keys, call 2 causally to completion keys. Outputs o_j and log-sum-exps e_j of call j give
    attention over all keys:

        e = log(exp(e_1) + exp(e_2))        out = exp(e_1 - e) o_1 + exp(e_2 - e) o_2

    Backward calls the fused kernel for prompt keys and for completion keys, with output and log-sum-exp over all keys.

    Source: Hydragen (Juravsky et al., 2024) for the forward pass, Ring Attention (Liu et al., 2023) for the backward
    pass.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots) -> Tensor:
        prompt_out, prompt_lse, prompt_state = flash_attention(slots.by_prompt(q), prompt_k, prompt_v)
        own_out, own_lse, own_state = flash_attention(q, k, v, is_causal=True)
        prompt_lse = slots.by_row(prompt_lse[..., None])  # (R, H, C, 1) log-sum-exps over prompt keys
        own_lse = own_lse[..., None]
        lse = torch.logaddexp(prompt_lse, own_lse)
        out = slots.by_row(prompt_out) * (prompt_lse - lse).exp()
        # convert back to the input dtype: on a CPU, 16-bit inputs have float32 outputs
        out = (out + own_out * (own_lse - lse).exp()).to(own_out.dtype)
        ctx.save_for_backward(q, k, v, prompt_k, prompt_v, out, lse)
        ctx.slots = slots
        ctx.states = prompt_state, own_state
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, prompt_k, prompt_v, out, lse = ctx.saved_tensors
        by_prompt = ctx.slots.by_prompt
        prompt_state, own_state = ctx.states
        # memory order (R, C, H, D): by_prompt needs no copy
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
        prompt_q_grad, prompt_k_grad, prompt_v_grad = flash_attention_backward(
            by_prompt(grad), by_prompt(q), prompt_k, prompt_v, by_prompt(out), by_prompt(lse)[..., 0], prompt_state
        )
        q_grad, k_grad, v_grad = flash_attention_backward(grad, q, k, v, out, lse[..., 0], own_state, is_causal=True)
        q_grad = q_grad + ctx.slots.by_row(prompt_q_grad)
        return q_grad, k_grad, v_grad, prompt_k_grad, prompt_v_grad, None


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots
) -> Tensor:
    """Compute completion attention, with one matrix product per prompt for the queries from all its completions."""
    _, H, C, _ = q.shape
    K = k.shape[1]
    S = slots.slots  # completions per prompt
    h = H // K
    q = q.unflatten(1, (K, h)).transpose(2, 3)  # (R, K, C, h, D) queries, grouped by key head
    q = slots.by_prompt(q).flatten(2, 3)  # (B, K, S*C*h, D) queries, grouped by prompt
    own_q = q.unflatten(2, (S, C * h))
    own_k, own_v = (slots.by_prompt(x).unflatten(2, (S, C)) for x in (k, v))
    causal_mask = q.new_full((C, C), -math.inf).triu(1).repeat_interleave(h, dim=0)  # (C*h, C) causal mask
    to_own = attention_scores(own_q, own_k, causal_mask).flatten(2, 3)  # (B, K, S*C*h, C) scores with completion keys
    to_prompt = attention_scores(q, prompt_k)  # (B, K, S*C*h, P) scores with prompt keys
    weights = torch.cat([to_prompt, to_own], dim=-1).softmax(-1).to(q.dtype)
    to_prompt, to_own = weights.split([to_prompt.shape[-1], to_own.shape[-1]], dim=-1)
    # (B, K, S, C*h, D) sum over prompt values
    out = (to_prompt @ prompt_v).view_as(own_q)
    out = out + to_own.unflatten(2, (S, C * h)) @ own_v
    out = out.unflatten(3, (C, h)).permute(0, 3, 2, 1, 4, 5)  # (B, C, S, K, h, D) with tokens before heads
    out = slots.by_row(out)  # (R, C, 1, K, h, D) split into completions
    return out.flatten(2, 4).transpose(1, 2)
