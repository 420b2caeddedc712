"""Read and write state tensors as safetensors files, because pickle files could run code.

Each rank writes the tensor rows that it holds. To load a state, each rank searches all files for its rows, so a
run may resume on a different number of ranks. Example: rows 128 to 255 of policy.lm_head.weight have the key
"128:policy.lm_head.weight".
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import is_part, shard_rows
from minivlmrl.errors import require
from minivlmrl.files import flush_file, save_tensors
from minivlmrl.model.checkpoint import check_finite

BLOCK = 2**16  # block size in bytes, for checksums
FILE_SIZE = 2**30  # approximate state file size, in bytes


def sampled_blocks(files: list[Path]) -> Iterator[bytes]:
    """Yield the contents of files in blocks, for a hash; from a file above 64 MiB, only 1,024 evenly spaced blocks.

    1,024 blocks are enough to tell two models apart, because training changes weights in every block.
    """
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as handle:
            for start in range(0, size, max(BLOCK, size // 1024)):
                handle.seek(start)
                yield handle.read(BLOCK)


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the tensor rows on this rank, and the index of the first row."""
    if not is_part(tensor):
        return tensor.detach().reshape(tensor.shape or (1,)), 0
    rows = shard_rows(tensor.device_mesh, len(tensor))
    return tensor.to_local().detach(), rows.start


def writes(tensor: Tensor, number: int, world: World) -> bool:
    """Return True if this rank writes the tensor; only one rank writes replicated rows."""
    if is_part(tensor):
        mesh = tensor.device_mesh
        in_first_replica = mesh.ndim == 1 or mesh.get_local_rank("replicate") == 0
        return len(tensor.to_local()) > 0 and in_first_replica
    return number % world.size == world.rank  # divide replicated tensors among the ranks


def write_tensors(folder: Path, tensors: dict[str, Tensor], world: World) -> list[str]:
    """Write this rank's tensors to files of about 1 GiB; return the file names."""
    names = [name for i, name in enumerate(tensors) if writes(tensors[name], i, world)]
    files = []
    content = {}
    for name in names:
        rows, first = local_rows(tensors[name])
        check_finite(name, rows, folder)
        content[f"{first}:{name}"] = rows.cpu().contiguous()
        if sum(part.nbytes for part in content.values()) >= FILE_SIZE or name == names[-1]:
            file = f"{world.rank:04d}_{len(files):04d}.safetensors"
            save_tensors(content, folder / file)
            flush_file(folder / file)
            files.append(file)
            content = {}
    return files


def find_shards(folder: Path) -> dict[str, list[tuple[int, int, Path]]]:
    """Return {tensor name: [(first row, rows, file), ...]} for state files."""
    shards = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118
                first, name = key.split(":", 1)
                shards.setdefault(name, []).append((int(first), handle.get_slice(key).get_shape()[0], file))
    return shards


def read_rows(name: str, shards: list[tuple[int, int, Path]], start: int, end: int) -> Tensor:
    """Read tensor rows `start` to `end` (exclusive) from state files."""
    parts = []
    for first, num_rows, file in shards:
        low = max(start, first)
        high = min(end, first + num_rows)
        if low < high:
            # reopen the file for every tensor, because closing it frees the memory of pages already read
            with safe_open(file, framework="pt") as handle:
                parts.append(handle.get_slice(f"{first}:{name}")[low - first : high - first])
    return torch.cat(parts)


@torch.no_grad()
def read_into(tensor: Tensor, name: str, shards: list[tuple[int, int, Path]]):
    """Copy this rank's rows from a state into a tensor; raise UserError if shape or dtype differ."""
    saved_rows = sum(num_rows for _, num_rows, _ in shards)
    tensor_rows = len(tensor) if tensor.dim() else 1
    require(saved_rows == tensor_rows, f"the number of rows of {name}", saved_rows, str(tensor_rows))
    local, start = local_rows(tensor)
    if len(local):
        rows = read_rows(name, shards, start, start + len(local))
        saved = [rows.dtype, *rows.shape]
        expected = [local.dtype, *local.shape]
        require(saved == expected, name, saved, str(expected))
        local.copy_(rows)
