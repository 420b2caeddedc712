"""Compile every kernel at its real sizes, ahead of time and without a GPU, and show what the compiler made of it.

python -m minivlmrl kernels                   # A100, H100/H200 and B200: sm_80, sm_90, sm_100; about a minute
python -m minivlmrl kernels --arch 90 --only "log-softmax forward"
python -m minivlmrl kernels --json FILE       # and the figures
python -m minivlmrl kernels --arch gfx942     # AMD's MI300: registers, spills and shared memory alone

The compiler, the assembler and the disassembler are all inside the triton package. Figures of one build:

    registers      of a thread; 65,536 of a multiprocessor are shared by all its threads
    spills         loads and stores of registers that did not fit, in memory: 0 wanted
    shared         bytes of shared memory of a program
    matrix         matrix instructions (HMMA, HGMMA, UTCHMMA), where the kernel multiplies matrices
    wide           loads and stores of 16 bytes
    barriers       in the innermost loop
    instructions   of the innermost loop, for each element it handles: what bounds a kernel that memory does not

They hang on Triton's version: tests/recorded/kernel_budgets.json keeps them for two. For one that is not installed:

    pip install --target DIR --no-deps triton==3.6.0 'numpy<2.4'
    PYTHONPATH=DIR python -m minivlmrl kernels --record tests/recorded/kernel_budgets.json
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from minivlmrl.kernels import backend as installed
from minivlmrl.kernels import selective_log_softmax, window_attention
from minivlmrl.kernels.backend import Build, triton

BUILDS = [*selective_log_softmax.BUILDS, *window_attention.BUILDS]
ARCHITECTURES = ("80", "90", "100")
AMD_NOTES = ("vgpr_count", "vgpr_spill_count")
COLUMNS = ("registers", "spills", "shared", "matrix", "wide", "barriers", "instructions")


def main(arguments: list[str]) -> int:
    """Returns the exit status: 2, and a line on stderr, where nothing can be compiled."""
    parser = argparse.ArgumentParser(prog="python -m minivlmrl kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, help="compute capabilities times ten, or gfx...")
    parser.add_argument("--only", default="", help="builds whose name begins so")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--record", type=Path, help="put the figures into this file, under the version of Triton")
    options = parser.parse_args(arguments)
    if not installed.INSTALLED or installed.INTERPRETED:
        print("compiling needs Triton (pip install triton) and no TRITON_INTERPRET", file=sys.stderr)
        return 2
    print(f"Triton {triton.__version__}\n{'':44} {'arch':>6}" + "".join(f" {name:>12}" for name in COLUMNS))
    figures = {}
    for build in BUILDS:
        for arch in options.arch:
            if build.name.startswith(options.only):
                gfx = arch.startswith("gfx")
                row = inspect_amd(build, arch) if gfx else inspect(build, arch)
                figures[f"{build.name}, {arch if gfx else 'sm_' + arch}"] = row
                cells = ("" if row.get(name) is None else row[name] for name in COLUMNS)
                print(f"{build.name:44} {arch:>6}" + "".join(f" {cell:>12}" for cell in cells), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"triton": triton.__version__, "builds": figures}, indent=1) + "\n")
    if options.record:
        known = json.loads(options.record.read_text()) if options.record.exists() else {}
        known[triton.__version__] = known.get(triton.__version__, {}) | figures
        options.record.write_text(json.dumps(known, indent=1) + "\n")
    return 0


def inspect(build: Build, arch: str) -> dict[str, int | float | None]:
    """Compile for one architecture and read the figures off the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        compiled = compile_ahead(build, "cuda", int(arch), 32)
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = disassemble("--dump-resource-usage", file.name)
        code = instructions(disassemble("--dump-sass", file.name))
    opcodes = [text.removeprefix("@").split()[1 if text.startswith("@") else 0] for _, text in code]
    loop = innermost_loop(code)
    turn = [op for (address, _), op in zip(code, opcodes, strict=True) if address in loop and op != "NOP"]
    per_element = len(turn) * 32 * build.num_warps / build.elements if build.elements else None
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": sum(op.startswith(("LDL", "STL")) for op in opcodes),
        "shared": compiled.metadata.shared,
        "matrix": sum(op.startswith(("HMMA", "HGMMA", "UTCHMMA", "IMMA")) for op in opcodes),
        "wide": sum(op.startswith(("LDG", "STG", "LDGSTS", "UBLKCP")) and ".128" in op for op in opcodes),
        "barriers": sum(op.startswith("BAR") for op in turn),
        "instructions": per_element and round(per_element, 2),
    }


def inspect_amd(build: Build, arch: str) -> dict[str, int]:
    """The same of AMD's compiler, which notes its figures in the assembly; nothing of ROCm has to be installed."""
    compiled = compile_ahead(build, "hip", arch, 64)
    registers, spills = (re.search(rf"\.{n}:\s+(\d+)", compiled.asm["amdgcn"])[1] for n in AMD_NOTES)
    return {"registers": int(registers), "spills": int(spills), "shared": compiled.metadata.shared}


def compile_ahead(build: Build, backend: str, arch: int | str, warp_size: int):
    """The kernel, compiled for one architecture."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    parameters = build.kernel.arg_names
    signature = {name: build.signature.get(name, "constexpr") for name in parameters}
    aligned = [
        name
        for name, kind in build.signature.items()
        if (kind[0] == "*" or kind == "i32") and name not in build.unaligned
    ]
    attributes = {(parameters.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=build.constexprs, attrs=attributes)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    return triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=options)


def disassemble(flag: str, cubin: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, flag, cubin], capture_output=True, text=True, check=True).stdout


def instructions(sass: str) -> list[tuple[int, str]]:
    """(address, text) of each instruction."""
    return [(int(a, 16), text.strip()) for a, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^/;]+);", sass)]


def innermost_loop(code: list[tuple[int, str]]) -> range:
    """Addresses of the longest loop that holds no other: from the target of a jump back to the jump."""
    jumps = [(a, re.search(r"BRA\S*\s.*?(0x[0-9a-f]+)", text)) for a, text in code]
    loops = [range(int(target[1], 16), a + 1) for a, target in jumps if target and int(target[1], 16) < a]
    inner = [one for one in loops if not any(other != one and other[0] in one and other[-1] in one for other in loops)]
    return max(inner, key=len, default=range(0))
