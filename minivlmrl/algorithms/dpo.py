"""Direct preference optimization (arXiv 2305.18290); MPO, IPO and others are its loss types."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from minivlmrl.algorithms.answers import AnswerBatch, PairAlgorithm
from minivlmrl.algorithms.base import TrainingConfig
from minivlmrl.kernels.linear_log_softmax import linear_log_sum_sq_probs
from minivlmrl.logprobs import completion_states, logps_of_states, per_token_logps
from minivlmrl.objectives.preference_losses import DPOLoss, dpo_loss
from minivlmrl.rows import Row


@dataclass
class DPOConfig(DPOLoss, TrainingConfig):
    """Preference losses on pairs."""


class DPO(PairAlgorithm):
    """Pairs of answers, held against the policy as the stage found it."""

    stage = "dpo"
    config_type = DPOConfig
    counted = slice(0, None, 2)  # the chosen ones: `sft` is a mean over their tokens

    @staticmethod
    def has_reference(config) -> bool:
        return True

    def loss(self, batch: AnswerBatch) -> tuple[Tensor, dict[str, Tensor]]:
        group = batch.group
        states = completion_states(self.policy, group)
        logps, entropies = logps_of_states(self.policy, states, group)
        log_sum_sq_probs = None
        if self.config.use_weighting:
            flat = linear_log_sum_sq_probs(states, self.policy.lm_head.weight)  # (M,)
            log_sum_sq_probs = by_pair(group.pad(flat))
        loss, metrics = dpo_loss(
            by_pair(group.pad(logps)),
            by_pair(batch.loss_mask),
            self.config,
            ref_per_token_logps=by_pair(batch.ref_per_token_logps),
            log_sum_sq_probs=log_sum_sq_probs,
            counts=batch.counts,
        )
        return loss, metrics | {"entropy": batch.mean(entropies)}

    def margins(self, rows: Sequence[Row]) -> Tensor:
        """Measure by how many nats the policy moved further to the chosen answers, (B,)."""
        batch = self.micro_batch(rows)
        logps, _ = per_token_logps(self.policy, batch.group)
        log_ratio = (batch.group.pad(logps) - batch.ref_per_token_logps) * batch.loss_mask
        chosen, rejected = by_pair(log_ratio).sum(-1).unbind(1)
        return chosen - rejected


def by_pair(rows: Tensor) -> Tensor:
    """(2B, T) -> (B, 2, T)."""
    return rows.unflatten(0, (-1, 2))
