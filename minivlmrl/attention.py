"""Who attends to whom. This file is the only place that knows; the decoder just calls the rule it is given.

    prompt tokens      attend causally to their prompt
    completion tokens  attend to their whole prompt and, causally, to their own completion
    nothing            attends to another group or another completion

so a prompt is computed once for all its completions, and every number equals that of separate rows.

The same rule is written twice. GroupAttention.two_calls, the usual one, says it by which keys it hands to torch's
scaled_dot_product_attention: on every device, with gradients, nothing to compile. MINIVLMRL_ATTENTION=flex says it as
a mask over the packed run for FlexAttention: one kernel without copies of the prompts' keys. That needs a GPU for
gradients and a minute of torch.compile at first, and neither its gradients nor its speed have been checked here.

Dimension letters: N tokens of the packed run, B groups, R completions of all groups, M their tokens, P length of a
prompt, C of a completion's span, H query heads, K key/value heads, D head_dim. A "rule" is called as
rule(layer_index, q, k, v) with q (N, H, D) and k, v (N, K, D), rotary already applied, and returns (N, H, D).
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivlmrl.kernels.dense_attention import dense_attention
from minivlmrl.kernels.window_attention import gather_rows

if TYPE_CHECKING:  # importing it takes seconds, for torch.compile's sake
    from torch.nn.attention.flex_attention import BlockMask


@dataclass
class Bucket:
    """Groups whose prompts have one length: their attention is two calls without any padding of prompts."""

    prompts: Tensor  # (b, P) place of each prompt token in the run
    completions: Tensor  # (r, C) place of each completion token; the tail of a shorter row repeats place 0
    owner: Tensor  # (r,) which of the b prompts a completion continues


class GroupLayout:
    """Where the spans of a packed run lie: prompt 0, its completions, prompt 1, its completions, ...

    The last token of a completion is predicted but predicts nothing, so it is not in the run: a completion of n tokens
    has a span of n - 1.

    Args:
        prompt_lengths: tokens of each prompt, B of them.
        completion_lengths: for each prompt the tokens of its completions, all of them (may be an empty list).
    Attributes:
        row_lengths: R lengths, completions of all groups in order; they sum to M.
        num_tokens: N.
        prompt_starts: (B,) place of the first token of each prompt.
        last_index: (B,) place of the last token of each prompt.
        predict_index: (M,) place of the token that predicts each completion token: the one before it, which for the
            first token of a completion is the last token of its prompt.
        completion_group, completion_offset: (M,) which prompt a completion token continues, and how many tokens of its
            completion stand before it.
        block_mask: for FlexAttention, if MINIVLMRL_ATTENTION asks for it, else None.
    """

    def __init__(self, prompt_lengths: list[int], completion_lengths: list[list[int]], device="cpu"):
        self.prompt_lengths = prompt_lengths
        self.row_lengths = [n for group in completion_lengths for n in group]
        prompt, row = torch.tensor(prompt_lengths), torch.tensor(self.row_lengths, dtype=torch.long)  # (B,), (R,)
        owner = torch.repeat_interleave(torch.tensor([len(group) for group in completion_lengths]))  # (R,)
        span = row - 1
        row_starts = prompt.cumsum(0)[owner] + span.cumsum(0) - span
        group_tokens = prompt.index_add(0, owner, span)
        prompt_starts = group_tokens.cumsum(0) - group_tokens
        last = prompt_starts + prompt - 1
        self.num_tokens = int(group_tokens.sum())

        token_row = torch.repeat_interleave(row)  # (M,)
        offset = torch.arange(len(token_row)) - (row.cumsum(0) - row)[token_row]
        predict = torch.where(offset == 0, last[owner[token_row]], row_starts[token_row] + offset - 1)
        self.prompt_starts, self.last_index = prompt_starts.to(device), last.to(device)
        self.predict_index = predict.to(device)
        self.completion_group, self.completion_offset = owner[token_row].to(device), offset.to(device)

        self.buckets = [
            _bucket(P, prompt, prompt_starts, span, row_starts, owner, device) for P in dict.fromkeys(prompt_lengths)
        ]
        order = torch.cat([places for b in self.buckets for places in (b.prompts.flatten(), b.completions.flatten())])
        # place 0, which fills up ragged completions, is a prompt's and comes first: so the first match is the token
        first = torch.full((self.num_tokens,), len(order), device=device)
        self.inverse = first.scatter_reduce(0, order, torch.arange(len(order), device=device), "amin")
        self.block_mask = None
        if _flex_wanted():
            inside = offset > 0  # what predicts these is a completion's own token, what predicts the others a prompt's
            row_of_token = torch.full((self.num_tokens,), -1).index_copy(0, predict[inside], token_row[inside])
            group_of_token = torch.repeat_interleave(group_tokens)
            self.block_mask = group_block_mask(group_of_token.to(device), row_of_token.to(device))


def _bucket(P: int, prompt, prompt_starts, span, row_starts, owner, device) -> Bucket:
    """The groups whose prompts have P tokens; the other arguments are those of GroupLayout.__init__."""
    groups = (prompt == P).nonzero()[:, 0]
    rows = (prompt[owner] == P).nonzero()[:, 0]
    C = int(span[rows].max()) if len(rows) else 0
    prompts = prompt_starts[groups][:, None] + torch.arange(P)
    inside = torch.arange(C) < span[rows][:, None]  # (r, C)
    completions = torch.where(inside, row_starts[rows][:, None] + torch.arange(C), 0)
    local_owner = torch.searchsorted(groups, owner[rows])
    return Bucket(prompts.to(device), completions.to(device), local_owner.to(device))


class GroupAttention:
    """The rule for training, scoring and prefill.

    Args:
        layout: the spans.
        keep_keys: remember k and v of every layer in `self.keys`, for decoding after a prefill.
    """

    def __init__(self, layout: GroupLayout, keep_keys: bool = False):
        self.layout = layout
        self.keys: list[tuple[Tensor, Tensor]] | None = [] if keep_keys else None

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.keys is not None:
            self.keys.append((k, v))
        if self.layout.block_mask is not None:
            return flex_group_attention(q, k, v, self.layout.block_mask)
        return self.two_calls(q, k, v)

    def two_calls(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Two attention calls for each length of prompts: prompts, and completions after their prompt's keys."""
        out = []
        for bucket in self.layout.buckets:
            # (b, P, heads, D) -> (b, heads, P, D)
            qp, kp, vp = (gather_rows(x, bucket.prompts).transpose(1, 2) for x in (q, k, v))
            o = dense_attention(qp, kp, vp, is_causal=True)
            out.append(o.transpose(1, 2).flatten(0, 1))  # (b*P, H, D)
            if bucket.completions.numel():
                qc, kc, vc = (gather_rows(x, bucket.completions).transpose(1, 2) for x in (q, k, v))  # (r, heads, C, D)
                kc = torch.cat([gather_rows(kp, bucket.owner), kc], dim=2)  # (r, K, P + C, D)
                vc = torch.cat([gather_rows(vp, bucket.owner), vc], dim=2)
                o = dense_attention(qc, kc, vc, is_causal=True)  # its last token sees all, the one before one less, ...
                out.append(o.transpose(1, 2).flatten(0, 1))  # (r*C, H, D)
        return gather_rows(torch.cat(out), self.layout.inverse)


