"""The rewards of a recipe, by name, and what they are given beside the book's columns."""

from collections.abc import Callable, Iterable

from torch import Tensor

from minivlmrl.reward_functions.box_rewards import box_columns
from minivlmrl.reward_functions.calls import call_reward
from minivlmrl.rewards import ask_rewards, reward_columns


def recipe_rewards(weights: dict[str, float]) -> dict[Callable, float]:
    """Make functions of named rewards, which check what they return; each with its weight."""
    return {asker(name): weight for name, weight in weights.items()}


def asker(name: str) -> Callable:
    """Make a reward of a name, with TRL's signature."""

    def ask(completions: list[str], **columns) -> list[float]:
        return call_reward(name, completions, columns)

    return ask


def recipe_columns(rows, prompts, completions, processor) -> dict[str, list]:
    """Collect what the rewards of a recipe are given: see rewards.reward_columns and box_columns."""
    count = len(completions[0])
    columns = reward_columns(rows, completions, processor)
    return columns | box_columns(rows, prompts, processor, count)


def ask_by_name(names: Iterable[str], columns: dict[str, list]) -> Tensor:
    """Ask K rewards by their names: (n, K) float32, NaN where one answers None."""
    return ask_rewards([asker(name) for name in names], columns)
