"""Rewards for the format and the correctness of text answers.

A reward is a function with TRL's signature, which returns one number per completion:

    def brevity(completions, **columns):    # all completions, and every column of their rows
        return [1.0 if len(c) < 100 else 0.0 for c in completions]

It may return None for a completion that it cannot score. Such a completion is excluded from the
mean of its group, and its advantage is 0. A recipe gives each reward a weight, for example
{accuracy: 1.0}; rewards/registry.py lists the names.
"""

import re

THINK_ANSWER = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def tag_format(completions: list[str], **columns) -> list[float]:
    """Return 1.0 for completions of the form <think>...</think><answer>...</answer>, else 0.0.

    Each tag must occur exactly once, and neither part may be empty.
    """

    def has_format(completion: str) -> bool:
        once = all(completion.count(tag) == 1 for tag in TAGS)
        match = once and THINK_ANSWER.fullmatch(completion.strip())
        return bool(match and match[1].strip() and match[2].strip())

    return [float(has_format(completion)) for completion in completions]


def accuracy(answer_texts: list[str | None], solution: list, **columns) -> list[float | None]:
    """Return 1.0 for each answer that equals the solution, else 0.0.

    Case, whitespace and a final full stop are ignored. The result is None for a row without a
    solution.
    """
    rewards = []
    for answer, truth in zip(answer_texts, solution, strict=True):
        expected = "" if truth is None else normalize(str(truth))
        if not expected:
            rewards.append(None)
        else:
            rewards.append(float(answer is not None and normalize(answer) == expected))
    return rewards


def find_answer(completion: str, where: str = "tags") -> str | None:
    """Extract the answer from a completion; return None if the completion has no answer.

    Args:
        completion: text of the completion.
        where: "tags" extracts the text inside the last <answer>...</answer>, "whole" extracts all
            text after the last </think>, and "last_line" extracts the last line of that text.
    """
    if where == "tags":
        return last_answer(completion)
    text = completion.rpartition("</think>")[2].strip()
    if not text or "<think>" in text:
        return None
    return text.splitlines()[-1] if where == "last_line" else text


def last_answer(text: str) -> str | None:
    """Return the text inside the last <answer>...</answer>, or None.

    The time is linear in the length of the text, even if the text has many opening tags.
    """
    for closed in reversed(text.split("</answer>")[:-1]):
        _, tag, answer = closed.partition("<answer>")
        if tag:
            return answer
    return None


def normalize(text: str) -> str:
    """Normalise an answer for comparison: '<answer> Green  square.</answer>' -> 'green square'.

    Tags, repeated whitespace and final full stops are removed, and letters become lower case.
    """
    answer = last_answer(text)
    words = (text if answer is None else answer).split()
    return " ".join(words).rstrip(". ").casefold()
