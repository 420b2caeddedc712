"""Group relative policy optimization (DeepSeekMath, arXiv 2402.03300) and its family: no critic, but a group.

With sequence-level ratios it is GSPO; loss_type rloo is RLOO: whole-completion ratios, advantages against the others of
the group, and the KL in the reward instead of the loss.
Left out: the paper's outer loop that renews the reference model (sync_ref_model moves it on the way instead).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.advantages import group_advantages, group_std
from minivlmrl.algorithms.advantages import leave_one_out, normalize_then_sum
from minivlmrl.algorithms.buffer import Buffer
from minivlmrl.algorithms.online import Online, RolloutBatch, check_online
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.generate import random_numbers
from minivlmrl.logprobs import per_token_logps
from minivlmrl.losses import (
    CORRECTION_MODES,
    IMPORTANCE_SAMPLING_LEVELS,
    KL_ESTIMATORS,
    LOSS_TYPES,
    grpo_loss,
    rollout_importance_ratio,
    top_entropy_threshold,
)
from minivlmrl.rewards import soft_overlong_punishment
from minivlmrl.run.config import RunConfig
from minivlmrl.run.evaluate import Rollout
from minivlmrl.scale.sharding import reshard


@dataclass
class GRPOBatch(RolloutBatch):
    importance_sampling_ratio: Tensor | None = None  # (R, T) or (R, 1)
    old_entropies: Tensor | None = None  # (R, T)
    entropy_threshold: float | None = None  # of the whole optimizer step ...
    num_entropy_tokens: float | None = None  # ... and how many tokens reach it


class GRPO(Online):
    stage, batch_type = "grpo", GRPOBatch

    @staticmethod
    def check(run: RunConfig):
        config = run.grpo
        check_online("grpo", run, config.beta)
        known = {
            "loss_type": LOSS_TYPES, "kl_estimator": KL_ESTIMATORS, "rollout_correction": (None, *CORRECTION_MODES),
            "importance_sampling_level": IMPORTANCE_SAMPLING_LEVELS,
        }  # fmt: skip
        for name, values in known.items():
            if getattr(config, name) not in values:
                raise ValueError(f"grpo.{name} is {getattr(config, name)!r}; known are {', '.join(map(str, values))}")
        rloo, gdpo = config.loss_type == "rloo", config.multi_objective_aggregation == "normalize_then_sum"
        if rloo and config.importance_sampling_level != "token":
            raise ValueError("grpo.importance_sampling_level: rloo has its own, the ratio of whole completions")
        if rloo and gdpo:
            raise ValueError("grpo.multi_objective_aggregation: rloo has its own advantages; use sum_then_normalize")
        for name in ("normalize_advantages", "reward_clip_range"):
            if getattr(config, name) and not rloo:
                raise ValueError(f"grpo.{name} is an option of loss_type rloo; the others have scale_rewards")
        if config.soft_punish_cache and gdpo:
            raise ValueError("grpo.soft_punish_cache is added to the sum of rewards; use sum_then_normalize with it")

    def __init__(self, *args):
        run: RunConfig = args[0]
        super().__init__(run.grpo, run.grpo.beta, run.grpo.steps_per_generation, run.grpo.num_iterations, *args)
        config = self.config
        self.rloo = config.loss_type == "rloo"
        self.off_policy = config.num_iterations > 1 or config.steps_per_generation > 1
        kl_in_reward = self.rloo and config.beta
        self.needs_old = self.off_policy or config.rollout_correction or kl_in_reward or config.top_entropy_quantile < 1

    def make(self, stream: Iterator[dict[int, int]]) -> Buffer:
        result, metrics = self.collect(stream)
        steps = self.prepare(result)
        return Buffer(result, steps, metrics | self.judge(result, steps), self.times)

    def collect(self, stream: Iterator[dict[int, int]]) -> tuple[Rollout, dict[str, float]]:
        """A rollout. With max_num_gen_batches over 1, its groups with equal rewards are replaced by those of further
        rollouts (DAPO's dynamic sampling), as far as these go. The groups stay with the rank that made them."""
        config, rounds = self.config, 1
        result, wanted = self.sample(next(stream)), config.prompts_per_step * config.steps_per_generation
        if config.max_num_gen_batches == 1:
            return result, {}
        live, dead = self.split(result)
        while len(live) < wanted and rounds < config.max_num_gen_batches:
            more = self.sample(next(stream))
            more.places = [place + rounds * wanted for place in more.places]
            result, rounds = result.join(more), rounds + 1
            live, dead = self.split(result)
        kept = (live + dead)[:wanted]
        result = result.select([result.places.index(place) for place in kept if place in result.places])
        result.places = [kept.index(place) for place in result.places]
        return result, {"num_gen_batches": float(rounds)}

    def split(self, result: Rollout) -> tuple[list[int], list[int]]:
        """Places of the groups of all ranks whose rewards differ, and of the others."""
        size, gdpo = self.config.num_generations, self.config.multi_objective_aggregation == "normalize_then_sum"
        judged = self.everyones(result, result.rewards if gdpo else self.shaped(result)[:, None])  # (n, K) or (n, 1)
        differs = torch.stack([group_std(column, size) > 1e-8 for column in judged.unbind(1)]).any(0)  # NaN: no
        return differs.nonzero()[:, 0].tolist(), (~differs).nonzero()[:, 0].tolist()

    def shaped(self, result: Rollout) -> Tensor:
        """(n,) rewards with what is added for length, which is DAPO's overlong shaping."""
        rewards = self.combined(result)
        if self.config.soft_punish_cache:
            limit, cache = self.run.sampling.max_new_tokens, self.config.soft_punish_cache
            lengths = [len(c.ids) for group in result.completions for c in group]
            rewards = rewards + torch.tensor([soft_overlong_punishment(n, limit, cache) for n in lengths])
        return rewards

    def judge(self, result: Rollout, steps: list[list[GRPOBatch]]) -> dict[str, float]:
        """Give the batches their advantages; returns what there is to report of all ranks."""
        size, rewards = self.config.num_generations, self.shaped(result)
        figures = self.figures(result, rewards)
        rewards, each = self.everyones(result, rewards), self.everyones(result, result.rewards)
        if self.config.shuffle_rewards:
            order = random_numbers(f"{self.random_key()}/shuffle").permutation(len(rewards))
            rewards, each = rewards[order], each[order]
        spread = group_std(rewards, size)
        figures["reward_std"] = spread.nanmean().item()
        figures["frac_reward_zero_std"] = (spread < 1e-8).float().mean().item()  # groups that teach nothing
        if self.rloo:
            rewards = self.clip_and_penalise(rewards, result, steps)
        advantages = self.mine(result, self.advantages(rewards, each))
        for batch in (batch for batches in steps for batch in batches):
            batch.advantages = batch.part(advantages).to(self.world.device)
        return figures

    def advantages(self, rewards: Tensor, each: Tensor) -> Tensor:
        """(n,) of all ranks' completions, from combined (n,) and single (n, K) rewards."""
        config, size = self.config, self.config.num_generations
        if self.rloo:
            return leave_one_out(rewards, size, config.normalize_advantages)
        if config.multi_objective_aggregation == "normalize_then_sum":
            return normalize_then_sum(each, self.reward_weights, size)
        return group_advantages(rewards, size, config.scale_rewards)

    def clip_and_penalise(self, rewards: Tensor, result: Rollout, steps: list[list[GRPOBatch]]) -> Tensor:
        """RLOO's rewards: clipped, then minus beta times the k1 estimate of the whole completion's KL."""
        config = self.config
        rewards = rewards if config.reward_clip_range is None else rewards.clamp(*config.reward_clip_range)
        if not config.beta:
            return rewards
        kl = [
            ((batch.old_per_token_logps - batch.ref_per_token_logps) * batch.completion_mask).sum(1).cpu()
            for batches in steps
            for batch in batches
            if not batch.idle
        ]
        return rewards - config.beta * self.everyones(result, torch.cat([torch.zeros(0), *kl]))

    @torch.no_grad()
    def prepare(self, result: Rollout) -> list[list[GRPOBatch]]:
        """Pack a rollout, with the log-probabilities that stay fixed while it is trained on."""
        config = self.config
        stopped = torch.tensor([c.stopped for group in result.completions for c in group])
        steps = self.micro_batches(
            result, config.steps_per_generation, stopped if config.mask_truncated_completions else None
        )
        for batch in (batch for batches in steps for batch in batches):
            if self.needs_old:
                logps, entropies = self.score(self.model, batch)
                batch.old_per_token_logps, batch.old_entropies = batch.group.pad(logps), batch.group.pad(entropies)
            if self.reference is not None:
                batch.ref_per_token_logps = batch.group.pad(self.score(self.reference.model, batch)[0])
            if config.rollout_correction:
                batch.importance_sampling_ratio = rollout_importance_ratio(
                    batch.old_per_token_logps, batch.sampler_logps, batch.completion_mask,
                    mode=config.rollout_correction, clip_max=config.rollout_correction_max,
                    clip_min=config.rollout_correction_min,
                )  # fmt: skip
        if self.reference is not None:
            reshard(self.reference.model)
        if config.top_entropy_quantile < 1:
            for batches in steps:
                self.find_threshold(batches)
        return steps

    def find_threshold(self, batches: list[GRPOBatch]):
        """The entropy that the upper share of a step's tokens reaches, over all micro-batches and ranks."""
        real = [b.old_entropies[b.completion_mask.bool()].cpu() for b in batches]
        everyones = torch.cat(self.world.gather_objects(torch.cat(real)))
        threshold = top_entropy_threshold(everyones, torch.ones_like(everyones), self.config.top_entropy_quantile)
        for batch in batches:
            batch.entropy_threshold = threshold.item()
            batch.num_entropy_tokens = (everyones >= threshold).sum().item()

    def score(self, model: Qwen2_5_VL, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Policy, old policy and reference are all scored at the temperature that the completions were drawn with."""
        return per_token_logps(model, batch.group, self.run.sampling.temperature)

    def loss(self, batch: GRPOBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config, group = self.config, batch.group
        logps, entropies = self.score(self.model, batch)
        loss, metrics = grpo_loss(
            group.pad(logps),
            batch.advantages,
            batch.completion_mask,
            old_per_token_logps=batch.old_per_token_logps if self.off_policy else None,
            ref_per_token_logps=batch.ref_per_token_logps,
            sampling_per_token_logps=batch.sampler_logps,
            importance_sampling_ratio=batch.importance_sampling_ratio,
            entropies=group.pad(entropies),
            loss_type=config.loss_type,
            importance_sampling_level=config.importance_sampling_level,
            epsilon_low=config.epsilon_low,
            epsilon_high=config.epsilon_high,
            delta=config.delta,
            beta=0.0 if self.rloo else config.beta,
            kl_estimator=config.kl_estimator,
            kl_straight_through=config.kl_straight_through,
            use_bias_correction_kl=config.use_bias_correction_kl,
            top_entropy_quantile=config.top_entropy_quantile,
            entropy_threshold=batch.entropy_threshold,
            entropy_coef=config.entropy_coef,
            off_policy_mask_threshold=config.off_policy_mask_threshold,
            sapo_temperature_pos=config.sapo_temperature_pos,
            sapo_temperature_neg=config.sapo_temperature_neg,
            vespo_k_pos=config.vespo_k_pos,
            vespo_lambda_pos=config.vespo_lambda_pos,
            vespo_k_neg=config.vespo_k_neg,
            vespo_lambda_neg=config.vespo_lambda_neg,
            max_completion_length=self.run.sampling.max_new_tokens,
            num_sequences=batch.num_sequences,
            num_tokens=max(batch.num_tokens, 1),
            num_entropy_tokens=batch.num_entropy_tokens or max(batch.num_tokens, 1),
        )
        metrics["entropy"] = batch.mean(entropies)
        return loss, metrics | self.mismatch(batch, logps)
