"""Completions -> numbers. A reward is a function of text with TRL's signature:

    def brevity(completions, **columns):    # all completions, and every column of their rows
        return [1.0 if len(c) < 100 else 0.0 for c in completions]

None for a completion says "cannot judge": it counts neither in the group's mean nor in any
advantage. A recipe names a reward of the table below, or one of your own by where it is:
rewards: {accuracy: 1.0, "my_rewards.py:brevity": 0.2}, or "package.module:function".
"""

import functools
import importlib
import inspect
import re
import runpy

import torch
from torch import Tensor

SHELF = "minivlmrl.reward_functions."
REWARDS = {
    "format": "minivlmrl.rewards:format",
    "accuracy": "minivlmrl.rewards:accuracy",
    "reward_model": SHELF + "reward_model_scores:reward_model",
    **{name: f"{SHELF}box_rewards:{name}" for name in ("iou", "acc_0_5", "giou", "box_format")},
}
# what rewards are given besides the columns of their rows
GIVEN = {"prompts", "completions", "completion_ids"}
GIVEN |= {"image_sizes", "answer_extents", "reward_model_scores"}

THINK_ANSWER = re.compile(r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format(completions: list[str], **columns) -> list[float]:
    """1.0 for exactly <think>...</think><answer>...</answer>: each tag once, both filled."""

    def fits(completion: str) -> bool:
        match = THINK_ANSWER.fullmatch(completion.strip())
        once = all(completion.count(tag) == 1 for tag in TAGS)
        return bool(match and once and match[1].strip() and match[2].strip())

    return [float(fits(completion)) for completion in completions]


def accuracy(completions: list[str], solution: list, **columns) -> list[float | None]:
    """1.0 if the last answer is the solution, but for case, spacing and a final full stop."""

    def judged(completion: str, truth: str | float | None) -> float | None:
        if truth is None or not normalize(str(truth)):
            return None
        answers = ANSWER.findall(completion)
        return float(bool(answers) and normalize(answers[-1]) == normalize(str(truth)))

    return [judged(c, s) for c, s in zip(completions, solution, strict=True)]


def normalize(text: str) -> str:
    """'<answer> Green  square.</answer>' -> 'green square'."""
    inside = ANSWER.findall(text)
    return " ".join((inside[-1] if inside else text).split()).rstrip(". ").casefold()


def judge(rewards, rows, prompts, completions, processor, reward_model=None) -> Tensor:
    """Ask the rewards about G completions of each of B rows: (B * G, K), groups in order."""
    texts = [processor.decode(c.ids) for group in completions for c in group]
    columns = reward_columns(rows, prompts, completions, processor)
    if reward_model is not None:
        columns["reward_model_scores"] = reward_model(prompts, completions)
    return score(list(rewards), texts, columns)


def reward_columns(rows, prompts, completions, processor) -> dict[str, list]:
    """What rewards are given: every column of B rows, each value once per completion, and GIVEN."""
    from minivlmrl.reward_functions.box_rewards import box_columns

    G = len(completions[0])
    names = sorted(set().union(*(row.columns for row in rows)))
    columns = {name: [row.columns.get(name) for row in rows for _ in range(G)] for name in names}
    columns["prompts"] = [row.messages for row in rows for _ in range(G)]
    columns["completion_ids"] = [c.ids.tolist() for group in completions for c in group]
    return columns | box_columns(rows, prompts, processor, G)


def score(names: list[str], completions: list[str], columns: dict[str, list]) -> Tensor:
    """Ask K rewards about n texts: (n, K) float32, NaN where one answers None."""
    rewards = torch.empty(len(completions), len(names))
    for k, name in enumerate(names):
        missing = [column for column in required_columns([name]) if column not in columns]
        if missing:
            found = sorted(set(columns) - GIVEN)
            raise ValueError(f"reward {name} needs column {missing[0]!r}; the rows have {found}")
        values = get_reward(name)(completions=completions, **columns)
        if len(values) != len(completions):
            count = f"{len(values)} values for {len(completions)} completions"
            raise ValueError(f"reward {name} returned {count}")
        rewards[:, k] = torch.tensor([float("nan") if v is None else v for v in values])
    return rewards


def required_columns(names) -> list[str]:
    """Columns that these rewards cannot do without: their named parameters without a default."""
    functions = [inspect.signature(get_reward(name)) for name in names]
    parameters = [p for function in functions for p in function.parameters.values()]
    needed = {p.name for p in parameters if p.kind != p.VAR_KEYWORD and p.default is p.empty}
    return sorted(needed - GIVEN)


def get_reward(name: str):
    """The function of a name in REWARDS, or of "package.module:function" or "file.py:function"."""
    if ":" not in REWARDS.get(name, name):
        raise ValueError(f"unknown reward {name!r}; there are: {', '.join(sorted(REWARDS))}")
    try:
        return load_name(REWARDS.get(name, name))
    except (OSError, ImportError, KeyError, AttributeError) as error:
        raise ValueError(f"reward {name}: there is no such function ({error!r})") from error


@functools.cache
def load_name(target: str):
    """What "package.module:name" or "file.py:name" says."""
    module, _, name = target.rpartition(":")
    if module.endswith(".py"):
        return runpy.run_path(module)[name]
    return getattr(importlib.import_module(module), name)
