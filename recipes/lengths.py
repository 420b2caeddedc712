"""Reward functions for length and repetition (arXiv 2502.03373, appendix C).

A recipe names a file, relative to the folder in which you run the command, and a function in it:
    rewards: {accuracy: 1.0, recipes/lengths.py:cosine(max_length=256): 0.5}
"""

import math

from minivlmrl.rewards.registry import get_reward


def cosine(
    completions, completion_ids, max_length=1024, reward="accuracy", right=(1, 0.5), wrong=(-1, -0.5), **columns
) -> list[float]:
    """Compute a reward from correctness and completion length.

    Default: shorter completions get a higher reward if correct, a lower one if wrong.

    Args:
        max_length: in tokens; the reward is constant above.
        reward: name of a reward above 0 for correct answers.
        right, wrong: (reward at length 0, reward at max_length) for correct and wrong answers, with half a cosine
            period in between.
    """
    rewards = get_reward(reward)(completions, completion_ids=completion_ids, **columns)
    values = []
    for earned, ids in zip(rewards, completion_ids, strict=True):
        first, last = right if earned > 0 else wrong
        share = (1 + math.cos(math.pi * min(len(ids) / max_length, 1.0))) / 2
        values.append(None if math.isnan(earned) else last + (first - last) * share)
    return values


def repetition(completion_ids: list, ngram_size: int = 3, max_penalty: float = -1.0, **columns) -> list[float]:
    """Compute a repetition penalty: max_penalty times the fraction of repeated token n-grams.

    Example: tokens 5 5 5 5 5 have four 2-grams, three of them repeated, so ngram_size=2 gives -0.75.
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
