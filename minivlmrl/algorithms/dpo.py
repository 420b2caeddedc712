"""Direct preference optimization (arXiv 2305.18290); MPO, IPO and others are its loss types."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from minivlmrl.algorithms.answers import AnswerBatch, PairAlgorithm
from minivlmrl.algorithms.base import TrainingConfig, loss_options
from minivlmrl.kernels.linear_log_softmax import linear_log_sum_sq_probs
from minivlmrl.logprobs import completion_states, logps_of_states, per_token_logps
from minivlmrl.objectives.preference_losses import DPOLoss, DPOSection, dpo_loss
from minivlmrl.rows import Row


@dataclass
class DPOConfig(DPOSection, TrainingConfig):
    """Preference losses on pairs."""


class DPO(PairAlgorithm):
    """Pairs of answers, held against the policy as the stage found it."""

    # chosen tokens
    stage = "dpo"
    counted = slice(0, None, 2)

    @staticmethod
    def has_reference(config) -> bool:
        return True

    def __init__(self, *args):
        super().__init__(*args)
        self.options = loss_options(DPOLoss, self.config)

    def loss(self, batch: AnswerBatch) -> tuple[Tensor, dict[str, Tensor]]:
        group, mask = batch.group, batch.loss_mask
        states = completion_states(self.policy, group)
        logps, entropies = logps_of_states(self.policy, states, group)
        fixed = {"ref_per_token_logps": by_pair(batch.ref_per_token_logps), "counts": batch.counts}
        if self.config.use_weighting:
            log_sum_sq_probs = linear_log_sum_sq_probs(states, self.policy.lm_head.weight)
            fixed["log_sum_sq_probs"] = by_pair(group.pad(log_sum_sq_probs))
        loss, metrics = dpo_loss(by_pair(group.pad(logps)), by_pair(mask), self.options, **fixed)
        return loss, metrics | {"entropy": batch.mean(entropies)}

    def margins(self, rows: Sequence[Row]) -> Tensor:
        """Measure by how many nats the policy moved further to the chosen answers, (B,)."""
        batch = self.micro_batch(rows)
        moved = batch.group.pad(per_token_logps(self.policy, batch.group)[0])
        moved = (moved - batch.ref_per_token_logps) * batch.loss_mask
        u, v = by_pair(moved).sum(-1).unbind(1)
        return u - v


def by_pair(rows: Tensor) -> Tensor:
    """(2B, T) -> (B, 2, T)."""
    return rows.unflatten(0, (-1, 2))
