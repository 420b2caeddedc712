"""Test that the suite and its child processes see no GPU, and that `pytest -m gpu` sees the GPUs."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.links import ROOT

FILES = {
    # stand-in for torch on a machine with GPUs
    "torch.py": """
import os
class cuda:
    is_available = staticmethod(lambda: os.environ["CUDA_VISIBLE_DEVICES"] != "-1")
""",
    "test_both.py": """
import os, subprocess, sys, pytest
@pytest.mark.gpu
def test_that_needs_a_gpu():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
def test_of_the_suite():
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "-1\\n"
""",
}


@pytest.mark.parametrize(("options", "expected"), [
    ([], "1 passed, 1 skipped"), (["-m", "gpu"], "1 passed, 1 deselected"), (["-m", "gpu", "-n", "1"], "1 passed"),
], ids=["the suite", "GPU tests", "GPU tests in a worker"])  # fmt: skip
def test_only_the_gpu_tests_see_gpus(tmp_path, options, expected):
    shutil.copy(ROOT / "tests" / "helpers" / "gpus.py", tmp_path / "conftest.py")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
    kept = {name: value for name, value in os.environ.items() if name != "MINIVLMRL_TEST_GPU"}
    environment = kept | {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "3"}
    # load only the pytest plugin that the options need, because others take a long time to start
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
