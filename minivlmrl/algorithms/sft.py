"""Supervised fine-tuning: raise the log-probability of demonstrated completions (InstructGPT, step 1)."""

from dataclasses import dataclass

from torch import Tensor

from minivlmrl.algorithms.answers import AnswerAlgorithm
from minivlmrl.algorithms.sft_loss import SFTType, sft_loss
from minivlmrl.batch import MicroBatch
from minivlmrl.logprobs import per_token_logps
from minivlmrl.run.optimizer import TrainingConfig


@dataclass
class SFTConfig(TrainingConfig):
    """Supervised fine-tuning."""

    loss_type: SFTType = "nll"  # or "dft", see sft_loss


class SFT(AnswerAlgorithm):
    """A prompt with one completion. Of a conversation only the assistant's turns are trained on."""

    stage, needs, batch_type = "sft", "demonstrations", MicroBatch

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = per_token_logps(self.policy, batch.group)
        loss = sft_loss(batch.group.pad(logps), batch.loss_mask, self.config.loss_type, counts=batch.counts)
        return loss, {"entropy": batch.mean(entropies)}
