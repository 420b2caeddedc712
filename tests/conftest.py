"""Define fixtures and hooks for all tests.

Tests run on one thread, so that a test may fork its process. If OpenMP has started a thread pool in the parent process,
a forked child waits forever for threads that the child does not have.
"""

from tests.helpers.gpus import pytest_configure, pytest_runtest_setup  # noqa: F401, I001 (hides GPUs before torch)

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads the variable when it is imported, even in child processes
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # otherwise TRL's trainers access the network
# HF_HUB_OFFLINE would forbid the tests of downloads; huggingface_hub reads the variable at its import
os.environ.pop("HF_HUB_OFFLINE", None)

import PIL.Image
import pytest
import torch

from minivlmrl.run import metrics
from tests.helpers.children import default_signals  # noqa: F401 (fixtures)
from tests.helpers.draws import pair, tokenizer_300  # noqa: F401 (fixtures)
from tests.helpers.fused import fused_linspace  # noqa: F401 (fixtures)
from tests.helpers.runs import cached_activations, checkpoint, home, quick, rows, run, user_data, whole_run  # noqa: F401 (fixtures)
from tests.helpers.stages import folder, loss_calls, one_rank, samples, script, stage, varied_rollouts  # noqa: F401 (fixtures)

# the slowest files run first, so that parallel workers finish at about the same time
LONGEST_FILES = (
    "test_process_group", "test_states", "test_memory", "test_out_of_memory",
    "test_wait", "test_trajectories", "test_backend", "test_benchmarks", "test_wheel",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Run the tests in LONGEST_FILES first, in the order of the tuple."""
    order = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(autouse=True)
def one_thread():
    """Seed torch, and reset the thread count, which the option num_threads of a run may have changed."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk():
    """Make os.fsync do nothing, because it is slow and matters only after a power failure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(autouse=True)
def exact_sampler(monkeypatch):
    """Stop runs in float32 and float64 if log-probabilities from sampling and training differ by more than 1e-5."""
    monkeypatch.setattr(metrics, "EXACT_LIMIT", 1e-5)


@pytest.fixture
def nan_in_new_memory():
    """Fill uninitialized memory with NaN, so that a test notices values that a kernel does not write."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def library(name, reason):
    """Return a fixture that skips the tests that use it if an optional library is missing."""
    return pytest.fixture(scope="session", name=name)(lambda: pytest.importorskip(name, reason=reason))


TRANSFORMERS = "oracle missing: pip install transformers==5.23.0"
transformers = library("transformers", TRANSFORMERS)
trl = library("trl", f"{TRANSFORMERS} trl==1.16.0")
peft = library("peft", "oracle missing: pip install peft")
math_verify = library("math_verify", "extra missing: pip install math-verify")
scipy, av = (library(name, f"extra missing: pip install {name}") for name in ("scipy", "av"))


@pytest.fixture(scope="session")
def oracle(transformers):
    from tests.helpers import oracle

    return oracle


@pytest.fixture(scope="session")
def published(trl):
    """Return a function that returns the text of a published chat template, such as "qwen2_5_vl", from TRL's copies."""
    templates = Path(trl.__file__).parent / "chat_templates"
    return lambda name: (templates / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture
def write_rows(tmp_path):
    """Return a function that writes rows (objects or strings) beside three one-color images and returns the file."""
    for name, color in (("red", (255, 0, 0)), ("green", (0, 255, 0)), ("blue", (0, 0, 255))):
        PIL.Image.new("RGB", (4, 4), color).save(tmp_path / f"{name}.png")

    def write(*lines):
        lines = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return tmp_path / "rows.jsonl"

    return write
