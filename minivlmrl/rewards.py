"""Completions -> numbers. A reward is a function of plain text, registered by name.

    @reward
    def brevity(completions, **columns):            # all completions of a batch, and every column of their rows
        return [1.0 if len(c) < 100 else 0.0 for c in completions]

The signature is TRL's, so a reward function written for TRL's GRPOTrainer (plain text) works here and the other way
round. None for a completion says "cannot judge": it then counts neither in the group's mean nor in any advantage.
"""

import inspect
import re
from collections.abc import Callable

import torch
from torch import Tensor

REWARDS: dict[str, Callable[..., list[float | None]]] = {}

THINK_ANSWER = re.compile(r"<think>(?P<think>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
# what rewards are given besides the columns of their rows; the last one where a reward model is asked
GIVEN = {"prompts", "completions", "completion_ids", "image_sizes", "answer_extents", "reward_model_scores"}
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def reward(function: Callable[..., list[float | None]]):
    """Register a reward under its function's name."""
    REWARDS[function.__name__] = function
    return function


@reward
def format(completions: list[str], **columns) -> list[float]:
    """1.0 for exactly <think>...</think><answer>...</answer>, nothing before or after, each tag once, both filled."""

    def fits(completion: str) -> bool:
        match = THINK_ANSWER.fullmatch(completion.strip())
        once = all(completion.count(tag) == 1 for tag in TAGS)
        return bool(match and once and match["think"].strip() and match["answer"].strip())

    return [float(fits(completion)) for completion in completions]


@reward
def accuracy(completions: list[str], solution: list[str | float | None], **columns) -> list[float | None]:
    """1.0 if the last answer is the solution, after case, spacing and a final full stop are evened out.

    None where the row has no solution. A solution may itself stand between answer tags.
    """

    def judge(completion: str, truth: str | float | None) -> float | None:
        if truth is None or not normalize(str(truth)):
            return None
        answers = ANSWER.findall(completion)
        return float(bool(answers) and normalize(answers[-1]) == normalize(str(truth)))

    return [judge(c, s) for c, s in zip(completions, solution, strict=True)]


@reward
def reward_model(completions: list[str], reward_model_scores: list[float], **columns) -> list[float]:
    """What a trained reward model says: a number without bounds or unit, see the stage reward_model."""
    return reward_model_scores


def soft_overlong_punishment(length: int, max_completion_len: int, soft_punish_cache: int) -> float:
    """0 up to max_completion_len - soft_punish_cache tokens, then falling to -1 at max_completion_len.

    Example: lengths 80, 90, 100 and 120 with 100 and 20: 0, -0.5, -1 and -1.

    Source: DAPO eq. 13 (arXiv 2503.14476); TRL's get_soft_overlong_punishment.
    """
    free = max_completion_len - soft_punish_cache
    if length <= free:
        return 0.0
    return -1.0 if length > max_completion_len else (free - length) / soft_punish_cache


def normalize(text: str) -> str:
    """'<answer> Green  square.</answer>' -> 'green square'."""
    inside = ANSWER.findall(text)
    return " ".join((inside[-1] if inside else text).split()).rstrip(". ").casefold()


def score(names: list[str], completions: list[str], columns: dict[str, list]) -> Tensor:
    """Ask every reward about every completion.

    Args:
        names: of registered rewards, K of them.
        completions: n texts.
        columns: for each column of the data, n values.
    Returns:
        (n, K) float32, NaN where a reward answered None.
    Raises:
        ValueError: an unknown reward, a column it needs is missing, or it returned another number of values.
    """
    rewards = torch.empty(len(completions), len(names))
    for k, name in enumerate(names):
        missing = [column for column in required_columns([name]) if column not in columns]
        if missing:
            raise ValueError(f"reward {name} needs column {missing[0]!r}; the rows have {sorted(columns)}")
        values = get(name)(completions=completions, **columns)
        if len(values) != len(completions):
            raise ValueError(f"reward {name} returned {len(values)} values for {len(completions)} completions")
        rewards[:, k] = torch.tensor([float("nan") if value is None else value for value in values])
    return rewards


def required_columns(names: list[str]) -> list[str]:
    """Columns without which some of these rewards cannot judge: their named parameters that have no default."""
    needed = {
        p.name
        for name in names
        for p in inspect.signature(get(name)).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty
    }
    return sorted(needed - GIVEN)


def get(name: str) -> Callable[..., list[float | None]]:
    if name not in REWARDS:
        raise ValueError(f"unknown reward {name!r}; registered are: {', '.join(sorted(REWARDS))}")
    return REWARDS[name]
