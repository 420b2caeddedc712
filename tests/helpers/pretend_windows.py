"""Make this Python lack and refuse what Windows does, for code that is imported from now on.

Path names stay ours. With LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 Python does not begin with UTF-8 either.
"""

import builtins
import errno
import fcntl
import io
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace


def refuse(number: int):
    raise OSError(number, os.strerror(number))


def in_use(path) -> bool:
    """Whether this process has a file open, or in memory, that is `path` or in it."""
    named = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    named += [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text("utf-8").splitlines()]
    return any(f"{name}/".startswith(f"{os.path.abspath(path)}/") for name in named)


def pretend():
    """No fcntl, resource, timers and most signals, no handle of a folder, no flush of what was opened to read.

    No rename onto a file or of one in use, a drive for each folder, and lines of text that end with two characters.
    """
    opened, synced, renamed, text = os.open, os.fsync, os.rename, io.open

    def open_handle(path, flags, *more, **options):
        is_folder = os.path.isdir(path) and not options  # shutil's rmtree is another on Windows
        return refuse(errno.EACCES) if is_folder else opened(path, flags, *more, **options)

    def fsync(handle):
        read_only = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        return refuse(errno.EBADF) if read_only else synced(handle)

    def rename(source, target):
        return refuse(errno.EEXIST) if os.path.exists(target) or in_use(source) else renamed(source, target)

    def open_text(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **options):
        newline = newline if {*"br"} & {*mode} or newline is not None else "\r\n"
        return text(file, mode, buffering, encoding, errors, newline, **options)

    def locking(handle, *_):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)

    os.open, os.fsync, os.rename, io.open, builtins.open = open_handle, fsync, rename, open_text, open_text
    os.path.relpath = lambda path: refuse(errno.EINVAL)
    sys.modules |= {"fcntl": None, "resource": None, "msvcrt": SimpleNamespace(locking=locking, LK_NBLCK=2)}
    for module, name in ((signal, "SIGUSR1"), (signal, "SIGHUP"), (signal, "SIGALRM"), (os, "O_DIRECTORY")):
        delattr(module, name)
