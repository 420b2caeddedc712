"""All tests run on one thread, so that a process may be forked in the middle of them.

A forked child has none of the threads of OpenMP's pool and waits for them forever, if its parent has made that pool.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; passed on to the processes of a test

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Take back what a run with another num_threads has left."""
    yield
    torch.set_num_threads(1)
