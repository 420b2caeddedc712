"""Control experiment: permute the rewards in a rollout randomly, so they carry no information.

    python train.py recipes/shapes.yaml --rewards='{recipes/shuffled.py:shuffled: 1.0}'

If a run improves with permuted rewards, the improvement does not come from the rewards. With several ranks, each rank
permutes the rewards of its own completions.
"""

import math
import random

from minivlmrl.rewards.registry import get_reward


def shuffled(completions, reward="accuracy", **columns):
    """Compute the reward named `reward` and permute it; all rewards get the same permutation."""
    texts = []
    for completion in completions:  # conversations: text in the last turn
        texts.append(completion if isinstance(completion, str) else completion[-1]["content"])
    rewards = get_reward(reward)(completions=texts, **columns)
    random.Random(repr(columns["completion_ids"])).shuffle(rewards)
    return [None if math.isnan(value) else value for value in rewards]
