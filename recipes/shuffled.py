"""Control experiment: permute rewards in a rollout, so that they carry no information.

    python train.py recipes/shapes.yaml --rewards='{recipes/shuffled.py:shuffled: 1.0}'

If a run still improves, the improvement does not come from the rewards. Each rank permutes the rewards of its own
completions.
"""

import math
import random

from minivlmrl.rewards.registry import get_reward


def shuffled(completions, reward="accuracy", **columns):
    """Compute the reward named `reward`, and permute its values; the permutation depends only on completions."""
    texts = []
    for completion in completions:  # for a conversation, use the text of the last turn
        texts.append(completion if isinstance(completion, str) else completion[-1]["content"])
    rewards = get_reward(reward)(completions=texts, **columns)
    random.Random(repr(columns["completion_ids"])).shuffle(rewards)
    return [None if math.isnan(value) else value for value in rewards]
