"""Test how the device is selected, and the lines that a run prints about the GPU and PyTorch's wheel."""

import shutil

import pytest
import torch

from minivlmrl.config.options import RunConfig
from minivlmrl.distributed import device as device_file
from minivlmrl.distributed.device import find_device, has_code_for
from minivlmrl.distributed.process_group import World
from minivlmrl.run import preflight

# architectures in torch 2.13's wheels
CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CUDA_13_0 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
WHEELS = "https://download.pytorch.org/whl"
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 06:54:38 UTC 2025"


@pytest.fixture
def gpus(monkeypatch):
    """Return gpus(count, error, **card), which sets the GPUs or the error that torch reports."""

    def gpus(count, error=None, capability=(9, 0), name="a card", wheel=CUDA_13_0):
        def init():
            raise RuntimeError(error)

        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        answers = {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "init": init,
            "get_device_capability": lambda device: capability,
            "get_device_name": lambda device: name,
            "get_arch_list": lambda: wheel,
            "mem_get_info": lambda device: (14.5e9, 15.8e9),
        }
        for function, answer in answers.items():
            monkeypatch.setattr(torch.cuda, function, answer)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(device_file, "driver_version", lambda: DRIVER)
    return gpus


def test_each_rank_has_its_own_gpu(gpus):
    gpus(2)
    assert [str(find_device(rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match=r"local rank 2 has no GPU, because only 2 are visible; start at most 2"):
        find_device(2)


def test_the_cpu_is_used_only_if_there_is_no_gpu(gpus, monkeypatch):
    for error in ("Found no NVIDIA driver on your system. Please", "No CUDA GPUs are available"):
        gpus(0, error)
        assert str(find_device()) == "cpu"
    gpus(0, "The NVIDIA driver on your system is too old (found version 11040).\nPlease update it")
    with pytest.raises(ValueError, match=r"\(The NVIDIA driver .* too old \(found version 11040\).\): fix"):
        find_device()
    gpus(0, "The NVIDIA driver on your system is too old (found version 12040).\nPlease update it")
    with pytest.raises(ValueError, match=r"update the driver, or run `pip install .* torch==2.13.0 .*/whl/cu126`, or"):
        find_device()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert str(find_device()) == "cpu"


@pytest.mark.parametrize(("version", "older", "newer"), [
    ("2.13.0+cu130", "2.13.0", "2.13.0"), ("2.15.0", "2.14.1", "2.15.0"), ("2.16.0a0+git1", "2.14.1", "2.16.0a0"),
])  # fmt: skip
def test_wheels_for_cuda_12_end_with_torch_2_14(monkeypatch, version, older, newer):
    monkeypatch.setattr(torch, "__version__", version)
    assert f" torch=={older} " in device_file.install_command("cu126")
    assert f" torch=={newer} " in device_file.install_command("cu130")


@pytest.mark.parametrize(("name", "capability", "wheel", "cuda"), [
    ("Tesla V100", (7, 0), CUDA_13_0, "cu126"),
    ("Tesla V100", (7, 0), CUDA_12_6, None),
    ("Tesla T4", (7, 5), CUDA_13_0, None),
    ("NVIDIA A10", (8, 6), CUDA_13_0, None),
    ("NVIDIA GeForce RTX 4090", (8, 9), CUDA_12_6, None),
    ("NVIDIA GeForce RTX 5090", (12, 0), CUDA_13_0, None),
    ("NVIDIA GeForce RTX 5090", (12, 0), CUDA_12_6, "cu130"),
    ("NVIDIA GeForce RTX 5090", (12, 0), [*CUDA_12_6, "compute_90"], None),
    ("an AMD GPU", (9, 4), ["gfx942"], None),
])  # fmt: skip
def test_a_wheel_without_code_for_the_gpu_is_refused(gpus, monkeypatch, name, capability, wheel, cuda):
    gpus(1, capability=capability, name=name, wheel=wheel)
    monkeypatch.setattr(torch.version, "hip", "6.4" if wheel == ["gfx942"] else None)
    if cuda is None:
        assert str(find_device()) == "cuda:0"
        return
    with pytest.raises(ValueError, match="has no code for the GPU") as error:
        find_device()
    major, minor = capability
    said = str(error.value)
    assert f"has no code for the GPU {name}, whose compute capability is {major}.{minor}, but only for" in said
    assert (
        f"{', '.join(wheel)}: run `pip install --force-reinstall torch==2.13.0 --index-url {WHEELS}/{cuda}`, or" in said
    )


def test_machine_code_runs_in_its_family_and_ptx_on_all_later_gpus():
    assert has_code_for(["sm_80"], (8, 9)) and has_code_for(["sm_90a"], (9, 0))
    assert not has_code_for(["sm_89"], (8, 6)) and not has_code_for(["sm_90"], (10, 0))
    assert has_code_for(["compute_80"], (12, 0)) and not has_code_for(["compute_90"], (8, 0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "capability"), [
    ("Tesla V100", (7, 0)), ("Tesla T4", (7, 5)), ("NVIDIA A10", (8, 6)), ("NVIDIA GeForce RTX 5090", (12, 0)),
])  # fmt: skip
def test_the_first_line_describes_the_gpu(gpus, monkeypatch, capsys, name, capability, dtype):
    """Only cards before the A100 get a second line, about bfloat16, whatever the processor has."""
    gpus(1, capability=capability, name=name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(preflight, "backend_for", lambda tensor, kernel: "torch" if capability < (8, 0) else "triton")
    monkeypatch.setattr(torch, "empty", lambda *given, **options: None)
    config = RunConfig()
    config.model.compute_dtype = dtype
    preflight.describe_hardware(config, World(device=torch.device("cuda:0")))
    first, *notes = capsys.readouterr().out.splitlines()
    major, minor = capability
    kernels = "torch" if major < 8 else "triton"
    assert first == (
        f"device: {name} (compute capability {major}.{minor}, driver 580.65.06, 14.5 of 15.8 GB free); "
        f"ranks: 1; kernels: {kernels}"
    )
    says = f"the GPU {name} (compute capability {major}.{minor}) has no bfloat16 units, so products in bfloat16 are no "
    assert [note[: len(says)] for note in notes] == [says] * (major < 8 and dtype == "bfloat16")


@pytest.mark.parametrize("machine", ["no GPU", "CPU wheel", "hidden GPU", "CUDA wheel without a GPU", "Mac"])
def test_a_gpu_that_is_not_used_is_named(monkeypatch, capsys, machine):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: machine == "Mac")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: machine == "CUDA wheel without a GPU")
    has_driver = machine in ("CPU wheel", "hidden GPU", "CUDA wheel without a GPU")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if has_driver else None)
    if machine == "hidden GPU":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    preflight.describe_hardware(RunConfig(), World())
    first, *notes = capsys.readouterr().out.splitlines()
    assert first == f"device: CPU (threads: {torch.get_num_threads()}); ranks: 1; kernels: torch"
    wheel = f"pip install --force-reinstall torch==2.13.0 --index-url {WHEELS}/cu130"
    says = {
        "CPU wheel": f"2.13.0+cpu is built for CPUs only, so the run takes the CPU; to use the GPU, run `{wheel}`",
        "Mac": "the GPU of this Mac (MPS) is not used, because training is tested on CPUs and NVIDIA GPUs only",
    }
    assert len(notes) == (machine in says) and all(says[machine] in note for note in notes)


def test_a_driver_without_a_version_is_unknown(gpus, monkeypatch):
    """In WSL there is no /proc/driver/nvidia/version."""
    gpus(1)
    monkeypatch.setattr(device_file, "driver_version", lambda: "unknown")
    assert "driver unknown, 14.5 of" in device_file.describe_device(torch.device("cuda:0"))
