"""Attention for completions that share a prompt.

The queries from all completions for a prompt are multiplied with the prompt's keys in one matrix product.

Dimension letters: R rows (completions), B prompts, K key heads, h query heads for each key head, H query heads in
total, P prompt tokens, C completion tokens, D head dimension.
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import (
    FlashOutput,
    Reorder,
    attention_scores,
    dense_attention,
    flash_attention,
    flash_attention_backward,
    has_flash_attention,
)

# Maximum size in bytes for the float32 scores in grouped_attention. Up to this size, grouped_attention is faster than
# the fused kernel.
MAX_SCORE_BYTES = 2**22


def rectangles(prompts: list[range], completions: list[list[range]]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute indices into the packed sequence as rectangular tensors for prompts with the same length.

    Only the completions are padded.

    Args:
        prompts: each prompt's position range in the packed sequence: b prompts with P tokens each.
        completions: position ranges for each prompt's completions, r completions in total.
    Returns:
        Three tensors: the prompts' token indices in the packed sequence (b, P), the completions' token indices (r, C),
        padded with -1, and each completion's prompt (r,).
    """
    rows = [(prompt, span.start, len(span)) for prompt, spans in enumerate(completions) for span in spans]
    prompt_index, starts, lengths = torch.tensor(rows, dtype=torch.long).view(-1, 3).unbind(1)
    offset = torch.arange(int(lengths.max()) if rows else 0)  # (C,): position in the completion
    completion_block = starts[:, None] + offset  # (r, C): indices into the packed sequence
    completion_block = completion_block.masked_fill(offset >= lengths[:, None], -1)
    prompt_starts = torch.tensor([prompt.start for prompt in prompts])
    # (b, P), each prompt token's index in the packed sequence
    prompt_block = prompt_starts[:, None] + torch.arange(len(prompts[0]))
    return prompt_block, completion_block, prompt_index


