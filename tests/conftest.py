"""All tests run on one thread, so that a process may be forked in the middle of them.

A forked child has none of the threads of OpenMP's pool and waits for them forever, if its parent has made that pool.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; passed on to the processes of a test

import pytest
import torch

DESELECTED = []


@pytest.fixture(autouse=True)
def one_thread():
    """Take back what a run with another num_threads has left."""
    yield
    torch.set_num_threads(1)


def pytest_deselected(items):
    """Remember the slow tests that pyproject.toml's `-m "not slow"` leaves out."""
    DESELECTED.extend(item for item in items if item.get_closest_marker("slow"))


def pytest_terminal_summary(terminalreporter):
    """Say what was not run, and how to run it."""
    if DESELECTED:
        files = sorted({item.path.name for item in DESELECTED})
        terminalreporter.write_line(
            f"not run: {len(DESELECTED)} slow tests in {', '.join(files)}; run them with: pytest -m slow"
        )
