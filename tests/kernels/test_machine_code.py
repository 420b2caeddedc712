"""Check the machine code of all kernels, compiled at real sizes without a GPU, and the options of their launches.

kernels/self_test.py compares the results of the kernels on the card that runs them.
"""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

from tests.helpers.links import ROOT

# shared memory in bytes that a program may use, by compute capability (CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability"); Triton refuses larger kernels when they are launched, not when they compile.
MAX_SHARED = {"75": 65536, "80": 166912, "86": 101376, "89": 101376, "90": 232448, "100": 232448, "120": 101376}
# A T4 (sm_75) has no matrix instructions for bfloat16, and is_before_ampere in kernels/backend.py excludes its kernels.


@pytest.mark.slow
@pytest.mark.parametrize("arch", MAX_SHARED)
def test_the_installed_compiler_builds_good_kernels(arch):
    pytest.importorskip("triton")
    # kernels are compiled in a separate process, because the tests run Triton's interpreter
    compiling = {name: x for name, x in os.environ.items() if name not in ("TRITON_INTERPRET", "MINIVLMRL_KERNELS")}
    compiling["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, ROOT / "tests" / "helpers" / "kernel_builds.py", arch]
    printed = subprocess.run(command, env=compiling, check=True, stdout=subprocess.PIPE, text=True).stdout
    builds = json.loads(printed)["builds"]
    for name, row in builds.items():
        assert row["spills"] <= 2, name  # Triton 3.8.0 stores and loads one register in the widest kernel for sm_80
        assert row["shared"] <= MAX_SHARED[arch], name
        assert row["wide"] > 0, f"{name}: no access of 16 bytes"
        if name.startswith(("window_attention", "decode_attention")) and "joined" not in name:
            assert row["matrix"] > 0, f"{name}: no matrix instruction"
    assert len(builds) == (dict.fromkeys(MAX_SHARED, 46) | {"75": 10})[arch]


def test_every_launch_chooses_the_fusion_of_multiply_and_add():
    """Triton's default of enable_fp_fusion is true up to 3.9 and false afterwards, which would change results."""
    launches = []
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and re.match(r"\w*kernel\[", ast.unparse(call.func)):
                launches.append(f"{path.name}:{call.lineno}")
                assert "enable_fp_fusion" in {option.arg for option in call.keywords}, launches[-1]
    assert len(launches) >= 6, launches
