"""Registry for tasks with generated datasets; recipes/fashion.py is an example."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from minivlmrl.data.rows import Dataset
from minivlmrl.data.tokenizer import Tokenizer
from minivlmrl.errors import error_context, require

# rows per generated dataset, enough for training without repeated rows
FRESH_ROWS = 1_000_000


@dataclass(frozen=True)
class Task:
    """A task: functions to make its datasets and tokenizer, and its chance accuracy."""

    # Function (recipe section `data`, seed, task options such as pairs in "shapes(pairs=8)") that returns training rows
    # by kind, such as {"pairs": rows}, and held-out rows. Held-out rows do not depend on the seed.
    datasets: Callable[..., tuple[dict[str, Dataset], Dataset]]
    tokenizer: Callable[[], Tokenizer]  # trains a small tokenizer on all text in the task
    chance: float  # accuracy when guessing without the image


# {task name: Task or "module:NAME"}; scripts may add tasks
TASKS: dict[str, str | Task] = {"shapes": "minivlmrl.tasks.shapes:TASK"}


def get_task(name: str) -> Task:
    """Return a task by name, such as "shapes" or "shapes(pairs=8)".

    Args:
        name: key in TASKS, file.py:NAME or package.module:NAME, possibly with options.
    """
    from minivlmrl.config.import_utils import resolve_object, with_options

    task, options = resolve_object("data.task", name, TASKS)
    with error_context(f"data.task {name}"):
        require(isinstance(task, Task), "the object", task, "a Task of minivlmrl.tasks.registry")
        datasets = with_options(task.datasets, options)
    return replace(task, datasets=datasets)
