"""Completions -> numbers. A reward is a function of text with TRL's signature:

    def brevity(completions, **columns):    # all completions, and every column of their rows
        return [1.0 if len(c) < 100 else 0.0 for c in completions]

None for a completion says "cannot judge": it counts neither in the group's mean nor in any
advantage. The names that a recipe gives weights, {accuracy: 1.0}, are in reward_functions/names.py.
"""

import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minivlmrl.rows import Completion, Processor, Row

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

    def judged(answer: str | None, truth: str | float | None) -> float | None:
        if truth is None or not normalize(str(truth)):
            return None
        return float(answer is not None and normalize(answer) == normalize(str(truth)))

    return [judged(a, s) for a, s in zip(answer_texts, solution, strict=True)]


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
    answer, end = None, 0
    while (start := text.find("<answer>", end)) >= 0:
        if (end := text.find("</answer>", start)) < 0:
            break
        answer = text[start + len("<answer>") : end]
    return answer


def normalize(text: str) -> str:
    """'<answer> Green  square.</answer>' -> 'green square'."""
    inside = last_answer(text)
    return " ".join((text if inside is None else inside).split()).rstrip(". ").casefold()


def reward_columns(
    rows: Sequence[Row], completions: Sequence[Sequence[Completion]], processor: Processor
) -> dict[str, list]:
    """Collect the columns of rewards, n = B * G values each, None where a row lacks one.

    `completions` are the assistant's turns, see Processor.turn, `answer_texts` what they answer.
    """
    names = sorted(set().union(*(row.columns for row in rows)))
    rows = [row for row, group in zip(rows, completions, strict=True) for _ in group]  # n
    completions = [completion for group in completions for completion in group]
    texts = [processor.turn(completion) for completion in completions]
    return {name: [row.columns.get(name) for row in rows] for name in names} | {
        "prompts": [row.messages for row in rows],
        "images": [row.images for row in rows],
        "row_names": [row.where or f"row {row.index}" for row in rows],
        "completion_ids": [completion.ids.tolist() for completion in completions],
        "completions": texts,
        "answer_texts": [find_answer(text, processor.answer) for text in texts],
    }


def ask_rewards(rewards: Sequence[Callable], columns: dict[str, list]) -> Tensor:
    """Ask K rewards about n completions: (n, K) float32, NaN where one answers None."""
    values = [[math.nan if v is None else v for v in reward(**columns)] for reward in rewards]
    shape = len(rewards), len(columns["completions"])
    return torch.tensor(values, dtype=torch.float32).view(shape).T
