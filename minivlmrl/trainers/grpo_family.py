"""The rest of GRPO's family: other losses and advantages, dynamic sampling, corrections.

RLOO has ratios of whole completions, advantages against the others of the group, and the KL in the
reward. train.py takes this class if a recipe asks for what the book's GRPO does not have; with the
book's options both compute the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from minivlmrl.config.import_utils import find_named, with_options
from minivlmrl.config.options import GRPOOptions
from minivlmrl.config.parsing import naming
from minivlmrl.data.rows import Completion, Row
from minivlmrl.losses import grpo
from minivlmrl.losses.advantages import combine, group_advantages, group_std
from minivlmrl.losses.grpo import Counts
from minivlmrl.losses.grpo_variants import (
    AVERAGES,
    policy_loss,
    rollout_importance_ratio,
    top_entropy_threshold,
)
from minivlmrl.losses.ppo import leave_one_out, normalize_then_sum
from minivlmrl.model.packing import MicroBatch, Step
from minivlmrl.rewards.registry import guarded
from minivlmrl.trainers.grpo import Rollout
from minivlmrl.trainers.grpo_stage import GRPOStage, StageBatch

Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]


BEYOND = (
    *("top_entropy_quantile", "entropy_coef", "rollout_correction", "rollout_correction_bounds"),
    *("mask_truncated_completions", "soft_punish_cache", "max_num_gen_batches"),
    "multi_objective_aggregation",
)


def needs_family(config: GRPOOptions) -> bool:
    """Say whether a recipe asks for something that the book's GRPO does not have."""
    defaults = vars(GRPOOptions())
    return (
        config.loss_type not in grpo.AVERAGES
        or config.importance_sampling_level == "sequence_token"
        or any(getattr(config, name) != defaults[name] for name in BEYOND)
    )


def find_loss(config: GRPOOptions) -> Callable:
    """Find the loss of a recipe: policy_loss, or the user's (ValueError: there is none)."""
    with naming(f"grpo.loss_type {config.loss_type}"):
        return with_options(
            *find_named("loss", config.loss_type, dict.fromkeys(AVERAGES, policy_loss))
        )


def try_loss(loss: Callable, config: GRPOOptions):
    """Ask a user's loss about one completion of two tokens (it raises what it raises later)."""
    logps = torch.zeros(1, 2, requires_grad=True)
    value, metrics = loss(
        logps,
        torch.ones(1),
        torch.ones(1, 2),
        config,
        old_per_token_logps=None,
        ref_per_token_logps=torch.zeros(1, 2),
        counts=Counts(1, 2, 2),
    )
    value.backward()
    for metric in metrics.values():
        metric.item()
    if logps.grad is None:
        raise ValueError("it does not depend on the first argument, the log-probabilities")


@dataclass
class FamilyBatch(StageBatch):
    importance_sampling_ratio: Tensor | None = None  # (R, T) or (R, 1)
    old_entropies: Tensor | None = None  # (R, T)
    entropy_threshold: float | None = None  # of the whole optimizer step ...
    num_entropy_tokens: float | None = None  # ... and how many tokens reach it


@dataclass
class Group:
    """The completions of a row, as ranks send them to each other."""

    index: int  # of the row in the dataset
    key: str  # of the row, by which its completions were drawn
    completions: list[Completion]  # G
    rewards: Tensor  # (G, K)
    differs: bool  # they earned different rewards, so they teach something

    @property
    def position(self) -> int:
        """Its place in the order in which rows were drawn: a key ends with it."""
        return int(self.key.rpartition("/")[2])


