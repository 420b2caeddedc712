"""Proximal policy optimization (PPO) with a critic (arXiv 1707.06347, InstructGPT).

The critic, a value head on the policy or a separate model, predicts the sum of future rewards before each token.
Not implemented: adaptive KL weight, entropy bonus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.config.options import PPOOptions, RunConfig
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.value_models import load_critic, save_value_model
from minivlmrl.distributed.weights import copy_model
from minivlmrl.errors import UserError
from minivlmrl.losses.advantages import combine
from minivlmrl.losses.ppo import gae, ppo_loss, token_rewards, whiten
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.model.logprobs import completion_states, logps_of_states
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.value_head import ValueModel, check_value_model_folder, value_head
from minivlmrl.trainers.base import Rollout, Sample, SampledBatch
from minivlmrl.trainers.rollout import RolloutTrainer


@dataclass(kw_only=True)
class PPOBatch(SampledBatch):
    """A micro-batch for PPO, with advantages, returns and critic values per token."""

    advantages: Tensor  # (R, T)
    returns: Tensor  # (R, T) targets for the critic
    old_per_token_logps: Tensor  # (R, T) log-probabilities before the first update, in nats
    old_values: Tensor  # (R, T) critic predictions before the first update


class PPOTrainer(RolloutTrainer):
    """Trainer for PPO, with token advantages from a critic."""

    stage = "ppo"
    config_type = PPOOptions
    options: PPOOptions

    @classmethod
    def check(cls, config: RunConfig):
        super().check(config)
        if config.sampling.environment:
            raise UserError(
                "sampling.environment is set, but the stage ppo does not support tools, because "
                "its critic has no values for the tokens that tools insert; use the stage grpo"
            )
        if config.ppo.critic_path is not None:
            check_value_model_folder(config.ppo.critic_path)

    @staticmethod
    def has_reference(options: PPOOptions) -> bool:
        return options.kl_coef > 0

    def __init__(
        self, config: RunConfig, model: VisionLanguageModel, processor: Processor, world: World, steps_done: int = 0
    ):
        super().__init__(config, model, processor, world, steps_done)
        if self.options.critic == "shared":
            self.critic = value_head(model)
        elif self.options.critic_path is None:
            self.critic = ValueModel(copy_model(model), config.model.freeze)
        else:
            self.critic = load_critic(self.options.critic_path, model, processor, config, world.device)
        self.trained = nn.ModuleDict({"policy": self.policy, "critic": self.critic})

    def shares_vision_tower(self) -> bool:
        # a separate critic encodes images with its own vision tower
        return self.options.critic == "shared" and super().shares_vision_tower()

    def save(self, folder: Path, merge: bool = True):
        super().save(folder, merge)
        if isinstance(self.critic, ValueModel):
            base = self.options.critic_path or self.config.model.path
            save_value_model(folder / "critic", self.critic, self.processor, self.world, base, merge)

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"critic": self.critic}

    @torch.no_grad()
    def build_micro_batches(self, rollout: Rollout, parts: Sequence[Sequence[list[Sample]]]) -> list[list[PPOBatch]]:
        """Pack micro-batches for every optimizer step, with advantages and returns per token."""
        rewards = self.world.all_gather(rollout.rewards)
        totals = combine(rewards, self.reward_weights)
        rollout.metrics = self.rollout_metrics(rollout, rewards, totals)
        scores = totals.nan_to_num(0.0)  # weighted reward sums of all ranks' samples
        if self.options.missing_eos_penalty is not None:
            is_truncated = torch.tensor([not sample.completion.stopped for sample in rollout.samples])
            scores = scores - self.options.missing_eos_penalty * self.world.all_gather(is_truncated)
        steps = [self.micro_batches(groups, scores) for groups in parts]
        batches = list(chain(*steps))
        advantages = whiten(
            [batch.advantages for batch in batches], [batch.loss_mask for batch in batches], all_ranks=self.world.sum
        )
        for batch, whitened in zip(batches, advantages, strict=True):
            batch.advantages = whitened
        return steps

    def micro_batches(self, groups: Sequence[list[Sample]], scores: Tensor) -> list[PPOBatch]:
        """Pack this rank's micro-batches, with advantages and returns from GAE (not yet normalized)."""
        options = self.options
        normalizer = self.count_tokens(groups)
        batches = []
        for samples in self.split(groups):
            batch = self.pack(samples, normalizer)
            group = batch.group
            logps, _, values = self.logps_and_values(group)
            old_logps = group.pad(logps)
            old_values = group.pad(values)
            ref_logps = old_logps if batch.ref_per_token_logps is None else batch.ref_per_token_logps
            rewards = token_rewards(
                scores[batch.completion_index].to(old_logps.device),
                old_logps,
                ref_logps,
                group.completion_mask,
                options.kl_coef,
                options.kl_estimator,
            )
            advantages, returns = gae(rewards, old_values, options.gamma, options.lam)
            batches.append(
                PPOBatch.extend(
                    batch, advantages=advantages, returns=returns, old_per_token_logps=old_logps, old_values=old_values
                )
            )
        return batches

    def is_trained(self, sample: Sample) -> bool:
        """Return True if any reward function scored the sample."""
        return not sample.rewards.isnan().all()

    def logps_and_values(self, group: GroupBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute log-probabilities, entropies and critic values, all (tokens,)."""
        states = completion_states(self.policy, group)
        logps, entropies = logps_of_states(self.policy, states, group, self.temperature)
        if isinstance(self.critic, ValueModel):
            return logps, entropies, self.critic(group)
        return logps, entropies, self.critic(states)[:, 0]

    def loss(self, batch: PPOBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies, values = self.logps_and_values(batch.group)
        loss, metrics = ppo_loss(
            batch.group.pad(logps),
            batch.group.pad(values),
            batch.loss_mask,
            cliprange=self.options.cliprange,
            vf_coef=self.options.vf_coef,
            old_per_token_logps=batch.old_per_token_logps,
            old_values=batch.old_values,
            advantages=batch.advantages,
            returns=batch.returns,
            normalizer=batch.normalizer,
        )
        return loss, metrics | self.token_metrics(batch, batch.old_per_token_logps, entropies)
