"""The table of embedded tasks: what a run asks of each."""

import pytest

from minivlmrl.hub.tokenizer import Tokenizer
from minivlmrl.run.config import DataSection
from minivlmrl.tasks import localisation
from minivlmrl.tasks.table import TASKS, get_task


@pytest.mark.parametrize("name", TASKS)
def test_each_embedded_task_has_rows_and_a_tokenizer(name):
    task = get_task(name)
    training, held_out = task.datasets(DataSection(task=name, eval_rows=3), seed=0)
    assert {"demonstrations", "prompts"} <= set(training)
    assert len(held_out) == 3 and held_out[0].images
    assert isinstance(task.tokenizer(), Tokenizer)


def test_chance_is_that_of_an_embedded_task():
    """A random label's accuracy, or the best constant box's mean IoU over the held-out rows."""
    assert get_task("shapes").chance(None) == 1 / 12
    few, more = (localisation.Localisation(size, "test") for size in (1, 30))
    assert get_task("localisation").chance(few) == 1.0  # the box itself
    assert get_task("localisation").chance(more) == localisation.constant_box(more)[1]
    assert [get_task(name).chance_name for name in TASKS] == ["chance", "constant box"]


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match=r"data\.task is 'counting'; embedded tasks are shapes, localisation"):
        get_task("counting")
