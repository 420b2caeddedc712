"""Micro-batches of rows that come with answers; SFT, DPO, KTO and the reward model share them.

A row is a group: its prompt and images are computed once for all of its answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.batch import GroupBatch, MicroBatch, pack
from minivlmrl.data.turns import encode_completion
from minivlmrl.rows import Dataset, Processor, Prompt, Row

PAIR = ("chosen", "rejected")


@dataclass
class Answers:
    """One row as tensors."""

    prompt: Prompt
    ids: list[Tensor]  # of each answer (C,) int64
    loss_masks: list[Tensor]  # of each answer (C,) bool, False for what another than the assistant says in it


@dataclass
class PairBatch(MicroBatch):
    """R = 2B completions: chosen, rejected, chosen, rejected, ..."""

    margin: Tensor | None = None  # (B,)

    @property
    def weight(self) -> float:
        """Its metrics are means over pairs."""
        return len(self.loss_mask) / 2


def encode(row: Row, names: Sequence[str], processor: Processor) -> Answers:
    """Turn a row into tensors, with the answers of these names: "completion", or "chosen" and "rejected"."""
    encoded = [encode_completion(processor, row.messages, getattr(row, name)) for name in names]
    return Answers(row.prompt(processor), [ids for ids, _ in encoded], [mask for _, mask in encoded])


def pack_answers(answers: Sequence[Answers], config, device) -> tuple[GroupBatch, Tensor]:
    """Lay rows end to end.

    Args:
        config: of the model that reads them.
    Returns:
        the batch, R answers in order; and its loss mask, (R, T) float32.
    """
    group = pack([row.prompt for row in answers], [row.ids for row in answers], config, device)
    loss_mask = torch.cat([mask for row in answers for mask in row.loss_masks])
    return group, group.pad(loss_mask.float().to(device))


def pieces(items: Sequence, size: int) -> list[Sequence]:
    """Cut a sequence into pieces of `size`; the last may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def equal_share(items: Sequence, world) -> Sequence:
    """This rank's part of a sequence that all ranks hold: every world.size-th item.

    Sharded models are computed by all ranks together, so all get equally many: some get one of the first items again.
    """
    own = items[world.rank :: world.size]
    return [*own, *items[: -(-len(items) // world.size) - len(own)]]


def with_pairs(rows: Dataset, world) -> list[int]:
    """Indices of the rows that have both answers."""

    def has_both(row: Row) -> bool:
        return row.chosen is not None and row.rejected is not None

    found = [index for index in range(world.rank, len(rows), world.size) if has_both(rows[index])]
    return sorted(index for part in world.gather_objects(found) for index in part)


@torch.no_grad()
def pair_accuracy(rows: Dataset, world, margins: Callable[[Sequence[int]], Tensor], size: int = 64) -> float | None:
    """Compute the share of pairs with the chosen answer ahead; None: there are no pairs.

    Args:
        margins: indices of rows -> (B,), over 0 where the chosen answer is ahead.
        size: pairs in one call of it.
    """
    indices = with_pairs(rows, world)
    if not indices:
        return None
    margin = torch.cat([margins(piece) for piece in pieces(equal_share(indices, world), size)])
    ahead = margin[: len(indices[world.rank :: world.size])] > 0  # not those that another rank has too
    return world.sum(ahead.sum().item())[0] / len(indices)
