"""Check machine code: kernels compiled at real sizes, and lost registers.

A lost register is one that nothing has written. The machine code below was made by ptxas 12.8 and 12.9 from one
kernel, the window attention forward pass in version 0.4.0 with head dimension 80, compiled for sm_90 by Triton 3.6.0
and 3.8.0. It contains the kernel's four products with 64 rows and 16 columns, with the second matrix's address in
uniform registers. On an H100, the first kernel had a 40 % error.
"""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

from tests.helpers.links import ROOT
from tests.helpers.machine_code import accesses, unwritten_registers

# shared memory in bytes that a program may use, by compute capability (CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability"); Triton refuses larger kernels when they are launched, not when they compile.
# A T4 (sm_75) is missing, because CAPABILITY in kernels/backend.py excludes its kernels.
MAX_SHARED = {"80": 166912, "86": 101376, "89": 101376, "90": 232448, "100": 232448, "120": 101376}


@pytest.mark.slow
@pytest.mark.parametrize("arch", MAX_SHARED)
def test_the_installed_compiler_builds_good_kernels(arch):
    """No kernel loses a register, spills or needs more shared memory than its card has; each moves 16 bytes at once."""
    pytest.importorskip("triton")
    # in a process of its own, because the tests run Triton's interpreter
    compiling = {name: x for name, x in os.environ.items() if name not in ("TRITON_INTERPRET", "MINIVLMRL_KERNELS")}
    command = [sys.executable, ROOT / "tests" / "helpers" / "kernel_builds.py", arch]
    builds = json.loads(subprocess.run(command, env=compiling, check=True, stdout=subprocess.PIPE, text=True).stdout)
    for name, row in builds.items():
        assert row["unwritten"] == 0, f"{name}: an instruction reads a register that nothing has written"
        assert row["spills"] <= 2, name  # Triton 3.8.0 stores and loads one register in the widest kernel for sm_80
        assert row["shared"] <= MAX_SHARED[arch], name
        assert row["wide"] > 0, f"{name}: no access of 16 bytes"
        if name.startswith(("window_attention", "decode_attention")) and "joined" not in name:
            assert row["matrix"] > 0, f"{name}: no matrix instruction"
    assert len(builds) > 40


def test_every_launch_chooses_the_fusion_of_multiply_and_add():
    """Without the option, results would change with Triton's default, which is true up to 3.9 and then false."""
    launches = []
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and re.match(r"\w*kernel\[", ast.unparse(call.func)):
                launches.append(f"{path.name}:{call.lineno}")
                assert "enable_fp_fusion" in {option.arg for option in call.keywords}, launches[-1]
    assert len(launches) >= 6, launches


BEFORE = """
LDSM.16.M88.4 R56, [RZ]
LDSM.16.M88.4 R60, [RZ]
LDSM.16.M88.4 R64, [RZ]
LDSM.16.M88.4 R68, [RZ]
S2UR UR4, SR_CTAID.X
USGXT.U32 UR10, UR4, 0xe
UMOV UR11, 0xc0000010
"""
PTXAS_12_8 = """
UIADD3 UR4, UP0, UR14, 0x20, URZ
WARPGROUP.ARRIVE
HGMMA.64x16x16.F32.BF16 R24, R68, gdesc[UR8].tnspB, RZ, !UPT
UIADD3.X UR5, UR14, -0x3ffffff0, URZ, UP0, !UPT
UMOV UR6, UR4
UMOV UR7, UR5
HGMMA.64x16x16.F32.BF16 R24, R64, gdesc[UR4].tnspB, R24
UIADD3.64 UR10, UR6, 0x20, URZ
UIADD3.64 UR6, UR6, 0x40, URZ
HGMMA.64x16x16.F32.BF16 R24, R56, gdesc[UR8].tnspB, R24
HGMMA.64x16x16.F32.BF16 R24, R60, gdesc[UR4].tnspB, R24, gsb0
"""
PTXAS_12_9 = """
WARPGROUP.ARRIVE
HGMMA.64x16x16.F32.BF16 R24, R68, gdesc[UR8].tnspB, RZ, !UPT
UIADD3 UR10, UP0, UR10, 0x20, URZ
UIADD3.X UR11, UR4, -0x3ffffff0, URZ, UP0, !UPT
UIADD3.64 UR14, UR10, 0x20, URZ
HGMMA.64x16x16.F32.BF16 R24, R64, gdesc[UR8].tnspB, R24
UIADD3.64 UR10, UR10, 0x40, URZ
HGMMA.64x16x16.F32.BF16 R24, R60, gdesc[UR12].tnspB, R24
HGMMA.64x16x16.F32.BF16 R24, R56, gdesc[UR8].tnspB, R24, gsb0
"""


def code(*pieces):
    """Return (address, text) for each line; an instruction takes 16 bytes."""
    return [(16 * i, line) for i, line in enumerate("\n".join(pieces).split("\n")) if line]


