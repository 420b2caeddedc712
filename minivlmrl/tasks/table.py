"""The embedded tasks, which need no downloads: rows, tokenizer and chance of each in one object."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from minivlmrl.hub.tokenizer import Tokenizer
from minivlmrl.rows import Dataset

TASKS = ("shapes", "localisation")  # files of this folder, each with its TASK
FRESH_ROWS = 1_000_000  # a task draws rows on demand: a run does not meet one twice


@dataclass(frozen=True)
class Task:
    """What a run asks of a task."""

    # (section `data` of the recipe, seed) -> (what an algorithm needs -> its rows, held-out rows of any seed)
    datasets: Callable[[object, int], tuple[dict[str, Dataset], Dataset]]
    tokenizer: Callable[[], Tokenizer]  # a tiny one, trained on everything that the task says
    chance: Callable[[Dataset], float]  # held-out rows -> what blind guessing earns there
    chance_name: str  # how tables call that


def get_task(name: str) -> Task:
    """Find an embedded task (ValueError: there is none of this name)."""
    if name not in TASKS:
        raise ValueError(f"data.task is {name!r}; embedded tasks are {', '.join(TASKS)}")
    return importlib.import_module(f"minivlmrl.tasks.{name}").TASK
