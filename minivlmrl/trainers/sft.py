"""Supervised fine-tuning (SFT) on demonstrations, step 1 of InstructGPT."""

import torch
from torch import Tensor

from minivlmrl.config.options import SFTOptions
from minivlmrl.data.rows import Dataset
from minivlmrl.distributed.weights import reshard
from minivlmrl.losses.grpo import LossNormalizer
from minivlmrl.losses.sft import sft_loss
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.trainers.base import MicroBatch
from minivlmrl.trainers.offline import OfflineTrainer


class SFTTrainer(OfflineTrainer):
    """Trainer for SFT on one demonstration per prompt; in conversations, only assistant turns have a loss."""

    stage = "sft"
    config_type = SFTOptions
    options: SFTOptions
    needs = "demonstrations"
    batch_type = MicroBatch

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = per_token_logps(self.policy, batch.group)
        loss = sft_loss(
            batch.group.pad(logps), batch.loss_mask, loss_type=self.options.loss_type, normalizer=batch.normalizer
        )
        return loss, {"entropy": batch.mean(entropies)}

    @torch.no_grad()
    def evaluate(self, rows: Dataset) -> dict[str, float]:
        """Compute the loss on held-out rows, averaged over tokens in float64."""
        local_indices, count = self.shard_rows_with_answers(rows)
        if not local_indices:
            return {}
        size = self.options.micro_batch_size
        sums = torch.zeros(2).double()
        for start in range(0, len(local_indices), size):
            batch = self.micro_batch([rows[index] for index in local_indices[start : start + size]])
            self.world.barrier()
            mask = batch.loss_mask
            # no loss for rows after the first `count`, which repeat another rank's rows
            mask[max(0, count - start) :] = 0
            logps, _ = per_token_logps(self.policy, batch.group)
            padded = batch.group.pad(logps).double()
            total = sft_loss(padded, mask, loss_type=self.options.loss_type, normalizer=LossNormalizer(1, 1))
            sums += torch.stack([total, mask.sum().double()]).cpu()
        reshard(self.policy)
        total, tokens = self.world.sum(*sums.tolist())
        return {"eval/loss": total / tokens}
