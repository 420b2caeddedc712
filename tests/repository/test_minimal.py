"""minimal.py: the weights of the page are those of train.py, bit for bit, and no trainer is imported."""

import ast
import json
import os
import runpy
import subprocess
import sys

import pytest
import torch
from links import ROOT
from safetensors.torch import load_file

from minivlmrl.commands.train import train_recipe

MODULES = (
    "import json, sys, minimal; print(json.dumps([m.__file__ for m in sys.modules.values() if hasattr(m, '__file__')]))"
)


def assert_equal(one, other):
    assert one.keys() == other.keys() and len(one) == 69
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_few_steps_end_with_the_weights_of_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = runpy.run_path("minimal.py")
    model, _ = page["main"](seed=3, sft_steps=2, grpo_steps=3)
    assert capsys.readouterr().out.count("reward") == 2  # the first step and the last
    options = ["--seed=3", "--sft.max_steps=2", "--grpo.max_steps=3", "--data.eval_rows=1", "--num_threads=1"]
    train_recipe([*options, f"--output_dir={tmp_path}"])
    assert_equal(dict(model.state_dict()), load_file(tmp_path / "checkpoint" / "model.safetensors"))


def test_it_fits_a_page_and_imports_no_trainer():
    """150 lines of code, without the docstrings, comments and empty lines; no trainer, rank or loop."""
    tree = ast.parse((ROOT / "minimal.py").read_text())
    text = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = (ROOT / "minimal.py").read_text().splitlines()
    code = [line for n, line in enumerate(lines, start=1) if n not in text and line.split("#")[0].strip()]
    assert len(code) <= 150
    command = [sys.executable, "-c", MODULES]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [file for file in json.loads(printed) if file and file.startswith((f"{ROOT}/minivlmrl", f"{ROOT}/kernels"))]
    folders = {file.removeprefix(f"{ROOT}/minivlmrl/").partition("/")[0] for file in files}
    assert not folders & {"run", "trainers", "distributed", "diagnostics", "commands", "agents"}


@pytest.mark.slow
def test_the_whole_page_is_the_whole_default_run(tmp_path):
    """Both commands as README has them."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for script in ("minimal.py", "train.py"):
        command = [sys.executable, script, f"--output_dir={tmp_path / script}"]
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    one, other = (
        load_file(tmp_path / script / "checkpoint" / "model.safetensors") for script in ("minimal.py", "train.py")
    )
    assert_equal(one, other)
