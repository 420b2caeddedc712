"""Run a program, and end it with all its processes when the process that started this script ends.

    python end_with_parent.py PROGRAM ARGUMENT ...      # started with a pipe as standard input

The parent may end in any way, also by SIGKILL or os._exit, in which Python runs no cleanup. The operating system then
closes the parent's end of the pipe, so that reading from standard input ends here. All processes are also killed when
PROGRAM itself ends: Chromium goes on without chromedriver, for example. miniwob.py starts its browser in this way.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # Linux: orphaned descendants become children of this process


def main(command: list[str]) -> int:
    """Run a command; return its exit status."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A separate session, so that Ctrl+C in the terminal reaches the parent first, which may still use the program.
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: program.kill())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait_for_parent, args=(program,), daemon=True).start()
    status = program.wait()
    end_descendants(program.pid)
    return status


def wait_for_parent(program: subprocess.Popen) -> None:
    """Read from standard input until the parent has ended, and then kill the program."""
    while sys.stdin.buffer.read(1):
        pass
    program.kill()


def end_descendants(group: int) -> None:
    """Kill the program's process group and, on Linux, also descendants that left the group."""
    with suppress(ProcessLookupError):  # all processes in the group have ended
        os.killpg(group, signal.SIGKILL)
    if sys.platform != "linux":
        return
    while children := child_processes(os.getpid()):
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # the ended process's children become children of this process


def child_processes(parent: int) -> list[int]:
    """Return the ids of a process's children; Linux lists all processes with their parents in /proc."""
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, _, fields = path.read_text().rpartition(")")  # the name before may contain spaces
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process ended while the files were listed
        if int(fields.split()[1]) == parent:
            children.append(int(path.parent.name))
    return children


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
