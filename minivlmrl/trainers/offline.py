"""Rows that come with answers: what SFT, DPO, KTO and the reward model have in common.

A row is a group: its prompt and images are computed once for all of its answers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from minivlmrl.data.processor import encode_completion
from minivlmrl.data.rows import Completion, Dataset, Prompt, Row
from minivlmrl.distributed.weights import reshard
from minivlmrl.losses.grpo import LossNormalizer, row_mean
from minivlmrl.model.packing import pack
from minivlmrl.trainers.base import MicroBatch, Step, Trainer

EVALUATED = 64  # pairs that are scored together
Item = TypeVar("Item")


@dataclass
class AnswerBatch(MicroBatch):
    """R completions; of pairs chosen, rejected, chosen, rejected, ..."""

    @property
    def weight(self) -> float:
        """Weigh its metrics, which are means over answers, or over pairs of them."""
        return len(self.loss_mask)

    def mean(self, per_token: Tensor) -> Tensor:
        """Average a flat (M,) tensor over the tokens of each answer, then over answers."""
        return row_mean(self.group.pad(per_token.detach()), self.loss_mask).mean()


class OfflineTrainer(Trainer):
    """An algorithm that is trained on given answers; each draw of rows is an optimizer step."""

    batch_type: type[MicroBatch] = AnswerBatch
    answers = ("completion",)  # names of a row's answers
    counted = slice(None)  # completions with tokens that count

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        for rows in batches:
            parts = split(rows, self.config.micro_batch_size)
            yield self.step([self.micro_batch(part) for part in parts])

    def micro_batch(self, rows: Sequence[Row]) -> MicroBatch:
        return self.pack(*self.encode(rows))

    def encode(self, rows: Sequence[Row]) -> tuple[list[Prompt], list[list[Completion]]]:
        """Encode the prompts, and each row's answers."""
        answers = []
        for row in rows:
            texts = [getattr(row, name) for name in self.answers]
            answers.append([encode_completion(self.processor, row.messages, x) for x in texts])
        return [row.prompt(self.processor) for row in rows], answers

    def pack(self, prompts: Sequence[Prompt], answers: Sequence[list[Completion]]) -> MicroBatch:
        """Lay encoded rows end to end; the reference scores them, if there is one."""
        group = pack(prompts, answers, self.policy.config, self.world.device)
        batch = self.batch_type(group, group.completion_mask)
        if self.reference is not None:
            batch.ref_per_token_logps = self.reference.logps(group)
        return batch

    def answered(self, rows: Dataset) -> list[int]:
        """Find the rows that have all answers: their indices, the same on all ranks."""
        local = []
        for index in range(self.world.rank, len(rows), self.world.size):
            row = rows[index]
            if all(getattr(row, name) is not None for name in self.answers):
                local.append(index)
        return sorted(chain(*self.world.gather_objects(local)))

    def answered_share(self, rows: Dataset) -> tuple[list[int], int]:
        """Share the answered rows: this rank's indices, and how many of them no other rank has.

        All ranks get equally many, as sharded models need them; none if no row has all answers.
        """
        indices = self.answered(rows)
        return self.world.shard_evenly(indices) if indices else ([], 0)

    def step(self, batches: Sequence[MicroBatch]) -> Step:
        """Make an optimizer step of micro-batches, with the counts of all ranks."""
        tokens = sum(batch.loss_mask[self.counted].sum().item() for batch in batches)
        sequences = sum(len(batch.loss_mask) for batch in batches)
        sequences, tokens = self.world.sum(sequences, tokens)
        normalizer = LossNormalizer(sequences, tokens)
        for batch in batches:
            batch.normalizer = normalizer
        return Step(batches)


class PairTrainer(OfflineTrainer):
    """Trained on pairs of answers."""

    needs = "pairs"
    answers = ("chosen", "rejected")

    def margins(self, rows: Sequence[Row]) -> Tensor:
        """Measure by how much the chosen answers are ahead, (B,)."""
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, rows: Dataset) -> dict[str, float]:
        """Compute the share of pairs with the chosen answer ahead."""
        share, count = self.answered_share(rows)
        if not share:
            return {}
        parts = split([rows[index] for index in share], EVALUATED)
        margins = torch.cat([self.margins(part) for part in parts])[:count]
        reshard(self.trained)
        ahead, pairs = self.world.sum((margins > 0).sum().item(), count)
        return {"pairs": ahead / pairs}


def split(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Split a sequence into parts of `size`; the last may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
