"""Dynamic sampling: replace groups whose rewards are all equal, because their gradient is 0.

Source: DAPO (arXiv 2503.14476), section 3.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from minivlmrl.data.rows import Completion, Row
from minivlmrl.losses.advantages import group_std
from minivlmrl.trainers.base import Rollout
from minivlmrl.trainers.rollout import RolloutTrainer


@dataclass
class Group:
    """One prompt's completions with their rewards, in a picklable form for other ranks."""

    index: int  # the row's index in the dataset
    key: str  # the row's key, from which the seed for sampling its completions is derived
    completions: list[Completion]  # the prompt's G completions
    rewards: Tensor  # (G, K): K rewards per completion
    rewards_differ: bool  # False if all completions in the group have the same reward

    @property
    def position(self) -> int:
        """The row's position in the sampling order, which is the last part of the row's key."""
        return int(self.key.rpartition("/")[2])


def sample_until_groups_differ(
    trainer: RolloutTrainer, rows: Sequence[Row], compared_rewards: Callable[[Rollout], Tensor], max_num_batches: int
) -> tuple[Rollout, int]:
    """Sample batches of rows until the rewards differ in enough groups, and build a rollout.

    After the last batch, the rollout is filled up with groups whose rewards are equal.

    Args:
        rows: the first batch.
        compared_rewards: returns a rollout's rewards (n, K). A group differs if the
            prompt's completions differ in at least one column.
    Returns:
        The rollout, and the number of sampled batches.
    """
    rollout = trainer.sample_rollout(rows)
    count = len(rollout.groups) * trainer.world.size
    groups = gather_groups(trainer, rollout, compared_rewards(rollout))
    num_batches = 1
    while num_batches < max_num_batches:
        if sum(group.rewards_differ for group in groups) >= count:
            break
        rollout = trainer.sample_rollout(next(trainer.batches))
        groups += gather_groups(trainer, rollout, compared_rewards(rollout))
        num_batches += 1
    return choose_groups(trainer, groups, count), num_batches


def gather_groups(trainer: RolloutTrainer, rollout: Rollout, compared: Tensor) -> list[Group]:
    """Gather a rollout's groups from all ranks, in the order in which they were sampled."""
    size = trainer.config.num_generations
    differs = torch.stack([group_std(column, size) > 1e-8 for column in compared.unbind(1)]).any(0)
    local = []
    for samples, rewards_differ in zip(rollout.groups, differs.tolist(), strict=True):
        completions = [sample.completion for sample in samples]
        for completion in completions:
            # The reward has been computed, so the environment is no longer needed. It is removed, because it may not be
            # picklable.
            completion.environment = None
        rewards = torch.stack([sample.rewards for sample in samples])
        row = samples[0].row
        local.append(Group(row.index, row.key, completions, rewards, rewards_differ))
    groups = chain(*trainer.world.gather_objects(local))
    return sorted(groups, key=lambda group: group.position)


def choose_groups(trainer: RolloutTrainer, groups: list[Group], count: int) -> Rollout:
    """Build a rollout with `count` groups, and prefer groups whose rewards differ."""
    chosen = sorted(groups, key=lambda group: not group.rewards_differ)[:count]
    per_step = count // trainer.steps_per_rollout
    local = []  # this rank's groups, one optimizer step after the other
    for start in range(0, count, per_step):
        local += trainer.world.share(chosen[start : start + per_step])
    rows = [trainer.batches.row(group.index, group.key) for group in local]
    prompts = [row.prompt(trainer.processor) for row in rows]
    completions = [group.completions for group in local]
    rewards = torch.cat([group.rewards for group in local])
    return Rollout.join(rows, prompts, completions, rewards)
