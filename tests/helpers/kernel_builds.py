"""Compile all Triton kernels at real sizes without a GPU, and print what their machine code needs, as JSON.

python tests/helpers/kernel_builds.py 90    # for sm_90: about a minute

Compiler, assembler and disassembler are in the triton package. Numbers per kernel:

    spills      loads and stores for registers that did not fit
    shared      shared memory per program, in bytes
    matrix      matrix instructions (HMMA, HGMMA, UTCHMMA)
    wide        loads and stores of 16 bytes
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from minivlmrl.kernels import decode_attention as decoding
from minivlmrl.kernels import nf4_unpack, selective_log_softmax, window_attention

DTYPES = ("bf16", "fp32")
# (longest window in tokens, head_dim); Qwen2.5-VL has 16 heads with 80 columns, windows up to 64 tokens
WINDOWS = [(16, 80), (32, 80), *((64, head_dim) for head_dim in (16, 32, 40, 48, 64, 72, 80, 96, 112, 128))]


@dataclass(frozen=True)
class Build:
    """A kernel at one real size, compiled with its launch options."""

    name: str
    kernel: Any  # a @triton.jit function
    signature: dict[str, str]  # {parameter: Triton type such as "*bf16"}; pointers and i32 are divisible by 16
    constexprs: dict[str, Any]  # None = unused pointer
    num_warps: int = 4
    num_stages: int = 1
    enable_fp_fusion: bool = True


def same(kind: str, *names: str) -> dict[str, str]:
    """Return a signature with one Triton type for all parameters."""
    return dict.fromkeys(names, kind)


def log_softmax_builds() -> list[Build]:
    """Return log-softmax builds, for whole rows and for the tiles in linear_log_softmax."""
    numbers = same("i32", "stride", "width", "first") | {"k": "fp32", "ids": "*i64"}
    results = same("*fp32", "logps", "entropies", "tops", "totals")
    whole = {"parts": None, "FIRST": True, "LAST": True}
    middle = dict.fromkeys(results) | {"FIRST": False, "LAST": False}
    forward, forward_warps = selective_log_softmax._score_kernel, selective_log_softmax.FORWARD_WARPS
    backward, backward_warps = selective_log_softmax._differentiate_kernel, selective_log_softmax.BACKWARD_WARPS
    builds = []
    for dtype in DTYPES:
        name = f"log-softmax forward {dtype}"
        given = numbers | {"logits": f"*{dtype}", "rows": "i32"}
        builds.append(Build(name, forward, given | results, whole, forward_warps))
        name = f"log-softmax forward, middle part {dtype}"
        given = given | {"parts": "*fp32"}
        builds.append(Build(name, forward, given, middle, forward_warps))
        name = f"log-softmax backward {dtype}"
        given = numbers | same(f"*{dtype}", "logits", "out") | {"out_stride": "i32"}
        given |= same("*fp32", "entropies", "tops", "totals", "grad_logps")
        builds.append(Build(name, backward, given, {"grad_entropies": None}, backward_warps))
        name = f"log-softmax backward with entropy {dtype}"
        given = given | {"grad_entropies": "*fp32"}
        builds.append(Build(name, backward, given, {}, backward_warps))
    return builds


def window_builds(dtype: str, longest: int, head_dim: int) -> list[Build]:
    rows, columns = window_attention.block_sizes(longest, head_dim)
    sizes = {"H": 16, "D": head_dim, "ROWS": rows, "COLUMNS": columns}
    about = f"{dtype} {longest}x{head_dim}"
    given = same(f"*{dtype}", "q", "k", "v") | {"cu_seqlens": "*i32"}
    given |= same("i32", "q_row", "q_head", "k_row", "k_head", "v_row", "v_head")
    forward = given | {"out": f"*{dtype}"}
    backward = given | same(f"*{dtype}", "grad", "grad_q", "grad_k", "grad_v")
    return [
        Build(f"window_attention forward {about}", window_attention._forward_kernel, forward, sizes, rows // 16),
        Build(f"window_attention backward {about}", window_attention._backward_kernel, backward, sizes, rows // 16),
    ]


def decode_builds(dtype: str) -> list[Build]:
    """Return decode attention builds: 3B and 7B with 8 rows per prompt, a single row, wide and narrow heads."""
    given = same(f"*{dtype}", "q", "k", "v", "prompt_bias", "own_k", "own_v", "own_bias")
    given |= same("*fp32", "outs", "log_sums")
    given |= same("i32", "own_bias_stride", "lines", "prompt_programs", "prompt_rows", "prompt_keys", "prompt_part")
    given |= same("i32", "own_keys", "own_part")
    builds = []
    narrow = [(2, 8, D, 64) for D in decoding.WARPS if D < 128]
    for K, heads, D, tile in ((2, 8, 128, 64), (4, 7, 128, 64), (2, 8, 128, 16), (2, 4, 256, 64), *narrow):
        sizes = {"K": K, "HEADS": heads, "D": D, "TILE": tile, "OWN_TILE": 16}
        name = f"decode_attention {dtype} {K * heads}/{K} heads of {D}, {tile} queries"
        builds.append(Build(name, decoding._parts_kernel, given, sizes, decoding.WARPS[D], decoding.STAGES))
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


def all_builds(arch: int) -> list[Build]:
    """Return all builds, below sm_80 only those without matrix products.

    Older GPUs have no bfloat16 matrix instructions, and the assembler takes over ten minutes.
    """
    builds = [*log_softmax_builds(), *map(nf4_build, DTYPES)]
    if arch < 80:
        return builds
    builds += decode_builds("bf16")
    for size in WINDOWS:
        builds += window_builds("bf16", *size)
    return builds


def inspect(build: Build, arch: int) -> dict[str, Any]:
    """Compile a kernel for an NVIDIA architecture, and count what its machine code needs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        compiled = compile_ahead(build, arch)
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = disassemble(file.name)
    # lines have an address, perhaps a predicate, and an instruction: /*0100*/ @P0 LDG.E.128 ...
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?([^\s;]+)", sass)
    memory = [op for op in opcodes if op.startswith(("LDG", "STG", "LDGSTS", "UBLKCP"))]
    return {
        "spills": sum(op.startswith(("LDL", "STL")) for op in opcodes),
        "shared": compiled.metadata.shared,
        "matrix": sum(op.startswith(("HMMA", "HGMMA", "UTCHMMA", "IMMA")) for op in opcodes),
        "wide": sum(".128" in op for op in memory),
    }


def compile_ahead(build: Build, arch: int):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    aligned = [name for name, kind in build.signature.items() if kind[0] == "*" or kind == "i32"]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=build.constexprs, attrs=attributes)
    options = {name: getattr(build, name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def disassemble(cubin: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, "--dump-sass", cubin], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    arch = int(sys.argv[1])
    rows = {build.name: inspect(build, arch) for build in all_builds(arch)}
    print(json.dumps({"triton": triton.__version__, "builds": rows}))
