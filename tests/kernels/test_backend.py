"""Test when Triton kernels compute and when torch does: installation, GPU, interpreter, MINIVLMRL_KERNELS."""

import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from minivlmrl.kernels import backend, self_test
from minivlmrl.kernels.backend import INSTALLED, INTERPRETED, KERNELS
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from tests.helpers.interpreter import run_interpreted
from tests.helpers.pretend_cuda import CUDA, PretendCuda

CPU = torch.zeros(1)


def backend_for(tensor):
    return backend.backend_for(tensor, "linear_log_softmax")


class OnGPU:
    """Stand in for a tensor on a GPU, with the attributes that backend_for reads."""

    def __init__(self, dtype=torch.bfloat16, device="cuda:0"):
        self.device = torch.device(device)
        self.dtype = dtype


@pytest.fixture(autouse=True)
def gpu_with_kernels(monkeypatch):
    """Unset MINIVLMRL_KERNELS, and simulate a GPU with compute capability 9.0 and right kernels."""
    monkeypatch.delenv("MINIVLMRL_KERNELS", raising=False)
    monkeypatch.setattr(backend, "_rejection", lambda device, kernel: None)
    monkeypatch.setattr(backend, "INSTALLED", True)
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(backend, "_compiler_obstacle", lambda: None)
    backend._warn.cache_clear()


def test_the_device_decides():
    assert backend_for(CPU) == "torch"
    assert backend_for(OnGPU()) == "triton"
    assert backend_for(OnGPU(device="mps")) == backend_for(OnGPU(torch.float64)) == "torch"


@pytest.mark.parametrize(("is_installed", "obstacle"), [
    (True, "the GPU a card has a compute capability below 8.0"),
    (False, "Triton is not installed; run pip install triton (triton-windows on Windows)"),
])  # fmt: skip
def test_old_cards_and_missing_triton_stay_with_torch(monkeypatch, is_installed, obstacle):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(backend, "INSTALLED", is_installed)
    with pytest.warns(UserWarning, match=f"kernel and is slower, because {re.escape(obstacle)}$"):
        assert backend_for(OnGPU()) == "torch"
    monkeypatch.setenv("MINIVLMRL_KERNELS", "triton")
    with pytest.raises(ValueError, match=f"{re.escape(obstacle)}.*; or set MINIVLMRL_KERNELS=auto, which uses torch"):
        backend_for(OnGPU())


def test_without_a_compiler_torch_computes_and_says_so_once(monkeypatch, recwarn):
    monkeypatch.undo()
    monkeypatch.setattr(backend, "triton", pytest.importorskip("triton"))
    probe = backend._compiler_obstacle
    probe.cache_clear()
    with PretendCuda():
        monkeypatch.setenv("MINIVLMRL_KERNELS", "auto")
        weight = torch.ones(4, 3, device=CUDA)
        ids = torch.zeros(2, dtype=torch.long, device=CUDA)
        for _ in range(2):
            logps, _ = linear_log_softmax(weight[:2], weight, ids)
        assert torch.allclose(logps.cpu(), -torch.tensor(4.0).log())
        monkeypatch.setenv("MINIVLMRL_KERNELS", "triton")
        with pytest.raises(ValueError, match=r"is triton, but Triton cannot compile a kernel .*gcc and python3-dev"):
            backend_for(weight)
    assert probe.cache_info().misses == 1
    [warning] = recwarn
    assert "replaces a Triton kernel and is slower, because Triton cannot compile" in str(warning.message)


def test_the_variable_overrides(monkeypatch):
    monkeypatch.setenv("MINIVLMRL_KERNELS", "torch")
    assert backend_for(OnGPU()) == "torch"
    monkeypatch.setenv("MINIVLMRL_KERNELS", "triton")
    with pytest.raises(ValueError, match="to run Triton's interpreter on a CPU, set TRITON_INTERPRET=1"):
        backend_for(CPU)
    monkeypatch.setattr(backend, "INTERPRETED", True)
    assert backend_for(CPU) == "triton"
    monkeypatch.setenv("MINIVLMRL_KERNELS", "auto")
    assert backend_for(CPU) == "torch"
    monkeypatch.setenv("MINIVLMRL_KERNELS", "cuda")
    with pytest.raises(ValueError, match="auto, torch or triton"):
        backend_for(CPU)


@pytest.mark.parametrize(("result", "reason"), [
    (0.5, r"has a relative error of 50.0%"), (float("nan"), "has a relative error of nan%"),
    (RuntimeError("illegal address"), r"failed its self-test \(RuntimeError: illegal address\)"),
])  # fmt: skip
def test_a_wrong_kernel_is_replaced_with_one_warning(monkeypatch, recwarn, result, reason):
    def error_of(kernel, device):
        assert backend.backend_for(OnGPU(), kernel) == "triton"  # the check runs the kernel itself
        return Mock(side_effect=[result])() if kernel == "window_attention" else 0.003

    monkeypatch.undo()
    monkeypatch.setattr(backend, "INSTALLED", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(backend, "_compiler_obstacle", lambda: None)
    monkeypatch.delenv("MINIVLMRL_KERNELS", raising=False)
    monkeypatch.setattr(self_test, "largest_error", error_of)
    monkeypatch.setattr(backend, "rejections", {})
    backend._warn.cache_clear()
    for _ in range(3):
        assert backend.backend_for(OnGPU(), "window_attention") == "torch"
        assert backend.backend_for(OnGPU(), "decode_attention") == "triton"
    [warning] = recwarn
    message = rf"because window_attention {reason} on the GPU NVIDIA H100\. `python -m minivlmrl\.kernels\.self_test`"
    assert re.search(message, str(warning.message))
    monkeypatch.setenv("MINIVLMRL_SELF_TEST", "0")
    assert backend.backend_for(OnGPU(), "window_attention") == "triton"


def test_a_check_changes_no_random_numbers_and_no_saved_tensors(monkeypatch):
    """Activation checkpointing hooks into saved tensors, in which a kernel may be used first."""
    saved = []

    def errors(device):
        x = torch.randn(3, requires_grad=True)
        torch.autograd.grad(x.square().sum(), x)
        return [0.003]

    monkeypatch.undo()
    monkeypatch.setitem(self_test.CHECKS, "nf4_unpack", errors)
    before = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x), torch.inference_mode():
        assert backend._check(torch.device("cuda", 0), "nf4_unpack") is None
    assert not saved
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not INSTALLED, reason="this is the parent, and Triton must be installed")
def test_all_kernels_in_the_interpreter():
    """All kernels are tested in one process, because an interpreting process takes a long time to start."""
    run_interpreted(*KERNELS, "self_test")


@pytest.mark.slow
def test_the_model_computes_where_triton_is_not_installed():
    code = """
import sys
sys.modules["triton"] = None
import torch
from minivlmrl.kernels import backend, linear_log_softmax, selective_log_softmax, window_attention
from minivlmrl.model import decoder as qwen2_5_vl
assert not backend.INSTALLED and not backend.INTERPRETED
logps, _ = linear_log_softmax.linear_log_softmax(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.long))
assert torch.allclose(logps, -torch.tensor(4.0).log())
"""
    subprocess.run([sys.executable, "-c", code], check=True)
