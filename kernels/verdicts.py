"""Check the Triton kernels on a GPU before their first use, and store the results on disk.

Each kernel is checked by self_test.py in its own process, because a wrong kernel can make the GPU refuse all later work
in its process. The check results are stored in Triton's cache folder. Each combination of GPU model, driver, torch
version, Triton version and kernel source has its own file. Only one process on a host runs the checks: all other
processes wait for its file lock.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import torch

from minivlmrl.kernels.file_lock import lock_file

BUSY = "busy or unavailable"  # CUDA's error for a second process on a GPU in exclusive mode
TOLERANCE = 0.02  # relative error; correct kernels have about 0.003 in bfloat16
TIME_LIMIT = 120  # seconds for one kernel check
# seconds after which a failed kernel check is repeated, for example one that failed because the GPU had no free memory
RETRY_AFTER = 3600


@cache
def rejected_kernels(index: int, kernels: tuple[str, ...]) -> dict[str, str]:
    """Return the kernels that must not be used on the GPU cuda:index, with reasons."""
    name = torch.cuda.get_device_name(index)
    reasons = {}
    for kernel, result in load_or_check(f"cuda:{index}", kernels).items():
        if isinstance(result, str) and BUSY in result:
            reasons[kernel] = (
                f"cannot be checked in its own process, because the GPU {name} is in exclusive mode, which `nvidia-smi "
                "-c DEFAULT` ends; MINIVLMRL_SELF_TEST=0 skips the check"
            )
        elif isinstance(result, str):
            reasons[kernel] = f"failed its self-test on the GPU {name} ({result})"
        elif not result <= TOLERANCE:  # also true for NaN
            reasons[kernel] = f"has a relative error of {result:.1%} on the GPU {name}"
    return reasons


def load_or_check(device: str, kernels: Sequence[str]) -> dict[str, float | str]:
    """Return the largest relative error of each kernel, or why its check failed; run the checks if none are stored."""
    folder = Path(import_module("triton").knobs.cache.dir)
    key = describe_setup(device)
    path = folder / f"minivlmrl_self_test_{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    results = load_results(path)
    if results is not None:
        return results
    folder.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as file:
        lock_file(file, wait=True)
        results = load_results(path)  # another process may have stored them
        if results is None:
            results = check_kernels(device, kernels)
            path.write_text(json.dumps({"results": results, "setup": key}, indent=2))
    return results


def describe_setup(device: str) -> str:
    """Return a text that identifies stored check results: the GPU, the versions, and a hash of the kernels."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    source_hash = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    setup = {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": import_module("triton").__version__,
        "kernels": source_hash,
    }
    # Triton's environment variables can change a kernel. TRITON_PTXAS_PATH, for example, selects the assembler.
    options = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("TRITON_")}
    return json.dumps(setup | options)


def driver_version() -> str:
    for path in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if path.exists():
            return path.read_text().partition("\n")[0]
    return "unknown"


def load_results(path: Path) -> dict[str, float | str] | None:
    """Read the stored check results; return None if no results are stored or a check has to be repeated."""
    try:
        results = json.loads(path.read_text())["results"]
    except (OSError, ValueError):  # missing, or another process is writing the file
        return None
    age = time.time() - path.stat().st_mtime
    is_complete = all(isinstance(result, float) for result in results.values())
    return results if is_complete or age < RETRY_AFTER else None


def check_kernels(device: str, kernels: Sequence[str]) -> dict[str, float | str]:
    with ThreadPoolExecutor(len(kernels)) as pool:
        return dict(zip(kernels, pool.map(partial(check_kernel, device), kernels), strict=True))


def check_kernel(device: str, kernel: str) -> float | str:
    """Run self_test.py for one kernel, and return the kernel's relative error, or an error message."""
    command = [sys.executable, "-P", "-m", "minivlmrl.kernels.self_test", device, kernel]
    search_path = [path or os.getcwd() for path in sys.path]  # "" is the working folder
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path)}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"no result after {TIME_LIMIT} s"
    results = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(f"{kernel} ")]
    if done.returncode == 0 and results:
        return float(results[-1])
    # The last output line of a failed check is its error message, unless a signal has ended the process.
    lines = (done.stdout or done.stderr).splitlines() or [f"exit status {done.returncode}"]
    return next((line for line in lines if BUSY in line), lines[-1])
