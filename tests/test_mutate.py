"""benchmarks/mutate.py: what it changes in a file, and that it tells a tested line from an untested one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutate import mutants

ROOT = Path(__file__).parents[1]
SOURCE = '''"""Docstring of 1 line."""


def between(x: "1 + 1", low=0, least=False) -> "1 < 2":
    """A docstring: not 3."""
    if not low < x or least == 1:
        x += 1
        raise ValueError(f"{x} is no number")
    return -min(x, 2) // 3
'''


def test_the_mutants_of_a_file():
    found = [(line, change.split("    in: ")[0]) for line, change, _ in mutants(SOURCE)]
    condition = "not low < x or least == 1"
    assert {
        (4, "False -> True"), (6, "1 -> 2"), (6, f"if {condition}: -> pass"), (6, "low < x -> low <= x"),
        (6, f"{condition} -> not low < x and least == 1"), (9, "-min(x, 2) // 3 -> -min(x, 2) * 3"), (9, "min -> max"),
    } < set(found)  # fmt: skip


@pytest.mark.slow
def test_tests_that_ask_kill_and_those_that_do_not_leave_survivors(tmp_path):
    """A loop without end counts as killed; the chapter itself stays as it is."""
    for folder in ("minivlmrl", "tests", "benchmarks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.', 'tests']\n")
    (tmp_path / "minivlmrl" / "__init__.py").write_text("")
    half = "def half(x):\n    return x // 2\n\n\ndef spin():\n    while False:\n        pass\n"
    (tmp_path / "minivlmrl" / "half.py").write_text(half)
    test = "from minivlmrl.half import *\n\n\ndef test_half():\n    assert half(1) == 0 and not spin()\n"
    (tmp_path / "tests" / "test_half.py").write_text(test)
    script = shutil.copy(ROOT / "benchmarks" / "mutate.py", tmp_path / "benchmarks")
    result = subprocess.run([sys.executable, script, "half"], capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.splitlines() == [
        "survives: minivlmrl/half.py:2  2 -> 3    in: return x // 2",
        "killed 3 of 4 mutants of minivlmrl/half.py with tests/test_half.py",
    ]
    assert "return x // 2\n" in (tmp_path / "minivlmrl" / "half.py").read_text()
