"""Distribute groups of completions among the ranks by length, so that no rank waits long for a slower rank.

A group is a prompt with its completions. Ranks send each other token ids, rewards and the outputs of a frozen vision
tower, but no images. The patches of one image can take 10 MB, so each rank reads the image files of its prompts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.data.rows import Completion
from minivlmrl.trainers.base import Rollout, Sample
from minivlmrl.trainers.rollout import RolloutTrainer


@dataclass
class Group:
    """A prompt's completions and rewards in a form that can be sent to other ranks."""

    index: int  # the row's index in the dataset
    key: str  # the row's key, from which the seed for sampling its completions is derived
    completions: list[Completion]  # the prompt's G completions
    rewards: Tensor  # (G, K): K rewards per completion

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Group":
        completions = [sample.completion for sample in samples]
        for completion in completions:
            # Pickling a user's environment may fail, so no environment is sent to other ranks.
            completion.environment = None
        row = samples[0].row
        return cls(row.index, row.key, completions, torch.stack([sample.rewards for sample in samples]))


def open_groups(trainer: RolloutTrainer, groups: Sequence[Group], first_samples: Iterable[int]) -> list[list[Sample]]:
    """Read the rows of groups, and return each group's samples; all ranks must call this function together."""
    rows = trainer.batches.rows([(group.index, group.key) for group in groups])
    trainer.world.wait("read images")
    opened = []
    for row, group, first in zip(rows, groups, first_samples, strict=True):
        prompt = row.prompt(trainer.processor)
        opened += Rollout.join([row], [prompt], [group.completions], group.rewards, first).groups
    return opened


def deal(trainer: RolloutTrainer, groups: Sequence[list[Sample]], lengths: Sequence[int]) -> list[list[Sample]]:
    """Exchange groups between ranks, and return this rank's new groups, the longest first.

    Args:
        groups: this rank's groups; all ranks have equally many.
        lengths: the number of tokens to train on in each group.
    """
    world = trainer.world
    dealt = assign(world.gather_objects(lengths))
    parcels = []  # for each rank {index of a group: (the group, its first sample's index, its image embeddings)}
    for rank, part in enumerate(dealt):
        parcel = {}
        for i in [i for source, i in part if source == world.rank != rank]:
            first = groups[i][0]
            embeds = first.prompt.vision_embeds
            if embeds is not None:
                embeds = embeds.cpu().clone()  # only this prompt's rows of a larger tensor
            parcel[i] = Group.of(groups[i]), first.index, embeds
        parcels.append(parcel)
    arrived = world.exchange(parcels)
    part = dealt[world.rank]
    moved = [arrived[source][i] for source, i in part if source != world.rank]
    opened = open_groups(trainer, [group for group, _, _ in moved], [first for _, first, _ in moved])
    for samples, (_, _, embeds) in zip(opened, moved, strict=True):
        if embeds is not None:
            samples[0].prompt.vision_embeds = embeds.to(world.device)
    next_opened = iter(opened)
    return [groups[i] if source == world.rank else next(next_opened) for source, i in part]


def assign(lengths: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Assign groups to ranks, so that all ranks have equally many groups and nearly equally many tokens.

    In each turn, every rank gets one group: the longest remaining group goes to the rank with the fewest tokens. In a
    sharded model, ranks wait for each other. They wait less if their groups have similar lengths in each turn.

    Example: the numbers of tokens in each rank's groups
        before    rank 0: 9, 5, 1    rank 1: 8, 7, 2
        after     rank 0: 9, 5, 2    rank 1: 8, 7, 1

    Args:
        lengths: for each rank, the lengths of its groups.
    Returns:
        For each rank, the groups that it gets, the longest first, as (rank that has the group, index of the group).
    """
    ranks = range(len(lengths))
    # If all groups are equally long, the sort changes nothing, and each rank keeps its own groups.
    groups = [(rank, i) for i in range(len(lengths[0])) for rank in ranks]
    groups.sort(key=lambda group: lengths[group[0]][group[1]], reverse=True)
    dealt: list[list[tuple[int, int]]] = [[] for _ in ranks]
    tokens = [0 for _ in ranks]
    for start in range(0, len(groups), len(ranks)):
        fewest_first = sorted(ranks, key=tokens.__getitem__)
        for rank, (source, i) in zip(fewest_first, groups[start : start + len(ranks)], strict=True):
            dealt[rank].append((source, i))
            tokens[rank] += lengths[source][i]
    return dealt
