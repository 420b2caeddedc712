"""A control: what a reward says of a rollout's completions, permuted, so that it carries no information.

    python train.py recipes/shapes.yaml --rewards='{recipes/shuffled.py:shuffled: 1.0}'

A run that learns from it has another source than its rewards. Each of several ranks permutes its own completions.
"""

import math
import random

from minivlmrl.rewards.registry import get_reward


def shuffled(completions, reward="accuracy", **columns):
    """Give each completion what another one earns by the reward `reward`; all rewards are permuted alike."""
    texts = []
    for completion in completions:  # of a conversation, what its last turn says
        texts.append(completion if isinstance(completion, str) else completion[-1]["content"])
    rewards = get_reward(reward)(completions=texts, **columns)
    random.Random(repr(columns["completion_ids"])).shuffle(rewards)
    return [None if math.isnan(value) else value for value in rewards]
