"""What the compiler makes of the kernels at their real sizes, with the installed Triton and as recorded for two."""

import json
import os
import subprocess
import sys

import pytest
from links import ROOT

RECORDED = json.loads((ROOT / "tests" / "recorded" / "kernel_budgets.json").read_text())
PLAIN = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "MINIVLMRL_KERNELS")}


def compiled(*options):
    """What the command prints, in a process that does not interpret."""
    pytest.importorskip("triton")
    command = [sys.executable, ROOT / "benchmarks" / "kernels_aot.py", *options]
    result = subprocess.run(command, cwd=ROOT, env=PLAIN, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def assert_good(builds):
    """The bars that hold for every version."""
    for name, row in builds.items():
        assert row["spills"] == 0, name
        assert row["wide"] > 0, f"{name}: no access of 16 bytes"
        if name.startswith(("window_attention", "decode_attention ")):
            assert row["matrix"] > 0, f"{name}: no matrix instruction"
        if name.startswith("log-softmax forward"):
            assert row["instructions"] <= 10 and row["barriers"] == 0, name


@pytest.mark.slow
def test_the_installed_compiler_reaches_the_bars_and_keeps_to_its_budgets(tmp_path):
    """For an H100. A tenth more registers than recorded may pass, and the recorded shared memory."""
    compiled("--arch", "90", "--json", str(tmp_path / "numbers.json"))
    [(version, builds)] = json.loads((tmp_path / "numbers.json").read_text()).items()
    assert_good(builds)
    if version not in RECORDED:
        pytest.skip(f"no budgets for Triton {version}: benchmarks/kernels_aot.py says how to record them")
    budgets = {name: budget for name, budget in RECORDED[version].items() if name.endswith("sm_90")}
    assert builds.keys() == budgets.keys()
    for name, budget in budgets.items():
        assert builds[name]["registers"] <= 1.1 * budget["registers"], name
        assert builds[name]["shared"] <= budget["shared"], name
        assert (builds[name]["instructions"] or 0) <= 1.1 * (budget["instructions"] or 0), name


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_what_was_recorded_reaches_the_bars_too(version):
    """3.6.0 is what PyTorch 2.11 brings, 3.7.1 what 2.13 does."""
    assert_good(RECORDED[version])
    assert RECORDED[version].keys() == RECORDED["3.7.1"].keys()
    assert {name.rpartition("_")[2] for name in RECORDED[version]} == {"80", "90", "100"}
