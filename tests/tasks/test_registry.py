"""Test the registry of tasks, and the interface of each task."""

import pytest

from minivlmrl.config.options import DataOptions
from minivlmrl.data.tokenizer import Tokenizer
from minivlmrl.tasks.registry import TASKS, get_task
from tests.helpers.links import ROOT

ZOOM = f"{ROOT}/recipes/zoom.py"


@pytest.mark.parametrize("name", [*TASKS, f"{ZOOM}:TASK"])
def test_each_task_has_rows_and_a_tokenizer(name):
    task = get_task(name)
    training, held_out = task.datasets(DataOptions(task=name, eval_rows=3), seed=0)
    assert {"demonstrations", "prompts"} <= set(training)
    assert len(held_out) == 3 and held_out[0].images
    assert isinstance(task.tokenizer(), Tokenizer)


def test_options_of_a_task():
    training, _ = get_task("shapes(demonstrations=3, pairs=2)").datasets(DataOptions(), seed=0)
    assert [len(training[needs]) for needs in ("demonstrations", "pairs")] == [3, 2]


def test_what_is_no_task_is_named():
    error = r"^data\.task minivlmrl.tasks.shapes:COLORS: .*, but it must be a Task of "
    with pytest.raises(ValueError, match=error):
        get_task("minivlmrl.tasks.shapes:COLORS")
