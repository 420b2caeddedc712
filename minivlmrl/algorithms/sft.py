"""Supervised fine-tuning: raise the log-probability of demonstrated completions (InstructGPT, step 1)."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from minivlmrl.algorithms.algorithm import Algorithm, MicroBatch, Step
from minivlmrl.algorithms.sft_loss import SFT_LOSS_TYPES, sft_loss
from minivlmrl.batch import pack
from minivlmrl.logprobs import per_token_logps
from minivlmrl.rows import Prompt
from minivlmrl.run.config import RunConfig


class SFT(Algorithm):
    """A prompt with one completion. Of a conversation only the assistant's turns are learnt."""

    stage, needs = "sft", "demonstrations"

    @staticmethod
    def check(run: RunConfig):
        if run.sft.loss_type not in SFT_LOSS_TYPES:
            raise ValueError(f"sft.loss_type is {run.sft.loss_type!r}; known are {', '.join(SFT_LOSS_TYPES)}")

    def batches(self) -> Iterator[Step]:
        config = self.run.sft
        for rows in self.rows(config.prompts_per_step):
            encoded = [
                (
                    row.prompt(self.processor),
                    *self.processor.encode_completion(row.messages, row.completion),
                )
                for row in rows
            ]
            counts = self.world.sum(len(rows), sum(int(learnt.sum()) for _, _, learnt in encoded))
            spare = self.spare_prompt(), self.spare_completion(), torch.zeros(1, dtype=torch.bool)
            yield Step([
                self.micro_batch(some, counts, idle)
                for some, idle in self.in_step(config.micro_batch_size, encoded, spare)
            ])  # fmt: skip

    def micro_batch(
        self, encoded: Sequence[tuple[Prompt, Tensor, Tensor]], counts: Sequence[float], idle: bool
    ) -> MicroBatch:
        prompts, answers, learnt = zip(*encoded, strict=True)
        group = pack(prompts, [[ids] for ids in answers], self.model.config, self.world.device)
        return MicroBatch(group, group.pad(torch.cat(learnt).float().to(self.world.device)), *counts, idle)

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = per_token_logps(self.model, batch.group)
        counts = SimpleNamespace(tokens=batch.num_tokens)
        loss = sft_loss(batch.group.pad(logps), batch.completion_mask, self.run.sft.loss_type, counts=counts)
        return loss, {"entropy": batch.mean(entropies)}
