"""Compute rewards for texts, and read the reasons they log."""

from minivlmrl.rewards.columns import call_rewards
from minivlmrl.rewards.registry import get_reward
from minivlmrl.rewards.text import find_answer


def score_texts(names, completions, columns, where="tags"):
    """Return K rewards for n texts: (n, K), NaN where a reward returned None."""
    answers = [find_answer(text, where) for text in completions]
    return call_rewards(list(map(get_reward, names)), columns | {"completions": completions, "answer_texts": answers})


def logged_reasons(reward, **given):
    logged = {}
    rewards = reward(**given, log_extra=logged.__setitem__)
    assert logged.keys() == {"why"}
    return rewards, logged["why"]
