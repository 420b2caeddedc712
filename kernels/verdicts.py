"""Check the Triton kernels on a GPU before their first use, and store the results on disk.

self_test.py checks each kernel in its own process, because a wrong kernel can break CUDA.
Results are files in Triton's cache folder, one per GPU model, kernel source, and version of driver, torch and Triton.
One process per host runs the checks; others wait for its file lock.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import torch

from minivlmrl.kernels.file_lock import lock_file

TOLERANCE = 0.02  # maximum relative error; correct bfloat16 kernels have about 0.003
TIME_LIMIT = 120  # maximum seconds to check a kernel
RETRY_AFTER = 3600  # seconds until a failed check is repeated: the GPU may only have been out of memory


@cache
def rejected_kernels(index: int, kernels: tuple[str, ...]) -> dict[str, str]:
    """Return {kernel: reason} for kernels that failed their check on GPU `index`."""
    name = torch.cuda.get_device_name(index)
    reasons = {}
    for kernel, result in load_or_check(f"cuda:{index}", kernels).items():
        if isinstance(result, str):
            reasons[kernel] = f"failed its self-test on the GPU {name} ({result})"
        elif not result <= TOLERANCE:  # NaN also fails the check
            reasons[kernel] = f"has a relative error of {result:.1%} on the GPU {name}"
    return reasons


def load_or_check(device: str, kernels: Sequence[str]) -> dict[str, float | str]:
    """Load results from disk, or check all kernels: {kernel: largest relative error, or why the check failed}."""
    triton = import_module("triton")
    sources = sorted(Path(__file__).parent.glob("*.py"))
    setup = {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest(),
    }
    # Triton's environment variables can change kernels: TRITON_PTXAS_PATH selects the assembler
    setup |= {name: os.environ[name] for name in sorted(os.environ) if name.startswith("TRITON_")}
    key = json.dumps(setup)
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"minivlmrl_self_test_{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    with path.with_suffix(".lock").open("a") as file:
        lock_file(file, wait=True)
        with suppress(OSError, ValueError):  # file missing, or incomplete after a crash
            results = json.loads(path.read_text())["results"]
            if time.time() - path.stat().st_mtime < RETRY_AFTER or all(
                isinstance(result, float) for result in results.values()
            ):
                return results
        results = check_kernels(device, kernels)
        path.write_text(json.dumps({"results": results, "setup": key}, indent=2))
    return results


def driver_version() -> str:
    for path in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if path.exists():
            return path.read_text().partition("\n")[0]
    return "unknown"


def check_kernels(device: str, kernels: Sequence[str]) -> dict[str, float | str]:
    with ThreadPoolExecutor(len(kernels)) as pool:
        return dict(zip(kernels, pool.map(partial(check_kernel, device), kernels), strict=True))


def check_kernel(device: str, kernel: str) -> float | str:
    """Run self_test.py for one kernel; return its relative error, or an error message."""
    search_path = [path or os.getcwd() for path in sys.path]  # an empty string in sys.path means the working folder
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "minivlmrl.kernels.self_test", device, kernel],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return f"no result after {TIME_LIMIT} s"
    results = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(f"{kernel} ")]
    if done.returncode == 0 and results:
        return float(results[-1])
    # the last output line is the error message, unless a signal ended the process
    return ((done.stdout or done.stderr).splitlines() or [f"exit status {done.returncode}"])[-1]
