"""Rewards to copy: for length and repetition, counted in tokens.

In a recipe, from the folder where the command runs:
    rewards: {accuracy: 1.0, recipes/lengths.py:cosine(max_length=256): 0.5}
Source: arXiv 2502.03373, appendix C, and TRL's rewards.
"""

import math

from minivlmrl.rewards.registry import get_reward


def cosine(
    completions: list,
    completion_ids: list,
    max_length=1024,
    reward="accuracy",
    right=(1, 0.5),
    wrong=(-1, -0.5),
    **columns,
) -> list[float]:
    """Scale another reward by length: short answers gain if they are right, and lose if wrong.

    Args:
        max_length: tokens at which the scale ends.
        reward: the reward that says what is right: all that it gives more than 0 for.
        right, wrong: values at length 0 and at max_length; a half cosine lies between them.
    """
    rewards = get_reward(reward)(completions, completion_ids=completion_ids, **columns)
    values = []
    for earned, ids in zip(rewards, completion_ids, strict=True):
        first, last = right if earned > 0 else wrong
        share = (1 + math.cos(math.pi * min(len(ids) / max_length, 1.0))) / 2
        values.append(None if math.isnan(earned) else last + (first - last) * share)
    return values


def repetition(completion_ids: list, ngram_size: int = 3, max_penalty: float = -1.0, **columns) -> list[float]:
    """max_penalty times the share of n-grams of tokens that are repetitions.

    Example: 5 5 5 5 5 has four pairs, three of them repetitions: -0.75 with ngram_size=2.
    """
    values = []
    for ids in completion_ids:
        starts = range(len(ids) - ngram_size + 1)
        ngrams = [tuple(ids[start : start + ngram_size]) for start in starts]
        if ngrams:
            values.append(max_penalty * (1 - len(set(ngrams)) / len(ngrams)))
        else:
            values.append(0.0)
    return values
