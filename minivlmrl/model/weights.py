"""Tensors by name <-> safetensors files: one file, or shards with an index."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minivlmrl.model.folder import read_index, write_json

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def weight_files(folder: Path) -> list[Path]:
    """The files with a folder's tensors: model.safetensors if it is there, as in transformers, else the index's shards.

    Raises:
        ValueError: there is neither, or the index is broken or names a file that is missing.
    """
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    if (folder / INDEX).is_file():
        files = [folder / name for name in read_index(folder / INDEX)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ValueError(f"{folder / INDEX}: {len(missing)} of its {len(files)} files missing, first {missing[0]}")
        return files
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder}: its weights are pytorch_model.bin, which can run code when it is opened; convert them to "
            "safetensors, for example with transformers: from_pretrained, then save_pretrained"
        )
    raise ValueError(f"{folder / ONE_FILE}: no such file; a Hugging Face folder has its weights there")


def tensor_names(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file, as they stand there (ValueError: see read_tensors)."""
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    try:
        with safe_open(file, framework="pt") as handle:
            return list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Go through a safetensors file, tensor by tensor.

    Returns:
        (name, tensor) pairs, names as on the hub. The tensor is a view of the file: copy it. The file is opened anew
        for each, since all that was touched of an open one counts as memory of this process.
    Raises:
        ValueError: the file is missing, not whole, or has a tensor of integers or of numbers under 16 bits.
    """
    for name in tensor_names(file):
        try:
            with safe_open(file, framework="pt") as handle:
                tensor = handle.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: tensor {name:.80} cannot be read ({error})") from error
        if tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"{file}: tensor {name:.80} is {tensor.dtype}; quantised checkpoints are not read, take the one in "
                "bfloat16 that this was made of"
            )
        yield hub_name(name), tensor


def hub_name(name: str) -> str:
    """transformers >= 4.52 calls the same modules model.visual.* and model.language_model.* in memory."""
    for prefix, ours in (("model.visual.", "visual."), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


def write_weights(folder: Path, weights: Mapping[str, Tensor], max_shard_size: int):
    """Write tensors into model.safetensors, or into shards with an index if they are larger than one may be.

    Args:
        weights: by name, on any device; they are brought to the CPU shard by shard.
        max_shard_size: bytes; only a tensor that is larger alone makes a larger file.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        if shards[-1] and size + tensor.nbytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    if len(shards) == 1:
        _write(folder / ONE_FILE, weights, shards[0])
        return
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, weights, names)
        weight_map |= dict.fromkeys(names, file)
    total_size = sum(tensor.nbytes for tensor in weights.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _write(file: Path, weights: Mapping[str, Tensor], names: list[str]):
    tensors = {name: weights[name].detach().cpu().contiguous() for name in names}
    save_file(tensors, file, metadata={"format": "pt"})  # transformers 4 refuses a file that does not say its format
