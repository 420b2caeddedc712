"""Task registry: generated data sets with their own tokenizer, which need no downloads.

recipes/fashion.py is an example to copy.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from minivlmrl.data.rows import Dataset
from minivlmrl.data.tokenizer import Tokenizer
from minivlmrl.errors import check_field, error_context

# training rows per task: so many that no run repeats a row, because rows are generated on demand
FRESH_ROWS = 1_000_000


@dataclass(frozen=True)
class Task:
    """A generated data set with a tokenizer and a baseline."""

    # Function of the recipe's section `data` and a seed. The function returns a dict of training rows, whose keys are
    # those of NEEDS in run/datasets.py, and the held-out rows, which are the same for all seeds. Further parameters are
    # task options, as in shapes(pairs=8).
    datasets: Callable[..., tuple[dict[str, Dataset], Dataset]]
    tokenizer: Callable[[], Tokenizer]  # trains a small tokenizer on all task texts
    chance: float  # accuracy of guessing without seeing the image
    chance_name: str  # label for that accuracy in tables


# {name: Task, or a Task's "module:NAME"}; scripts may add entries
TASKS: dict[str, str | Task] = {"shapes": "minivlmrl.tasks.shapes:TASK"}


def get_task(name: str) -> Task:
    """Return the named task, with its options applied.

    Args:
        name: a key in TASKS, file.py:NAME or package.module:NAME; options may follow, as in shapes(pairs=8).
    Raises:
        ValueError: there is no such task, or the task has no such option.
    """
    # imported here, because most callers do not look up tasks by name
    from minivlmrl.config.import_utils import resolve_object, with_options

    task, options = resolve_object("data.task", name, TASKS)
    with error_context(f"data.task {name}"):
        check_field(isinstance(task, Task), "the object", task, "a Task of minivlmrl.tasks.registry")
        datasets = with_options(task.datasets, options)
    return replace(task, datasets=datasets)
