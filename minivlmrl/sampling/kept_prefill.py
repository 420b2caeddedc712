"""A policy whose prompts are computed once for sampling and for the training step that follows.

While the policy has not moved, the forward of training repeats what the prefill of sampling has computed. KeptPrefill
runs the prefill with gradient, before sampling, and is the policy twice: to `generate` it gives what it has
computed, and of the packed run of training it computes the completions alone, from the prompts' keys. The gradients
flow back through these keys into the prompts and images, and are exactly those of the whole run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minivlmrl.attention import GroupAttention, GroupLayout
from minivlmrl.batch import GroupBatch, pack
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.dense_attention import gather_rows
from minivlmrl.kernels.prompt_slots import after_prompt
from minivlmrl.rows import Prompt
from minivlmrl.sampling.frozen_tower import see_once


def keep_prefill(algorithm, prompts: Sequence[Prompt]):
    """The policy to sample with: a KeptPrefill if it pays, or the policy as it is.

    It pays in one case, the usual one on one device: the rollout is trained on once and in one micro-batch. The keys of
    several micro-batches would be in memory together, sharded weights and recomputed blocks would be gathered and
    computed again anyway.
    """
    policy, config, run = algorithm.policy, algorithm.config, algorithm.run
    see_once(algorithm, prompts)
    trained_once = algorithm.stage == "grpo" and algorithm.on_policy and not run.model.activation_checkpointing
    budgets = run.sampling.max_tokens_at_once, config.max_tokens_per_micro_batch
    if not trained_once or len(prompts) > config.micro_batch_size or budgets != (None, None):
        return policy
    if hasattr(policy, "sharding") or run.adapter.dropout:  # of which sampling has none
        return policy
    return KeptPrefill(policy, prompts, algorithm.world.device)


class KeptPrefill:
    """The policy, as `generate` and `per_token_logps` use one; for the first run of training it needs no prompts."""

    def __init__(self, policy: nn.Module, prompts: Sequence[Prompt], device):
        self.policy = policy
        self.prompts = pack(prompts, [[] for _ in prompts], policy.config, device)
        attention = GroupAttention(self.prompts.layout, keep_keys=True)
        self.last = policy(self.prompts, attention, self.prompts.layout.last_index)  # (B, hidden_size)
        self.keys = attention.keys

    def __getattr__(self, name: str):
        return getattr(self.policy, name)

    def __call__(self, batch: GroupBatch, attention: GroupAttention | None = None, select: Tensor | None = None):
        """Hidden states (S, hidden_size) of the selected tokens, as Qwen2_5_VL.forward."""
        if attention is not None:  # a prefill
            attention.keys += [(k.detach(), v.detach()) for k, v in self.keys]
            return self.last.detach()
        alone = self.keys is None or not torch.is_grad_enabled() or max(batch.layout.row_lengths) == 1
        if alone or batch.layout.prompt_lengths != self.prompts.layout.prompt_lengths:
            return self.policy(batch, select=select)
        tokens, place = completion_tokens(batch.layout, select.device)
        hidden = self.policy.model(
            self.policy.model.embed_tokens(batch.input_ids[tokens]), batch.position_ids[:, tokens],
            CompletionAttention(self, batch.layout, place),
        )  # fmt: skip
        states = gather_rows(torch.cat([self.last, hidden]), place[select])
        self.keys = self.last = self.prompts = None  # their graph is used up by the backward
        return states


def completion_tokens(layout: GroupLayout, device) -> tuple[Tensor, Tensor]:
    """Where completions are.

    Returns:
        tokens (n,), the indices in the run of the tokens of completions;
        place (N,): for the last token of prompt b it is b, for completion token i of these n it is B + i.
    """
    tokens, place, end = [], torch.zeros(layout.num_tokens, dtype=torch.long), 0
    for group, (prompt, completions) in enumerate(zip(layout.prompt_lengths, layout.completion_lengths, strict=True)):
        end += prompt
        place[end - 1] = group
        begin, end = end, end + sum(completions) - len(completions)
        tokens += range(begin, end)
    tokens = torch.tensor(tokens)
    place[tokens] = torch.arange(len(tokens)) + len(layout.prompt_lengths)
    return to_device(tokens, device), to_device(place, device)


class CompletionAttention:
    """GroupAttention of the completions alone, with their prompts' keys from a KeptPrefill."""

    def __init__(self, kept: KeptPrefill, layout: GroupLayout, place: Tensor):
        self.keys, self.prompts, prompts = kept.keys, kept.prompts.layout.buckets, len(layout.prompt_lengths)
        self.slots, count = [bucket.slots for bucket in layout.buckets], layout.num_tokens - sum(layout.prompt_lengths)
        # (r, C) index of each token among those of completions; negative after the end of a shorter one
        indices = [place[bucket.completions] - prompts for bucket in layout.buckets]
        self.completions = [index.clamp(min=0) for index in indices]
        order = torch.cat([index.flatten() for index in indices])
        inverse = torch.empty(count + 1, dtype=torch.long, device=place.device)
        self.inverse = inverse.index_copy(0, order.where(order >= 0, count), torch.arange(len(order)).to(order))[:count]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        prompt_keys, out, alone = self.keys[layer_index], [], len(self.slots) == 1
        for prompts, completions, slots in zip(self.prompts, self.completions, self.slots, strict=True):
            if completions.numel():
                kp, vp = (gather_rows(x, prompts.prompts, alone).transpose(1, 2) for x in prompt_keys)
                qc, kc, vc = (gather_rows(x, completions, alone).transpose(1, 2) for x in (q, k, v))
                out.append(after_prompt(qc, kc, vc, kp, vp, slots).transpose(1, 2).flatten(0, 1))
        return gather_rows(torch.cat(out) if out[1:] else out[0], self.inverse, alone)
