"""Compile every Triton kernel at its real sizes without a GPU, and count registers and instructions.

python benchmarks/kernels_aot.py                   # A100, H100/H200 and B200: sm_80, sm_90, sm_100; four minutes
python benchmarks/kernels_aot.py --arch 86 89 120  # 3090 and A10, 4090 and L4, 5090

The compiler, the assembler and the disassembler are part of the triton package. Columns:

    registers      registers per thread; the threads of a multiprocessor share 65,536
    spills         loads and stores for registers that did not fit; should be 0
    shared         shared memory per program, in bytes
    matrix         matrix instructions (HMMA, HGMMA, UTCHMMA)
    wide           loads and stores that move 16 bytes
    barriers       barriers in the innermost loop
    instructions   instructions in the innermost loop per element; they limit kernels that memory does not limit
    unwritten      registers that an instruction reads and that no instruction before it writes; should be 0, because
                   otherwise the assembler (ptxas) has lost a register, and the kernel is wrong

The counts depend on Triton's version; tests/recorded/kernel_builds.json has the counts for four versions. To record a
version that is not installed (its wheel is enough, without its version of PyTorch):

    pip install --target DIR --no-deps triton==3.6.0
    PYTHONPATH=DIR python benchmarks/kernels_aot.py --json tests/recorded/kernel_builds.json
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from machine_code import innermost_loop, instructions, opcode, unwritten_registers

from minivlmrl.kernels import backend as installed
from minivlmrl.kernels import decode_attention as decoding
from minivlmrl.kernels import nf4_unpack, rotary_cache, sample_blocks
from minivlmrl.kernels import selective_log_softmax as log_softmax
from minivlmrl.kernels import window_attention as windows

HALVES = ("bf16", "fp16")
DTYPES = (*HALVES, "fp32")
# tokens in the longest window, head_dim; Qwen2.5-VL has 16 heads with 80 columns, and windows with up to 64 tokens
WINDOWS = [(16, 80), (32, 80), *((64, head_dim) for head_dim in (16, 32, 40, 48, 64, 72, 80, 96, 112, 128))]
ARCHITECTURES = ("80", "90", "100")
# shared memory in bytes that a program may use, by compute capability (CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability"); Triton refuses larger kernels when they are launched, not when they compile.
# A T4 (sm_75) is excluded, because CAPABILITY in kernels/backend.py excludes its kernels: decode attention for head_dim
# 256 would need 69,696 bytes, but a program may use only 65,536.
MAX_SHARED = {"80": 166912, "86": 101376, "89": 101376, "90": 232448, "100": 232448, "120": 101376}
COLUMNS = ("registers", "spills", "shared", "matrix", "wide", "barriers", "instructions", "unwritten")


@dataclass(frozen=True)
class Build:
    """A kernel at one real size, which this script compiles.

    Args:
        name: unique name in the table and the JSON file.
        kernel: the @triton.jit function.
        signature: parameter -> Triton type ("*bf16", "*i64", "i32", "fp32") for all parameters except constexprs;
            pointers and i32 are assumed to be divisible by 16.
        constexprs: parameter -> value; None for a pointer that this build does not use.
        num_warps, num_stages, enable_fp_fusion: the values at launch.
        elements: logits that an iteration of the loop computes; if given, instructions are counted per logit.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 1
    enable_fp_fusion: bool = True
    elements: int | None = None


def same(kind: str, *names: str) -> dict[str, str]:
    """Return a signature in which all parameters have the same Triton type."""
    return dict.fromkeys(names, kind)


def log_softmax_builds() -> list[Build]:
    """Return builds for the log-softmax kernels, for whole rows and for linear_log_softmax's tiles."""
    numbers = same("i32", "stride", "width", "first") | {"k": "fp32", "ids": "*i64"}
    results = same("*fp32", "logps", "entropies", "tops", "totals")
    whole = {"parts": None, "FIRST": True, "LAST": True}
    middle = dict.fromkeys(results) | {"FIRST": False, "LAST": False}
    forward, forward_warps = log_softmax._score_kernel, log_softmax.FORWARD_WARPS
    backward, backward_warps = log_softmax._differentiate_kernel, log_softmax.BACKWARD_WARPS
    elements = log_softmax.STEPS.value * log_softmax.COLUMNS.value
    block = log_softmax.BLOCK.value
    builds = []
    for dtype in DTYPES:
        name = f"log-softmax forward {dtype}"
        given = numbers | {"logits": f"*{dtype}", "rows": "i32"}
        builds.append(Build(name, forward, given | results, whole, forward_warps, elements=elements))
        name = f"log-softmax forward, middle part {dtype}"
        given = given | {"parts": "*fp32"}
        builds.append(Build(name, forward, given, middle, forward_warps, elements=elements))
        name = f"log-softmax backward {dtype}"
        given = numbers | same(f"*{dtype}", "logits", "out") | {"out_stride": "i32"}
        given |= same("*fp32", "entropies", "tops", "totals", "grad_logps")
        without = {"grad_entropies": None}
        builds.append(Build(name, backward, given, without, backward_warps, elements=block))
        name = f"log-softmax backward with entropy {dtype}"
        given = given | {"grad_entropies": "*fp32"}
        builds.append(Build(name, backward, given, {}, backward_warps, elements=block))
    return builds


