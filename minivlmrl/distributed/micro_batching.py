"""Split prompts and completions into micro-batches with a limited number of tokens.

Each completion has its own random numbers, so completions do not depend on the micro-batches. Most losses divide by the
token or completion count of the whole optimizer step, so the gradients of micro-batches add up to the step's gradient.
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

    If max_tokens is set, prompts of similar length are put into the same micro-batch. If a prompt and its completions
    have more than max_tokens tokens, the completions are distributed over several micro-batches. All ranks get the same
    number of micro-batches, because all ranks of a sharded model must run the same number of forward passes.

    A single completion is never split, even if it has more than max_tokens tokens. Example with micro-batches of 20, 12
    and 50 tokens:

        >>> split_into_micro_batches([(10, [5, 5]), (10, [40, 2])], max_prompts=2, max_tokens=40)
        [[(0, 0), (0, 1)], [(1, 1)], [(1, 0)]]

    Args:
        lengths: for each prompt, its token count and a list of its completions' token counts.
        max_prompts: largest number of prompts in a micro-batch.
        max_tokens: largest number of tokens in a micro-batch, counting each prompt once; None for no limit.
        world: the ranks, which must all call this function; None for a single process.
    Returns:
        micro-batches, each a list of (prompt index, completion index).
    """
    order = list(range(len(lengths)))
    if max_tokens is not None:
        order.sort(key=lambda i: lengths[i][0] + max(lengths[i][1]))
    limit = max_tokens or float("inf")
    micro_batches = []
    current = []  # the micro-batch that is being filled
    tokens = 0  # token count in `current`
    for i in order:
        prompt_length, completion_lengths = lengths[i]
        rows = list(enumerate(completion_lengths))
        group_tokens = prompt_length + sum(completion_lengths)
        if group_tokens > limit:
            rows.sort(key=lambda row: row[1])
        is_full = len({i for i, _ in current}) == max_prompts or tokens + group_tokens > limit
        for number, (j, length) in enumerate(rows):
            if number > 0:
                is_full = tokens + length > limit
            if is_full:
                micro_batches.append(current)
                current = []
                tokens = 0
            if number == 0 or not current:
                tokens += prompt_length
            tokens += length
            current.append((i, j))
    micro_batches.append(current)
    micro_batches = [rows for rows in micro_batches if rows]
    num_micro_batches = max(world.gather_objects(len(micro_batches))) if world else 0
    while len(micro_batches) < num_micro_batches:
        largest = max(micro_batches, key=len)
        index = micro_batches.index(largest)
        half = len(largest) // 2
        micro_batches[index : index + 1] = [largest[:half], largest[half:]]
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

    Each completion counts as sampling.max_new_tokens tokens, because its length is unknown before sampling. All
    completions of a prompt are in the same micro-batch.

    Args:
        sample: function that samples the completions of one micro-batch from (prompts, num_generations, keys).
        keys: for each prompt, the seed of its random numbers.
    """
    completions: list = [None] * len(prompts)
    most_new = num_generations * sampling.max_new_tokens
    lengths = [(len(prompt.input_ids), [most_new]) for prompt in prompts]
    limit = sampling.max_batch_tokens
    if limit is not None and sum(length + most_new for length, _ in lengths) <= limit:
        limit = None  # because prompts are sorted if there is a limit
    for rows in split_into_micro_batches(lengths, len(prompts), limit, world):
        chosen = [i for i, _ in rows]
        groups = sample([prompts[i] for i in chosen], num_generations, [keys[i] for i in chosen])
        for i, group in zip(chosen, groups, strict=True):
            completions[i] = group
    return completions
