"""Control experiment: rewards without information, permuted in a rollout.

    python train.py recipes/shapes.yaml --rewards='{recipes/shuffled.py:shuffled: 1.0}'

If a run still improves, the reason is not the rewards. Ranks permute the rewards of their own completions.
"""

import math
import random

from minivlmrl.rewards.registry import get_reward


def shuffled(completions, reward="accuracy", **columns):
    """Compute the reward named `reward`, and permute its values, depending only on completions."""
    texts = []
    for completion in completions:  # for a conversation, use the text of the last turn
        texts.append(completion if isinstance(completion, str) else completion[-1]["content"])
    rewards = get_reward(reward)(completions=texts, **columns)
    random.Random(repr(columns["completion_ids"])).shuffle(rewards)
    return [None if math.isnan(value) else value for value in rewards]
