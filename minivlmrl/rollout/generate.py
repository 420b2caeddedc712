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


@dataclass
class Completion:
    """What the sampler drew for one row."""

    ids: Tensor  # (C,) int64, the stop token included when there is one
    logps: Tensor  # (C,) float32, nats: see sampler.sample
    stopped: bool  # ended with a stop token; False: cut at max_new_tokens


@torch.inference_mode()
def generate(
    model: Qwen2_5_VL,
    prompts: Sequence[Prompt],
    num_generations: int,
    params: SamplingConfig,
    stop_token_ids: Sequence[int],
    generator: torch.Generator | None = None,
) -> list[list[Completion]]:
    """Sample completions.

    Args:
        prompts: B of them, of any lengths and numbers of images.
        num_generations: completions for each prompt (G).
        stop_token_ids: a completion ends with the first of these; may be empty.
        generator: source of randomness, on the model's device; the same state gives the same completions.
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
    stop = torch.tensor(list(stop_token_ids), dtype=torch.long, device=device)
    running = torch.arange(len(owner), device=device)  # rows that have not ended, as numbers of all R rows
    drawn_ids = torch.zeros(len(owner), params.max_new_tokens, dtype=torch.long, device=device)
    drawn_logps = torch.zeros(len(owner), params.max_new_tokens, device=device)
    lengths = torch.full((len(owner),), params.max_new_tokens, device=device)
    stopped = torch.zeros(len(owner), dtype=torch.bool, device=device)
    for step in range(params.max_new_tokens):
        ids, logps = sample(logits, params, generator, seen)
        drawn_ids[running, step], drawn_logps[running, step] = ids, logps
        ended = torch.isin(ids, stop)
        if ended.any():
            lengths[running[ended]], stopped[running[ended]] = step + 1, True
            rest = (~ended).nonzero()[:, 0]
            running, ids = running[rest], ids[rest]
            if len(rest) == 0:
                break
            decode.keep(rest)
            seen = seen[rest] if seen is not None else None
        if step + 1 == params.max_new_tokens:
            break
        if seen is not None:
            seen[torch.arange(len(ids), device=device), ids] = True
        position_ids = (next_position[owner[running]] + step).expand(3, -1)
        hidden = model.model(model.model.embed_tokens(ids), position_ids, decode)  # (running rows, hidden_size)
        decode.advance()
        logits = model.lm_head(hidden)
    rows = zip(drawn_ids.cpu(), drawn_logps.cpu(), lengths.tolist(), stopped.tolist(), strict=True)
    completions = [Completion(ids[:n], logps[:n], end) for ids, logps, n, end in rows]
    return [completions[i : i + num_generations] for i in range(0, len(completions), num_generations)]


def _seen(batch, owner: Tensor, logits: Tensor) -> Tensor:
    """(R, V) bool: tokens of each row's prompt."""
    per_prompt = logits.new_zeros(len(batch.layout.prompt_lengths), logits.shape[-1], dtype=torch.bool)
    for row, ids in zip(per_prompt, batch.input_ids.split(batch.layout.prompt_lengths), strict=True):
        row[ids] = True
    return per_prompt[owner]
