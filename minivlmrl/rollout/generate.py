"""Prompts -> completions: every prompt is read once, all its completions are decoded together against its keys."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.config import SamplingConfig
from minivlmrl.data.processor import Prompt
from minivlmrl.model.attention import DecodeAttention, GroupAttention
from minivlmrl.model.batch import pack
from minivlmrl.model.qwen2_5_vl import Qwen2_5_VL
from minivlmrl.rollout.sampler import sample
from minivlmrl.training.distributed import World


@dataclass
class Completion:
    """What the sampler drew for one row."""

    ids: Tensor  # (C,) int64, the stop token included when there is one
    logps: Tensor  # (C,) float32, nats: see sampler.sample
    stopped: bool  # ended with a stop token; False: cut at max_new_tokens


@torch.no_grad()
def generate(
    model: Qwen2_5_VL,
    prompts: Sequence[Prompt],
    num_generations: int,
    params: SamplingConfig,
    stop_token_ids: Sequence[int],
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
    pace: World | None = None,
) -> list[list[Completion]]:
    """Sample completions.

    Args:
        prompts: B of them, of any lengths and numbers of images.
        num_generations: completions for each prompt (G).
        stop_token_ids: a completion ends with the first of these; may be empty.
        generator: source of randomness, on the model's device; the same state gives the same completions.
        uniforms: (B, G, max_new_tokens) float64 in [0, 1), what each token is drawn by, instead of the generator:
            then a completion does not depend on what is generated beside it. See sampler.uniforms.
        pace: the ranks, where weights are sharded and gathered layer by layer: all have to call this, and whose
            completions have ended goes on with a token that means nothing until all have.
    Returns:
        B lists of G completions.
    Raises:
        FloatingPointError: the logits are not finite.
    """
    device = model.lm_head.weight.device
    batch = pack(prompts, [[] for _ in prompts], model.config, device)
    prefill = GroupAttention(batch.layout, keep_keys=True)
    hidden = model(batch, prefill, batch.layout.last_index)  # (B, hidden_size)
    owner = torch.arange(len(prompts), device=device).repeat_interleave(num_generations)  # (R,)
    decode = DecodeAttention(prefill.keys, batch.layout, owner, capacity=params.max_new_tokens)
    next_position = torch.stack([p.max() + 1 for p in batch.position_ids.split(batch.layout.prompt_lengths, dim=1)])

    logits = model.lm_head(hidden)[owner]  # (R, V)
    if not logits.isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    seen = _seen(batch, owner, logits) if params.repetition_penalty != 1 else None
    drawn = _Drawn(len(owner), params.max_new_tokens, stop_token_ids, device)
    uniforms = None if uniforms is None else uniforms.flatten(0, 1).to(device)  # (R, max_new_tokens)
    for step in range(params.max_new_tokens):
        uniform = None if uniforms is None else uniforms[drawn.running, step]
        ids, logps = sample(logits, params, generator, seen, uniform)
        rest = drawn.record(ids, logps)
        if len(drawn.running) == 0 or step + 1 == params.max_new_tokens:
            break
        if rest is not None:  # finished rows leave
            decode.keep(rest)
            ids, seen = ids[rest], seen[rest] if seen is not None else None
        if seen is not None:
            seen[torch.arange(len(ids), device=device), ids] = True
        if pace is not None:
            pace.sum(1)  # this rank goes on
        position_ids = (next_position[owner[drawn.running]] + step).expand(3, -1)
        hidden = model.model(model.model.embed_tokens(ids), position_ids, decode)  # (running rows, hidden_size)
        decode.advance()
        logits = model.lm_head(hidden)
    if pace is not None:
        _keep_pace(model, pace)
    if not drawn.logps.isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    completions = drawn.completions()
    return [completions[i : i + num_generations] for i in range(0, len(completions), num_generations)]


def _keep_pace(model: Qwen2_5_VL, pace: World):
    """Run the decoder as long as any rank needs its weights."""
    device = model.lm_head.weight.device
    token, position_ids = torch.zeros(1, dtype=torch.long, device=device), torch.zeros(3, 1, device=device)
    while pace.sum(0)[0]:
        model.model(model.model.embed_tokens(token), position_ids, lambda layer_index, q, k, v: q)


class _Drawn:
    """What has been drawn for each of R rows, and which rows still run."""

    def __init__(self, rows: int, capacity: int, stop_token_ids: Sequence[int], device: torch.device):
        self.stop = torch.tensor(list(stop_token_ids), dtype=torch.long, device=device)
        self.running = torch.arange(rows, device=device)  # numbers of the rows that have not ended
        self.ids = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.logps = torch.zeros(rows, capacity, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self.step = 0

    def record(self, ids: Tensor, logps: Tensor) -> Tensor | None:
        """Note a token for each running row; which of these rows go on (indices), or None if all do."""
        self.ids[self.running, self.step], self.logps[self.running, self.step] = ids, logps
        self.step += 1
        self.lengths[self.running] = self.step
        ended = torch.isin(ids, self.stop)
        if not ended.any():
            return None
        self.stopped[self.running[ended]] = True
        rest = (~ended).nonzero()[:, 0]
        self.running = self.running[rest]
        return rest

    def completions(self) -> list[Completion]:
        rows = zip(self.ids.cpu(), self.logps.cpu(), self.lengths.tolist(), self.stopped.tolist(), strict=True)
        return [Completion(ids[:n], logps[:n], stopped) for ids, logps, n, stopped in rows]


def _seen(batch, owner: Tensor, logits: Tensor) -> Tensor:
    """(R, V) bool: tokens of each row's prompt."""
    per_prompt = logits.new_zeros(len(batch.layout.prompt_lengths), logits.shape[-1], dtype=torch.bool)
    for row, ids in zip(per_prompt, batch.input_ids.split(batch.layout.prompt_lengths), strict=True):
        row[ids] = True
    return per_prompt[owner]
