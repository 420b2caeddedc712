"""Dynamic sampling replaces groups whose rewards are all equal, because such groups have advantages of 0.

Source: DAPO (arXiv 2503.14476), section 3.2.
"""

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
    """Sample completions until enough groups contain different rewards, and build a rollout from these groups.

    If the rollout is still too small after max_num_batches batches, groups with equal rewards fill it.

    Args:
        rows: the first batch.
        compared_rewards: function that returns a rollout's rewards (n, K); a group differs if at least one of its K
            columns contains different rewards.
    Returns:
        The rollout, and the number of sampled batches.
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
    """Return [(group, True if its rewards differ), ...] for all ranks, in the order of sampling."""
    size = trainer.options.num_generations
    differs = torch.stack([group_std(column, size) > 1e-8 for column in compared.unbind(1)]).any(0)
    local = list(zip(map(SerializedGroup.from_samples, rollout.groups), differs.tolist(), strict=True))
    groups = chain(*trainer.world.gather_objects(local))
    # The last number in a key, such as 17 in "0/grpo/3/17", numbers the rows in the order of sampling.
    return sorted(groups, key=lambda pair: int(pair[0].key.rpartition("/")[2]))


def choose_groups(trainer: RolloutTrainer, groups: list[tuple[SerializedGroup, bool]], count: int) -> Rollout:
    """Build a rollout from `count` groups; groups with equal rewards are used only if there are too few others."""
    chosen = [group for group, _ in sorted(groups, key=lambda pair: not pair[1])[:count]]
    per_step = count // trainer.options.steps_per_rollout
    local = []  # this rank's groups, in the order of the optimizer steps
    for start in range(0, count, per_step):
        local += trainer.world.share(chosen[start : start + per_step])
    G = trainer.options.num_generations
    begin = trainer.world.rank * len(local) * G
    return Rollout(load_groups(trainer.batches, local, range(begin, begin + len(local) * G, G)))
