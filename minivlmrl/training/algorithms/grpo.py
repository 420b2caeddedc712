"""Algorithms by name. Each is two methods, and the loop in train.py knows nothing else:

batches()     endless optimizer steps, each a list of micro-batches (offline: the data; online: rollouts)
loss(batch)   of one micro-batch, divided by the count of the whole step, with diagnostics
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minivlmrl.config import RunConfig
from minivlmrl.data.processor import Processor
from minivlmrl.data.sources import Dataset, Row, shuffled
from minivlmrl.model.batch import GroupBatch, pack
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.qwen2_5_vl import Qwen2_5_VL
from minivlmrl.rollout.advantages import combine, group_advantages, group_std
from minivlmrl.rollout.rollout import Rollout, rollout
from minivlmrl.training.distributed import World
from minivlmrl.training.losses import LOSS_TYPES, grpo_loss, sft_loss


@dataclass
class MicroBatch:
    """What one forward and backward works on."""

    group: GroupBatch
    num_sequences: float  # completions of the whole optimizer step, all ranks
    num_tokens: float  # their tokens
    advantages: Tensor | None = None  # (R,)
    sampler_logps: Tensor | None = None  # (M,) what the sampler recorded; None once the policy has moved on
    old_per_token_logps: Tensor | None = None  # (R, T)
    ref_per_token_logps: Tensor | None = None  # (R, T)


@dataclass
class Step:
    """One optimizer step."""

    batches: list[MicroBatch]
    metrics: dict[str, float] = field(default_factory=dict)  # already global


class Algorithm:
    """What every algorithm is given."""

    @staticmethod
    def check(run: RunConfig):
        """Refuse, before anything is computed, a recipe that this algorithm cannot follow (ValueError)."""

    def __init__(self, run: RunConfig, model: Qwen2_5_VL, processor: Processor, dataset: Dataset, world: World):
        self.run, self.model, self.processor, self.dataset, self.world = run, model, processor, dataset, world

    def rows(self, prompts_per_step: int, seed: int) -> Iterator[list[Row]]:
        """This rank's rows of each step."""
        for numbers in shuffled(len(self.dataset), prompts_per_step, seed):
            yield [self.dataset[number] for number in self.world.share(numbers)]


class SFT(Algorithm):
    """Supervised fine-tuning: raise the log-probability of demonstrated completions (InstructGPT, step 1)."""

    def batches(self) -> Iterator[Step]:
        size = self.run.sft.micro_batch_size
        for rows in self.rows(self.run.sft.prompts_per_step, self.run.seed):
            prompts = [self.processor(row.messages, row.images) for row in rows]
            completions = [[self.processor.encode_completion(row.completion)] for row in rows]
            counts = self.world.sum(len(rows), sum(len(ids) for group in completions for ids in group))
            yield Step(
                [
                    MicroBatch(pack(p, c, self.model.config, self.world.device), *counts)
                    for p, c in _chunks(size, prompts, completions)
                ]
            )

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = per_token_logps(self.model, batch.group)
        loss = sft_loss(batch.group.pad(logps), batch.group.completion_mask, batch.num_tokens)
        return loss, {"entropy": entropies.detach().mean()}


