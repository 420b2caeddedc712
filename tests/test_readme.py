"""The README is a promise: its files exist, its commands are the ones CI runs, its picture is the run's."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_linked_files_exist(target):
    if target.startswith("#"):
        assert target[1:] in [
            line.lstrip("# ").lower().replace(" ", "-") for line in README.splitlines() if line[:1] == "#"
        ]
    else:
        assert (ROOT / target).is_file()


def test_the_first_command_comes_soon():
    assert README.splitlines().index("```bash") <= 25


def test_every_file_of_the_library_is_in_the_reading_order():
    files = [*ROOT.glob("minivlmrl/**/*.py"), *ROOT.glob("kernels/*.py"), ROOT / "train.py"]
    for file in files:
        rows = README.count(f"| [{file.relative_to(ROOT)}](")
        assert file.name == "__init__.py" or rows == 1, f"{file}: {rows} rows"


def test_two_commands_set_everything_up():
    run, tests, *_ = COMMANDS
    assert run.endswith("pip install -c constraints.txt -e '.[report]' && torchrun train.py")
    assert tests.endswith("pip install -c constraints.txt -e '.[test]' && pytest")


def test_ci_runs_the_readmes_test_command():
    script = (ROOT / ".ci" / "run").read_text()
    assert "-c constraints.txt -e '.[test]'" in script and script.rstrip().endswith("pytest")


def test_recipes_and_scripts_of_the_commands_exist():
    named = re.findall(r"(?:recipes|benchmarks)/\w+\.\w+|\btrain\.py", README)
    assert {"train.py", "benchmarks/learning.py", "benchmarks/grpo_step.py", "benchmarks/group_forward.py"} <= set(
        named
    )
    assert all((ROOT / name).is_file() for name in named)


def test_figures_of_the_text_are_the_recipes():
    """0.74 million weights, 96 demonstrations of which half are wrong, 256 held-out pictures."""
    from minivlmrl.hub.checkpoint import random_model
    from minivlmrl.tasks import shapes

    recipe = yaml.safe_load((ROOT / "recipes" / "shapes.yaml").read_text())
    model, _ = random_model(ROOT / "recipes" / "shapes_model.json", shapes.tokenizer(), seed=0)
    assert f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million" in README
    assert f"{recipe['data']['demonstrations']}\ndemonstrations" in README
    assert recipe["data"]["wrong_demonstrations"] == 0.5
    assert f"{recipe['data']['eval_rows']} pictures" in README


def test_constraints_hold_the_versions_that_the_text_names():
    constraints = (ROOT / "constraints.txt").read_text()
    assert "transformers==5.23.0" in constraints and "transformers 5.23" in README
    assert "trl==1.16.0" in constraints and "TRL 1.16" in README
    assert "torch==2.13.0" in constraints


def test_the_examples_of_how_to_add_are_the_real_ones():
    losses = (ROOT / "minivlmrl/algorithms/preference_losses.py").read_text()
    [hinge] = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "def hinge" in b]
    assert hinge in losses
    sft = (ROOT / "minivlmrl/algorithms/sft.py").read_text()
    assert f"has {len(sft.splitlines())} lines" in README
    [example] = [b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class SFT(Algorithm)" in b]
    for line in (
        "class SFT(Algorithm):",
        'stage, needs = "sft", "demonstrations"',
        "def batches(self)",
        "def loss(self, batch",
    ):
        assert line in sft and line in example


def test_every_algorithm_and_its_options_are_named():
    from minivlmrl.losses import LOSS_TYPES
    from minivlmrl.train import ALGORITHMS

    assert all(f"`{name}`" in README for name in ALGORITHMS)
    plain = README.lower().replace(". ", "_").replace(" ", "")
    assert all(loss_type in plain for loss_type in LOSS_TYPES)


def test_every_run_of_the_learning_table_is_shown():
    plan = re.findall(r'(?:grpo|Entry)\(\s*"([^"]+)"', (ROOT / "benchmarks/learning.py").read_text())
    rows = [line.split("|")[1].strip() for line in README.splitlines() if line.startswith("| ")]
    assert len(plan) == 16 and set(plan) <= set(rows)
