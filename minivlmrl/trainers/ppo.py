"""Proximal policy optimization with a critic (arXiv 1707.06347, InstructGPT), images included.

The critic predicts, before every token, what the rest of the completion will earn: a value head on
the policy's own backbone, or a model of its own. Left out: adaptive KL, entropy bonus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.config.options import PPOOptions
from minivlmrl.data.rows import Row
from minivlmrl.distributed.fsdp import copy_model
from minivlmrl.distributed.value_models import load_critic, save_value_model
from minivlmrl.losses.advantages import combine
from minivlmrl.losses.ppo import gae, ppo_loss, token_rewards, whiten
from minivlmrl.model.logprobs import completion_states, logps_of_states
from minivlmrl.model.value_head import ValueModel, check_value_model_folder, value_head
from minivlmrl.trainers.base import MicroBatch, Rollout
from minivlmrl.trainers.grpo import GRPOTrainer, mask_completions


@dataclass
class PPOBatch(MicroBatch):
    old_values: Tensor | None = None  # (R, T)
    returns: Tensor | None = None  # (R, T)


class PPOTrainer(GRPOTrainer):
    """Rollouts as in GRPO; advantages of single tokens, by a critic."""

    stage = "ppo"
    config_type = PPOOptions
    config: PPOOptions
    batch_type = PPOBatch
    compares_groups = False

    @classmethod
    def check(cls, run):
        super().check(run)
        if run.sampling.environment:
            raise ValueError("sampling.environment: ppo has no values of forced tokens; take grpo")
        if run.ppo.critic_path is not None:
            check_value_model_folder(run.ppo.critic_path)

    @classmethod
    def check_loss(cls, config: PPOOptions):
        """There is nothing to check: the loss is ppo_loss."""

    def prepare_loss(self):
        self.critic = self.build_critic()
        self.trained = nn.ModuleDict({"policy": self.policy, "critic": self.critic})

    def roll_out(self, rows: Sequence[Row]) -> Rollout:
        return self.sample_rollout(rows)

    def build_critic(self) -> nn.Module:
        """Make a value head for the policy's states, or a ValueModel."""
        if self.config.critic == "shared":
            return value_head(self.policy)
        self.sample.keeps_vision = False  # this critic sees with a tower of its own
        path = self.config.critic_path
        if path is None:
            return ValueModel(copy_model(self.policy), self.run.model.freeze)
        return load_critic(path, self.policy, self.processor, self.run, self.world.device)

    def save(self, folder: Path):
        super().save(folder)
        if self.config.critic == "separate":
            base = self.config.critic_path or self.run.model.path
            save_value_model(folder / "critic", self.critic, self.processor, self.world, base)

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"critic": self.critic}

    def add_logps(self, batch: PPOBatch):
        """Add log-probabilities of the policy and the reference, and the critic's values."""
        logps, _, values = self.logps_and_values(batch.group)
        batch.old_per_token_logps = batch.group.pad(logps)
        batch.old_values = batch.group.pad(values)
        if self.reference is not None:
            batch.ref_per_token_logps = self.reference.logps(batch.group, self.temperature)

    def micro_batches(self, rollout: Rollout, part: range, advantages=None) -> list[PPOBatch]:
        batches = self.pack_part(rollout, part, advantages)
        was_judged = ~rollout.rewards.isnan().all(1)  # (n,)
        mask_completions(was_judged, rollout, part, batches, self.world)
        return batches

    @torch.no_grad()
    def prepare(self, rollout: Rollout, parts: list[range]) -> list[list[PPOBatch]]:
        """Pack the prompts of each optimizer step; advantages and returns of tokens, (R, T)."""
        steps = [self.micro_batches(rollout, part) for part in parts]
        rewards = self.world.all_gather(rollout.rewards)
        total = combine(rewards, self.reward_weights)
        rollout.metrics = self.rollout_metrics(rollout, rewards, total)
        scores = self.world.local(total).nan_to_num(0.0)  # (n,)
        if self.config.missing_eos_penalty is not None:
            is_cut = torch.tensor([not c.stopped for c in chain(*rollout.completions)])
            scores = scores - self.config.missing_eos_penalty * is_cut
        batches = list(chain(*steps))
        for batch in batches:
            self.estimate_advantages(batch, scores[batch.completion_index])
        masks = [batch.loss_mask for batch in batches]
        whitened = whiten([batch.advantages for batch in batches], masks, all_ranks=self.world.sum)
        for batch, advantages in zip(batches, whitened, strict=True):
            batch.advantages = advantages
        return steps

    def estimate_advantages(self, batch: PPOBatch, scores: Tensor):
        """Set advantages and returns of tokens, (R, T), from the scores of completions, (R,)."""
        config = self.config
        old_logps = batch.old_per_token_logps
        ref_logps = batch.ref_per_token_logps if self.reference is not None else old_logps
        scores = scores.to(old_logps.device)
        mask = batch.group.completion_mask
        kl_options = config.kl_coef, config.kl_estimator
        rewards = token_rewards(scores, old_logps, ref_logps, mask, *kl_options)
        batch.advantages, batch.returns = gae(rewards, batch.old_values, config.gamma, config.lam)

    def logps_and_values(self, group) -> tuple[Tensor, Tensor, Tensor]:
        """Compute log-probabilities, entropies and values, each (M,)."""
        states = completion_states(self.policy, group)
        logps, entropies = logps_of_states(self.policy, states, group, self.temperature)
        if self.config.critic == "shared":
            return logps, entropies, self.critic(states)[:, 0]
        return logps, entropies, self.critic(group)

    def loss(self, batch: PPOBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies, values = self.logps_and_values(batch.group)
        loss, metrics = ppo_loss(
            batch.group.pad(logps),
            batch.group.pad(values),
            batch.loss_mask,
            self.config,
            old_per_token_logps=batch.old_per_token_logps,
            old_values=batch.old_values,
            advantages=batch.advantages,
            returns=batch.returns,
            counts=batch.counts,
        )
        return loss, metrics | self.token_metrics(batch, logps, entropies)