class GRPO(Algorithm):
    """Group relative policy optimization (DeepSeekMath, arXiv 2402.03300); with sequence-level ratios, GSPO.

    Left out: the paper's outer loop that renews the reference model (ours stays the policy that this stage began with).
    """

    @staticmethod
    def check(run: RunConfig):
        if run.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0: all completions of a group would be equal; use more than 0")
        if run.grpo.loss_type not in LOSS_TYPES:
            raise ValueError(f"grpo.loss_type is {run.grpo.loss_type!r}; known are {', '.join(LOSS_TYPES)}")
        if not run.rewards:
            raise ValueError("rewards: grpo needs at least one")

    def __init__(self, *args):
        super().__init__(*args)
        self.config = self.run.grpo
        self.generator = torch.Generator(self.world.device).manual_seed(self.run.seed * 1009 + self.world.rank)
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if self.config.beta else None
        self.weights = torch.tensor(list(self.run.rewards.values()))

    def batches(self) -> Iterator[Step]:
        config = self.config
        for rows in self.rows(config.prompts_per_step, self.run.seed):
            result = rollout(
                self.model, self.processor, rows, config.num_generations, self.run.sampling,
                list(self.run.rewards), self.generator,
            )  # fmt: skip
            advantages, metrics = self.judge(result)
            step = Step(self.prepare(result, advantages), metrics)
            for _ in range(config.num_iterations):
                yield step
                for batch in step.batches:  # from here on the policy is no longer the one that sampled
                    batch.sampler_logps = None

    def judge(self, result: Rollout) -> tuple[Tensor, dict[str, float]]:
        """Advantages (n,) of this rank's completions, and what there is to report of all ranks'."""
        size = self.config.num_generations
        rewards = combine(result.rewards, self.weights)
        if self.config.shuffle_rewards:
            order = torch.randperm(len(rewards), generator=self.generator, device=self.generator.device).cpu()
            rewards = rewards[order]
        everyones = self.world.gather(rewards.to(self.world.device)).cpu()  # "batch" scales by the global deviation
        advantages = group_advantages(everyones, size, self.config.scale_rewards)
        mine = slice(self.world.rank * len(rewards), (self.world.rank + 1) * len(rewards))
        spread = group_std(everyones, size)
        each = self.world.gather(result.rewards.to(self.world.device)).cpu()
        lengths = [len(c.ids) for group in result.completions for c in group]
        cut = sum(not c.stopped for group in result.completions for c in group)
        length, cut, count = self.world.sum(sum(lengths), cut, len(lengths))
        return advantages[mine], {
            "reward": everyones.nanmean().item(),
            **{f"rewards/{name}": each[:, k].nanmean().item() for k, name in enumerate(self.run.rewards)},
            "reward_std": spread.nanmean().item(),
            "frac_reward_zero_std": (spread < 1e-8).float().mean().item(),  # groups that teach nothing
            "completions/mean_length": length / count,
            "completions/clipped_ratio": cut / count,
        }

    @torch.no_grad()
    def prepare(self, result: Rollout, advantages: Tensor) -> list[MicroBatch]:
        """Pack a rollout into micro-batches, with the log-probabilities that stay fixed while it is trained on."""
        config, device = self.config, self.world.device
        lengths = [len(c.ids) for group in result.completions for c in group]
        counts = self.world.sum(len(lengths), sum(lengths))
        per_group = advantages.view(-1, config.num_generations)
        batches = []
        for prompts, groups, group_adv in _chunks(
            config.micro_batch_size, result.prompts, result.completions, per_group
        ):
            group = pack(prompts, [[c.ids for c in completions] for completions in groups], self.model.config, device)
            batch = MicroBatch(group, *counts, advantages=group_adv.flatten().to(device))
            batch.sampler_logps = torch.cat([c.logps for completions in groups for c in completions]).to(device)
            if config.num_iterations > 1:  # else the policy is the old policy
                batch.old_per_token_logps = group.pad(self.score(self.model, group)[0])
            if self.reference is not None:
                batch.ref_per_token_logps = group.pad(self.score(self.reference, group)[0])
            batches.append(batch)
        return batches

    def score(self, model: Qwen2_5_VL, group: GroupBatch) -> tuple[Tensor, Tensor]:
        """Policy, old policy and reference are all scored at the temperature that the completions were drawn with."""
        return per_token_logps(model, group, self.run.sampling.temperature)

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config, group = self.config, batch.group
        logps, entropies = self.score(self.model, group)
        loss, metrics = grpo_loss(
            group.pad(logps),
            batch.advantages,
            group.completion_mask,
            old_per_token_logps=batch.old_per_token_logps,
            ref_per_token_logps=batch.ref_per_token_logps,
            loss_type=config.loss_type,
            importance_sampling_level=config.importance_sampling_level,
            epsilon_low=config.epsilon_low,
            epsilon_high=config.epsilon_high,
            delta=config.delta,
            beta=config.beta,
            use_bias_correction_kl=config.use_bias_correction_kl,
            max_completion_length=self.run.sampling.max_new_tokens,
            num_sequences=batch.num_sequences,
            num_tokens=batch.num_tokens,
        )
        metrics["entropy"] = entropies.detach().mean()
        if batch.sampler_logps is not None:
            metrics["rollout/logp_mismatch"] = (logps.detach() - batch.sampler_logps).abs().max()
        return loss, metrics


ALGORITHMS = {"sft": SFT, "grpo": GRPO}


def _chunks(size: int, *sequences):
    """Cut sequences of equal length into pieces of at most `size`, side by side."""
    for start in range(0, len(sequences[0]), size):
        yield tuple(sequence[start : start + size] for sequence in sequences)
