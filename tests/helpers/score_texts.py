"""Compute rewards for texts."""

from minivlmrl.rewards.columns import call_rewards
from minivlmrl.rewards.registry import get_reward
from minivlmrl.rewards.text import find_answer


def score_texts(names, completions, columns, where="tags"):
    """Compute K rewards of n texts, given the columns of their rows.

    Returns:
        (n, K), with NaN where a reward returned None.
    """
    answers = [find_answer(text, where) for text in completions]
    return call_rewards(list(map(get_reward, names)), columns | {"completions": completions, "answer_texts": answers})
