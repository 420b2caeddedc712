"""Base classes of trainers for rows with given answers: SFT, DPO, KTO and the reward model.

The answers of a row form a group: its prompt and images are computed once for all of them.
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

EVAL_BATCH_SIZE = 64  # pairs per forward pass in evaluation
Item = TypeVar("Item")


@dataclass
class AnswerBatch(MicroBatch):
    """Given answers; pairs are ordered chosen, rejected, chosen, rejected, ..."""

    @property
    def weight(self) -> float:
        """Weight of this micro-batch in the metrics of its step: the number of answers."""
        return len(self.loss_mask)

    def mean(self, per_token: Tensor) -> Tensor:
        """Average a flat (M,) tensor over the tokens of each answer, then over answers."""
        return row_mean(self.group.pad(per_token.detach()), self.loss_mask).mean()


class OfflineTrainer(Trainer):
    """Base class of stages that train on given answers; each batch of rows is an optimizer step."""

    batch_type: type[MicroBatch] = AnswerBatch
    answers = ("completion",)  # fields of Row that hold the answers
    # rows of a micro-batch whose tokens are counted in LossNormalizer.tokens
    counted_rows = slice(None)

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        for rows in batches:
            parts = split(rows, self.config.micro_batch_size)
            yield self.step([self.micro_batch(part) for part in parts])

    def micro_batch(self, rows: Sequence[Row]) -> MicroBatch:
        return self.pack(*self.encode(rows))

    def encode(self, rows: Sequence[Row]) -> tuple[list[Prompt], list[list[Completion]]]:
        """Tokenize the prompts and the answers of rows; returns the prompts, and lists of answers."""
        answers = []
        for row in rows:
            texts = [getattr(row, name) for name in self.answers]
            answers.append([encode_completion(self.processor, row.messages, x) for x in texts])
        return [row.prompt(self.processor) for row in rows], answers

    def pack(self, prompts: Sequence[Prompt], answers: Sequence[list[Completion]]) -> MicroBatch:
        """Pack prompts and answers into a micro-batch, with the reference's log-probabilities."""
        group = pack(prompts, answers, self.policy.config, self.world.device)
        batch = self.batch_type(group, group.completion_mask)
        if self.reference is not None:
            batch.ref_per_token_logps = self.reference.logps(group)
        return batch

    def rows_with_answers(self, rows: Dataset) -> list[int]:
        """Return the indices of rows that have all answers, the same list on all ranks."""
        local = []
        for index in range(self.world.rank, len(rows), self.world.size):
            row = rows[index]
            if all(getattr(row, name) is not None for name in self.answers):
                local.append(index)
        return sorted(chain(*self.world.gather_objects(local)))

    def shard_rows_with_answers(self, rows: Dataset) -> tuple[list[int], int]:
        """Split the rows that have all answers among ranks.

        All ranks get equally many rows, because sharded models must run in step. Some rows may
        therefore be repeated.

        Returns:
            indices of this rank's rows (empty if no row has all answers), and the number of
            leading indices that no other rank has.
        """
        indices = self.rows_with_answers(rows)
        return self.world.shard_evenly(indices) if indices else ([], 0)

    def step(self, batches: Sequence[MicroBatch]) -> Step:
        """Build an optimizer step from micro-batches, normalised by the counts of all ranks."""
        tokens = sum(batch.loss_mask[self.counted_rows].sum().item() for batch in batches)
        sequences = sum(len(batch.loss_mask) for batch in batches)
        sequences, tokens = self.world.sum(sequences, tokens)
        normalizer = LossNormalizer(sequences, tokens)
        for batch in batches:
            batch.normalizer = normalizer
        return Step(batches)


class PairTrainer(OfflineTrainer):
    """Base class of stages that train on pairs of a chosen and a rejected answer."""

    needs = "pairs"
    answers = ("chosen", "rejected")

    def margins(self, rows: Sequence[Row]) -> Tensor:
        """Compute the score of the chosen minus that of the rejected answer, (B,)."""
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, rows: Dataset) -> dict[str, float]:
        """Compute the pair accuracy: the fraction of pairs whose chosen answer scores higher."""
        share, count = self.shard_rows_with_answers(rows)
        if not share:
            return {}
        parts = split([rows[index] for index in share], EVAL_BATCH_SIZE)
        margins = torch.cat([self.margins(part) for part in parts])[:count]
        reshard(self.trained)
        ahead, pairs = self.world.sum((margins > 0).sum().item(), count)
        return {"eval/pair_accuracy": ahead / pairs}


def split(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Split a sequence into parts of `size` items; the last part may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]
