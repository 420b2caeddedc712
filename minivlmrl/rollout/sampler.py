"""Logits -> the next token, by settings that are all written down in one place."""

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from minivlmrl.config import SamplingConfig

UNITS = 2**52  # to a probability of 1: sums of them stay below 2^53, where float64 still counts every one


def sample(
    logits: Tensor,
    params: SamplingConfig,
    generator: torch.Generator | None,
    seen: Tensor | None = None,
    banned: Tensor | None = None,
    uniform: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: (R, V) of the model, any float dtype.
        seen: (R, V) bool, tokens in each row's prompt and completion so far; needed with a repetition penalty.
        banned: ids that are not to be drawn.
        uniform: (R,) float64 in [0, 1), what each row draws by, instead of the generator.
    Returns:
        ids (R,) int64.
        logps (R,) float32, nats, under softmax(logits / temperature): what a scorer of the policy computes. The
            filters and the penalty change which token is drawn, not this number. With temperature 0 it is taken at 1.
    """
    logits = logits.float()
    scaled = logits / (params.temperature or 1.0)
    scores = filter_logits(logits, params, seen, banned)
    if params.temperature == 0:
        ids = scores.argmax(-1)
    elif uniform is not None:
        ids = draw(scores.softmax(-1), uniform)
    else:
        ids = torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]
    return ids, scaled.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Take the first token at which the cumulative probability exceeds the row's number.

    Probabilities are counted in whole units of 2^-52, which add up exactly in any order and on any device: a token of
    probability 0 is never drawn, and a row's draw has nothing to do with the rows beside it.

    Args:
        probs: (R, V) float32, rows that sum to about 1.
        uniform: (R,) float64 in [0, 1).
    Returns:
        (R,) int64. Of a row that is not finite any token.
    """
    units = probs.double().mul_(UNITS).long().cumsum(-1)  # (R, V)
    # number * total, rounded down, is below the total: so there is a token behind it
    place = (uniform * units[:, -1]).long()
    return torch.searchsorted(units, place[:, None], right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def uniforms(keys: Sequence[str], num_generations: int, max_new_tokens: int) -> Tensor:
    """Numbers to draw completions by, which depend on nothing but the key of each prompt.

    Args:
        keys: B texts, different for everything that is to be drawn independently.
    Returns:
        (B, num_generations, max_new_tokens) float64 in [0, 1).
    """
    numbers = numpy.empty((len(keys), num_generations, max_new_tokens))
    for key, own in zip(keys, numbers, strict=True):
        random_numbers(key).random(out=own)
    return torch.from_numpy(numbers)


def random_numbers(key: str) -> numpy.random.Generator:
    """A source of random numbers that a text stands for; others start elsewhere (128 bits are mixed from the text)."""
    return numpy.random.default_rng(list(key.encode()))


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
