"""Proximal policy optimization with a critic (arXiv 1707.06347, InstructGPT), images included.

The critic is a value head on the policy's own backbone, which costs one more dot product a token; or, as an option, a
model of its own. It forecasts, before every token, what the rest of the completion will earn.
Different from TRL 1.12: the score stands on the last token (TRL: one place after it, where the padding has one), and
advantages are whitened over the whole rollout of all ranks. Left out: an adaptive KL weight, an entropy bonus.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from minivlmrl.algorithms.advantages import gae, token_rewards, whiten
from minivlmrl.algorithms.buffer import Buffer
from minivlmrl.algorithms.online import Online, RolloutBatch, check_online
from minivlmrl.algorithms.ppo_loss import ppo_loss
from minivlmrl.algorithms.value_model import ScalarModel, check_scalar_folder, save_head, scalar_head
from minivlmrl.batch import GroupBatch
from minivlmrl.logprobs import completion_states, logps_of_states, per_token_logps
from minivlmrl.run.config import RunConfig
from minivlmrl.run.evaluate import Rollout
from minivlmrl.scale.saving import save_scalar_model, whole
from minivlmrl.scale.sharding import reshard


@dataclass
class PPOBatch(RolloutBatch):
    old_values: Tensor | None = None  # (R, T)
    returns: Tensor | None = None  # (R, T)


class PPO(Online):
    stage, batch_type = "ppo", PPOBatch

    @staticmethod
    def check(run: RunConfig):
        check_online("ppo", run, run.ppo.kl_coef)
        if run.ppo.critic_path is not None:
            check_scalar_folder(run.ppo.critic_path)

    def __init__(self, *args):
        run: RunConfig = args[0]
        super().__init__(run.ppo, run.ppo.kl_coef, run.ppo.num_mini_batches, run.ppo.num_ppo_epochs, *args)
        self.critic = self.build_critic()
        self.trained = nn.ModuleDict({"policy": self.model, "critic": self.critic})

    def build_critic(self) -> nn.Linear | ScalarModel:
        if self.config.critic == "shared":
            head = scalar_head(self.model)
            self.shard_like_policy(head)
            return head
        if self.config.critic_path is None:
            return self.scalar_model()
        critic = self.load_scalar(self.config.critic_path)
        critic.backbone.visual.requires_grad_(not self.config.freeze_vision_tower)
        return critic

    def save(self, folder: Path):
        super().save(folder)
        if self.config.critic == "shared":
            weight = whole(self.critic)
            if self.world.is_main:
                save_head(folder / "value_head.safetensors", weight)
        else:
            save_scalar_model(folder / "critic", self.critic, self.processor, self.world)

    def modules(self) -> dict[str, nn.Module]:
        return super().modules() | {"critic": self.critic}

    def make(self, stream: Iterator[dict[int, int]]) -> Buffer:
        result = self.sample(next(stream))
        return Buffer(result, *self.prepare(result), self.times)

    @torch.no_grad()
    def prepare(self, result: Rollout) -> tuple[list[list[PPOBatch]], dict[str, float]]:
        """Pack a rollout with its log-probabilities, values, advantages and returns; and what there is to report."""
        combined = self.combined(result)
        metrics = self.figures(result, combined)
        steps = self.micro_batches(result, self.config.num_mini_batches, keep=~combined.isnan())
        flat = [batch for batches in steps for batch in batches]
        for batch in flat:
            logps, values = self.score(batch.group)[::2]
            batch.old_per_token_logps, batch.old_values = batch.group.pad(logps), batch.group.pad(values)
            if self.reference is not None:
                logps = per_token_logps(self.reference.model, batch.group, self.run.sampling.temperature)[0]
                batch.ref_per_token_logps = batch.group.pad(logps)
        if self.reference is not None:
            reshard(self.reference.model)
        scores = self.scores(result, combined)
        rewards = [self.rewards(batch, batch.part(scores)) for batch in flat]
        masks = [batch.completion_mask for batch in flat]
        if self.config.whiten_rewards:
            rewards = self.whiten_all(rewards, masks, shift_mean=False)
        for batch, reward in zip(flat, rewards, strict=True):
            batch.advantages, batch.returns = gae(reward, batch.old_values, self.config.gamma, self.config.lam)
        whitened = self.whiten_all([batch.advantages for batch in flat], masks)
        for batch, advantages in zip(flat, whitened, strict=True):
            batch.advantages = advantages
        return steps, metrics

    def scores(self, result: Rollout, combined: Tensor) -> Tensor:
        """(n,) what whole completions earn; 0 where nobody could judge (these rows are masked out)."""
        scores = combined.nan_to_num(0.0)
        if self.config.missing_eos_penalty is not None:
            cut = torch.tensor([not c.stopped for group in result.completions for c in group])
            scores = scores - self.config.missing_eos_penalty * cut
        return scores

    def rewards(self, batch: PPOBatch, scores: Tensor) -> Tensor:
        """(R, T) what each token earns."""
        ref = batch.old_per_token_logps if self.reference is None else batch.ref_per_token_logps
        config, real = self.config, batch.group.completion_mask
        scores = scores.to(real.device)
        return token_rewards(scores, batch.old_per_token_logps, ref, real, config.kl_coef, config.kl_estimator)

    def whiten_all(self, parts: list[Tensor], masks: list[Tensor], shift_mean: bool = True) -> list[Tensor]:
        """whiten with the moments of all micro-batches of all ranks."""
        pairs = list(zip(parts, masks, strict=True))
        total, count = self.world.sum(
            *(sum(x.double().sum().item() for x in xs) for xs in ([p * m for p, m in pairs], masks))
        )
        mean = total / max(count, 1)
        squares = sum(((p.double() - mean).square() * m).sum().item() for p, m in pairs)
        variance = self.world.sum(squares)[0] / max(count - 1, 1)
        moments = tuple(parts[0].new_tensor(value) for value in (mean, variance))
        return [whiten(part, mask, shift_mean, moments) for part, mask in pairs]

    def score(self, group: GroupBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values, each (M,)."""
        states = completion_states(self.model, group)
        logps, entropies = logps_of_states(self.model, states, group, self.run.sampling.temperature)
        values = self.critic(states)[:, 0] if self.config.critic == "shared" else self.critic(group)
        return logps, entropies, values

    def loss(self, batch: PPOBatch) -> tuple[Tensor, dict[str, Tensor]]:
        config, group = self.config, batch.group
        logps, entropies, values = self.score(group)
        counts, mask = SimpleNamespace(tokens=batch.num_tokens), batch.completion_mask
        loss, metrics = ppo_loss(group.pad(logps), group.pad(values), mask, batch, config, counts=counts)
        metrics["entropy"] = batch.mean(entropies)
        return loss, metrics | self.mismatch(batch, logps)
