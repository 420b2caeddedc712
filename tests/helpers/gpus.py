"""Hide GPUs from tests, except with `pytest -m gpu`.

The suite runs on the CPU even with a GPU: it compares exact numbers, and forks processes, which CUDA forbids after its
first use. MINIVLMRL_TEST_GPU=1 shows GPUs to other tests. tests/conftest.py imports this file first.
"""

import os

import pytest

DEVICES = os.environ.get("CUDA_VISIBLE_DEVICES")
if "MINIVLMRL_TEST_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # read at CUDA's first use, also by child processes


def pytest_configure(config):
    """Show GPUs again for `pytest -m gpu`."""
    if config.option.markexpr == "gpu":
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if DEVICES is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = DEVICES


def pytest_runtest_setup(item):
    """Skip a test that needs a GPU if none is visible."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU; `pytest -m gpu` runs it")
