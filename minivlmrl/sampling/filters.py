"""TODO."""

import torch
from torch import Tensor

from minivlmrl.run.config import SamplingConfig


def filter_logits(
    logits: Tensor, params: SamplingConfig, seen: Tensor | None = None, banned: Tensor | None = None
) -> Tensor:
    """Apply penalty, ban, temperature, top_k, top_p and min_p, in this order; what is dropped becomes -inf.

    With temperature 0 only penalty and ban: the others never drop the likeliest token, except for one of its equals.

    Args:
        logits: (R, V) float32.
        seen, banned: see sample.
    Returns:
        (R, V) float32, whose softmax is the distribution to draw from.
    Source: the logits processors of transformers' generate, bit for bit: same order, same treatment of ties.
    """
    scores = logits
    if params.repetition_penalty != 1:
        penalised = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
        scores = torch.where(seen, penalised, scores)
    if banned is not None:
        scores = scores.index_fill(1, banned, float("-inf"))
    if params.temperature == 0:
        return scores
    scores = scores / params.temperature
    if params.top_k:
        kth = scores.topk(min(params.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if params.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        drop[:, -1] = False  # the likeliest always stays
        scores = scores.masked_fill(drop.scatter(1, order, drop), float("-inf"))
    if params.min_p:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), float("-inf"))
    return scores
