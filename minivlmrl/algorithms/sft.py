"""Supervised fine-tuning: raise the log-probability of demonstrated completions (InstructGPT, step 1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from minivlmrl.algorithms.sft_loss import sft_loss
from minivlmrl.batch import pack
from minivlmrl.grpo import Algorithm, MicroBatch, Step
from minivlmrl.logprobs import per_token_logps
from minivlmrl.losses import Counts
from minivlmrl.rows import Row


@dataclass
class SFTConfig:
    """Options of SFT."""

    loss_type: Literal["nll", "dft"] = "nll"  # see sft_loss


class SFT(Algorithm):
    """A prompt with one completion. Of a conversation only the assistant's turns are trained on."""

    stage, needs = "sft", "demonstrations"

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        for rows in batches:
            prompts = [row.prompt(self.processor) for row in rows]
            encoded = [self.processor.encode_completion(row.messages, row.completion) for row in rows]
            tokens = sum(int(trained.sum()) for _, trained in encoded)
            counts, size = Counts(*self.world.sum(len(rows), tokens)), self.config.micro_batch_size
            yield Step([
                self.micro_batch(prompts[i : i + size], encoded[i : i + size], counts)
                for i in range(0, len(rows), size)
            ])  # fmt: skip

    def micro_batch(self, prompts: list, encoded: list[tuple[Tensor, Tensor]], counts: Counts) -> MicroBatch:
        """Pack prompts with their (ids, whether the assistant wrote them)."""
        group = pack(prompts, [[ids] for ids, _ in encoded], self.policy.config, self.world.device)
        trained = torch.cat([trained for _, trained in encoded]).float().to(self.world.device)
        return MicroBatch(group, group.pad(trained), counts)

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = per_token_logps(self.policy, batch.group)
        loss = sft_loss(batch.group.pad(logps), batch.loss_mask, self.config.loss_type, counts=batch.counts)
        return loss, {"entropy": batch.mean(entropies)}
