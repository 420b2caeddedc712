"""Check kernels compiled at real sizes, by the installed Triton, and recorded results of four Triton versions."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest
from links import ROOT

RECORDED = json.loads((ROOT / "tests" / "recorded" / "kernel_builds.json").read_text())
COLUMNS = RECORDED.pop("columns")
PLAIN = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "MINIVLMRL_KERNELS")}


def compiled(*options):
    """Run the script in a process that compiles instead of interpreting, and return its output."""
    pytest.importorskip("triton")
    command = [sys.executable, ROOT / "benchmarks" / "kernels_aot.py", *options]
    result = subprocess.run(command, cwd=ROOT, env=PLAIN, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def assert_good(builds):
    """Check properties of every version: no lost registers, no spills, wide accesses, matrix products, short loops."""
    for name, numbers in builds.items():
        row = dict(zip(COLUMNS, numbers, strict=True))
        assert row["unwritten"] == 0, f"{name}: an instruction reads a register that nothing has written"
        assert row["spills"] <= 2, name  # Triton 3.8.0 stores and loads one register in the widest kernel for sm_80
        assert row["wide"] > 0, f"{name}: no access of 16 bytes"
        if name.startswith(("window_attention", "decode_attention")) and "joined" not in name:
            assert row["matrix"] > 0, f"{name}: no matrix instruction"
        if name.startswith("log-softmax forward"):
            assert row["instructions"] <= 10 and row["barriers"] == 0, name


@pytest.mark.slow
def test_the_installed_compiler_builds_good_kernels(tmp_path):
    """The kernels are compiled for an H100."""
    compiled("--arch", "90", "--json", str(tmp_path / "numbers.json"))
    recorded = json.loads((tmp_path / "numbers.json").read_text())
    assert recorded.pop("columns") == COLUMNS
    [builds] = recorded.values()
    assert_good(builds)
    assert builds.keys() == {name for name in RECORDED["3.7.1"] if name.endswith("sm_90")}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["86", "89", "120"])
def test_kernels_fit_consumer_cards(arch, tmp_path):
    """No kernel loses or spills a register, or needs more shared memory than a 3090, 4090 or 5090 has."""
    compiled("--arch", arch, "--json", str(tmp_path / "numbers.json"))
    recorded = json.loads((tmp_path / "numbers.json").read_text())
    assert recorded.pop("columns") == COLUMNS
    [builds] = recorded.values()
    rows = {name: dict(zip(COLUMNS, numbers, strict=True)) for name, numbers in builds.items()}
    for column in ("unwritten", "spills"):
        assert {name: row[column] for name, row in rows.items() if row[column]} == {}, column


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_the_recorded_builds_are_good_too(version):
    """PyTorch 2.11 installs Triton 3.6.0, 2.13 installs 3.7.1, 2.14 installs 3.8.0, and 2.15 installs 3.9.0."""
    assert_good(RECORDED[version])
    assert RECORDED[version].keys() == RECORDED["3.7.1"].keys()
    assert {name.rpartition("_")[2] for name in RECORDED[version]} == {"80", "90", "100"}


def test_every_launch_chooses_the_fusion_of_multiply_and_add():
    """Without the option, results would change with the default of Triton, which is true up to 3.9 and then false."""
    launches = []
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and re.match(r"\w*kernel\[", ast.unparse(call.func)):
                launches.append(f"{path.name}:{call.lineno}")
                assert "enable_fp_fusion" in {option.arg for option in call.keywords}, launches[-1]
    assert len(launches) >= 10, launches
