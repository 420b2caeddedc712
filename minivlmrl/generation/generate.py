"""Sample completions for prompts.

Call prefill once, then sample_token and decode for every new token:

    prefill: forward pass over all prompts; completions share the keys and values of their prompt.
    sample_token: sample one token per row from softmax(logits / temperature); filters are in filters.py.
    decode: forward pass over the newest tokens, which attend to their prompt and completion.

A row is one completion. Random numbers do not depend on the batch or number of GPUs (uniform_numbers in data/rows.py).

Dimensions: B prompts, G completions per prompt, R = B * G rows, r unfinished rows, V vocabulary size.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.kernels.backend import to_device
from minivlmrl.kernels.float32_matmul import float32_matmul
from minivlmrl.model.attention import DecodeAttention, GroupAttention
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.packing import GroupBatch, pack

# probabilities are rounded to multiples of 1 / UNITS; float64 sums are exact up to 2^53
UNITS = 2**52
BLOCK = 128  # ids per block in inverse_cdf, a divisor of Qwen's vocabulary sizes
# sample_token(logits (r, V), row indices (r,), tokens so far (r,)) -> ids, logps, whether finished, each (r,)
TokenSampler = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Decode:
    """Run one decode step for all unfinished completions.

    Subclasses run the step as a CUDA graph (cuda_graphs.py), or insert tool results (extras/agents/).
    """

    attention_type = DecodeAttention

    def __call__(self, model: VisionLanguageModel, ids: Tensor, attention: DecodeAttention) -> Tensor:
        """Return next-token logits (r, V) after the newest tokens `ids` (r,)."""
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
    """Sample num_generations completions per prompt.

    Args:
        sample_token: from make_token_sampler.
        device: compute device, required if weights are offloaded to the CPU; None = device of the LM head.
    """
    decode = decode or Decode()
    device = device or model.lm_head.weight.device
    prompt_index = torch.arange(len(prompts)).repeat_interleave(num_generations)
    batch = pack(prompts, [[] for _ in prompts], model.config, device)
    logits, attention = prefill(model, batch, prompt_index, max_new_tokens, decode)
    del batch  # free memory of the image patches
    unfinished = torch.ones_like(attention.rows, dtype=torch.bool)
    steps = []
    for step in range(1, max_new_tokens + 1):
        counts = (attention.newest + 1).clamp(max=max_new_tokens - 1)
        ids, logps, ends = sample_token(logits, attention.rows, counts)
        steps.append((attention.rows.where(unfinished, -1), ids, logps, ends))
        unfinished = unfinished & ~ends & (counts + 1 < max_new_tokens)
        if step % attention.check_every == 0 or step == max_new_tokens:
            # apart from filters and stop strings, only this line makes the CPU wait for the GPU
            unfinished_host = unfinished.cpu()
            if not unfinished_host.any():
                break
            remaining_rows = attention.select(unfinished_host)
            if remaining_rows is not None:
                ids = ids[remaining_rows]
                unfinished = unfinished[remaining_rows]
        attention.advance()
        logits = decode(model, ids, attention)
    return to_completions(steps, num_generations)


def prefill(
    model: VisionLanguageModel, batch: GroupBatch, prompt_index: Tensor, capacity: int, decode: Decode
) -> tuple[Tensor, DecodeAttention]:
    """Run a forward pass over the prompts, and build the KV cache.

    Args:
        prompt_index: (R,) prompt index per row.
        capacity: maximum completion length, in tokens.
    Returns:
        Logits (R, V) for the first completion tokens, and a DecodeAttention with all prompts in its KV cache.
    """
    attention = GroupAttention(batch.layout, keep_keys=True)
    # (B, hidden_size) hidden states at the last prompt token
    hidden = model(batch, attention, batch.layout.last_index)
    # (3, P) position ids for each prompt
    positions = batch.position_ids.split(batch.layout.prompt_lengths, dim=1)
    # (B,) first completion position id
    start = torch.stack([position.max() + 1 for position in positions])
    decoding = decode.attention_type(attention, prompt_index, capacity, start)
    logits = float32_matmul(hidden, model.lm_head.weight.T)
    return logits[decoding.slots.prompt_index], decoding


def to_completions(
    steps: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]], num_generations: int
) -> list[list[Completion]]:
    """Collect the tokens of all decode steps into completions, num_generations per prompt.

    Args:
        steps: (row indices, ids, logps, whether finished) per step, each (r,); row index -1 = finished earlier.
    """
    rows, ids, logps, ends = (torch.cat(column).cpu() for column in zip(*steps, strict=True))
    sampled = (rows >= 0).nonzero()[:, 0]
    if not logps[sampled].isfinite().all():
        raise FloatingPointError(
            "the model's logits contain NaN or inf (they are not finite); check the weights and the learning rate"
        )
    order = sampled[rows[sampled].argsort(stable=True)]
    parts = order.split(rows[sampled].bincount().tolist())
    completions = [Completion(ids[index], logps[index], bool(ends[index[-1]])) for index in parts]
    return [completions[i : i + num_generations] for i in range(0, len(completions), num_generations)]


def make_token_sampler(
    temperature: float,
    stop_ids: Sequence[int],
    sample: Callable[[Tensor, Tensor, Tensor], Tensor],
    logits_processor: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> TokenSampler:
    """Return a function that samples one token per row.

    Recorded log-probs are log_softmax(logits / temperature) over the tokens that filters keep; greedy decoding uses
    temperature 1. A repetition penalty changes sampling, but not recorded log-probs.

    Args:
        temperature: logit divisor, 0 for greedy decoding.
        stop_ids: token ids that end a completion.
        sample: (probabilities (r, V), row indices, tokens so far) -> ids (r,); see sample_by_uniforms.
        logits_processor: (logits (r, V), row indices, tokens so far) -> scores (r, V) for the softmax, by default
            logits / temperature. Filters set scores of removed tokens to -inf.
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


def sample_by_uniforms(uniforms: Tensor, device: torch.device | str = "cpu") -> Callable[..., Tensor]:
    """Return a function that samples ids (r,) from probabilities (r, V) with given random numbers.

    Args:
        uniforms: (R, max_new_tokens) float64 random numbers in [0, 1); see inverse_cdf.
    """
    uniforms = to_device(uniforms, device)

    def sample(probs: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        return inverse_cdf(probs, uniforms[rows, counts])

    return sample


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds a random number: ids (r,).

    Probabilities are summed exactly, as integer multiples of 2^-52: tokens do not depend on device or batch, and never
    have probability 0.

    Args:
        probs: (r, V) float32.
        uniform: (r,) float64 in [0, 1).
    """
    units = (probs * UNITS).long()
    padding = -probs.shape[1] % BLOCK
    if padding:  # skip F.pad if possible, because it copies
        units = F.pad(units, (0, padding))
    units = units.unflatten(1, (-1, BLOCK))
    ends = units.sum(-1).cumsum(-1)  # (r, blocks) cumulative probabilities
    target = (uniform * ends[:, -1]).long()[:, None]  # (r, 1), rounded down, so below the total
    block = find_first_above(ends, target)
    inside = units.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)  # (r, BLOCK)
    before = ends.gather(1, block) - inside[:, -1:]
    return (block * BLOCK + find_first_above(inside, target - before))[:, 0].clamp(max=probs.shape[1] - 1)


def find_first_above(sums: Tensor, target: Tensor) -> Tensor:
    """Return the index (r, 1) of the first sum above the target (r, 1), in ascending sums (r, n)."""
    return torch.searchsorted(sums, target, right=True).clamp(max=sums.shape[1] - 1)
