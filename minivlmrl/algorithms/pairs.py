"""What DPO and the reward model share: rows with a chosen and a rejected answer, packed as groups of two."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.algorithms.algorithm import Algorithm, MicroBatch
from minivlmrl.rows import Prompt, Row
from minivlmrl.scale.sharding import reshard


@dataclass
class Pair:
    """One row as tensors."""

    prompt: Prompt
    answers: list[Tensor]  # chosen, rejected: (C,) int64
    learnt: list[Tensor]  # of each: (C,) bool, False for what another than the assistant says in it


@dataclass
class PairBatch(MicroBatch):
    """R = 2B completions: chosen, rejected, chosen, rejected, ..."""

    ref_per_token_logps: Tensor | None = None  # (R, T)
    margin: Tensor | None = None  # (B,)

    @property
    def weight(self) -> float:
        """Figures are means over pairs."""
        return 0 if self.idle else len(self.completion_mask) // 2


class PairAlgorithm(Algorithm):
    """Learns from pairs and can rank them. A subclass says how much better it finds the chosen answers."""

    needs = "pairs"

    def margins(self, pairs: Sequence[Pair]) -> Tensor:
        """(B,): over 0 where the chosen answer wins."""
        raise NotImplementedError

    def pairs(self, rows: Sequence[Row]) -> list[Pair]:
        pairs = []
        for row in rows:
            answers = (row.chosen, row.rejected)
            encoded = [self.processor.encode_completion(row.messages, answer) for answer in answers]
            prompt = row.prompt(self.processor)
            pairs.append(Pair(prompt, [ids for ids, _ in encoded], [learnt for _, learnt in encoded]))
        return pairs

    def spare_pair(self) -> Pair:
        answer, learnt = self.spare_completion(), torch.ones(1, dtype=torch.bool)
        return Pair(self.spare_prompt(), [answer, answer], [learnt, learnt])

    @torch.no_grad()
    def pair_accuracy(self, batch_size: int = 64) -> float | None:
        rows, right = list(self.held_out_rows()), 0
        for some, idle in self.in_step(batch_size, rows, None):
            margins = self.margins([self.spare_pair()] if idle else self.pairs(some))
            right += 0 if idle else int((margins > 0).sum())
        reshard(self.trained)
        right, count = self.world.sum(right, len(rows))
        return right / count if count else None

    def held_out_rows(self) -> Iterator[Row]:
        """This rank's held-out rows that have both answers."""
        for i in range(self.world.rank, len(self.held_out or ()), self.world.size):
            row = self.held_out[i]
            if row.chosen is not None and row.rejected is not None:
                yield row


def learnt_mask(pairs: Sequence[Pair], batch) -> Tensor:
    """(R, T) float32 completion mask of packed pairs."""
    learnt = torch.cat([learnt for pair in pairs for learnt in pair.learnt])
    return batch.pad(learnt.float().to(batch.completion_ids.device))
