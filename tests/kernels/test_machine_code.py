"""Check the machine code of all kernels, compiled at real sizes without a GPU, and the options of their launches.

ptxas 12.8, the assembler of Triton 3.6 and 3.7 for Hopper GPUs, lost a register of an earlier kernel for window
attention, whose results were 30 to 40 % wrong on an H100. WRONG and RIGHT are the products of this kernel in the
machine code of ptxas 12.8 and 12.9: 64 rows and 16 columns, with the address of the second matrix in uniform registers.
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

BEFORE = """
LDSM.16.M88.4 R56, [RZ]
LDSM.16.M88.4 R60, [RZ]
LDSM.16.M88.4 R64, [RZ]
LDSM.16.M88.4 R68, [RZ]
S2UR UR4, SR_CTAID.X
USGXT.U32 UR10, UR4, 0xe
UMOV UR11, 0xc0000010
"""
WRONG = """
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
RIGHT = """
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


def sass(*lines):
    """Return machine code as cuobjdump prints it; an instruction takes 16 bytes."""
    lines = "\n".join(lines).split("\n")
    return "".join(f"/*{16 * i:04x}*/ {line} ;\n" for i, line in enumerate(lines) if line)


def test_a_lost_uniform_register_is_found():
    assert unwritten_registers(sass(BEFORE, WRONG)) == {"UR14"}
    assert unwritten_registers(sass(BEFORE, RIGHT)) == set()
    assert unwritten_registers(sass(BEFORE, "ULDC.64 UR14, c[0x0][0x208]", WRONG)) == set()


@pytest.mark.parametrize(
    ("without", "lost"),
    [
        ("LDSM.16.M88.4 R56, [RZ]", {"R56"}),
        ("USGXT.U32 UR10, UR4, 0xe", {"UR10"}),
        ("UIADD3 UR10, UP0, UR10, 0x20, URZ", {"UP0"}),
        ("UIADD3.64 UR14, UR10, 0x20, URZ", {"UR14", "UR15"}),
    ],
)
def test_each_kind_of_register_can_be_lost(without, lost):
    code = sass(BEFORE, RIGHT)
    assert without in code
    assert unwritten_registers(code.replace(without, "NOP")) == lost
    assert unwritten_registers(sass("MOV R4, 0x1", "@!P3 STG.E [R4.64], RZ", "EXIT")) == {"P3", "R5"}


# text -> registers that it reads, registers that it writes
INSTRUCTIONS = {
    "CS2R R8, SRZ": ("", "R8 R9"),
    "@!P0 LDG.E.128 R8, desc[UR6][R2.64+0x10]": ("P0 R2 R3 UR6 UR7", "R8 R9 R10 R11"),
    "@P0 STG.E.128 desc[UR6][R2.64], R24": ("P0 R2 R3 UR6 UR7 R24", ""),
    "LDSM.16.M88.4 R20, [R19+UR4+0x200]": ("R19 UR4", "R20 R21 R22 R23"),
    "IADD3 R10, P5, R11.reuse, R8, RZ": ("R11 R8", "R10 P5"),
    "IADD3.X R5, ~R6, -R7, RZ, P0, !P1": ("R6 R7 P0 P1", "R5"),
    "IMAD.WIDE.U32 R4, R2, 0xa0, R8": ("R2 R8", "R4 R5"),
    "ISETP.GE.U32.AND P0, PT, R11, UR6, PT": ("R11 UR6", "P0"),
    "SHFL.BFLY PT, R4, R5, 0x1, 0x1f": ("R5", "R4"),
    "R2P PR, R4, 0x7f": ("R4", "P0 P1 P2 P3 P4 P5 P6"),
    "PRMT R5, RZ, 0x7610, R5": ("", "R5"),
    "HMMA.16816.F32.BF16 R36, R40, R28, RZ": ("R40 R28", "R36 R37 R38 R39"),
    "HGMMA.64x16x16.F32 R24, gdesc[UR4], RZ, !UPT": ("UR4 UR5 UR6 UR7", "R24 R25 R26 R27 R28 R29 R30 R31"),
    "LDTM.16dp32bit_t0_t15.x4 R8, tmem[UR4+0x10]": ("UR4", "R8 R9 R10 R11"),
    "UTCHMMA gdesc[UR46], gdesc[UR48], tmem[UR14], idesc[UR13], UP1": ("UR46 UR47 UR48 UR49 UR14 UR13 UP1", ""),
    "UIADD3.64 UR26, UPT, UPT, UR50, 0x4, URZ": ("UR50 UR51", "UR26 UR27"),
    "BRA.U !UP0, 0x210": ("UP0", ""),
}


@pytest.mark.parametrize("text", INSTRUCTIONS)
def test_registers_of_an_instruction(text):
    read, written = accesses(text)
    assert (read, written) == tuple(set(names.split()) for names in INSTRUCTIONS[text])


def test_a_path_through_jumps_and_calls_counts():
    """A loop, an out-of-line block and a function write registers that instructions at lower addresses read."""
    loop = sass("ULDC UR4, c[0x0][0x28]", "IADD3 R1, R2, R3, RZ", "MOV R2, UR4", "@P0 BRA 0x10")
    assert unwritten_registers(loop) == {"R3", "P0"}
    block = sass("BRA 0x20", "IADD3 R1, R2, R3, RZ", "MOV R2, 0x1", "BRA 0x10")
    assert unwritten_registers(block) == {"R3"}
    function = sass("CALL.REL.NOINC 0x30", "IADD3 R1, R2, R3, RZ", "EXIT", "MOV R2, 0x1", "RET.REL.NODEC R2 0x0")
    assert unwritten_registers(function) == {"R3"}


# shared memory in bytes that a program may use, by compute capability (CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability"); Triton refuses larger kernels when they are launched, not when they compile.
MAX_SHARED = {"75": 65536, "80": 166912, "86": 101376, "89": 101376, "90": 232448, "100": 232448, "120": 101376}
# A T4 (sm_75) has no matrix instructions for bfloat16, and is_before_ampere in kernels/backend.py excludes its kernels.
NUM_BUILDS = dict.fromkeys(MAX_SHARED, 46) | {"75": 10}


@pytest.fixture(scope="session")
def newest(tmp_path_factory):
    """Return a folder with the newest wheel of Triton, which may be newer than the one in constraints.txt."""
    folder = tmp_path_factory.mktemp("triton")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, "triton"]
    subprocess.run(command, check=True)
    return folder


def compile_kernels(arch, folder=None):
    """Compile all kernels with the installed Triton or with one in a folder; return its version and the builds."""
    # kernels are compiled in a separate process, because the tests run Triton's interpreter
    compiling = {name: x for name, x in os.environ.items() if name not in ("TRITON_INTERPRET", "MINIVLMRL_KERNELS")}
    compiling["PYTHONPATH"] = os.pathsep.join(map(str, [folder, ROOT] if folder else [ROOT]))
    command = [sys.executable, ROOT / "tests" / "helpers" / "kernel_builds.py", arch]
    printed = json.loads(subprocess.run(command, env=compiling, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return printed["triton"], printed["builds"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", MAX_SHARED)
def test_the_newest_compiler_loses_no_register(arch, newest):
    """The newest Triton has another assembler than the installed one."""
    version, builds = compile_kernels(arch, newest)
    assert newest.joinpath(f"triton-{version}.dist-info").is_dir()
    assert {name: row["unwritten"] for name, row in builds.items() if row["unwritten"]} == {}
    assert len(builds) == NUM_BUILDS[arch]


@pytest.mark.slow
@pytest.mark.parametrize("arch", MAX_SHARED)
def test_the_installed_compiler_builds_good_kernels(arch):
    pytest.importorskip("triton")
    _, builds = compile_kernels(arch)
    for name, row in builds.items():
        assert row["unwritten"] == [], f"{name}: the kernel reads registers that it never writes"
        assert row["spills"] <= 2, name  # Triton 3.8.0 stores and loads one register in the widest kernel for sm_80
        assert row["shared"] <= MAX_SHARED[arch], name
        assert row["wide"] > 0, f"{name}: no access of 16 bytes"
        if name.startswith(("window_attention", "decode_attention")) and "joined" not in name:
            assert row["matrix"] > 0, f"{name}: no matrix instruction"
    assert len(builds) == NUM_BUILDS[arch]


def test_every_launch_chooses_the_fusion_of_multiply_and_add():
    """Triton's default of enable_fp_fusion is true up to 3.9 and false afterwards, which would change results."""
    launches = []
    for path in sorted((ROOT / "kernels").glob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and re.match(r"\w*kernel\[", ast.unparse(call.func)):
                launches.append(f"{path.name}:{call.lineno}")
                assert "enable_fp_fusion" in {option.arg for option in call.keywords}, launches[-1]
    assert len(launches) >= 6, launches
