"""Filter logits with repetition_penalty, temperature, top_k, top_p and min_p.

docs/developer_guide.md shows how to add a filter.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.rows import Completion


class Filters:
    """Logits processor with a recipe's filters, for one batch.

    Args:
        prompts: (P,) int64 token ids per prompt, for the repetition penalty.
        num_generations: completions per prompt.
    """

    def __init__(self, sampling: SamplingOptions, prompts: Sequence[Tensor], num_generations: int):
        self.sampling = sampling
        self.prompts = prompts
        self.num_generations = num_generations
        # token ids kept by the filters, for each row and position
        self.allowed_ids: list[list[Tensor]] = [[] for _ in range(len(prompts) * num_generations)]
        # (R, V) bool, True if the token occurs in the row's prompt or completion
        self.seen: Tensor | None = None

    def __call__(self, logits: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """Return scores (r, V), whose softmax is the next-token distribution."""
        if self.sampling.repetition_penalty != 1 and self.seen is None:
            seen = logits.new_zeros(len(self.prompts), logits.shape[-1], dtype=torch.bool)
            for seen_by_prompt, ids in zip(seen, self.prompts, strict=True):
                seen_by_prompt[ids.to(seen.device)] = True
            self.seen = seen.repeat_interleave(self.num_generations, 0)
        scores = filter_logits(logits, self.sampling, None if self.seen is None else self.seen[rows])
        if self.sampling.truncates:
            is_allowed = ~scores.isneginf()
            allowed_of_rows = is_allowed.nonzero()[:, 1].int().cpu().split(is_allowed.sum(1).tolist())
            for row, ids in zip(rows.tolist(), allowed_of_rows, strict=True):
                self.allowed_ids[row].append(ids)
        return scores

    def record_masks(self, completions: Iterable[Completion]):
        """Store the token ids allowed by top_k, top_p and min_p, for training to normalize over the same tokens."""
        for allowed_of_row, completion in zip(self.allowed_ids, completions, strict=True):
            # drop entries for positions after the end of the completion
            allowed_ids = allowed_of_row[: len(completion.ids)]
            if allowed_ids:
                counts = torch.tensor([len(ids) for ids in allowed_ids])
                completion.sampling_mask = counts, torch.cat(allowed_ids)


def filter_logits(logits: Tensor, sampling: SamplingOptions, seen: Tensor | None = None) -> Tensor:
    """Apply repetition penalty, temperature, top_k, top_p and min_p; at temperature 0, apply only the penalty.

    Args:
        logits: (r, V) float32.
        seen: (r, V) bool, True for tokens in the prompt or completion so far; None = no penalty.
    Returns:
        Scores (r, V) as in transformers' generate, -inf for removed tokens.
    """
    scores = logits
    if seen is not None:
        penalty = sampling.repetition_penalty
        penalized = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(seen, penalized, scores)
    if sampling.temperature == 0:
        return scores
    scores = scores / sampling.temperature
    if sampling.top_k:
        # (r, k) largest scores, descending
        largest = scores.topk(min(sampling.top_k, scores.shape[-1])).values
        scores = scores.masked_fill(scores < largest[:, -1:], float("-inf"))
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[:, -1] = False  # always keep the most likely token
        scores = scores.masked_fill(drop.scatter(1, order, drop), float("-inf"))
    if sampling.min_p:
        probs = scores.softmax(-1)
        threshold = sampling.min_p * probs.amax(-1, keepdim=True)
        scores = scores.masked_fill(probs < threshold, float("-inf"))
    return scores