def test_a_lost_uniform_register_is_found():
    assert unwritten_registers(code(BEFORE, PTXAS_12_8)) == {"UR14"}
    assert unwritten_registers(code(BEFORE, PTXAS_12_9)) == set()
    assert unwritten_registers(code(BEFORE, "ULDC.64 UR14, c[0x0][0x208]", PTXAS_12_8)) == set()


def test_each_kind_of_register_can_be_lost():
    right = code(BEFORE, PTXAS_12_9)
    lost = {}
    for i, (_, text) in enumerate(right):
        lost[text] = unwritten_registers(right[:i] + right[i + 1 :])
    assert lost["LDSM.16.M88.4 R56, [RZ]"] == {"R56"}
    assert lost["USGXT.U32 UR10, UR4, 0xe"] == {"UR10"}
    assert lost["UIADD3 UR10, UP0, UR10, 0x20, URZ"] == {"UP0"}
    assert lost["UIADD3.64 UR14, UR10, 0x20, URZ"] == {"UR14", "UR15"}
    assert unwritten_registers(code("MOV R4, 0x1", "@!P3 STG.E [R4.64], RZ", "EXIT")) == {"P3", "R5"}


# text -> registers that it reads, registers that it writes
INSTRUCTIONS = {
    "LDC R1, c[0x0][0x28]": ("", "R1"),
    "CS2R R8, SRZ": ("", "R8 R9"),
    "@!P0 LDG.E.128 R8, desc[UR6][R2.64+0x10]": ("P0 R2 R3 UR6 UR7", "R8 R9 R10 R11"),
    "@P0 STG.E.128 desc[UR6][R2.64], R24": ("P0 R2 R3 UR6 UR7 R24", ""),
    "LDGSTS.E.BYPASS.128 [R2+0x80], desc[UR6][R6.64], P1": ("R2 UR6 UR7 R6 R7 P1", ""),
    "LDSM.16.M88.4 R20, [R19+UR4+0x200]": ("R19 UR4", "R20 R21 R22 R23"),
    "IADD3 R10, P5, R11.reuse, R8, RZ": ("R11 R8", "R10 P5"),
    "IADD3.X R5, ~R6, -R7, RZ, P0, !P1": ("R6 R7 P0 P1", "R5"),
    "IMAD.WIDE.U32 R4, R2, 0xa0, R8": ("R2 R8", "R4 R5"),
    "ISETP.GE.U32.AND P0, PT, R11, UR6, PT": ("R11 UR6", "P0"),
    "SHFL.BFLY PT, R4, R5, 0x1, 0x1f": ("R5", "R4"),
    "SEL R4, R5, RZ, !P2": ("R5 P2", "R4"),
    "REDUX UR7, R2": ("R2", "UR7"),
    "R2P PR, R4, 0x7f": ("R4", "P0 P1 P2 P3 P4 P5 P6"),
    "PRMT R5, RZ, 0x7610, R5": ("", "R5"),
    "HMMA.16816.F32.BF16 R36, R40, R28, RZ": ("R40 R28", "R36 R37 R38 R39"),
    "HGMMA.64x16x16.F32 R24, gdesc[UR4], RZ, !UPT": ("UR4 UR5 UR6 UR7", "R24 R25 R26 R27 R28 R29 R30 R31"),
    "FADD2 R56, R60.F32x2.HI_LO, R58.F32": ("R60 R58", "R56 R57"),
    "LDTM.16dp32bit_t0_t15.x4 R8, tmem[UR4+0x10]": ("UR4", "R8 R9 R10 R11"),
    "UTCHMMA gdesc[UR46], gdesc[UR48], tmem[UR14], tmem[UR12], idesc[UR13], UP1": (
        "UR46 UR47 UR48 UR49 UR14 UR12 UR13 UP1", "",
    ),
    "UIADD3.64 UR26, UPT, UPT, UR50, 0x4, URZ": ("UR50 UR51", "UR26 UR27"),
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x8], R3": ("UR4 R3", "P0"),
    "BRA.U !UP0, 0x210": ("UP0", ""),
}  # fmt: skip


@pytest.mark.parametrize("text", INSTRUCTIONS)
def test_registers_of_an_instruction(text):
    read, written = accesses(text)
    assert (read, written) == tuple(set(names.split()) for names in INSTRUCTIONS[text])


def test_a_path_through_jumps_and_calls_counts():
    """A loop, an out-of-line block and a function write registers that instructions at lower addresses read."""
    loop = code("ULDC UR4, c[0x0][0x28]", "IADD3 R1, R2, R3, RZ", "MOV R2, UR4", "@P0 BRA 0x10")
    assert unwritten_registers(loop) == {"R3", "P0"}
    block = code("BRA 0x20", "IADD3 R1, R2, R3, RZ", "MOV R2, 0x1", "BRA 0x10")
    assert unwritten_registers(block) == {"R3"}
    function = code("CALL.REL.NOINC 0x30", "IADD3 R1, R2, R3, RZ", "EXIT", "MOV R2, 0x1", "RET.REL.NODEC R2 0x0")
    assert unwritten_registers(function) == {"R3"}
