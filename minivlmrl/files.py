"""The files of a checkpoint's folder: read, written, and replaced as a whole."""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minivlmrl.config.parsing import build, error_context, json_text, parse_json, read_json

SHARD = re.compile(r"[\w.-]{1,200}\.safetensors", re.ASCII)  # no path
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
RUN_CONFIG = "config.yaml"  # in the folder of a run: all options of the run
INFERENCE_CONFIG = "minivlmrl.yaml"  # beside weights: the options that change an answer


def weight_files(folder: Path) -> list[Path]:
    """List the files of tensors: model.safetensors if it is there (as transformers), or shards."""
    single_file = folder / ONE_FILE
    index = folder / INDEX
    if single_file.is_file():
        return [single_file]
    if not index.is_file():
        raise ValueError(
            f"{single_file}: no such file; convert pytorch_model.bin with transformers"
        )
    weight_map = read_json(index).get("weight_map")
    shards = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
    if not shards or not all(map(SHARD.fullmatch, shards)):
        raise ValueError(f"{index}: it needs a weight_map, from tensors to .safetensors files here")
    files = [folder / file for file in sorted(shards)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{index}: {len(missing)} of {len(files)} files missing: {missing[0]}")
    return files


def read_lines(path: Path, form: type) -> list[dict]:
    """Read the whole lines of a JSON lines file, none if it is missing (ValueError: file and line).

    A last line without its end is left out: a run is writing it, or a full disk has cut it. `form`
    is the dataclass of what each line must have.
    """
    text = path.read_bytes() if path.is_file() else b""
    contents = []
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        where = f"{path}:{number}"
        with error_context(where):
            content = parse_json(line)
        build(form, content, where, json=True)
        contents.append(content)
    return contents


def image_settings(folder: Path) -> tuple[Path, dict]:
    """Read preprocessor_config.json, or of transformers 5 its part of processor_config.json."""
    file = folder / "preprocessor_config.json"
    newer = folder / "processor_config.json"
    if file.is_file() or not newer.is_file():
        return file, read_json(file)
    settings = read_json(newer).get("image_processor")
    if not isinstance(settings, dict):
        raise ValueError(f"{newer}: it needs image_processor, an object with patch_size")
    return newer, settings


def video_settings(folder: Path) -> tuple[Path, dict]:
    """Read what a folder says of videos, where transformers' video processor looks for it."""
    newer = folder / "processor_config.json"
    file = folder / "video_preprocessor_config.json"
    settings = read_json(newer).get("video_processor") if newer.is_file() else None
    if isinstance(settings, dict):
        return newer, settings
    return (file, read_json(file)) if file.is_file() else image_settings(folder)


def write_json(path: Path, content: dict):
    path.write_bytes(f"{json_text(content, indent=2)}\n".encode())


def save_tensors(tensors: dict[str, Tensor], path: Path):
    """Write a safetensors file with the umask's mode: save_file alone gives 0600."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})  # transformers 4 asks for the format
    path.chmod(mode)


def digest(parts: Iterable) -> str:
    """Hash texts, buffers and whole files, one after the other: 128 digits."""
    total = hashlib.blake2b()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as file:
                hashlib.file_digest(file, lambda: total)
        else:
            total.update(part.encode() if isinstance(part, str) else part)
    return total.hexdigest()


@contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """Give an empty folder, which replaces `folder` as a whole when the block has ended well.

    It is written as NAME.partial; the old one is renamed to NAME.replaced, where find_folder and
    the next save find it if a run is killed now, and the new one to NAME. The old one stays if it
    is no checkpoint (ValueError) or the disk is full or broken (OSError).
    """
    folder = Path(folder).resolve()  # of a link, the folder that it leads to
    new = Path(f"{folder}.partial")
    replaced = Path(f"{folder}.replaced")
    empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not (folder / "config.json").is_file() and not empty:
        raise ValueError(f"{folder}: no checkpoint (it has no config.json), not overwritten")
    remove = partial(shutil.rmtree, ignore_errors=True)
    try:
        remove(new)
        new.mkdir(parents=True)
        yield new
        for path in (*new.rglob("*"), new):  # a rename must not be on disk before what it names
            flush_file(path)
        if folder.exists():
            remove(replaced)
            folder.rename(replaced)
        new.rename(folder)
    except BaseException as error:
        remove(new)  # a full disk does not stay full
        if replaced.is_dir() and not folder.exists():
            replaced.rename(folder)
        if isinstance(error, OSError | SafetensorError):
            raise OSError(f"{folder}: not saved ({error}); what was there is untouched") from error
        raise
    flush_file(folder.parent)
    remove(replaced)


@contextmanager
def locked(folder: str | Path, world) -> Iterator[None]:
    """Make a run's folder and keep it for this run alone (ValueError on all ranks: it is taken)."""
    path = Path(folder) / ".lock"
    failure = None
    with ExitStack() as open_files:
        try:
            if world.is_main:
                path.parent.mkdir(parents=True, exist_ok=True)
                _lock(open_files.enter_context(path.open("ab")))
        except BlockingIOError:
            failure = f"another run is writing into {folder}; wait for it, or take another folder"
        except OSError as error:
            # a file system without locks
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                failure = f"{error}; is another run there?"
        failure = world.gather_objects(failure)[0]
        if failure:
            raise ValueError(f"output_dir: {failure}")
        yield


def _lock(file: IO):
    """Lock a file until it is closed (BlockingIOError: another process has)."""
    if find_spec("fcntl"):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:  # Windows
        import msvcrt

        # pyright reads what msvcrt has on Linux: nothing
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]


def flush_file(path: Path):
    """Wait until a file is on disk; of a folder its list of names, which makes a rename last."""
    is_folder = path.is_dir()
    if is_folder and not hasattr(os, "O_DIRECTORY"):
        return  # Windows opens no folder
    # Windows flushes no file that was opened to read
    handle = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(handle)
    except OSError as error:
        # FUSE and CIFS do not flush folders
        unsupported = error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
        if not (is_folder and unsupported):
            raise
    finally:
        os.close(handle)
