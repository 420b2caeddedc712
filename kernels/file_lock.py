"""Lock a file, so that only one process at a time checks the kernels, or writes into a run's folder."""

from importlib.util import find_spec
from typing import IO


def lock_file(file: IO, wait: bool) -> None:
    """Lock an open file until the file is closed.

    Args:
        wait: whether to wait until no other process has locked the file. On Windows, the function never waits.

    Raises:
        BlockingIOError: another process has locked the file, and `wait` is False.
    """
    if find_spec("fcntl"):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif not wait:
        import msvcrt

        try:
            # pyright's error is ignored, because pyright on Linux does not find the functions in msvcrt
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
        except OSError as error:  # PermissionError or EDEADLK
            raise BlockingIOError(*error.args) from error
