"""Rows that read one prompt, as one dense block of it: their products with its keys are one matmul.

Dimension letters: R rows (running completions), B prompts, K key heads, h query heads of each.
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import Reorder, attention_scores, dense_attention

SHARED_BYTES = 2**24  # of float32 scores, see completion_attention


def rectangles(
    prompts: list[range], completions: list[list[range]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out groups whose prompts have one length: only completions are padded.

    Args: where each of the b prompts, P tokens, and each of its completions, r in all, is in a run.
    Returns:
        indices in the run: prompts (b, P), completions (r, C), -1 after the end of a shorter one;
        (r,) prompt of each completion.
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
    """Gives each row a slot of its prompt; all prompts have as many slots as the largest needs."""

    def __init__(self, prompt_index: Tensor, prompts: int, device: torch.device | str = "cpu"):
        # prompt_index: (R,) prompt of each row, ascending, on the host: a GPU is not asked
        counts = prompt_index.bincount(minlength=prompts)
        first_row = counts.cumsum(0) - counts  # of each prompt
        self.prompts = prompts
        self.slots = int(counts.max())
        self.prompt_index = to_device(prompt_index, device)
        # of the same prompt
        rows_before = torch.arange(len(prompt_index)) - first_row[prompt_index]
        self.slot = to_device(prompt_index * self.slots + rows_before, device)
        self.full = len(prompt_index) == prompts * self.slots  # then slots are the rows in order

    def by_prompt(self, x: Tensor) -> Tensor:
        """(R, K, h, X) -> (B, K, slots*h, X): rows as queries of their prompt, 0 in empty slots."""
        if not self.full:
            x = x.new_zeros(self.prompts * self.slots, *x.shape[1:]).index_copy_(0, self.slot, x)
        return x.unflatten(0, (-1, self.slots)).transpose(1, 2).flatten(2, 3)

    def by_row(self, x: Tensor) -> Tensor:
        """(B, K, slots*h, X) -> (R, K, h, X), the inverse of by_prompt."""
        x = x.unflatten(2, (self.slots, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.full else x[self.slot]

    def spread(self, x: Tensor) -> Tensor:
        """(B, ...) -> (R, ...): to each row what its prompt has."""
        x = x.unsqueeze(1).expand(-1, self.slots, *x.shape[1:]).flatten(0, 1)
        return x if self.full else Reorder.apply(x, self.slot)


def completion_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots
) -> Tensor:
    """Attention of completions to their own keys, causally, and to those of the shared prompt.

    On a CPU all completions of a prompt are queries of one product with its keys, which are not
    copied for each. With more scores than SHARED_BYTES, and on a GPU, the fused kernel reads
    copies: there the scores stay on the chip.

    Args: of completions q (R, H, C, D), as the result, and k, v (R, K, C, D); of prompts
        prompt_k, prompt_v (B, K, P, D); slots: which prompt each completion has.
    """
    num_keys = prompt_k.shape[2] + k.shape[2]
    score_bytes = 4 * q[..., 0].numel() * num_keys  # float32
    if q.device.type == "cpu" and score_bytes <= SHARED_BYTES:
        return grouped_attention(q, k, v, prompt_k, prompt_v, slots)
    k = torch.cat([slots.spread(prompt_k), k], dim=2)
    v = torch.cat([slots.spread(prompt_v), v], dim=2)
    return dense_attention(q, k, v, is_causal=True)  # query i of C sees P + i + 1 keys


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots
) -> Tensor:
    """Compute completion_attention with all completions of a prompt as queries of one product.

    S slots of each prompt, as PromptSlots has them. The queries of a slot are ordered by token,
    then by head: query c * h + i is that of token c and of head i.
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
    unseen = q.new_full((C, C), -math.inf).triu(1).repeat_interleave(h, dim=0)  # (C*h, C)
    to_own = attention_scores(own_q, own_k, unseen).flatten(2, 3)  # (B, K, S*C*h, C)
    to_prompt = attention_scores(q, prompt_k)  # (B, K, S*C*h, P)
    weights = torch.cat([to_prompt, to_own], dim=-1).softmax(-1).to(q.dtype)
    to_prompt, to_own = weights.split([prompt_k.shape[2], C], dim=-1)
    out = (to_prompt @ prompt_v).view_as(own_q)  # (B, K, S, C*h, D)
    out = out + to_own.unflatten(2, (S, C * h)) @ own_v
    out = out.unflatten(3, (C, h)).permute(0, 3, 2, 1, 4, 5)  # (B, C, S, K, h, D)
    out = slots.by_row(out)  # (R, C, 1, K, h, D): tokens in the axis of heads
    return out.flatten(2, 4).transpose(1, 2)
