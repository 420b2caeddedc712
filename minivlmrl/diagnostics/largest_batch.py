"""Try the largest micro-batch of a stage before its first step, so that memory runs out early."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch
from torch.optim import Optimizer

from minivlmrl.data.loader import readable_prompt
from minivlmrl.data.processor import Processor
from minivlmrl.data.row_summary import RowSize
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.errors import phase
from minivlmrl.run.loop import num_tokens, run_micro_batches
from minivlmrl.trainers.base import Trainer


def largest_rows(
    dataset: Dataset,
    sizes: Sequence[RowSize],
    processor: Processor,
    count: int,
    skip_unreadable: bool,
    answers: Sequence[str] = (),
) -> list[Row]:
    """Return the `count` largest rows of a dataset; rows are repeated if fewer were measured.

    Args:
        sizes: sizes of rows of the dataset, the largest first.
        skip_unreadable: True leaves out rows whose images cannot be decoded.
        answers: Row fields with the answers that the stage trains on.

    Raises:
        ValueError: a row is unreadable, and skip_unreadable is False.
    """
    rows = []
    for size in sizes:
        if len(rows) == count:
            break
        with suppress(ValueError) if skip_unreadable else nullcontext():
            row = replace(dataset[size.index], index=size.index)
            readable_prompt(row, processor, answers)
            rows.append(row)
    return [rows[number % len(rows)] for number in range(count if rows else 0)]


def try_largest_batch(
    trainer: Trainer, optimizer: Optimizer, rows: Sequence[Row], optimizer_bytes: int
):
    """Run the forward and backward pass of the largest micro-batch, without an update.

    The weights, the optimizer and the random generators do not change. All gradients are removed.

    Args:
        rows: the rows of the micro-batch.
        optimizer_bytes: size of the optimizer state on this GPU. It is reserved during the pass,
            because the optimizer creates its state only in the first step.
    """
    device = trainer.world.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        with phase("load"):
            missing = 0 if optimizer.state else optimizer_bytes
            reserved = torch.empty(missing, dtype=torch.uint8, device=device)
        trainer.rows = rows
        with phase("scoring"):
            batches = trainer.trial_batches(rows)
        if batches:
            run_micro_batches(trainer, [max(batches, key=num_tokens)], 0)
        del reserved
    trainer.rows = ()
    optimizer.zero_grad()
