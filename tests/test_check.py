"""`check`: recipes that learn have no fault; tests/test_planted_faults.py plants them."""

from pathlib import Path

import pytest

from minivlmrl.run.config import load_config
from minivlmrl.tools import check

RECIPES = Path(__file__).parents[1] / "recipes"
EMBEDDED = [path.stem for path in sorted(RECIPES.glob("*.yaml")) if "task: " in path.read_text()]


@pytest.mark.parametrize("recipe", EMBEDDED)
def test_recipes_that_learn_have_no_fault(recipe, capsys):
    overrides = ["--num_threads=1", "--data.demonstrations=32", "--data.pairs=16", "--reward_model.path=null"]
    assert check.main([str(RECIPES / f"{recipe}.yaml"), *overrides]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "nothing found" in out and "output:" not in out
    asked = {"grpo", "ppo"} & set(load_config(RECIPES / f"{recipe}.yaml").stages)
    assert ("no completions were drawn" in out) == bool(asked)


def test_help_says_what_it_does(capsys):
    assert check.main([]) == 0 and "Before any training" in capsys.readouterr().out
