"""Who attends to whom. The decoder does not know; it calls the attention that it is given.

    prompt tokens      attend causally to their prompt
    completion tokens  attend to their whole prompt and, causally, to their own completion
    nothing            attends to another group or to another completion

So a prompt is computed once for all its completions, and every number equals that of separate rows.
`visible` writes this as a mask. GroupAttention needs no mask: one call for prompts, one for
completions, each with exactly the keys that it may see.

Dimension letters: N tokens of the packed run, B groups, R completions of all groups, M their
tokens, P tokens of a prompt, C of a completion, H query heads, K key/value heads, D head_dim.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import Reorder, attention_scores, dense_attention
from minivlmrl.kernels.shared_prefix import PromptSlots, completion_attention, rectangles


class GroupLayout:
    """Where the spans of a packed run are: prompt 0, its completions, prompt 1, its completions ...

    The last token of a completion predicts nothing, so it is not in the run: n tokens span n - 1.

    Args:
        prompt_lengths: tokens of each of the B prompts.
        completion_lengths: for each prompt the tokens of each of its completions.
        rows: of each completion the row that it is a part of, as the turns of a trajectory are.
    """

    def __init__(
        self, prompt_lengths: list[int], completion_lengths: list[list[int]],
        device: torch.device | str = "cpu", rows: Sequence[int] | None = None,
    ):  # fmt: skip
        self.prompt_lengths = prompt_lengths
        lengths = list(chain(*completion_lengths))
        rows = rows or range(len(lengths))
        self.row_lengths = [0] * len(set(rows))  # R
        cells = []  # of each completion token its row, and how many are before it there
        for row, n in zip(rows, lengths, strict=True):
            start = self.row_lengths[row]
            self.row_lengths[row] += n
            cells += [(row, i) for i in range(start, start + n)]
        T = max(self.row_lengths, default=0)
        self.prompt_spans = []
        self.completion_spans = []
        end = 0
        for prompt_length, group in zip(prompt_lengths, completion_lengths, strict=True):
            self.prompt_spans.append(range(end, end + prompt_length))
            end += prompt_length
            spans = []
            for n in group:
                spans.append(range(end, end + n - 1))
                end += n - 1
            self.completion_spans.append(spans)
        self.num_tokens = end  # N
        # (B,) the last token of each prompt; (M,) what predicts each token; (M,) in a flat (R, T)
        self.last_index = index_tensor([span[-1] for span in self.prompt_spans], device)
        self.predict_index = index_tensor(self.predicting_tokens(), device)
        self.row_index = index_tensor([row * T + i for row, i in cells], device)
        blocks, self.slots = self.lay_blocks(device)
        self.shapes = [block.shape for block in blocks]
        # the token in each cell of the blocks, laid end to end; -1: the cell is empty
        order = torch.cat([block.flatten() for block in blocks])
        filled = order >= 0
        inverse = torch.empty(self.num_tokens, dtype=torch.long)  # (N,): the cell of each token
        inverse[order[filled]] = filled.nonzero()[:, 0]
        self.in_order = torch.equal(order, torch.arange(self.num_tokens))
        self.order = to_device(order.clamp(min=0), device)
        self.inverse = to_device(inverse, device)

    def predicting_tokens(self) -> list[int]:
        """List the token that predicts each completion token: the one before it in its row.

        For the first token of a completion this is the last token of its prompt.
        """
        tokens = []
        for prompt_span, spans in zip(self.prompt_spans, self.completion_spans, strict=True):
            for span in spans:
                tokens += [prompt_span[-1], *span]
        return tokens

    def lay_blocks(
        self, device: torch.device | str
    ) -> tuple[list[Tensor], list[PromptSlots | None]]:
        """Lay out prompts (b, P) and completions (r, C) of each length of prompts.

        Returns the blocks, whose cells have indices of tokens in the run, and for each length the
        slots of its completions, None where no completion has a token in the run.
        """
        blocks = []
        slots = []
        for length in dict.fromkeys(self.prompt_lengths):
            same = [i for i, other in enumerate(self.prompt_lengths) if other == length]
            prompt_block, completion_block, prompt_index = rectangles(
                [self.prompt_spans[i] for i in same], [self.completion_spans[i] for i in same]
            )
            blocks += [prompt_block, completion_block]
            is_empty = completion_block.numel() == 0
            slots.append(None if is_empty else PromptSlots(prompt_index, len(same), device))
        return blocks, slots

    def blocks(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(N, H, D) -> prompts (b, H, P, D), completions (r, H, C, D), of each prompt length."""
        if not self.in_order:
            x = Reorder.apply(x, self.order, self.inverse)
        sizes = [shape.numel() for shape in self.shapes]
        cells_and_shapes = zip(x.split(sizes), self.shapes, strict=True)
        blocks = [cells.unflatten(0, shape).transpose(1, 2) for cells, shape in cells_and_shapes]
        return list(zip(blocks[::2], blocks[1::2], strict=True))