class PromptSlots:
    """Places (slots) for the completions of each prompt, in a tensor that is padded to the largest group.

    Every prompt has as many slots as the largest group has completions. Smaller groups leave slots empty.

    Args:
        prompt_index: (R,), each row's prompt, in ascending order. It must be on the CPU, so
            that the host does not wait for a GPU.
        prompts: number of prompts.
    """

    def __init__(self, prompt_index: Tensor, prompts: int, device: torch.device | str = "cpu"):
        counts = prompt_index.bincount(minlength=prompts)
        first_row = counts.cumsum(0) - counts  # index of each prompt's first row
        self.prompts = prompts
        self.slots = int(counts.max())
        self.prompt_index = to_device(prompt_index, device)
        # for each completion: the number of earlier completions of the same prompt
        rows_before = torch.arange(len(prompt_index)) - first_row[prompt_index]
        self.slot = to_device(prompt_index * self.slots + rows_before, device)
        # True if all prompts have the same number of completions; then slot i contains completion i
        self.full = len(prompt_index) == prompts * self.slots

    def by_prompt(self, x: Tensor) -> Tensor:
        """Reshape per-completion tensors to per-prompt tensors: (R, K, h, X) -> (B, K, slots*h, X).

        Empty slots are filled with 0.
        """
        if not self.full:
            x = x.new_zeros(self.prompts * self.slots, *x.shape[1:]).index_copy_(0, self.slot, x)
        return x.unflatten(0, (-1, self.slots)).transpose(1, 2).flatten(2, 3)

    def by_row(self, x: Tensor) -> Tensor:
        """Reshape per-prompt tensors to per-completion tensors: (B, K, slots*h, X) -> (R, K, h, X)."""
        x = x.unflatten(2, (self.slots, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.full else x[self.slot]

    def expand_to_rows(self, x: Tensor) -> Tensor:
        """Repeat each prompt's entry of x for all its completions: (B, ...) -> (R, ...)."""
        x = x.unsqueeze(1).expand(-1, self.slots, *x.shape[1:]).flatten(0, 1)
        return x if self.full else Reorder.apply(x, self.slot)


def completion_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots
) -> Tensor:
    """Compute attention from completions to all keys of their prompt, and causally to their own keys.

    The prompt's keys are not copied for each completion. On a CPU, scores that take at most MAX_SCORE_BYTES are
    computed step by step by grouped_attention. For larger scores, JoinedAttention calls the fused kernel, which does
    not store the scores. The keys are copied for each completion only where has_flash_attention is False, for example
    for float32 on a GPU.

    Args:
        q: (R, H, C, D), the completions' queries.
        k, v: (R, K, C, D), the completions' keys and values.
        prompt_k, prompt_v: (B, K, P, D), the prompts' keys and values.
        slots: assigns the completions to their prompts.
    Returns:
        The attention outputs (R, H, C, D).
    """
    num_keys = prompt_k.shape[2] + k.shape[2]
    score_bytes = 4 * q[..., 0].numel() * num_keys  # float32 score size
    if q.device.type == "cpu" and score_bytes <= MAX_SCORE_BYTES:
        return grouped_attention(q, k, v, prompt_k, prompt_v, slots)
    if has_flash_attention(q, k, v):
        return JoinedAttention.apply(q, k, v, prompt_k, prompt_v, slots)
    k = torch.cat([slots.expand_to_rows(prompt_k), k], dim=2)
    v = torch.cat([slots.expand_to_rows(prompt_v), v], dim=2)
    # Query i attends to P + i + 1 keys.
    return dense_attention(q, k, v, is_causal=True)


class JoinedAttention(torch.autograd.Function):
    """Compute `completion_attention` with two fused-kernel calls, without copies or masks.

    In the first kernel call, the queries from all completions of a prompt attend to the prompt's keys. In the second
    kernel call, completions attend causally to their own keys. With the output o_j of call j and the log-sum-exp e_j of
    its scores,

        e = log(exp(e_1) + exp(e_2))        out = exp(e_1 - e) o_1 + exp(e_2 - e) o_2

    is the attention to all keys. In the backward pass, the kernel computes the gradients for each part from `out` and
    e, see flash_attention_backward. apply takes the same arguments as completion_attention.

    Sources: Hydragen (Juravsky et al., 2024) for joining parts; Ring Attention (Liu et al., 2023) for the backward
    pass.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots) -> Tensor:
        to_prompt = flash_attention(slots.by_prompt(q), prompt_k, prompt_v)
        to_own = flash_attention(q, k, v, is_causal=True)
        prompt_lse = slots.by_row(to_prompt.lse[..., None])  # (R, H, C, 1)
        own_lse = to_own.lse[..., None]
        lse = torch.logaddexp(prompt_lse, own_lse)
        out = slots.by_row(to_prompt.out) * (prompt_lse - lse).exp()
        # attention outputs, not yet rounded to 16 bits on a CPU
        out = (out + to_own.out * (own_lse - lse).exp()).to(to_own.out.dtype)
        ctx.save_for_backward(q, k, v, prompt_k, prompt_v, out, lse)
        ctx.slots = slots
        ctx.states = (to_prompt.state, to_own.state)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, prompt_k, prompt_v, out, lse = ctx.saved_tensors
        by_prompt = ctx.slots.by_prompt
        prompt_state, own_state = ctx.states
        # upstream gradient in the memory order (R, C, H, D) of q, so that by_prompt copies nothing
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
        result = FlashOutput(by_prompt(out), by_prompt(lse)[..., 0], prompt_state)
        prompt_q_grad, prompt_k_grad, prompt_v_grad = flash_attention_backward(
            by_prompt(grad), by_prompt(q), prompt_k, prompt_v, result
        )
        result = FlashOutput(out, lse[..., 0], own_state)
        q_grad, k_grad, v_grad = flash_attention_backward(grad, q, k, v, result, is_causal=True)
        q_grad = q_grad + ctx.slots.by_row(prompt_q_grad)
        return q_grad, k_grad, v_grad, prompt_k_grad, prompt_v_grad, None


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots
) -> Tensor:
    """Compute `completion_attention` with one matrix product for all completions of a prompt.

    Each prompt has S slots for its completions, see PromptSlots. A completion's queries are ordered by token first and
    then by head: query c * h + i belongs to token c and head i.
    """
    (_, H, C, _) = q.shape
    K = k.shape[1]
    S = slots.slots
    h = H // K
    # (R, K, C, h, D): rows, key heads, tokens, query heads per key head, head dimension
    q = q.unflatten(1, (K, h)).transpose(2, 3)
    # (B, K, S*C*h, D): all queries for a prompt and key head
    q = slots.by_prompt(q).flatten(2, 3)
    own_q = q.unflatten(2, (S, C * h))
    own_k = slots.by_prompt(k).unflatten(2, (S, C))
    own_v = slots.by_prompt(v).unflatten(2, (S, C))
    # (C*h, C): each token's mask row, repeated for its h query heads
    causal_mask = q.new_full((C, C), -math.inf).triu(1).repeat_interleave(h, dim=0)
    # (B, K, S*C*h, C): scores for the completion's own keys
    to_own = attention_scores(own_q, own_k, causal_mask).flatten(2, 3)
    # (B, K, S*C*h, P): scores for the prompt's keys
    to_prompt = attention_scores(q, prompt_k)
    weights = torch.cat([to_prompt, to_own], dim=-1).softmax(-1).to(q.dtype)
    to_prompt, to_own = weights.split([to_prompt.shape[-1], to_own.shape[-1]], dim=-1)
    # (B, K, S, C*h, D): each slot's outputs
    out = (to_prompt @ prompt_v).view_as(own_q)
    out = out + to_own.unflatten(2, (S, C * h)) @ own_v
    out = out.unflatten(3, (C, h)).permute(0, 3, 2, 1, 4, 5)  # (B, C, S, K, h, D)
    # (R, C, 1, K, h, D): each row's outputs; by_row treats the token axis C like key heads
    out = slots.by_row(out)
    return out.flatten(2, 4).transpose(1, 2)
