"""Rows that read one prompt, as one dense block of it: their products with its keys are then a single matmul.

Dimension letters: R rows (running completions), B prompts, K key/value heads, h query heads of each, X anything.
"""

import torch
from torch import Tensor


class PromptSlots:
    """Gives each row a slot of its prompt; all prompts have as many slots as the one with the most rows."""

    def __init__(self, owner: Tensor, prompts: int):  # owner: (R,) prompt of each row, ascending; prompts: B
        counts = owner.bincount(minlength=prompts)
        first = counts.cumsum(0) - counts
        self.prompts, self.slots = prompts, int(counts.max())
        row = torch.arange(len(owner), device=owner.device)
        self.slot = owner * self.slots + row - first[owner]
        self.full = len(owner) == prompts * self.slots  # then the slots are the rows in order

    def by_prompt(self, x: Tensor) -> Tensor:
        """(R, K, h, X) -> (B, K, slots*h, X): the rows of a prompt as more queries of it, zeros in empty slots."""
        if not self.full:
            x = x.new_zeros(self.prompts * self.slots, *x.shape[1:]).index_copy_(0, self.slot, x)
        return x.unflatten(0, (-1, self.slots)).transpose(1, 2).flatten(2, 3)

    def by_row(self, x: Tensor) -> Tensor:
        """(B, K, slots*h, X) -> (R, K, h, X), the inverse of by_prompt."""
        x = x.unflatten(2, (self.slots, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.full else x[self.slot]
