"""Hide GPUs from the tests, except from `pytest -m gpu`, which runs the tests that need a GPU.

The suite runs on the CPU, even on a machine with a GPU, because it forks processes, which CUDA forbids after its first
use, and because it compares exact numbers. MINIVLMRL_TEST_GPU=1 shows the GPUs to other tests. tests/conftest.py
imports this file first.
"""

import os

import pytest

DEVICES = os.environ.get("CUDA_VISIBLE_DEVICES")
if "MINIVLMRL_TEST_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # read when CUDA is first used, even by child processes


def pytest_configure(config):
    """Show the GPUs again to `pytest -m gpu`."""
    if config.option.markexpr == "gpu":
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if DEVICES is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = DEVICES


def pytest_runtest_setup(item):
    """Skip a test that needs a GPU if no GPU is visible."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU; `pytest -m gpu` runs it")
