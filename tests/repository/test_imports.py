"""Test that no two files of the package import each other, and that importing the package changes nothing outside."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.links import ROOT


def modules(root: Path) -> dict[str, Path]:
    """Return the files of the package by the names of their modules."""
    files = {}
    for path in [*(root / "minivlmrl").rglob("*.py"), *(root / "kernels").glob("*.py")]:
        parts = path.relative_to(root).with_suffix("").parts
        parts = ("minivlmrl", *parts) if parts[0] == "kernels" else parts
        files[".".join(parts).removesuffix(".__init__")] = path
    return files


def imported_modules(path: Path, known: Iterable[str]) -> set[str]:
    """Return the known modules that a file imports, even under TYPE_CHECKING and in functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}:{node.lineno}: write the whole name of the module"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside & {*known} or {node.module}  # a module of a package, or a name in a module
    return names & {*known}


def circle(root: Path) -> list[str]:
    """Return the modules of one circle of imports, [a, b, a], or [] if there is none."""
    files = modules(root)
    graph = {name: imported_modules(path, files) for name, path in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_circle_of_imports():
    assert circle(ROOT) == []


@pytest.mark.parametrize("line", ["from minivlmrl.b import x", "import minivlmrl.b", "from minivlmrl import b"])
@pytest.mark.parametrize("place", ["{}\n", "def f():\n    {}\n", "if TYPE_CHECKING:\n    {}\n"])
def test_a_circle_is_found(tmp_path, line, place):
    (tmp_path / "minivlmrl").mkdir()
    (tmp_path / "minivlmrl" / "a.py").write_text(place.format(line))
    (tmp_path / "minivlmrl" / "b.py").write_text("from minivlmrl.c import x\n")
    (tmp_path / "minivlmrl" / "c.py").write_text("")
    assert circle(tmp_path) == []
    (tmp_path / "minivlmrl" / "c.py").write_text("from minivlmrl.a import f\n")
    assert sorted(circle(tmp_path)[1:]) == ["minivlmrl.a", "minivlmrl.b", "minivlmrl.c"]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


CHANGES = """
import ctypes, importlib, os, warnings
# libraries of others may change the environment and the filters, so they are imported first
import huggingface_hub, numpy, PIL.Image, safetensors.torch, tokenizers, torch, torch.distributed.fsdp
import torch.distributed.elastic.multiprocessing.errors

def fail(*_):
    raise AssertionError("a library of C is loaded")

ctypes.CDLL = fail
for name in CORE:
    before = dict(os.environ), list(warnings.filters)
    importlib.import_module(name)
    assert before == (dict(os.environ), warnings.filters), name
"""


def test_an_import_changes_no_environment_variable_and_no_warning_filter():
    core = [name for name in modules(ROOT) if not name.startswith(("minivlmrl.extras.", "minivlmrl.__main__"))]
    run(f"CORE = {core}\n{CHANGES}")


def test_losses_and_parity_need_few_packages():
    """`pip install --no-deps` is enough for the losses, and parity also needs NumPy, PyYAML and safetensors."""
    blocked = ["PIL", "tokenizers", "huggingface_hub", "jinja2"]
    for names, missing in (("parity", blocked), ("grpo_loss, dpo_loss", [*blocked, "numpy", "yaml", "safetensors"])):
        run(f"import sys\nfor name in {missing}: sys.modules[name] = None\nfrom minivlmrl import {names}")


def test_the_hub_is_imported_only_for_a_repository(tmp_path):
    loaded = run("import json, sys, minivlmrl.run.loop; print(json.dumps(list(sys.modules)))")
    assert "huggingface_hub" not in json.loads(loaded.splitlines()[-1])
