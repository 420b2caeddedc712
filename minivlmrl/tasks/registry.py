"""Registry of tasks, which generate their own datasets; recipes/fashion.py is an example."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from minivlmrl.data.rows import Dataset
from minivlmrl.data.tokenizer import Tokenizer
from minivlmrl.errors import error_context, require

# number of rows in a generated dataset, so large that training never repeats a row
FRESH_ROWS = 1_000_000


@dataclass(frozen=True)
class Task:
    """A task with generated datasets, a tokenizer and the accuracy of guessing."""

    # (recipe section `data`, seed) -> training rows by type (keys as in NEEDS in run/datasets.py), and held-out rows,
    # the same for all seeds. Other parameters become task options, such as pairs in "shapes(pairs=8)".
    datasets: Callable[..., tuple[dict[str, Dataset], Dataset]]
    tokenizer: Callable[[], Tokenizer]  # function that trains a small tokenizer on all text in the task
    chance: float  # accuracy of guessing without the image


# {task name: Task or "module:NAME"}; scripts may add tasks
TASKS: dict[str, str | Task] = {"shapes": "minivlmrl.tasks.shapes:TASK"}


def get_task(name: str) -> Task:
    """Return a task by name, such as "shapes" or "shapes(pairs=8)".

    Args:
        name: key in TASKS, file.py:NAME or package.module:NAME, possibly with options.
    Raises:
        UserError: unknown task or option.
    """
    from minivlmrl.config.import_utils import resolve_object, with_options

    task, options = resolve_object("data.task", name, TASKS)
    with error_context(f"data.task {name}"):
        require(isinstance(task, Task), "the object", task, "a Task of minivlmrl.tasks.registry")
        datasets = with_options(task.datasets, options)
    return replace(task, datasets=datasets)
