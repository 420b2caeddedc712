"""Proximal policy optimization (PPO) with a critic (arXiv 1707.06347, InstructGPT).

Before each token, the critic predicts the sum of the future rewards. It is either a value head on
the policy's backbone or a separate model. An adaptive KL weight and an entropy bonus are not
implemented.
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
from minivlmrl.trainers.base import Rollout, SampledBatch, loss_arguments
from minivlmrl.trainers.grpo import GRPOTrainer, check_rollout_options, mask_completions


@dataclass(kw_only=True)
class PPOBatch(SampledBatch):
    """A micro-batch of completions, with the values and returns of their tokens.

    Values and log-probabilities are computed before the first update on the rollout.
    """

    # (R, T) log-probabilities of the policy before the first update, in nats
    old_per_token_logps: Tensor = field(init=False)
    old_values: Tensor = field(init=False)  # (R, T) predictions of the critic before this update
    returns: Tensor = field(init=False)  # (R, T) targets that the critic is trained to predict


class PPOTrainer(GRPOTrainer):
    """Trainer of PPO, with the rollouts of GRPO and token-level advantages from a critic."""

    stage = "ppo"
    config_type = PPOOptions
    config: PPOOptions
    compares_groups = False

    @classmethod
    def check(cls, run: RunConfig):
        check_rollout_options(run, cls.stage)
        if run.sampling.environment:
            raise ValueError(
                "sampling.environment is set, but the stage ppo does not support tools, because "
                "its critic has no values for the tokens that tools insert; use the stage grpo"
            )
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
        """Build the critic: either a value head on the policy's hidden states or its own model."""
        if self.config.critic == "shared":
            return value_head(self.policy)
        # a separate critic has its own vision tower, so it cannot use the policy's image embeddings
        self.sample.keeps_vision = False
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

    def value_batches(self, rollout: Rollout, prompt_range: range) -> list[PPOBatch]:
        """Pack the micro-batches of one optimizer step, with current values and log-probabilities.

        Completions without a reward, because all reward functions returned None, are excluded from
        the loss.

        Args:
            prompt_range: range of the prompts that the step trains on.
        """
        batches = self.pack_part(rollout, prompt_range, PPOBatch)
        for batch in batches:
            logps, _, values = self.logps_and_values(batch.group)
            batch.old_per_token_logps = batch.group.pad(logps)
            batch.old_values = batch.group.pad(values)
            if self.reference is not None:
                batch.ref_per_token_logps = self.reference.logps(batch.group, self.temperature)
        has_reward = ~rollout.rewards.isnan().all(1)  # (n,): one value for each completion
        mask_completions(has_reward, rollout, prompt_range, batches, self.world)
        return batches

    @torch.no_grad()
    def prepare(self, rollout: Rollout, prompt_ranges: list[range]) -> list[list[PPOBatch]]:
        """Pack the micro-batches of each optimizer step, with advantages and returns (R, T).

        Args:
            prompt_ranges: the range of prompts that each optimizer step trains on.
        """
        steps = [self.value_batches(rollout, prompt_range) for prompt_range in prompt_ranges]
        rewards = self.world.all_gather(rollout.rewards)
        total = combine(rewards, self.reward_weights)
        rollout.metrics = self.rollout_metrics(rollout, rewards, total)
        # (n,): weighted sum of the rewards of each completion of this rank
        scores = self.world.local(total).nan_to_num(0.0)
        if self.config.missing_eos_penalty is not None:
            is_truncated = torch.tensor([not c.stopped for c in chain(*rollout.completions)])
            scores = scores - self.config.missing_eos_penalty * is_truncated
        batches = list(chain(*steps))
        for batch in batches:
            self.estimate_advantages(batch, scores[batch.completion_index])
        masks = [batch.loss_mask for batch in batches]
        whitened = whiten([batch.advantages for batch in batches], masks, all_ranks=self.world.sum)
        for batch, advantages in zip(batches, whitened, strict=True):
            batch.advantages = advantages
        return steps

    def estimate_advantages(self, batch: PPOBatch, scores: Tensor):
        """Compute and store the advantages and returns (R, T) of a micro-batch, using GAE.

        Args:
            scores: weighted sum of the rewards of each completion, of shape (R,).
        """
        config = self.config
        old_logps = batch.old_per_token_logps
        ref_logps = old_logps if batch.ref_per_token_logps is None else batch.ref_per_token_logps
        scores = scores.to(old_logps.device)
        mask = batch.group.completion_mask
        kl_options = config.kl_coef, config.kl_estimator
        rewards = token_rewards(scores, old_logps, ref_logps, mask, *kl_options)
        batch.advantages, batch.returns = gae(rewards, batch.old_values, config.gamma, config.lam)

    def logps_and_values(self, group: GroupBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the log-probability, entropy and value of each completion token, each (M,)."""
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
            **loss_arguments(self.config, ppo_loss),
            old_per_token_logps=batch.old_per_token_logps,
            old_values=batch.old_values,
            advantages=batch.advantages,
            returns=batch.returns,
            normalizer=batch.normalizer,
        )
        return loss, metrics | self.token_metrics(batch, logps, entropies)
