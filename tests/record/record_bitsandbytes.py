"""Records the tables of bitsandbytes and what it makes of numbers drawn from a seed.

    pip install --target /tmp/bitsandbytes --no-deps bitsandbytes==0.50.2
    PYTHONPATH=/tmp/bitsandbytes python tests/record/record_bitsandbytes.py tests/recorded/bitsandbytes_0.50.2.json

Indices are those of its path for float64, which takes the nearest number of a table, as its CUDA kernel does: its C++
code for float32 on a CPU looks them up coarsely, and is off by up to 3e-5 of a block's largest value.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

SHAPE = 96, 512


def numbers(signed: bool = True) -> Tensor:
    """Numbers of many sizes, the same on any processor, and so is the sum of their blocks' largest: it is exact."""
    generator = torch.Generator().manual_seed(0)
    values, share = 2 * torch.rand(SHAPE, generator=generator) - 1, torch.rand(SHAPE, generator=generator)
    for _ in range(6):  # randn and powers are rounded otherwise by other processors
        values = values * share
    values = torch.where(values.abs() > 0.01, (values * 2**13).round() / 2**13, values)
    return values if signed else values * values


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def recorded() -> dict:
    return json.loads((Path(__file__).parents[1] / "recorded" / "bitsandbytes_0.50.2.json").read_text())


def main(file: str):
    import bitsandbytes.functional as theirs

    found = {"nf4": theirs.get_4bit_type("nf4", device="cpu").tolist()}
    for name, signed in (("signed", True), ("unsigned", False)):
        code = theirs.create_dynamic_map(signed)
        indices, scales = torch.ops.bitsandbytes.quantize_blockwise(numbers(signed).double(), code, 256)
        found[name] = {"code": code.tolist(), "indices": digest(indices), "scales": digest(scales)}
    packed, state = theirs.quantize_4bit(numbers(), blocksize=64, quant_type="nf4")
    offset, code = state.absmax.mean(), theirs.create_dynamic_map(True)
    indices, scales = torch.ops.bitsandbytes.quantize_blockwise((state.absmax - offset).double(), code, 256)
    nested = theirs.QuantState(scales, code=code, blocksize=256, dtype=torch.float32)
    state = theirs.QuantState(indices, SHAPE, code=state.code, blocksize=64, quant_type="nf4", dtype=torch.float32)
    state.offset, state.state2, state.nested = offset, nested, True
    found["nf4 numbers"] = {
        "packed": digest(packed), "scale_indices": digest(indices), "scale_scales": digest(scales),
        "offset": offset.item(), "values": digest(theirs.dequantize_4bit(packed, state)),
    }  # fmt: skip
    Path(file).write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
