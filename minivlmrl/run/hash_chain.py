"""hashes.jsonl: what each step of a run computed, as hashes; audit/verify.py computes some again.

A line begins with the hash of the line before it. It names recipe, code and machine, and hashes
what the first rank had: rows (prompts and pictures), draws (ids of completions that were trained
on), rewards, and after the update all weights and the moments of the last parameter.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import minivlmrl.kernels
from minivlmrl.hub.folder import json_text
from minivlmrl.run.config import flat
from minivlmrl.run.state_files import local_rows
from minivlmrl.scale.sharding import reshard

HASHES = "hashes.jsonl"
COLUMNS = 1024  # of which a larger tensor has sums
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
UNSEEN = "output_dir", "resume", "num_threads"  # of a recipe


def text_hash(text: str | bytes) -> str:
    """Hash a text: 32 digits."""
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:32]


def process_hashes(config, world) -> dict[str, str]:
    """Say what all steps of a process share: recipe without paths, code, what decides rounding."""
    said = flat(asdict(config)).items()
    said = {k: v for k, v in said if k not in UNSEEN and not str(v).startswith("/")}
    folders = Path(__file__).parents[1], *map(Path, minivlmrl.kernels.__path__)
    files = [file.read_bytes() for path in folders for file in sorted(path.rglob("*.py"))]
    device = torch.backends.cpu.get_cpu_capability()
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    elif (cpus := Path("/proc/cpuinfo")).is_file():
        device += "".join(re.findall("model name.*(: .*)", cpus.read_text())[:1])
    numbers = f"threads {torch.get_num_threads()}, ranks {world.size}, torch {torch.__version__}"
    recipe, code = text_hash(json_text(said)), text_hash(b"".join(files))
    return {"recipe": recipe, "code": code, "machine": f"{device}, {numbers}"}


@torch.no_grad()
def step_hashes(algorithm, optimizer, step=None) -> dict[str, str]:
    """Hash what the first rank has after an optimizer step; without a Step weights and moments."""
    reshard(algorithm.trained)
    trained = [p for p in algorithm.trained.parameters() if p.requires_grad]
    moments = optimizer.state.get(trained[-1], {}).values() if trained else ()
    hashes = {"weights": tensor_hash(trained), "optimizer": tensor_hash(moments)}
    if step is None:
        return hashes
    groups = [batch.group for batch in step.micro_batches]
    prompts = [prompt for group in groups for prompt in group.prompts]
    seen = (x for p in prompts for x in (p.input_ids, p.image_grid_thw, p.pixel_values))
    hashes |= {"rows": tensor_hash(seen), "draws": tensor_hash(g.completion_ids for g in groups)}
    return hashes | {"rewards": tensor_hash([step.rollout.rewards] if step.rollout else [])}


def tensor_hash(tensors: Iterable[Tensor]) -> str:
    """Hash the bits and shapes of tensors, on any device.

    All bits count. Over 1,024 numbers of a tensor are added up as integers, in 1,024 columns, which
    takes as long as reading them. Who wants to can find others with the same sums: verify compares
    states byte by byte.
    """
    found = hashlib.sha256()
    for tensor in tensors:
        bits = local_rows(tensor)[0].contiguous().flatten()
        bits = bits.view(INTEGERS[bits.itemsize])
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        even = len(bits) // COLUMNS * COLUMNS
        if even > COLUMNS:
            found.update(bits[:even].view(-1, COLUMNS).sum(0, dtype=bits.dtype).cpu().numpy())
            bits = bits[even:]
        found.update(bits.cpu().numpy())
    return found.hexdigest()[:32]
