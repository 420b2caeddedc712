"""Logits -> the next token, by settings that are all written down in one place."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SamplingParams:
    """How completions are drawn. Nothing is read from a checkpoint's generation_config.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens (ties with the k-th stay); 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the likeliest; 0 keeps all.
        repetition_penalty: logits of tokens already in prompt or completion are divided (positive) or multiplied
            (negative) by it; 1 changes nothing.
        max_new_tokens: a completion that has not stopped by then is cut.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 256

    def __post_init__(self):
        for name, valid, bounds in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "over 0"),
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
        ):
            if not valid:
                raise ValueError(f"sampling: {name} is {getattr(self, name)}, it must be {bounds}")


def sample(
    logits: Tensor, params: SamplingParams, generator: torch.Generator | None, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: (R, V) of the model, any float dtype.
        seen: (R, V) bool, tokens in each row's prompt and completion so far; needed with a repetition penalty.
    Returns:
        ids (R,) int64.
        logps (R,) float32, nats, under softmax(logits / temperature): what a scorer of the policy computes. The
            filters and the penalty change which token is drawn, not this number. With temperature 0 it is taken at 1.
    """
    logits = logits.float()
    scaled = logits / (params.temperature or 1.0)
    scores = filter_logits(logits, params, seen)
    if params.temperature == 0:
        ids = scores.argmax(-1)
    else:
        ids = torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]
    return ids, scaled.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def filter_logits(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Apply penalty, temperature, top_k, top_p and min_p, in this order; what is dropped becomes -inf.

    Args:
        logits: (R, V) float32.
    Returns:
        (R, V) float32, whose softmax is the distribution to draw from.
    Source: the logits processors of transformers' generate, same order, same treatment of ties.
    """
    scores = logits
    if params.repetition_penalty != 1:
        penalised = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
        scores = torch.where(seen, penalised, scores)
    scores = scores / (params.temperature or 1.0)
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
