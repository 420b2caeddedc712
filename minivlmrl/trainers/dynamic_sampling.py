"""Dynamic sampling: groups whose rewards are all equal teach nothing and are replaced by others.

Source: DAPO (arXiv 2503.14476), section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivlmrl.data.rows import Completion, Row
from minivlmrl.losses.advantages import group_std
from minivlmrl.trainers.base import Rollout

if TYPE_CHECKING:
    from minivlmrl.trainers.grpo import GRPOTrainer


@dataclass
class Group:
    """The completions of a row, as ranks send them to each other."""

    index: int  # of the row in the dataset
    key: str  # of the row, by which its completions were sampled
    completions: list[Completion]  # G
    rewards: Tensor  # (G, K)
    differs: bool  # the rewards are not all equal

    @property
    def position(self) -> int:
        """Its place in the order in which rows were drawn: a key ends with it."""
        return int(self.key.rpartition("/")[2])


def sample_until_groups_differ(trainer: GRPOTrainer, rows: Sequence[Row]) -> Rollout:
    """Sample a rollout from at most max_num_gen_batches batches of rows, until enough groups differ.

    The groups whose rewards differ come first, in the order in which their rows were drawn; if
    there are too few after max_num_gen_batches, other groups fill the rollout.
    """
    rollout = trainer.sample_rollout(rows)
    most_batches = trainer.config.max_num_gen_batches
    trainer.num_gen_batches = 1
    count = len(rollout.rows) * trainer.world.size
    groups = gather_groups(trainer, rollout)
    while trainer.num_gen_batches < most_batches:
        if sum(group.differs for group in groups) >= count:
            break
        groups += gather_groups(trainer, trainer.sample_rollout(next(trainer.batches)))
        trainer.num_gen_batches += 1
    return choose_groups(trainer, groups, count)


def gather_groups(trainer: GRPOTrainer, rollout: Rollout) -> list[Group]:
    """Gather the groups of all ranks, in the order in which their rows were drawn."""
    config = trainer.config
    judged = trainer.total_rewards(rollout)[:, None]  # (n, 1)
    if config.multi_objective_aggregation == "normalize_then_sum":
        judged = rollout.rewards  # (n, K)
    size = config.num_generations
    differs = torch.stack([group_std(column, size) > 1e-8 for column in judged.unbind(1)]).any(0)
    columns = rollout.rows, rollout.completions, rollout.rewards.split(size), differs.tolist()
    local = []
    for row, completions, rewards, differ in zip(*columns, strict=True):
        for completion in completions:
            completion.environment = None  # it has been asked for its reward, and may not be sent
        local.append(Group(row.index, row.key, completions, rewards, differ))
    groups = chain(*trainer.world.gather_objects(local))
    return sorted(groups, key=lambda group: group.position)


def choose_groups(trainer: GRPOTrainer, groups: list[Group], count: int) -> Rollout:
    """Make a rollout of `count` groups: the first whose rewards differ, then the others."""
    chosen = sorted(groups, key=lambda group: not group.differs)[:count]
    per_step = count // trainer.steps_per_rollout
    local = []  # this rank's share of each optimizer step
    for start in range(0, count, per_step):
        local += trainer.world.share(chosen[start : start + per_step])
    rows = [trainer.batches.row(group.index, group.key) for group in local]
    prompts = [row.prompt(trainer.processor) for row in rows]
    completions = [group.completions for group in local]
    rewards = torch.cat([group.rewards for group in local])
    return Rollout(rows, prompts, completions, rewards)
