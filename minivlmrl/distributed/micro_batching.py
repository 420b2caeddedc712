"""Split prompts and completions into micro-batches with a limited number of tokens.

Sampled completions do not depend on micro-batches, because each prompt has its own random numbers. Most losses divide
by tokens or completions in the whole optimizer step, so micro-batch gradients add up to the full gradient.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.distributed.process_group import World

Key = TypeVar("Key")


def split_into_micro_batches(
    lengths: Sequence[tuple[int, Sequence[int]]], max_prompts: int, max_tokens: int | None, world: World | None = None
) -> list[list[tuple[int, int]]]:
    """Split prompts and their completions into micro-batches.

    With max_tokens, prompts of similar length share a micro-batch, and large groups of completions are split. All ranks
    get the same number of micro-batches, as sharded models require. This example gives micro-batches of 20, 12 and 50
    tokens; a single completion may exceed max_tokens:

        >>> split_into_micro_batches([(10, [5, 5]), (10, [40, 2])], max_prompts=2, max_tokens=40)
        [[(0, 0), (0, 1)], [(1, 1)], [(1, 0)]]

    Args:
        lengths: (prompt tokens, tokens per completion), for each prompt.
        max_prompts: maximum prompts per micro-batch.
        max_tokens: maximum tokens per micro-batch, counting each prompt once; None = no limit.
        world: ranks, which must all call this; None = a single process.
    Returns:
        micro-batches as lists of (prompt index, completion index).
    """
    order = list(range(len(lengths)))
    if max_tokens is not None:
        order.sort(key=lambda i: lengths[i][0] + max(lengths[i][1]))
    limit = max_tokens or float("inf")
    micro_batches = [[]]
    tokens = 0
    for i in order:
        prompt_length, completion_lengths = lengths[i]
        rows = list(enumerate(completion_lengths))
        group_tokens = prompt_length + sum(completion_lengths)
        if group_tokens > limit:
            rows.sort(key=lambda row: row[1])
        if len({i for i, _ in micro_batches[-1]}) == max_prompts or tokens + group_tokens > limit:
            micro_batches.append([])
            tokens = 0
        tokens += prompt_length
        for number, (j, length) in enumerate(rows):
            if number > 0 and tokens + length > limit:
                micro_batches.append([])
                tokens = prompt_length
            tokens += length
            micro_batches[-1].append((i, j))
    micro_batches = [rows for rows in micro_batches if rows]
    num_micro_batches = max(world.gather_objects(len(micro_batches))) if world else 0
    while len(micro_batches) < num_micro_batches:
        largest = max(micro_batches, key=len)
        half = len(largest) // 2
        micro_batches.insert(micro_batches.index(largest), largest[:half])
        del largest[:half]
    return micro_batches


def sample_in_micro_batches(
    sample: Callable[[list[Prompt], int, list[Key]], list[list[Completion]]],
    prompts: Sequence[Prompt],
    num_generations: int,
    keys: Sequence[Key],
    sampling: SamplingOptions,
    world: World | None,
) -> list[list[Completion]]:
    """Sample completions in micro-batches of at most sampling.max_batch_tokens tokens.

    Lengths are unknown before sampling, so every completion counts as max_new_tokens tokens. Completions for the same
    prompt stay in one micro-batch.

    Args:
        sample: (prompts, num_generations, keys) -> completions for a micro-batch.
        keys: random seed per prompt.
    """
    completions: list = [None] * len(prompts)
    most_new = num_generations * sampling.max_new_tokens
    lengths = [(len(prompt.input_ids), [most_new]) for prompt in prompts]
    limit = sampling.max_batch_tokens
    if limit is not None and sum(length + most_new for length, _ in lengths) <= limit:
        limit = None  # all prompts fit in one micro-batch: keep their order instead of sorting by length
    for rows in split_into_micro_batches(lengths, len(prompts), limit, world):
        chosen = [i for i, _ in rows]
        groups = sample([prompts[i] for i in chosen], num_generations, [keys[i] for i in chosen])
        for i, group in zip(chosen, groups, strict=True):
            completions[i] = group
    return completions
