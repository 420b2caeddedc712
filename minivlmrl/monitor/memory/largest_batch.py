"""Try a stage's largest batches before its first step, to detect out-of-memory errors early."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import cycle, islice

import torch
from torch import Tensor
from torch.optim import Optimizer

from minivlmrl.data.loader import readable_prompt
from minivlmrl.data.row_sizes import RowSize
from minivlmrl.data.rows import Dataset, Row
from minivlmrl.errors import error_phase
from minivlmrl.generation.environments import make_sampler
from minivlmrl.generation.sampler import Sampler
from minivlmrl.monitor.memory.estimate import MemoryQuestion, evaluation_batch, sampling_batch
from minivlmrl.run.evaluate import evaluation_sampling
from minivlmrl.run.loop import num_tokens, run_micro_batches
from minivlmrl.trainers.base import Trainer
from minivlmrl.trainers.rollout import RolloutTrainer


def largest_rows(
    question: MemoryQuestion, trainer: Trainer, dataset: Dataset, sizes: Sequence[RowSize], count: int
) -> list[Row]:
    """Read the `count` largest rows, skip unreadable ones, and repeat rows if there are too few.

    Args:
        sizes: row sizes, largest first.
    """
    rows = []
    for size in sizes:
        if len(rows) == count:
            break
        with suppress(ValueError) if question.config.data.skip_unreadable else nullcontext():
            row = replace(dataset[size.index], index=size.index)
            readable_prompt(row, trainer.processor, question.trainer.answers)
            rows.append(row)
    return [*islice(cycle(rows), count)]


def try_largest_batches(
    question: MemoryQuestion, trainer: Trainer, optimizer: Optimizer, datasets: dict[str, Dataset], optimizer_bytes: int
):
    """Sample and train on the largest batches once, without changing weights, optimizer or random state.

    Args:
        optimizer_bytes: optimizer state bytes on this GPU, to reserve if the state does not exist yet.
    """
    config = trainer.config
    world = trainer.world
    rows = datasets[trainer.stage]
    gpus = [world.device] if world.device.type == "cuda" else []
    missing_bytes = 0 if optimizer.state else optimizer_bytes
    with torch.random.fork_rng(gpus):
        with error_phase("load"):
            reserved = torch.empty(missing_bytes, dtype=torch.uint8, device=world.device)
        has_tools = config.sampling.environment is not None
        if isinstance(trainer, RolloutTrainer) and not has_tools and config.sampling.engine == "native":
            work = sampling_batch(question)
            largest = largest_rows(question, trainer, rows, work.rows, len(work.rows))
            with error_phase("sampling", largest):
                try_sampling(trainer.sampler, largest, work.num_generations)
        if question.held_out and not has_tools:
            work = evaluation_batch(question)
            held_out = largest_rows(question, trainer, datasets["eval"], work.rows, len(work.rows))
            sampling = evaluation_sampling(config.sampling)
            sampler = make_sampler(trainer.policy, trainer.processor, sampling, world, config.rollout.gather_weights)
            with error_phase("evaluation", held_out):
                try_sampling(sampler, held_out, work.num_generations)
        largest = largest_rows(question, trainer, rows, question.rows, question.micro_batch_prompts)
        with error_phase("scoring", largest):
            batches = trainer.trial_batches(largest) if largest else ()
        if batches:
            run_micro_batches(trainer, [max(batches, key=num_tokens)], 0)
        del reserved
    optimizer.zero_grad()


def try_sampling(sampler: Sampler, rows: Sequence[Row], num_generations: int):
    """Sample only one token per completion, but with a KV cache for max_new_tokens."""
    if not rows:
        return
    prompts = [row.prompt(sampler.processor) for row in rows]
    sample_token = sampler.token_sampler(prompts, num_generations, ["trial"] * len(rows))

    def end_at_once(logits: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids, logps, ends = sample_token(logits, rows, counts)
        return ids, logps, torch.ones_like(ends)

    sampler.sample_with(prompts, num_generations, end_at_once)
