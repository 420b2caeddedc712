"""Attention of completions that share a prompt: the queries of all completions form one matmul.

Dimension letters: R rows (completions), B prompts, K key heads, h query heads for each key head.
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import Reorder, attention_scores, dense_attention

SHARED_BYTES = 2**24  # largest size of the float32 scores, see completion_attention


def rectangles(
    prompts: list[range], completions: list[list[range]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute index blocks of groups with equally long prompts; only completions are padded.

    Args:
        prompts: positions of each of the b prompts, P tokens long, in the packed sequence.
        completions: positions of each prompt's completions, r in total.
    Returns:
        Indices into the packed sequence: prompts (b, P), and completions (r, C) with -1 after the
        end of shorter ones. The third tensor (r,) is the prompt of each completion.
    """
    rows = []
    for prompt, spans in enumerate(completions):
        for span in spans:
            rows.append((prompt, span.start, len(span)))
    prompt_index, starts, lengths = torch.tensor(rows, dtype=torch.long).view(-1, 3).unbind(1)
    offset = torch.arange(int(lengths.max()) if rows else 0)  # (C,)
    completion_block = starts[:, None] + offset  # (r, C)
    completion_block = completion_block.masked_fill(offset >= lengths[:, None], -1)
    prompt_starts = torch.tensor([prompt.start for prompt in prompts])
    prompt_block = prompt_starts[:, None] + torch.arange(len(prompts[0]))  # (b, P)
    return prompt_block, completion_block, prompt_index


class PromptSlots:
    """Assignment of rows to slots of their prompts.

    Every prompt has as many slots as the largest group has rows; some slots may be empty.

    Args:
        prompt_index: (R,), prompt of each row, ascending, on the CPU, so that no GPU must wait.
        prompts: number of prompts.
    """

    def __init__(self, prompt_index: Tensor, prompts: int, device: torch.device | str = "cpu"):
        counts = prompt_index.bincount(minlength=prompts)
        first_row = counts.cumsum(0) - counts  # first row of each prompt
        self.prompts = prompts
        self.slots = int(counts.max())
        self.prompt_index = to_device(prompt_index, device)
        # number of earlier rows of the same prompt
        rows_before = torch.arange(len(prompt_index)) - first_row[prompt_index]
        self.slot = to_device(prompt_index * self.slots + rows_before, device)
        # without empty slots, slot i is row i
        self.full = len(prompt_index) == prompts * self.slots

    def by_prompt(self, x: Tensor) -> Tensor:
        """Arrange rows as queries of their prompt: (R, K, h, X) -> (B, K, slots*h, X).

        Empty slots are 0.
        """
        if not self.full:
            x = x.new_zeros(self.prompts * self.slots, *x.shape[1:]).index_copy_(0, self.slot, x)
        return x.unflatten(0, (-1, self.slots)).transpose(1, 2).flatten(2, 3)

    def by_row(self, x: Tensor) -> Tensor:
        """Invert `by_prompt`: (B, K, slots*h, X) -> (R, K, h, X)."""
        x = x.unflatten(2, (self.slots, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.full else x[self.slot]

    def expand_to_rows(self, x: Tensor) -> Tensor:
        """Repeat a tensor of the prompts for each of their rows: (B, ...) -> (R, ...)."""
        x = x.unsqueeze(1).expand(-1, self.slots, *x.shape[1:]).flatten(0, 1)
        return x if self.full else Reorder.apply(x, self.slot)


def completion_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots
) -> Tensor:
    """Compute attention of completions to all keys of their prompt and causally to their own keys.

    On a CPU, the queries of all completions of a prompt are multiplied with the prompt's keys in
    one product, so that the keys are not copied for each completion. On a GPU, or if the scores
    exceed SHARED_BYTES, the keys are copied for the fused kernel, which does not store the scores.

    Args:
        q: (R, H, C, D), queries of the completions.
        k, v: (R, K, C, D), keys and values of the completions.
        prompt_k, prompt_v: (B, K, P, D), keys and values of the prompts.
        slots: prompt of each completion.
    Returns:
        (R, H, C, D).
    """
    num_keys = prompt_k.shape[2] + k.shape[2]
    score_bytes = 4 * q[..., 0].numel() * num_keys  # float32
    if q.device.type == "cpu" and score_bytes <= SHARED_BYTES:
        return grouped_attention(q, k, v, prompt_k, prompt_v, slots)
    k = torch.cat([slots.expand_to_rows(prompt_k), k], dim=2)
    v = torch.cat([slots.expand_to_rows(prompt_v), v], dim=2)
    return dense_attention(q, k, v, is_causal=True)  # query i attends to P + i + 1 keys


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots
) -> Tensor:
    """Compute `completion_attention` with one product for all completions of a prompt.

    S is the number of slots of a prompt, see PromptSlots. The queries of a slot are ordered by
    token, then by head: query c * h + i belongs to token c and head i.
    """
    (_, H, C, _) = q.shape
    K = k.shape[1]
    S = slots.slots
    h = H // K
    q = q.unflatten(1, (K, h)).transpose(2, 3)  # (R, K, C, h, D)
    q = slots.by_prompt(q).flatten(2, 3)  # (B, K, S*C*h, D)
    own_q = q.unflatten(2, (S, C * h))
    own_k = slots.by_prompt(k).unflatten(2, (S, C))
    own_v = slots.by_prompt(v).unflatten(2, (S, C))
    causal_mask = q.new_full((C, C), -math.inf).triu(1).repeat_interleave(h, dim=0)  # (C*h, C)
    to_own = attention_scores(own_q, own_k, causal_mask).flatten(2, 3)  # (B, K, S*C*h, C)
    to_prompt = attention_scores(q, prompt_k)  # (B, K, S*C*h, P)
    weights = torch.cat([to_prompt, to_own], dim=-1).softmax(-1).to(q.dtype)
    to_prompt, to_own = weights.split([prompt_k.shape[2], C], dim=-1)
    out = (to_prompt @ prompt_v).view_as(own_q)  # (B, K, S, C*h, D)
    out = out + to_own.unflatten(2, (S, C * h)) @ own_v
    out = out.unflatten(3, (C, h)).permute(0, 3, 2, 1, 4, 5)  # (B, C, S, K, h, D)
    out = slots.by_row(out)  # (R, C, 1, K, h, D), with tokens in the axis of heads
    return out.flatten(2, 4).transpose(1, 2)
