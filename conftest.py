"""Hide GPUs from the tests, and run the tests that need a GPU with `pytest -m gpu`.

The suite runs on the CPU, also on a machine with a GPU, because it forks processes, which CUDA forbids after its first
use, and because it compares exact numbers. `pytest -m gpu` starts a process for each file with GPU tests, because after
an illegal address, CUDA refuses all later work in the process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOWN = "MINIVLMRL_TEST_GPU"  # this environment variable is set in the processes that `pytest -m gpu` starts
DEVICES = os.environ.get("CUDA_VISIBLE_DEVICES")
if SHOWN not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # read when CUDA is first used, also by child processes


def pytest_runtest_setup(item):
    """Skip a test that needs a GPU if no GPU is visible."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU; `pytest -m gpu` runs it")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run `pytest -m gpu`: start pytest for each file with GPU tests, with visible GPUs, and print which files failed.

    Returns:
        0 if all tests passed, 1 if a file failed, 5 if no test ran, or None for other command lines.
    """
    if config.option.markexpr != "gpu" or SHOWN in os.environ:
        return None
    environment = os.environ | {SHOWN: "1"}
    del environment["CUDA_VISIBLE_DEVICES"]
    if DEVICES is not None:
        environment["CUDA_VISIBLE_DEVICES"] = DEVICES
    targets = gpu_targets(config)
    finds_gpu = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if not config.option.collectonly and subprocess.run(finds_gpu, env=environment).returncode:
        print(f"skipped: the GPU tests in {len(targets)} files were not run, because torch finds no GPU")
        return 5
    options = [argument for argument in map(str, config.invocation_params.args) if argument not in config.args]
    statuses = {}
    for target in targets:
        command = [sys.executable, "-m", "pytest", *options, "-n", "0", target]
        statuses[target] = subprocess.run(command, env=environment, cwd=config.invocation_params.dir).returncode
    failed = [f"{target} (exit status {status})" for target, status in statuses.items() if status not in (0, 5)]
    print(f"GPU tests: {len(statuses) - len(failed)} of {len(statuses)} files passed", *failed, sep="\n  failed: ")
    return 1 if failed else 5 if {*statuses.values()} <= {5} else 0


def gpu_targets(config) -> list[str]:
    """Return the command-line arguments, in which the test files with GPU tests replace folders."""
    targets = []
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0])
        if path.is_dir():
            files = sorted(path.rglob("test_*.py"))
            targets += [str(file) for file in files if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]
        else:
            targets.append(argument)
    return targets
