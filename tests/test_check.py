"""`check`: planted faults are named before any training, and recipes that learn have none."""

import json
from pathlib import Path

import pytest

from minivlmrl.tools import check

RECIPES = Path(__file__).parents[1] / "recipes"
EMBEDDED = [path.stem for path in sorted(RECIPES.glob("*.yaml")) if "task: " in path.read_text()]


@pytest.mark.parametrize("recipe", EMBEDDED)
def test_recipes_that_learn_have_no_fault(recipe, capsys):
    overrides = ["--num_threads=1", "--data.demonstrations=32", "--data.pairs=16", "--reward_model.path=null"]
    assert check.main([str(RECIPES / f"{recipe}.yaml"), *overrides]) == 0, capsys.readouterr().out
    assert "nothing found" in capsys.readouterr().out


FAULTS = {  # overrides, rows that are changed, the sentence
    "cold": (["--sampling.temperature=0.01"], {}, "sampling.temperature is 0.01"),
    "rate": (["--grpo.learning_rate=1e6"], {}, "grpo.learning_rate is 1e+06: over 0.0001"),
    "cut": (["--sampling.max_new_tokens=1", "--sampling.stop_token_ids=[1]"], {}, "100% of 24 completions are cut"),
    "alike": (["--rewards={accuracy: 1}"], {}, "groups earn the same for all 3 completions"),
    "unparsed": (["--rewards={accuracy: 1}"], {}, "have no answer where data.answer (tags) looks"),
    "no picture": ([], {"image": None}, "no row has an image or video"),
    "form is not asked for": (["--rewards={format: 1, accuracy: 1}"], {}, "no prompt does; say it in data."),
    "one answer": ([], {"solution": "cat"}, "always writing '<think>hm</think><answer>cat</answer>' earns 1.00"),
    "labels do not fit": (["--stages=[sft, grpo]"], {"completion": "<think>hm</think><answer>dog</answer>"},
                          "demonstrations earn 0.00 of reward accuracy"),
    "one says 1": (["--rewards={one.py:one: 1}"], {}, "reward one.py:one says 1 of every text that was tried"),
    "a text is liked": (["--rewards={one.py:words: 1}"], {}, "reward one.py:words gives 1.00 to the same word again"),
    "blind": (["--rewards={one.py:length: 1}"], {}, "with grey pictures the completions earn"),
}  # fmt: skip
OWN_REWARDS = """
def one(completions, **columns):
    return [1.0] * len(completions)

def words(completions, solution, **columns):
    return [float(len(c.split()) > 50) for c in completions]

def length(completions, **columns):
    return [float(len(c)) for c in completions]
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault, home, own, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.py").write_text(OWN_REWARDS)
    overrides, change, sentence = FAULTS[fault]
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines = [line | {"image": str(rows.parent / line["image"])} | change for line in lines]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = [*own, "--data.train_file=rows.jsonl", "--stages=[grpo]", *overrides]
    assert check.main([str(home / "recipe.yaml"), *arguments]) == 1
    assert sentence in capsys.readouterr().out


def test_help_says_what_it_does(capsys):
    assert check.main([]) == 0 and "Before any training" in capsys.readouterr().out