def index_tensor(values: list[int], device: torch.device | str) -> Tensor:
    """Make an int64 tensor on a device, of no values too."""
    return to_device(torch.tensor(values, dtype=torch.long), device)


def visible(layout: GroupLayout) -> Tensor:
    """Write down the rule at the top of this file: (N, N) bool, token i attends to token j."""
    tokens = []  # (group, 0 for its prompt or the number of its completion) of each token
    for number, prompt_span in enumerate(layout.prompt_spans):
        for row, span in enumerate([prompt_span, *layout.completion_spans[number]]):
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
        self.keep_keys = keep_keys
        self.keys: list[tuple[Tensor, Tensor]] = []
        # what each recurrent layer, by its index, keeps of each prompt: see families/qwen3_5.py
        self.memory: dict[int, list[Tensor]] = {}

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (N, H, D), k and v (N, K, D), all after the rotary -> (N, H, D)."""
        if self.keep_keys:
            self.keys.append((k, v))
        layout = self.layout
        blocks = [layout.blocks(x) for x in (q, k, v)]
        blocks_and_slots = zip(*blocks, layout.slots, strict=True)
        out = []
        for (prompt_q, row_q), (prompt_k, row_k), (prompt_v, row_v), slots in blocks_and_slots:
            out.append(dense_attention(prompt_q, prompt_k, prompt_v, is_causal=True))
            if slots is not None:
                out.append(completion_attention(row_q, row_k, row_v, prompt_k, prompt_v, slots))
        out = [x.transpose(1, 2).flatten(0, 1) for x in out]  # each (rows * tokens, H, D)
        out = torch.cat(out) if len(out) > 1 else out[0]
        return out if layout.in_order else Reorder.apply(out, layout.inverse)


class DecodeAttention:
    """The attention of generation: a new token of each row, to its prompt's keys and to its own.

    Args:
        prompts: of a prefill of prompts alone, GroupAttention(layout, keep_keys=True).
        prompt_index: (R,) prompt of each completion, ascending, on the host.
        capacity: most new tokens that a completion can get.
        start: (B,) position of the first token after each prompt.
    """

    check_every = 1  # after so many steps `generate` asks which rows have ended
    # rows, and which of the new tokens are theirs
    spans: Sequence[tuple[slice, slice]] = ((slice(None), slice(None)),)
    generate_for_rows: Sequence[
        int
    ] = ()  # rows that read answers of tools, see agents/tool_sampler.py

    def __init__(self, prompts: GroupAttention, prompt_index: Tensor, capacity: int, start: Tensor):
        lengths = prompts.layout.prompt_lengths
        first_keys = prompts.keys[0][0]
        self.device = first_keys.device
        # keys and values of the prompts in each layer, (B, K, P, D). A shorter prompt has zeros at
        # its end, which prompt_bias (B, P) hides: 0 for its tokens, -inf after them
        self.prompt_kv = []
        for layer in prompts.keys:
            padded = [pad_sequence(list(x.split(lengths)), batch_first=True) for x in layer]
            self.prompt_kv.append([x.transpose(1, 2).contiguous() for x in padded])
        zeros = [first_keys.new_zeros(n) for n in lengths]
        self.prompt_bias = pad_sequence(zeros, batch_first=True, padding_value=float("-inf"))
        # and of the completions, (R, K, capacity, D); row_bias is -inf after the newest token
        R = len(prompt_index)
        (_, K, D) = first_keys.shape
        self.row_kv = [[x.new_zeros(R, K, capacity, D) for x in layer] for layer in prompts.keys]
        self.row_bias = first_keys.new_zeros(R, 1, 1, capacity)
        self.own_keys = 0  # how many of them a step reads: as many as the longest row has
        self.prompt_index = prompt_index
        self.slots = PromptSlots(prompt_index, len(lengths), self.device)
        self.rows = to_device(torch.arange(R), self.device)  # (R,) number of each row that is left
        self.start = start[self.slots.prompt_index]  # (R,) position of each row's first token
        self.newest = torch.full_like(self.rows, -1)  # (R,) where in row_kv its last token is
        self.memory = {i: [x[prompt_index] for x in kept] for i, kept in prompts.memory.items()}

    def select(self, going_on: Tensor) -> Tensor | None:
        """Keep the rows that go on, (R,) bool on the host; returns their indices, None for all."""
        if going_on.all():
            return None
        rows = going_on.nonzero()[:, 0]
        # prompts: those that still have a row; prompt_index: each row's prompt among these
        prompts, self.prompt_index = self.prompt_index[rows].unique_consecutive(return_inverse=True)
        self.slots = PromptSlots(self.prompt_index, len(prompts), self.device)
        rows = to_device(rows, self.device)
        for layer in (*self.row_kv, *self.memory.values()):  # in turn: never two copies of all
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
        """Make room for new tokens of each row; growth: how many more the longest row then has."""
        self.own_keys += growth
        capacity = self.row_bias.shape[-1]
        self.newest.add_(tokens).clamp_(max=capacity - 1)  # a row that has ended may run on
        later = torch.arange(capacity, device=self.device) > self.newest[:, None]
        self.row_bias.zero_().masked_fill_(later[:, None, None], float("-inf"))

    def remember(self, layer_index: int, k: Tensor, v: Tensor) -> list[Tensor]:
        """Add the new tokens' k, v (R, K, D) to those before: each (R, K, C, D)."""
        (R, K, D) = k.shape
        index = self.newest.view(R, 1, 1, 1).expand(R, K, 1, D)
        for keys, new in zip(self.row_kv[layer_index], (k, v), strict=True):
            keys.scatter_(2, index, new[:, :, None])
        return [keys[:, :, : self.own_keys] for keys in self.row_kv[layer_index]]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (R, H, D) = q.shape
        K = k.shape[1]
        row_k, row_v = self.remember(layer_index, k, v)  # (R, K, C, D)
        prompt_k, prompt_v = self.prompt_kv[layer_index]  # (B, K, P, D)
        q = q.view(R, K, H // K, D)
        # all rows of a prompt are queries of one product with its keys
        prompt_bias = self.prompt_bias[:, None, None]  # (B, 1, 1, P)
        row_bias = self.row_bias[..., : self.own_keys]  # (R, 1, 1, C)
        to_prompt = attention_scores(self.slots.by_prompt(q), prompt_k, prompt_bias)
        to_row = self.slots.by_prompt(attention_scores(q, row_k, row_bias))
        weights = torch.cat([to_prompt, to_row], dim=-1).softmax(-1).to(q.dtype)
        to_prompt, to_row = weights.split([prompt_k.shape[2], row_k.shape[2]], dim=-1)
        out = self.slots.by_row(to_prompt @ prompt_v) + self.slots.by_row(to_row) @ row_v
        return out.reshape(R, H, D)


Attention = GroupAttention | DecodeAttention  # what the layers of the decoder call
