"""Sample completions of prompts; each prompt is computed once for all of its completions.

    prefill        run one forward over all prompts, and store the keys and values of each prompt
                   once for all of its completions
    sample_token   apply the temperature and the softmax, and sample one token per row from
                   uniform random numbers; filters such as top_p are in filters.py
    decode         run one forward over the newest token of each row, which attends to its prompt
                   and to the earlier tokens of its own completion

A row is one completion. Its random numbers depend only on the key of its prompt, so that a sample
does not change with the batch or the number of GPUs; see data/rows.uniform_numbers.

Dimension letters: B prompts, G completions per prompt, R = B * G rows, r rows that are still in
the batch, V vocabulary size.
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

# A probability of 1 has this many units, so that sums stay below 2^53, where float64 is exact.
UNITS = 2**52
# sample_token(logits (r, V), row indices, tokens per row so far) -> ids, logps, ends (bool), each
# of shape (r,)
TokenSampler = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
# sample(probs (r, V), rows, counts) -> ids (r,)
Sample = Callable[[Tensor, Tensor, Tensor], Tensor]
# logits_processor(logits (r, V), rows, counts) -> scores (r, V)
LogitsProcessor = Callable[[Tensor, Tensor, Tensor], Tensor]


class Decode:
    """Run one decode step: the forward of one new token per row.

    cuda_graphs.py captures this step as a CUDA graph. The samplers in agents/ also prefill the
    outputs of tools with it.
    """

    attention_type = DecodeAttention

    def __call__(self, model: Qwen2_5_VL, ids: Tensor, attention: DecodeAttention) -> Tensor:
        """Compute the logits (r, V) that follow the newest token of each row, ids (r,)."""
        position = (attention.start + attention.newest).expand(3, -1)
        hidden = model.model(model.model.embed_tokens(ids), position, attention)
        return float32_matmul(hidden, model.lm_head.weight.T)


@torch.no_grad()
def generate(
    model: Qwen2_5_VL, prompts: Sequence[Prompt], num_generations: int, max_new_tokens: int,
    sample_token: TokenSampler,
    decode: Decode | None = None, device: torch.device | None = None,
) -> list[list[Completion]]:  # fmt: skip
    """Sample num_generations completions per prompt.

    Args:
        sample_token: function that samples one token per row, see make_token_sampler.
        decode: function that computes a decode step, by default Decode().
        device: device of the computation, by default the device of lm_head. Pass it if weights
            are offloaded, because they are then on another device.
    Returns:
        B lists of num_generations completions.
    Raises:
        FloatingPointError: the logits of the model are not finite.
    """
    decode = decode or Decode()
    device = device or model.lm_head.weight.device
    prompt_index = torch.arange(len(prompts)).repeat_interleave(num_generations)  # (R,)
    batch = pack(prompts, [[] for _ in prompts], model.config, device)
    logits, attention = prefill(model, batch, prompt_index, max_new_tokens, decode)
    unfinished = torch.ones_like(attention.rows, dtype=torch.bool)
    # (rows, ids, logps, ends) of each step, each (r,); rows is -1 for rows that have finished
    steps = []
    for step in range(1, max_new_tokens + 1):
        counts = (attention.newest + 1).clamp(max=max_new_tokens - 1)
        ids, logps, ends = sample_token(logits, attention.rows, counts)
        steps.append((attention.rows.where(unfinished, -1), ids, logps, ends))
        unfinished = unfinished & ~ends & (counts + 1 < max_new_tokens)
        if step % attention.check_every == 0 or step == max_new_tokens:
            unfinished_host = unfinished.cpu()  # the only point where the host waits for the GPU
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
    """Run the prompts through the model once, and prepare the attention for decoding.

    Args:
        prompt_index: (R,) index of the prompt of each row.
        capacity: maximum number of tokens of a completion.
    Returns:
        The logits (R, V) of the first token of each row, and the attention with the keys and
        values of the prompts.
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
    """Collect the tokens of all decode steps into completions.

    Args:
        steps: rows, ids, logps and ends of each step, each (r,), see `generate`. A row index of -1
            marks a row that had already finished.
    Returns:
        A list of num_generations completions for each prompt.
    Raises:
        FloatingPointError: a log-probability of a sampled token is not finite.
    """
    rows, ids, logps, ends = (torch.cat(column).cpu() for column in zip(*steps, strict=True))
    sampled = (rows >= 0).nonzero()[:, 0]  # without the tokens of finished rows, marked by -1
    if not logps[sampled].isfinite().all():
        raise FloatingPointError("the model's logits are not finite")
    order = sampled[rows[sampled].argsort(stable=True)]  # sorted by row, then by step
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
    """Make the function with which `generate` samples one token per row.

    The log-probabilities that the function returns are those of the distribution that the token
    was sampled from: after the temperature, normalised over the tokens that the filters keep.
    They do not include a repetition penalty, and with temperature 0 no temperature.

    Args:
        temperature: divisor of the logits; 0 selects the likeliest token.
        stop_ids: token ids that end a completion.
        sample: function that samples ids from probabilities, see sample_by_uniforms.
        logits_processor: function that computes scores, whose softmax is the distribution of the
            next token; by default logits / temperature. Filters such as top_p are logits
            processors, which set the scores of removed tokens to -inf.
        device: device of the logits.
    Returns:
        The function sample_token(logits, rows, counts) -> ids, logps, ends, see TokenSampler.
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
    """Make a function that samples ids (r,) from probabilities (r, V) by given random numbers.

    Args:
        uniforms: (R, max_new_tokens) float64 in [0, 1), one number per token, see inverse_cdf.
        device: device of the probabilities.
    """
    uniforms = to_device(uniforms, device)

    def sample(probs: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        return inverse_cdf(probs, uniforms[rows, counts])

    return sample


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Sample the first token at which the cumulative probability exceeds the row's random number.

    Probabilities are counted in whole units of 2^-52, because integers add up exactly in any order
    on any device. So a token of probability 0 is never sampled, and rows do not influence each
    other.

    Args:
        probs: (r, V) float32.
        uniform: (r,) float64 in [0, 1), the random number of each row.
    Returns:
        ids (r,).
    """
    units = running_sum((probs * UNITS).long())  # (r, V); multiplying by a power of 2 is exact
    target = (uniform * units[:, -1]).long()  # rounded down, so that it is below the total
    chosen = torch.searchsorted(units, target[:, None], right=True)[:, 0]
    return chosen.clamp(max=units.shape[1] - 1)
