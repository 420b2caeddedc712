"""Who attends to whom. The decoder does not know; it calls the attention that it is given.

    prompt tokens      attend causally to their prompt
    completion tokens  attend to their whole prompt and, causally, to their own completion
    nothing            attends to another group or to another completion

So a prompt is computed once for all its completions, and every number equals that of separate rows.
`visible` says this as a mask; GroupAttention does it without one, by the keys of its two calls.

Dimension letters: N tokens of the packed run, B groups, R completions of all groups, M their
tokens, P tokens of a prompt, C of a completion, H query heads, K key/value heads, D head_dim.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import Reorder, attention_scores, dense_attention
from minivlmrl.kernels.prompt_slots import PromptSlots, after_prompt, rectangles


class Attention(Protocol):
    """What layers of the decoder ask for: GroupAttention or DecodeAttention.

    A recurrent layer keeps something of each prompt in `memory`, by its index; see `go_on` in
    hub/qwen3_5.py, which also reads `layout` and `keys` of the one, `spans` of the other.
    """

    memory: dict[int, list[Tensor]]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (N, H, D), k and v (N, K, D), all after the rotary -> (N, H, D)."""


class GroupLayout:
    """Where the spans of a packed run are: prompt 0, its completions, prompt 1, its completions ...

    The last token of a completion is predicted but predicts nothing, so it is not in the run: a
    completion of n tokens has a span of n - 1.

    Args:
        prompt_lengths: tokens of each of the B prompts.
        completion_lengths: for each prompt the tokens of each of its completions.
    """

    def __init__(self, prompt_lengths: list, completion_lengths: list, device="cpu"):
        self.prompt_lengths = prompt_lengths
        self.row_lengths = [n for group in completion_lengths for n in group]  # R, they sum to M
        # spans, as ranges
        self.prompts = []
        self.completions = []
        end = 0
        for length, group in zip(prompt_lengths, completion_lengths, strict=True):
            self.prompts.append(range(end, end := end + length))
            self.completions.append([range(end, end := end + n - 1) for n in group])
        self.num_tokens = end  # N
        last = [prompt[-1] for prompt in self.prompts]
        self.last_index = to_device(torch.tensor(last), device)  # (B,) last token of each prompt
        # (M,) index of the token that predicts each completion token: the one before it, which for
        # the first token of a completion is the last token of its prompt
        groups = zip(last, self.completions, strict=True)
        predict = [i for end, group in groups for span in group for i in (end, *span)]
        self.predict_index = to_device(torch.tensor(predict, dtype=torch.long), device)
        longest = max(self.row_lengths, default=0)  # T
        cells = [row * longest + i for row, n in enumerate(self.row_lengths) for i in range(n)]
        self.row_index = to_device(torch.tensor(cells, dtype=torch.long), device)  # (M,) in (R, T)
        # blocks: prompts and completions of each length of prompts
        blocks = []
        self.slots = []
        for length in dict.fromkeys(prompt_lengths):
            same = [i for i, other in enumerate(prompt_lengths) if other == length]
            *indices, prompt_index = rectangles(
                [self.prompts[i] for i in same], [self.completions[i] for i in same]
            )
            blocks += indices
            slots = PromptSlots(prompt_index, len(same), device) if indices[1].numel() else None
            self.slots.append(slots)
        self.shapes = [block.shape for block in blocks]
        # the token in each cell of the blocks, laid end to end, -1 in an empty one; and the inverse
        order = torch.cat([block.flatten() for block in blocks])
        inverse = torch.empty(self.num_tokens, dtype=torch.long)  # (N,): the cell of each token
        inverse[order[order >= 0]] = (order >= 0).nonzero()[:, 0]
        self.in_order = torch.equal(order, torch.arange(self.num_tokens))
        self.order, self.inverse = (to_device(x, device) for x in (order.clamp(min=0), inverse))

    def blocks(self, x: Tensor) -> list[Tensor]:
        """(N, H, D) -> prompts (b, H, P, D), completions (r, H, C, D), of each prompt length."""
        x = x if self.in_order else Reorder.apply(x, self.order, self.inverse)
        parts = zip(x.split([shape.numel() for shape in self.shapes]), self.shapes, strict=True)
        return [part.unflatten(0, shape).transpose(1, 2) for part, shape in parts]


def visible(layout: GroupLayout) -> Tensor:
    """Write down the rule at the top of this file: (N, N) bool, token i attends to token j."""
    tokens = []  # (group, 0 for its prompt or the number of its completion) of each token
    for number, prompt in enumerate(layout.prompts):
        for row, span in enumerate([prompt, *layout.completions[number]]):
            tokens += [(number, row)] * len(span)
    group, row = torch.tensor(tokens).unbind(1)  # each (N,)
    index = torch.arange(layout.num_tokens)
    prompt_or_row = (row == 0) | (row == row[:, None])
    return (group == group[:, None]) & prompt_or_row & (index <= index[:, None])


class GroupAttention:
    """The attention of training, scoring and prefill: two calls for each length of prompts.

    With keep_keys it remembers k and v of every layer in `self.keys`, for decoding after a prefill.
    """

    def __init__(self, layout: GroupLayout, keep_keys: bool = False):
        self.layout = layout
        self.keys: list[tuple[Tensor, Tensor]] | None = [] if keep_keys else None
        self.memory = {}  # what recurrent layers keep of each prompt, see hub/qwen3_5.py

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.keys is not None:
            self.keys.append((k, v))
        layout = self.layout
        out = []
        blocks = list(zip(*map(layout.blocks, (q, k, v)), strict=True))
        pairs = zip(blocks[::2], blocks[1::2], layout.slots, strict=True)
        for prompts, completions, slots in pairs:
            out.append(dense_attention(*prompts, is_causal=True))
            if slots is not None:
                out.append(after_prompt(*completions, *prompts[1:], slots))
        out = [x.transpose(1, 2).flatten(0, 1) for x in out]  # each (rows * tokens, H, D)
        out = torch.cat(out) if out[1:] else out[0]
        return out if layout.in_order else Reorder.apply(out, layout.inverse)


