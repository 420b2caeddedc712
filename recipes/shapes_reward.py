"""Reward for the task `shapes` in TRL, EasyR1 and verl: 0.5 for the format, and 1 for the correct answer.

An answer has the form <think>I see green</think><answer>green square</answer>.
"""

import re

FORMAT = re.compile(r"\s*<think>\s*\S.*</think>\s*<answer>\s*\S.*</answer>\s*", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def scores(text: str, solution: str) -> dict[str, float]:
    """Score one completion; EasyR1 logs all three numbers."""
    answers = [part.partition("<answer>") for part in text.split("</answer>")[:-1]]
    answers = [" ".join(answer.split()).rstrip(". ").casefold() for _, tag, answer in answers if tag]
    accuracy = float(answers[-1:] == [solution])
    form = float(all(text.count(tag) == 1 for tag in TAGS) and FORMAT.fullmatch(text) is not None)
    return {"overall": 0.5 * form + accuracy, "format": form, "accuracy": accuracy}


def trl_reward(completions: list, solution: list[str], **columns) -> list[float]:
    """Compute rewards for `reward_funcs` in TRL's GRPOTrainer; a completion is a list of messages."""
    texts = [messages[-1]["content"] for messages in completions]
    return [scores(text, answer)["overall"] for text, answer in zip(texts, solution, strict=True)]


def easyr1_reward(reward_inputs: list[dict]) -> list[dict[str, float]]:
    """Compute rewards for `worker.reward.reward_function=reward.py:easyr1_reward` in EasyR1."""
    return [scores(row["response"], row["ground_truth"]) for row in reward_inputs]


def verl_reward(data_source: str, solution_str: str, ground_truth: str, extra_info=None) -> float:
    """For verl: `custom_reward_function.path=reward.py` and `custom_reward_function.name=verl_reward`."""
    return scores(solution_str, ground_truth)["overall"]
