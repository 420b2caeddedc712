"""Check that every bug in the mutation study changes a tiny training run's metrics."""

import json
from functools import cache

import mutation_study
import pytest
import yaml

from minivlmrl.commands.train import train_recipe
from tests.helpers import tiny

STAGE = {"max_steps": 3, "prompts_per_step": 4, "micro_batch_size": 4, "learning_rate": 1e-2}
QUICK = ("gradient_of_zero", "labels_shifted_twice")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that trains a tiny model with sft and grpo, and returns the metrics.

    Evaluating and saving the model are disabled, because the metrics do not depend on them.
    """

    def metrics(*options):
        folder = tmp_path_factory.mktemp("run")
        (folder / "model.json").write_text(json.dumps(tiny.RUN_MODEL))
        data = {"eval_rows": 1, "task": "shapes(demonstrations=16)"}
        rewards = {"test_mutation_study:letters": 1.0}
        recipe = tiny.recipe(STAGE, stages=["sft", "grpo"], data=data, output_dir=str(folder / "out"), rewards=rewards)
        recipe["optimizer"] = {"max_grad_norm": 0.1}
        recipe["model"]["config"] = str(folder / "model.json")
        recipe["grpo"] |= {"beta": 0.1, "loss_type": "grpo"}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        train_recipe([str(folder / "recipe.yaml"), *(text.replace("size=4", "size=1") for text in options)])
        lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
        return [{n: x for n, x in json.loads(line).items() if "second" not in n and n != "time"} for line in lines]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minivlmrl.run.results.evaluate", lambda *_: {})
        patch.setattr("minivlmrl.trainers.base.gather_and_save_model", lambda *_: None)
        patch.setattr("minivlmrl.run.results.gather_and_save_model", lambda *_: None)
        yield cache(metrics)


def letters(completions, solution, **_):
    return [
        len(set(text)) / 3 + text.count("e") + len(truth) * text.count("a")
        for text, truth in zip(completions, solution, strict=True)
    ]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in mutation_study.BUGS
])  # fmt: skip
def test_a_bug_changes_the_metrics(name, run, monkeypatch):
    bug = mutation_study.BUGS[name]
    options = *bug.options, mutation_study.OPEN
    healthy = run(*options)
    bug.ours(monkeypatch.setattr)
    assert run.__wrapped__(*options) != healthy
    assert bug.source.startswith("https://")


def test_a_run_gets_its_seed_and_options(monkeypatch):
    """--seed is an option for train, and is not parsed as an abbreviated --seeds."""
    given = []
    monkeypatch.setattr(mutation_study, "train_recipe", given.extend)
    monkeypatch.setattr(mutation_study, "setattr", monkeypatch.setattr, raising=False)
    mutation_study.main(["--bug", "old_ignored", "--seed=3", "--output_dir=x"])
    assert given == ["--grpo.num_iterations=2", mutation_study.OPEN, "--seed=3", "--output_dir=x"]
