"""Dynamic sampling: replace groups with equal rewards, whose advantages are 0 (DAPO, arXiv 2503.14476, section 3.2)."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from minivlmrl.data.rows import Row
from minivlmrl.losses.advantages import group_std
from minivlmrl.trainers.base import Rollout, split
from minivlmrl.trainers.rebalancing import SerializedGroup, load_groups


def sample_until_groups_differ(trainer: Any, rows: Sequence[Row]) -> Rollout:
    """Sample until enough groups (completions for one prompt) have different rewards.

    After max_num_gen_batches batches, fill the rollout with groups that have equal rewards.

    Args:
        trainer: GRPOTrainer.
    """
    options = trainer.options
    world = trainer.world
    count = len(rows) * world.size
    groups = []
    num_batches = 0
    while num_batches < options.max_num_gen_batches and sum(differs for _, differs in groups) < count:
        if num_batches:
            rows = next(trainer.batches)
        groups += gather_groups(trainer, trainer.sample_and_score(rows))
        num_batches += 1
    groups.sort(key=lambda pair: not pair[1])
    chosen = [group for group, _ in groups[:count]]
    local = []  # groups for this rank, ordered by optimizer step
    for part in split(chosen, count // options.steps_per_generation):
        local += world.share(part)
    for number, group in enumerate(local, world.rank * len(local)):
        group.first_sample = number * options.num_generations
    return Rollout(load_groups(trainer.batches, local), {"num_gen_batches": float(num_batches)})


def gather_groups(trainer: Any, rollout: Rollout) -> list[tuple[SerializedGroup, bool]]:
    """Return [(group, whether its rewards differ), ...] from all ranks, in sampling order."""
    size = trainer.options.num_generations
    compared = trainer.total_rewards(rollout.samples)[:, None]  # (samples, 1)
    if trainer.options.multi_objective_aggregation == "normalize_then_sum":
        compared = rollout.rewards  # (samples, K)
    differs = torch.stack([group_std(column, size) > 1e-8 for column in compared.unbind(1)]).any(0)
    local = list(zip(map(SerializedGroup.from_samples, rollout.groups), differs.tolist(), strict=True))
    groups = chain(*trainer.world.gather_objects(local))
    # sort groups by batch position, the last number in a group's seed key: 17 in "0/grpo/3/17"
    return sorted(groups, key=lambda pair: int(pair[0].key.rpartition("/")[2]))
