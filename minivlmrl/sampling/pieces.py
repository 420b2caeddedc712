"""A rollout in pieces of a token budget: what one forward holds is bounded, whatever the rows.

Draws go by key and a loss takes the counts of the whole step. So pieces change no completion, and
no gradient but for the order in which numbers are added.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated


@dataclass
class PiecesConfig:
    """Micro-batches of stages that sample."""

    # also at most so many: a group may be divided
    max_tokens_per_micro_batch: Annotated[int, ">= 1"] | None = None


def pieces(
    lengths: list[tuple[int, Sequence[int]]], most_prompts: int, most_tokens: int | None, world=None
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
    packed = [[]]
    tokens = 0
    for i in order:
        prompt, completions = lengths[i]
        rows = list(enumerate(completions))
        whole = prompt + sum(completions)
        if whole > limit:
            rows.sort(key=lambda row: row[1])
        if len({i for i, _ in packed[-1]}) == most_prompts or tokens + whole > limit:
            packed, tokens = [*packed, []], 0
        for number, (j, length) in enumerate(rows):
            if number and tokens + length > limit:
                packed, tokens = [*packed, []], 0
            tokens += length + prompt * (not packed[-1] or number == 0)
            packed[-1].append((i, j))
    packed = [piece for piece in packed if piece]
    most = max(world.gather_objects(len(packed))) if world else 0
    while len(packed) < most:
        largest = max(packed, key=len)
        at = packed.index(largest)
        packed[at : at + 1] = [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return packed


def largest_piece(
    prompts: int, prompt: int, completions: list[int], most_tokens: int | None
) -> tuple[int, int]:
    """Count prompts of these lengths in the largest piece, and completions of each."""
    piece = max(pieces([(prompt, completions)] * prompts, prompts, most_tokens), key=len)
    some = len({i for i, _ in piece})
    return some, math.ceil(len(piece) / some)


def in_pieces(
    sample: Callable, prompts: Sequence, num_generations: int, keys: Sequence[str], sampling, world
) -> list[list]:
    """Call sample(prompts, num_generations, keys) for as many prompts at a time as fit, or one."""
    completions: list = [None] * len(prompts)
    new = num_generations * sampling.max_new_tokens
    lengths = [(len(prompt.input_ids), [new]) for prompt in prompts]
    for piece in pieces(lengths, len(prompts), sampling.max_tokens_at_once, world):
        chosen = [i for i, _ in piece]
        drawn = sample([prompts[i] for i in chosen], num_generations, [keys[i] for i in chosen])
        for i, group in zip(chosen, drawn, strict=True):
            completions[i] = group
    return completions
