"""Proximal policy optimization with a critic (arXiv 1707.06347, InstructGPT), images included.

The critic predicts, before every token, what the rest of the completion will earn: a value head on
the policy's own backbone, or a model of its own. Left out: adaptive KL, entropy bonus.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from minivlmrl.adapters.lora import draw_adapters
from minivlmrl.advantages import combine
from minivlmrl.algorithms import value_model
from minivlmrl.algorithms.base import TrainingConfig
from minivlmrl.algorithms.grpo_family import train_on
from minivlmrl.algorithms.grpo_stage import GRPOStage
from minivlmrl.algorithms.reference import check_online
from minivlmrl.batch import MicroBatch
from minivlmrl.grpo import Rollout
from minivlmrl.hub.checker import FilePath
from minivlmrl.hub.folder import save_tensors
from minivlmrl.logprobs import completion_states, logps_of_states
from minivlmrl.objectives.baselines import gae, token_rewards, whiten
from minivlmrl.objectives.ppo_loss import PPOLoss, ppo_loss
from minivlmrl.sampling.pieces import PiecesConfig
from minivlmrl.scale.sharding import is_sharded


@dataclass
class PPOConfig(PPOLoss, PiecesConfig, TrainingConfig):
    """PPO with a critic."""

    num_generations: Annotated[int, ">= 1"] = 1  # completions for each prompt
    num_mini_batches: Annotated[int, ">= 1"] = 1  # optimizer steps with prompts of one rollout
    num_ppo_epochs: Annotated[int, ">= 1"] = 4  # passes over each rollout
    # a value head on the policy's backbone, or a model of its own
    critic: Literal["shared", "separate"] = "shared"
    # separate: begin with this trained critic or reward model; default the policy
    critic_path: FilePath | None = None
    # weight of the KL in each token's reward; 0: there is no reference model
    kl_coef: Annotated[float, ">= 0"] = 0.05
    kl_estimator: Literal["k1", "k3"] = "k1"  # of the KL in the reward, see losses.py
    gamma: Annotated[float, "[0, 1]"] = 1.0  # see gae
    lam: Annotated[float, "[0, 1]"] = 0.95  # see gae
    whiten_rewards: bool = False  # scale the tokens' rewards to standard deviation 1
    missing_eos_penalty: float | None = None  # taken from the score of a completion that was cut

    # what GRPO calls these options
    steps_per_generation = property(lambda self: self.num_mini_batches)
    num_iterations = property(lambda self: self.num_ppo_epochs)
    beta = property(lambda self: self.kl_coef)

    def __post_init__(self):
        if self.critic_path is not None and self.critic != "separate":
            words = "it must be left out unless critic is 'separate'"
            raise ValueError(f"critic_path is {self.critic_path!r}, {words}")


@dataclass
class PPOBatch(MicroBatch):
    old_values: Tensor | None = None  # (R, T)
    returns: Tensor | None = None  # (R, T)


class PPO(GRPOStage):
    """Rollouts as in GRPO; advantages of single tokens, by a critic."""

    stage, batch_type, compares_groups = "ppo", PPOBatch, False
    reads_alone = False  # so does the critic

    @staticmethod
    def check(run):
        check_online("ppo", run, run.ppo.kl_coef)
        if run.sampling.environment:
            raise ValueError("sampling.environment: ppo has no values of forced tokens; take grpo")
        if run.ppo.critic_path is not None:
            value_model.check_value_model_folder(run.ppo.critic_path)

    def __init__(self, *args):
        super().__init__(*args)
        self.critic = self.build_critic()
        self.trained = nn.ModuleDict({"policy": self.policy, "critic": self.critic})

    def build_critic(self) -> nn.Module:
        """A value head, or a value model."""
        if self.config.critic == "shared":
            head = value_model.value_head(self.policy)
            if is_sharded(self.policy):
                self.policy.sharding.shard_head(head)
            return head
        policy, path, freeze = self.policy, self.config.critic_path, self.run.model.freeze
        if path is None:
            return value_model.copy_as_value_model(policy, freeze)
        where = self.world.device, getattr(policy, "sharding", None), self.run.adapter.place
        dtype = policy.lm_head.weight.dtype
        critic = value_model.load_value_model(path, dtype, *where, freeze=freeze)
        draw_adapters(critic.backbone, self.run.seed)
        return critic

    def save(self, folder: Path):
        super().save(folder)
        if self.config.critic == "shared":
            head, partial = value_model.full_head(self.critic), folder / "value_head.partial"
            if self.world.is_main:
                save_tensors(head, partial)
                # an interrupted save keeps the earlier file
                partial.replace(folder / "value_head.safetensors")
        else:
            critic = folder / "critic", self.critic, self.processor
            value_model.save_value_model(*critic, self.world, self.run.model.path)

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"critic": self.critic}

    def add_logps(self, batch: PPOBatch):
        """Add log-probabilities of the policy and the reference, and the critic's values."""
        logps, _, values = self.logps_and_values(batch.group)
        batch.old_per_token_logps = batch.group.pad(logps)
        batch.old_values = batch.group.pad(values)
        if self.reference is not None:
            temperature = self.sample.sampling.temperature
            batch.ref_per_token_logps = self.reference.logps(batch.group, temperature)

    def micro_batches(self, rollout: Rollout, part: range, advantages=None) -> list[PPOBatch]:
        batches = super().micro_batches(rollout, part, advantages)
        train_on(~rollout.rewards.isnan().all(1), rollout, part, batches, self.world)
        return batches

    @torch.no_grad()
    def prepare(self, rollout: Rollout, parts: list[range]) -> list[list[PPOBatch]]:
        """Pack the prompts of each optimizer step; advantages and returns of tokens, (R, T)."""
        steps = [self.micro_batches(rollout, part) for part in parts]
        batches, config, weights = [*chain(*steps)], self.config, self.reward_weights
        every = self.world.all_gather(rollout.rewards)
        rollout.metrics = self.metrics(rollout, every, combine(every, weights))
        scores = combine(rollout.rewards, weights).nan_to_num(0.0)  # (n,)
        if config.missing_eos_penalty is not None:
            cut = torch.tensor([not c.stopped for group in rollout.completions for c in group])
            scores = scores - config.missing_eos_penalty * cut
        masks = [batch.loss_mask for batch in batches]
        rewards = [self.token_rewards(batch, scores[batch.completion_index]) for batch in batches]
        if config.whiten_rewards:
            rewards = whiten(rewards, masks, shift_mean=False, all_ranks=self.world.sum)
        for batch, earned in zip(batches, rewards, strict=True):
            found = gae(earned, batch.old_values, config.gamma, config.lam)
            batch.advantages, batch.returns = found
        whitened = whiten([batch.advantages for batch in batches], masks, all_ranks=self.world.sum)
        for batch, advantages in zip(batches, whitened, strict=True):
            batch.advantages = advantages
        return steps

    def token_rewards(self, batch: PPOBatch, scores: Tensor) -> Tensor:
        """(R, T) what each token earns."""
        ref = batch.old_per_token_logps if self.reference is None else batch.ref_per_token_logps
        mask, kl = batch.group.completion_mask, (self.config.kl_coef, self.config.kl_estimator)
        return token_rewards(scores.to(mask.device), batch.old_per_token_logps, ref, mask, *kl)

    def logps_and_values(self, group) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values, each (M,)."""
        states = completion_states(self.policy, group)
        temperature = self.sample.sampling.temperature
        logps, entropies = logps_of_states(self.policy, states, group, temperature)
        values = self.critic(states)[:, 0] if self.config.critic == "shared" else self.critic(group)
        return logps, entropies, values

    def loss(self, batch: PPOBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies, values = self.logps_and_values(batch.group)
        padded = batch.group.pad(logps), batch.group.pad(values)
        loss, metrics = ppo_loss(*padded, batch.loss_mask, batch, self.config, counts=batch.counts)
        return loss, metrics | self.diagnose(batch, logps, entropies)
