"""Tests for the root conftest.py: the suite sees no GPU, and `pytest -m gpu` runs each file in a process."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.helpers.links import ROOT

GPU = "@pytest.mark." + "gpu"  # in two parts, so that `pytest -m gpu` does not take this file for one with GPU tests
FILES = {
    # stand-in for torch on a machine with a GPU
    "torch.py": """
import os
class cuda:
    is_available = staticmethod(lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != "-1")
""",
    "pyproject.toml": """
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = "-q -rs -n 2 -m 'not slow'"
markers = ["slow", "gpu"]
""",
    "tests/test_plain.py": """
import os, subprocess, sys, torch
def test_no_gpu_is_visible():
    assert not torch.cuda.is_available()
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"-1\\n"
""",
    "tests/test_one.py": f"""
import os, pytest, torch
def record(line):
    with open("ran", "a") as file:
        file.write(f"{{line}} {{os.getpid()}}\\n")
{GPU}
@pytest.mark.parametrize("device", [0, 1])
def test_one(device):
    assert torch.cuda.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") == os.environ["EXPECTED"]
    record("one")
def test_of_the_suite():
    record("suite")
""",
    "tests/inner/test_two.py": f"""
import os, pytest, torch
{GPU}
def test_two():
    with open("ran", "a") as file:
        file.write(f"two {{os.getpid()}}\\n")
    os._exit(int(os.environ.get("BREAK", 0)))
""",
}


@pytest.fixture
def project(tmp_path):
    """A function that runs pytest in a small project with conftest.py, and returns (exit status, output, lines)."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def project(*arguments, **variables):
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environment = kept | {"PYTHONPATH": str(tmp_path), "EXPECTED": "3", "CUDA_VISIBLE_DEVICES": "3"} | variables
        # only the plugin that the settings need; starting pytest with the others takes much longer
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        ran = tmp_path / "ran"
        lines = [line.split() for line in ran.read_text().splitlines()] if ran.exists() else []
        return done.returncode, done.stdout + done.stderr, lines

    return project


def test_the_suite_and_its_child_processes_see_no_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1" and not torch.cuda.is_available()
    code = "import torch; print(torch.cuda.device_count())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "0\n"


SKIPPED = "skipped: the GPU tests in 2 files were not run, because torch finds no GPU"
RUNS = {  # options and environment variables, the exit status, the tests that ran, and a part of the output
    "the suite": (["-n", "0"], {}, 0, ["suite"], "2 passed, 3 skipped"),
    "the GPU tests": (["-m", "gpu"], {}, 0, ["one", "one", "two"], "GPU tests: 2 of 2 files passed"),
    "a crash": (["-m", "gpu"], {"BREAK": "7"}, 1, ["one", "one", "two"], "inner/test_two.py (exit status 7)"),
    "a file and a name": (["-m", "gpu", "tests/test_one.py", "-k", "test_one and 1"], {}, 0, ["one"], "1 of 1 files"),
    "no such test": (["-m", "gpu", "tests/test_one.py", "-k", "nothing"], {}, 5, [], ""),
    "no GPU": (["-m", "gpu"], {"CUDA_VISIBLE_DEVICES": "-1"}, 5, [], SKIPPED),
    "a list without a GPU": (["-m", "gpu", "--co"], {"CUDA_VISIBLE_DEVICES": "-1"}, 0, [], "test_two.py::test_two"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_gpu_tests_run_alone_and_each_file_in_a_process(project, name):
    options, variables, expected, tests, says = RUNS[name]
    status, output, lines = project(*options, **variables)
    assert (status, sorted(test for test, _ in lines)) == (expected, tests) and says in output, output
    assert len({process for _, process in lines}) == len({*tests})
