"""Supervised fine-tuning: raise the log-probability of demonstrated completions (InstructGPT, step 1)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from minivlmrl.config import RunConfig
from minivlmrl.model.batch import pack
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.training.algorithms.algorithm import Algorithm, MicroBatch, Step, chunks
from minivlmrl.training.losses.sft import SFT_LOSS_TYPES, sft_loss


class SFT(Algorithm):
    """A prompt with one completion. Of a conversation only the assistant's turns are learnt."""

    needs = "demonstrations"

    @staticmethod
    def check(run: RunConfig):
        if run.sft.loss_type not in SFT_LOSS_TYPES:
            raise ValueError(f"sft.loss_type is {run.sft.loss_type!r}; known are {', '.join(SFT_LOSS_TYPES)}")

    def batches(self) -> Iterator[Step]:
        config = self.run.sft
        for rows in self.rows(config.prompts_per_step):
            prompts = [self.processor(row.messages, row.images, row.videos) for row in rows]
            encoded = [self.processor.encode_completion(row.messages, row.completion) for row in rows]
            counts = self.world.sum(len(rows), sum(int(learnt.sum()) for _, learnt in encoded))
            batches = []
            for some_prompts, some in chunks(config.micro_batch_size, prompts, encoded):
                group = pack(some_prompts, [[ids] for ids, _ in some], self.model.config, self.world.device)
                learnt = torch.cat([learnt for _, learnt in some]).to(self.world.device)
                batches.append(MicroBatch(group, group.pad(learnt.float()), *counts))
            yield Step(batches)

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logps, entropies = per_token_logps(self.model, batch.group)
        loss = sft_loss(batch.group.pad(logps), batch.completion_mask, batch.num_tokens, self.run.sft.loss_type)
        return loss, {"entropy": batch.mean(entropies)}
