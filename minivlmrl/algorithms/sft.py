"""Supervised fine-tuning: raise the log-probability of demonstrated completions (InstructGPT, step 1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from minivlmrl.algorithms.answers import encode, pack_answers, pieces
from minivlmrl.algorithms.sft_loss import SFTType, sft_loss
from minivlmrl.batch import MicroBatch, Step
from minivlmrl.grpo import Algorithm
from minivlmrl.logprobs import per_token_logps
from minivlmrl.losses import Counts
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
            answers = [encode(row, ["completion"], self.processor) for row in rows]
            counts = Counts(*self.world.sum(len(rows), sum(int(row.loss_masks[0].sum()) for row in answers)))
            packed = [
                pack_answers(piece, self.policy.config, self.world.device)
                for piece in pieces(answers, self.config.micro_batch_size)
            ]
            yield Step([MicroBatch(group, loss_mask, counts) for group, loss_mask in packed])

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = per_token_logps(self.policy, batch.group)
        loss = sft_loss(batch.group.pad(logps), batch.loss_mask, self.config.loss_type, counts=batch.counts)
        return loss, {"entropy": batch.mean(entropies)}