class Family(GRPOStage):
    """GRPO with every option of GRPOOptions."""

    config_type = GRPOOptions
    batch_type = FamilyBatch

    @classmethod
    def check(cls, run):
        super().check(run)
        config = getattr(run, cls.stage)
        loss = find_loss(config)
        if loss is not policy_loss:
            guarded(f"{cls.stage}.loss_type {config.loss_type}", try_loss, loss, config)

    def __init__(self, *args):
        super().__init__(*args)
        self.loss_function = find_loss(self.config)
        self.rloo = self.config.loss_type == "rloo"
        self.options = self.config
        if self.rloo:
            self.options = replace(self.config, beta=0.0)  # its KL is in the reward
        self.gdpo = self.config.multi_objective_aggregation == "normalize_then_sum"
        self.rounds = 1  # draws of rows that the present rollout took

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        self.batches = batches
        yield from super().steps(batches)

    def roll_out(self, rows: Sequence[Row]) -> Rollout:
        """Make a rollout; groups with equal rewards give way (dynamic sampling, 2503.14476)."""
        rollout = super().roll_out(rows)
        self.rounds = 1
        if self.config.max_num_gen_batches == 1:
            return rollout
        count = len(rollout.rows) * self.world.size
        groups = self.all_groups(rollout)
        while self.rounds < self.config.max_num_gen_batches:
            if sum(group.differs for group in groups) >= count:
                break
            groups += self.all_groups(super().roll_out(next(self.batches)))
            self.rounds += 1
        return self.keep(groups, count)

    def all_groups(self, rollout: Rollout) -> list[Group]:
        """Gather the groups of all ranks, in the order in which their rows were drawn."""
        G = self.config.num_generations
        judged = rollout.rewards if self.gdpo else self.shaped(rollout)[:, None]  # (n, K) or (n, 1)
        differs = torch.stack([group_std(column, G) > 1e-8 for column in judged.unbind(1)]).any(0)
        columns = rollout.rows, rollout.completions, rollout.rewards.split(G), differs.tolist()
        local = []
        for row, completions, rewards, differ in zip(*columns, strict=True):
            for completion in completions:
                completion.environment = None  # it has been asked, and may not be sent
            local.append(Group(row.index, row.key, completions, rewards, differ))
        groups = chain(*self.world.gather_objects(local))
        return sorted(groups, key=lambda group: group.position)

    def keep(self, groups: list[Group], count: int) -> Rollout:
        """Make a rollout of `count` groups: the first whose rewards differ, then the others."""
        kept = sorted(groups, key=lambda group: not group.differs)[:count]
        per_step = count // self.steps_per_rollout
        local = []  # this rank's share of each optimizer step
        for start in range(0, count, per_step):
            local += self.world.share(kept[start : start + per_step])
        rows = [self.batches.row(group.index, group.key) for group in local]
        prompts = [row.prompt(self.processor) for row in rows]
        completions = [group.completions for group in local]
        return Rollout(rows, prompts, completions, torch.cat([group.rewards for group in local]))

    def shaped(self, rollout: Rollout) -> Tensor:
        """Sum the rewards of this rank, (n,), after overlong shaping."""
        rewards = combine(rollout.rewards, self.reward_weights)
        if self.config.soft_punish_cache:
            limit = self.run.sampling.max_new_tokens
            cache = self.config.soft_punish_cache
            lengths = [len(c.ids) for group in rollout.completions for c in group]
            punished = [soft_overlong_punishment(n, limit, cache) for n in lengths]
            rewards = rewards + torch.tensor(punished)
        return rewards

    def micro_batches(
        self, rollout: Rollout, part: range, advantages: Tensor | None = None
    ) -> list[FamilyBatch]:
        batches = super().micro_batches(rollout, part, advantages)
        config = self.config
        if config.mask_truncated_completions:
            stopped = [c.stopped for group in rollout.completions for c in group]
            train_on(torch.tensor(stopped), rollout, part, batches, self.world)
        if config.rollout_correction:
            low, high = config.rollout_correction_bounds
            for batch in batches:
                batch.importance_sampling_ratio = rollout_importance_ratio(
                    batch.old_per_token_logps,
                    batch.sampler_logps,
                    batch.loss_mask,
                    mode=config.rollout_correction,
                    clip_max=high,
                    clip_min=low,
                )
        if config.top_entropy_quantile < 1:
            self.find_threshold(batches)
        return batches

    def teaching(self, rows: list[int], advantages: Tensor) -> list[int]:
        """Keep all rows where an entropy counts, bnpo averages over a micro-batch, or a user's loss."""
        config = self.config
        if self.loss_function is not policy_loss:
            return rows
        if config.entropy_coef or config.top_entropy_quantile < 1 or config.loss_type == "bnpo":
            return rows
        return super().teaching(rows, advantages)

    def add_logps(self, batch: FamilyBatch):
        super().add_logps(batch)
        kl_in_reward = self.rloo and self.config.beta
        if self.config.rollout_correction or kl_in_reward or self.config.top_entropy_quantile < 1:
            logps, entropies = self.logps(batch.group)
            batch.old_per_token_logps = batch.group.pad(logps)
            batch.old_entropies = batch.group.pad(entropies)

    def find_threshold(self, batches: list[FamilyBatch]):
        """Find the entropy that the upper share of a step's tokens reaches, over all ranks."""
        local = torch.cat([b.old_entropies[b.loss_mask.bool()].cpu() for b in batches])
        entropies = torch.cat(self.world.gather_objects(local))
        threshold = top_entropy_threshold(entropies, self.config.top_entropy_quantile)
        for batch in batches:
            batch.entropy_threshold = threshold.item()
            batch.num_entropy_tokens = (entropies >= threshold).sum().item()

    def prepare(self, rollout: Rollout, parts: list[range]) -> list[list[FamilyBatch]]:
        """Make advantages, then micro-batches; RLOO's KL needs these first."""
        config = self.config
        G = config.num_generations
        rewards = self.world.all_gather(rollout.rewards)
        total = self.world.all_gather(self.shaped(rollout))
        rollout.metrics = self.metrics(rollout, rewards, total)
        if config.max_num_gen_batches > 1:
            rollout.metrics["num_gen_batches"] = float(self.rounds)
        if self.rloo and config.beta:
            return self.prepare_with_kl(rollout, parts, total)
        if self.rloo:
            advantages = leave_one_out(total, G)
        elif self.gdpo:
            advantages = normalize_then_sum(rewards, self.reward_weights, G)
        else:
            advantages = group_advantages(total, G, config.scale_rewards)
        local = self.world.local(advantages)
        return [self.micro_batches(rollout, part, local) for part in parts]

    def prepare_with_kl(self, rollout: Rollout, parts: list[range], rewards: Tensor):
        """Take beta times k1 of its KL from the reward of each completion, for RLOO."""
        steps = [self.micro_batches(rollout, part) for part in parts]
        batches = list(chain(*steps))
        kl = []
        for batch in batches:
            log_ratio = batch.old_per_token_logps - batch.ref_per_token_logps
            kl.append((log_ratio * batch.loss_mask).sum(1).cpu())
        # micro-batches may hold completions in another order than the rollout
        order = torch.cat([batch.completion_index for batch in batches]).argsort()
        rewards = rewards - self.config.beta * self.world.all_gather(torch.cat(kl)[order])
        local = self.world.local(leave_one_out(rewards, self.config.num_generations))
        for batch in batches:
            batch.advantages = local[batch.completion_index].to(self.world.device)
        return steps

    def loss(self, batch: FamilyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = self.logps(batch.group)
        old_logps = batch.old_per_token_logps
        if self.config.num_iterations * self.config.steps_per_generation == 1:
            old_logps = None  # the policy has not moved since
        family_options = {}
        if self.loss_function is policy_loss:
            family_options = {
                "importance_sampling_ratio": batch.importance_sampling_ratio,
                "entropies": batch.group.pad(entropies),
                "entropy_threshold": batch.entropy_threshold,
                "num_entropy_tokens": batch.num_entropy_tokens or batch.counts.tokens,
            }
        loss, metrics = self.loss_function(
            batch.group.pad(logps),
            batch.advantages,
            batch.loss_mask,
            self.options,
            old_per_token_logps=old_logps,
            ref_per_token_logps=batch.ref_per_token_logps,
            counts=batch.counts,
            **family_options,
        )
        return loss, metrics | self.diagnose(batch, logps, entropies)


def train_on(counted: Tensor, rollout: Rollout, part: range, batches: list[MicroBatch], world):
    """Train on some completions, (n,) bool; the others are sequences of the step, without tokens.

    Changes loss_mask and counts of `batches`, the micro-batches of the prompts `part`.
    """
    lengths = torch.tensor([[int(c.written.sum()) for c in group] for group in rollout.completions])
    tokens = (lengths * counted.view_as(lengths))[part.start : part.stop].sum().item()
    counts = replace(batches[0].counts, tokens=max(world.sum(tokens)[0], 1))
    for batch in batches:
        kept = counted[batch.completion_index].to(batch.loss_mask.device)
        batch.loss_mask = batch.loss_mask * kept[:, None]
        batch.counts = counts


def soft_overlong_punishment(length: int, max_completion_len: int, soft_punish_cache: int) -> float:
    """Punish length: 0 up to max_completion_len - soft_punish_cache tokens, then falling to -1.

    Example: lengths 80, 90, 100 and 120 with 100 and 20: 0, -0.5, -1 and -1.
    Source: DAPO eq. 13 (arXiv 2503.14476); TRL's get_soft_overlong_punishment.
    """
    free = max_completion_len - soft_punish_cache
    if length <= free:
        return 0.0
    if length > max_completion_len:
        return -1.0
    return (free - length) / soft_punish_cache
