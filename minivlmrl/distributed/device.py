"""Select a rank's device, and describe the GPU and how PyTorch's wheel fits it."""

import os
import re
import shutil

import torch
from torch.torch_version import TorchVersion

from minivlmrl.kernels.verdicts import driver_version

GB = 10**9
# PyTorch's wheels by CUDA version. Since torch 2.11, CUDA 12.6 has code for the compute capabilities 5.0 to 9.0, and
# CUDA 13.0 for 7.5 to 12.0 (pytorch issue 172352).
WHEELS = "https://download.pytorch.org/whl"
OLDER_CUDA, NEWER_CUDA = "cu126", "cu130"
LAST_OF_OLDER_CUDA = "2.14.1"  # torch 2.15 has no wheels for CUDA 12.6 (pytorch issue 190385)


def find_device(local_rank: int = 0) -> torch.device:
    """Return a rank's GPU, or the CPU if the machine has no GPU."""
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ValueError(
                f"local rank {local_rank} has no GPU, because only {num_gpus} are visible; start "
                f"at most {num_gpus} processes (--nproc_per_node), or make more GPUs visible "
                "(CUDA_VISIBLE_DEVICES)"
            )
        device = torch.device("cuda", local_rank)
        check_wheel(device)
        return device
    if torch.backends.cuda.is_built() and not hides_gpus():
        try:
            torch.cuda.init()
        except RuntimeError as error:
            # With these errors there is no GPU that the user could miss. A forked subprocess cannot initialise CUDA,
            # but its parent process found no GPU.
            if not re.search("no NVIDIA driver|No CUDA GPUs|in forked subprocess", str(error)):
                cure = "fix the driver"
                if re.search(r"too old \(found version 12\d{3}\)", str(error)):
                    cure = f"update the driver, or run {install_command(OLDER_CUDA)}"
                raise ValueError(
                    f"CUDA cannot use this machine's GPU ({str(error).splitlines()[0]}): "
                    f"{cure}, or train on the CPU with CUDA_VISIBLE_DEVICES=-1"
                ) from error
    return torch.device("cpu")


def hides_gpus() -> bool:
    """Return True if the user has hidden all GPUs with CUDA_VISIBLE_DEVICES."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def check_wheel(device: torch.device):
    """Raise ValueError if PyTorch's wheel has no code for the GPU, and name a wheel that has.

    For example, wheels of CUDA 13 have no code for a V100, and wheels of CUDA 12.6 have none for an RTX 5090. Builds
    for AMD GPUs are not checked.
    """
    architectures = torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip or not architectures or has_code_for(architectures, capability):
        return
    newer = capability >= (7, 5)
    major, minor = capability
    raise ValueError(
        f"PyTorch {torch.__version__} has no code for the GPU {torch.cuda.get_device_name(device)}, "
        f"whose compute capability is {major}.{minor}, but only for {', '.join(architectures)}: "
        f"run {install_command(NEWER_CUDA if newer else OLDER_CUDA)}, or train on the CPU with "
        "CUDA_VISIBLE_DEVICES=-1"
    )


def has_code_for(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Return True if a wheel has code that runs on a GPU with this compute capability.

    Machine code, such as sm_86, runs on capabilities with the same first number and an equal or larger second number.
    The driver compiles PTX, such as compute_90, for all later capabilities.
    """
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        version = int(re.sub(r"\D", "", digits))  # sm_90a is for 9.0, too
        built_for = divmod(version, 10)
        same_family = kind == "compute" or built_for[0] == capability[0]
        if same_family and built_for <= capability:
            return True
    return False


def install_command(cuda: str) -> str:
    """Return the command that replaces PyTorch by the same version for another CUDA version, or by the last one."""
    version = torch.__version__.partition("+")[0]
    if cuda == OLDER_CUDA and TorchVersion(version) > LAST_OF_OLDER_CUDA:
        version = LAST_OF_OLDER_CUDA
    return f"`pip install --force-reinstall torch=={version} --index-url {WHEELS}/{cuda}`"


def describe_device(device: torch.device) -> str:
    """Describe the CPU's threads, or the GPU's name, capability, driver and free memory."""
    if device.type != "cuda":
        return f"CPU (threads: {torch.get_num_threads()})"
    major, minor = torch.cuda.get_device_capability(device)
    free, total = torch.cuda.mem_get_info(device)
    # the first version number of the line "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65"
    number = re.search(r"\b\d+(\.\d+)+\b", driver_version())
    driver = number.group() if number else "unknown"
    return (
        f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}, driver {driver}, "
        f"{free / GB:.1f} of {total / GB:.1f} GB free)"
    )


def unused_gpu() -> str | None:
    """Name a GPU in this machine that is not used, and what to do; None if there is none.

    NVIDIA's driver installs nvidia-smi, also on Windows and in WSL.
    """
    if torch.backends.mps.is_available():
        return (
            "the GPU of this Mac (MPS) is not used, because training is tested on CPUs and NVIDIA "
            "GPUs only; the run takes the CPU"
        )
    has_gpu_wheel = torch.backends.cuda.is_built()
    if not has_gpu_wheel and not hides_gpus() and shutil.which("nvidia-smi"):
        return (
            f"this machine has an NVIDIA driver, but PyTorch {torch.__version__} is built for CPUs "
            f"only, so the run takes the CPU; to use the GPU, run {install_command(NEWER_CUDA)} "
            f"({OLDER_CUDA} for GPUs older than the T4)"
        )
    return None


def bfloat16_cost(device: torch.device) -> str | None:
    """Describe the price of bfloat16 on a CPU or an NVIDIA GPU that is slow in it, or return None."""
    # Measured on a Zen 3: products with 600 rows took 8 times as long in bfloat16 as in float32.
    if device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return (
            "this processor has no AVX-512, so it computes several times slower in bfloat16 than "
            "in float32; use --model.compute_dtype=float32"
        )
    if device.type != "cuda" or torch.version.hip:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major >= 8:
        return None
    return (
        f"the GPU {torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no "
        "bfloat16 units, so products in bfloat16 are no faster than in float32: bfloat16 halves the "
        "memory, but saves no time"
    )
