"""Lock the output folder, so that no other run writes to it."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

from minivlmrl.errors import UserError
from minivlmrl.kernels.file_lock import lock_file

NO_LOCKS = errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS  # error codes if the file system has no locks


@contextmanager
def locked(folder: str | Path, world) -> Iterator[None]:
    """Create and lock the output folder (file .lock), and check that all ranks see it.

    Raises:
        UserError: on all ranks, if another run has locked the folder, or a rank cannot see it.
    """
    path = Path(folder) / ".lock"
    with ExitStack() as closing:

        def lock() -> str:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = closing.enter_context(path.open("a+b"))
            try:
                lock_file(file, wait=False)
            except BlockingIOError as error:
                raise UserError(
                    f"output_dir: another run is writing into {folder}. Wait until that run ends, or "
                    "choose another folder."
                ) from error
            except OSError as error:
                if error.errno not in NO_LOCKS:  # a file system without locks cannot detect other runs
                    raise
            if world.size == 1:
                return ""
            token = uuid4().hex
            file.truncate(0)
            file.write(token.encode())
            file.flush()
            return token

        token = world.compute_on_rank_zero(lock, f"lock {folder}")
        sees = world.gather_objects(not token or (path.is_file() and path.read_text() == token))
        if not all(sees):
            raise UserError(
                f"output_dir: rank {sees.index(False)} cannot see the folder {folder} of rank 0. All hosts must share "
                "this folder; set output_dir to an absolute path on a shared file system."
            )
        yield
