"""Prompts -> completions: every prompt is read once, its completions are decoded together.

    prefill    one forward over all prompts; the keys and values of each prompt are kept once
    decode     a new token of each running completion, against its prompt's keys and its own
    draw       temperature -> softmax -> a token, by numbers that depend on the prompt's key alone

Dimension letters: B prompts, G completions of each, R = B * G rows, r running rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy
import torch
from torch import Tensor

from minivlmrl.attention import DecodeAttention, GroupAttention
from minivlmrl.batch import GroupBatch, pack
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.rows import Processor, Prompt

UNITS = 2**52  # to a probability of 1: their sums stay below 2^53, where float64 is exact


@dataclass
class SamplingConfig:
    """How completions are drawn and where they end; more options are in sampling/filters.py."""

    temperature: Annotated[float, ">= 0"] = 1.0  # divides the logits; 0 takes the likeliest token
    max_new_tokens: Annotated[int, ">= 1"] = 256  # a completion is cut there
    stop_token_ids: list[Annotated[int, ">= 0"]] | None = None  # default <|im_end|>, <|endoftext|>

    filtered = False  # a subclass with filters or other limits says True
    max_tokens_at_once = None  # and how many it draws at a time


@dataclass
class Completion:
    """What was drawn for one row."""

    ids: Tensor  # (C,) int64, with the token that it stopped at
    logps: Tensor  # (C,) float32, nats, under softmax(logits / temperature); at temperature 0: of 1
    stopped: bool  # by a stop token or stop string; False: cut, for example at max_new_tokens


def sample_completions(
    model, processor: Processor, prompts: Sequence[Prompt], num_generations: int,
    sampling: SamplingConfig, keys: Sequence[str], world, gather_weights: bool = True,
) -> list[list[Completion]]:  # fmt: skip
    """Draw completions by the key of each prompt alone: any number of ranks draws the same."""
    from minivlmrl.sampling.captured import generate_captured, with_graph
    from minivlmrl.sampling.pieces import sample_in_pieces
    from minivlmrl.sampling.stop_strings import watch_stop_strings
    from minivlmrl.scale.sharding import rollout_weights

    if sampling.max_tokens_at_once is not None:
        options = prompts, num_generations, sampling, keys, world, gather_weights
        return sample_in_pieces(sample_completions, model, processor, *options)
    numbers = uniform_numbers(keys, num_generations, sampling.max_new_tokens)
    watch = watch_stop_strings(sampling, processor.tokenizer, prompts, num_generations)
    with rollout_weights(model, world, gather_weights) as joint:
        stop, draw = processor.stop_token_ids, draw_by(numbers, world.device)
        if with_graph(sampling, world.device, joint):
            return generate_captured(model, prompts, num_generations, sampling, stop, draw, watch)
        return generate(model, prompts, num_generations, sampling, stop, draw, watch, joint)


@torch.no_grad()
def generate(
    model, prompts: Sequence[Prompt], num_generations: int, sampling: SamplingConfig,
    stop_token_ids: Sequence[int], draw: Callable | None = None,
    watch: Callable | None = None, joint=None,
) -> list[list[Completion]]:  # fmt: skip
    """Sample completions: B lists of num_generations.

    Args:
        prompts: B, of any lengths and numbers of images.
        stop_token_ids: each ends a completion, unless sampling has its own.
        draw: (probs (r, V), rows (r,), step) -> ids (r,); default torch.multinomial.
        watch: (rows (r,), ids (r,)) -> (r,) bool, which end with these ids; it sees every token.
        joint: see scale/sharding.rollout_weights.
    """
    device = joint.world.device if joint else model.lm_head.weight.device  # may be offloaded
    owner = torch.arange(len(prompts)).repeat_interleave(num_generations)  # (R,), on the host
    running = to_device(torch.arange(len(owner)), device)
    limits, most = torch.full_like(running, sampling.max_new_tokens), sampling.max_new_tokens
    stop = to_device(stop_tokens(sampling, stop_token_ids, model), device)
    batch, filters = pack(prompts, [[] for _ in prompts], model.config, device), None
    if sampling.filtered:
        from minivlmrl.sampling.filters import Filters

        filters = Filters(sampling, batch, to_device(owner, device), stop)
        limits, most = filters.limits, int(filters.limits.max())
    logits, decode, position = prefill(model, batch, owner, most)

    drawn = []  # in each step: running rows, their tokens, log-probabilities, whether they stop
    for step in range(most):
        ids, scored = next_tokens(logits, sampling.temperature, draw, filters, running, step)
        ends = torch.isin(ids, stop) | (watch is not None and watch(running, ids))
        drawn.append((running, ids, scored, ends))
        going_on = (~ends & (limits > step + 1)).cpu().nonzero()[:, 0]
        if len(going_on) == 0 or step + 1 == most:
            break
        if len(going_on) < len(running):
            going_on = decode.keep(going_on)  # the others leave
            running, ids, limits, position = (x[going_on] for x in (running, ids, limits, position))
        if joint is not None:
            joint.step()
        position_ids = (position + step).expand(3, -1)
        hidden = model.model(model.model.embed_tokens(ids), position_ids, decode)
        decode.advance()
        logits = float32_matmul(hidden, model.lm_head.weight.T)  # (r, V)
    if joint is not None:
        joint.finish(model)
    rows, ids, logps, ends = (torch.cat(x).cpu() for x in zip(*drawn, strict=True))
    if not logps.isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    order, lengths = rows.argsort(stable=True), rows.bincount().tolist()  # by row, then by step
    ids, logps, ends = (x[order].split(lengths) for x in (ids, logps, ends))
    rows = [Completion(*x, bool(e[-1])) for *x, e in zip(ids, logps, ends, strict=True)]
    return [rows[i : i + num_generations] for i in range(0, len(rows), num_generations)]


def prefill(model, batch: GroupBatch, owner: Tensor, capacity: int) -> tuple:
    """Read the prompts once: logits (R, V) of first tokens, a DecodeAttention, positions (R,)."""
    attention = GroupAttention(batch.layout, keep_keys=True)
    hidden = model(batch, attention, batch.layout.last_index)  # (B, hidden_size)
    decode = DecodeAttention(attention.keys, batch.layout, owner, capacity)
    ends = [p.max() + 1 for p in batch.position_ids.split(batch.layout.prompt_lengths, dim=1)]
    logits = float32_matmul(hidden, model.lm_head.weight.T)[decode.slots.owner]
    if not logits.isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    return logits, decode, torch.stack(ends)[decode.slots.owner]


def next_tokens(
    logits: Tensor, temperature: float, draw: Callable | None, filters, rows: Tensor, step: int
) -> tuple[Tensor, Tensor]:
    """A token of each running row, ids (r,), and its log-probability (r,): no filter changes it."""
    logits = logits.float()
    scores = logits if temperature in (0, 1) else logits / temperature
    plain, total = scores, scores.logsumexp(-1)
    if filters is not None:
        scores = filters(logits, rows, step)
    if temperature == 0:
        ids = scores.argmax(-1)
    elif draw is None:
        ids = torch.multinomial(scores.softmax(-1), 1)[:, 0]
    else:
        ids = draw(scores.softmax(-1), rows, step)
    if filters is not None:
        filters.note(rows, ids)
    return ids, plain.gather(-1, ids[:, None])[:, 0] - total


def stop_tokens(sampling: SamplingConfig, stop_token_ids: Sequence[int], model) -> Tensor:
    """(S,) int64, on the host."""
    stop = list(stop_token_ids if sampling.stop_token_ids is None else sampling.stop_token_ids)
    last = model.config.vocab_size - 1
    if max(stop, default=0) > last:
        raise ValueError(f"stop_token_ids has {max(stop)}, but the model's tokens end at {last}")
    return torch.tensor(stop, dtype=torch.long)


def draw_by(uniforms: Tensor, device="cpu") -> Callable:
    """A `draw` for generate, from (B, G, max_new_tokens) numbers in [0, 1)."""
    numbers = to_device(uniforms.flatten(0, 1), device)  # (R, max_new_tokens)
    return lambda probs, rows, step: inverse_cdf(probs, numbers.to(probs.device)[rows, step])


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Take the first token at which the cumulative probability exceeds the row's number.

    Probabilities are counted in whole units of 2^-52, which add up exactly in any order on any
    device: a token of probability 0 is never drawn, and rows do not influence each other.
    probs (r, V) float32, uniform (r,) float64 in [0, 1) -> ids (r,).
    """
    units = (probs * UNITS).long().cumsum(-1)  # (r, V); a power of 2 rounds nothing
    target = (uniform * units[:, -1]).long()  # rounded down, so it is below the total
    return torch.searchsorted(units, target[:, None], right=True)[:, 0].clamp(
        max=units.shape[1] - 1
    )


def uniform_numbers(keys: Sequence[str], num_generations: int, max_new_tokens: int) -> Tensor:
    """(keys, num_generations, max_new_tokens) float64 in [0, 1), by the key of each prompt."""
    shape = num_generations, max_new_tokens
    return torch.from_numpy(numpy.stack([random_numbers(key).random(shape) for key in keys]))


def random_numbers(key: str) -> numpy.random.Generator:
    """A source of random numbers that depends on a text alone."""
    return numpy.random.default_rng(list(key.encode()))
