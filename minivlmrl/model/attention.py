"""Who attends to whom. This file is the only place that knows; the decoder just calls the rule it is given.

    prompt tokens      attend causally to their prompt
    completion tokens  attend to their whole prompt and, causally, to their own completion
    nothing            attends to another group or another completion

so a prompt is computed once for all its completions, and every number equals that of separate rows.

Dimension letters: N tokens of the packed run, B groups, R completions of all groups, P prompt length, C completion
length, H query heads, K key/value heads, D head_dim. A "rule" is called as rule(layer_index, q, k, v) with q (N, H, D)
and k, v (N, K, D), rotary already applied, and returns (N, H, D).
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.kernels.window_attention import gather_rows


@dataclass
class Bucket:
    """Groups whose prompts have one length: their attention is two calls without any padding of prompts."""

    prompts: Tensor  # (b, P) place of each prompt token in the run
    completions: Tensor  # (r, C) place of each completion token; the tail of a shorter row repeats place 0
    owner: Tensor  # (r,) which of the b prompts a completion continues
    mask: Tensor  # (C, P + C) bool: completion token i sees the prompt and its own tokens 0..i


class GroupLayout:
    """Where the spans of a packed run lie: prompt 0, its completions, prompt 1, its completions, ...

    Args:
        prompt_lengths: tokens of each prompt, B of them.
        completion_lengths: for each prompt the tokens of its completions (may be an empty list).
    Attributes:
        predict_index: (M,) place of the token that predicts each completion token: the one before it, which for the
            first token of a completion is the last token of its prompt.
        completion_index: (M,) place of each completion token.
        last_index: (B,) place of the last token of each prompt.
        row_lengths: R lengths, completions of all groups in order; they sum to M.
    """

    def __init__(self, prompt_lengths: list[int], completion_lengths: list[list[int]], device="cpu"):
        self.prompt_lengths = prompt_lengths
        self.completion_lengths = completion_lengths
        self.row_lengths = [n for group in completion_lengths for n in group]
        self.prompt_starts, self.row_starts, place = [], [], 0
        for prompt_length, group in zip(prompt_lengths, completion_lengths, strict=True):
            self.prompt_starts.append(place)
            place += prompt_length
            for n in group:
                self.row_starts.append(place)
                place += n
        self.num_tokens = place
        last = torch.tensor([s + n - 1 for s, n in zip(self.prompt_starts, prompt_lengths, strict=True)])
        owner = torch.repeat_interleave(torch.tensor([len(group) for group in completion_lengths]))
        spans = [torch.arange(s, s + n) for s, n in zip(self.row_starts, self.row_lengths, strict=True)]
        before = [torch.cat([last[g : g + 1], span[:-1]]) for g, span in zip(owner.tolist(), spans, strict=True)]
        self.last_index = last.to(device)
        self.completion_index = _cat(spans).to(device)
        self.predict_index = _cat(before).to(device)
        self.buckets = [self._bucket(groups, owner, device) for groups in self._groups_by_prompt_length()]
        order = torch.cat([places for b in self.buckets for places in (b.prompts.flatten(), b.completions.flatten())])
        # padding of ragged completions repeats place 0, which is always a prompt token: the first match is the token
        self.inverse = _first_occurrence(order, self.num_tokens).to(device)

    def _groups_by_prompt_length(self) -> list[list[int]]:
        by_length = defaultdict(list)
        for group, length in enumerate(self.prompt_lengths):
            by_length[length].append(group)
        return list(by_length.values())

    def _bucket(self, groups: list[int], owner: Tensor, device) -> Bucket:
        P = self.prompt_lengths[groups[0]]
        prompts = torch.tensor([self.prompt_starts[g] for g in groups])[:, None] + torch.arange(P)
        local = {g: i for i, g in enumerate(groups)}
        rows = [r for r, g in enumerate(owner.tolist()) if g in local]
        C = max((self.row_lengths[r] for r in rows), default=0)
        completions = torch.zeros(len(rows), C, dtype=torch.long)
        for i, r in enumerate(rows):
            completions[i, : self.row_lengths[r]] = torch.arange(self.row_lengths[r]) + self.row_starts[r]
        own = torch.tensor([local[int(owner[r])] for r in rows], dtype=torch.long)
        mask = torch.ones(C, P + C, dtype=torch.bool).tril(P)
        return Bucket(prompts.to(device), completions.to(device), own.to(device), mask.to(device))


class GroupAttention:
    """The rule for training, scoring and prefill: two attention calls a layer and bucket.

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
        out = []
        for bucket in self.layout.buckets:
            # (b, P, heads, D) -> (b, heads, P, D)
            qp, kp, vp = (gather_rows(x, bucket.prompts).transpose(1, 2) for x in (q, k, v))
            o = F.scaled_dot_product_attention(qp, kp, vp, is_causal=True, enable_gqa=True)
            out.append(o.transpose(1, 2).flatten(0, 1))  # (b*P, H, D)
            if bucket.completions.numel():
                qc, kc, vc = (gather_rows(x, bucket.completions).transpose(1, 2) for x in (q, k, v))  # (r, heads, C, D)
                kc = torch.cat([gather_rows(kp, bucket.owner), kc], dim=2)  # (r, K, P + C, D)
                vc = torch.cat([gather_rows(vp, bucket.owner), vc], dim=2)
                out.append(_shared_key_attention(qc, kc, vc, bucket.mask).transpose(1, 2).flatten(0, 1))  # (r*C, H, D)
        return gather_rows(torch.cat(out), self.layout.inverse)


def _shared_key_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention with the query heads of one key head laid end to end: fewer, larger products.

    q (r, H, C, D), k and v (r, K, T, D), mask (C, T) -> (r, H, C, D). Query head i reads key head i // (H / K).
    """
    repeat, C = q.shape[1] // k.shape[1], q.shape[2]
    folded = q.unflatten(1, (-1, repeat)).flatten(2, 3)  # (r, K, repeat*C, D)
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask.repeat(repeat, 1))
    return out.unflatten(2, (repeat, C)).flatten(1, 2)


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
        starts = torch.tensor(layout.prompt_starts, device=owner.device)[:, None]
        inside = places < lengths[:, None]
        index = torch.where(inside, places + starts, 0)
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
        self.slot = (
            self.owner * self.slots + torch.arange(len(self.owner), device=self.owner.device) - first[self.owner]
        )

    def keep(self, rows: Tensor):
        """Keep only these rows (indices, ascending); prompts that nobody reads any more leave too."""
        self.own = [tuple(x[rows] for x in layer) for layer in self.own]
        prompts, self.owner = self.owner[rows].unique_consecutive(return_inverse=True)
        if len(prompts) < len(self.bias):
            self.prompt = [tuple(x[prompts] for x in layer) for layer in self.prompt]
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
        dense = x.new_zeros(len(self.bias) * self.slots, *x.shape[1:])
        dense[self.slot] = x
        return dense.unflatten(0, (-1, self.slots)).transpose(1, 2).flatten(2, 3)

    def _to_rows(self, x: Tensor) -> Tensor:
        """(B, K, slots*H/K, X) -> (R, K, H/K, X)."""
        return x.unflatten(2, (self.slots, -1)).transpose(1, 2).flatten(0, 1)[self.slot]


def _cat(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if tensors else torch.zeros(0, dtype=torch.long)


def _first_occurrence(order: Tensor, size: int) -> Tensor:
    """For each value 0..size-1 the first place in `order` that holds it."""
    places = torch.arange(len(order))
    return torch.full((size,), len(order)).scatter_reduce(0, order, places, "amin")
