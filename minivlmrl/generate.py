"""Prompts -> completions: every prompt is read once, all its completions are decoded together against its keys.

Logits -> the next token, by settings that are all written down in one place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from minivlmrl.attention import DecodeAttention, GroupAttention
from minivlmrl.batch import pack
from minivlmrl.chat import Tokenizer
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.rows import Prompt
from minivlmrl.run.config import SamplingConfig
from minivlmrl.sampling.filters import filter_logits
from minivlmrl.sampling.stop_strings import StopStrings
from minivlmrl.scale.ranks import World


@dataclass
class Completion:
    """What the sampler drew for one row."""

    ids: Tensor  # (C,) int64, what it stopped with included
    logps: Tensor  # (C,) float32, nats: see sampler.sample
    stopped: bool  # ended with a stop token or a stop string; False: cut at max_new_tokens or max_length


@torch.no_grad()
def generate(
    model: Qwen2_5_VL,
    prompts: Sequence[Prompt],
    num_generations: int,
    params: SamplingConfig,
    stop_token_ids: Sequence[int],
    generator: torch.Generator | None = None,
    tokenizer: Tokenizer | None = None,
    on_tokens: Callable[[list[int], list[int]], None] | None = None,
    uniforms: Tensor | None = None,
    pace: World | None = None,
) -> list[list[Completion]]:
    """Sample completions.

    Args:
        prompts: B of them, of any lengths and numbers of images.
        num_generations: completions for each prompt (G).
        stop_token_ids: a completion ends with the first of these, unless params has its own; may be empty.
        generator: source of randomness, on the model's device; the same state gives the same completions.
        tokenizer: needed for stop strings.
        on_tokens: is told at each step which completions still run, by number from 0 to B * G - 1, and what each of
            them has just drawn, to show answers while they are written.
        uniforms: (B, G, max_new_tokens) float64 in [0, 1), what each token is drawn by, instead of the generator:
            then a completion does not depend on what is generated beside it. See sampler.uniforms.
        pace: the ranks, where weights are sharded and gathered layer by layer: all have to call this, and whose
            completions have ended goes on with a token that means nothing until all have.
    Returns:
        B lists of G completions.
    Raises:
        ValueError: a prompt of max_length or more, stop tokens that the model does not have, or stop strings without a
            tokenizer.
        FloatingPointError: the logits are not finite.
    """
    device = model.lm_head.weight.device
    owner = torch.arange(len(prompts), device=device).repeat_interleave(num_generations)  # (R,)
    limits = torch.tensor(_limits(prompts, params), device=device)[owner]
    stop = _stop_tokens(params, stop_token_ids, model)
    drawn = _Drawn(limits, stop, _stop_strings(params, tokenizer, [prompts[i].input_ids for i in owner.tolist()]))

    batch = pack(prompts, [[] for _ in prompts], model.config, device)
    prefill = GroupAttention(batch.layout, keep_keys=True)
    hidden = model(batch, prefill, batch.layout.last_index)  # (B, hidden_size)
    decode = DecodeAttention(prefill.keys, batch.layout, owner, drawn.capacity)
    del prefill  # decode has its own copy of the keys
    next_position = torch.stack([p.max() + 1 for p in batch.position_ids.split(batch.layout.prompt_lengths, dim=1)])

    logits = model.lm_head(hidden)[owner]  # (R, V)
    if not logits.isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    seen = _seen(batch, owner, logits) if params.repetition_penalty != 1 else None
    uniforms = None if uniforms is None else uniforms.flatten(0, 1).to(device)  # (R, max_new_tokens)
    for step in range(drawn.capacity):
        banned = stop if step < params.min_new_tokens else None
        uniform = None if uniforms is None else uniforms[drawn.running, step]
        ids, logps = sample(logits, params, generator, seen, banned, uniform)
        if on_tokens is not None:
            on_tokens(drawn.running.tolist(), ids.tolist())
        rest = drawn.record(ids, logps)
        if len(drawn.running) == 0:
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
    """What has been drawn for each of R rows, and which rows still run.

    Args:
        limits: (R,) most tokens of each row.
        stop: ids that end a row.
        stop_strings: texts that do.
    """

    def __init__(self, limits: Tensor, stop: Tensor, stop_strings: StopStrings | None):
        rows, device, self.cuts = len(limits), limits.device, set(limits.tolist())
        self.limits, self.stop, self.stop_strings, self.capacity = limits, stop, stop_strings, max(self.cuts)
        self.running = torch.arange(rows, device=device)  # numbers of the rows that have not ended
        self.ids = torch.zeros(rows, self.capacity, dtype=torch.long, device=device)
        self.logps = torch.zeros(rows, self.capacity, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self.step = 0

    def record(self, ids: Tensor, logps: Tensor) -> Tensor | None:
        """Note a token for each running row; which of these rows go on (indices), or None if all do."""
        self.ids[self.running, self.step], self.logps[self.running, self.step] = ids, logps
        self.step += 1
        self.lengths[self.running] = self.step
        stopped = torch.isin(ids, self.stop)
        if self.stop_strings is not None:
            stopped |= self.stop_strings.completed(self.running, ids)
        ended = stopped | (self.limits[self.running] == self.step) if self.step in self.cuts else stopped
        if not ended.any():
            return None
        self.stopped[self.running] = stopped
        rest = (~ended).nonzero()[:, 0]
        self.running = self.running[rest]
        return rest

    def completions(self) -> list[Completion]:
        rows = zip(self.ids.cpu(), self.logps.cpu(), self.lengths.tolist(), self.stopped.tolist(), strict=True)
        return [Completion(ids[:n], logps[:n], stopped) for ids, logps, n, stopped in rows]


def _limits(prompts: Sequence[Prompt], params: SamplingConfig) -> list[int]:
    """Most new tokens of each prompt."""
    lengths, most = [len(prompt.input_ids) for prompt in prompts], params.max_length
    if most is None:
        return [params.max_new_tokens] * len(prompts)
    if max(lengths) >= most:
        number = lengths.index(max(lengths))
        raise ValueError(
            f"max_length is {most}, but prompt {number} alone has {lengths[number]} tokens, images included; "
            "raise max_length or lower max_pixels"
        )
    return [min(params.max_new_tokens, most - length) for length in lengths]


def _stop_tokens(params: SamplingConfig, stop_token_ids: Sequence[int], model: Qwen2_5_VL) -> Tensor:
    """(S,) int64."""
    chosen, vocab_size = params.stop_token_ids, model.config.vocab_size
    if max(chosen or [0]) >= vocab_size:
        raise ValueError(f"stop_token_ids has {max(chosen)}, but the model's tokens end at {vocab_size - 1}")
    stop = list(stop_token_ids if chosen is None else chosen)
    return torch.tensor(stop, dtype=torch.long, device=model.lm_head.weight.device)


def _stop_strings(params: SamplingConfig, tokenizer: Tokenizer | None, prompts: Sequence[Tensor]) -> StopStrings | None:
    """prompts: the ids of each row's."""
    if not params.stop_strings:
        return None
    if tokenizer is None:
        raise ValueError("stop_strings need a tokenizer, which reads what was drawn")
    return StopStrings(params.stop_strings, tokenizer, prompts)


def _seen(batch, owner: Tensor, logits: Tensor) -> Tensor:
    """(R, V) bool: tokens of each row's prompt."""
    per_prompt = logits.new_zeros(len(batch.layout.prompt_lengths), logits.shape[-1], dtype=torch.bool)
    for row, ids in zip(per_prompt, batch.input_ids.split(batch.layout.prompt_lengths), strict=True):
        row[ids] = True
    return per_prompt[owner]


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
