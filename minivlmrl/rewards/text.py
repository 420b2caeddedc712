"""Completions -> numbers. A reward is a function of text with TRL's signature:

    def brevity(completions, **columns):    # all completions, and every column of their rows
        return [1.0 if len(c) < 100 else 0.0 for c in completions]

None for a completion says "cannot judge": it counts neither in the group's mean nor in any
advantage. The names that a recipe gives weights, {accuracy: 1.0}, are in rewards/registry.py.
"""

import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Completion, Row

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


def reward_columns(
    rows: Sequence[Row], completions: Sequence[Sequence[Completion]], processor: Processor
) -> dict[str, list]:
    """Collect the columns of rewards, n = B * G values each, None where a row lacks one.

    `completions` are the assistant's turns, see Processor.turn, `answer_texts` what they answer.
    """
    flat_completions = []
    row_of_each = []
    for row, group in zip(rows, completions, strict=True):
        flat_completions += group
        row_of_each += [row] * len(group)
    columns = {}
    for name in sorted(set().union(*(row.columns for row in rows))):
        columns[name] = [row.columns.get(name) for row in row_of_each]
    texts = [processor.decode_assistant_turn(completion) for completion in flat_completions]
    columns["prompts"] = [row.messages for row in row_of_each]
    columns["images"] = [row.images for row in row_of_each]
    columns["row_names"] = [row.where or f"row {row.index}" for row in row_of_each]
    columns["completion_ids"] = [completion.ids.tolist() for completion in flat_completions]
    columns["completions"] = texts
    columns["answer_texts"] = [find_answer(text, processor.answer) for text in texts]
    return columns


def ask_rewards(rewards: Sequence[Callable], columns: dict[str, list]) -> Tensor:
    """Ask K rewards about n completions: (n, K) float32, NaN where one answers None."""
    values = []
    for reward in rewards:
        answers = reward(**columns)
        values.append([math.nan if answer is None else answer for answer in answers])
    shape = len(rewards), len(columns["completions"])
    return torch.tensor(values, dtype=torch.float32).view(shape).T
