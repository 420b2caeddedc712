"""Dynamic sampling: resample prompts whose completions all have equal rewards (DAPO, arXiv 2503.14476, section 3.2).

Such a group, a prompt with its completions, has advantages 0. Ranks exchange token ids and rewards of groups, but not
image patches, which can take 10 MB: a receiving rank reads the image files again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivlmrl.data.loader import Batches
from minivlmrl.data.rows import Completion, Row
from minivlmrl.losses.advantages import group_std
from minivlmrl.trainers.base import Rollout, Sample, split


@dataclass
class SerializedGroup:
    """Completions and rewards for a prompt, to send to other ranks."""

    index: int  # row index in the dataset
    key: str  # seed for sampling, such as "0/grpo/3/17"
    completions: list[Completion]
    rewards: Tensor  # (G, K)
    differs: bool  # whether the rewards differ; if not, advantages are 0

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], differs: bool) -> "SerializedGroup":
        completions = [sample.completion for sample in samples]
        for completion in completions:
            # drop the environment, because pickling a user's object could fail
            completion.tool_use.environment = None
        row = samples[0].row
        return cls(row.index, row.key, completions, torch.stack([sample.rewards for sample in samples]), differs)


def sample_until_groups_differ(trainer: Any, rows: Sequence[Row]) -> Rollout:
    """Sample batches of prompts until enough groups have different rewards.

    If max_num_gen_batches batches are not enough, groups with equal rewards fill the rollout.

    Args:
        trainer: GRPOTrainer.
    """
    options = trainer.options
    world = trainer.world
    count = len(rows) * world.size
    groups = []
    num_batches = 0
    while num_batches < options.max_num_gen_batches and sum(group.differs for group in groups) < count:
        if num_batches:
            rows = next(trainer.batches)
        groups += gather_groups(trainer, trainer.sample_and_score(rows))
        num_batches += 1
    groups.sort(key=lambda group: not group.differs)
    local = []  # this rank's groups, ordered by optimizer step
    for part in split(groups[:count], count // options.steps_per_generation):
        local += world.share(part)
    first_sample = world.rank * len(local) * options.num_generations
    return Rollout(load_groups(trainer.batches, local, first_sample), {"num_gen_batches": float(num_batches)})


def gather_groups(trainer: Any, rollout: Rollout) -> list[SerializedGroup]:
    """Return the groups of all ranks, in batch order."""
    size = trainer.options.num_generations
    compared = trainer.total_rewards(rollout.samples)[:, None]  # (samples, 1)
    if trainer.options.multi_objective_aggregation == "normalize_then_sum":
        compared = rollout.rewards  # (samples, K)
    differs = torch.stack([group_std(column, size) > 1e-8 for column in compared.unbind(1)]).any(0)
    local = list(map(SerializedGroup.from_samples, rollout.groups, differs.tolist()))
    of_ranks = trainer.world.gather_objects(split(local, len(local) // trainer.options.steps_per_generation))
    # a batch has the prompts of the first optimizer step on rank 0, on rank 1, ..., then those of the second step
    return [group for step in zip(*of_ranks, strict=True) for part in step for group in part]


def load_groups(batches: Batches, groups: Sequence[SerializedGroup], first_sample: int) -> list[list[Sample]]:
    """Rebuild the samples of each group from its dataset row; all ranks must call this."""
    rows = batches.rows([(group.index, group.key) for group in groups])
    batches.world.barrier()
    return Rollout.join(
        rows,
        [row.prompt(batches.processor) for row in rows],
        [group.completions for group in groups],
        torch.cat([group.rewards for group in groups]),
        first_sample,
    ).groups
