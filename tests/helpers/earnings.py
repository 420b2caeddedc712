"""What named rewards say of texts."""

from minivlmrl.rewards.columns import call_rewards
from minivlmrl.rewards.registry import get_reward
from minivlmrl.rewards.text import find_answer


def earnings(names, completions, columns, where="tags"):
    """(n, K) of K rewards about n texts, NaN where one answers None; columns: those of the rows."""
    answers = [find_answer(text, where) for text in completions]
    return call_rewards(list(map(get_reward, names)), columns | {"completions": completions, "answer_texts": answers})
