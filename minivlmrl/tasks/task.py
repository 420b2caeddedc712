"""The tasks, which need no downloads: rows, tokenizer and chance. docs/data.md adds one."""

from collections.abc import Callable
from dataclasses import dataclass

from minivlmrl.hub.checker import naming
from minivlmrl.hub.load import load_name
from minivlmrl.hub.tokenizer import Tokenizer
from minivlmrl.rows import Dataset

FRESH_ROWS = 1_000_000  # a task draws rows on demand: a run does not meet one twice


@dataclass(frozen=True)
class Task:
    """What a run asks of a task."""

    # (section `data`, seed) -> (what an algorithm needs -> its rows, held-out rows of any seed)
    datasets: Callable[[object, int], tuple[dict[str, Dataset], Dataset]]
    tokenizer: Callable[[], Tokenizer]  # a tiny one, trained on everything that the task says
    chance: Callable[[Dataset], float]  # held-out rows -> what blind guessing earns there
    chance_name: str  # how tables call that


# name: task, or module:name of one; a script may add its own
TASKS: dict[str, str | Task] = {"shapes": "minivlmrl.tasks.shapes:TASK"}


def get_task(name: str) -> Task:
    """Find a task of the table, "file.py:name" or "package.module:name" (ValueError: none)."""
    task = TASKS.get(name, name)
    if isinstance(task, str):
        if ":" not in task:
            raise ValueError(f"data.task is {name!r}, not {', '.join(TASKS)} or file.py:TASK")
        with naming("data.task"):
            task = load_name(task)
    if not isinstance(task, Task):
        raise ValueError(f"data.task {name}: {task!r:.60} is no Task of minivlmrl.tasks.task")
    return task
