"""Proximal policy optimization with a critic (arXiv 1707.06347, InstructGPT), images included.

The critic predicts, before every token, what the rest of the completion will earn: a value head on
the policy's own backbone, or a model of its own. Left out: adaptive KL, entropy bonus.
"""

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from minivlmrl.config.options import PPOOptions, RunConfig
from minivlmrl.data.processor import Processor
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.value_models import load_critic, save_value_model
from minivlmrl.distributed.weights import copy_model
from minivlmrl.losses.advantages import combine
from minivlmrl.losses.ppo import gae, ppo_loss, token_rewards, whiten
from minivlmrl.model.decoder import Qwen2_5_VL
from minivlmrl.model.logprobs import completion_states, logps_of_states
from minivlmrl.model.packing import GroupBatch
from minivlmrl.model.value_head import ValueHead, ValueModel, check_value_model_folder, value_head
from minivlmrl.trainers.base import Rollout, SampledBatch
from minivlmrl.trainers.grpo import GRPOTrainer, check_rollout_options, mask_completions


@dataclass(kw_only=True)
class PPOBatch(SampledBatch):
    """Completions with what the critic said of their tokens before the first update on them."""

    old_per_token_logps: Tensor = field(init=False)  # (R, T)
    old_values: Tensor = field(init=False)  # (R, T)
    returns: Tensor = field(init=False)  # (R, T)


class PPOTrainer(GRPOTrainer):
    """Rollouts as in GRPO; advantages of single tokens, by a critic."""

    stage = "ppo"
    config_type = PPOOptions
    config: PPOOptions
    compares_groups = False

    @classmethod
    def check(cls, run: RunConfig):
        check_rollout_options(run, cls.stage)
        if run.sampling.environment:
            raise ValueError("sampling.environment: ppo has no values of forced tokens; take grpo")
        if run.ppo.critic_path is not None:
            check_value_model_folder(run.ppo.critic_path)

    def __init__(
        self,
        run: RunConfig,
        model: Qwen2_5_VL,
        processor: Processor,
        world: World,
        steps_done: int = 0,
    ):
        super().__init__(run, model, processor, world, steps_done)
        self.critic = self.build_critic()
        self.trained = nn.ModuleDict({"policy": self.policy, "critic": self.critic})

    def build_critic(self) -> ValueHead | ValueModel:
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
        if isinstance(self.critic, ValueModel):
            base = self.config.critic_path or self.run.model.path
            save_value_model(folder / "critic", self.critic, self.processor, self.world, base)

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"critic": self.critic}

    def value_batches(self, rollout: Rollout, part: range) -> list[PPOBatch]:
        """Pack these prompts of a rollout, with the values and log-probabilities of now."""
        batches = self.pack_part(rollout, part, PPOBatch)
        for batch in batches:
            logps, _, values = self.logps_and_values(batch.group)
            batch.old_per_token_logps = batch.group.pad(logps)
            batch.old_values = batch.group.pad(values)
            if self.reference is not None:
                batch.ref_per_token_logps = self.reference.logps(batch.group, self.temperature)
        was_judged = ~rollout.rewards.isnan().all(1)  # (n,)
        mask_completions(was_judged, rollout, part, batches, self.world)
        return batches

    @torch.no_grad()
    def prepare(self, rollout: Rollout, parts: list[range]) -> list[list[PPOBatch]]:
        """Pack the prompts of each optimizer step; advantages and returns of tokens, (R, T)."""
        steps = [self.value_batches(rollout, part) for part in parts]
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
        ref_logps = old_logps if batch.ref_per_token_logps is None else batch.ref_per_token_logps
        scores = scores.to(old_logps.device)
        mask = batch.group.completion_mask
        kl_options = config.kl_coef, config.kl_estimator
        rewards = token_rewards(scores, old_logps, ref_logps, mask, *kl_options)
        batch.advantages, batch.returns = gae(rewards, batch.old_values, config.gamma, config.lam)

    def logps_and_values(self, group: GroupBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute log-probabilities, entropies and values, each (M,)."""
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
            self.config,
            old_per_token_logps=batch.old_per_token_logps,
            old_values=batch.old_values,
            advantages=batch.advantages,
            returns=batch.returns,
            normalizer=batch.normalizer,
        )
        return loss, metrics | self.token_metrics(batch, logps, entropies)
