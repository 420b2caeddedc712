"""Check minimal.py and minimal_dpo.py: the weights equal train.py's weights bit for bit, and no trainer is imported."""

import ast
import json
import os
import re
import runpy
import subprocess
import sys

import pytest
import torch
from links import ROOT
from pretend_cuda import PretendCuda
from safetensors.torch import load_file

from minivlmrl.commands.train import train_recipe

MODULES = """
import json, sys, minimal, minimal_dpo
print(json.dumps([getattr(module, "__file__", None) for module in sys.modules.values()]))
"""
PAGES = {"minimal.py": "recipes/shapes.yaml", "minimal_dpo.py": "recipes/shapes_dpo.yaml"}


def assert_equal(one, other):
    assert one.keys() == other.keys() and len(one) == 69
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(
    ("page", "algorithm", "printed"), [("minimal.py", "grpo", "reward"), ("minimal_dpo.py", "dpo", "margin")]
)
def test_a_few_steps_end_with_the_weights_of_train(page, algorithm, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    model, _ = runpy.run_path(page)["main"](3, 2, 2)  # seed, SFT steps, GRPO or DPO steps
    assert capsys.readouterr().out.count(printed) == 2  # the first step and the last
    options = ["--seed=3", "--sft.max_steps=2", f"--{algorithm}.max_steps=2", "--data.eval_rows=1", "--num_threads=1"]
    train_recipe([PAGES[page], *options, f"--output_dir={tmp_path}"])
    assert_equal(dict(model.state_dict()), load_file(tmp_path / "checkpoint" / "model.safetensors"))


@pytest.mark.parametrize("page", PAGES)
def test_it_trains_on_a_gpu(page, monkeypatch):
    """On the simulated GPU no operation mixes devices, and the weights equal the CPU run's weights up to rounding."""
    monkeypatch.chdir(ROOT)
    main = runpy.run_path(page)["main"]
    expected = dict(main(3, 1, 1)[0].state_dict())
    with PretendCuda():
        model, _ = main(3, 1, 1, device="cuda")
        for name, weight in model.state_dict().items():
            assert weight.is_cuda
            torch.testing.assert_close(weight.cpu(), expected[name], atol=1e-4, rtol=0)


def lines_of_code(page: str) -> list[str]:
    """Return a file's lines without docstrings, comments and empty lines."""
    tree = ast.parse((ROOT / page).read_text())
    text = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = (ROOT / page).read_text().splitlines()
    return [line for n, line in enumerate(lines, start=1) if n not in text and line.split("#")[0].strip()]


def test_the_readme_quotes_the_page():
    """README shows the GRPO step's statements in order, with `...` for left-out text, and the number of lines."""
    readme = (ROOT / "README.md").read_text()
    assert f"one file of {len(lines_of_code('minimal.py'))} lines of code" in readme
    excerpt = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1].replace(" ", "")
    rest = "".join(lines_of_code("minimal.py")).replace(" ", "").partition("defgrpo(")[2]
    for part in re.split(r"\s|\.{3}", excerpt.strip()):
        _, found, rest = rest.partition(part)
        assert found, part


def test_they_import_no_trainer_no_training_loop_and_nothing_for_several_ranks():
    command = [sys.executable, "-c", MODULES]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [file for file in json.loads(printed) if file and file.startswith((f"{ROOT}/minivlmrl", f"{ROOT}/kernels"))]
    folders = {file.removeprefix(f"{ROOT}/minivlmrl/").partition("/")[0] for file in files}
    assert "losses" in folders
    assert not folders & {"run", "trainers", "distributed", "diagnostics", "commands", "agents"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "arguments", "threads"),
    [
        ("minimal.py", ["train.py"], []),  # both commands are in README
        ("minimal_dpo.py", ["train.py", "recipes/shapes_dpo.yaml"], ["--num_threads=1"]),
    ],
)
def test_the_whole_page_is_the_whole_run(page, arguments, threads, tmp_path):
    weights = []
    for command in ([page], arguments):
        folder = tmp_path / command[0]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, *command, *threads, f"--output_dir={folder}"]
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
        weights.append(load_file(folder / "checkpoint" / "model.safetensors"))
    assert_equal(*weights)
