"""Test how a run selects its device, and the line that a run prints about the device."""

import shutil

import pytest
import torch

from minivlmrl.distributed.device import find_device
from minivlmrl.monitor.check.summary import describe_device


@pytest.fixture
def gpus(monkeypatch):
    def gpus(count, error=None):
        def init():
            raise RuntimeError(error)

        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        answers = {"is_available": lambda: count > 0, "device_count": lambda: count, "init": init}
        for function, answer in answers.items():
            monkeypatch.setattr(torch.cuda, function, answer)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return gpus


def test_each_rank_has_its_own_gpu(gpus):
    gpus(2)
    assert [str(find_device(rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match=r"local rank 2 has no GPU, because the number of visible GPUs is 2"):
        find_device(2)


def test_the_cpu_is_used_only_if_there_is_no_gpu(gpus, monkeypatch):
    for error in ("Found no NVIDIA driver on your system. Please", "No CUDA GPUs are available"):
        gpus(0, error)
        assert str(find_device()) == "cpu"
    gpus(0, "The NVIDIA driver on your system is too old (found version 11040).\nPlease update it")
    with pytest.raises(ValueError, match=r"\(The NVIDIA driver .* too old .found version 11040..\): update the"):
        find_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert str(find_device()) == "cpu"


@pytest.mark.parametrize(("machine", "is_named"), [
    ("no GPU", False), ("CPU wheel", True), ("hidden GPU", False), ("CUDA wheel without a GPU", False),
])  # fmt: skip
def test_a_gpu_that_is_not_used_is_named(monkeypatch, machine, is_named):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: machine == "CUDA wheel without a GPU")
    monkeypatch.setattr(shutil, "which", lambda name: None if machine == "no GPU" else "/usr/bin/nvidia-smi")
    if machine == "hidden GPU":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    expected = f"CPU (threads: {torch.get_num_threads()})" + ", because this PyTorch is built for CPUs only" * is_named
    assert describe_device(torch.device("cpu")).startswith(expected)
    assert (describe_device(torch.device("cpu")) == expected) != is_named
