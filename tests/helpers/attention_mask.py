"""The attention mask of a packed sequence, which GroupAttention never builds."""

import torch
from torch import Tensor

from minivlmrl.model.attention import PackedLayout


def attention_mask(layout: PackedLayout) -> Tensor:
    """Return the attention mask (N, N), True where token i attends to token j."""
    tokens = []  # (group, row) per token; row 0 = prompt, row i = completion i in its group
    for number, prompt_span in enumerate(layout.prompt_spans):
        for row, span in enumerate([prompt_span, *layout.completion_spans[number]]):
            tokens += [(number, row)] * len(span)
    group, row = torch.tensor(tokens).unbind(1)  # (N,) each
    index = torch.arange(layout.num_tokens)
    prompt_or_row = (row == 0) | (row == row[:, None])
    return (group == group[:, None]) & prompt_or_row & (index <= index[:, None])
