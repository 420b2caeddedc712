"""Try the largest micro-batch of a stage before its first step, so that memory runs out early."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch
from torch.optim import Optimizer

from minivlmrl.data.loader import readable_prompt
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.diagnostics.memory import MemoryQuestion
from minivlmrl.errors import phase
from minivlmrl.run.loop import num_tokens, run_micro_batches
from minivlmrl.trainers.base import Trainer


def largest_rows(question: MemoryQuestion, dataset: Dataset, processor: Processor) -> list[Row]:
    """Return the rows of the largest micro-batch; rows are repeated if fewer were measured.

    Rows whose images cannot be decoded are left out if data.skip_unreadable is set, and otherwise raise ValueError.
    """
    rows = []
    count = question.micro_batch_prompts
    for size in question.rows:
        if len(rows) == count:
            break
        with suppress(ValueError) if question.run.data.skip_unreadable else nullcontext():
            row = replace(dataset[size.index], index=size.index)
            readable_prompt(row, processor, question.trainer.answers)
            rows.append(row)
    return [rows[number % len(rows)] for number in range(count if rows else 0)]


def try_largest_batch(trainer: Trainer, optimizer: Optimizer, rows: Sequence[Row], optimizer_bytes: int):
    """Run the forward and backward pass of the largest micro-batch, without an update.

    The weights, the optimizer and the random generators do not change. All gradients are removed.

    Args:
        optimizer_bytes: size of the optimizer state on this GPU. It is reserved during the pass, because the optimizer
            creates its state only in the first step.
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
