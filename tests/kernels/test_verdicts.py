"""Test that kernels are checked once per setup, in processes of their own, and that wrong kernels are rejected.

The GPU and the checking processes are stand-ins; test_self_test.py runs the real checks.
"""

import json
import os
import re
import sys
import time
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from minivlmrl.kernels import backend, verdicts
from tests.helpers.children import exit_code, fork
from tests.kernels.test_backend import OnGPU

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the stand-in for Python is a shell script")
STAND_IN = """#!/bin/sh
echo "$4 $5" >> {folder}/started
if [ -f {folder}/$5 ]; then . {folder}/$5; else echo "$5 0.003"; fi
"""


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    """Simulate a machine with H100 GPUs, on which a shell script replaces the processes that check kernels."""
    script = tmp_path / "python"
    script.write_text(STAND_IN.format(folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setattr(verdicts.sys, "executable", str(script))
    cache_knobs = SimpleNamespace(dir=str(tmp_path / "cache"))
    triton = SimpleNamespace(__version__="3.7.1", knobs=SimpleNamespace(cache=cache_knobs))
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(verdicts, "driver_version", lambda: "580.159")
    monkeypatch.setattr(backend, "INSTALLED", True)
    monkeypatch.setattr(backend, "_compiler_obstacle", lambda: None)
    for name in ("MINIVLMRL_KERNELS", "MINIVLMRL_SELF_TEST"):
        monkeypatch.delenv(name, raising=False)
    new_process()
    yield triton
    new_process()


def new_process():
    """Clear the cached verdicts, as if a new process started."""
    verdicts.rejected_kernels.cache_clear()
    backend._warn.cache_clear()


def started(tmp_path) -> list[str]:
    path = tmp_path / "started"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_kernels_are_checked_once_and_the_verdict_is_reused(tmp_path):
    for device in ("cuda:3", "cuda:1"):  # two GPUs of one model
        assert {backend.backend_for(OnGPU(device=device), kernel) for kernel in backend.KERNELS} == {"triton"}
        new_process()
    assert started(tmp_path) == sorted(f"cuda:3 {kernel}" for kernel in backend.KERNELS)
    [path] = (tmp_path / "cache").glob("*.json")
    stored = json.loads(path.read_text())
    assert stored["results"] == dict.fromkeys(backend.KERNELS, 0.003)
    assert json.loads(stored["setup"])["gpu"] == "NVIDIA H100"


def test_each_setup_has_its_own_verdict(tmp_path, monkeypatch, gpu):
    """Machines with different GPUs may share a home folder, and TRITON_PTXAS_PATH selects another assembler."""
    changes = [
        lambda: None,
        lambda: monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100"),
        lambda: monkeypatch.setattr(verdicts, "driver_version", lambda: "590.1"),
        lambda: monkeypatch.setattr(torch, "__version__", "3.0.0"),
        lambda: setattr(gpu, "__version__", "3.8.0"),
        lambda: monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas"),
        lambda: monkeypatch.setattr(verdicts, "__file__", __file__),  # another folder with the source of the kernels
    ]
    for number, change in enumerate(changes, start=1):
        change()
        verdicts.load_or_check("cuda:0", ["nf4_unpack"])
        assert len(started(tmp_path)) == len(list((tmp_path / "cache").glob("*.json"))) == number


@pytest.mark.parametrize("fault", [("pathlib.Path.mkdir", "Read-only"), ("fcntl.flock", "Function not implemented")])
def test_without_a_cache_folder_pytorch_computes(monkeypatch, fault):
    place, error = fault
    monkeypatch.setattr(place, Mock(side_effect=OSError(error)))
    with pytest.warns(match=f"Triton's cache folder cannot be used .{error}.; set TRITON_CACHE_DIR"):
        assert backend.backend_for(OnGPU(), "decode_attention") == "torch"


@pytest.mark.parametrize(("script", "reason"), [
    ("echo a note; echo $5 0.38; echo another note", r"has a relative error of 38\.0% on the GPU NVIDIA H100"),
    ("echo $5 nan", r"has a relative error of nan% on the GPU NVIDIA H100"),
    ("echo AcceleratorError: illegal address; exit 1",
     r"failed its self-test on the GPU NVIDIA H100 \(AcceleratorError: illegal address\)"),
    ("echo 'line 1\nModuleNotFoundError: x' >&2; exit 1", r"failed its self-test .* \(ModuleNotFoundError: x\)"),
    ("kill -SEGV $$", r"failed its self-test on the GPU NVIDIA H100 \(exit status -11\)"),
    ("exec sleep 60", r"failed its self-test on the GPU NVIDIA H100 \(no result after 1 s\)"),
])  # fmt: skip
def test_a_kernel_that_is_wrong_crashes_or_hangs_is_replaced_with_one_warning(tmp_path, monkeypatch, script, reason):
    (tmp_path / "window_attention").write_text(script)
    monkeypatch.setattr(verdicts, "TIME_LIMIT", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert backend.backend_for(OnGPU(), "window_attention") == "torch"
            assert backend.backend_for(OnGPU(), "decode_attention") == "triton"
    [warning] = caught
    reason = rf"because window_attention {reason}\. `python -m minivlmrl\.kernels\.self_test` repeats the check"
    assert re.search(reason, str(warning.message))
    monkeypatch.setenv("MINIVLMRL_KERNELS", "triton")
    with pytest.raises(ValueError, match=rf"^MINIVLMRL_KERNELS is triton, but {reason.removeprefix('because ')}"):
        backend.backend_for(OnGPU(), "window_attention")
    assert backend.backend_for(OnGPU(), "decode_attention") == "triton"
    assert len(started(tmp_path)) == len(backend.KERNELS)


def test_a_measured_error_is_stored_but_a_crash_is_checked_again_an_hour_later(tmp_path):
    def results_after(seconds):
        for path in (tmp_path / "cache").glob("*.json"):
            os.utime(path, (time.time() - seconds,) * 2)
        before = len(started(tmp_path))
        return verdicts.load_or_check("cuda:0", ["nf4_unpack"])["nf4_unpack"], len(started(tmp_path)) - before

    script = tmp_path / "nf4_unpack"
    script.write_text("echo OutOfMemoryError: no memory; exit 1")
    assert results_after(0) == ("OutOfMemoryError: no memory", 1)
    assert results_after(3000) == ("OutOfMemoryError: no memory", 0)
    script.write_text("echo $5 0.5")
    assert results_after(4000) == (0.5, 1)
    assert results_after(10**7) == (0.5, 0)


def test_a_broken_verdict_is_replaced(tmp_path):
    verdicts.load_or_check("cuda:0", ["nf4_unpack"])
    [path] = (tmp_path / "cache").glob("*.json")
    path.write_text(path.read_text()[:30])
    assert verdicts.load_or_check("cuda:0", ["nf4_unpack"]) == {"nf4_unpack": 0.003}
    assert len(started(tmp_path)) == 2
    assert json.loads(path.read_text())["results"] == {"nf4_unpack": 0.003}


def test_processes_share_one_check(tmp_path):
    (tmp_path / "window_attention").write_text("sleep 0.3; echo $5 0.4")

    def rank(index):
        found = [backend.backend_for(OnGPU(device=f"cuda:{index}"), kernel) for kernel in backend.KERNELS]
        return int(found != ["torch", *["triton"] * (len(backend.KERNELS) - 1)])

    ranks = [fork(lambda index=index: rank(index)) for index in range(3)]
    assert [exit_code(child) for child in ranks] == [0] * 3
    assert sorted(line.partition(" ")[2] for line in started(tmp_path)) == sorted(backend.KERNELS)


@pytest.mark.parametrize(("name", "value", "backend_name"), [
    ("MINIVLMRL_SELF_TEST", "0", "triton"),
    ("MINIVLMRL_KERNELS", "torch", "torch"),
])  # fmt: skip
def test_the_check_can_be_omitted(tmp_path, monkeypatch, name, value, backend_name):
    (tmp_path / "nf4_unpack").write_text("echo $5 0.5")
    monkeypatch.setenv(name, value)
    assert backend.backend_for(OnGPU(), "nf4_unpack") == backend_name
    assert started(tmp_path) == []
