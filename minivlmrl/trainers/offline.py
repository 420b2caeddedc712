"""Base classes for trainers that train on answers in the dataset: SFT, DPO, KTO, reward model.

A prompt and its images are encoded once for all of its answers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from minivlmrl.data.processor import encode_answer
from minivlmrl.data.rows import Completion, Dataset, Prompt, Row
from minivlmrl.distributed.weights import reshard
from minivlmrl.errors import error_context, error_phase
from minivlmrl.losses.grpo import LossNormalizer, batch_normalizer
from minivlmrl.model.packing import pack_turns
from minivlmrl.trainers.base import MicroBatch, Step, Trainer, split


@dataclass
class AnswerBatch(MicroBatch):
    """A micro-batch with answers from the dataset; in preference pairs, chosen and rejected answers alternate."""

    def counts(self, names: Iterable[str]) -> dict[str, float]:
        """Return the weights for averaging metrics over micro-batches, as in TRL.

        The entropy is weighted by tokens, other metrics by answers.
        """
        num_tokens = float(self.loss_mask.sum())
        return {name: num_tokens if name == "entropy" else len(self.loss_mask) for name in names}


class OfflineTrainer(Trainer):
    """Base class for trainers that learn from answers in the dataset, such as SFT and DPO.

    A batch of rows is one optimizer step. Subclasses define `loss`, and in `answers` the Row fields to train on.
    """

    batch_type: type[MicroBatch] = AnswerBatch
    answers = ("completion",)
    counted_rows = slice(None)  # which answers' tokens count in the loss denominator

    def steps(self, batches: Iterator[Sequence[Row]]) -> Iterator[Step]:
        for rows in batches:
            with error_phase("preparation", rows):
                step = self.build_step([self.micro_batch(part) for part in split(rows, self.options.micro_batch_size)])
            yield step

    def trial_batches(self, rows: Sequence[Row]) -> Sequence[MicroBatch]:
        return next(self.steps(iter([rows]))).micro_batches

    def micro_batch(self, rows: Sequence[Row]) -> MicroBatch:
        return self.pack(*self.encode(rows))

    def encode(self, rows: Sequence[Row]) -> tuple[list[Prompt], list[list[Completion]]]:
        answers = []
        for row in rows:
            with error_context(row.where or "row"):
                answers.append([encode_answer(self.processor, row, getattr(row, name)) for name in self.answers])
        return [row.prompt(self.processor) for row in rows], answers

    def pack(self, prompts: Sequence[Prompt], answers: Sequence[list[Completion]]) -> MicroBatch:
        """Pack prompts and answers into a micro-batch.

        Its loss denominator counts only this micro-batch, until `build_step` sets the optimizer step's denominator.
        """
        group = pack_turns(prompts, answers, self.policy.config, self.world.device)
        mask = group.completion_mask
        ref_logps = None if self.reference is None else self.reference.logps(group)
        return self.batch_type(group, mask, batch_normalizer(mask), ref_logps)

    def shard_rows_with_answers(self, rows: Dataset) -> tuple[list[int], int]:
        """Select this rank's share of the rows, without rows that lack an answer.

        A rank with fewer rows repeats another rank's row, because all ranks must run a sharded model equally often.

        Returns:
            row indices, repeated rows last, and the number of rows without repeats
        """
        local = []
        for index in range(self.world.rank, len(rows), self.world.size):
            row = rows[index]
            if all(getattr(row, name) is not None for name in self.answers):
                local.append(index)
        self.world.barrier()
        return self.world.shard_evenly(sorted(chain(*self.world.gather_objects(local))))

    def build_step(self, batches: Sequence[MicroBatch]) -> Step:
        """Combine micro-batches into one optimizer step, whose loss is the mean over all ranks."""
        tokens = sum(batch.loss_mask[self.counted_rows].sum().item() for batch in batches)
        sequences, tokens = self.world.sum(sum(len(batch.loss_mask) for batch in batches), tokens)
        normalizer = LossNormalizer(sequences, tokens)
        return Step([replace(batch, normalizer=normalizer) for batch in batches])


class PairTrainer(OfflineTrainer):
    """Base class for training stages on preference pairs."""

    needs = "pairs"
    answers = ("chosen", "rejected")

    def margins(self, rows: Sequence[Row]) -> Tensor:
        """Compute the score difference between the chosen and the rejected answer: (pairs,)."""
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, rows: Dataset) -> dict[str, float]:
        """Compute the pair accuracy: how often the chosen answer scores higher."""
        local_indices, count = self.shard_rows_with_answers(rows)
        if not local_indices:
            return {}
        parts = split(local_indices, self.options.micro_batch_size)
        margins = torch.cat([self.margins([rows[index] for index in part]) for part in parts])[:count]
        reshard(self.trained)
        self.world.barrier()
        ahead, pairs = self.world.sum((margins > 0).sum().item(), count)
        return {"eval/pair_accuracy": ahead / pairs}