class DecodeAttention:
    """The attention of generation: a new token of each row, to its prompt's keys and to its own.

    Args:
        prompts: of a prefill of prompts alone, GroupAttention(layout, keep_keys=True).
        prompt_index: (R,) prompt of each completion, ascending, on the host.
        capacity: most new tokens that a completion can get.
        start: (B,) position of the first token after each prompt.
    """

    select_every = 1  # `generate` drops finished rows every so many steps
    spans = ((slice(None), slice(None)),)  # rows, and which of the new tokens are theirs

    def __init__(self, prompts, prompt_index: Tensor, capacity: int, start: Tensor):
        keys, lengths = prompts.keys, prompts.layout.prompt_lengths
        first = keys[0][0]
        (_, K, D) = keys[0][0].shape
        padded = ([pad_sequence(x.split(lengths), True) for x in layer] for layer in keys)
        # (B, K, P, D), zeros after a shorter prompt; the bias (B, P) hides them
        self.prompt_kv = [[x.transpose(1, 2).contiguous() for x in layer] for layer in padded]
        self.prompt_bias = pad_sequence([first.new_zeros(n) for n in lengths], True, float("-inf"))
        shape = len(prompt_index), K, capacity, D
        self.row_kv = [[x.new_zeros(shape) for x in layer] for layer in keys]
        self.device, self.prompt_index = first.device, prompt_index
        self.slots = PromptSlots(prompt_index, len(lengths), self.device)
        self.rows = to_device(torch.arange(len(prompt_index)), self.device)  # which are left
        self.start = start[self.slots.prompt_index]  # (R,) position of its first token
        self.newest = torch.full_like(self.rows, -1)  # (R,) where in row_kv its last token is
        self.row_bias = first.new_zeros(len(prompt_index), 1, 1, capacity)  # -inf after that
        self.read = 0  # own keys that a step reads: as many as the longest row has
        self.memory = {i: [x[prompt_index] for x in kept] for i, kept in prompts.memory.items()}

    def select(self, going_on: Tensor) -> Tensor | None:
        """Drop rows that have ended: (R,) bool on the host -> indices of the others; None: all."""
        if going_on.all():
            return None
        rows = going_on.nonzero()[:, 0]
        prompts, prompt_index = self.prompt_index[rows].unique_consecutive(return_inverse=True)
        return self.move(rows, prompts, prompt_index)

    def move(self, rows: Tensor, prompts: Tensor, prompt_index: Tensor) -> Tensor:
        """Gather rows and prompts by their indices; prompt_index: of each row among the new."""
        unchanged = torch.equal(prompts, torch.arange(len(self.prompt_bias)))
        rows, prompts = (to_device(x, self.device) for x in (rows, prompts))
        for layer in (*self.row_kv, *self.memory.values()):  # one by one: never two copies of all
            layer[:] = [x[rows] for x in layer]
        if not unchanged:
            self.prompt_bias = self.prompt_bias[prompts]
            for layer in self.prompt_kv:
                layer[:] = [x[prompts] for x in layer]
        state = self.rows, self.start, self.newest, self.row_bias
        self.rows, self.start, self.newest, self.row_bias = (x[rows] for x in state)
        self.prompt_index = prompt_index
        self.slots = PromptSlots(prompt_index, len(prompts), self.device)
        return rows

    def advance(self, tokens: int | Tensor = 1, most: int = 1):
        """Count new tokens of each row, at most so many, before they are computed."""
        self.read, capacity = self.read + most, self.row_bias.shape[-1]
        self.newest.add_(tokens).clamp_(max=capacity - 1)  # a row that has ended may run on
        later = torch.arange(capacity, device=self.device) > self.newest[:, None]
        self.row_bias.zero_().masked_fill_(later[:, None, None], float("-inf"))

    def remember(self, layer_index: int, k: Tensor, v: Tensor) -> list[Tensor]:
        """Add the new tokens' k, v (R, K, D) to those before: each (R, K, C, D)."""
        for keys, new in zip(self.row_kv[layer_index], (k, v), strict=True):
            at = self.newest.view(-1, 1, 1, 1).expand(*new.shape[:2], 1, new.shape[2])
            keys.scatter_(2, at, new[:, :, None])
        return [keys[:, :, : self.read] for keys in self.row_kv[layer_index]]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (R, H, D) = q.shape
        K = k.shape[1]
        row_k, row_v = self.remember(layer_index, k, v)  # (R, K, C, D)
        prompt_k, prompt_v = self.prompt_kv[layer_index]  # (B, K, P, D)
        q = q.view(R, K, H // K, D)
        # all rows of a prompt are queries of one product with its keys
        bias = self.prompt_bias[:, None, None]  # (B, 1, 1, P)
        to_prompt = attention_scores(self.slots.by_prompt(q), prompt_k, bias)
        to_row = self.slots.by_prompt(attention_scores(q, row_k, self.row_bias[..., : self.read]))
        weights = torch.cat([to_prompt, to_row], dim=-1).softmax(-1).to(q.dtype)
        to_prompt, to_row = weights.split([prompt_k.shape[2], row_k.shape[2]], dim=-1)
        out = self.slots.by_row(to_prompt @ prompt_v) + self.slots.by_row(to_row) @ row_v
        return out.reshape(R, H, D)
