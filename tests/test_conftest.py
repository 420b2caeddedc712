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


def test_on_a_machine_with_a_gpu_the_suite_skips_gpu_tests(project):
    status, output, lines = project("-n", "0")
    assert status == 0 and [name for name, _ in lines] == ["suite"], output
    assert "2 passed, 3 skipped" in output and "needs a GPU; `pytest -m gpu` runs it" in output


def test_each_file_with_gpu_tests_runs_in_a_process_that_sees_the_gpu(project):
    status, output, lines = project("-m", "gpu")
    assert status == 0 and "GPU tests: 2 of 2 files passed" in output, output
    assert sorted(name for name, _ in lines) == ["one", "one", "two"]
    assert len({process for _, process in lines}) == 2


def test_a_crash_of_one_file_is_named_and_the_other_files_run(project):
    status, output, lines = project("-m", "gpu", BREAK="7")
    assert status == 1 and len(lines) == 3
    assert "GPU tests: 1 of 2 files passed" in output and "inner/test_two.py (exit status 7)" in output


def test_files_and_options_of_the_command_line_are_used(project):
    status, output, lines = project("-m", "gpu", "tests/test_one.py", "-k", "test_one and 1")
    assert status == 0 and [name for name, _ in lines] == ["one"], output
    assert project("-m", "gpu", "tests/test_one.py", "-k", "nothing")[0] == 5


def test_without_a_gpu_the_skipped_files_are_counted(project):
    status, output, lines = project("-m", "gpu", CUDA_VISIBLE_DEVICES="-1")
    assert (status, lines) == (5, [])
    assert output == "skipped: the GPU tests in 2 files were not run, because torch finds no GPU\n"
    status, output, _ = project("-m", "gpu", "--collect-only", CUDA_VISIBLE_DEVICES="-1")
    assert status == 0 and "test_two.py::test_two" in output