def _flex_wanted() -> bool:
    wish = os.environ.get("MINIVLMRL_ATTENTION", "sdpa")
    if wish not in ("sdpa", "flex"):
        raise ValueError(f"MINIVLMRL_ATTENTION={wish}: write sdpa or flex")
    return wish == "flex"


def group_block_mask(group: Tensor, row: Tensor) -> "BlockMask":
    """The rule at the top of this file, for FlexAttention.

    Args:
        group: (N,) int64, the group of each token of the packed run.
        row: (N,) int64, its completion, -1 in a prompt.
    """

    def sees(batch, head, query, key):
        own = (row[key] < 0) | (row[key] == row[query])  # for a prompt's query both say: a prompt's key
        return (group[key] == group[query]) & own & (key <= query)

    from torch.nn.attention.flex_attention import create_block_mask

    N = len(group)
    return create_block_mask(sees, None, None, N, N, device=group.device)


def flex_group_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: "BlockMask") -> Tensor:
    """GroupAttention in one call. On CPU it has no gradients, and torch writes all N x N scores out."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, heads, N, D)
    return _flex(q.device.type)(q, k, v, block_mask=block_mask, enable_gqa=True)[0].transpose(0, 1)


@functools.cache
def _flex(device_type: str) -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # N is another one in every batch
    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention


class DecodeAttention:
    """The rule for generation: one new token per running completion, all reading their prompt's keys in one place.

    Rows are the running completions. A prompt's keys lie once in memory however many completions read them; the keys
    of a completion's own tokens lie in a buffer of `capacity` tokens. `keep(rows)` lets finished completions leave.

    Args:
        keys: per layer k, v (N, K, D) of the packed prompts, from GroupAttention(keep_keys=True).
        layout: the layout of that prefill (prompts only).
        owner: (R,) prompt of each completion, ascending.
        capacity: most new tokens a completion can get.
    """

    def __init__(self, keys: list[tuple[Tensor, Tensor]], layout: GroupLayout, owner: Tensor, capacity: int):
        lengths = torch.tensor(layout.prompt_lengths, device=owner.device)
        places = torch.arange(int(lengths.max()), device=owner.device).expand(len(lengths), -1)  # (B, P)
        inside = places < lengths[:, None]
        index = torch.where(inside, places + layout.prompt_starts[:, None], 0)
        # (B, K, P, D) once per prompt; shorter prompts are padded here and masked below
        self.prompt = [tuple(x[index].transpose(1, 2).contiguous() for x in layer) for layer in keys]
        self.bias = torch.zeros(inside.shape, dtype=keys[0][0].dtype, device=owner.device)
        self.bias.masked_fill_(~inside, float("-inf"))  # (B, P)
        _, K, D = keys[0][0].shape
        self.own = [tuple(k.new_empty(len(owner), K, capacity, D) for _ in range(2)) for k, _ in keys]
        self.owner = owner
        self.length = 0  # tokens in `own`
        self._place_rows()

    def _place_rows(self):
        """Give each row a slot (group, rank in its group): prompts then meet their rows as one dense block."""
        counts = torch.bincount(self.owner, minlength=len(self.bias))
        first = counts.cumsum(0) - counts
        self.slots = int(counts.max())
        rows = torch.arange(len(self.owner), device=self.owner.device)
        self.slot = self.owner * self.slots + rows - first[self.owner]
        self.full = len(rows) == len(counts) * self.slots  # then the slots are just the rows in order

    def keep(self, rows: Tensor):
        """Keep only these rows (indices, ascending); prompts that nobody reads any more leave too."""
        for number, layer in enumerate(self.own):  # one after the other: never two copies of the whole cache
            self.own[number] = tuple(x[rows] for x in layer)
        prompts, self.owner = self.owner[rows].unique_consecutive(return_inverse=True)
        if len(prompts) < len(self.bias):
            for number, layer in enumerate(self.prompt):
                self.prompt[number] = tuple(x[prompts] for x in layer)
            self.bias = self.bias[prompts]
        self._place_rows()

    def advance(self):
        """Call once after all layers have seen the new tokens."""
        self.length += 1

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (R, H, D), K = q.shape, k.shape[1]
        own_k, own_v = self.own[layer_index]
        own_k[:, :, self.length], own_v[:, :, self.length] = k, v
        own_k, own_v = own_k[:, :, : self.length + 1], own_v[:, :, : self.length + 1]  # (R, K, T, D)
        prompt_k, prompt_v = self.prompt[layer_index]
        q = (q * D**-0.5).view(R, K, H // K, D)
        prompt_scores = self._to_slots(q) @ prompt_k.mT + self.bias[:, None, None]  # (B, K, slots*H/K, P)
        scores = torch.cat([self._to_rows(prompt_scores), q @ own_k.mT], dim=-1)  # (R, K, H/K, P + T)
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        to_prompt, to_own = weights.split([prompt_k.shape[2], self.length + 1], dim=-1)
        out = self._to_rows(self._to_slots(to_prompt) @ prompt_v) + to_own @ own_v
        return out.reshape(R, H, D)

    def _to_slots(self, x: Tensor) -> Tensor:
        """(R, K, H/K, X) -> (B, K, slots*H/K, X)."""
        if not self.full:
            x = x.new_zeros(len(self.bias) * self.slots, *x.shape[1:]).index_copy_(0, self.slot, x)
        return x.unflatten(0, (-1, self.slots)).transpose(1, 2).flatten(2, 3)

    def _to_rows(self, x: Tensor) -> Tensor:
        """(B, K, slots*H/K, X) -> (R, K, H/K, X)."""
        x = x.unflatten(2, (self.slots, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.full else x[self.slot]
