"""Apply repetition penalty, temperature, top_k, top_p and min_p to the logits of the next token.

To add a filter, add a field to SamplingOptions (config/options.py), a last step to filter_logits,
and an entry to NO_TRUNCATION (config/options.py). Without the entry the filter is never applied,
because the sampler, training, vLLM and the checks of options read NO_TRUNCATION to find out whether
tokens are removed. docs/developer_guide.md has an example.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.rows import Completion


class Filters:
    """Apply the filters of a recipe to one batch, as the logits_processor of make_token_sampler.

    Args:
        sampling: the filters and the temperature.
        prompts: token ids of each prompt, (P,) int64, which the repetition penalty applies to.
        num_generations: number of completions per prompt.
    """

    def __init__(self, sampling: SamplingOptions, prompts: Sequence[Tensor], num_generations: int):
        self.sampling = sampling
        self.prompts = prompts
        self.num_generations = num_generations
        # for each row, the ids that the filters kept at each token
        self.kept: list[list[Tensor]] = [[] for _ in range(len(prompts) * num_generations)]
        self.seen: Tensor | None = None  # (R, V) ids in each row's prompt and completion

    def __call__(self, logits: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """Compute the scores (r, V) whose softmax is the distribution of the next token."""
        if self.sampling.repetition_penalty != 1 and self.seen is None:
            seen = logits.new_zeros(len(self.prompts), logits.shape[-1], dtype=torch.bool)
            for seen_by_prompt, ids in zip(seen, self.prompts, strict=True):
                seen_by_prompt[ids.to(seen.device)] = True
            self.seen = seen.repeat_interleave(self.num_generations, 0)
        seen = None if self.seen is None else self.seen[rows]
        scores = filter_logits(logits, self.sampling, seen)
        if self.sampling.truncates:
            keeps = ~scores.isneginf()
            kept_ids = keeps.nonzero()[:, 1].int().cpu()
            kept_of_rows = kept_ids.split(keeps.sum(1).tolist())
            for row, ids in zip(rows.tolist(), kept_of_rows, strict=True):
                self.kept[row].append(ids)
        return scores

    def record_masks(self, completions: Iterable[Completion]):
        """Store the kept ids in each completion, because training normalises over these ids."""
        for kept_of_row, completion in zip(self.kept, completions, strict=True):
            kept = kept_of_row[: len(completion.ids)]  # finished rows are decoded further
            if kept:
                counts = torch.tensor([len(ids) for ids in kept])
                completion.sampling_mask = counts, torch.cat(kept)

    def add_seen(self, rows: Tensor, ids: Tensor):
        """Add token ids (r,) to the ids of these rows that the repetition penalty applies to."""
        if self.seen is not None:
            self.seen[rows, ids] = True


def filter_logits(logits: Tensor, sampling: SamplingOptions, seen: Tensor | None = None) -> Tensor:
    """Apply the repetition penalty, the temperature, then top_k, top_p and min_p.

    With temperature 0 only the repetition penalty applies. The scores equal the scores of
    transformers' generate bit for bit, also for ties.

    Args:
        logits: (r, V) float32.
        sampling: the filters and the temperature.
        seen: (r, V) bool, True for ids in the prompt or in the completion so far, which the
            repetition penalty applies to. None applies no penalty.
    Returns:
        Scores (r, V), -inf for removed tokens.
    """
    scores = logits
    penalty = sampling.repetition_penalty
    if penalty != 1 and seen is not None:
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(seen, penalised, scores)
    if sampling.temperature == 0:
        return scores
    scores = scores / sampling.temperature
    if sampling.top_k:
        largest = scores.topk(min(sampling.top_k, scores.shape[-1])).values  # descending
        scores = scores.masked_fill(scores < largest[:, -1:], float("-inf"))
    if sampling.top_p < 1:
        ascending, order = scores.sort(dim=-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        drop[:, -1] = False  # the likeliest token always stays
        scores = scores.masked_fill(drop.scatter(1, order, drop), float("-inf"))
    if sampling.min_p:
        probs = scores.softmax(-1)
        threshold = sampling.min_p * probs.amax(-1, keepdim=True)
        scores = scores.masked_fill(probs < threshold, float("-inf"))
    return scores
