"""Simulate how evenly tokens are spread over ranks if completion lengths differ; needs no GPU.

python benchmarks/rebalancing.py    # a few seconds

A rank has 8 prompts with 1,224 tokens, and 8 completions per prompt with log-normal lengths, 64 to 4,096 tokens.
Columns are means over many simulated steps:

    own groups    tokens on the rank with the most tokens / mean over ranks, if ranks train on their own groups
    rebalanced    the same, after minivlmrl/trainers/rebalancing.py has exchanged groups between ranks
    lock-step     the same, if ranks wait for each other in each micro-batch (a sharded model without once_per_step)
    moved         share of groups that another rank trains on; the other rank reads the images again
"""

import math

import torch
from torch import Tensor

from minivlmrl.trainers.rebalancing import assign_groups

PROMPTS = GENERATIONS = 8
PROMPT_TOKENS, SHORTEST, LONGEST = 1224, 64, 4096
# median length, standard deviation of log length, share of its variance between prompts
DISTRIBUTIONS = {
    "nearly equal": (240, 0.1, 0.3),
    "short": (200, 0.6, 0.3),
    "easy and hard prompts": (400, 0.8, 0.7),
    "long": (800, 1.0, 0.3),
    "long, easy and hard prompts": (800, 1.0, 0.7),
}


def draw_lengths(ranks: int, distribution: str, generator: torch.Generator) -> Tensor:
    """Draw tokens per group: (ranks, PROMPTS)."""
    median, sigma, share = DISTRIBUTIONS[distribution]
    of_prompts = torch.randn(ranks, PROMPTS, 1, generator=generator)
    of_completions = torch.randn(ranks, PROMPTS, GENERATIONS, generator=generator)
    deviations = math.sqrt(share) * of_prompts + math.sqrt(1 - share) * of_completions
    lengths = (median * (sigma * deviations).exp()).clamp(SHORTEST, LONGEST).round()
    return PROMPT_TOKENS + lengths.sum(2)


def rebalance(lengths: Tensor) -> tuple[Tensor, float]:
    """Rebalance groups; return the new lengths (ranks, PROMPTS) and the share of moved groups."""
    parts = assign_groups(lengths.tolist())
    moved = [source != rank for rank, part in enumerate(parts) for source, _ in part]
    return torch.stack([torch.stack([lengths[group] for group in part]) for part in parts]), sum(moved) / len(moved)


def imbalance(lengths: Tensor) -> float:
    """Return the tokens on the rank with the most tokens, divided by the mean over ranks."""
    return (lengths.sum(1).max() / lengths.sum(1).mean()).item()


def lock_step(lengths: Tensor) -> float:
    """Return the sum over the longest group per micro-batch, divided by the mean tokens per rank."""
    return (lengths.amax(0).sum() / lengths.sum(1).mean()).item()


def main():
    generator = torch.Generator().manual_seed(0)
    print("| completions | ranks | own groups | rebalanced | lock-step | moved |\n|---|---|---|---|---|---|")
    for distribution in DISTRIBUTIONS:
        for ranks, steps in ((8, 100), (64, 20)):
            rows = []
            for _ in range(steps):
                lengths = draw_lengths(ranks, distribution, generator)
                rebalanced, moved = rebalance(lengths)
                rows.append([imbalance(lengths), imbalance(rebalanced), lock_step(rebalanced), moved])
            own, once, locked, moved = torch.tensor(rows).mean(0).tolist()
            print(f"| {distribution} | {ranks} | {own:.2f} | {once:.2f} | {locked:.2f} | {moved:.0%} |", flush=True)


if __name__ == "__main__":
    main()
