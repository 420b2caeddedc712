"""Sample completions for prompts.

    prefill        run one forward pass over all prompts, and store each prompt's keys and
                   values once for all its completions
    sample_token   apply the temperature and the softmax, and sample one token per row from
                   uniform random numbers; filters such as top_p are in filters.py
    decode         run one forward pass over each row's newest token, which attends to its
                   prompt and to the earlier tokens of its completion

A row is one completion. Each prompt has its own random generator (uniform_numbers in data/rows.py), so the random
numbers do not change with the batch or the number of GPUs.

Dimension letters: B prompts, G completions per prompt, R = B * G rows (completions), r unfinished rows in the batch, V
vocabulary size.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.exact_cumsum import running_sum
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.model.attention import DecodeAttention, GroupAttention
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.packing import GroupBatch, pack

# A probability p becomes the integer p * UNITS. In float64, integers up to 2^53 are exact.
UNITS = 2**52
# A function sample_token(logits, rows, counts) -> ids, logps, ends. It samples one token per row from logits (r, V).
# rows (r,) are the row indices, and counts (r,) are the numbers of tokens that the rows have so far. Each result is
# (r,), and `ends` is True where the token ends the completion.
TokenSampler = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
# function (probs, rows, counts) that samples one token id per row, (r,), from probabilities (r, V)
SampleIds = Callable[[Tensor, Tensor, Tensor], Tensor]
# function (logits, rows, counts) that computes scores (r, V) from logits (r, V), for example a top_p filter
LogitsProcessor = Callable[[Tensor, Tensor, Tensor], Tensor]


class Decode:
    """Run one decode step, which is a forward pass of one new token per row.

    Subclasses of Decode run the decode step as a CUDA graph (cuda_graphs.py), or insert the outputs of tools
    (extras/agents/).
    """

    attention_type = DecodeAttention

    def __call__(self, model: VisionLanguageModel, ids: Tensor, attention: DecodeAttention) -> Tensor:
        """Compute the next-token logits (r, V) from each row's newest token, `ids` (r,)."""
        position = (attention.start + attention.newest).expand(3, -1)
        hidden = model.model(model.model.embed_tokens(ids), position, attention)
        return float32_matmul(hidden, model.lm_head.weight.T)


@torch.no_grad()
def generate(
    model: VisionLanguageModel,
    prompts: Sequence[Prompt],
    num_generations: int,
    max_new_tokens: int,
    sample_token: TokenSampler,
    decode: Decode | None = None,
    device: torch.device | None = None,
) -> list[list[Completion]]:
    """Sample a list of num_generations completions for each prompt.

    Args:
        sample_token: function that samples one token per row; see make_token_sampler.
        decode: function that computes a decode step; defaults to Decode().
        device: computation device; defaults to lm_head's device. Required if weights are offloaded to another
            device.
    """
    decode = decode or Decode()
    device = device or model.lm_head.weight.device
    # (R,), each row's prompt index
    prompt_index = torch.arange(len(prompts)).repeat_interleave(num_generations)
    batch = pack(prompts, [[] for _ in prompts], model.config, device)
    logits, attention = prefill(model, batch, prompt_index, max_new_tokens, decode)
    del batch  # otherwise, image patches would stay in memory until the last token is sampled
    unfinished = torch.ones_like(attention.rows, dtype=torch.bool)
    # (rows, ids, logps, ends) of each decode step; see to_completions
    steps = []
    for step in range(1, max_new_tokens + 1):
        counts = (attention.newest + 1).clamp(max=max_new_tokens - 1)
        ids, logps, ends = sample_token(logits, attention.rows, counts)
        steps.append((attention.rows.where(unfinished, -1), ids, logps, ends))
        unfinished = unfinished & ~ends & (counts + 1 < max_new_tokens)
        if step % attention.check_every == 0 or step == max_new_tokens:
            unfinished_host = unfinished.cpu()  # without filters and stop strings, only this line waits for the GPU
            if not unfinished_host.any():
                break
            remaining_rows = attention.select(unfinished_host)
            if remaining_rows is not None:  # finished rows were removed from the batch
                ids = ids[remaining_rows]
                unfinished = unfinished[remaining_rows]
        attention.advance()
        logits = decode(model, ids, attention)
    return to_completions(steps, num_generations)


