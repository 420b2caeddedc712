"""`check`: recipes that learn have no fault; tests/test_planted_faults.py plants them."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from minivlmrl.run.config import RunConfig, load_config
from minivlmrl.tools import check

RECIPES = Path(__file__).parents[1] / "recipes"
EMBEDDED = [path.stem for path in sorted(RECIPES.glob("*.yaml")) if "task: " in path.read_text()]


@pytest.mark.parametrize("recipe", EMBEDDED)
def test_recipes_that_learn_have_no_fault(recipe, capsys):
    overrides = ["--num_threads=1", "--reward_model.path=null"]
    assert check.main([str(RECIPES / f"{recipe}.yaml"), *overrides]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "nothing found" in out and "output:" not in out
    asked = {"grpo", "ppo"} & set(load_config(RECIPES / f"{recipe}.yaml").stages)
    assert ("no completions were drawn" in out) == bool(asked)


def test_boxes_in_a_notation_that_no_reward_reads_are_named():
    config = RunConfig(rewards={"format": 1.0, "box_format": 0.5, "iou": 1.0})
    processor = SimpleNamespace(answer="tags")
    texts = [f"<answer>{said}</answer>" for said in ("1 2 3 4", "[]", '{"point_2d": [1, 2]}', "{'bbox': [1, 2, 3, 4]}")]
    [sentence] = check.unread_boxes(config, texts, processor)
    assert sentence.startswith(
        "1 of 4 answers, such as '{\"point_2d\": [1, 2]}', hold nothing that box_format reads; ask"
    )
    [sentence] = check.unread_boxes(RunConfig(rewards={"point(within=0.1)": 1.0}), texts, processor)
    assert sentence.startswith("2 of 4 answers, such as '1 2 3 4', hold nothing that point(within=0.1) reads; ask")
    assert '{"point_2d": [x, y]}' in sentence
    assert not list(check.unread_boxes(config, [*texts, "1 2 3 4", "no answer"], processor))
    assert not list(check.unread_boxes(RunConfig(rewards={"accuracy": 1.0}), texts, processor))
