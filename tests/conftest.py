"""All tests run on one thread, so that a process may be forked in the middle of them.

A forked child has none of the threads of OpenMP's pool and waits for them forever, if its parent has made that pool.
"""

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; passed on to the processes of a test
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL's trainers ask for the network otherwise

import PIL.Image
import pytest
import torch
from children import default_signals  # noqa: F401 (fixtures)
from fused import fused_linspace  # noqa: F401 (fixtures)
from runs import checkpoint, home, own, plain, rows, run, whole_run  # noqa: F401 (fixtures)

from draws import pair, tokenizer_300  # noqa: F401 (fixtures)
from stages import alone, folder, lively, samples, script, stage  # noqa: F401 (fixtures)

SLOW_FILES = {}  # of slow tests that are left out: {"tests/repository/test_bias.py::test_x": "test_bias.py"}
# so that no process of two is left alone with one of them at the end
LONGEST_FILES = (
    "test_plan", "test_trl_steps", "test_rehearsal", "test_ranks", "test_resume", "test_options", "test_backend",
    "test_first_gpu_hour", "test_benchmarks", "test_wheel", "test_torchrun", "test_routes", "test_mutation_study",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """The longest files are begun first, in this order."""
    order = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(autouse=True)
def one_thread():
    """Draw the same whatever ran before on this worker, and take back what a run with another num_threads has left."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk():
    """No test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture
def poisoned():
    """Uninitialised memory holds NaN, so that what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_deselected(items):
    """Remember the slow tests that pyproject.toml's `-m "not slow"` leaves out."""
    SLOW_FILES.update({item.nodeid: item.path.name for item in items if item.get_closest_marker("slow")})


def pytest_sessionfinish(session):
    """A worker of pytest-xdist sends them to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow"] = SLOW_FILES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    SLOW_FILES.update(getattr(node, "workeroutput", {}).get("slow", {}))


def pytest_terminal_summary(terminalreporter):
    """Say what was not run, and how to run it."""
    if SLOW_FILES:
        files = ", ".join(sorted(set(SLOW_FILES.values())))
        terminalreporter.write_line(f"not run: {len(SLOW_FILES)} slow tests in {files}; run them with: pytest -m slow")


def library(name, reason):
    """Make a fixture of a library that may be missing: tests that ask for it are skipped then."""
    return pytest.fixture(scope="session", name=name)(lambda: pytest.importorskip(name, reason=reason))


TRANSFORMERS = "oracle missing: pip install transformers==5.23.0"
transformers, oracle = (library(name, TRANSFORMERS) for name in ("transformers", "oracle"))
trl = library("trl", f"{TRANSFORMERS} trl==1.16.0")
peft = library("peft", "oracle missing: pip install peft")
math_verify = library("math_verify", "extra missing: pip install math-verify")
scipy, av = (library(name, f"extra missing: pip install {name}") for name in ("scipy", "av"))


@pytest.fixture(scope="session")
def published(trl):
    """published("qwen2_5_vl"): the text of a chat template that TRL ships, a copy of the published one."""
    templates = Path(trl.__file__).parent / "chat_templates"
    return lambda name: (templates / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture
def write_rows(tmp_path):
    """Write rows (objects, or lines as they are) next to three one-colour images; returns the file."""
    for name, color in (("red", (255, 0, 0)), ("green", (0, 255, 0)), ("blue", (0, 0, 255))):
        PIL.Image.new("RGB", (4, 4), color).save(tmp_path / f"{name}.png")

    def write(*lines):
        lines = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return tmp_path / "rows.jsonl"

    return write
