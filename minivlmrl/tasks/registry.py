"""Registry of tasks, which generate their own data; recipes/fashion.py is an example of a user's own task."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from minivlmrl.data.rows import Dataset
from minivlmrl.data.tokenizer import Tokenizer
from minivlmrl.errors import check_field, error_context

# number of training rows per task, so large that no training repeats a row; rows are only generated when they are read
FRESH_ROWS = 1_000_000


@dataclass(frozen=True)
class Task:
    """A task: a function that generates rows, a function that trains a tokenizer, and the accuracy of guessing."""

    # Function of the recipe's section `data` and a seed. The function returns a dict of training rows, whose keys are
    # those of NEEDS in run/datasets.py, and the held-out rows, which are the same for all seeds. Further parameters are
    # task options, as in shapes(pairs=8).
    datasets: Callable[..., tuple[dict[str, Dataset], Dataset]]
    tokenizer: Callable[[], Tokenizer]  # trains a small tokenizer on all task texts
    chance: float  # accuracy of guessing without seeing the image
    chance_name: str  # label for that accuracy in tables


# {name of a task: Task, or "module:NAME" of a Task}; a user's script may add entries
TASKS: dict[str, str | Task] = {"shapes": "minivlmrl.tasks.shapes:TASK"}


def get_task(name: str) -> Task:
    """Return the task of this name, after binding options such as pairs=8 to its function for rows.

    Args:
        name: a key in TASKS, file.py:NAME or package.module:NAME; options may follow, as in shapes(pairs=8).
    Raises:
        ValueError: there is no such task, or the task has no such option.
    """
    # The code that loads tasks by name is imported only when a task is loaded, because most callers do not load one.
    from minivlmrl.config.import_utils import resolve_object, with_options

    task, options = resolve_object("data.task", name, TASKS)
    with error_context(f"data.task {name}"):
        check_field(isinstance(task, Task), "the object", task, "a Task of minivlmrl.tasks.registry")
        datasets = with_options(task.datasets, options)
    return replace(task, datasets=datasets)
