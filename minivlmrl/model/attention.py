"""Attention over a packed sequence, where completions share the tokens of their prompt.

Prompt tokens attend causally to their prompt. Completion tokens attend to their whole prompt, and causally to their own
completion. No token attends to another prompt or completion.

Each prompt is encoded once, with the same results as if it were repeated before each of its completions.

Dimensions: N packed tokens, B groups, R completions, M completion tokens, P tokens per prompt, C tokens per
completion, H query heads, K key/value heads, D head_dim.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import Reorder, attention_scores, dense_attention
from minivlmrl.kernels.shared_prefix import PromptSlots, completion_attention

# completions are split by length only if padding exceeds this many tokens; with less, extra calls cost more
MAX_PADDING = 4096


class PackedLayout:
    """Positions of prompts and completions in a packed sequence.

    Order: prompt 0, its completions, prompt 1, its completions, ... The last token of a completion predicts nothing and
    is left out: of 5 completion tokens, 4 are packed.

    Args:
        prompt_lengths: (B,) tokens per prompt.
        completion_lengths: tokens per completion, for each prompt.
        rows: row index of each completion in padded loss tensors; turns of a trajectory share a row. None = one row
            per completion.
    """

    def __init__(
        self,
        prompt_lengths: list[int],
        completion_lengths: list[list[int]],
        device: torch.device | str = "cpu",
        rows: Sequence[int] | None = None,
    ):
        self.prompt_lengths = prompt_lengths
        lengths = list(chain(*completion_lengths))
        rows = rows or range(len(lengths))
        self.row_lengths = [0] * len(set(rows))
        cells = []  # (row, column in the padded tensor) per completion token
        for row, n in zip(rows, lengths, strict=True):
            start = self.row_lengths[row]
            self.row_lengths[row] += n
            cells += [(row, i) for i in range(start, start + n)]
        T = max(self.row_lengths, default=0)
        self.prompt_spans = []
        self.completion_spans = []
        predicting = []  # per completion token: index of the previous token, which predicts it
        end = 0
        for prompt_length, group in zip(prompt_lengths, completion_lengths, strict=True):
            prompt = range(end, end + prompt_length)
            end = prompt.stop
            spans = []
            for n in group:
                spans.append(range(end, end + n - 1))
                predicting += [prompt[-1], *spans[-1]]
                end += n - 1
            self.prompt_spans.append(prompt)
            self.completion_spans.append(spans)
        self.num_tokens = end
        # (B,) index of the last token in each prompt
        self.last_index = index_tensor([span[-1] for span in self.prompt_spans], device)
        # (M,) per completion token: index of the token that predicts it
        self.predict_index = index_tensor(predicting, device)
        # (M,) index of completion tokens in a flattened (R, T) tensor
        self.row_index = index_tensor([row * T + i for row, i in cells], device)
        blocks, self.slots = self.pad_blocks(device)
        self.shapes = [block.shape for block in blocks]
        order = torch.cat([block.flatten() for block in blocks])
        filled = order >= 0
        self.in_order = torch.equal(order, torch.arange(self.num_tokens))
        self.order = to_device(order.clamp(min=0), device)
        # (N,) where each token is in the concatenated matrices from pad_blocks
        self.inverse = to_device(filled.nonzero()[:, 0][order[filled].argsort()], device)

    def pad_blocks(self, device: torch.device | str) -> tuple[list[Tensor], list[list[PromptSlots]]]:
        """Group prompts by length, and collect token indices in padded matrices.

        Returns:
            Token indices per prompt length: a matrix (prompts, P), then matrices (completions, C) with -1 at padding.
            Per prompt length, one PromptSlots per completion matrix, to find the prompts of its completions.
        """
        blocks = []
        slots = []
        for length in dict.fromkeys(self.prompt_lengths):
            same = [i for i, other in enumerate(self.prompt_lengths) if other == length]
            prompt_starts = torch.tensor([self.prompt_spans[i].start for i in same])
            rows = [(n, span.start, len(span)) for n, i in enumerate(same) for span in self.completion_spans[i]]
            blocks.append(prompt_starts[:, None] + torch.arange(length))
            slots.append([])
            for part in split_by_length(rows):
                prompt_index, starts, lengths = torch.tensor(part).unbind(1)
                offset = torch.arange(int(lengths.max()))  # (C,)
                blocks.append((starts[:, None] + offset).masked_fill(offset >= lengths[:, None], -1))
                slots[-1].append(PromptSlots(prompt_index, len(same), device))
        return blocks, slots

    def blocks(self, x: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        """Split x (N, H, D) into blocks: per prompt length, (prompts, H, P, D) and several (completions, H, C, D)."""
        if not self.in_order:
            x = Reorder.apply(x, self.order, self.inverse)
        sizes = [shape.numel() for shape in self.shapes]
        blocks = (
            cells.unflatten(0, shape).transpose(1, 2) for cells, shape in zip(x.split(sizes), self.shapes, strict=True)
        )
        return [(next(blocks), [next(blocks) for _ in slots]) for slots in self.slots]


def split_by_length(rows: list[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """Split completions (prompt, start, length) into parts whose lengths differ by a factor of at most 2.

    If there is little padding, all completions form one part. If no completion has packed tokens, there is no part.
    """
    lengths = [length for _, _, length in rows]
    longest = max(lengths, default=0)
    if longest == 0:
        return []
    if longest * len(rows) - sum(lengths) <= MAX_PADDING:
        return [rows]
    parts: dict[int, list] = {}
    for row in rows:
        if row[2]:
            parts.setdefault(row[2].bit_length(), []).append(row)
    return [*parts.values()]


def index_tensor(values: list[int], device: torch.device | str) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.long), device)


class GroupAttention:
    """Attention for training, scoring and prefill, computed separately for prompts and completions.

    Args:
        keep_keys: whether to keep k and v of all layers for DecodeAttention.
    """

    def __init__(self, layout: PackedLayout, keep_keys: bool = False):
        self.layout = layout
        self.keep_keys = keep_keys
        self.keys: list[tuple[Tensor, Tensor]] = []
        # {layer index: prompt states (B, ...)} for recurrent layers
        self.layer_states: dict[int, list[Tensor]] = {}

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention (N, H, D) from q (N, H, D), k and v (N, K, D); q and k are already rotated."""
        if self.keep_keys:
            self.keys.append((k, v))
        layout = self.layout
        blocks = map(layout.blocks, (q, k, v))
        out = []
        for (prompt_q, queries), (prompt_k, keys), (prompt_v, values), slots in zip(*blocks, layout.slots, strict=True):
            out.append(dense_attention(prompt_q, prompt_k, prompt_v, is_causal=True))
            for row_q, row_k, row_v, part in zip(queries, keys, values, slots, strict=True):
                out.append(completion_attention(row_q, row_k, row_v, prompt_k, prompt_v, part))
        out = [x.transpose(1, 2).flatten(0, 1) for x in out]  # (rows * tokens, H, D) outputs per block
        out = torch.cat(out) if len(out) > 1 else out[0]
        return out if layout.in_order else Reorder.apply(out, layout.inverse)


