"""Check kernels compiled at real sizes, by the installed Triton, and recorded results of two Triton versions."""

import json
import os
import subprocess
import sys

import pytest
from links import ROOT

RECORDED = json.loads((ROOT / "tests" / "recorded" / "kernel_builds.json").read_text())
PLAIN = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "MINIVLMRL_KERNELS")}


def compiled(*options):
    """Run the script in a process that compiles instead of interpreting, and return its output."""
    pytest.importorskip("triton")
    command = [sys.executable, ROOT / "benchmarks" / "kernels_aot.py", *options]
    result = subprocess.run(command, cwd=ROOT, env=PLAIN, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def assert_good(builds):
    """Check properties of every version: no register spills, wide accesses, matrix instructions and short loops."""
    for name, row in builds.items():
        assert row["spills"] == 0, name
        assert row["wide"] > 0, f"{name}: no access of 16 bytes"
        if name.startswith(("window_attention", "decode_attention ")):
            assert row["matrix"] > 0, f"{name}: no matrix instruction"
        if name.startswith("log-softmax forward"):
            assert row["instructions"] <= 10 and row["barriers"] == 0, name


@pytest.mark.slow
def test_the_installed_compiler_builds_good_kernels(tmp_path):
    """The kernels are compiled for an H100."""
    compiled("--arch", "90", "--json", str(tmp_path / "numbers.json"))
    [builds] = json.loads((tmp_path / "numbers.json").read_text()).values()
    assert_good(builds)
    assert builds.keys() == {name for name in RECORDED["3.7.1"] if name.endswith("sm_90")}


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_the_recorded_builds_are_good_too(version):
    """PyTorch 2.11 installs Triton 3.6.0, PyTorch 2.13 installs 3.7.1."""
    assert_good(RECORDED[version])
    assert RECORDED[version].keys() == RECORDED["3.7.1"].keys()
    assert {name.rpartition("_")[2] for name in RECORDED[version]} == {"80", "90", "100"}
