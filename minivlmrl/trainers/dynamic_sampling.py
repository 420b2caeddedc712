"""Dynamic sampling: replace groups with equal rewards, whose advantages are 0 (DAPO, arXiv 2503.14476, section 3.2)."""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from minivlmrl.data.rows import Row
from minivlmrl.losses.advantages import group_std
from minivlmrl.trainers.base import Rollout
from minivlmrl.trainers.rebalancing import SerializedGroup, load_groups
from minivlmrl.trainers.rollout import RolloutTrainer


def sample_until_groups_differ(
    trainer: RolloutTrainer, rows: Sequence[Row], compared_rewards: Callable[[Rollout], Tensor], max_num_batches: int
) -> tuple[Rollout, int]:
    """Sample until enough groups have rewards that differ, and build a rollout from those groups.

    If too few groups differ after max_num_batches batches, groups with equal rewards fill the rollout.

    Args:
        compared_rewards: rollout -> rewards (n, K); a group is kept if its values differ in at least one column.
    Returns:
        rollout, and number of sampled batches
    """
    rollout = trainer.sample_and_score(rows)
    count = len(rollout.groups) * trainer.world.size
    groups = gather_groups(trainer, rollout, compared_rewards(rollout))
    num_batches = 1
    while num_batches < max_num_batches:
        if sum(differs for _, differs in groups) >= count:
            break
        rollout = trainer.sample_and_score(next(trainer.batches))
        groups += gather_groups(trainer, rollout, compared_rewards(rollout))
        num_batches += 1
    return choose_groups(trainer, groups, count), num_batches


def gather_groups(trainer: RolloutTrainer, rollout: Rollout, compared: Tensor) -> list[tuple[SerializedGroup, bool]]:
    """Return [(group, whether its rewards differ), ...] from all ranks, in sampling order."""
    size = trainer.options.num_generations
    differs = torch.stack([group_std(column, size) > 1e-8 for column in compared.unbind(1)]).any(0)
    local = list(zip(map(SerializedGroup.from_samples, rollout.groups), differs.tolist(), strict=True))
    groups = chain(*trainer.world.gather_objects(local))
    # sort by sampling order, the last number in a group's key, such as 17 in "0/grpo/3/17"
    return sorted(groups, key=lambda pair: int(pair[0].key.rpartition("/")[2]))


def choose_groups(trainer: RolloutTrainer, groups: list[tuple[SerializedGroup, bool]], count: int) -> Rollout:
    """Build a rollout from `count` groups, preferably with rewards that differ."""
    chosen = [group for group, _ in sorted(groups, key=lambda pair: not pair[1])[:count]]
    per_step = count // trainer.options.steps_per_rollout
    local = []  # this rank's groups, in optimizer-step order
    for start in range(0, count, per_step):
        local += trainer.world.share(chosen[start : start + per_step])
    G = trainer.options.num_generations
    begin = trainer.world.rank * len(local) * G
    return Rollout(load_groups(trainer.batches, local, range(begin, begin + len(local) * G, G)))
