"""Registry of tasks, which generate their own data; recipes/fashion.py is an example of a user's own task."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from minivlmrl.data.rows import Dataset
from minivlmrl.data.tokenizer import Tokenizer
from minivlmrl.errors import error_context, require

# number of training rows in a generated dataset, so large that no training run repeats a row
FRESH_ROWS = 1_000_000


@dataclass(frozen=True)
class Task:
    """A task: a function that generates rows, a function that trains a tokenizer, and the accuracy of guessing."""

    # The function datasets(data, seed) receives the recipe's section `data` and a seed. It returns the training rows,
    # {key of NEEDS in run/datasets.py: rows}, and the held-out rows, which are the same for all seeds. Additional
    # parameters are options of the task, as in shapes(pairs=8).
    datasets: Callable[..., tuple[dict[str, Dataset], Dataset]]
    tokenizer: Callable[[], Tokenizer]  # trains a small tokenizer on all task texts
    chance: float  # accuracy of guessing without seeing the image


# {name of a task: the Task, or where it is defined, as "module:NAME"}; a script may add tasks
TASKS: dict[str, str | Task] = {"shapes": "minivlmrl.tasks.shapes:TASK"}


def get_task(name: str) -> Task:
    """Return the task that a name such as "shapes" or "shapes(pairs=8)" selects.

    Args:
        name: a key in TASKS, file.py:NAME or package.module:NAME; options may follow, as in shapes(pairs=8).
    Raises:
        ValueError: there is no such task, or the task has no such option.
    """
    from minivlmrl.config.import_utils import resolve_object, with_options

    task, options = resolve_object("data.task", name, TASKS)
    with error_context(f"data.task {name}"):
        require(isinstance(task, Task), "the object", task, "a Task of minivlmrl.tasks.registry")
        datasets = with_options(task.datasets, options)
    return replace(task, datasets=datasets)