def window_builds(dtype: str, longest: int, head_dim: int) -> list[Build]:
    rows, columns = windows.block_sizes(longest, head_dim)
    sizes = {"H": 16, "D": head_dim, "ROWS": rows, "COLUMNS": columns}
    about = f"{dtype} {longest}x{head_dim}"
    given = same(f"*{dtype}", "q", "k", "v") | {"cu_seqlens": "*i32"}
    given |= same("i32", "q_row", "q_head", "k_row", "k_head", "v_row", "v_head")
    forward = given | {"out": f"*{dtype}"}
    backward = given | same(f"*{dtype}", "grad", "grad_q", "grad_k", "grad_v")
    return [
        Build(f"window_attention forward {about}", windows._forward_kernel, forward, sizes, rows // 16),
        Build(f"window_attention backward {about}", windows._backward_kernel, backward, sizes, rows // 16),
    ]


def decode_builds(dtype: str) -> list[Build]:
    """Return builds for the decoding kernels.

    The sizes are: 3B and 7B with 8 rows per prompt, a single row, Qwen3.5's wide heads, and narrow heads.
    """
    given = same(f"*{dtype}", "q", "k", "v", "prompt_bias", "own_k", "own_v", "own_bias") | same(
        "*fp32", "outs", "log_sums"
    )
    given |= same("i32", "own_bias_stride", "lines", "prompt_programs", "prompt_rows", "prompt_keys", "prompt_part")
    given |= same("i32", "own_keys", "own_part")
    builds = []
    narrow = [(2, 8, D, 64) for D in decoding.WARPS if D < 128]
    for K, heads, D, tile in ((2, 8, 128, 64), (4, 7, 128, 64), (2, 8, 128, 16), (2, 4, 256, 64), *narrow):
        sizes = {"K": K, "HEADS": heads, "D": D, "TILE": tile, "OWN_TILE": 16}
        name = f"decode_attention {dtype} {K * heads}/{K} heads of {D}, {tile} queries"
        warps = decoding.WARPS[D]
        builds.append(Build(name, decoding._parts_kernel, given, sizes, warps, decoding.STAGES))
    given = same("*fp32", "outs", "log_sums") | same("i32", "lines", "parts") | {"out": f"*{dtype}"}
    for D in decoding.WARPS:
        sizes = {"D": D, "PARTS": 2 * decoding.MAX_PARTS}
        builds.append(Build(f"decode_attention {dtype}, joined heads of {D}", decoding._join_kernel, given, sizes))
    return builds


def nf4_build(dtype: str) -> Build:
    given = same("*u8", "packed", "indices") | same("*fp32", "scales", "offset", "scale_table", "value_table")
    given["out"] = f"*{dtype}"
    given["size"] = "i32"
    sizes = {"BYTES": nf4_unpack.BYTES, "GROUP": nf4_unpack.GROUP}
    return Build(f"nf4 unpack {dtype}", nf4_unpack._kernel, given, sizes, enable_fp_fusion=False)


def decode_step_builds() -> list[Build]:
    """Return builds for the rotary embedding (3B, 7B and wide heads), and for sampling."""
    numbers = same("i32", "q_stride", "k_stride", "v_stride", "C") | {"newest": "*i64"}
    builds = []
    for dtype in ("bf16", "fp16", "fp32"):
        tensors = same(f"*{dtype}", "q", "k", "v", "cos", "sin", "rotated_q", "key_cache", "value_cache")
        for H, K, D in ((16, 2, 128), (28, 4, 128), (32, 8, 128), (16, 4, 256)):
            sizes = {"H": H, "K": K, "D": D, "H_ROUNDED": triton.next_power_of_2(H), "K_ROUNDED": K}
            name = f"rotary_cache {dtype} {H}/{K} heads of {D}"
            builds.append(Build(name, rotary_cache._kernel, numbers | tensors, sizes, enable_fp_fusion=False))
    given = same("*fp32", "logits", "tops", "sums") | same("i32", "stride", "width") | {"k": "fp32"}
    builds.append(Build("sample_blocks, top", sample_blocks._top_kernel, given, {}, sample_blocks.TOP_WARPS))
    given = given | {"totals": "*i64", "blocks": "i32"}
    builds.append(Build("sample_blocks, units", sample_blocks._units_kernel, given, {}))
    given = given | {"uniforms": "*fp64", "ids": "*i64", "logps": "*fp32"}
    builds.append(Build("sample_blocks, select", sample_blocks._select_kernel, given, {"BLOCKS": 256}))
    return builds


def all_builds() -> list[Build]:
    builds = log_softmax_builds()
    for dtype in HALVES:
        builds += decode_builds(dtype)
        for size in WINDOWS:
            builds += window_builds(dtype, *size)
    return [*builds, *map(nf4_build, DTYPES), *decode_step_builds()]


def main(arguments: list[str]) -> int:
    """Compile all kernels and print the table.

    Returns:
        The exit status: 1 if a kernel needs more shared memory than the card has, 2 if Triton cannot compile, else 0.
    """
    parser = argparse.ArgumentParser(prog="python benchmarks/kernels_aot.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch", nargs="+", default=ARCHITECTURES, choices=MAX_SHARED, help="compute capabilities times ten"
    )
    parser.add_argument("--json", type=Path, help="add the numbers to this file, under the version of Triton")
    options = parser.parse_args(arguments)
    if not installed.INSTALLED or installed.INTERPRETED:
        print("Compiling needs Triton (pip install triton) without TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    print(f"Triton {triton.__version__}\n{'':44} {'arch':>6}" + "".join(f" {name:>12}" for name in COLUMNS))
    rows = {}
    too_large = []
    for build in all_builds():
        for arch in options.arch:
            row = inspect(build, arch)
            if row["shared"] > MAX_SHARED[arch]:
                too_large.append(f"{build.name} on sm_{arch}: {row['shared']} of {MAX_SHARED[arch]} bytes")
            rows[f"{build.name}, sm_{arch}"] = [row[name] for name in COLUMNS]
            cells = ["" if row[name] is None else row[name] for name in COLUMNS]
            print(f"{build.name:44} {arch:>6}" + "".join(f" {cell:>12}" for cell in cells), flush=True)
    if options.json:
        recorded = json.loads(options.json.read_text()) if options.json.exists() else {"columns": COLUMNS}
        recorded.setdefault(triton.__version__, {}).update(rows)
        text = json.dumps(recorded, indent=0)
        options.json.write_text(re.sub(r"\[[^\]]*\]", lambda row: "".join(row[0].split()), text) + "\n")
    if too_large:
        print("\n".join(["These kernels need more shared memory than the card has:", *too_large]), file=sys.stderr)
    return 1 if too_large else 0


def inspect(build: Build, arch: str) -> dict[str, int | float | None]:
    """Compile a kernel for one NVIDIA architecture, and count registers and instructions in its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        compiled = compile_ahead(build, int(arch))
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = disassemble("--dump-resource-usage", file.name)
        code = instructions(disassemble("--dump-sass", file.name))
    opcodes = [opcode(text) for _, text in code]
    loop = innermost_loop(code)
    loop_opcodes = [op for (address, _), op in zip(code, opcodes, strict=True) if address in loop and op != "NOP"]
    per_element = None
    if build.elements:
        per_element = round(len(loop_opcodes) * 32 * build.num_warps / build.elements, 2)
    memory = [op for op in opcodes if op.startswith(("LDG", "STG", "LDGSTS", "UBLKCP"))]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": sum(op.startswith(("LDL", "STL")) for op in opcodes),
        "shared": compiled.metadata.shared,
        "matrix": sum(op.startswith(("HMMA", "HGMMA", "UTCHMMA", "IMMA")) for op in opcodes),
        "wide": sum(".128" in op for op in memory),
        "barriers": sum(op.startswith("BAR") for op in loop_opcodes),
        "instructions": per_element,
        "unwritten": len(unwritten_registers(code)),
    }


def compile_ahead(build: Build, arch: int):
    """Compile one kernel for one architecture."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    aligned = [name for name, kind in build.signature.items() if kind[0] == "*" or kind == "i32"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=build.constexprs, attrs=attributes)
    options = {name: getattr(build, name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def disassemble(flag: str, cubin: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, flag, cubin], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
