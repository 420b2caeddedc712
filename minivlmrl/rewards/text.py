"""Completions -> numbers. A reward is a function of text with TRL's signature:

    def brevity(completions, **columns):    # all completions, and every column of their rows
        return [1.0 if len(c) < 100 else 0.0 for c in completions]

None for a completion says "cannot judge": it counts neither in the group's mean nor in any
advantage. The names that a recipe gives weights, {accuracy: 1.0}, are in rewards/registry.py.
"""

import re

THINK_ANSWER = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def tag_format(completions: list[str], **columns) -> list[float]:
    """1.0 for exactly <think>...</think><answer>...</answer>: each tag once, both filled."""

    def fits(completion: str) -> bool:
        once = all(completion.count(tag) == 1 for tag in TAGS)
        match = once and THINK_ANSWER.fullmatch(completion.strip())
        return bool(match and match[1].strip() and match[2].strip())

    return [float(fits(completion)) for completion in completions]


def accuracy(answer_texts: list[str | None], solution: list, **columns) -> list[float | None]:
    """1.0 if the answer is the solution, but for case, spacing and a final full stop."""
    rewards = []
    for answer, truth in zip(answer_texts, solution, strict=True):
        expected = "" if truth is None else normalize(str(truth))
        if not expected:
            rewards.append(None)
        else:
            rewards.append(float(answer is not None and normalize(answer) == expected))
    return rewards


def find_answer(completion: str, where: str = "tags") -> str | None:
    """Find what a completion answers; None: nothing.

    "tags": inside the last <answer>...</answer>. For the other modes the answer is what follows
    the last </think>: "whole" is all of it, "last_line" its last line.
    """
    if where == "tags":
        return last_answer(completion)
    text = completion.rpartition("</think>")[2].strip()
    if not text or "<think>" in text:
        return None
    return text.splitlines()[-1] if where == "last_line" else text


def last_answer(text: str) -> str | None:
    """Find what the last <answer>...</answer> says; in one pass, however often a text opens it."""
    for closed in reversed(text.split("</answer>")[:-1]):
        _, tag, answer = closed.partition("<answer>")
        if tag:
            return answer
    return None


def normalize(text: str) -> str:
    """'<answer> Green  square.</answer>' -> 'green square'."""
    answer = last_answer(text)
    words = (text if answer is None else answer).split()
    return " ".join(words).rstrip(". ").casefold()
