"""File locks: one process at a time checks the kernels or writes into a run folder."""

from importlib.util import find_spec
from typing import IO


def lock_file(file: IO, wait: bool) -> None:
    """Lock an open file until it is closed.

    Args:
        wait: whether to wait for other processes. On Windows, wait=True does not lock the file.
    Raises:
        BlockingIOError: another process has the lock, and `wait` is False.
    """
    if find_spec("fcntl"):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif not wait:
        import msvcrt

        try:
            # pyright on Linux does not know msvcrt's functions
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
        except OSError as error:  # msvcrt raises PermissionError, or EDEADLK if the lock is taken
            raise BlockingIOError(*error.args) from error
