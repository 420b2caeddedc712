"""A folder is replaced as a whole: whatever happens meanwhile, the old one or the new one is on disk."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """Give an empty folder to write into, which takes the place of `folder` when the block has ended well.

    At every moment at least one whole checkpoint is on disk: the new one is written and flushed as NAME.partial; the
    old one is renamed to NAME.replaced and the new one to NAME; the old one is deleted. If a run is killed between the
    two renames, find_folder and the next save find the old one under NAME.replaced.

    Raises:
        ValueError: `folder` holds something else than a checkpoint, which would be lost.
        OSError: the disk is full or broken. The checkpoint that was there before stays.
    """
    folder = Path(folder).resolve()  # of a link, the folder that it leads to
    new, replaced = beside(folder, "partial"), beside(folder, "replaced")
    empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not (folder / "config.json").is_file() and not empty:
        raise ValueError(f"{folder}: this is not a checkpoint (it has no config.json) and is not overwritten")
    if replaced.is_dir() and not folder.exists():
        replaced.rename(folder)
    try:
        if new.exists():
            shutil.rmtree(new)
        new.mkdir(parents=True)
        yield new
        for path in (*new.rglob("*"), new):  # a rename must not be on disk before what it names
            flush_file(path)
        if replaced.exists():
            shutil.rmtree(replaced)
        if folder.exists():
            folder.rename(replaced)
        new.rename(folder)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)  # a full disk does not stay full
        if replaced.is_dir() and not folder.exists():
            replaced.rename(folder)
        if isinstance(error, OSError | SafetensorError):
            raise OSError(f"{folder}: not saved ({error}); what was there before is untouched") from error
        raise
    flush_file(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def beside(folder: Path, suffix: str) -> Path:
    """Name a folder in the same parent."""
    return folder.with_name(f"{folder.name}.{suffix}")


def flush_file(path: Path):
    """Wait until a file is on disk; of a folder its list of names, which makes a rename last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
