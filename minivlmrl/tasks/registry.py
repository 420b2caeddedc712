"""The tasks, which need no downloads: rows, tokenizer and chance. recipes/dots.py is one to copy."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from minivlmrl.config.parsing import check_field, error_context
from minivlmrl.data.rows import Dataset
from minivlmrl.data.tokenizer import Tokenizer

FRESH_ROWS = 1_000_000  # a task draws rows on demand: a run does not meet one twice


@dataclass(frozen=True)
class Task:
    """What a run asks of a task."""

    # (section `data`, seed) -> (what an algorithm needs -> its rows, held-out rows of any seed);
    # further parameters are options: shapes(pairs=8)
    datasets: Callable[..., tuple[dict[str, Dataset], Dataset]]
    tokenizer: Callable[[], Tokenizer]  # a tiny one, trained on everything that the task says
    chance: Callable[[Dataset], float]  # held-out rows -> what blind guessing earns there
    chance_name: str  # how tables call that


# name: task, or module:name of one; a script may add its own
TASKS: dict[str, str | Task] = {"shapes": "minivlmrl.tasks.shapes:TASK"}


def get_task(name: str) -> Task:
    """Find a task: of the table, file.py:NAME, package.module:NAME; with options, shapes(pairs=8).

    Raises:
        ValueError: there is none, or it has no such option.
    """
    # here, because minimal.py finds no task by its name
    from minivlmrl.config.import_utils import resolve_object, with_options

    task, options = resolve_object("data.task", name, TASKS)
    with error_context(f"data.task {name}"):
        check_field(isinstance(task, Task), "it", task, "a Task of minivlmrl.tasks.registry")
        return replace(task, datasets=with_options(task.datasets, options))
