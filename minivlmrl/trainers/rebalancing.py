"""Balance completion lengths between ranks, so that no rank waits long.

A group is a prompt with its completions. Ranks exchange token ids, rewards and image embeddings, but not image patches,
which can take 10 MB. The receiving rank reads the image files again, so a group moves to another rank only if this
saves much waiting time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.data.loader import Batches
from minivlmrl.data.rows import Completion
from minivlmrl.trainers.base import Rollout, Sample

# move a group only if this saves 5 % of the mean tokens per rank
WORTH_MOVING = 0.05


@dataclass
class SerializedGroup:
    """Completions and rewards of a prompt, to send to other ranks."""

    index: int  # row index in the dataset
    key: str  # seed for sampling, such as "0/grpo/3/17"
    completions: list[Completion]
    rewards: Tensor  # (G, K)
    first_sample: int  # index of the first sample over all ranks
    vision_embeds: Tensor | None = None  # image embeddings, None = compute them again

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> "SerializedGroup":
        completions = [sample.completion for sample in samples]
        for completion in completions:
            # ranks do not exchange environments: pickling a user's object could fail
            completion.tool_use.environment = None
        first = samples[0]
        return cls(
            first.row.index,
            first.row.key,
            completions,
            torch.stack([sample.rewards for sample in samples]),
            first.index,
        )


def load_groups(batches: Batches, groups: Sequence[SerializedGroup]) -> list[list[Sample]]:
    """Rebuild the samples of each group from its dataset row; all ranks must call this."""
    rows = batches.rows([(group.index, group.key) for group in groups])
    batches.world.barrier()
    loaded = []
    for row, group in zip(rows, groups, strict=True):
        prompt = row.prompt(batches.processor)
        if group.vision_embeds is not None:
            prompt.vision_embeds = group.vision_embeds.to(batches.world.device)
        loaded += Rollout.join([row], [prompt], [group.completions], group.rewards, group.first_sample).groups
    return loaded


def rebalance(batches: Batches, groups: Sequence[list[Sample]], lengths: Sequence[int]) -> list[list[Sample]]:
    """Exchange groups between ranks to balance tokens; return this rank's new groups, longest first.

    Args:
        groups: this rank's groups, the same number on all ranks.
        lengths: tokens to train on, per group.
    """
    world = batches.world
    assignment = assign_groups(world.gather_objects(lengths))
    payloads: list[dict[int, SerializedGroup]] = [{} for _ in assignment]
    for rank, part in enumerate(assignment):
        for source, i in part:
            if source == world.rank and rank != source:
                payloads[rank][i] = group = SerializedGroup.from_samples(groups[i])
                embeds = groups[i][0].prompt.vision_embeds
                if embeds is not None:
                    group.vision_embeds = embeds.cpu().clone()  # clone: a view keeps the whole tensor in memory
    arrived = world.exchange(payloads)
    part = assignment[world.rank]
    loaded = iter(load_groups(batches, [arrived[source][i] for source, i in part if source != world.rank]))
    return [groups[i] if source == world.rank else next(loaded) for source, i in part]


def assign_groups(lengths: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Assign groups to ranks: equal group counts, nearly equal token counts.

    Groups are assigned longest first, each to the rank with the fewest tokens so far. A group stays on its rank, unless
    this rank has no room, or another rank has fewer tokens by more than 5 % of the mean per rank (WORTH_MOVING). If no
    rank has over 5 % more tokens than the mean, no group moves.

    Example, tokens per group:
        before    rank 0: 9, 5, 1    rank 1: 8, 7, 2
        after     rank 0: 9, 5, 2    rank 1: 8, 7, 1

    Args:
        lengths: tokens per group, for each rank.
    Returns:
        new groups per rank, longest first, as (old rank, index on the old rank)
    """
    ranks = range(len(lengths))
    room = len(lengths[0])
    groups = [(rank, i) for i in range(room) for rank in ranks]
    groups.sort(key=lambda group: lengths[group[0]][group[1]], reverse=True)
    totals = list(map(sum, lengths))
    mean = sum(totals) / len(ranks)
    if max(totals) <= (1 + WORTH_MOVING) * mean:
        return [[group for group in groups if group[0] == rank] for rank in ranks]
    assignment: list[list[tuple[int, int]]] = [[] for _ in ranks]
    tokens = [0 for _ in ranks]
    for source, i in groups:
        load = {rank: float(tokens[rank]) for rank in ranks if len(assignment[rank]) < room}
        if source in load:
            load[source] -= WORTH_MOVING * mean
        rank = min(load, key=load.__getitem__)
        assignment[rank].append((source, i))
        tokens[rank] += lengths[source][i]
    return assignment
