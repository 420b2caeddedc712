"""Lock the output folder and other outputs against other processes."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO
from uuid import uuid4

from minivlmrl.errors import UserError

LOCK = ".minivlmrl.lock"
NO_LOCKS = errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS  # error codes if the file system has no locks


def open_locked(path: Path, busy: str) -> IO[bytes]:
    """Open a file for appending, and lock it until it is closed; a link is replaced by a new file.

    Raises:
        UserError: with the message `busy`, if another process has the lock.
    """
    if path.is_symlink():
        path.unlink()
    file = path.open("a+b")
    try:
        lock_file(file)
    except BlockingIOError as error:
        file.close()
        raise UserError(busy) from error
    except OSError as error:
        if error.errno not in NO_LOCKS:  # on a file system without locks, go on unlocked
            raise
    return file


def lock_file(file: IO):
    """Lock an open file until it is closed.

    Raises:
        BlockingIOError: another process has the lock.
    """
    if find_spec("fcntl"):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    try:
        # pyright on Linux does not know functions in msvcrt
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
    except OSError as error:  # if the lock is taken, msvcrt raises PermissionError or EDEADLK
        raise BlockingIOError(*error.args) from error


@contextmanager
def drafted(path: Path, busy: str) -> Iterator[IO[bytes]]:
    """Yield a locked file, path.partial, which replaces the file `path` if the `with` block succeeds.

    Raises:
        UserError: with the message `busy`, if another process is writing the file.
    """
    draft = path.with_name(f"{path.name}.partial")
    with open_locked(draft, busy) as file:
        file.truncate(0)
        yield file
    draft.replace(path)


@contextmanager
def locked(folder: str | Path, world) -> Iterator[None]:
    """Create and lock the output folder (file LOCK), and check that all ranks see it.

    Raises:
        UserError: on all ranks, if another run has locked the folder, or a rank cannot see it.
    """
    path = Path(folder) / LOCK
    with ExitStack() as closing:

        def lock() -> str:
            path.parent.mkdir(parents=True, exist_ok=True)
            busy = (
                f"output_dir: another run is writing into {folder}. Wait until that run ends, or choose another folder."
            )
            file = closing.enter_context(open_locked(path, busy))
            if world.size == 1:
                return ""
            token = uuid4().hex
            file.truncate(0)
            file.write(token.encode())
            file.flush()
            return token

        token = world.compute_on_rank_zero(lock)
        sees = world.gather_objects(not token or (path.is_file() and path.read_text() == token))
        if not all(sees):
            raise UserError(
                f"output_dir: rank {sees.index(False)} cannot see the folder {folder} of rank 0. All hosts must share "
                "this folder; set output_dir to an absolute path on a shared file system."
            )
        yield
