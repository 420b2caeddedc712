"""Micro-batches of rows that come with answers; SFT, DPO, KTO and the reward model share them.

A row is a group: its prompt and images are computed once for all of its answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivlmrl.batch import GroupBatch, MicroBatch, Step, pack
from minivlmrl.data.turns import encode_completion
from minivlmrl.losses import Counts
from minivlmrl.rows import Dataset, Prompt, Row
from minivlmrl.scale.sharding import reshard

PAIR = ("chosen", "rejected")


@dataclass
class PairBatch(MicroBatch):
    """R = 2B completions: chosen, rejected, chosen, rejected, ..."""

    margin: Tensor | None = None  # (B,)

    @property
    def weight(self) -> float:
        """Its metrics are means over pairs."""
        return len(self.loss_mask) / 2


def encode(rows: Sequence[Row], names: Sequence[str], processor) -> tuple[list[Prompt], list[list]]:
    """Turn rows and their answers of these names ("completion", or "chosen" and "rejected") into tensors.

    Returns:
        the prompts; and for each row a list of answers: ids (C,) int64, and a loss mask (C,) bool, False for what
        another than the assistant says in it.
    """
    answers = [[encode_completion(processor, row.messages, getattr(row, name)) for name in names] for row in rows]
    return [row.prompt(processor) for row in rows], answers


def pack_encoded(prompts: Sequence[Prompt], answers: Sequence[list], algorithm) -> tuple[GroupBatch, Tensor]:
    """Lay rows end to end: the batch, R answers in order; and its loss mask, (R, T) float32."""
    ids, device = [[ids for ids, _ in row] for row in answers], algorithm.world.device
    group = pack(prompts, ids, algorithm.policy.config, device)
    loss_mask = torch.cat([mask for row in answers for _, mask in row])
    return group, group.pad(loss_mask.float().to(device))


def one_step(batches: list[MicroBatch], world, counted: slice = slice(None)) -> Step:
    """Make an optimizer step of micro-batches, with the counts of all ranks; `counted` selects completions."""
    tokens = sum(batch.loss_mask[counted].sum().item() for batch in batches)
    counts = Counts(*world.sum(sum(len(batch.loss_mask) for batch in batches), tokens))
    for batch in batches:
        batch.counts = counts
    return Step(batches)


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
def pair_accuracy(algorithm, rows: Dataset, margins: Callable[[Sequence[int]], Tensor], size: int = 64) -> float | None:
    """Compute the share of pairs with the chosen answer ahead; None: there are no pairs.

    Args:
        margins: indices of rows -> (B,), over 0 where the chosen answer is ahead.
        size: pairs in one call of it.
    """
    world = algorithm.world
    indices = with_pairs(rows, world)
    if not indices:
        return None
    margin = torch.cat([margins(piece) for piece in pieces(equal_share(indices, world), size)])
    reshard(algorithm.trained)
    ahead = margin[: len(indices[world.rank :: world.size])] > 0  # not those that another rank has too
    return world.sum(ahead.sum().item())[0] / len(indices)
