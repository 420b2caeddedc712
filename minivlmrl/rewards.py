"""Completions -> numbers. A reward is a function of text with TRL's signature:

    def brevity(completions, **columns):    # all completions, and every column of their rows
        return [1.0 if len(c) < 100 else 0.0 for c in completions]

None for a completion says "cannot judge": it counts neither in the group's mean nor in any
advantage. A recipe names rewards with their weights; reward_functions/names.py has the table of
names and finds your own, {accuracy: 1.0, "my_rewards.py:brevity": 0.2}.
"""

import functools
import importlib
import re
import runpy

import torch
from torch import Tensor

# what rewards are given besides the columns of their rows
GIVEN = {"prompts", "images", "row_names", "completions", "completion_ids", "answer_texts"}
GIVEN |= {"image_sizes", "answer_extents", "reward_model_scores"}

THINK_ANSWER = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format(completions: list[str], **columns) -> list[float]:
    """1.0 for exactly <think>...</think><answer>...</answer>: each tag once, both filled."""

    def fits(completion: str) -> bool:
        if not all(completion.count(tag) == 1 for tag in TAGS):
            return False
        match = THINK_ANSWER.fullmatch(completion.strip())
        return bool(match and match[1].strip() and match[2].strip())

    return [float(fits(completion)) for completion in completions]


def accuracy(answer_texts: list[str | None], solution: list, **columns) -> list[float | None]:
    """1.0 if the answer is the solution, but for case, spacing and a final full stop."""

    def judged(said: str | None, truth: str | float | None) -> float | None:
        if truth is None or not normalize(str(truth)):
            return None
        return float(said is not None and normalize(said) == normalize(str(truth)))

    return [judged(a, s) for a, s in zip(answer_texts, solution, strict=True)]


def find_answer(completion: str, where: str = "tags") -> str | None:
    """Find what a completion answers; None: nothing.

    "tags": inside the last <answer>...</answer>. "whole": all of it. "last_line": its last line.
    Without tags what is thought is no answer: it begins after the last </think>.
    """
    if where == "tags":
        return last_answer(completion)
    text = completion.rpartition("</think>")[2].strip()
    if not text or "<think>" in text:
        return None
    return text.splitlines()[-1] if where == "last_line" else text


def last_answer(text: str) -> str | None:
    """Find what the last <answer>...</answer> says; in one pass, however often a text opens it."""
    found, end = None, 0
    while (start := text.find("<answer>", end)) >= 0:
        if (end := text.find("</answer>", start)) < 0:
            break
        found = text[start + len("<answer>") : end]
    return found


def normalize(text: str) -> str:
    """'<answer> Green  square.</answer>' -> 'green square'."""
    inside = last_answer(text)
    return " ".join((text if inside is None else inside).split()).rstrip(". ").casefold()


def judge(rewards, rows, prompts, completions, processor, reward_model=None) -> Tensor:
    """Ask the rewards about G completions of each of B rows: (B * G, K), groups in order."""
    texts = [processor.decode(c.ids) for group in completions for c in group]
    columns = reward_columns(rows, prompts, completions, processor)
    if reward_model is not None:
        columns["reward_model_scores"] = reward_model(prompts, completions)
    return score(list(rewards), texts, columns, processor.answer)


def reward_columns(rows, prompts, completions, processor) -> dict[str, list]:
    """What rewards are given: every column of B rows, each value once per completion, and more."""
    from minivlmrl.reward_functions.box_rewards import box_columns

    G = len(completions[0])
    names = sorted(set().union(*(row.columns for row in rows)))
    columns = {name: [row.columns.get(name) for row in rows for _ in range(G)] for name in names}
    columns["prompts"] = [row.messages for row in rows for _ in range(G)]
    columns["images"] = [row.images for row in rows for _ in range(G)]
    columns["row_names"] = [row.where or f"row {row.index}" for row in rows for _ in range(G)]
    columns["completion_ids"] = [c.ids.tolist() for group in completions for c in group]
    return columns | box_columns(rows, prompts, processor, G)


def score(names: list[str], completions: list[str], columns: dict, where: str = "tags") -> Tensor:
    """Ask K rewards about n texts: (n, K) float32, NaN where one answers None."""
    from minivlmrl.reward_functions.calls import call_reward

    columns = columns | {"answer_texts": [find_answer(text, where) for text in completions]}
    values = [call_reward(name, completions, columns) for name in names]  # K lists of n
    return torch.tensor(values, dtype=torch.float32).view(len(names), len(completions)).T


@functools.cache
def load_name(target: str):
    """What "package.module:name" or "file.py:name" says."""
    module, _, name = target.rpartition(":")
    if module.endswith(".py"):
        return runpy.run_path(module)[name]
    return getattr(importlib.import_module(module), name)
