"""Control experiment: permute the rewards in a rollout, so that they carry no information.

    python train.py recipes/shapes.yaml --rewards='{recipes/shuffled.py:shuffled: 1.0}'

If a run improves with permuted rewards, the improvement does not come from the rewards. Ranks permute the rewards of
their own completions.
"""

import math
import random

from minivlmrl.rewards.registry import get_reward


def shuffled(completions, reward="accuracy", **columns):
    """Compute and permute the reward named `reward`; all rewards get the same permutation."""
    texts = []
    for completion in completions:  # in conversations, the text in the last turn
        texts.append(completion if isinstance(completion, str) else completion[-1]["content"])
    rewards = get_reward(reward)(completions=texts, **columns)
    random.Random(repr(columns["completion_ids"])).shuffle(rewards)
    return [None if math.isnan(value) else value for value in rewards]
