"""Check that minimal.py is one file: it imports no file of the repository, and runs where it lies alone."""

import ast
import shutil
import subprocess
import sys

import pytest

import minimal
from tests.helpers.links import ROOT

# Train four rows with minimal.py in a process in which every import of the repository fails.
ALONE = """
import json, runpy, sys

sys.modules |= {"minivlmrl": None, "kernels": None}
names = runpy.run_path("minimal.py")
names["make_folder"]("tiny")
lines = []
for i in range(4):
    row = names["draw_row"]()
    row.pop("images")[0].save(f"{i}.png")
    lines.append(json.dumps(row | {"image": f"{i}.png"}))
open("rows.jsonl", "w").write("\\n".join(lines) + "\\n")
sys.argv = "minimal.py tiny rows.jsonl --sft --max_steps=1 --prompts_per_step=2".split()
runpy.run_path("minimal.py", run_name="__main__")
"""


def test_it_imports_the_standard_library_and_five_libraries():
    text = (ROOT / "minimal.py").read_text()
    modules = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append("." * node.level + (node.module or ""))
    imported = {module.partition(".")[0] for module in modules}
    assert imported - sys.stdlib_module_names == {"torch", "numpy", "PIL", "safetensors", "tokenizers"}
    assert "importlib" not in imported and "__import__" not in text


def test_it_runs_where_it_lies_alone(tmp_path):
    shutil.copy(ROOT / "minimal.py", tmp_path)
    done = subprocess.run([sys.executable, "-I", "-c", ALONE], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\nsaved runs/minimal\n" in done.stdout
    assert (tmp_path / "runs" / "minimal" / "model.safetensors").stat().st_size > 10**6


def test_help_shows_the_page_and_its_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["minimal.py", "--help"])
    with pytest.raises(SystemExit) as exit:
        minimal.main()
    printed = capsys.readouterr().out
    assert exit.value.code == 0
    assert minimal.__doc__.strip() in printed and "--max_new_tokens MAX_NEW_TOKENS" in printed
