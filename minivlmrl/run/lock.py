"""Lock a run's folder, so that no other run writes into it."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO
from uuid import uuid4


@contextmanager
def locked(folder: str | Path, world) -> Iterator[None]:
    """Create a run's folder and lock the folder, so that no other run writes into it.

    Raises:
        ValueError: another run holds the lock, or not all ranks see the folder. The error is raised
            on all ranks.
    """
    path = Path(folder) / ".lock"
    failure = None
    with ExitStack() as open_files:
        try:
            if world.is_main:
                path.parent.mkdir(parents=True, exist_ok=True)
                _lock(open_files.enter_context(path.open("ab")))
        except BlockingIOError:
            failure = (
                f"another run is writing into {folder}. Wait until that run ends, or choose "
                "another folder."
            )
        except OSError as error:
            # a file system without locks is accepted, although other runs are not detected there
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                failure = (
                    f"{folder} cannot be written ({error}). {_remedy(error)}, or choose another "
                    "folder with --output_dir."
                )
        failure = world.gather_objects(failure)[0]
        if failure:
            raise ValueError(f"output_dir: {failure}")
        if world.size > 1:
            check_shared(path.parent, world)
        yield


def _remedy(error: OSError) -> str:
    """Return the beginning of a sentence about what to do if a folder cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space on the disk"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "A file has the name of a folder of this path; move the file"
    return "Change the permissions of the folder"


def check_shared(folder: Path, world):
    """Raise ValueError on all ranks if a rank does not see rank 0's folder.

    Otherwise hosts with their own folders would train to the end, and write checkpoints of which
    each host has only a part.
    """
    # a new name, because an earlier run's file may be in all hosts' folders
    marker = folder / world.gather_objects(f".shared-{uuid4().hex}")[0]
    if world.is_main:
        marker.touch()
    world.barrier()
    sees_folder = world.gather_objects(marker.is_file())
    if world.is_main:
        marker.unlink()
    blind = [str(rank) for rank, sees in enumerate(sees_folder) if not sees]
    if blind:
        raise ValueError(
            f"output_dir: {'rank' if len(blind) == 1 else 'ranks'} {', '.join(blind)} cannot see the "
            f"folder {folder} of rank 0. All hosts must share this folder; set output_dir to an "
            "absolute path on a shared file system."
        )


def _lock(file: IO):
    """Lock a file until it is closed; raise BlockingIOError if another process holds the lock."""
    if find_spec("fcntl"):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:  # Windows
        import msvcrt

        # ignored, because on Linux pyright does not find any functions in msvcrt
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
