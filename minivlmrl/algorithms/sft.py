"""Supervised fine-tuning: raise the log-probability of demonstrated completions (InstructGPT, step 1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from minivlmrl.algorithms.answers import encode, one_step, pack_encoded, pieces
from minivlmrl.algorithms.sft_loss import SFTType, sft_loss
from minivlmrl.batch import MicroBatch, Step
from minivlmrl.grpo import Algorithm
from minivlmrl.logprobs import per_token_logps
from minivlmrl.rows import Row


@dataclass
class SFTConfig:
    """Options of supervised fine-tuning."""

    loss_type: SFTType = "nll"  # or "dft", see sft_loss


class SFT(Algorithm):
    """A prompt with one completion. Of a conversation only the assistant's turns are trained on."""

    stage, needs = "sft", "demonstrations"

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        for rows in batches:
            parts = pieces(rows, self.config.micro_batch_size)
            packed = [pack_encoded(*encode(part, ["completion"], self.processor), self) for part in parts]
            yield one_step([MicroBatch(*batch, None) for batch in packed], self.world)

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = per_token_logps(self.policy, batch.group)
        loss = sft_loss(batch.group.pad(logps), batch.loss_mask, self.config.loss_type, counts=batch.counts)
        return loss, {"entropy": batch.mean(entropies)}
