"""Read, write and atomically replace checkpoint folders."""

import errno
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minivlmrl.errors import UserError
from minivlmrl.json_files import read_json

SHARD = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD_FILE = "score.safetensors"  # value head weights, in the same folder as the backbone
ADAPTER_CONFIG = "adapter/adapter_config.json"
RUN_CONFIG = "config.yaml"  # all run options, saved in output_dir
# generation options, saved with the weights
INFERENCE_CONFIG = "minivlmrl.yaml"
CARD = "README.md"  # model card
CARD_MARK = "<!-- Written by minivlmrl, and again when weights are saved, unless you delete this line. -->\n"


def _what_to_do(folder: Path) -> str:
    if (folder / "checkpoint" / "config.json").is_file():
        return "It is the folder of a run; use the folder checkpoint inside it"
    if any(folder.glob("adapter_*")):
        return "It is an adapter; set model.path to the base model and adapter.path to this folder"
    if inner := next((file.parent for file in sorted(folder.glob("*/config.json"))), None):
        return f"It contains a model folder; use {inner}"
    return "Download the folder again. It needs config.json and .safetensors files; .gguf and .bin files cannot be read"


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files in a folder: model.safetensors or, if there is none, all shards.

    Raises:
        UserError: no safetensors files, or a missing shard.
    """
    single_file = folder / ONE_FILE
    index = folder / INDEX
    if single_file.is_file():
        return [single_file]
    if not index.is_file():
        raise UserError(f"{single_file} does not exist. {_what_to_do(folder)}.")
    weight_map = read_json(index).get("weight_map")
    shards = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    if not shards or not all(map(SHARD.fullmatch, shards)):
        raise UserError(
            f"{index} must have a weight_map that maps tensor names to .safetensors files in the "
            "same folder. Download the folder again."
        )
    files = [folder / file for file in sorted(shards)]
    for file in files:
        if not file.is_file():
            raise UserError(f"{index} lists {file.name}, but the folder lacks it. Download the folder again.")
    return files


def check_model_folder(folder: Path):
    """Raise UserError for a folder without a model, with advice for run and adapter folders."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json. {_what_to_do(folder)}.")


def save_tensors(tensors: dict[str, Tensor], path: Path):
    """Write a safetensors file with default permissions; save_file would set 0600."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})  # transformers 4 requires the metadata key `format`
    except SafetensorError as error:  # for example, the disk is full
        raise OSError(f"{path} was not written ({error})") from error
    path.chmod(mode)


def digest(parts: Iterable) -> str:
    """Hash strings, buffers and file contents with BLAKE2b; return 128 hex digits."""
    total = hashlib.blake2b()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: total)
        else:
            total.update(part.encode() if isinstance(part, str) else part)
    return total.hexdigest()


def file_to_write(path: str | Path) -> Path:
    """Return the output file given as --out, and create its folder.

    Raises:
        UserError: the path is a folder.
    """
    file = Path(path)
    if file.is_dir():
        raise UserError(f"--out is {file}, which is a folder; add the name of a file")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def file_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; raise UserError if it is a link to a file outside."""
    path = folder / name
    target = path.resolve()
    if not target.is_relative_to(folder.resolve()):
        raise UserError(f"{path} is a link to {target}, outside its folder. Replace the link with a copy of the file.")
    return path


def file_stamps(*folders: str | Path) -> dict[Path, tuple[int, ...]]:
    """Return {path: (inode, mtime, size)} for JSON and safetensors files, to detect replaced files."""
    stamps = {}
    for folder in folders:
        for path in Path(folder).glob("*.*"):
            if path.suffix in (".json", ".safetensors"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    stamps[path] = status.st_ino, status.st_mtime_ns, status.st_size
    return stamps


@contextmanager
def unchanged(*folders: str | Path) -> Iterator[None]:
    """Raise UserError if files are replaced during the `with` block."""
    since = file_stamps(*folders)
    try:
        yield
    finally:
        if file_stamps(*folders) != since:
            names = " or ".join(map(str, folders))
            raise UserError(
                f"{names} was replaced while it was read, for example by a run that saves its weights. Start again, or "
                "read a copy of the folder."
            )


@contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """Yield a new, empty folder, which replaces `folder` if the `with` block succeeds.

    Example: a new checkpoint is written to checkpoint.partial. At the end, `checkpoint` becomes checkpoint.replaced,
    and checkpoint.partial becomes `checkpoint`. If a crash leaves no `checkpoint`, checkpoint.replaced is loaded.

    Raises:
        UserError: the old folder contains files but no checkpoint, or is a link.
    """
    folder = Path(os.path.abspath(folder))
    if folder.is_symlink():
        raise UserError(
            f"{folder} is a link to {folder.resolve()}, which is not replaced. Remove the link, or choose "
            "another folder."
        )
    new = Path(f"{folder}.partial")
    replaced = Path(f"{folder}.replaced")
    is_empty = folder.is_dir() and not any(folder.iterdir())
    is_checkpoint = any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    if folder.exists() and not is_checkpoint and not is_empty:
        raise UserError(
            f"{folder} has no config.json, so it is not a checkpoint and is not overwritten. Choose another folder."
        )
    try:
        remove_folder(new)
        new.mkdir(parents=True)
        yield new
        for path in (*new.rglob("*"), new):  # flush files to disk before the folder is renamed
            flush_file(path)
        if folder.exists():
            remove_folder(replaced)
            folder.rename(replaced)
        new.rename(folder)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)  # delete incomplete files, because the disk may be full
        if replaced.is_dir() and not folder.exists():
            replaced.rename(folder)
        if isinstance(error, OSError):
            raise OSError(f"{folder} was not saved ({error}). Its earlier content is unchanged.") from error
        raise
    flush_file(folder.parent)
    remove_folder(replaced)


def remove_folder(folder: Path):
    """Delete a folder, or print why this failed; for a link, delete only the link."""
    try:
        if folder.is_symlink():
            folder.unlink()
        elif folder.is_dir():
            shutil.rmtree(folder)
    except OSError as error:
        print(f"{folder} could not be deleted ({error}); delete it by hand", file=sys.stderr, flush=True)


def flush_file(path: Path):
    """Flush a file or folder to disk, to survive a machine crash."""
    is_folder = path.is_dir()
    if is_folder and not hasattr(os, "O_DIRECTORY"):
        return  # Windows cannot open a folder
    # open for writing: Windows cannot flush read-only files
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        # FUSE and CIFS cannot flush folders
        if not is_folder or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)
