"""Rows that read one prompt, as one dense block of it: their products with its keys are one matmul.

Dimension letters: R rows (running completions), B prompts, K key heads, h query heads of each.
"""

import math

import torch
from torch import Tensor

from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import Reorder, attention_scores, dense_attention

SHARED_BYTES = 2**24  # of float32 scores, see after_prompt


def rectangles(
    prompts: list[range], completions: list[list[range]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out groups whose prompts have one length: only completions are padded.

    Args: where each of the b prompts, P tokens, and each of its completions, r in all, is in a run.
    Returns:
        indices in the run: prompts (b, P), completions (r, C), -1 after the end of a shorter one;
        (r,) prompt of each completion.
    """
    rows = [(i, span.start, len(span)) for i, group in enumerate(completions) for span in group]
    prompt_index, starts, lengths = torch.tensor(rows, dtype=torch.long).view(-1, 3).unbind(1)
    offset = torch.arange(int(lengths.max()) if rows else 0)  # (C,)
    block = (starts[:, None] + offset).masked_fill(offset >= lengths[:, None], -1)
    first = torch.tensor([prompt.start for prompt in prompts])
    return first[:, None] + torch.arange(len(prompts[0])), block, prompt_index


class PromptSlots:
    """Gives each row a slot of its prompt; all prompts have as many slots as the largest needs."""

    def __init__(self, prompt_index: Tensor, prompts: int, device: torch.device | str = "cpu"):
        # prompt_index: (R,) prompt of each row, ascending, on the host: a GPU is not asked
        counts = prompt_index.bincount(minlength=prompts)
        first = counts.cumsum(0) - counts
        self.prompts = prompts
        self.slots = int(counts.max())
        self.prompt_index = to_device(prompt_index, device)
        slot = prompt_index * self.slots + torch.arange(len(prompt_index)) - first[prompt_index]
        self.slot = to_device(slot, device)
        # then the slots are the rows in order
        self.full = len(prompt_index) == prompts * self.slots

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


def after_prompt(
    q: Tensor, k: Tensor, v: Tensor, prompt_k: Tensor, prompt_v: Tensor, slots: PromptSlots
) -> Tensor:
    """Attention of completions to their own keys, causally, and to those of the shared prompt.

    On a CPU all completions of a prompt are queries of one product with its keys, which are not
    copied for each. With more scores than SHARED_BYTES, and on a GPU, the fused kernel reads
    copies: there the scores stay on the chip.

    Args: of completions q (R, H, C, D), as the result, and k, v (R, K, C, D); of prompts
        prompt_k, prompt_v (B, K, P, D); slots: which prompt each completion has.
    """
    repeat = q.shape[1] // k.shape[1]
    C = q.shape[2]
    P = prompt_k.shape[2]
    if q.device.type != "cpu" or q[..., 0].numel() * (P + C) * 4 > SHARED_BYTES:
        k, v = (torch.cat([slots.spread(x), y], dim=2) for x, y in ((prompt_k, k), (prompt_v, v)))
        return dense_attention(q, k, v, is_causal=True)  # query i of C sees P + i + 1 keys
    # the rows of a prompt lie together, (B, K, slots*C*repeat, D) and (B, K, slots*C, D)
    q = slots.by_prompt(q.unflatten(1, (-1, repeat)).transpose(2, 3)).flatten(2, 3)
    own = q, slots.by_prompt(k), slots.by_prompt(v)
    own_q, own_k, own_v = (x.unflatten(2, (slots.slots, -1)) for x in own)
    unseen = q.new_full((C, C), -math.inf).triu(1).repeat_interleave(repeat, 0)
    to_own = attention_scores(own_q, own_k, unseen).view(*q.shape[:3], C)
    weights = torch.cat([attention_scores(q, prompt_k), to_own], dim=-1).softmax(-1).to(q.dtype)
    to_prompt, to_own = weights.split([P, C], dim=-1)
    out = (to_prompt @ prompt_v).view_as(own_q) + to_own.unflatten(2, (slots.slots, -1)) @ own_v
    # (B, C, slots, K, repeat, D)
    out = out.view(*q.shape[:2], slots.slots, C, repeat, -1).permute(0, 3, 2, 1, 4, 5)
    return slots.by_row(out).flatten(2, 4).transpose(1, 2)
