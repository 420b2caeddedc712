"""Test that the kernel self-test passes on a GPU and in the interpreter, and detects wrong kernels."""

import math

import pytest
import torch

from minivlmrl.kernels import self_test
from minivlmrl.kernels.backend import KERNELS
from minivlmrl.kernels.self_test import TOLERANCE
from tests.helpers.interpreter import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda:0"
runs = (lambda test: test) if INTERPRETED else pytest.mark.gpu  # a compiled kernel needs a GPU
LIMIT = 1e-5 if INTERPRETED else TOLERANCE / 2  # relative error in float32 and in bfloat16


def test_each_kernel_has_a_check():
    assert {*KERNELS, "float32_matmul"} == self_test.CHECKS.keys()


@runs
@pytest.mark.parametrize("kernel", self_test.CHECKS)
def test_a_correct_kernel_passes(kernel, monkeypatch):
    monkeypatch.setenv("MINIVLMRL_KERNELS", "triton")
    assert 0 < self_test.largest_error(kernel, DEVICE) < LIMIT


def wrong_columns(x):
    """Return a copy in which a quarter of the columns is 10 % too large, an error of 5 % in the norm."""
    x = x.clone()
    x[..., : x.shape[-1] // 4] *= 1.1
    return x


class WrongGradient(torch.autograd.Function):
    """Return a tensor unchanged, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return wrong_columns(grad)


@pytest.mark.parametrize("kernel", ["window_attention", "selective_log_softmax", "linear_log_softmax"])
def test_a_wrong_result_or_gradient_is_noticed(kernel, monkeypatch):
    """The checks run on a CPU without Triton, in float32, and compare torch paths instead of kernels."""
    monkeypatch.setattr(self_test, "DTYPE", torch.float32)
    monkeypatch.setattr(self_test, "INTERPRETED", True)  # the checks then use fewer rows
    monkeypatch.setenv("MINIVLMRL_KERNELS", "torch")
    function = getattr(self_test, kernel)

    def as_list(out):
        return list(out) if isinstance(out, tuple) else [out]

    wrong_result = lambda *args: [wrong_columns(x) for x in as_list(function(*args))]  # noqa: E731
    wrong_gradient = lambda x, *args: as_list(function(WrongGradient.apply(x), *args))  # noqa: E731
    not_a_number = lambda *args: [x * math.nan for x in as_list(function(*args))]  # noqa: E731
    assert self_test.largest_error(kernel, "cpu") < 1e-5
    for broken in (wrong_result, wrong_gradient, not_a_number):

        def replaced(x, *args, broken=broken):
            out = broken(x, *args) if x.dtype == torch.float32 else as_list(function(x, *args))
            return out[0] if kernel == "window_attention" else out

        monkeypatch.setattr(self_test, kernel, replaced)
        assert not self_test.largest_error(kernel, "cpu") <= TOLERANCE
