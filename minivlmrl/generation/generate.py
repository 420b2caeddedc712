"""Sample completions of prompts: each prompt is read once, its completions are decoded together.

    prefill        one forward over all prompts; the keys and values of each prompt are kept once
    sample_token   temperature, softmax, and a token for each row, by uniform random numbers;
                   filters such as top_p are in filters.py
    decode         one forward over a new token of each row, against its prompt's keys and its own

The random numbers of a row depend on the key of its prompt alone, see data/rows.uniform_numbers.

Dimension letters: B prompts, G completions of each, R = B * G rows, r running rows, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.exact_cumsum import running_sum
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.model.attention import DecodeAttention, GroupAttention
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.packing import GroupBatch, pack

UNITS = 2**52  # units of a probability of 1: sums stay below 2^53, where float64 is exact
# sample_token(logits (r, V), rows, counts of tokens so far) -> ids, logps, ends (bool): each (r,)
TokenSampler = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
# sample(probs (r, V), rows, counts) -> ids (r,)
Sample = Callable[[Tensor, Tensor, Tensor], Tensor]
# logits_processor(logits (r, V), rows, counts) -> scores (r, V)
LogitsProcessor = Callable[[Tensor, Tensor, Tensor], Tensor]


class Decode:
    """A decode step. cuda_graphs.py captures it as a CUDA graph; agents/ also read answers in it."""

    attention_type = DecodeAttention

    def __call__(self, model: Qwen2_5_VL, ids: Tensor, attention: DecodeAttention) -> Tensor:
        """Run the decoder on a new token of each row: ids (r,) -> logits (r, V)."""
        position = (attention.start + attention.newest).expand(3, -1)
        hidden = model.model(model.model.embed_tokens(ids), position, attention)
        return float32_matmul(hidden, model.lm_head.weight.T)


@torch.no_grad()
def generate(
    model: Qwen2_5_VL, prompts: Sequence[Prompt], num_generations: int, max_new_tokens: int,
    sample_token: TokenSampler,
    decode: Decode | None = None, device: torch.device | None = None,
) -> list[list[Completion]]:  # fmt: skip
    """Sample num_generations completions of each prompt: B lists.

    Args:
        sample_token: samples a token of each row, see make_token_sampler.
        decode: computes a decode step, by default Decode().
        device: device of the computation, by default that of lm_head; offloaded weights are on
            another device.
    """
    decode = decode or Decode()
    device = device or model.lm_head.weight.device
    prompt_index = torch.arange(len(prompts)).repeat_interleave(num_generations)  # (R,)
    batch = pack(prompts, [[] for _ in prompts], model.config, device)
    logits, attention = prefill(model, batch, prompt_index, max_new_tokens, decode)
    unfinished = torch.ones_like(attention.rows, dtype=torch.bool)
    steps = []  # rows of each step (r,), -1 where one had ended before; ids, logps and ends (r,)
    for step in range(1, max_new_tokens + 1):
        counts = (attention.newest + 1).clamp(max=max_new_tokens - 1)
        ids, logps, ends = sample_token(logits, attention.rows, counts)
        steps.append((attention.rows.where(unfinished, -1), ids, logps, ends))
        unfinished = unfinished & ~ends & (counts + 1 < max_new_tokens)
        if step % attention.check_every == 0 or step == max_new_tokens:
            unfinished_host = unfinished.cpu()  # the only place where the host waits for a GPU
            if not unfinished_host.any():
                break
            kept_rows = attention.select(unfinished_host)
            if kept_rows is not None:  # finished rows were dropped
                ids = ids[kept_rows]
                unfinished = unfinished[kept_rows]
        attention.advance()
        logits = decode(model, ids, attention)
    return to_completions(steps, num_generations)


def prefill(
    model: Qwen2_5_VL, batch: GroupBatch, prompt_index: Tensor, capacity: int, decode: Decode
) -> tuple[Tensor, DecodeAttention]:
    """Compute the prompts; return logits (R, V) of first tokens, and the attention of decoding.

    Args:
        prompt_index: (R,) the prompt of each row.
        capacity: number of tokens that a completion may have.
    """
    attention = GroupAttention(batch.layout, keep_keys=True)
    hidden = model(batch, attention, batch.layout.last_index)  # (B, hidden_size)
    positions = batch.position_ids.split(batch.layout.prompt_lengths, dim=1)  # each (3, P)
    start = torch.stack([position.max() + 1 for position in positions])  # (B,)
    decoding = decode.attention_type(attention, prompt_index, capacity, start)
    logits = float32_matmul(hidden, model.lm_head.weight.T)
    return logits[decoding.slots.prompt_index], decoding


def to_completions(
    steps: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]], num_generations: int
) -> list[list[Completion]]:
    """Gather the rows, ids, logps and ends of all steps into a Completion for each row: B lists."""
    rows, ids, logps, ends = (torch.cat(column).cpu() for column in zip(*steps, strict=True))
    sampled = (rows >= 0).nonzero()[:, 0]  # -1: the row had ended before
    if not logps[sampled].isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    order = sampled[rows[sampled].argsort(stable=True)]  # by row, then by step
    completions = []
    for index in order.split(rows[sampled].bincount().tolist()):
        stopped = bool(ends[index[-1]])
        completions.append(Completion(ids[index], logps[index], stopped))
    starts = range(0, len(completions), num_generations)
    return [completions[i : i + num_generations] for i in starts]


def make_token_sampler(
    temperature: float, stop_ids: Sequence[int], sample: Sample,
    logits_processor: LogitsProcessor | None = None, device: torch.device | str = "cpu",
) -> TokenSampler:  # fmt: skip
    """Make the function with which `generate` samples a token of each row.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        stop_ids: ids that end a completion.
        sample: samples ids from probabilities, see sample_by_uniforms.
        logits_processor: computes scores, whose softmax is the distribution of a token; by default
            logits / temperature. Filters are such functions: log-probabilities are relative to the
            tokens that they keep, because they set the others to -inf.
    """
    stop_index = to_device(torch.tensor(stop_ids, dtype=torch.long), device)

    def sample_token(logits: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = logits.float()
        scaled = logits if temperature in (0, 1) else logits / temperature
        scores = scaled if logits_processor is None else logits_processor(logits, rows, counts)
        ids = sample(scores.softmax(-1), rows, counts) if temperature else scores.argmax(-1)
        kept = scaled
        if logits_processor is not None:
            kept = torch.where(scores.isneginf(), scores, scaled)
        logps = kept.gather(-1, ids[:, None])[:, 0] - kept.logsumexp(-1)
        return ids, logps, torch.isin(ids, stop_index)

    return sample_token


def sample_by_uniforms(uniforms: Tensor, device: torch.device | str = "cpu") -> Sample:
    """Make a `sample` that uses uniform numbers (R, max_new_tokens) float64, see inverse_cdf."""
    uniforms = to_device(uniforms, device)

    def sample(probs: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        return inverse_cdf(probs, uniforms[rows, counts])

    return sample


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token at which the cumulative probability exceeds the row's number.

    Probabilities are counted in whole units of 2^-52, because integers add up exactly in any order
    on any device. So a token of probability 0 is never sampled, and rows do not influence each
    other: probs (r, V) float32, uniform (r,) float64 in [0, 1) -> ids (r,).
    """
    units = running_sum((probs * UNITS).long())  # (r, V); a product with a power of 2 is exact
    target = (uniform * units[:, -1]).long()  # rounded down, so it is below the total
    chosen = torch.searchsorted(units, target[:, None], right=True)[:, 0]
    return chosen.clamp(max=units.shape[1] - 1)