class DecodeAttention:
    """Attention for decoding; completions share the keys and values of their prompt.

    Args:
        prompts: prefill attention, with stored keys and values (keep_keys=True).
        prompt_index: (R,) prompt index per completion, ascending, on the CPU.
        capacity: maximum new tokens per completion.
        start: (B,) first position id after the prompt.
    """

    check_every = 1  # decode steps between checks for finished rows
    # (rows, new tokens) for each call to a recurrent layer; tool results differ in length and need one call each
    spans: Sequence[tuple[slice, slice]] = ((slice(None), slice(None)),)

    def __init__(self, prompts: GroupAttention, prompt_index: Tensor, capacity: int, start: Tensor):
        lengths = prompts.layout.prompt_lengths
        first_keys = prompts.keys[0][0]
        self.device = first_keys.device
        # per layer: prompt keys and values (B, K, P, D); prompt_bias (B, P) is -inf at padding
        self.prompt_kv = []
        for layer in prompts.keys:
            padded = [pad_sequence(list(x.split(lengths)), batch_first=True) for x in layer]
            self.prompt_kv.append([x.transpose(1, 2).contiguous() for x in padded])
        self.prompt_bias = pad_sequence(
            [first_keys.new_zeros(n) for n in lengths], batch_first=True, padding_value=float("-inf")
        )
        self.masks_prompts = len(set(lengths)) > 1
        # per layer: completion keys and values (R, K, capacity, D); row_bias is -inf at unused positions
        R = len(prompt_index)
        _, K, D = first_keys.shape
        self.row_kv = [[x.new_zeros(R, K, capacity, D) for x in layer] for layer in prompts.keys]
        self.row_bias = first_keys.new_zeros(R, 1, 1, capacity)
        self.num_row_keys = 0  # number of completion keys in the longest row
        # whether rows have different lengths, as after tool responses
        self.masks_rows = False
        self.prompt_index = prompt_index
        self.slots = PromptSlots(prompt_index, len(lengths), self.device)
        self.rows = to_device(torch.arange(R), self.device)  # (R,) row index at the start of decoding
        self.start = start[self.slots.prompt_index]  # (R,)
        # (R,) KV cache position of the newest token
        self.newest = torch.full_like(self.rows, -1)
        self.layer_states = {i: [x[prompt_index] for x in states] for i, states in prompts.layer_states.items()}

    def select(self, unfinished: Tensor) -> Tensor | None:
        """Drop finished rows from the KV cache.

        Args:
            unfinished: (R,) bool, on the CPU.
        Returns:
            Indices of kept rows, None = all.
        """
        if unfinished.all():
            return None
        rows = unfinished.nonzero()[:, 0]
        # drop prompts without unfinished completions
        prompts, self.prompt_index = self.prompt_index[rows].unique_consecutive(return_inverse=True)
        self.slots = PromptSlots(self.prompt_index, len(prompts), self.device)
        rows = to_device(rows, self.device)
        # one layer at a time: a second copy of the KV cache may not fit in memory
        for layer in (*self.row_kv, *self.layer_states.values()):
            layer[:] = [x[rows] for x in layer]
        if len(prompts) < len(self.prompt_bias):
            prompts = to_device(prompts, self.device)
            self.prompt_bias = self.prompt_bias[prompts]
            for layer in self.prompt_kv:
                layer[:] = [x[prompts] for x in layer]
        self.rows = self.rows[rows]
        self.start = self.start[rows]
        self.newest = self.newest[rows]
        self.row_bias = self.row_bias[rows]
        return rows

    def advance(self, tokens: int | Tensor = 1, growth: int = 1):
        """Advance the KV cache position of each row's newest token.

        Args:
            tokens: new tokens per row, one number or (R,).
            growth: new tokens in the longest row.
        """
        self.num_row_keys += growth
        self.masks_rows = self.masks_rows or isinstance(tokens, Tensor) or tokens != growth
        capacity = self.row_bias.shape[-1]
        # clamp to the KV cache size: finished rows keep advancing until they are dropped
        self.newest.add_(tokens).clamp_(max=capacity - 1)
        if not self.masks_rows:
            return
        later = torch.arange(capacity, device=self.device) > self.newest[:, None]
        self.row_bias.zero_().masked_fill_(later[:, None, None], float("-inf"))

    def remember(self, layer_index: int, k: Tensor, v: Tensor) -> list[Tensor]:
        """Append keys and values to the KV cache; return those of all completion tokens so far."""
        R, K, D = k.shape
        index = self.newest.view(R, 1, 1, 1).expand(R, K, 1, D)
        for keys, new in zip(self.row_kv[layer_index], (k, v), strict=True):
            if self.masks_rows:
                keys.scatter_(2, index, new[:, :, None])
            else:
                keys[:, :, self.num_row_keys - 1] = new
        return [keys[:, :, : self.num_row_keys] for keys in self.row_kv[layer_index]]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention (R, H, D) for new tokens from q (R, H, D), k and v (R, K, D)."""
        R, H, D = q.shape
        K = k.shape[1]
        row_k, row_v = self.remember(layer_index, k, v)  # (R, K, C, D) completion keys and values
        prompt_k, prompt_v = self.prompt_kv[layer_index]  # (B, K, P, D) prompt keys and values
        q = q.view(R, K, H // K, D)
        prompt_bias = self.prompt_bias[:, None, None] if self.masks_prompts else None  # (B, 1, 1, P) score bias
        row_bias = self.row_bias[..., : self.num_row_keys] if self.masks_rows else None  # (R, 1, 1, C) score bias
        to_prompt = attention_scores(self.slots.by_prompt(q), prompt_k, prompt_bias)
        to_row = self.slots.by_prompt(attention_scores(q, row_k, row_bias))
        weights = torch.cat([to_prompt, to_row], dim=-1).softmax(-1).to(q.dtype)
        to_prompt, to_row = weights.split([to_prompt.shape[-1], to_row.shape[-1]], dim=-1)
        out = self.slots.by_row(to_prompt @ prompt_v)
        out = out + self.slots.by_row(to_row) @ row_v
        return out.reshape(R, H, D)


Attention = GroupAttention | DecodeAttention
