"""Distribute groups of completions among the ranks by length, so that no rank waits long for a slower rank.

A group is a prompt with its completions. Ranks send each other token ids, rewards and the outputs of a frozen vision
tower, but no images. The patches of one image can take 10 MB, so a group's new rank must read the prompt's image files
again before it can train on the group. Therefore a group stays on its rank if moving it would balance the tokens only
slightly.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.data.loader import Batches
from minivlmrl.data.rows import Completion
from minivlmrl.trainers.base import Rollout, Sample

# A group moves only if that saves a rank more than this share of the mean number of tokens per rank.
WORTH_MOVING = 0.05


@dataclass
class SerializedGroup:
    """A prompt's completions and rewards in a form that can be sent to other ranks."""

    index: int  # the row's index in the dataset
    key: str  # the row's key, from which the seed for sampling its completions is derived
    completions: list[Completion]  # the prompt's G completions
    rewards: Tensor  # (G, K): K rewards per completion

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> "SerializedGroup":
        completions = [sample.completion for sample in samples]
        for completion in completions:
            # Pickling a user's environment may fail, so no environment is sent to other ranks.
            completion.environment = None
        row = samples[0].row
        return cls(row.index, row.key, completions, torch.stack([sample.rewards for sample in samples]))


# a group on its way to another rank, its first sample's index, and its image embeddings
Payload = tuple[SerializedGroup, int, Tensor | None]


def load_groups(
    batches: Batches, groups: Sequence[SerializedGroup], first_samples: Iterable[int]
) -> list[list[Sample]]:
    """Read the rows of groups, and return each group's samples; all ranks must call this function together."""
    rows = batches.rows([(group.index, group.key) for group in groups])
    batches.world.barrier("read images")
    loaded = []
    for row, group, first in zip(rows, groups, first_samples, strict=True):
        prompt = row.prompt(batches.processor)
        loaded += Rollout.join([row], [prompt], [group.completions], group.rewards, first).groups
    return loaded


def payload_of(samples: list[Sample]) -> Payload:
    first = samples[0]
    embeds = first.prompt.vision_embeds
    if embeds is not None:
        embeds = embeds.cpu().clone()  # only this prompt's rows of a larger tensor
    return SerializedGroup.from_samples(samples), first.index, embeds


def rebalance(batches: Batches, groups: Sequence[list[Sample]], lengths: Sequence[int]) -> list[list[Sample]]:
    """Exchange groups between ranks, and return this rank's new groups, longest first.

    Args:
        batches: reads the rows of the groups that this rank gets from other ranks.
        groups: this rank's groups; all ranks have the same number of groups.
        lengths: the number of tokens to train on in each group.
    """
    world = batches.world
    assignment = assign_groups(world.gather_objects(lengths))
    payloads: list[dict[int, Payload]] = [{} for _ in assignment]
    for rank, part in enumerate(assignment):
        for source, i in part:
            if source == world.rank and rank != source:
                payloads[rank][i] = payload_of(groups[i])
    arrived = world.exchange(payloads)
    part = assignment[world.rank]
    moved = [arrived[source][i] for source, i in part if source != world.rank]
    loaded = load_groups(batches, [group for group, _, _ in moved], [first for _, first, _ in moved])
    for samples, (_, _, embeds) in zip(loaded, moved, strict=True):
        if embeds is not None:
            samples[0].prompt.vision_embeds = embeds.to(world.device)
    next_loaded = iter(loaded)
    return [groups[i] if source == world.rank else next(next_loaded) for source, i in part]


def assign_groups(lengths: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Assign groups to ranks, so that all ranks have the same number of groups and nearly the same number of tokens.

    The longest remaining group goes to the rank with the fewest tokens among the ranks that still have room. If its own
    rank still has room, a group moves only to a rank whose number of tokens is smaller by more than WORTH_MOVING times
    the mean. If no rank exceeds the mean by more than this share, no group moves.

    Example: the numbers of tokens in each rank's groups
        before    rank 0: 9, 5, 1    rank 1: 8, 7, 2
        after     rank 0: 9, 5, 2    rank 1: 8, 7, 1

    Args:
        lengths: for each rank, the lengths of its groups.
    Returns:
        For each rank, the groups that it receives, longest first, as (rank that has the group now, index of the group).
    """
    ranks = range(len(lengths))
    room = len(lengths[0])
    groups = [(rank, i) for i in range(room) for rank in ranks]
    groups.sort(key=lambda group: lengths[group[0]][group[1]], reverse=True)
    totals = list(map(sum, lengths))
    mean = sum(totals) / len(ranks)
    if max(totals) <= (1 + WORTH_MOVING) * mean:
        return [[(source, i) for source, i in groups if source == rank] for rank in ranks]
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