def prefill(
    model: VisionLanguageModel, batch: GroupBatch, prompt_index: Tensor, capacity: int, decode: Decode
) -> tuple[Tensor, DecodeAttention]:
    """Run the prompts through the model once, and prepare the attention for decoding.

    Args:
        prompt_index: (R,), each row's prompt index.
        capacity: maximum completion length in tokens.
    Returns:
        The logits (R, V) for each row's first token, and the attention with the prompts' keys and values.
    """
    attention = GroupAttention(batch.layout, keep_keys=True)
    # (B, hidden_size), the hidden state at each prompt's last token
    hidden = model(batch, attention, batch.layout.last_index)
    # each prompt's token positions in time, height and width, (3, P)
    positions = batch.position_ids.split(batch.layout.prompt_lengths, dim=1)
    # (B,), the position where the completions of each prompt begin
    start = torch.stack([position.max() + 1 for position in positions])
    decoding = decode.attention_type(attention, prompt_index, capacity, start)
    logits = float32_matmul(hidden, model.lm_head.weight.T)
    return logits[decoding.slots.prompt_index], decoding


def to_completions(
    steps: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]], num_generations: int
) -> list[list[Completion]]:
    """Collect tokens from all decode steps into completions.

    Args:
        steps: a tuple (rows, ids, logps, ends) for each step, each (r,), as in TokenSampler. A row index -1 marks a row
            that had already finished before the step.
    Returns:
        A list of num_generations completions for each prompt.
    """
    rows, ids, logps, ends = (torch.cat(column).cpu() for column in zip(*steps, strict=True))
    sampled = (rows >= 0).nonzero()[:, 0]  # excludes tokens in finished rows
    if not logps[sampled].isfinite().all():
        raise FloatingPointError(
            "the model's logits contain NaN or inf (they are not finite); check the weights and the learning rate"
        )
    order = sampled[rows[sampled].argsort(stable=True)]  # sorted by row, then by step
    completions = []
    for index in order.split(rows[sampled].bincount().tolist()):
        completions.append(Completion(ids[index], logps[index], bool(ends[index[-1]])))
    starts = range(0, len(completions), num_generations)
    return [completions[i : i + num_generations] for i in starts]


def make_token_sampler(
    temperature: float,
    stop_ids: Sequence[int],
    sample: SampleIds,
    logits_processor: LogitsProcessor | None = None,
    device: torch.device | str = "cpu",
) -> TokenSampler:
    """Make the function that `generate` calls to sample one token per row.

    The recorded log-probability of a token is log_softmax(logits / temperature), over the tokens that the filters keep.
    A repetition penalty changes which tokens are sampled, but not the recorded log-probabilities. With temperature 0
    (greedy), log-probabilities are recorded as for temperature 1.

    Args:
        temperature: logit divisor; 0 selects the likeliest token.
        stop_ids: token ids that end a completion.
        sample: function that samples ids from probabilities; see sample_by_uniforms.
        logits_processor: function that computes scores from logits. The softmax of the scores is the next-token
            distribution. The default is logits / temperature. A filter such as top_p is a logits processor that sets
            removed tokens' scores to -inf.
        device: the logits' device.
    """
    stop_index = to_device(torch.tensor(stop_ids, dtype=torch.long), device)

    def sample_token(logits: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = logits.float()
        scaled = logits if temperature in (0, 1) else logits / temperature
        scores = scaled if logits_processor is None else logits_processor(logits, rows, counts)
        ids = sample(scores.softmax(-1), rows, counts) if temperature else scores.argmax(-1)
        allowed_scores = scaled
        if logits_processor is not None:
            allowed_scores = torch.where(scores.isneginf(), scores, scaled)
        logps = allowed_scores.gather(-1, ids[:, None])[:, 0] - allowed_scores.logsumexp(-1)
        return ids, logps, torch.isin(ids, stop_index)

    return sample_token


def sample_by_uniforms(uniforms: Tensor, device: torch.device | str = "cpu") -> SampleIds:
    """Make a function that samples ids (r,) from probabilities (r, V) with given random numbers.

    Args:
        uniforms: (R, max_new_tokens) float64 in [0, 1), one random number for each token of each row; see inverse_cdf.
        device: the probabilities' device.
    """
    uniforms = to_device(uniforms, device)

    def sample(probs: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        return inverse_cdf(probs, uniforms[rows, counts])

    return sample


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token at which the cumulative probability exceeds the row's random number.

    Probabilities are added as integers (multiples of 2^-52), because sums of integers have no rounding errors. The
    sampled token does not depend on the device or the batch. A token with probability 0 is never sampled.

    Args:
        probs: (r, V) float32.
        uniform: (r,) float64 in [0, 1), each row's random number.
    Returns:
        The sampled ids (r,).
    """
    # (r, V) cumulative probabilities, in units of 2^-52
    units = running_sum((probs * UNITS).long())
    target = (uniform * units[:, -1]).long()  # rounded down, so it is below the total
    chosen = torch.searchsorted(units, target[:, None], right=True)[:, 0]
    return chosen.clamp(max=units.shape[1] - 1)
