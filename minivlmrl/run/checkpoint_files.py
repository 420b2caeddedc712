"""The tensors of a state in safetensors files: unlike a pickle they cannot run code.

Each rank writes the rows that it holds, and any number of ranks reads the rows that each of them
needs. The tensor "128:policy.model.norm.weight" of a file has the rows from 128 on of
policy.model.norm.weight.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from minivlmrl.config.parsing import check_field
from minivlmrl.distributed.process_group import World
from minivlmrl.distributed.weights import is_part, shard_rows
from minivlmrl.files import flush_file, save_tensors
from minivlmrl.model.checkpoint import check_finite

BLOCK = 2**16  # bytes that `sampled_blocks` reads at once
FILE_SIZE = 2**30  # bytes of one file: as much of a GPU's state is in host memory at once


def sampled_blocks(files: list[Path]) -> Iterator[bytes]:
    """Read what tells other weights apart: all of a file up to 64 MiB, else 1,024 blocks of it.

    Another base, or one that was trained on, differs in all blocks; a few bytes are not seen.
    """
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as handle:
            for start in range(0, size, max(BLOCK, size // 1024)):
                handle.seek(start)
                yield handle.read(BLOCK)


def local_rows(tensor: Tensor) -> tuple[Tensor, int]:
    """What this rank holds of a tensor, as a view that has rows, and the index of the first."""
    if not is_part(tensor):
        return tensor.detach().reshape(tensor.shape or (1,)), 0
    rows = shard_rows(tensor.device_mesh, len(tensor))
    return tensor.to_local().detach(), rows.start


def writes(tensor: Tensor, number: int, world: World) -> bool:
    """Whether this rank writes its rows of the number-th tensor: every row is written once."""
    if is_part(tensor):
        mesh = tensor.device_mesh
        in_first_replica = mesh.ndim == 1 or mesh.get_local_rank("replicate") == 0
        return len(tensor.to_local()) > 0 and in_first_replica
    return number % world.size == world.rank


def write_tensors(folder: Path, tensors: dict[str, Tensor], world: World) -> list[str]:
    """Write this rank's part of tensors, every row once; return the names of its files."""
    names = [name for i, name in enumerate(tensors) if writes(tensors[name], i, world)]
    files = []
    content = {}
    for name in names:
        rows, first = local_rows(tensors[name])
        check_finite(name, rows, folder)
        content[f"{first}:{name}"] = rows.cpu().contiguous()
        is_full = sum(part.nbytes for part in content.values()) >= FILE_SIZE
        if is_full or name == names[-1]:
            file = f"{world.rank:04d}_{len(files):04d}.safetensors"
            save_tensors(content, folder / file)
            flush_file(folder / file)
            files.append(file)
            content = {}
    return files


def find_pieces(folder: Path) -> dict[str, list[tuple[int, int, Path]]]:
    """Name of a tensor -> (first row, number of rows, file) of its pieces; a number is one row.

    In the order of the rows, which is that of the ranks.
    """
    pieces = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118
                first, name = key.split(":", 1)
                rows = handle.get_slice(key).get_shape()[0]
                pieces.setdefault(name, []).append((int(first), rows, file))
    return pieces


def read_rows(name: str, pieces: list[tuple[int, int, Path]], start: int, end: int) -> Tensor:
    """Read the rows from `start` to `end` of a tensor."""
    parts = []
    for first, num_rows, file in pieces:
        low = max(start, first)
        high = min(end, first + num_rows)
        if low < high:
            # not kept open: all that was read would be in memory
            with safe_open(file, framework="pt") as handle:
                parts.append(handle.get_slice(f"{first}:{name}")[low - first : high - first])
    return torch.cat(parts)


@torch.no_grad()
def read_into(tensor: Tensor, name: str, pieces: list[tuple[int, int, Path]]):
    """Read this rank's rows of a tensor into it (ValueError: shape or dtype are others)."""
    saved_rows = sum(num_rows for _, num_rows, _ in pieces)
    tensor_rows = len(tensor) if tensor.dim() else 1
    check_field(saved_rows == tensor_rows, name, f"{saved_rows} rows", f"{tensor_rows} rows")
    local, start = local_rows(tensor)
    if len(local):
        rows = read_rows(name, pieces, start, start + len(local))
        saved = [rows.dtype, *rows.shape]
        expected = [local.dtype, *local.shape]
        check_field(saved == expected, name, saved, str(expected))
        local.copy_(rows)
