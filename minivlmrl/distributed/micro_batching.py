"""A rollout in pieces of a token budget: what one forward holds is bounded, whatever the rows.

Draws go by key and a loss takes the counts of the whole step. So pieces change no completion, and
no gradient but for the order in which numbers are added.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.rows import Completion, Prompt
from minivlmrl.distributed.process_group import World

Key = TypeVar("Key")


def pieces(
    lengths: Sequence[tuple[int, Sequence[int]]],
    most_prompts: int,
    most_tokens: int | None,
    world: World | None = None,
) -> list[list[tuple[int, int]]]:
    """Divide the rows of some prompts.

    With most_tokens prompts of like length come together, and a prompt whose completions are too
    many for one piece is computed again for the next of them. All ranks get equally many pieces, as
    sharded models need them.

    Example: lengths [(10, [5, 5]), (10, [40, 2])], 9 prompts and 40 tokens at most:
        [(0, 0), (0, 1)], [(1, 1)], [(1, 0)]; the last has 50 tokens, as a row is never cut

    Args:
        lengths: of each prompt its tokens, and those of each of its completions.
        most_prompts: of a piece.
        most_tokens: of a piece, prompts once and completions; None: any number.
        world: all its ranks call this; None: this process alone.
    Returns:
        (index of the prompt, index of the completion) of each row of each piece.
    """
    order = list(range(len(lengths)))
    if most_tokens is not None:
        order.sort(key=lambda i: lengths[i][0] + max(lengths[i][1]))
    limit = most_tokens or float("inf")
    packed = []
    piece = []
    tokens = 0  # of this piece
    for i in order:
        prompt_length, completion_lengths = lengths[i]
        rows = list(enumerate(completion_lengths))
        group_tokens = prompt_length + sum(completion_lengths)
        if group_tokens > limit:
            rows.sort(key=lambda row: row[1])
        # a group begins in a piece that has room for all of it
        is_full = len({i for i, _ in piece}) == most_prompts or tokens + group_tokens > limit
        for number, (j, length) in enumerate(rows):
            if number > 0:
                is_full = tokens + length > limit
            if is_full:
                packed.append(piece)
                piece = []
                tokens = 0
            if number == 0 or not piece:
                tokens += prompt_length
            tokens += length
            piece.append((i, j))
    packed.append(piece)
    packed = [piece for piece in packed if piece]
    num_pieces = max(world.gather_objects(len(packed))) if world else 0
    while len(packed) < num_pieces:
        largest = max(packed, key=len)
        index = packed.index(largest)
        half = len(largest) // 2
        packed[index : index + 1] = [largest[:half], largest[half:]]
    return packed


def largest_piece(
    prompts: int, prompt: int, completions: list[int], most_tokens: int | None
) -> tuple[int, int]:
    """Count prompts of these lengths in the largest piece, and completions of each."""
    largest = max(pieces([(prompt, completions)] * prompts, prompts, most_tokens), key=len)
    num_prompts = len({i for i, _ in largest})
    return num_prompts, math.ceil(len(largest) / num_prompts)


def in_pieces(
    sample: Callable[[list[Prompt], int, list[Key]], list[list[Completion]]],
    prompts: Sequence[Prompt], num_generations: int, keys: Sequence[Key],
    sampling: SamplingOptions, world: World | None,
) -> list[list[Completion]]:  # fmt: skip
    """Call sample(prompts, num_generations, keys) for as many prompts at a time as fit, or one."""
    completions: list = [None] * len(prompts)
    most_new = num_generations * sampling.max_new_tokens
    lengths = [(len(prompt.input_ids), [most_new]) for prompt in prompts]
    for piece in pieces(lengths, len(prompts), sampling.max_batch_tokens, world):
        chosen = [i for i, _ in piece]
        drawn = sample([prompts[i] for i in chosen], num_generations, [keys[i] for i in chosen])
        for i, group in zip(chosen, drawn, strict=True):
            completions[i] = group
    return completions
