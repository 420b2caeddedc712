"""Completions that teach nothing are not computed.

The gradient of GRPO's loss is a sum over rows of advantage times something, plus those of the KL and the entropy. So
with beta 0 and no entropy bonus a row of advantage 0 adds nothing, as all rows of a group whose rewards are equal.
"""

from dataclasses import fields, replace
from itertools import groupby

import torch
from torch import Tensor

from minivlmrl.batch import MicroBatch, Step, pack
from minivlmrl.kernels.backend import to_device


def without_idle_rows(algorithm, step: Step) -> Step:
    """Leave out rows that add nothing to the gradient; metrics are then means over the rows that stay.

    At least one row of a micro-batch stays: where weights are sharded, all ranks go forward and backward together.
    """
    config, batches, dropout = algorithm.config, step.micro_batches, algorithm.run.adapter.dropout  # drawn for all rows
    if algorithm.stage != "grpo" or config.beta or getattr(config, "entropy_coef", 0) or dropout:
        return step
    if config.loss_type == "bnpo":  # it divides by the tokens of a micro-batch
        return step
    teach = [(batch.advantages.view(len(batch.loss_mask), -1) * batch.loss_mask).any(1) for batch in batches]
    teach, kept = torch.cat(teach).cpu().split([len(own) for own in teach]), []
    for batch, own in zip(batches, teach, strict=True):
        own[0] |= not own.any()
        kept.append(batch if own.all() else some_rows(algorithm, batch, own.nonzero()[:, 0]))
    return replace(step, micro_batches=kept)


def some_rows(algorithm, batch: MicroBatch, rows: Tensor) -> MicroBatch:
    """The micro-batch of these rows (r,), ascending, and of the prompts that they answer."""
    group, ids = batch.group, batch.group.split(batch.group.completion_ids.cpu())
    owner = [prompt for prompt, lengths in enumerate(group.layout.completion_lengths) for _ in lengths]
    kept = [(prompt, [ids[row] for row in of]) for prompt, of in groupby(rows.tolist(), key=owner.__getitem__)]
    prompts, completions = [group.prompts[prompt] for prompt, _ in kept], [some for _, some in kept]
    group = pack(prompts, completions, algorithm.policy.config, algorithm.world.device)
    own, longest = {}, max(group.layout.row_lengths)
    for name, value in ((each.name, getattr(batch, each.name)) for each in fields(batch)):
        if isinstance(value, Tensor) and value.dim():
            each = len(batch.loss_mask) // len(value)  # 2 for numbers of a pair
            value = value[to_device(rows[::each] // each, value.device)]
            own[name] = value[:, :longest] if value.dim() > 1 else value
    return replace(batch, group=group, **own)
